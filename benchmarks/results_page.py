"""Write the tables of `docs/results.md` and `benchmarks/results/*.md` from the JSON results, between their marks."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from choreograph.lab.evaluation.report import format_estimate, format_p_value, format_unparsed

from . import repair as repair_benchmark
from . import results_papers, results_reuse
from . import vllm as vllm_benchmark
from .common import RESULTS
from .ray_scale import TRANSFERS, routers_of
from .ray_workloads import WORKLOADS

DETAILS = Path(__file__).parent / "results"  # pages with all tables, beside the JSON files
SUMMARY_PAGE = Path(__file__).parents[1] / "docs" / "results.md"
PAGES = (
    SUMMARY_PAGE,
    SUMMARY_PAGE.with_name("scale.md"),
    SUMMARY_PAGE.with_name("explain.md"),
    SUMMARY_PAGE.with_name("vllm.md"),
    *(
        DETAILS / f"{name}.md"
        for name in (
            "workflows",
            "quality",
            "finetuning",
            "prompt_cache",
            "kvflow",
            "layer_reuse",
            "quantization",
            "repair",
        )
    ),
)
MARK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
TITLES = {
    "direct": "Direct",
    "mad_iter": "Iterative debate",
    "tree_of_thoughts": "Tree of Thoughts",
    "mad_par": "Parallel debate",
    "multi_qa": "MultiQA",
    "branch_solve_merge": "Branch-Solve-Merge",
    "prisoners_dilemma": "Prisoner's Dilemma",
}
TITLES |= {f"{name}-paper": f"{TITLES[name]}, the paper's form" for name in ("mad_iter", "tree_of_thoughts", "mad_par")}
TITLES |= {"single_call": "Direct", "debate_iterative": "Iterative debate", "debate_parallel": "Parallel debate"}
STRATEGIES = {"pd-none": "none", "pd-cooperate": "always cooperate", "pd-defect": "always defect"}


def record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    rows = [head, ["---"] * len(head), *map(list, lines)]
    assert all(len(row) == len(head) for row in rows), head
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _provenance_note(name: str) -> str:
    """Where the figures of a table come from; parts may have been measured at several times and places."""
    result = record(name)
    parts = (
        [row["made"] for row in result["rows"]]
        or list(result.get("summaries", result.get("runs", {})).values())
        or [result]
    )
    runs = result.get("runs", {})
    models = dict.fromkeys(run["model"] for run in runs.values() if "model" in run) or [result["model"]]
    return f"`benchmarks/{name}.py`, {format_provenance(parts)}; {', '.join(models)}."


def format_provenance(parts: Iterable[Mapping[str, str]]) -> str:
    """Where and when they were measured, each once."""
    return "; ".join(dict.fromkeys(f"commit {one['commit']}, {one['date']}, {one['hardware']}" for one in parts))


def speed() -> str:
    result = record("speed")
    rows, options = {r["measure"]: r for r in result["rows"]}, result["options"]
    lines = []
    papers = (
        ("Tree of Thoughts", "3.5 (3.26, 3.82)", "1.031 (1.026, 1.036)"),
        ("iterative debate", "2.0 (1.94, 2.07)", "1.036 (1.028, 1.045)"),
        ("parallel debate", "6.2 (5.6, 6.8)", "1.027 (1.023, 1.032)"),
    )
    forms = [(f"{title}, the paper's form", *cells) for title, *cells in papers]
    for title, ttft, e2e in (one for one in (*papers, *forms) if one[0] in options):
        cells = [
            format_estimate(rows[f"{title}: {m}"], places=p)
            for m, p in (("TTFT, steps", 2), ("TTFT, all decodes", 2), ("end to end", 3))
        ]
        tokens = format_estimate(rows[f"{title}: prompt tokens encoded"], places=2)
        r = format_estimate(rows[f"{title}: correlation of speed-up and tokens"], places=2)
        facts = [str(options[title]["max_tokens"]), str(options[title]["n"])]
        lines.append([title, cells[0], ttft, cells[1], cells[2], e2e, tokens, r, *facts])
    head = [
        "workflow",
        "TTFT ratio",
        "paper",
        "over all decodes",
        "end to end",
        "paper",
        "prompt tokens",
        "r with tokens",
        "limit of tokens",
        "n",
    ]
    return markdown(head, lines) + "\n\n" + _provenance_note("speed")


def stages() -> str:
    result, lines = record("speed"), []
    for r in result["rows"]:
        title, _, measure = r["measure"].partition(": TTFT, ")
        if measure and measure not in ("all decodes", "steps"):
            lines.append([title, measure, format_estimate(r, places=2), str(result["options"][title]["n"])])
    return markdown(["workflow", "stage", "TTFT ratio", "n"], lines)


def scaling() -> str:
    rows = {r["measure"]: r for r in record("scaling")["rows"]}
    grid = [re.match(r"(\d+) branches, (\d+) voters: end to end", m) for m in rows]
    cells = {(int(g[1]), int(g[2])): rows[g[0]] for g in grid if g}
    voters = sorted({v for _, v in cells})
    lines = [[str(b), *(format_estimate(cells[b, v], places=2) for v in voters)] for b in sorted({b for b, _ in cells})]
    result = record("scaling")
    note = f"Solutions of {result['options']['length']} tokens, n = {result['options']['problems']} problems a point. "
    again = next(r for r in result["rows"] if r["measure"].startswith("best"))
    head = ["branches", *(f"{v} voters" if v > 1 else "1 voter" for v in voters)]
    best = f"The {again['measure']}: {format_estimate(again, places=2)}. "
    return markdown(head, lines) + f"\n\n{note}{best}" + _provenance_note("scaling")


def accuracy() -> str:
    summaries, lines = record("quality")["summaries"], []
    for data, title in (("math", "MATH"), ("gsm8k", "GSM8K")):
        names = ("direct", "mad_iter", "tree_of_thoughts", "mad_par")
        for workflow in (run for name in names for run in (name, f"{name}-paper")):
            one = summaries.get(f"{data}-{workflow}")
            for condition, result in one["conditions"].items() if one else ():
                gap = result["differences"].get("right")
                p = format_p_value(gap)
                cut = f"{100 * sum(result['cut'].values()) / sum(result['calls'].values()):.0f}"
                right = format_estimate(result["scores"]["right"], 100)
                cells = [
                    right,
                    format_estimate(gap, 100, sign=True),
                    p,
                    format_unparsed(result, one["n"]),
                    cut,
                    str(one["n"]),
                ]
                lines.append([title, TITLES[workflow], condition, *cells])
    head = ["data", "workflow", "implementation", "right %", "difference", "p", "unread steps / answers", "cut %", "n"]
    return markdown(head, lines) + "\n\n" + _provenance_note("quality")


def multi_qa() -> str:
    summaries, lines = record("quality")["summaries"], []
    data = (("qa-nq_oracle", "questions with passages"), ("qa-triviaqa", "TriviaQA, closed book"))
    forms = [(f"{name}-paper", f"{title}, the paper's form") for name, title in data]
    for name, title in (*data, *forms):
        one = summaries.get(name)
        for condition, result in one["conditions"].items() if one else ():
            scores = result["scores"]
            gap = result["differences"].get("both")
            cells = [format_estimate(scores[k], 100) for k in ("first", "second", "both")]
            p = format_p_value(gap)
            cut = f"{100 * result['cut'].get('answer', 0) / one['n']:.0f}"
            lines.append([title, condition, *cells, format_estimate(gap, 100, sign=True), p, cut, str(one["n"])])
    head = ["data", "implementation", "Q1 right %", "Q2 right %", "both %", "difference in both", "p", "cut %", "n"]
    return markdown(head, lines)


def stories() -> str:
    one = record("quality")["summaries"]["bsm"]
    lines = []
    for condition, result in one["conditions"].items():
        cells = [format_estimate(result["scores"][k], 100) for k in ("coverage", "story 1", "story 2")]
        gap = format_estimate(result["differences"].get("coverage"), 100, sign=True)
        cut = [f"{100 * result['cut'][stage] / result['calls'][stage]:.0f}" for stage in ("solve", "merge")]
        lines.append([condition, *cells, gap, " / ".join(cut), str(one["n"])])
    head = ["implementation", "concepts %", "of story 1", "of story 2", "difference", "stories / merges cut %", "n"]
    return markdown(head, lines)


def games() -> dict[str, Any]:
    summaries = record("quality")["summaries"]
    return {strategy: summaries[name] for name, strategy in STRATEGIES.items() if name in summaries}


def leak() -> str:
    lines = []
    for strategy, one in games().items():
        for condition, result in one["conditions"].items():
            gap = result["differences"].get("Bob cooperates")
            cells = [format_estimate(result["scores"]["Bob cooperates"], 100), format_estimate(gap, 100, sign=True)]
            p, n = format_p_value(gap), one["n"]
            lines.append([strategy, condition, *cells, p, f"{100 * result['scores']['unread']['value']:.0f}", str(n)])
    return markdown(
        ["Alice's strategy", "implementation", "Bob cooperates %", "difference", "p", "unread %", "n"], lines
    )


def prediction() -> str:
    lines = []
    shown = ("Alice cooperates", "predicts cooperation", "predicts right", "exploits", "defends")
    for condition, title in (("baseline", "Baseline"), ("leak both", "Choreographed")):
        for strategy, one in games().items():
            scores = one["conditions"][condition]["scores"]
            cells = [format_estimate(scores[k], 100, places=0) for k in shown]
            lines.append([title, strategy, *cells, str(one["n"])])
    head = ["implementation", "Alice's strategy", *(f"{k} %" for k in shown), "n"]
    return markdown(head, lines)


def fidelity() -> str:
    lines = []
    for name, one in record("fidelity")["runs"].items():
        title = f"{TITLES[one['workflow']]}, {STRATEGIES.get(name, one['data'])}"
        for r in one["rows"]:
            cells = [format_estimate(r[k], places=3, sign=k == "gap") for k in ("before", "after", "gap", "divergence")]
            lines.append([title, r["condition"], r["stage"], *cells, str(r["tokens"]), str(one["n"])])
    head = ["workflow", "condition", "decodes", "log-loss, baseline", "reused", "gap", "KL", "tokens", "traces"]
    return markdown(head, lines) + "\n\n" + _provenance_note("fidelity")


def prompt_cache() -> str:
    result = record("prompt_cache")
    rows = {r["measure"]: r for r in result["rows"]}
    lines = []
    for label in [m.partition(":")[0] for m in rows if m.endswith(": against Hugging Face")]:
        ratios = [format_estimate(rows[f"{label}: {m}"]) for m in ("against no reuse", "against Hugging Face")]
        times = [f"{rows[f'{label}: {m}']['value']:.0f}" for m in ("from modules", "no reuse", "Hugging Face")]
        lines.append([label, *ratios, *times])
    host = rows["5120 cached, 32 new: modules copied in from host memory"]
    slopes = {how: rows[f"growth, {how}: line through all points"]["value"] for how in ("from modules", "no reuse")}
    share = rows[f"growth, no reuse: share of the square term at {result['points']['no reuse'][-1][0]}"]["value"]
    notes = (
        f"With modules that wait in host memory (5120 cached, 32 new): {format_estimate(host, places=0)} ms. "
        f"Growth: {slopes['from modules']:.1f} ms for every 1,000 cached tokens (whole prefill: "
        f"{slopes['no reuse']:.0f} ms on average, {100 * share:.0f}% of its growth to the last point from a square). "
    )
    head = [
        "tokens",
        "against no reuse",
        "against Hugging Face",
        "from modules, ms",
        "no reuse, ms",
        "Hugging Face, ms",
    ]
    return markdown(head, lines) + "\n\n" + notes + _provenance_note("prompt_cache")


def prompt_cache_answers() -> str:
    rows = {r["measure"]: r for r in record("prompt_cache")["rows"]}
    answer = "5120 cached, 32 new, 32 generated"
    times = ("from modules", "no reuse")
    labels = {  # measure of the ratio, and the measures of both times
        "whole answer of 32 tokens": (f"{answer}: end to end against no reuse", f"{answer}: end to end, "),
        **{
            f"first token, {name}": (f"use case, {name}: against no reuse", f"use case, {name}: ")
            for name in ("code", "personalization", "parameters")
        },
    }
    lines = [
        [label, format_estimate(rows[ratio]), *(f"{rows[prefix + how]['value']:.0f}" for how in times)]
        for label, (ratio, prefix) in labels.items()
    ]
    later = [f"{rows[f'{answer}: each later token, {how}']['value']:.0f}" for how in times]
    copied = format_estimate(rows["copy of 5000 tokens, host to host"], places=1)
    notes = (
        f"A later token takes {later[0]} ms from modules and {later[1]} ms without reuse. Copying keys and values of "
        f"5,000 tokens from host memory to host memory: {copied} ms. "
    )
    head = ["what", "against no reuse", "from modules, ms", "no reuse, ms"]
    return markdown(head, lines) + "\n\n" + notes + _provenance_note("prompt_cache")


def prompt_cache_longbench() -> str:
    result = record("prompt_cache_longbench")
    rows, lines = {r["measure"]: r for r in result["rows"]}, []
    for task, counts in result["counts"].items():
        if not counts["n"]:
            continue
        sizes = [f"{rows[f'{task}: {kind} tokens']['value']:,.0f}" for kind in ("cached", "new")]
        ratios = [
            format_estimate(rows[f"{task}: first token, whole against modules {where}"], places=1)
            for where in ("on the device", "in host memory")
        ]
        firsts = [f"{rows[f'{task}: first token, {side}']['value']:,.0f}" for side in ("device", "host", "whole")]
        later = [f"{rows[f'{task}: each later token, {side}']['value']:.0f}" for side in ("device", "whole")]
        ends = [f"{rows[f'{task}: end to end, {side}']['value']:,.0f}" for side in ("device", "whole")]
        lines.append([task, str(counts["n"]), *sizes, *ratios, *firsts, " / ".join(later), " / ".join(ends)])
    head = ["data set", "n", "cached", "new", "resident modules, x", "in host memory, x", "resident, ms", "host, ms"]
    head += ["read whole, ms", "later token, modules / whole, ms", "end to end, modules / whole, ms"]
    return markdown(head, lines) + "\n\n" + _provenance_note("prompt_cache_longbench")


def prompt_cache_quality() -> str:
    lines = []
    for label, one in record("prompt_cache_quality")["tables"].items():
        cells = [format_estimate(one[k], 100) for k in ("whole", "modules")]
        gap = format_estimate(one["difference"], 100, sign=True)
        facts = [f"{100 * one['same']:.0f}", f"{one['documents']:.0f}", str(one["n"]), str(one["too_long"])]
        lines.append([label, one["measure"], *cells, gap, *facts])
    head = ["data", "score", "read whole", "from modules", "difference", "same answer %", "modules", "n", "too long"]
    return markdown(head, lines) + "\n\n" + _provenance_note("prompt_cache_quality")


def memory() -> str:
    result = record("memory")
    rows = {r["measure"]: r["value"] for r in result["rows"]}
    lines = []
    for name, shape in result["shapes"].items():
        every, kept = (rows[f"{name}: {how}"] for how in ("every head, as the paper counts", "as the model keeps them"))
        paper = "" if shape["paper"] is None else f"{shape['paper']:g}"
        lines.append([name, paper, f"{every:.2f}", f"{kept:.2f}"])
    return markdown(["model", "paper, MB", "every head, MiB", "as the model keeps them, MiB"], lines)


SETUP_COLUMNS = ["over device only", "over reactive", "turns a second: device only", "reactive", "workflow-aware"]
SETUP_COLUMNS += ["computed again, of uses", "found %"]


def kvflow() -> str:
    result = record("kvflow")
    lines = [
        [f"{label}{', at once' if kind == 'crowd' else ''}", *_setup_cells(result, label, facts)]
        for kind, sets in result["found"].items()
        for label, facts in sets.items()
    ]
    return markdown(["tokens", *SETUP_COLUMNS], lines) + "\n\n" + _provenance_note("kvflow")


def _setup_cells(record: Mapping[str, Any], label: str, counts: Mapping[str, Any]) -> list[str]:
    """How fast each side is, and what of the fixed prompts it found."""
    rows = {r["measure"]: r for r in record["rows"]}
    ratios = [format_estimate(rows[f"{label}: over {side}"], places=2) for side in list(counts)[:2]]
    speeds = [format_estimate(rows[f"{label}: {side}, throughput"], places=2) for side in counts]
    again = " / ".join(str(one["computed"]) for one in counts.values())
    hits = " / ".join(format_estimate(rows[f"{label}: {side}, fixed prompts found"], 100, places=0) for side in counts)
    return [*ratios, *speeds, f"{again} of {next(iter(counts.values()))['uses']}", hits]


def kvflow_peer() -> str:
    result = record("kvflow_peer")
    lines = [[label, *_setup_cells(result, label, facts)] for label, facts in result["found"].items()]
    sizes = [r for r in result["rows"] if r["measure"].startswith("tokens a turn")]
    spans = (f"{r['measure'].partition(', ')[2]} {r['value']:.0f} ({r['low']:.0f} to {r['high']:.0f})" for r in sizes)
    notes = f"Tokens of a turn, median and range: {', '.join(spans)}. "
    return markdown(["applications", *SETUP_COLUMNS], lines) + "\n\n" + notes + _provenance_note("kvflow_peer")


def kvflow_calibration() -> str:
    result = record("kvflow_calibration")
    rows = {r["measure"]: r for r in result["rows"]}
    costs = [
        [label, format_estimate(rows[f"{label}: measured"]), f"{rows[f'{label}: fitted']['value']:.1f}"]
        for label in (m.partition(":")[0] for m in rows if m.endswith(": measured"))
    ]
    shapes: dict[str, list[str]] = {}
    for name in (m.removesuffix(", virtual") for m in rows if m.endswith(", virtual")):
        cells = [format_estimate(rows[f"{name}, measured"], places=2), f"{rows[f'{name}, virtual']['value']:.2f}"]
        shapes.setdefault(name.partition(":")[0], []).extend(cells)
    head = ["tokens", "over device only", "virtual", "over reactive", "virtual"]
    machine = result["machine"]
    notes = (
        f"Fitted: {machine['arithmetic'] / 1e9:.0f} GFLOP/s, {machine['memory'] / 1e9:.1f} GB/s, "
        f"{1e3 * machine['overhead']:.2f} ms a step. Measured: copies at {machine['link'] / 1e9:.1f} GB/s. "
    )
    return (
        markdown(["cost", "measured, ms", "fitted, ms"], costs)
        + "\n\n"
        + markdown(head, ([label, *cells] for label, cells in shapes.items()))
        + "\n\n"
        + notes
        + _provenance_note("kvflow_calibration")
    )


def kvflow_machines() -> str:
    result, lines = record("kvflow_machines"), []
    rows = {r["measure"]: r for r in result["rows"]}
    for label, facts in result["found"].items():
        ratios = [f"{rows[f'{label}: over {side}']['value']:.2f}" for side in list(facts)[:2]]
        hits = [f"{100 - 100 * one['computed'] / one['uses']:.0f}" for one in facts.values()]
        lines.append([label, *ratios, " / ".join(hits), " / ".join(str(one["loads"]) for one in facts.values())])
    shares = ", ".join(f"{100 * share:.0f}% of the {name} rate" for name, share in result["reached"].items())
    rooms = "; ".join(f"{name}: {one['cache tokens']:,} tokens" for name, one in result["machines"].items())
    notes = (
        f"Assumed: {shares} that the maker states (the A10G's link: the paper's 2 GB/s). Room for encodings: {rooms}. "
    )
    head = ["machine, tokens", "over device only", "over reactive", "hits %", "loads"]
    return markdown(head, lines) + "\n\n" + notes + _provenance_note("kvflow_machines")


def kvflow_policies() -> str:
    result = record("kvflow_policies")
    cells: dict[str, dict[str, str]] = {}
    for r in result["rows"]:
        title, _, way = r["measure"].partition(": ")
        cells.setdefault(title, {})[way] = format_estimate(r, 100)
    ways = list(next(iter(cells.values())))
    lines = []
    for title, of in cells.items():
        near = result["closeness"][title.rpartition(", ")[0]]
        lines.append([title, *of.values(), f"{near['distance']:.2f}", f"{near['tau']:.2f}"])
    return (
        markdown(["workflow", *(f"{way} %" for way in ways), "steps apart", "tau"], lines)
        + "\n\n"
        + _provenance_note("kvflow_policies")
    )


def distill() -> str:
    lines = []
    for title, one in record("distill")["runs"].items():
        cells = [format_estimate(one[k], places=3) for k in ("baseline", "before", "after", "gap before", "gap after")]
        facts = [format_estimate(one["closed"], 100, places=0), str(one["traces"]["learn"]), str(one["traces"]["test"])]
        lines.append([_learned(title), one["model"], one["condition"], *cells, *facts])
    head = ["workflow", "model", "condition", "baseline", "reused", "fine-tuned", "gap before", "gap after"]
    return markdown([*head, "closed %", "traces", "held out"], lines) + "\n\n" + _provenance_note("distill")


def distill_goals() -> str:
    """Every training against its goal, the nearest to it first."""
    result = record("distill")
    goals = {row["measure"]: row["must"] for row in result["rows"]}
    lines = []
    for title, one in result["runs"].items():
        closed, goal = one["closed"], goals[f"{title}: gap closed"]
        verdict = "met" if closed["low"] >= goal else "missed" if closed["value"] < goal else "met by the value alone"
        cells = [format_estimate(one.get(what), 100, places=0) for what in ("closed", "divergence closed")]
        lines.append((closed["value"] - goal, [_learned(title), one["model"], *cells, f"{100 * goal:.0f}", verdict]))
    lines.sort(key=lambda line: -line[0])
    head = ["workflow", "model", "gap closed %", "divergence closed %", "goal %", "the goal is"]
    return markdown(head, [cells for _, cells in lines])


def distill_divergence() -> str:
    lines = []
    for title, one in record("distill")["runs"].items():
        if "divergence closed" not in one:
            continue  # measured before it was kept
        cells = [format_estimate(one[f"divergence {when}"], places=4) for when in ("before", "after")]
        where = [f"{stage} {value:.3f}" for stage, value in one["stages"].items() if stage != "all" and value > 1e-3]
        closed = format_estimate(one["divergence closed"], 100, places=0)
        lines.append([_learned(title), one["model"], *cells, closed, ", ".join(where)])
    head = ["workflow", "model", "reused", "fine-tuned", "closed %", "reused, a token of each stage"]
    return markdown(head, lines) if lines else "Not measured yet."


def correction() -> str:
    lines = []
    trained = record("distill")["runs"]
    for title, one in record("correction")["runs"].items():
        cells = [format_estimate(one[when], places=4) for when in ("before", "after")]
        adapter = trained.get(title, {}).get("divergence closed")
        means = [one.get(way, {}).get("closed") for way in ("one for all", "expected", "expected, one for all")]
        undone = [format_estimate(x, 100, places=0) if x else "-" for x in (one["closed"], adapter, *means)]
        learned = [str(x["traces"]["learn"]) if x else "-" for x in (one, trained.get(title))]
        lines.append([_learned(title), one["model"], *cells, *undone, *learned, str(one["traces"]["test"])])
    head = ["workflow", "model", "reused", "corrected", "undone %", "by the adapter %", "by one encoding for all %"]
    head += ["by the expected one %", "by the expected one for all %", "traces", "the adapter's"]
    return markdown([*head, "held out"], lines) + "\n\n" + _provenance_note("correction")


def distill_cost() -> str:
    lines = []
    for title, one in record("distill")["runs"].items():
        training, speed = one["training"], one["one pass"]
        changes = ["none: not its part"] * 2
        if not one.get("readers"):
            result = one["adapted baseline"], one["harm"]["change"]
            changes = [format_estimate(change, places=3, sign=True) for change in result]
        lines.append(
            [
                _learned(title),
                one["model"],
                f"{100 * training['trained_share']:.2f}",
                str(training["updates"]),
                f"{training['seconds']:.1f}",
                f"{training['peak_memory'] / 2**30:.1f}",
                format_estimate(speed["speed-up"], places=1),
                *changes,
            ]
        )
    head = ["workflow", "model", "trained %", "updates", "s a trace", "peak GiB", "one pass over steps"]
    return markdown([*head, "change on the baseline", "change on ordinary text"], lines)


def distill_answers() -> str:
    lines = []
    for title, one in record("distill")["runs"].items():
        for condition, result in one["scores"]["conditions"].items() if "scores" in one else ():
            gap = result["differences"].get("both")
            cells = [format_estimate(result["scores"][k], 100) for k in ("first", "second", "both")]
            facts = [format_estimate(gap, 100, sign=True), format_p_value(gap), str(one["scores"]["n"])]
            lines.append([_learned(title), condition, *cells, *facts])
    head = ["adapter of", "implementation", "Q1 right %", "Q2 right %", "both %", "difference in both", "p", "n"]
    return markdown(head, lines) if lines else "Not measured yet."


def _learned(title: str) -> str:
    """The workflow that a run of `benchmarks/distill.py` trained, and what sets it apart from others of it."""
    workflow, *more = title.split(", ")[:-1]
    return ", ".join([TITLES[workflow], *more])


def quantization() -> str:
    rows = {row["measure"]: row for row in record("quantization")["rows"]}
    lines = []
    for name in dict.fromkeys(measure.partition(":")[0] for measure in rows):
        for way in ("float32", "bfloat16", "int8 weights", "int4 weights"):
            added = rows.get(f"{name}: added log-loss, {way}")
            cells = [format_estimate(rows[f"{name}: log-loss per token, {way}"], places=2)]
            cells.append("" if added is None else format_estimate(added, places=4, sign=True))
            lines.append([name, way, *cells, format_estimate(rows[f"{name}: a decode step, {way}"], places=1)])
    head = ["model", "weights", "log-loss of a token", "added to float32", "decode step, ms"]
    return markdown(head, lines) + "\n\n" + _provenance_note("quantization")


def repair() -> str:
    """Gaps closed and times by share and strategy, of every stage."""
    lines = []
    for name, run in record("repair")["runs"].items():
        title = f"{repair_benchmark.TITLES[name]}; n = {run['n']}" + (", early" if run["early"] else "")
        for row in run["rows"]:
            if row["condition"] == "prefix":
                continue
            closed = [
                "" if row[key] is None else format_estimate(row[key], 100, places=0)
                for key in ("gap_closed", "kl_closed")
            ]
            lines.append(
                [
                    title,
                    row["stage"],
                    row["condition"],
                    format_estimate(row["gap"], places=3, sign=True),
                    closed[0],
                    format_estimate(row["kl"], places=3),
                    closed[1],
                    f"{format_estimate(row['ttft_over_prefix'])}x",
                    f"{row['repaired_tokens']['value']:.0f}",
                ]
            )
            title = ""
    head = [
        "Workflow",
        "Stage",
        "Condition",
        "log-loss gap",
        "closed, %",
        "KL",
        "closed, %",
        "TTFT, prefix mode over this",
    ]
    return markdown([*head, "repaired tokens"], lines) + "\n\n" + _provenance_note("repair")


def budget() -> str:
    """Divergence within the budget and the speed that is kept, of every stage."""
    runs, lines = record("budget")["runs"], []
    for name, run in runs.items():
        title = repair_benchmark.TITLES[name]
        setting = f"{title}; n = {run['n']}, {run.get('max_tokens', 16)} tokens" + (", early" if run["early"] else "")
        for row in run["rows"]:
            is_faster = row["reuse_speedup"]["low"] > 1
            lines.append(
                [
                    setting if row is run["rows"][0] else "",
                    row["stage"],
                    {0: "reused", 1: "computed"}.get(row["share"], f"repaired: {row['share']:.0%}"),
                    *(format_estimate(row[key], places=3) for key in ("reuse_kl", "kl")),
                    *(f"{format_estimate(row[key])}x" for key in ("reuse_speedup", "speedup")),
                    f"{row['kept']:.0%}" if is_faster else "-",
                ]
            )
    head = ["Workflow", "Stage", "Context is", "KL of reuse", "KL", "TTFT, prefix mode over reuse", "over this", "kept"]
    return markdown(head, lines) + "\n\n" + _provenance_note("budget")


def reuse(name: str) -> str:
    head, lines = results_reuse.TABLES[name](record("reuse")["runs"])
    if not lines:
        return "Not measured yet."
    return markdown(head, lines) + ("\n\n" + _provenance_note("reuse") if name == "reuse-quality" else "")


def ray_scale() -> str:
    """Computed tokens and balance of every router, simulated."""
    cells: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in record("ray_scale")["rows"]:
        place, _, measure = row["measure"].partition(": ")
        workload, count, *router = place.split(", ")
        if len(router) == 1:
            cells.setdefault((workload, count), {}).setdefault(router[0], {})[measure] = row["value"]
    routers = list(dict.fromkeys(router for results in cells.values() for router in results))
    routers.sort(key=lambda router: router == TRANSFERS)  # the last one
    lines = []
    for (workload, count), results in cells.items():
        shares = [
            f"{result['computed tokens'] / result['prompt tokens']:.0%} / {result['imbalance']:.1%}, "
            f"{1000 * result['time to first token p99']:.0f} ms"
            if (result := results.get(router))
            else ""
            for router in routers
        ]
        own = results[TRANSFERS]
        moved, state = own["moved tokens"] / own["prompt tokens"], own["state of the router"] / 1e6
        lines.append([workload, count.split()[0], *shares, f"{moved:.0%}", f"{state:.1f} MB"])
    head = ["Workload", "Replicas", *routers, "moved, with transfers", "router's state"]
    return markdown(head, lines) + "\n\n" + _provenance_note("ray_scale")


def ray_routing() -> str:
    """Every router on two real replicas, with predictions, and message routing against the others."""
    rows, lines, ratios = {row["measure"]: row for row in record("ray_routing")["rows"]}, [], []

    def cell(measure: str) -> str:
        row = rows.get(measure)
        if row is None:
            return "not measured yet"
        value, predicted, form = row["value"], row["predicted"], ".1%" if row["unit"] == "share" else ",.0f"
        if row["unit"] == "s":
            return f"{value:.2f} s"
        return f"{value:{form}}" if predicted is None else f"{value:{form}} ({predicted:{form}})"

    for workload in sorted(WORKLOADS):
        for router in routers_of(workload):
            if router != "message":
                lines.append([workload, router, *(cell(f"{workload}, {router}: {name}") for name in ROUTING_COLUMNS)])
        label = f"{workload}: computed tokens of {TRANSFERS}, of the best other router"
        balanced = f"{label} of at most 10% imbalance"
        ratios.append(
            [workload, cell(label), "there is none" if label in rows and balanced not in rows else cell(balanced)]
        )
    head = ["Workload", "Router", *ROUTING_COLUMNS]
    shares = markdown(["Workload", "of the best other router", "of the best of at most 10% imbalance"], ratios)
    return f"{markdown(head, lines)}\n\nComputed tokens of message routing:\n\n{shares}\n\n" + _provenance_note(
        "ray_routing"
    )


ROUTING_COLUMNS = (
    "computed tokens", "prompt tokens", "moved share", "imbalance", "time to first token", "end to end of a workflow",
    "all workflows",
)  # fmt: skip


def ray_scale_load() -> str:
    """Message routing with transfers under more load, simulated."""
    cells: dict[str, dict[str, float]] = {}
    for row in record("ray_scale")["rows"]:
        place, _, measure = row["measure"].partition(": ")
        if "workflows a day" in place:
            cells.setdefault(place, {})[measure] = row["value"]
    lines = []
    for place, result in cells.items():
        workload, count, _, load = place.split(", ", 3)
        times = [result[f"time to first token p{share}"] for share in (50, 99)]
        lines.append([
            workload, count.split()[0], load.replace(" workflows a day", ""), f"{result['hit rate']:.0%}",
            f"{result['moved tokens'] / result['prompt tokens']:.0%}",
            *(f"{1000 * value:,.0f} ms" if value < 10 else f"{value:,.0f} s" for value in times),
            f"{result['imbalance']:.1%}", f"{result['requests running']:.1f}",
            f"{result['most requests waiting at once']:,.0f}", f"{result['link of the busiest sender']:.1%}",
            f"{result['state of the router'] / 1e6:.1f} MB",
        ])  # fmt: skip
    if not lines:
        return "Not measured yet."
    head = ["Workload", "Replicas", "Workflows a day", "hit rate", "moved", "TTFT p50", "TTFT p99", "imbalance"]
    head += ["running, of a replica", "most waiting", "busiest link", "router's state"]
    return markdown(head, lines) + "\n\n" + _provenance_note("ray_scale")


def vllm() -> str:
    """Times of plain vLLM, and its times over those of every other side."""
    rows = {(row["measure"], row["peer"]): row for row in record("vllm")["rows"]}
    sides, lines = (vllm_benchmark.SPANS, vllm_benchmark.MESSAGES, vllm_benchmark.OURS), []
    for program, goals in vllm_benchmark.GOALS.items():
        for measure in ("first token", "end to end"):
            plain = rows[f"{program}: {measure}, {vllm_benchmark.PLAIN}", None]
            ratios = [rows.get((f"{program}: {measure}, {side}", vllm_benchmark.PLAIN)) for side in sides]
            cells = [format_estimate(ratio, places=2) if ratio else "" for ratio in ratios]
            goal = f"{goals[measure]:g}" if measure in goals else ""
            lines.append([program, measure, f"{plain['value']:.3g} s", *cells, goal])
    head = ["workload", "", "plain vLLM", *sides, "goal of the connector"]
    return markdown(head, lines) + "\n\n" + _provenance_note("vllm")


def paper(section: str) -> str:
    """Return the tables and figures of one paper."""
    return markdown(results_papers.HEAD, results_papers.SECTIONS[section](record))


TABLES: Mapping[str, Callable[[], str]] = {
    "ray-routing": ray_routing,
    "ray-scale": ray_scale,
    "ray-scale-load": ray_scale_load,
    "speed": speed,
    "stages": stages,
    "scaling": scaling,
    "accuracy": accuracy,
    "multi-qa": multi_qa,
    "stories": stories,
    "leak": leak,
    "prediction": prediction,
    "fidelity": fidelity,
    "distill-goals": distill_goals,
    "distill": distill,
    "distill-divergence": distill_divergence,
    "correction": correction,
    "distill-cost": distill_cost,
    "distill-answers": distill_answers,
    "prompt-cache": prompt_cache,
    "prompt-cache-answers": prompt_cache_answers,
    "prompt-cache-longbench": prompt_cache_longbench,
    "prompt-cache-quality": prompt_cache_quality,
    "memory": memory,
    "kvflow": kvflow,
    "kvflow-peer": kvflow_peer,
    "kvflow-calibration": kvflow_calibration,
    "kvflow-machines": kvflow_machines,
    "kvflow-policies": kvflow_policies,
    "quantization": quantization,
    "budget": budget,
    "repair": repair,
    "vllm": vllm,
    **{name: partial(reuse, name) for name in results_reuse.TABLES},
    **{f"paper-{name}": partial(paper, name) for name in results_papers.SECTIONS},
}


def fill_tables(text: str) -> str:
    """Return the text of a page with every table generated again."""
    return MARK.sub(lambda m: f"{m[1]}{_table(m['name'])}\n{m[3]}", text)


def _table(name: str) -> str:
    try:
        return TABLES[name]()
    except (FileNotFoundError, KeyError) as missing:  # a benchmark, or a part of one, that nobody has run yet
        return f"Not measured yet ({missing})." if isinstance(missing, KeyError) else "Not measured yet."


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill_tables(page.read_text()))
