"""Write the measured tables of README.md and docs/benchmarks.md from the JSON results.

Which rows they show, and under what words, is in `templates/readme.md` and `templates/benchmarks.csv`. Cells of the first with two
numbers are time to first token / end to end.
"""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

from .ages import age_note
from .common import result_file
from .gpu.lines import TITLES
from .results_papers import cut_cell
from .tables import CELLS, TEMPLATES, by_measure, fill_template, format_row, look_up, markdown, record, without_interval

README = Path(__file__).parents[1] / "README.md"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured: python -m benchmarks.readme -->", "<!-- /measured -->"
RATIOS = ("x", "")  # units of what is a ratio, of times or of log-losses


def _shown(name: str) -> Iterator[tuple[dict[str, str], dict[str, object], Mapping[tuple[str, str], dict]]]:
    """Yield the rows of a template with the result of their benchmark, and its rows by (measure, peer)."""
    with (TEMPLATES / f"{name}.csv").open(newline="") as file:
        for shown in csv.DictReader(file):
            if result_file(shown["benchmark"]).exists():
                result = record(shown["benchmark"])
                yield shown, result, {(row["measure"], row["peer"] or ""): row for row in result["rows"]}


def over_cell(benchmark: str, above: str, below: str) -> str:
    """Return the ratio of two medians of one run, without an interval, since their pairs are not kept."""
    rows = by_measure(record(benchmark))
    return f"{rows[above]['value'] / rows[below]['value']:.2f}x"


def against_cell(benchmark: str, peer: str, measure: str) -> str:
    """Return the ratio of a measure to that of a peer."""
    row = next(row for row in record(benchmark)["rows"] if (row["measure"], row["peer"]) == (measure, peer))
    return format_row(row, places=2) + "x"


def machine_cell(benchmark: str, measure: str) -> str:
    """Return the hardware that a row was measured on."""
    return by_measure(record(benchmark))[measure]["made"]["hardware"]


def change_cell(path: str) -> str:
    """Return a difference in points, with its sign."""
    return format_row(look_up(path), 100, sign=True)


def right_cell(program: str) -> str:
    """Return how many questions over passages a program of `rules` answers right."""
    run = record("rules")["runs"]["documents, nq_oracle"]
    row = next(row for row in run["rows"] if row["program"] == program)
    return f"{row['right']['value'] * run['n']:.0f} of {run['n']}"


def answers_cell(key: str, side: str) -> str:
    """Return the F1 of a side of `retrieval` over that of no reuse."""
    run = record("retrieval")["quality"][key]
    rows = {row["side"]: row for row in run["rows"]}
    change = format_row(rows[side]["f1 over no reuse"], 100, sign=True)
    return f"{change} points of an F1 of {format_row(rows['no reuse']['f1'], 100)}, n = {run['n']}"


SUMMARY_CELLS = {
    **CELLS,
    "against": against_cell,
    "answers": answers_cell,
    "change": change_cell,
    "cut": cut_cell,
    "machine": machine_cell,
    "over": over_cell,
    "right": right_cell,
}


def summary() -> str:
    """Return the short table of the README in Markdown."""
    return fill_template("readme", SUMMARY_CELLS)


def table() -> str:
    """Return the full table in Markdown, from the results that exist."""
    lines = []
    for shown, result, rows in _shown("benchmarks"):
        row = rows.get((shown["measure"], shown["peer"]))
        if row is not None and row["unit"] in RATIOS:
            few = shown["benchmark"] == "gpu" and row["measure"].startswith(tuple(TITLES.values()))  # two or three runs
            ratio = format_row(without_interval(row) if few else row, places=2)
            age = age_note(shown["benchmark"], [row["made"]])
            machine = f"{row['made']['hardware']}, torch {result['torch']}{age and f'; {age}'}"
            lines.append([shown["what"], ratio, machine, f"`{shown['benchmark'].removesuffix('_avx2')}`"])
    return markdown("What | Ratio (95%) | Machine | `make bench NAME=`", lines, rule="---")


def main() -> None:
    for file, content in ((README, summary()), (PAGE, table())):
        before, _, rest = file.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        file.write_text(f"{before}{BEGIN}\n{content}\n{END}{after}")
        print(content)


if __name__ == "__main__":
    main()
