"""Writes the tables of docs/performance.md from the JSON results, between its marks; the words are by hand."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from ..common import RESULTS, Row, last
from . import table
from .lines import PARTS
from .predictions import PRESETS

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
MARK = re.compile(r"(<!-- predictions: (?P<name>\w+) -->\n).*?(<!-- /predictions -->)", re.DOTALL)


def keep(name: str, predicted: Mapping[str, float]) -> None:
    """Saves what is expected of a device, and fills the page."""
    file = RESULTS / "gpu_predictions.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    known[name] = {measure: float(f"{value:.4g}") for measure, value in predicted.items()}
    file.write_text(json.dumps(known, indent=1) + "\n")
    PAGE.write_text(filled(PAGE.read_text()))


def filled(text: str) -> str:
    known = json.loads((RESULTS / "gpu_predictions.json").read_text())
    return MARK.sub(lambda m: f"{m[1]}{_table(m['name'], known[m['name']])}\n{m[3]}", text)


def _table(name: str, predicted: Mapping[str, float]) -> str:
    """Measured figures beside predictions for the device that they come from."""
    rows = [Row(**row) for row in last("gpu").get("rows", [])]
    mine = [row for row in rows if name.upper() in (row.made or {}).get("hardware", "").upper()]
    lines = [table.HEAD, ["---"] * len(table.HEAD), *table.cells(mine, predicted, {}, PARTS)]
    made = "; ".join(dict.fromkeys(f"commit {r.made['commit']}, {r.made['date']}" for r in mine if r.made))
    note = f"\n\nPredicted for {PRESETS[name].name}: `python -m benchmarks.gpu --predict {name}`."
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + note + (f" Measured: {made}." if made else "")
