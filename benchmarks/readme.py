"""Write the measured tables of README.md and docs/benchmarks.md from the JSON results.

Which rows they show, and under what words, is in `templates/summary.csv` and `templates/benchmarks.csv`.
"""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

from .common import result_file
from .tables import TEMPLATES, markdown, record

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


def summary() -> str:
    """Return the short table of the README in Markdown."""
    lines = []
    for shown, _, rows in _shown("summary"):
        sides = [rows[shown[side], ""] if shown[side] else None for side in ("ours", "theirs")]
        absolute = ["" if side is None else f"{side['value']:,.4g} {side['unit']}" for side in sides]
        ratio = rows[shown["ratio"], shown["peer"]]
        span = f"{ratio['value']:.2f}x ({ratio['low']:.2f}, {ratio['high']:.2f})"
        lines.append([shown["what"], *absolute, span, ratio["made"]["hardware"]])
    return markdown("What | Ours | Peer | Ratio (95%) | Machine", lines, rule="---")


def table() -> str:
    """Return the full table in Markdown, from the results that exist."""
    lines = []
    for shown, result, rows in _shown("benchmarks"):
        row = rows.get((shown["measure"], shown["peer"]))
        if row is not None and row["unit"] in RATIOS:
            ratio = f"{row['value']:.2f} ({row['low']:.2f}, {row['high']:.2f})"
            machine = f"{row['made']['hardware']}, torch {result['torch']}"
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
