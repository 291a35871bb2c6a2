"""The renderer of all generated tables: results, cells, Markdown, and the marks on pages.

A table is a function of a benchmark's result, registered with `table`, or a Markdown template in `templates/` whose
cells name the figures: `{estimate ; file > key > key ; scale ; places}`.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from choreograph.lab.evaluation.report import format_estimate

from .ages import age_note
from .common import RESULTS, SIMULATED

TEMPLATES = Path(__file__).parent / "templates"
MARK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
NOT_YET = "not measured yet"

Lines = Iterable[Sequence[str]]
TABLES: dict[str, Callable[[], str]] = {}  # by the name in the mark on a page


def record(name: str) -> dict[str, Any]:
    """Return the last result of a benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def by_measure(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the rows of a result by their measure; one without a peer before those with one."""
    return {row["measure"]: row for row in sorted(result["rows"], key=lambda row: row["peer"] is None)}


def estimates(source: Mapping[str, Any], keys: Iterable[str], scale: float = 1, places: int = 1) -> list[str]:
    """Return several estimates of one object as cells."""
    return [format_estimate(source[key], scale, places=places) for key in keys]


def format_row(row: Mapping[str, Any], scale: float = 1, *, places: int = 1, sign: bool = False) -> str:
    """Return an estimate, without an interval that says nothing: of one or two samples, or without width."""
    if row.get("n", 3) <= 2 or row["low"] == row["high"]:
        return f"{row['value'] * scale:{'+' if sign else ''}.{places}f}"
    return format_estimate(row, scale, places=places, sign=sign)


def without_interval(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an estimate whose interval would be false, as that of a simulation."""
    return {**row, "low": row["value"], "high": row["value"]}


def markdown(head: str | Iterable[str], lines: Lines, *, rule: str = " --- ") -> str:
    """Return a table in Markdown.

    Args:
        head: the names of the columns, also as they stand in Markdown: "workflow | n".
        rule: the cells between head and lines.
    """
    head = head.split(" | ") if isinstance(head, str) else list(head)
    rows = [head, *map(list, lines)]
    assert all(len(row) == len(head) for row in rows), head
    first, *others = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([first, "|" + "|".join([rule] * len(head)) + "|", *others])


def format_provenance(parts: Iterable[Mapping[str, str]]) -> str:
    """Return where and when parts were measured, each once."""
    return "; ".join(dict.fromkeys(f"commit {part['commit']}, {part['date']}, {part['hardware']}" for part in parts))


def provenance_note(name: str) -> str:
    """Return where the figures of a benchmark come from."""
    result = record(name)
    runs = result.get("runs", {})
    parts = [row["made"] for row in result["rows"]] or list(result.get("summaries", runs).values()) or [result]
    models = dict.fromkeys(run["model"] for run in runs.values() if "model" in run) or [result["model"]]
    age = age_note(name, parts)
    return f"`benchmarks/{name}.py`, {format_provenance(parts)}; {', '.join(models)}{age and f'; {age}'}."


def table(name: str, benchmark: str, *, provenance: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of a result that returns head and lines, and maybe a note.

    Args:
        provenance: end the note with where the figures come from.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def render() -> str:
            head, lines, *notes = function(record(benchmark))
            if not (lines := list(lines)):
                return "Not measured yet."
            note = "".join(notes) + (provenance_note(benchmark) if provenance else "")
            return markdown(head, lines) + (f"\n\n{note}" if note else "")

        TABLES[name] = render
        return function

    return register


def fill_marks(text: str, render: Callable[[str], str]) -> str:
    """Return the text of a page with the table of every mark generated again."""
    return MARK.sub(lambda match: f"{match[1]}{render(match['name'])}\n{match[3]}", text)


def fill_tables(text: str) -> str:
    """Return the text of a page with every registered table generated again."""
    return fill_marks(text, _render)


def _render(name: str) -> str:
    try:
        return TABLES[name]()
    except (FileNotFoundError, KeyError) as missing:  # a benchmark, or a part of one, that nobody has run yet
        return f"Not measured yet ({missing})." if isinstance(missing, KeyError) else "Not measured yet."


# -- templates --------------------------------------------------------------------------------------------------


def look_up(path: str) -> Any:
    """Return what is at `file > key > key` of the results; `rows` are looked up by measure."""
    name, *keys = path.split(" > ")
    value: Any = record(name)
    for key in keys:
        value = by_measure(value) if key == "rows" else value[key]
    return value


def estimate_cell(path: str, scale: str = "1", places: str = "1", sign: str = "") -> str:
    """Return an estimate with its interval; "sign": also with a plus."""
    return format_row(look_up(path), float(scale), places=int(places), sign=bool(sign))


def number_cell(path: str, form: str = "") -> str:
    """Return a number in a format of Python."""
    return format(look_up(path), form)


def ratio_cell(benchmark: str, places: str, *measures: str) -> str:
    """Return the ratios of some rows of a benchmark; those of a simulation have no interval."""
    result = record(benchmark)
    rows, exact = by_measure(result), result["model"] == SIMULATED
    shown = (without_interval(rows[measure]) if exact else rows[measure] for measure in measures)
    return " / ".join(format_row(row, places=int(places)) + "x" for row in shown)


def age_cell(benchmark: str, *keys: str) -> str:
    """Return "; measured before ..." if a row, or a part of a run, is older than the code that it measures."""
    if len(keys) == 1:
        made, part = by_measure(record(benchmark))[keys[0]]["made"], None
    else:
        run, part = keys
        made = record(benchmark)["runs"][run][part]
    note = age_note(benchmark, [made], part)
    return note and f"; {note}"


CELLS: dict[str, Callable[..., str]] = {
    "age": age_cell,
    "estimate": estimate_cell,
    "number": number_cell,
    "ratio": ratio_cell,
}


def fill_template(name: str, cells: Mapping[str, Callable[..., str]]) -> str:
    """Return a template with its figures; a cell with one that is missing is not measured yet.

    Args:
        cells: functions of the template, by name.
    """

    def fill(cell: str) -> str:
        def call(match: re.Match[str]) -> str:
            function, *arguments = match[1].split(" ; ")
            return cells[function](*arguments)

        try:
            return re.sub(r"\{(.*?)\}", call, cell)
        except (FileNotFoundError, KeyError):
            return NOT_YET

    head, _, *lines = (TEMPLATES / f"{name}.md").read_text().splitlines()
    split = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in (head, *lines)]
    return markdown(split[0], ([fill(cell) for cell in line] for line in split[1:]))
