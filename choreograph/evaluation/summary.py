"""Records into figures: per condition the scores, their paired differences from the baseline, and what went unread."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .data import Example
from .folder import Record
from .scores import MAIN, score
from .statistics import Estimate, difference, mean

Summary = dict[str, Any]


def summarize(examples: Sequence[Example], records: Mapping[str, Sequence[Record]], *, max_tokens: int) -> Summary:
    """JSON: n, the main score, and per condition all of it. The first condition is the one compared with."""
    scored = {name: [score(e, r) for e, r in zip(examples, some, strict=True)] for name, some in records.items()}
    baseline, found = next(iter(scored)), {}
    metrics = list(dict.fromkeys(k for scores in scored.values() for one in scores for k in one))
    for name, scores in scored.items():
        columns = {k: [one.get(k, 0.0) for one in scores] for k in metrics}
        found[name] = {
            "scores": {k: asdict(mean(v)) for k, v in columns.items()},
            "differences": {}
            if name == baseline
            else {k: asdict(difference(v, [one.get(k, 0.0) for one in scored[baseline]])) for k, v in columns.items()},
            **_counts(records[name], max_tokens),
        }
    return {"n": len(examples), "main": MAIN[examples[0].kind], "baseline": baseline, "conditions": found}


def _counts(records: Sequence[Record], max_tokens: int) -> dict[str, Any]:
    """Sums over records: what could not be parsed, what the limit of tokens cut off, what was computed. Messages with a
    shorter limit of their own are not cut: a number or a word is all that they are asked for."""
    whole = [r for r in records if not r.get("error")]
    unparseable: Counter[str] = Counter()
    cut: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for r in whole:
        unparseable.update(r["unparseable"])
        calls.update({stage: len(messages) for stage, messages in r["tokens"].items()})
        cut.update({stage: sum(len(m) >= max_tokens for m in messages) for stage, messages in r["tokens"].items()})
    return {
        "unparseable": dict(unparseable),
        "cut": {stage: n for stage, n in cut.items() if n},
        "calls": dict(calls),
        "generated": sum(len(m) for r in whole for stage in r["tokens"].values() for m in stage),
        "encoded": sum(r["encoded"] for r in whole),
        "cached": sum(r["cached"] for r in whole),
        "errors": dict(Counter(r["error"].split(":")[0] for r in records if r.get("error"))),
        "first error": next((r["error"] for r in records if r.get("error")), None),
    }


def table(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Head and lines: a condition a line, every score with its interval, the main one's difference behind it."""
    conditions, main = summary["conditions"], summary["main"]
    metrics = [k for k in next(iter(conditions.values()))["scores"] if k not in ("failed", "unread")]
    scale, sign = (100, "%") if main != "words" else (1, "")
    head = [
        "condition",
        *(f"{m} {sign}".strip() for m in metrics),
        f"difference in {main}",
        "p",
        "unread steps / answers",
        *(["failed"] if any(one["errors"] for one in conditions.values()) else []),
        "n",
    ]
    lines = []
    for name, one in conditions.items():
        cells = [interval(one["scores"].get(m), scale) for m in metrics]
        gap = one["differences"].get(main)
        lines.append(
            [
                name,
                *cells,
                interval(gap, scale, sign=True),
                probability(gap),
                unread(one, summary["n"]),
                *([str(sum(one["errors"].values()))] if "failed" in head else []),
                str(summary["n"]),
            ]
        )
    return head, lines


def probability(gap: Mapping[str, Any] | None) -> str:
    """The p of a difference as text, where there is one."""
    p = gap["p"] if gap else None
    return "" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def unread(condition: Mapping[str, Any], n: int) -> str:
    """`steps / answers` that could not be read."""
    answers = round(condition["scores"].get("unread", {"value": 0})["value"] * n)
    return f"{sum(condition['unparseable'].values())} / {answers}"


def interval(
    estimate: Mapping[str, Any] | Estimate | None, scale: float = 1, *, sign: bool = False, places: int = 1
) -> str:
    """`56.4 (51.9, 60.8)`; empty for no estimate, without an interval where one value tells of none."""
    if estimate is None:
        return ""
    values = asdict(estimate) if isinstance(estimate, Estimate) else estimate
    plus = "+" if sign else ""
    value, low, high = (f"{values[k] * scale:{plus}.{places}f}" for k in ("value", "low", "high"))
    alone = values.get("n") == 1 and values["low"] == values["high"]
    return value if alone else f"{value} ({low}, {high})"
