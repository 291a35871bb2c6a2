"""Tables of layer reuse between models (DroidSpeak), from the results of `benchmarks/reuse.py`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from choreograph.lab.evaluation.report import format_estimate
from choreograph.lab.evaluation.statistics import ratio

from .reuse import RATE_FACTORS
from .tables import table

Result = Mapping[str, Any]  # of the benchmark, as its JSON file holds it
DATASET_NAMES = {
    "hotpotqa": "HotpotQA",
    "2wikimqa": "2WikiMQA",
    "musique": "MuSiQue",
    "nq": "ten passages",
    "needed": "needed",
}
METRIC_NAMES = {"likelihood": "known answers", "agreement": "its own answers"}


@table("reuse-profile", "reuse", provenance=False)
def profiles(reuse: Result) -> Any:
    """What a profile finds: how much full reuse loses, which layers matter, what is picked."""
    lines = []
    for title, run in reuse["runs"].items():
        result = run.get("profile")
        for data in result["inputs"] if result else ():
            lines.append(
                [
                    title,
                    DATASET_NAMES[data],
                    str(result["inputs"][data]),
                    METRIC_NAMES[result.get("metric", "likelihood")],
                    f"{result['own'][data]:.3f}",
                    format_estimate(result["reused"][data], places=3),
                    ", ".join(map(str, result["critical"][data])) or "none",
                ]
            )
    head = "pair, model | data | questions | likelihood of | log-likelihood, own | lost by full reuse | critical layers"
    return head, lines


@table("reuse-quality", "reuse")
def quality(reuse: Result) -> Any:
    lines = []
    for title, run in reuse["runs"].items():
        result = run.get("quality")
        sets = [(DATASET_NAMES[data], one) for data, one in result["data"].items()] if result else []
        if "pooled" in (result or {}) and len(sets) > 1:
            sets.append(("all", result["pooled"]))
        for data, one in sets:
            n = str(one["own"]["n"])
            f1 = [format_estimate(one[how], 100) for how in ("sent", "own", "partial", "reused")]
            points = [format_estimate(one[how], sign=True) for how in ("partial loss", "reused loss")]
            lines.append([title, data, f"{result['pattern']} ({100 * result['share']:.0f}%)", *f1, *points, n])
    head = "pair, model | data | layers computed | sender F1 | receiver F1 | partial | all reused"
    return f"{head} | partial loses | full reuse loses | n", lines


@table("reuse-times", "reuse", provenance=False)
def times(reuse: Result) -> Any:
    lines = []
    for title, run in reuse["runs"].items():
        for part, what in (("latency", "prefill"), ("remote", "first token, fetched")):
            result = run.get(part)
            for length, one in result["lengths"].items() if result else ():
                medians = [f"{1e3 * float(np.median(one[way])):,.0f}" for way in ("full", "partial")]
                cells = [format_estimate(ratio(one["full"], one["partial"]), places=2), *loading_cells(one)]
                lines.append([title, what, f"{int(length):,}", *medians, *cells, result["pattern"]])
    columns = "all layers, ms | partial, ms | ratio | of it loading, % | of that hidden, % | layers computed"
    return f"pair, model | what | tokens | {columns}", lines


def loading_cells(times: Mapping[str, Any]) -> tuple[str, str]:
    """Return the share of the time to the first token in which bytes arrive, and the share of that below computation."""
    if "loading" not in times:
        return "", ""
    loading = format_estimate(ratio(times["loading"], times["partial"]), 100, places=0)
    return loading, format_estimate(times["hidden"], 100, places=0)


@table("reuse-transfer", "reuse", provenance=False)
def transfer(reuse: Result) -> Any:
    """Figure 17: what is picked from one data set's profile, on another data set."""
    lines = []
    for title, run in reuse["runs"].items():
        result = run.get("profile")
        for data, points in result["transfer"].items() if result else ():
            worst = max(points, key=lambda point: point[2] - point[1])
            mean = float(np.mean([there - here for _, here, there in points]))
            lines.append(
                [title, DATASET_NAMES[data], str(len(points)), f"{mean:+.3f}", f"{worst[2] - worst[1]:+.3f}", worst[0]]
            )
    return "pair, model | used on | points | lost more, mean | lost more, most | at", lines


@table("reuse-stream", "reuse", provenance=False)
def stream(reuse: Result) -> Any:
    """The rates, and what the requests of each waited. A knee is known from one rate that was tried to the next."""
    lines = []
    for title, run in reuse["runs"].items():
        for result, where in ((run.get("stream"), ""), (run.get("linked"), "linked, ")):
            for way, points in result["rates"].items() if result else ():
                cells = [f"{1e3 * one['ttft']:,.0f} / {1e3 * one['e2e']:,.0f}" for one in points]
                most = points[0]["rate"] / RATE_FACTORS[0]
                later = "1" if way == "recompute" else knee_ratio(result, way)
                lines.append([title, where + way, f"{most:.2f}", *cells, _between(*_knee(result, way)), later])
    return ["pair, model", "way", "full prefills, 1/s", *(f"{f}x" for f in RATE_FACTORS), "knee, 1/s", "later"], lines


def knee_ratio(stream: Mapping[str, Any], way: str) -> str:
    """Return the range of the rate at the knee of a way over that of full prefills."""
    (low, high), (least, last) = (_knee(stream, one) for one in (way, "recompute"))
    return _between(low / last if last else 0.0, high and high / least)


def _knee(result: Mapping[str, Any], strategy: str) -> tuple[float, float | None]:
    """The highest rate that was below it, and the next one that was tried, if any was."""
    rates, low = [point["rate"] for point in result["rates"][strategy]], result["knee"][strategy]
    return low, next((rate for rate in rates if rate > low), None)


def _between(low: float, high: float | None) -> str:
    return f"{low:.2f} or more" if high is None else f"{low:.2f} to {high:.2f}"


@table("reuse-choice", "reuse", provenance=False)
def choice(reuse: Result) -> Any:
    """Which patterns were chosen as the rate rose, in requests of each; and the share of the time that loads took."""
    lines = []
    for title, run in reuse["runs"].items():
        for part, where in (("stream", ""), ("linked", "linked, ")):
            for way, points in run.get(part, {"rates": {}})["rates"].items():
                told = [one["patterns"] for one in points] if way.startswith("within") else []
                for pattern in dict.fromkeys(name for one in told for name in one):
                    lines.append([title, where + way, pattern, *(str(one.get(pattern, 0)) for one in told)])
                if part == "linked" and way != "recompute":
                    shares = [f"{100 * one['loading']:.0f}%" for one in points]
                    lines.append([title, where + way, "share of loading", *shares])
    return ["pair, model", "objective", "layers computed", *(f"{f}x" for f in RATE_FACTORS)], lines


@table("reuse-memory", "reuse", provenance=False)
def memory(reuse: Result) -> Any:
    lines = []
    for title, run in reuse["runs"].items():
        if result := run.get("memory"):
            sizes = [f"{result[what] / 2**20:.1f}" for what in ("bytes of one", "inputs")]
            formula = result.get("formula", {})
            ratios = [
                f"{value:.2f}" + (f" ({formula[count]:.2f})" if formula else "")
                for count, value in result["ratio"].items()
            ]
            # results without a formula hold what it gives
            lines.append([title, "allocated (formula)" if formula else "formula", *sizes, *ratios])
    return "pair, model | ratio | one model, MiB | inputs kept, MiB | 2 models | 3 | 4 | 8", lines
