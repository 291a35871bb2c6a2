"""Rows of `docs/results.md`: every table and figure of the four papers with the paper's number and ours.

A row whose numbers nobody has measured yet says so; one that is out of reach gives the reason.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from choreograph.lab.evaluation.longbench import METRICS
from choreograph.lab.evaluation.report import format_estimate

HEAD = ("in the paper", "what", "paper", "ours (95%)", "our setting", "`make bench NAME=`")
Record = Callable[[str], dict[str, Any]]  # loads the JSON result of a benchmark
Line = tuple[str, str, str, str, str, str]
QWEN = "qwen2.5-coder-0.5b-instruct-q4_k_m"
SMOLLM = "smollm2-135m-instruct"
NOT_YET = "not measured yet"
NO_LOSS = "share not measured, since reuse loses nothing significant (above)"
ADAPTER = f"base to adapter, again, {QWEN}"
LONGBENCH_TASKS = {  # of which there are records that fit the bundled model
    "qasper": "Qasper",
    "multifieldqa_en": "MultiFieldQA",
    "hotpotqa": "HotpotQA, short passages",
    "2wikimqa": "2WikiMQA",
    "musique": "MuSiQue, short passages",
    "gov_report": "GovReport",
    "qmsum": "QMSum",
    "multi_news": "MultiNews",
}
FULL = f"base to full, third time, {SMOLLM}"


def known(value: Callable[[], str]) -> str:
    """Return a value, or that it has not been measured."""
    try:
        return value()
    except (FileNotFoundError, KeyError, StopIteration):
        return NOT_YET


def _rows(record: Record, name: str) -> dict[str, Mapping[str, Any]]:
    return {row["measure"]: row for row in record(name)["rows"] if row["peer"] is None}


def _ratio(record: Record, name: str, *measures: str, places: int = 2) -> str:
    return known(
        lambda: " / ".join(format_estimate(_rows(record, name)[measure], places=places) + "x" for measure in measures)
    )


def _quality(record: Record, run: str, *cells: tuple[str, str, str]) -> str:
    """Join (condition, "scores" or "differences", metric) of a run, in percent."""

    def joined() -> str:
        conditions = record("quality")["summaries"][run]["conditions"]
        return " / ".join(
            format_estimate(conditions[condition][kind][metric], 100, sign=kind == "differences")
            for condition, kind, metric in cells
        )

    return known(joined)


def _win_rates(record: Record) -> str:
    def joined() -> str:
        rates = record("quality")["summaries"]["bsm-judged"]["win rates"]
        won, lost = (
            " / ".join(format_estimate(rates[condition][outcome], 100) for condition in ("serial", "parallel"))
            for outcome in ("won", "lost")
        )
        same = " / ".join(str(rates[condition]["same letter"]) for condition in ("serial", "parallel"))
        return f"{won}; the baseline's {lost}; the judge named the same place in both orders in {same} pairs"

    return known(joined)


def _closed(record: Record, run: str) -> str:
    return known(lambda: f"gap closed {format_estimate(record('distill')['runs'][run]['closed'], 100, places=0)}%")


def choreography(record: Record) -> Iterator[Line]:
    small = "Qwen 0.5B, n = "
    both = [(condition, "scores", "both") for condition in ("baseline", "serial", "parallel")]
    label = "both answers right, baseline / serial / parallel, %"
    for run, data in (("qa-triviaqa", "TriviaQA"), ("qa-nq_oracle", "questions with passages")):
        yield "Table 1", label, "56.4 / 0.4 / 0.4", _quality(record, run, *both), f"{small}200, {data}", "quality"
    paper_form = _quality(record, "qa-triviaqa-paper", *both)
    yield "Table 1", f"{label}, the paper's prompt", "56.4 / 0.4 / 0.4", paper_form, f"{small}200, TriviaQA", "quality"
    title = f"multi_qa, trivia, {QWEN}"
    answers = known(
        lambda: format_estimate(
            record("distill")["runs"][title]["scores"]["conditions"]["parallel + FT"]["scores"]["both"], 100
        )
    )
    yield (
        "Table 1",
        "both, parallel + FT, %",
        "49.3",
        answers,
        f"{small}200, adapter of TriviaQA, on passages",
        "distill",
    )
    shares = [(condition, "scores", "coverage") for condition in ("baseline", "serial", "parallel")]
    yield (
        "Table 2",
        "concepts used, baseline / serial / parallel, %",
        "81.0 / 65.1 / 63.0",
        _quality(record, "bsm", *shares),
        f"{small}100",
        "quality",
    )
    stories = [("baseline", "scores", f"story {n}") for n in (1, 2)]
    yield (
        "Table 2",
        "of story 1 / story 2, baseline, %",
        "87.6 / 82.4",
        _quality(record, "bsm", *stories),
        f"{small}100",
        "quality",
    )
    closed = _closed(record, f"branch_solve_merge, {SMOLLM}")
    yield (
        "Table 2",
        "parallel + FT: concepts used, %",
        "81.6",
        f"{NO_LOSS}; log-loss: {closed}",
        "SmolLM2 135M",
        "distill",
    )
    yield (
        "Table 2",
        "wins against the baseline by a judge, serial / parallel, %",
        "8 / 6",
        _win_rates(record),
        f"{small}12, judged by itself in both orders",
        "quality",
    )
    yield "Table 2", "parallel + FT: wins by a judge, %", "30", "not measured: no adapter for the judged model", "", ""
    strategies = (
        ("none", "no strategy", "63.9 / (-20.7, -9.6)"),
        ("cooperate", "always cooperate", "78.2 / (-14.2, -4.2)"),
        ("defect", "always defect", "46.7 / (-30.9, -18.9)"),
    )
    for run, strategy, paper in strategies:
        cells = [("leak both", "scores", "Bob cooperates"), ("leak both", "differences", "Bob cooperates")]
        measured = _quality(record, f"pd-{run}", *cells)
        label = f"Bob cooperates, {strategy}, choreographed % / change, points"
        yield "Table 3", label, paper, measured, f"{small}100", "quality"
    closed = _closed(record, f"prisoners_dilemma, {SMOLLM}")
    yield (
        "Table 3",
        "choreographed + FT: Bob cooperates, %",
        "76.8 / 83.9 / 68.3",
        f"{NO_LOSS}; log-loss: {closed}",
        "SmolLM2 135M, always defect",
        "distill",
    )
    workflows = (("direct", "direct", "18.8"), ("mad_iter", "iterative debate", "39.0 / -14.2"))
    workflows += (
        ("tree_of_thoughts", "Tree of Thoughts", "39.6 / -9.4"),
        ("mad_par", "parallel debate", "64.6 / -12.2"),
    )
    for run, title, paper in workflows:
        cells = [("baseline", "scores", "right")]
        label = f"MATH, {title}: right, %"
        if run != "direct":
            cells.append(("choreographed", "differences", "right"))
            label = f"MATH, {title}: baseline right, % / change, points"
        setting = f"{small}100" + (", short form" if run in ("mad_iter", "tree_of_thoughts") else "")
        yield "Table 4", label, paper, _quality(record, f"math-{run}", *cells), setting, "quality"
        if run != "direct":
            name = f"math-{run}-paper"
            count = known(lambda name=name: str(record("quality")["summaries"][name]["n"]))
            measured = _quality(record, name, *cells)
            setting = "Qwen 0.5B" if count == NOT_YET else f"{small}{count}"
            yield "Table 4", f"{label}, the paper's form", paper, measured, setting, "quality"
    closed = _closed(record, f"tree_of_thoughts, {QWEN}")
    yield (
        "Table 4",
        "MATH, choreographed + FT, three workflows, %",
        "38.6 / 41.4 / 60.0",
        f"{NO_LOSS}; log-loss of the tree: {closed}",
        "Qwen 0.5B, short form",
        "distill",
    )
    yield (
        "Table 4",
        "distilled baseline, three workflows, %",
        "1.8 / 29.6 / 5.2",
        "not reproduced, because the workflows to distil are not significantly better than direct answers (above)",
        "Qwen 0.5B; `eval --direct`",
        "",
    )
    table_5 = (
        ("Tree of Thoughts", "3.5x / 1.031x"),
        ("iterative debate", "2.0x / 1.036x"),
        ("parallel debate", "6.2x / 1.027x"),
    )
    for title, paper in table_5:
        for form in ("", ", the paper's form"):
            measured = _ratio(record, "speed", f"{title}{form}: TTFT, steps", f"{title}{form}: end to end")
            run = record("speed")["options"].get(f"{title}{form}", {})
            setting = f"SmolLM2 135M, n = {run.get('n', 30)}" + (", one thread" if run.get("threads") == 1 else "")
            setting += "" if form or title == "parallel debate" else ", short form"
            yield "Table 5", f"{title}{form}: TTFT / end to end", paper, measured, setting, "speed"
    cells = [("leak both", "scores", metric) for metric in ("predicts cooperation", "predicts right")]
    yield (
        "Table 6",
        "Bob predicts cooperation / is right, always defect, choreographed, %",
        "55 / 45",
        _quality(record, "pd-defect", *cells),
        f"{small}100",
        "quality",
    )
    yield "Table 6", "with fine-tuning, %", "60 / 41", NO_LOSS, "Qwen 0.5B", "distill"
    best = "best, timed again on 5 other problems: 64 branches, 4 voters"
    yield (
        "Figure 5",
        "largest end-to-end speed-up, branches and voters",
        "2.2x",
        _ratio(record, "scaling", best),
        "SmolLM2 135M, short form",
        "scaling",
    )
    r = known(
        lambda: format_estimate(
            _rows(record, "speed")["Tree of Thoughts: correlation of speed-up and tokens"], places=2
        )
    )
    yield (
        "Figure 7",
        "speed-up over tokens, correlation, Tree of Thoughts",
        "positive",
        r,
        "SmolLM2 135M, n = 30, short form",
        "speed",
    )
    cells = [(f"leak {leak}", "differences", "Bob cooperates") for leak in ("both", "system", "plan")]
    yield (
        "Figure 8",
        "Bob cooperates, leak both / system / plan, always defect, points",
        "below 0",
        _quality(record, "pd-defect", *cells),
        f"{small}100",
        "quality",
    )


def prompt_cache(record: Record) -> Iterator[Line]:
    tables = record("prompt_cache_quality")["tables"]
    data_sets = (
        ("LongBench narrativeqa", "NarrativeQA", "-0.6"),
        ("LongBench qasper", "Qasper", "+1.3"),
        ("LongBench multifieldqa_en", "MultiFieldQA", "+1.0"),
        ("hotpotqa", "HotpotQA, short passages", "+1.0"),
        ("2wikimqa", "2WikiMQA, short passages", "-2.7"),
        ("musique", "MuSiQue, short passages", "+1.3"),
        ("LongBench gov_report", "GovReport", "+0.7"),
        ("LongBench qmsum", "QMSum", "+0.2"),
        ("LongBench multi_news", "MultiNews", "-0.1"),
        ("LongBench triviaqa", "TriviaQA", "-0.7"),
        ("LongBench passage_count", "passage count", "+0.7"),
        ("LongBench passage_retrieval_en", "passage retrieval", "-3.3"),
    )
    for name, title, paper in data_sets:
        table = tables.get(name)
        gap = NOT_YET if table is None else format_estimate(table["difference"], 100, sign=True)
        task = name.removeprefix("LongBench ")
        yield (
            "Tables 1, 3",
            f"{title}: change of {METRICS[task][0]}, points (paper: Llama2 7B)",
            paper,
            gap,
            "Qwen 0.5B" if table is None else f"Qwen 0.5B, n = {table['n']}",
            "prompt_cache_quality",
        )
    shapes = known(lambda: " / ".join(f"{_memory(record, name):.2f}" for name in ("Llama 7B", "Llama 70B")))
    yield (
        "Table 2",
        "MB a token, Llama 7B / 70B, every head counted",
        "0.50 / 2.5",
        shapes,
        "computed from shapes",
        "memory",
    )
    yield (
        "Figures 3, 9-11",
        "TTFT on GPUs by data set, modules in host / device memory",
        "1.5-3x / 5-10x",
        _ratio(record, "gpu", "Prompt Cache: no reuse over modules"),
        "H200, shape of Llama 3.1 8B, random weights, device memory; no real data sets",
        "gpu",
    )
    for new in (32, 128):
        measured = _ratio(record, "prompt_cache", f"5120 cached, {new} new: against no reuse", places=1)
        yield (
            "Figures 4, 12, 13",
            f"TTFT on a CPU, 5,120 cached and {new} new tokens",
            "up to 70x (Intel), 20x (AMD)",
            measured,
            "SmolLM2 135M, synthetic text",
            "prompt_cache",
        )
    for task, title in LONGBENCH_TASKS.items():
        ratios = (
            f"{task}: first token, whole against modules {where}" for where in ("in host memory", "on the device")
        )
        yield (
            "Figures 4, 12, 13",
            f"TTFT on a CPU, {title}, modules in host / resident memory",
            "up to 70x (Intel), 20x (AMD)",
            _ratio(record, "prompt_cache_longbench", *ratios, places=1),
            known(lambda task=task: _longbench_setting(record, task)),
            "prompt_cache_longbench",
        )
    growth = known(
        lambda: " / ".join(
            f"{_rows(record, 'prompt_cache')[f'growth, {how}: line through all points']['value']:.0f}"
            for how in ("from modules", "no reuse")
        )
    )
    yield (
        "Figure 5",
        "growth of TTFT, ms for 1,000 tokens, modules / whole",
        "linear / quadratic",
        growth,
        "SmolLM2 135M",
        "prompt_cache",
    )
    host = _ratio(record, "prompt_cache", "5120 cached, 32 new: copied in against resident")
    copied = known(lambda: f"{_rows(record, 'prompt_cache')['copy of 5000 tokens, host to host']['value']:.1f} ms")
    yield (
        "Section 5.4",
        "modules copied from host memory over resident ones",
        "3.79, 5.34, 0.23 ms for copies of 5K tokens",
        host,
        f"SmolLM2 135M; the copy alone, host to host: {copied}",
        "prompt_cache",
    )
    use_cases = (
        ("code", "4x"),
        ("personalization", "216 to 65 ms on a GPU, 22,449 to 686 on a CPU"),
        ("parameters", "lower"),
    )
    for name, paper in use_cases:
        measured = _ratio(record, "prompt_cache", f"use case, {name}: against no reuse", places=1)
        facts = "SmolLM2 135M, our example" + {"parameters": ", a trip of about 100 tokens"}.get(name, "")
        yield "Figures 6-8", f"TTFT of a use case: {name}", paper, measured, facts, "prompt_cache"


def _longbench_setting(record: Record, task: str) -> str:
    rows, counts = _rows(record, "prompt_cache_longbench"), record("prompt_cache_longbench")["counts"][task]
    cached, new = (rows[f"{task}: {kind} tokens"]["value"] for kind in ("cached", "new"))
    return f"SmolLM2 135M, n = {counts['n']}, {cached:,.0f} cached and {new:.0f} new tokens (medians)"


def _memory(record: Record, name: str) -> float:
    return next(
        row["value"] for row in record("memory")["rows"] if row["measure"] == f"{name}: every head, as the paper counts"
    )


def kvflow(record: Record) -> Iterator[Line]:
    yield (
        "Figure 2",
        "copy over PCIe against recomputation",
        "copy shorter",
        "not reproduced, because no model of the paper's size was at hand",
        "",
        "",
    )

    def ratios(name: str, label: str) -> str:
        return _ratio(record, name, *(f"{label}: over {side}" for side in ("device only", "host, reactive")))

    over = "over device only / over reactive loading"
    for label, title, paper in (
        ("Llama-3.1-8B on an A10G, 8192/32/32", "8192/32/32 on an A10G", "2.91x / 1.83x"),
        ("Qwen2.5-32B on an H100, 4096/32/32", "4096/32/32 on an H100", "read from a plot"),
    ):
        yield (
            "Figure 5",
            f"{title}: {over}",
            paper,
            ratios("kvflow_machines", label),
            "simulated machine",
            "kvflow_machines",
        )
    yield (
        "Figure 5",
        f"ten agents, 2048/32/32: {over}",
        "",
        ratios("kvflow", "2048/32/32"),
        "SmolLM2 135M, CPU",
        "kvflow",
    )
    yield (
        "Figure 6",
        f"concurrent workflows: {over}",
        "up to 2.19x over reactive",
        ratios("kvflow", "256 x 8"),
        "SmolLM2 135M, CPU, 256 tokens, 8 workflows",
        "kvflow",
    )
    sizes = known(
        lambda: ", ".join(
            f"{row['measure'].partition(', ')[2]} {row['value']:.0f}"
            for row in record("kvflow_peer")["rows"]
            if row["measure"].startswith("tokens a turn")
        )
    )
    yield "Figure 7", "tokens of a turn, median", "read from a plot", sizes, "SmolLM2 135M, CPU", "kvflow_peer"
    yield (
        "Figure 8",
        f"PEER-style applications: {over}",
        "up to 1.12x / 1.08x",
        ratios("kvflow_peer", "8 desks"),
        "SmolLM2 135M, CPU, 8 applications",
        "kvflow_peer",
    )


def droidspeak(record: Record) -> Iterator[Line]:
    runs: Mapping[str, Any] = record("reuse")["runs"]
    yield (
        "Tables 1, 2; Figure 4",
        "eight pairs of models on three data sets",
        "7B to 70B",
        "not reproduced, because no such pair was at hand; own pairs of 135M and 0.5B",
        "",
        "",
    )

    def loss(pair: str, *path: str) -> str:
        def value() -> str:
            result = runs[pair]["quality"]
            for key in path:
                result = result[key]
            return format_estimate(result, sign=True)

        return known(value)

    yield (
        "Figure 6",
        "F1 lost by reusing all layers, points",
        "large",
        loss(ADAPTER, "pooled", "reused loss"),
        "Qwen 0.5B, base to adapter",
        "reuse",
    )
    yield (
        "Figure 6",
        "F1 lost by reusing all layers, points",
        "large",
        loss(FULL, "data", "nq", "reused loss"),
        "SmolLM2 135M, base to full fine-tune",
        "reuse",
    )
    counts = known(
        lambda: str(
            sum(
                len(layers)
                for run in runs.values()
                for layers in run.get("profile", {"critical": {}})["critical"].values()
            )
        )
    )
    yield "Figure 7", "critical layers", "11% of the layers on average", counts, "all pairs and data", "reuse"
    yield (
        "Figures 8, 10-12",
        "spread over inputs, errors at transitions, heat maps",
        "plots",
        "plots in `docs/figures` and [layer reuse](reuse.md)",
        "both models",
        "reuse",
    )
    measured = _ratio(record, "reuse", f"{ADAPTER}: prefill of 4096")
    partial = loss(ADAPTER, "pooled", "partial loss")
    yield (
        "Figure 14",
        "prefill, faster / F1 lost, points",
        "1.7-2.6x / about 0",
        f"{measured} / {partial}",
        "Qwen 0.5B, half of the layers, 4,096 tokens",
        "reuse",
    )
    knees = known(lambda: _knees(runs[ADAPTER]["stream"]["knee"]))
    yield "Figure 15", "arrival rate at the knee, half of the layers over all", "2-3x", knees, "Qwen 0.5B", "reuse"
    fetched = _ratio(record, "reuse", f"{ADAPTER}: first token behind 4096, fetched")
    yield (
        "Figure 16",
        "first token, 4,096 tokens fetched from another process",
        "about 2x",
        fetched,
        "Qwen 0.5B, two processes",
        "reuse",
    )
    transfer = known(lambda: _transfer(runs[f"base to full, {SMOLLM}"]["profile"]["transfer"]))
    yield (
        "Figure 17",
        "lost more by a profile of other data, mean / most",
        "2 / 4 points of F1",
        transfer,
        "SmolLM2 135M, log-likelihood",
        "reuse",
    )
    yield (
        "Figures 18, 19",
        "mathematics; 70B against 8B",
        "plots",
        "not reproduced, because no such models were at hand",
        "",
        "",
    )
    ratio = known(
        lambda: ", ".join(
            f"{count} models {value:.2f}x"
            for count, value in runs[f"base to adapter, {QWEN}"]["memory"]["ratio"].items()
        )
    )
    yield (
        "Figure 1",
        "memory of separate entries over shared ones",
        "up to 1.5x",
        ratio,
        "Qwen 0.5B, half of the layers",
        "reuse",
    )


def _knees(knee: Mapping[str, float]) -> str:
    return f"{knee['partial'] / knee['recompute']:.2f}x"


def _transfer(points: Mapping[str, list[tuple[str, float, float]]]) -> str:
    losses = [there - here for data in points.values() for _, here, there in data]
    if not losses:
        raise KeyError("transfer")
    return f"{np.mean(losses):+.3f} / {max(losses):+.3f} nats"


SECTIONS: Mapping[str, Callable[[Record], Iterator[Line]]] = {
    "choreography": choreography,
    "prompt-cache": prompt_cache,
    "kvflow": kvflow,
    "droidspeak": droidspeak,
}
