"""Rows of the summary page `docs/results.md`, one function per section, from the JSON results."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from choreograph.evaluation.report import format_estimate

HEAD = ("result", "measured (95%)", "paper", "`make bench NAME=`")
Record = Callable[[str], dict[str, Any]]  # loads the JSON result of a benchmark
Line = tuple[str, str, str, str]
QWEN = "qwen2.5-coder-0.5b-instruct-q4_k_m"
SMOLLM = "smollm2-135m-instruct"


def _rows(record: Record, name: str) -> dict[tuple[str, str | None], Mapping[str, Any]]:
    return {(row["measure"], row["peer"]): row for row in record(name)["rows"]}


def _ratio(record: Record, name: str, measure: str, places: int = 2) -> str:
    return format_estimate(_rows(record, name)[measure, None], places=places) + "x"


def speed(record: Record) -> Iterator[Line]:
    paper = {
        "Tree of Thoughts": ("3.5x", "1.031x"),
        "iterative debate": ("2.0x", "1.036x"),
        "parallel debate": ("6.2x", "1.027x"),
    }
    for title, (ttft, end_to_end) in paper.items():
        yield f"{title}: time to first token", _ratio(record, "speed", f"{title}: TTFT, steps"), ttft, "speed"
        yield f"{title}: end to end", _ratio(record, "speed", f"{title}: end to end"), end_to_end, "speed"
    best = "best, timed again on 5 other problems: 64 branches, 4 voters"
    yield "Tree of Thoughts, 64 branches, 4 voters: end to end", _ratio(record, "scaling", best), "", "scaling"


def quality(record: Record) -> Iterator[Line]:
    summaries = record("quality")["summaries"]
    for data, title in (("math", "MATH"), ("gsm8k", "GSM8K")):
        runs = (
            summaries[f"{data}-{workflow}"]["conditions"] for workflow in ("tree_of_thoughts", "mad_iter", "mad_par")
        )
        gaps = [format_estimate(run["choreographed"]["differences"]["right"], 100, sign=True) for run in runs]
        label = f"{title}, Tree of Thoughts / iterative / parallel debate: change in accuracy, points"
        yield label, " / ".join(gaps), "", "quality"
    pairs = summaries["qa-nq_oracle"]["conditions"]
    shares = [
        format_estimate(pairs[condition]["scores"]["both"], 100) for condition in ("baseline", "serial", "parallel")
    ]
    label = "MultiQA with passages, baseline / serial / parallel: both answers right, %"
    yield label, " / ".join(shares), "56.4 / 0.4 / -", "quality"
    gap = summaries["bsm"]["conditions"]["parallel"]["differences"]["coverage"]
    label = "Branch-Solve-Merge, parallel: change in concepts used, points"
    yield label, format_estimate(gap, 100, sign=True), "", "quality"
    gap = summaries["pd-defect"]["conditions"]["leak both"]["differences"]["Bob cooperates"]
    label = "Prisoner's Dilemma, always defect: change in Bob's cooperation, points"
    yield label, format_estimate(gap, 100, sign=True), "", "quality"
    for name, title, conditions in (
        ("math-tree_of_thoughts", "Tree of Thoughts", ("choreographed",)),
        ("math-mad_iter", "Iterative debate", ("choreographed",)),
        ("math-mad_par", "Parallel debate", ("choreographed",)),
        ("qa-nq_oracle", "MultiQA", ("serial", "parallel")),
        ("bsm", "Branch-Solve-Merge", ("serial", "parallel")),
        ("pd-defect", "Prisoner's Dilemma, always defect", ("leak both",)),
    ):
        rows = {row["condition"]: row for row in record("fidelity")["runs"][name]["rows"] if row["stage"] == "all"}
        gaps = [format_estimate(rows[condition]["gap"], places=3, sign=True) for condition in conditions]
        yield f"{title}, {' / '.join(conditions)}: added log-loss, nats per token", " / ".join(gaps), "", "fidelity"


def finetuning(record: Record) -> Iterator[Line]:
    for name, title in (
        (f"multi_qa, trivia, {QWEN}", "MultiQA, questions only (Qwen 0.5B)"),
        (f"multi_qa, {QWEN}", "MultiQA with passages (Qwen 0.5B)"),
        (f"tree_of_thoughts, {QWEN}", "Tree of Thoughts (Qwen 0.5B)"),
        (f"branch_solve_merge, serial, {SMOLLM}", "Branch-Solve-Merge, serial (SmolLM2 135M)"),
        (f"branch_solve_merge, {SMOLLM}", "Branch-Solve-Merge, parallel (SmolLM2 135M)"),
        (f"prisoners_dilemma, {SMOLLM}", "Prisoner's Dilemma (SmolLM2 135M)"),
        (f"prisoners_dilemma, orders, talk, {QWEN}", "Prisoner's Dilemma with orders (Qwen 0.5B)"),
    ):
        closed = format_estimate(record("distill")["runs"][name]["closed"], 100, places=0)
        yield f"{title}: share of the gap closed, %", closed, "", "distill"
    answers = record("distill")["runs"][f"multi_qa, trivia, {QWEN}"]["scores"]["conditions"]
    for condition in ("parallel", "parallel + FT"):
        gap = format_estimate(answers[condition]["differences"]["both"], 100, sign=True)
        yield f"MultiQA, {condition}: change in both answers right, points", gap, "", "distill"


def prompt_cache(record: Record) -> Iterator[Line]:
    label = "5120 cached, 32 new"
    measured = _ratio(record, "prompt_cache", f"{label}: against no reuse", 1)
    yield f"First token, {label} tokens, against no reuse", measured, "up to 60x (CPU)", "prompt_cache"
    measured = _ratio(record, "prompt_cache", f"{label}: against Hugging Face", 1)
    yield f"First token, {label} tokens, against Hugging Face", measured, "", "prompt_cache"
    tables = record("prompt_cache_quality")["tables"]
    gaps = [format_estimate(tables[name]["difference"], 100, sign=True) for name in ("hotpotqa", "2wikimqa", "musique")]
    label = "HotpotQA / 2WikiMQA / MuSiQue from modules: change in score, points"
    yield label, " / ".join(gaps), "", "prompt_cache_quality"


def kvflow(record: Record) -> Iterator[Line]:
    for name, label, title, paper in (
        ("kvflow", "2048/32/32", "Ten agents, 2,048 fixed tokens", ""),
        ("kvflow_peer", "8 desks", "Eight desks of four agents", "1.12x / 1.08x"),
        ("kvflow_machines", "Llama-3.1-8B on an A10G, 8192/32/32", "Simulated A10G, 8B model", "2.91x / 1.83x"),
    ):
        ratios = [_ratio(record, name, f"{label}: over {side}") for side in ("device only", "host, reactive")]
        yield f"{title}: over device only / over reactive loading", " / ".join(ratios), paper, name


def layer_reuse(record: Record) -> Iterator[Line]:
    pair = f"base to adapter, again, {QWEN}"
    pooled = record("reuse")["runs"][pair]["quality"]["pooled"]
    for how, title in (("partial loss", "half of the layers computed"), ("reused loss", "all layers reused")):
        loss = format_estimate(pooled[how], sign=True)
        yield f"Qwen 0.5B, base to adapter, {title}: F1 lost, points", loss, "", "reuse"
    trainings = (record("reuse")["runs"][f"base to full, {time}, {SMOLLM}"] for time in ("again", "third time"))
    losses = [format_estimate(run["quality"]["data"]["nq"]["reused loss"], sign=True) for run in trainings]
    label = "SmolLM2, base to full fine-tune (two trainings), all layers reused: F1 lost, points"
    yield label, " / ".join(losses), "", "reuse"
    for label, title in (
        ("prefill of 4096", "prefill of 4,096 tokens"),
        ("first token behind 4096, fetched", "first token after 4,096 tokens of another process"),
    ):
        measured = _ratio(record, "reuse", f"{pair}: {label}")
        yield f"Qwen 0.5B, half of the layers: {title}", measured, "", "reuse"


SECTIONS: Mapping[str, Callable[[Record], Iterator[Line]]] = {
    "speed": speed,
    "quality": quality,
    "finetuning": finetuning,
    "prompt-cache": prompt_cache,
    "kvflow": kvflow,
    "layer-reuse": layer_reuse,
}
