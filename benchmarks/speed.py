"""The papers' workflows, prefix mode against choreographed on the same tokens (Prompt Choreography, Table 5).

`make bench NAME=speed ARGS="--data math.jsonl"`: problems from any file that `choreograph bench` reads, by default
ten of our own. Traces and timings lie in `--out`, so that a run which was stopped goes on.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from scipy import stats

from choreograph.lab.evaluation import report as shown
from choreograph.lab.evaluation.splits import examples_for
from choreograph.lab.evaluation.statistics import Estimate
from choreograph.lab.workflows import conditions_of, find
from choreograph.sampling_params import SamplingParams
from choreograph.viz import speedup_over_tokens

from .common import FIGURES, Row, engine, estimate_row, last_result, merge_results, row_from_record, save

# must and aim for TTFT
WORKFLOWS = {"tree_of_thoughts": (3.5, 7), "debate_iterative": (2.0, 4), "debate_parallel": (6.2, 12)}
TITLES = {
    "tree_of_thoughts": "Tree of Thoughts",
    "debate_iterative": "iterative debate",
    "debate_parallel": "parallel debate",
}
OWN_FORMS = {"tree_of_thoughts": "short", "debate_iterative": "short", "debate_parallel": "guided"}


def order(title: str) -> tuple[bool, int]:
    """Sort titles as the workflows are listed, all in the papers' forms after all in ours."""
    workflow, comma, _ = title.partition(",")
    return bool(comma), list(TITLES.values()).index(workflow)


def correlation(x: Sequence[float], y: Sequence[float]) -> Estimate:
    """Return Pearson's r with its 95% interval and p."""
    result: Any = stats.pearsonr(x, y)
    low, high = result.confidence_interval(0.95)
    return Estimate(float(result.statistic), float(low), float(high), len(x), float(result.pvalue))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", default="examples/problems.jsonl")
    options.add_argument("--limit", type=int, default=30)
    options.add_argument("--max-tokens", type=int, default=256)
    options.add_argument("--out", type=Path, default=Path("out/speed"))
    options.add_argument("--only", nargs="*", default=list(WORKFLOWS), help="the others keep their last result")
    options.add_argument("--paper", action="store_true", help="the paper's form, in which verdicts and votes reason")
    given = options.parse_args()
    e = engine(tokens=65536)
    rows: list[Row] = []
    points, options_of = {}, {}
    for name in given.only:
        (must, aim), workflow = WORKFLOWS[name], find(name)
        title = f"{TITLES[name]}, the paper's form" if given.paper else TITLES[name]
        form = "paper" if given.paper else OWN_FORMS[name]
        report = shown.bench(
            e,
            Console(width=120),
            name,
            workflow,
            examples_for(workflow, given.data, limit=given.limit, seed=0, split="all"),
            given.out / (f"{name}-paper" if given.paper else name),
            conditions=conditions_of(workflow),
            options={"prompt": "plain", "form": form},
            sampling=SamplingParams(temperature=0.7, top_p=0.95, max_tokens=given.max_tokens),
            seed=0,
        )
        facts = {"TTFT, steps": {"required": must, "target": aim}, "end to end": {"required": 1.0, "target": 1.2}}
        for measure, estimate in report["ratios"]["choreographed"].items():
            rows.append(estimate_row(f"{title}: {measure}", estimate, "x", **facts.get(measure, {})))
        points[title] = report["points"]
        r = correlation(*zip(*report["points"], strict=True))
        rows.append(Row(f"{title}: correlation of speed-up and tokens", r.value, "", r.low, r.high))
        options_of[title] = {"n": report["n"], "max_tokens": given.max_tokens, "threads": torch.get_num_threads()}
    had = [
        row_from_record(r) for r in last_result("speed").get("rows", []) if r["measure"].partition(":")[0] not in points
    ]
    points = merge_results("speed", "points", points)
    points = {title: points[title] for title in sorted(points, key=order) if title.partition(",")[0] in TITLES.values()}
    rows = had + rows
    r_of = {r.measure.partition(":")[0]: r for r in rows if "correlation" in r.measure}
    labels = {title: f"{title}\nr = {r.value:.2f} ({r.low:.2f}, {r.high:.2f})" for title, r in r_of.items()}
    series = {labels.get(title, title): values for title, values in points.items()}
    speedup_over_tokens(series, FIGURES / "speed-over-tokens.svg")
    save("speed", rows, points=points, options=merge_results("speed", "options", options_of))


if __name__ == "__main__":
    main()
