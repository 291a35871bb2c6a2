"""Write the GPU tables of `benchmarks/results/gpu.md` and `docs/performance.md` from the JSON results."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from ..common import RESULTS, last_result, row_from_record
from ..tables import fill_marks, format_provenance, markdown
from . import table
from .lines import PARTS, TITLES
from .predictions import PRESETS

PAGES = (Path(__file__).parents[1] / "results" / "gpu.md", Path(__file__).parents[2] / "docs" / "performance.md")
SUMMARY_MEASURES = (  # rows of docs/performance.md
    "decode step, batch 1",
    "decode step, batch 1: share of the limit",
    "decode step, batch 8",
    "decode step, batch 8: share of the limit",
    "decode step, batch 8, shared",
    "decode step, batch 32: a plain loop over it",
    "first token, moved over home",
    "triton, decode of 1: SDPA over it",
    "triton, decode of 8, shared: SDPA over it",
    "triton, prefill: SDPA over it",
    "Prompt Cache: no reuse over modules",
    "DroidSpeak: prefill, all layers over a quarter",
    "KVFlow: over device only",
    "KVFlow: over reactive loading",
    "Tree of Thoughts: TTFT",
    "Tree of Thoughts: end to end",
    "iterative debate: TTFT",
    "iterative debate: end to end",
    "parallel debate: TTFT",
    "parallel debate: end to end",
    "Tree of Thoughts, large: end to end",
)


def save_predictions(name: str, predictions: Mapping[str, Mapping[str, float]]) -> None:
    """Saves what is expected of a device under every assumption, and fills the page."""
    file = RESULTS / "gpu_predictions.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    known[name] = {
        title: {measure: float(f"{value:.4g}") for measure, value in one.items()} for title, one in predictions.items()
    }
    file.write_text(json.dumps(known, indent=1) + "\n")
    fill()


def fill() -> None:
    for page in PAGES:
        page.write_text(fill_tables(page.read_text()))


def fill_tables(text: str) -> str:
    known = json.loads((RESULTS / "gpu_predictions.json").read_text())

    def render(mark: str) -> str:
        name, _, other = mark.partition("_")
        if other == "summary":
            return _table(name, known[name], SUMMARY_MEASURES)
        apart = {"check": _check, "binaries": _binaries}.get(name)
        return apart() if apart else _alternatives_table(known[name]) if other else _table(name, known[name])

    return fill_marks(text, render)


def _check() -> str:
    """Ratios on the CPU, as steps were counted and as they were measured."""
    result = last_result("gpu_check")
    if not result:
        return "Not measured yet."
    rows = [row_from_record(row) for row in result["rows"]]
    lines = [
        (r.measure, f"{r.value:.2f} ({r.low:.2f}, {r.high:.2f})", f"{r.predicted:.2f}") for r in rows if r.predicted
    ]
    places = {
        apart: format_provenance(row.provenance for row in rows if bool(row.predicted) == apart and row.provenance)
        for apart in (True, False)
    }
    told = ", ".join(f"{r.value:.2f} {r.unit} with {r.measure.partition(', ')[2]}" for r in rows if not r.predicted)
    table = markdown("measure | measured | predicted", lines)
    return (
        f"{table}\n\n`python -m benchmarks.gpu --check`, {places[True]}; {result['model']}. "
        f"What Python takes of a decode step, over graphs that compute nothing: {told}. "
        f"`python -m benchmarks.gpu --host`, {places[False]}."
    )


def _binaries() -> str:
    """Of every shape and type, the least that any step has on any of the GPUs."""
    result = last_result("gpu_binaries")
    if not result:
        return "Not compiled yet."
    alike: dict[tuple[str, str], list[Mapping[str, int]]] = {}
    for one in result["found"]:
        alike.setdefault((one["model"], one["dtype"]), []).append(one)
    lines = []
    for name, some in alike.items():
        worst = (max(one["spilled"] for one in some), max(one["shared"] for one in some) // 1024)
        hopper = [one for one in some if one["arch"] == 90]
        cells = [f"{one['registers']} / {one['spilled']} / {one['programs']}" for one in (hopper[0], hopper[-1])]
        lines.append((*name, *cells, *map(str, worst)))
    head = "shape | type | sm_90, decode | sm_90, most rows | most spilled | most shared, KiB"
    archs = ", ".join(f"sm_{arch}" for arch in sorted({one["arch"] for one in result["found"]}))
    made = f"commit {result['commit']}, {result['date']}, Triton {result['triton']}"
    return f"{markdown(head, lines)}\n\nCompiled for {archs}: `python -m benchmarks.gpu --binaries`, {made}."


def _alternatives_table(predictions: Mapping[str, Mapping[str, float]]) -> str:
    """What depends on what is assumed."""
    (_, first), *others = predictions.items()
    moving = [name for name in first if any(abs(one[name] / first[name] - 1) > 0.02 for _, one in others)]
    lines = ((name, *(f"{one[name]:.3g}" for one in predictions.values())) for name in moving)
    return markdown(("measure", *predictions), lines)


def _table(name: str, predictions: Mapping[str, Mapping[str, float]], measures: Collection[str] = ()) -> str:
    """Measured figures beside predictions for the device that they come from; all of them without `measures`."""
    predicted = next(iter(predictions.values()))
    rows = [row_from_record(row) for row in last_result("gpu").get("rows", [])]
    mine = [row for row in rows if PRESETS[name].card in (row.provenance or {}).get("hardware", "")]
    made = "; ".join(
        dict.fromkeys(f"commit {r.provenance['commit']}, {r.provenance['date']}" for r in mine if r.provenance)
    )
    note = f"\n\nPredicted for {PRESETS[name].name}: `python -m benchmarks.gpu --predict {name}`."
    cells = [line for line in table.cells(mine, predicted, {}, PARTS) if not measures or line[0] in measures]
    # Workflows ran on two or three problems, and some figures are the same in each run: no interval.
    few, exact = tuple(TITLES.values()), {row.measure for row in mine if row.low == row.high}
    cells = [(a, b, "" if a.startswith(few) or a in exact else c, *d) for a, b, c, *d in cells]
    return markdown(table.HEAD, cells) + note + (f" Measured: {made}." if made else "")
