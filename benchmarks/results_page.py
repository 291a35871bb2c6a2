"""Write the tables of `docs/results.md` and `benchmarks/results/*.md` from the JSON results, between their marks."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from choreograph.lab.evaluation.report import format_estimate, format_p_value, format_unparsed

from . import repair as repair_benchmark
from . import results_papers, results_reuse  # noqa: F401  they register their tables
from . import retrieval as retrieval_benchmark
from . import vllm as vllm_benchmark
from .common import model_title
from .kvflow import COPIED_AHEAD, DEVICE_ONLY, REACTIVE, VARYING_FIRST
from .ray_scale import TRANSFERS, routers_of
from .ray_workloads import WORKLOADS
from .tables import (
    by_measure,
    estimates,
    fill_tables,
    format_provenance,
    format_row,
    markdown,
    provenance_note,
    record,
    table,
    without_interval,
)
from .torture.campaign import CAMPAIGNS

Result = Mapping[str, Any]  # of a benchmark, as its JSON file holds it

DETAILS = Path(__file__).parent / "results"  # pages with all tables, beside the JSON files
SUMMARY_PAGE = Path(__file__).parents[1] / "docs" / "results.md"
DETAIL_NAMES = ["workflows", "quality", "finetuning", "prompt_cache", "kvflow", "layer_reuse", "quantization", "repair"]
PAGES = (
    SUMMARY_PAGE,
    *(
        SUMMARY_PAGE.with_name(f"{name}.md")
        for name in ("benchmarks", "scale", "explain", "vllm", "repair", "quality", "server", "concepts", "reliability")
    ),
    *(DETAILS / f"{name}.md" for name in DETAIL_NAMES),
)
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
TITLES |= {
    "peer": "PEER",
    "single_call": "Direct",
    "debate_iterative": "Iterative debate",
    "debate_parallel": "Parallel debate",
}
STRATEGIES = {"pd-none": "none", "pd-cooperate": "always cooperate", "pd-defect": "always defect"}

# -- Prompt Choreography ----------------------------------------------------------------------------------------


@table("speed", "speed")
def speed(result: Result) -> Any:
    rows, options, lines = by_measure(result), result["options"], []
    papers = (
        ("Tree of Thoughts", "3.5 (3.26, 3.82)", "1.031 (1.026, 1.036)"),
        ("iterative debate", "2.0 (1.94, 2.07)", "1.036 (1.028, 1.045)"),
        ("parallel debate", "6.2 (5.6, 6.8)", "1.027 (1.023, 1.032)"),
    )
    forms = [(f"{title}, the paper's form", *cells) for title, *cells in papers]
    for title, ttft, e2e in (line for line in (*papers, *forms) if line[0] in options):
        measures = ("TTFT, steps", "TTFT, all decodes", "prompt tokens encoded", "correlation of speed-up and tokens")
        steps, decodes, tokens, r = estimates(rows, (f"{title}: {m}" for m in measures), places=2)
        end_to_end = format_estimate(rows[f"{title}: end to end"], places=3)
        facts = [str(options[title]["max_tokens"]), str(options[title]["n"])]
        lines.append([title, steps, ttft, decodes, end_to_end, e2e, tokens, r, *facts])
    head = "workflow | TTFT ratio | paper | over all decodes | end to end | paper | prompt tokens | r with tokens"
    return f"{head} | limit of tokens | n", lines


@table("stages", "speed", provenance=False)
def stages(result: Result) -> Any:
    lines = []
    for r in result["rows"]:
        title, _, measure = r["measure"].partition(": TTFT, ")
        if measure and measure not in ("all decodes", "steps"):
            lines.append([title, measure, format_estimate(r, places=2), str(result["options"][title]["n"])])
    return "workflow | stage | TTFT ratio | n", lines


@table("scaling", "scaling")
def scaling(result: Result) -> Any:
    rows, options = by_measure(result), result["options"]
    grid = [re.match(r"(\d+) branches, (\d+) voters: end to end", measure) for measure in rows]
    cells = {(int(g[1]), int(g[2])): rows[g[0]] for g in grid if g}
    voters = sorted({v for _, v in cells})
    lines = [[str(b), *(format_estimate(cells[b, v], places=2) for v in voters)] for b in sorted({b for b, _ in cells})]
    best = next(r for r in result["rows"] if r["measure"].startswith("best"))
    note = (
        f"Solutions of {options['length']} tokens, n = {options['problems']} problems a point. "
        f"The {best['measure']}: {format_estimate(best, places=2)}. "
    )
    return ["branches", *(f"{v} voters" if v > 1 else "1 voter" for v in voters)], lines, note


def _conditions(summary: Result | None, metric: str) -> Iterator[tuple[str, Result, list[str], str]]:
    """Yield every condition with its name, the difference in a metric with p, and the number of examples."""
    for name, condition in summary["conditions"].items() if summary else ():
        gap = condition["differences"].get(metric)
        yield name, condition, [format_estimate(gap, 100, sign=True), format_p_value(gap)], str(summary["n"])


@table("accuracy", "quality")
def accuracy(result: Result) -> Any:
    lines = []
    names = ("direct", "mad_iter", "tree_of_thoughts", "mad_par")
    for data, title in (("math", "MATH"), ("gsm8k", "GSM8K")):
        for workflow in (run for name in names for run in (name, f"{name}-paper")):
            summary = result["summaries"].get(f"{data}-{workflow}")
            for name, condition, gap, n in _conditions(summary, "right"):
                cut = f"{100 * sum(condition['cut'].values()) / sum(condition['calls'].values()):.0f}"
                right = format_estimate(condition["scores"]["right"], 100)
                lines.append([title, TITLES[workflow], name, right, *gap, format_unparsed(condition, int(n)), cut, n])
    return "data | workflow | implementation | right % | difference | p | unread steps / answers | cut % | n", lines


@table("multi-qa", "quality", provenance=False)
def multi_qa(result: Result) -> Any:
    lines = []
    data = (("qa-nq_oracle", "questions with passages"), ("qa-triviaqa", "TriviaQA, closed book"))
    forms = [(f"{name}-paper", f"{title}, the paper's form") for name, title in data]
    for run, title in (*data, *forms):
        summary = result["summaries"].get(run)
        for name, condition, gap, n in _conditions(summary, "both"):
            cut = f"{100 * condition['cut'].get('answer', 0) / summary['n']:.0f}"
            lines.append([title, name, *estimates(condition["scores"], ("first", "second", "both"), 100), *gap, cut, n])
    head = "data | implementation | Q1 right % | Q2 right % | both % | difference in both | p | cut % | n"
    return head, lines


@table("stories", "quality", provenance=False)
def stories(result: Result) -> Any:
    lines = []
    for name, condition, (gap, _), n in _conditions(result["summaries"]["bsm"], "coverage"):
        cut = [f"{100 * condition['cut'][stage] / condition['calls'][stage]:.0f}" for stage in ("solve", "merge")]
        cells = estimates(condition["scores"], ("coverage", "story 1", "story 2"), 100)
        lines.append([name, *cells, gap, " / ".join(cut), n])
    head = "implementation | concepts % | of story 1 | of story 2 | difference | stories / merges cut % | n"
    return head, lines


def _games(result: Result) -> dict[str, Any]:
    """Return the summaries of the games by Alice's strategy."""
    summaries = result["summaries"]
    return {strategy: summaries[name] for name, strategy in STRATEGIES.items() if name in summaries}


@table("leak", "quality", provenance=False)
def leak(result: Result) -> Any:
    lines = []
    for strategy, summary in _games(result).items():
        for name, condition, gap, n in _conditions(summary, "Bob cooperates"):
            cooperates = format_estimate(condition["scores"]["Bob cooperates"], 100)
            unread = f"{100 * condition['scores']['unread']['value']:.0f}"
            lines.append([strategy, name, cooperates, *gap, unread, n])
    return "Alice's strategy | implementation | Bob cooperates % | difference | p | unread % | n", lines


@table("prediction", "quality", provenance=False)
def prediction(result: Result) -> Any:
    lines = []
    shown = ("Alice cooperates", "predicts cooperation", "predicts right", "exploits", "defends")
    for condition, title in (("baseline", "Baseline"), ("leak both", "Choreographed")):
        for strategy, summary in _games(result).items():
            scores = summary["conditions"][condition]["scores"]
            lines.append([title, strategy, *estimates(scores, shown, 100, places=0), str(summary["n"])])
    return ["implementation", "Alice's strategy", *(f"{k} %" for k in shown), "n"], lines


@table("fidelity", "fidelity")
def fidelity(result: Result) -> Any:
    lines = []
    for name, run in result["runs"].items():
        title = f"{TITLES[run['workflow']]}, {STRATEGIES.get(name, run['data'])}"
        for r in run["rows"]:
            cells = [format_estimate(r[k], places=3, sign=k == "gap") for k in ("before", "after", "gap", "divergence")]
            lines.append([title, r["condition"], r["stage"], *cells, str(r["tokens"]), str(run["n"])])
    return "workflow | condition | decodes | log-loss, baseline | reused | gap | KL | tokens | traces", lines


# -- training ---------------------------------------------------------------------------------------------------


def _learned(title: str) -> str:
    """Return the workflow that a run of `benchmarks/distill.py` trained, and what sets it apart from others of it."""
    workflow, *more = title.split(", ")[:-1]
    return ", ".join([TITLES[workflow], *more])


@table("distill", "distill")
def distill(result: Result) -> Any:
    lines = []
    for title, run in result["runs"].items():
        cells = estimates(run, ("baseline", "before", "after", "gap before", "gap after"), places=3)
        facts = [format_estimate(run["closed"], 100, places=0), str(run["traces"]["learn"]), str(run["traces"]["test"])]
        lines.append([_learned(title), run["model"], run["condition"], *cells, *facts])
    head = "workflow | model | condition | baseline | reused | fine-tuned | gap before | gap after"
    return f"{head} | closed % | traces | held out", lines


@table("distill-goals", "distill", provenance=False)
def distill_goals(result: Result) -> Any:
    """Every training against its goal, the nearest to it first."""
    goals, lines = {row["measure"]: row["must"] for row in result["rows"]}, []
    for title, run in result["runs"].items():
        closed, goal = run["closed"], goals[f"{title}: gap closed"]
        verdict = "met" if closed["low"] >= goal else "missed" if closed["value"] < goal else "met by the value alone"
        cells = [format_estimate(run.get(what), 100, places=0) for what in ("closed", "divergence closed")]
        lines.append((closed["value"] - goal, [_learned(title), run["model"], *cells, f"{100 * goal:.0f}", verdict]))
    lines.sort(key=lambda line: -line[0])
    head = "workflow | model | gap closed % | divergence closed % | goal % | the goal is"
    return head, [cells for _, cells in lines]


@table("distill-divergence", "distill", provenance=False)
def distill_divergence(result: Result) -> Any:
    lines = []
    for title, run in result["runs"].items():
        if "divergence closed" not in run:
            continue  # measured before it was kept
        cells = estimates(run, ("divergence before", "divergence after"), places=4)
        where = [f"{stage} {value:.3f}" for stage, value in run["stages"].items() if stage != "all" and value > 1e-3]
        closed = format_estimate(run["divergence closed"], 100, places=0)
        lines.append([_learned(title), run["model"], *cells, closed, ", ".join(where)])
    return "workflow | model | reused | fine-tuned | closed % | reused, a token of each stage", lines


@table("correction", "correction")
def correction(result: Result) -> Any:
    trained, lines = record("distill")["runs"], []
    for title, run in result["runs"].items():
        adapter = trained.get(title, {}).get("divergence closed")
        means = [run.get(way, {}).get("closed") for way in ("one for all", "expected", "expected, one for all")]
        undone = [format_estimate(x, 100, places=0) if x else "-" for x in (run["closed"], adapter, *means)]
        learned = [str(x["traces"]["learn"]) if x else "-" for x in (run, trained.get(title))]
        cells = estimates(run, ("before", "after"), places=4)
        lines.append([_learned(title), run["model"], *cells, *undone, *learned, str(run["traces"]["test"])])
    head = "workflow | model | reused | corrected | undone % | by the adapter % | by one encoding for all %"
    more = "by the expected one % | by the expected one for all % | traces | the adapter's | held out"
    return f"{head} | {more}", lines


@table("distill-cost", "distill", provenance=False)
def distill_cost(result: Result) -> Any:
    lines = []
    for title, run in result["runs"].items():
        training, changes = run["training"], ["none: not its part"] * 2
        if not run.get("readers"):
            estimated = run["adapted baseline"], run["harm"]["change"]
            changes = [format_estimate(change, places=3, sign=True) for change in estimated]
        cost = [f"{100 * training['trained_share']:.2f}", str(training["updates"]), f"{training['seconds']:.1f}"]
        cost += [f"{training['peak_memory'] / 2**30:.1f}", format_estimate(run["one pass"]["speed-up"], places=1)]
        lines.append([_learned(title), run["model"], *cost, *changes])
    head = "workflow | model | trained % | updates | s a trace | peak GiB | one pass over steps"
    return f"{head} | change on the baseline | change on ordinary text", lines


@table("distill-answers", "distill", provenance=False)
def distill_answers(result: Result) -> Any:
    lines = []
    for title, run in result["runs"].items():
        for name, condition, gap, n in _conditions(run.get("scores"), "both"):
            cells = estimates(condition["scores"], ("first", "second", "both"), 100)
            lines.append([_learned(title), name, *cells, *gap, n])
    return "adapter of | implementation | Q1 right % | Q2 right % | both % | difference in both | p | n", lines


# -- Prompt Cache -----------------------------------------------------------------------------------------------


@table("prompt-cache", "prompt_cache")
def prompt_cache(result: Result) -> Any:
    rows, lines = by_measure(result), []
    for label in [m.partition(":")[0] for m in rows if m.endswith(": against Hugging Face")]:
        ratios = estimates(rows, (f"{label}: {m}" for m in ("against no reuse", "against Hugging Face")))
        times = [f"{rows[f'{label}: {m}']['value']:.0f}" for m in ("from modules", "no reuse", "Hugging Face")]
        lines.append([label, *ratios, *times])
    host = rows["5120 cached, 32 new: modules copied in from host memory"]
    slopes = {how: rows[f"growth, {how}: line through all points"]["value"] for how in ("from modules", "no reuse")}
    share = rows[f"growth, no reuse: share of the square term at {result['points']['no reuse'][-1][0]}"]["value"]
    note = (
        f"With modules that wait in host memory (5120 cached, 32 new): {format_estimate(host, places=0)} ms. "
        f"Growth: {slopes['from modules']:.1f} ms for every 1,000 cached tokens (whole prefill: "
        f"{slopes['no reuse']:.0f} ms on average, {100 * share:.0f}% of its growth to the last point from a square). "
    )
    head = "tokens | against no reuse | against Hugging Face | from modules, ms | no reuse, ms | Hugging Face, ms"
    return head, lines, note


@table("prompt-cache-answers", "prompt_cache")
def prompt_cache_answers(result: Result) -> Any:
    rows, answer = by_measure(result), "5120 cached, 32 new, 32 generated"
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
    note = (
        f"A later token takes {later[0]} ms from modules and {later[1]} ms without reuse. Copying keys and values of "
        f"5,000 tokens from host memory to host memory: {format_estimate(rows['copy of 5000 tokens, host to host'])} ms. "
    )
    return "what | against no reuse | from modules, ms | no reuse, ms", lines, note


@table("prompt-cache-longbench", "prompt_cache_longbench")
def prompt_cache_longbench(result: Result) -> Any:
    rows, lines = by_measure(result), []

    def values(task: str, measure: str, sides: tuple[str, ...], form: str) -> list[str]:
        return [f"{rows[f'{task}: {measure.format(side)}']['value']:{form}}" for side in sides]

    for task, counts in result["counts"].items():
        if not counts["n"]:
            continue
        sizes = values(task, "{} tokens", ("cached", "new"), ",.0f")
        places = ("on the device", "in host memory")
        ratios = [format_row(rows[f"{task}: first token, whole against modules {place}"]) for place in places]
        firsts = values(task, "first token, {}", ("device", "host", "whole"), ",.0f")
        later = values(task, "each later token, {}", ("device", "whole"), ".0f")
        ends = values(task, "end to end, {}", ("device", "whole"), ",.0f")
        lines.append([task, str(counts["n"]), *sizes, *ratios, *firsts, " / ".join(later), " / ".join(ends)])
    head = "data set | n | cached | new | resident modules, x | in host memory, x | resident, ms | host, ms"
    return f"{head} | read whole, ms | later token, modules / whole, ms | end to end, modules / whole, ms", lines


@table("prompt-cache-quality", "prompt_cache_quality")
def prompt_cache_quality(result: Result) -> Any:
    lines = []
    for label, data in result["tables"].items():
        gap = format_row(data["difference"], 100, sign=True)
        facts = [f"{100 * data['same']:.0f}", f"{data['documents']:.0f}", str(data["n"])]
        facts += [str(data["too_long"]), f"{data['longest']:,}"]
        scores = [format_row(data[side], 100) for side in ("whole", "modules")]
        lines.append([label, data["measure"], *scores, gap, *facts])
    head = "data | score | read whole | from modules | difference | same answer % | modules | n | too long"
    return f"{head} | above so many words", lines


@table("memory", "memory", provenance=False)
def memory(result: Result) -> Any:
    rows, lines = by_measure(result), []
    for name, shape in result["shapes"].items():
        ways = ("every head, as the paper counts", "as the model keeps them")
        paper = "" if shape["paper"] is None else f"{shape['paper']:g}"
        lines.append([name, paper, *(f"{rows[f'{name}: {way}']['value']:.2f}" for way in ways)])
    return "model | paper, MB | every head, MiB | as the model keeps them, MiB", lines


# -- KVFlow -----------------------------------------------------------------------------------------------------

BASELINES = (DEVICE_ONLY, REACTIVE, COPIED_AHEAD, VARYING_FIRST)
RATIO_COLUMNS = "over device only | over reactive | over copied ahead | over varying first"
SETUP_COLUMNS = f"{RATIO_COLUMNS} | turns a second | computed again, of uses | found %"


def _ratio_cells(rows: Mapping[str, Any], label: str, *, exact: bool = False) -> list[str]:
    """Return the speed-ups over each baseline; empty for one that was not run."""
    found = [rows.get(f"{label}: over {name}") for name in BASELINES]
    shown = [without_interval(row) if exact and row is not None else row for row in found]
    return ["" if row is None else format_row(row, places=2) for row in shown]


def _setup_cells(result: Result, label: str, counts: Mapping[str, Any]) -> list[str]:
    """Return how fast each setup is, and what of the fixed prompts it found."""
    rows = by_measure(result)
    speeds = " / ".join(estimates(rows, (f"{label}: {name}, throughput" for name in counts), places=2))
    again = " / ".join(str(count["computed"]) for count in counts.values())
    hits = " / ".join(f"{100 - 100 * count['computed'] / count['uses']:.0f}" for count in counts.values())
    return [*_ratio_cells(rows, label), speeds, f"{again} of {next(iter(counts.values()))['uses']}", hits]


def _overhead_note(result: Result) -> str:
    """Return what hints cost where nothing is evicted."""
    rows = [row for row in result["rows"] if row["measure"].endswith("time over reactive")]
    cells = (f"{row['measure'].partition(':')[0]}: {format_row(row, places=3)}" for row in rows)
    return f"Time of the step graph over that of reactive loading: {'; '.join(cells)}. " if rows else ""


@table("kvflow", "kvflow")
def kvflow(result: Result) -> Any:
    lines = [
        [f"{label}{', at once' if kind == 'crowd' else ''}", *_setup_cells(result, label, facts)]
        for kind, sets in result["found"].items()
        for label, facts in sets.items()
    ]
    return f"tokens | {SETUP_COLUMNS}", lines, _overhead_note(result)


@table("kvflow-peer", "kvflow_peer")
def kvflow_peer(result: Result) -> Any:
    sizes = [r for r in result["rows"] if r["measure"].startswith("tokens a turn")]
    spans = (f"{r['measure'].partition(', ')[2]} {r['value']:.0f} ({r['low']:.0f} to {r['high']:.0f})" for r in sizes)
    lines = [[label, *_setup_cells(result, label, facts)] for label, facts in result["found"].items()]
    return f"applications | {SETUP_COLUMNS}", lines, f"Tokens of a turn, median and range: {', '.join(spans)}. "


@table("kvflow-calibration", "kvflow_calibration")
def kvflow_calibration(result: Result) -> Any:
    rows, machine = by_measure(result), result["machine"]
    costs = [
        [label, format_estimate(rows[f"{label}: measured"]), f"{rows[f'{label}: fitted']['value']:.1f}"]
        for label in (m.partition(":")[0] for m in rows if m.endswith(": measured"))
    ]
    shapes: dict[str, list[str]] = {}
    for name in (m.removesuffix(", virtual") for m in rows if m.endswith(", virtual")):
        cells = [format_estimate(rows[f"{name}, measured"], places=2), f"{rows[f'{name}, virtual']['value']:.2f}"]
        shapes.setdefault(name.partition(":")[0], []).extend(cells)
    virtual = markdown(
        "tokens | over device only | virtual | over reactive | virtual", ([k, *cells] for k, cells in shapes.items())
    )
    note = (
        f"Fitted: {machine['arithmetic'] / 1e9:.0f} GFLOP/s, {machine['memory'] / 1e9:.1f} GB/s, "
        f"{1e3 * machine['overhead']:.2f} ms a step. Measured: copies at {machine['link'] / 1e9:.1f} GB/s. "
    )
    return "cost | measured, ms | fitted, ms", costs, f"{virtual}\n\n{note}"


@table("kvflow-machines", "kvflow_machines")
def kvflow_machines(result: Result) -> Any:
    rows, lines = by_measure(result), []
    for label, facts in result["found"].items():
        hits = [f"{100 - 100 * count['computed'] / count['uses']:.0f}" for count in facts.values()]
        loads = " / ".join(str(count["loads"]) for count in facts.values())
        lines.append([label, *_ratio_cells(rows, label, exact=True), " / ".join(hits), loads])
    shares = ", ".join(f"{100 * share:.0f}% of the {name} rate" for name, share in result["reached"].items())
    rooms = "; ".join(f"{name}: {facts['cache tokens']:,} tokens" for name, facts in result["machines"].items())
    note = (
        f"Assumed: {shares} that the maker states (the A10G's link: the paper's 2 GB/s). Room for encodings: {rooms}. "
    )
    return f"machine, tokens | {RATIO_COLUMNS} | hits % | loads", lines, note + _overhead_note(result)


@table("kvflow-policies", "kvflow_policies")
def kvflow_policies(result: Result) -> Any:
    cells: dict[str, dict[str, str]] = {}
    for r in result["rows"]:
        title, _, way = r["measure"].partition(": ")
        if not way:
            continue  # a time
        cells.setdefault(title, {})[way] = f"{100 * r['value']:.1f}"  # simulated: an interval would say nothing
    lines = []
    for title, shares in cells.items():
        near = result["closeness"][title.rpartition(", ")[0]]
        lines.append([title, *shares.values(), f"{near['distance']:.2f}", f"{near['tau']:.2f}"])
    times = [f"{r['measure']}: {format_row(r, places=2)} ms" for r in result["rows"] if r["unit"] == "ms"]
    note = f"{'; '.join(times)}. ".capitalize() if times else ""
    return ["workflow", *(f"{way} %" for way in next(iter(cells.values()))), "steps apart", "tau"], lines, note


# -- the rest ---------------------------------------------------------------------------------------------------


@table("quantization", "quantization")
def quantization(result: Result) -> Any:
    rows, lines = by_measure(result), []
    for name in dict.fromkeys(measure.partition(":")[0] for measure in rows):
        for way in ("float32", "bfloat16", "int4 weights"):
            added = format_estimate(rows.get(f"{name}: added log-loss, {way}"), places=4, sign=True)
            loss = format_estimate(rows[f"{name}: log-loss per token, {way}"], places=2)
            lines.append([name, way, loss, added, format_estimate(rows[f"{name}: a decode step, {way}"], places=1)])
    return "model | weights | log-loss of a token | added to float32 | decode step, ms", lines


@table("repair", "repair")
def repair(result: Result) -> Any:
    """Gaps closed and times by share and strategy, of every stage."""
    lines = []
    for name, run in result["runs"].items():
        title = f"{repair_benchmark.TITLES[name]}; n = {run['n']}" + (", early" if run["early"] else "")
        for row in run["rows"]:
            if row["condition"] == "prefix":
                continue
            gap, closed = (format_estimate(row[key], 100, places=0) for key in ("gap_closed", "kl_closed"))
            cells = [
                format_estimate(row["gap"], places=3, sign=True),
                gap,
                format_estimate(row["kl"], places=3),
                closed,
            ]
            cells += [f"{format_estimate(row['ttft_over_prefix'])}x", f"{row['repaired_tokens']['value']:.0f}"]
            lines.append([title, row["stage"], row["condition"], *cells])
            title = ""
    head = "Workflow | Stage | Condition | log-loss gap | closed, % | KL | closed, % | TTFT, prefix mode over this"
    return f"{head} | repaired tokens", lines


@table("repair-costs", "repair", provenance=False)
def repair_costs(result: Result) -> Any:
    """First tokens of retrieval and votes, over those of reuse, of prefix mode and of the bound."""
    lines = []
    for name, part in result["costs"].items():
        title = f"{name}; n = {part['n']}"
        for row in part["rows"]:
            ratios = [
                "-" if row[key] is None else f"{format_estimate(row[key], places=2)}x"
                for key in ("over_reuse", "prefix_over", "over_bound")
            ]
            if row["condition"] in ("decode step", "prefill of 256 tokens"):
                ratios = ["-"] * 3
            cells = [row["condition"], format_estimate(row["ms"], places=0), f"{row['tokens']:.0f}", *ratios]
            lines.append([title, *cells])
            title = ""
    head = "Call, model | Condition | first token, ms | tokens repaired | over reuse | prefix mode over this | over its bound"
    return head, lines, f"`benchmarks/repair.py --cost`, {format_provenance(result['costs'].values())}."


@table("repair-answers", "repair", provenance=False)
def repair_answers(result: Result) -> Any:
    """F1 of retrieval, and what is closed of the divergence from prefix mode."""
    lines = []
    for name, part in result["answers"].items():
        title = f"{name}; n = {part['n']}"
        for row in part["rows"]:
            cells = [row["condition"], f"{row['repaired_tokens']:.0f}", f"{row['right']:.0f}"]
            cells += [format_estimate(row["f1"]), format_estimate(row["f1_change"], sign=True)]
            cells += [format_estimate(row["kl"], places=3), format_estimate(row["kl_closed"], 100, places=0)]
            lines.append([title, *cells])
            title = ""
    head = "Questions, model | Condition | tokens repaired | right | F1 | minus prefix mode | KL | closed, %"
    return head, lines, f"`benchmarks/repair.py --answers`, {format_provenance(result['answers'].values())}."


DATA_TITLES = {"nq_oracle": "Natural Questions", "hotpotqa": "HotpotQA"}


def _align_runs(result: Result, *, is_retrieval: bool) -> Iterator[tuple[str, Result]]:
    """Yield the title and the run of every measurement of retrieval, or of workflows."""
    for name, run in result["runs"].items():
        model, _, part = name.partition(": ")
        if part != "cost" and is_retrieval == (part in DATA_TITLES):
            title = DATA_TITLES.get(part) or repair_benchmark.TITLES[part]
            n = run["rows"][0]["n"] if is_retrieval else run["examples"]
            temperature, scale = (f"{run['alignment'][key]:.3g}" for key in ("temperature", "scale"))
            yield f"{title}, {model_title(model)}, {temperature} and {scale}; n = {n}", run


@table("align", "align", provenance=False)
def align(result: Result) -> Any:
    """What questions over documents answer with aligned attention."""
    lines, runs = [], dict(_align_runs(result, is_retrieval=True))
    for title, run in runs.items():
        for row in run["rows"]:
            over = ["-" if row["condition"] == "reuse" else format_estimate(row["f1 over reuse"], 100, sign=True)]
            divergence = [
                format_estimate(row["kl"], places=3),
                format_estimate(row["kl over reuse"], places=3, sign=True),
            ]
            if row["condition"] in ("prefix", "reuse"):
                divergence = ["-", "-"] if row["condition"] == "prefix" else [divergence[0], "-"]
            right = f"{row['right']['value'] * row['n']:.0f}"
            first = title if row is run["rows"][0] else ""
            lines.append([first, row["condition"], right, format_estimate(row["f1"], 100), *over, *divergence])
    head = "Questions, model, temperature and scale | Condition | right | F1 | over reuse, points | KL | over reuse"
    return head, lines, f"`benchmarks/align.py`, {format_provenance(runs.values())}."


@table("align-workflows", "align", provenance=False)
def align_workflows(result: Result) -> Any:
    """Divergence with aligned attention, of stages where reuse diverges by 0.005 nats or more."""
    lines, runs = [], dict(_align_runs(result, is_retrieval=False))
    for title, run in runs.items():
        reuse = {row["stage"]: row["kl"]["value"] for row in run["rows"] if row["condition"] == "reuse"}
        for stage in [stage for stage, kl in reuse.items() if kl >= 0.005]:
            rows = [row for row in run["rows"] if row["stage"] == stage and row["condition"] != "prefix"]
            rows.sort(key=lambda row: row["condition"] != "reuse")
            for row in rows:
                over = "-" if row is rows[0] else format_estimate(row["kl_over_reuse"], places=3, sign=True)
                lines.append([title, stage, row["condition"], format_estimate(row["kl"], places=3), over])
                title = stage = ""
    head = "Workflow, model, temperature and scale | Stage | Condition | KL | over reuse"
    return head, lines, f"`benchmarks/align.py`, {format_provenance(runs.values())}."


@table("budget", "budget")
def budget(result: Result) -> Any:
    """Divergence within the budget and the speed that is kept, of every stage."""
    lines = []
    for name, run in result["runs"].items():
        title = repair_benchmark.TITLES[name]
        setting = f"{title}; n = {run['n']}, {run.get('max_tokens', 16)} tokens" + (", early" if run["early"] else "")
        for row in run["rows"]:
            strategy = row.get("strategy") or run.get("strategy")
            share = {0: "reused", 1: "computed"}.get(row["share"], f"repaired: {row['share']:.0%}, `{strategy}`")
            speedups = [f"{format_estimate(row[key])}x" for key in ("reuse_speedup", "speedup")]
            kept = f"{row['kept']:.0%}" if row["reuse_speedup"]["low"] > 1 else "-"
            cells = [row["stage"], share, *estimates(row, ("reuse_kl", "kl"), places=3), *speedups, kept]
            lines.append([setting if row is run["rows"][0] else "", *cells])
    head = "Workflow | Stage | Context is | KL of reuse | KL | TTFT, prefix mode over reuse | over this | kept"
    return head, lines


def _rules(result: Result, part: str) -> Iterator[tuple[str, Result, Result]]:
    """Yield the rest of the name, the run and each row of the runs whose names start with a part."""
    for name, run in result["runs"].items():
        if name.startswith(part):
            yield from ((name.removeprefix(part).removeprefix(", "), run, row) for row in run["rows"])


def _rules_note(result: Result, *parts: str) -> str:
    """Return where the runs come from whose names start with one of the parts, and their models."""
    runs = [run for name, run in result["runs"].items() if name.startswith(parts)]
    models = ", ".join(dict.fromkeys(model_title(run["model"]) for run in runs))
    return f"`benchmarks/rules.py`, {format_provenance(runs)}; {models}."


def _times(result: Result, data: str) -> dict[str, list[str]]:
    """Return the cells of first tokens and computed tokens by program."""
    rows = result["runs"].get(f"first tokens, {data}", {"rows": ()})["rows"]
    return {
        row["program"]: [f"{format_estimate(row['prefix_over_ttft'])}x", f"{row['computed']['value']:.0f}"]
        for row in rows
    }


@table("rules-question", "rules", provenance=False)
def rules_question(result: Result) -> Any:
    """What a question that saw nothing of the documents costs."""
    run, times = result["runs"]["documents, nq_oracle"], _times(result, "nq_oracle")
    shown = {
        "all rules, prefix mode": "prefix mode",
        "all rules": "the question in the header, or prefilled with the documents as parents",
        "question on its own, last": "the question prefilled on its own, then given as a parent",
    }
    rows, lines = {row["program"]: row for row in run["rows"]}, []
    for program, title in shown.items():
        row = rows[program]
        right = f"{row['right']['value'] * run['n']:.0f} of {run['n']}"
        over = format_estimate(row["right_over_reference"], 100, sign=True)
        lines.append([title, right, over, *times[program]])
    head = "program | right | over the question in the header, points | first token, prefix mode over this"
    note = _rules_note(result, "documents, nq_oracle", "first tokens, nq_oracle")
    return f"{head} | tokens computed for a question", lines, note


@table("rules-documents", "rules", provenance=False)
def rules_documents(result: Result) -> Any:
    """What programs answer that differ in one rule."""
    lines = []
    for data, run, row in _rules(result, "documents"):
        title = f"{DATA_TITLES[data]}, n = {run['n']}" if row is run["rows"][0] else ""
        over = format_estimate(row["f1_over_reference"], 100, sign=True)
        times = _times(result, data).get(row["program"], ["", ""])
        lines.append([title, row["program"], *estimates(row, ("right", "f1"), 100), over, *times])
    head = "data | program | right % | F1 | F1 over all rules, points | first token, prefix mode over this"
    return f"{head} | tokens computed", lines, _rules_note(result, "documents", "first tokens")


@table("rules-judges", "rules", provenance=False)
def rules_judges(result: Result) -> Any:
    """What judges name that read the answers in different ways."""
    lines = []
    for _, run, row in _rules(result, "judges"):
        over = format_estimate(row["right_over_exact"], 100, sign=True)
        cells = [*estimates(row, ("as_exact", "right"), 100), over, f"{format_estimate(row['exact_over_ttft'])}x"]
        lines.append([row["program"], *cells, f"{row['computed']['value']:.0f}", str(run["n"])])
    head = "judge | same answer as exact % | right % | over exact, points | first token, exact over this"
    return f"{head} | tokens computed | n", lines, _rules_note(result, "judges")


PREFIX_MODE = ", prefix mode"  # ends the names of forms that run in it


@table("rules-workflows", "rules", provenance=False)
def rules_workflows(result: Result) -> Any:
    """What the forms of workflows score in both modes."""
    lines = []
    for name, run, row in _rules(result, "workflows"):
        workflow, *model = name.split(", ")
        title = ", ".join([TITLES[workflow], *model, f"n = {run['n']}"]) if row is run["rows"][0] else ""
        score = next(key for key in row if key not in ("program", "over_prefix_mode", "over_first_form", "computed"))
        first = run["rows"][0]["program"]
        bases = {
            "over_prefix_mode": row["program"].endswith(PREFIX_MODE),
            "over_first_form": f"{row['program']}{PREFIX_MODE}" == first,
        }
        gaps = ["-" if is_base else format_estimate(row[key], 100, sign=True) for key, is_base in bases.items()]
        cells = [f"{format_estimate(row[score], 100)} ({score})", *gaps, f"{row['computed']['value']:.0f}"]
        lines.append([title, row["program"].replace("_", " "), *cells])
    head = "workflow | form | score % | over its prefix mode, points | over the first form, choreographed"
    return f"{head} | tokens computed", lines, _rules_note(result, "workflows")


@table("quoting", "serve", provenance=False)
def quoting(result: Result) -> Any:
    """What quotes cost, by the shortest that is reused."""
    rows, lines, made = by_measure(result), [], []
    above = ", log-probability above that in exact, "
    for measure, row in rows.items():
        place, _, side = measure.removeprefix("quoting: ").partition(above)
        if not side:
            continue
        same, computed, f1, over = (
            rows.get(f"quoting: {place}, {what}, {side}")
            for what in (
                "text equal to exact up to a difference",
                "prompt tokens computed",
                "F1",
                "F1 above that of exact",
            )
        )
        cells = [format_estimate(row, places=3, sign=True), format_estimate(same, 100, places=0)]
        cells += [format_estimate(f1, 100), format_estimate(over, 100, sign=True)]
        lines.append([place, side, *cells, f"{computed['value']:.0f}" if computed else ""])
        made.append(row["made"])
    head = "program | what is reused | log-probability above that in exact, nats a token | text as in exact %"
    return (
        f"{head} | F1 | over exact, points | prompt tokens computed",
        lines,
        f"`benchmarks/serve.py`, {format_provenance(made)}.",
    )


def _places(result: Result) -> Iterator[tuple[list[str], str, float]]:
    """Yield the parts of the place, the measure and the value of every row."""
    for row in result["rows"]:
        place, _, measure = row["measure"].partition(": ")
        yield place.split(", ", 3), measure, row["value"]


@table("ray-scale", "ray_scale")
def ray_scale(result: Result) -> Any:
    """Computed tokens and balance of every router, simulated."""
    cells: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for (workload, count, *router), measure, value in _places(result):
        if len(router) == 1:
            cells.setdefault((workload, count), {}).setdefault(router[0], {})[measure] = value
    routers = list(dict.fromkeys(router for results in cells.values() for router in results))
    routers.sort(key=lambda router: router == TRANSFERS)  # the last one
    lines = []
    for (workload, count), results in cells.items():
        shares = [
            f"{part['computed tokens'] / part['prompt tokens']:.0%} / {part['imbalance']:.1%}, "
            f"{1000 * part['time to first token p99']:.0f} ms"
            if (part := results.get(router))
            else ""
            for router in routers
        ]
        own = results[TRANSFERS]
        moved, state = own["moved tokens"] / own["prompt tokens"], own["state of the router"] / 1e6
        lines.append([workload, count.split()[0], *shares, f"{moved:.0%}", f"{state:.1f} MB"])
    return ["Workload", "Replicas", *routers, "moved, with transfers", "router's state"], lines


@table("ray-scale-load", "ray_scale")
def ray_scale_load(result: Result) -> Any:
    """Message routing with transfers under more load, simulated."""
    cells: dict[tuple[str, ...], dict[str, float]] = {}
    for place, measure, value in _places(result):
        if "workflows a day" in place[-1]:
            cells.setdefault(tuple(place), {})[measure] = value
    lines = []
    for (workload, count, _, load), part in cells.items():
        times = [part[f"time to first token p{share}"] for share in (50, 99)]
        lines.append([
            workload, count.split()[0], load.replace(" workflows a day", ""), f"{part['hit rate']:.0%}",
            f"{part['moved tokens'] / part['prompt tokens']:.0%}",
            *(f"{1000 * value:,.0f} ms" if value < 10 else f"{value:,.0f} s" for value in times),
            f"{part['imbalance']:.1%}", f"{part['requests running']:.1f}",
            f"{part['most requests waiting at once']:,.0f}", f"{part['link of the busiest sender']:.1%}",
            f"{part['state of the router'] / 1e6:.1f} MB",
        ])  # fmt: skip
    head = "Workload | Replicas | Workflows a day | hit rate | moved | TTFT p50 | TTFT p99 | imbalance"
    return f"{head} | running, of a replica | most waiting | busiest link | router's state", lines


ROUTING_COLUMNS = (
    "computed tokens", "prompt tokens", "moved share", "imbalance", "time to first token", "end to end of a workflow",
    "all workflows",
)  # fmt: skip


@table("ray-routing", "ray_routing", provenance=False)
def ray_routing(result: Result) -> Any:
    """Every router on two real replicas, with predictions, and message routing against the others."""
    rows, lines, ratios = by_measure(result), [], []

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
        is_alone = label in rows and balanced not in rows
        ratios.append([workload, cell(label), "there is none" if is_alone else cell(balanced)])
    shares = markdown("Workload | of the best other router | of the best of at most 10% imbalance", ratios)
    note = f"Computed tokens of message routing:\n\n{shares}\n\n{provenance_note('ray_routing')}"
    return ["Workload", "Router", *ROUTING_COLUMNS], lines, note


@table("retrieval", "retrieval", provenance=False)
def retrieval(result: Result) -> Any:
    """F1, first tokens and whole answers of every side, with both numbers of passages.

    A side that was not answered has times alone. No reuse was answered in prefix mode, which computes the same: the
    tokens that were computed are those of prefix mode.
    """
    times, lines, notes = {(row["measure"], row["peer"]): row for row in result["rows"]}, [], []
    answered = {key.rsplit(", ", 1)[0]: part for key, part in result["quality"].items() if key.endswith(", all sets")}
    for title in dict.fromkeys([*answered, *(row["measure"].partition(":")[0] for row in result["rows"])]):
        rows = {row["side"]: row for row in answered[title]["rows"]} if title in answered else {}
        label = _retrieval_title(title)
        for side in retrieval_benchmark.SIDES:
            row = rows.get(retrieval_benchmark.NO_REUSE if side == retrieval_benchmark.PREFIX else side)
            first, answer = f"{title}: first token, {side}", f"{title}: answer, {side}"
            if row is None and (first, None) not in times:
                continue
            cells = [""] * 7
            if row is not None:
                keys, few = ("f1", "f1 over no reuse", "exact", "right"), row["pools"] < retrieval_benchmark.MIN_POOLS
                values = {key: without_interval(row[key]) if few else row[key] for key in keys}
                cells = [format_row(values[key], 100, sign=" over " in key) for key in keys]
                cells += [f"{100 * row['same']['value']:.0f}", f"{row['computed']['value']:.0f}", str(row["n"])]
            if side == retrieval_benchmark.NO_REUSE:
                cells[5] = ""
            ratios = [times.get((first, peer)) for peer in (retrieval_benchmark.PLAIN, retrieval_benchmark.PREFIX)]
            ratios.append(times.get((answer, retrieval_benchmark.PLAIN)))
            cells.append(f"{times[first, None]['value']:.0f}" if (first, None) in times else "")
            cells += [f"{format_estimate(ratio, places=2)}x" if ratio else "" for ratio in ratios]
            lines.append([label, side, *cells])
            label = ""
        notes += _encoding_times(title, times)
        notes += [_widths(title, rows, times)] if rows else []
    head = "model | side | F1 | over no reuse, points | exact match % | right % | same answer % | tokens computed | n"
    times_head = "first token, ms | vLLM over this | prefix mode over this | answer of 16 tokens, vLLM over this"
    parts = [place for part in result["quality"].values() for place in part["made"]]
    parts += [row["made"] for row in result["rows"]]
    notes.append(f"`benchmarks/retrieval.py`, {format_provenance(parts)}.")
    return f"{head} | {times_head}", lines, "\n\n".join(notes)


def _retrieval_title(title: str) -> str:
    model, _, passages = title.partition(", ")
    return f"{model_title(model)}, {passages}"


def _encoding_times(title: str, times: Mapping[tuple[str, str | None], Result]) -> list[str]:
    """Return how long the passages of a pool take before the clock of first tokens starts, if that was timed."""
    sides = {retrieval_benchmark.REUSE: "our engine", retrieval_benchmark.CONNECTED: "vLLM with the connector"}
    medians = {side: times.get((f"{title}: passages, {side}", None)) for side in sides}
    cells = [f"{format_estimate(row, 1e-3, places=2)} s in {sides[side]}" for side, row in medians.items() if row]
    if not cells:
        return []
    return [f"{_retrieval_title(title)}: to encode the passages of a pool before takes {' and '.join(cells)} (median)."]


def _widths(title: str, rows: Mapping[str, Result], times: Mapping[tuple[str, str | None], Result]) -> str:
    """Return which sides are within one point of F1 of no reuse by the interval, or that intervals are too wide."""
    others = {side: row for side, row in rows.items() if side != retrieval_benchmark.NO_REUSE}
    over = {
        side: row["f1 over no reuse"] for side, row in others.items() if row["pools"] >= retrieval_benchmark.MIN_POOLS
    }
    ratios = {side: times.get((f"{title}: first token, {side}", retrieval_benchmark.PLAIN)) for side in over}
    early = {side: gap for side, gap in over.items() if (ratio := ratios[side]) and ratio["low"] >= 2}
    begin = f"{_retrieval_title(title)}: within one point of F1 of no reuse by the interval"
    if within := [side for side, gap in over.items() if gap["low"] >= -0.01]:
        cells = [
            f"`{side}`"
            + (f" ({format_estimate(ratios[side], places=2)} times as early as vLLM)" if ratios[side] else "")
            for side in within
        ]
        return f"{begin}: {', '.join(cells)}."
    if not early:
        return f"{begin}: none."
    narrowest = min(early, key=lambda side: early[side]["high"] - early[side]["low"])
    return (
        f"{begin}: none. The intervals are too wide: of the sides that answer first at least twice as early as vLLM's prefix"
        f" cache, by their interval, `{narrowest}` has the narrowest,"
        f" {format_estimate(early[narrowest], 100, sign=True)} points."
    )


@table("vllm", "vllm")
def vllm(result: Result) -> Any:
    """Times of plain vLLM, and its times over those of every other side."""
    rows = {(row["measure"], row["peer"]): row for row in result["rows"]}
    sides, lines = (vllm_benchmark.SPANS, vllm_benchmark.MESSAGES, vllm_benchmark.OURS), []
    for program, goals in vllm_benchmark.GOALS.items():
        for measure in ("first token", "end to end"):
            plain = rows[f"{program}: {measure}, {vllm_benchmark.PLAIN}", None]
            ratios = [rows.get((f"{program}: {measure}, {side}", vllm_benchmark.PLAIN)) for side in sides]
            goal = f"{goals[measure]:g}" if measure in goals else ""
            cells = [format_estimate(ratio, places=2) for ratio in ratios]
            lines.append([program, measure, f"{plain['value']:.3g} s", *cells, goal])
    return ["workload", "", "plain vLLM", *sides, "goal of the connector"], lines


@table("torture", "torture", provenance=False)
def torture(result: Result) -> Any:
    """Campaigns of `benchmarks/torture/`, and below the table each promise that one found broken."""
    lines, lost = [], []
    for name, tried in CAMPAIGNS.items():
        if run := result["runs"].get(name):
            count = f"**{len(run['lost'])}**" if run["lost"] else "0"
            numbers = [f"{run[key]:,}" for key in ("inputs", "faults")]
            lines.append([f"`{name}`", tried, *numbers, count, run["commit"], run["date"]])
            lost += [f"- `{name}`: {line.splitlines()[0]}" for line in run["lost"]]
    return "campaign | what is tried | inputs | faults | lost | commit | date", lines, "\n".join(lost)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill_tables(page.read_text()))
