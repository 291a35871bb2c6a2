"""Writes the tables of docs/performance.md from the JSON results, between its marks; the words are by hand."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from ..common import RESULTS, Row, last
from ..results_page import markdown, places_of
from . import table
from .lines import PARTS
from .predictions import PRESETS

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
MARK = re.compile(r"(<!-- table: (?P<name>\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def keep(name: str, every: Mapping[str, Mapping[str, float]]) -> None:
    """Saves what is expected of a device under every assumption, and fills the page."""
    file = RESULTS / "gpu_predictions.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    known[name] = {
        title: {measure: float(f"{value:.4g}") for measure, value in one.items()} for title, one in every.items()
    }
    file.write_text(json.dumps(known, indent=1) + "\n")
    fill()


def fill() -> None:
    PAGE.write_text(filled(PAGE.read_text()))


def filled(text: str) -> str:
    known = json.loads((RESULTS / "gpu_predictions.json").read_text())

    def table_of(match: re.Match[str]) -> str:
        name, _, other = match["name"].partition("_")
        apart = {"check": _check, "binaries": _binaries}.get(name)
        made = apart() if apart else _others(known[name]) if other else _table(name, known[name])
        return f"{match[1]}{made}\n{match[3]}"

    return MARK.sub(table_of, text)


def _check() -> str:
    """Ratios on the CPU, as steps were counted and as they were measured."""
    found = last("gpu_check")
    if not found:
        return "Not measured yet."
    rows = [Row(**row) for row in found["rows"]]
    lines = [
        (r.measure, f"{r.value:.2f} ({r.low:.2f}, {r.high:.2f})", f"{r.predicted:.2f}") for r in rows if r.predicted
    ]
    places = {
        apart: places_of(row.made for row in rows if bool(row.predicted) == apart and row.made)
        for apart in (True, False)
    }
    told = ", ".join(f"{r.value:.2f} {r.unit} with {r.measure.partition(', ')[2]}" for r in rows if not r.predicted)
    table = markdown(("measure", "measured", "predicted"), lines)
    return (
        f"{table}\n\n`python -m benchmarks.gpu --check`, {places[True]}; {found['model']}. "
        f"What Python takes of a decode step, over graphs that compute nothing: {told}. "
        f"`python -m benchmarks.gpu --host`, {places[False]}."
    )


def _binaries() -> str:
    """Of every shape and type, the least that any step has on any of the GPUs."""
    found = last("gpu_binaries")
    if not found:
        return "Not compiled yet."
    alike: dict[tuple[str, str], list[Mapping[str, int]]] = {}
    for one in found["found"]:
        alike.setdefault((one["model"], one["dtype"]), []).append(one)
    lines = []
    for name, some in alike.items():
        worst = (max(one["spilled"] for one in some), max(one["shared"] for one in some) // 1024)
        hopper = [one for one in some if one["arch"] == 90]
        cells = [f"{one['registers']} / {one['spilled']} / {one['programs']}" for one in (hopper[0], hopper[-1])]
        lines.append((*name, *cells, *map(str, worst)))
    head = ("shape", "type", "sm_90, decode", "sm_90, most rows", "most spilled", "most shared, KiB")
    archs = ", ".join(f"sm_{arch}" for arch in sorted({one["arch"] for one in found["found"]}))
    made = f"commit {found['commit']}, {found['date']}, Triton {found['triton']}"
    return f"{markdown(head, lines)}\n\nCompiled for {archs}: `python -m benchmarks.gpu --binaries`, {made}."


def _others(every: Mapping[str, Mapping[str, float]]) -> str:
    """What depends on what is assumed."""
    (_, first), *others = every.items()
    moving = [name for name in first if any(abs(one[name] / first[name] - 1) > 0.02 for _, one in others)]
    lines = [(name, *(f"{one[name]:.3g}" for one in every.values())) for name in moving]
    return markdown(("measure", *every), lines)


def _table(name: str, every: Mapping[str, Mapping[str, float]]) -> str:
    """Measured figures beside predictions for the device that they come from."""
    predicted = next(iter(every.values()))
    rows = [Row(**row) for row in last("gpu").get("rows", [])]
    mine = [row for row in rows if PRESETS[name].card in (row.made or {}).get("hardware", "")]
    made = "; ".join(dict.fromkeys(f"commit {r.made['commit']}, {r.made['date']}" for r in mine if r.made))
    note = f"\n\nPredicted for {PRESETS[name].name}: `python -m benchmarks.gpu --predict {name}`."
    return (
        markdown(table.HEAD, table.cells(mine, predicted, {}, PARTS)) + note + (f" Measured: {made}." if made else "")
    )
