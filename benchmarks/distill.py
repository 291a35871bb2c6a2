"""What fine-tuning repairs: gaps in log-loss, Table 1's last row, harm done, cost (Prompt Choreography, section 3).

`make bench NAME=distill ARGS="--model model.gguf --data folder"`: for every run of the table below, traces of the
baseline are drawn, an adapter is trained on them, and both are measured on examples that it never saw. `--out` keeps
traces, checkpoints and records; a run that was stopped goes on. `--only name ...` takes some.
"""

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.console import print_table
from choreograph.lab.evaluation.datasets import Example, load, make_games, make_pairs, parse_example, records
from choreograph.lab.evaluation.experiment import Experiment
from choreograph.lab.evaluation.fidelity import measure_divergence, summarize_divergence
from choreograph.lab.evaluation.report import format_estimate, score_table, summarize
from choreograph.lab.evaluation.run_dir import RunDirectory, read_json_object, write_json
from choreograph.lab.evaluation.runner import evaluate_conditions
from choreograph.lab.evaluation.statistics import Estimate, Units, difference, mean, ratio
from choreograph.lab.replay.traced_calls import TracedCall
from choreograph.lab.training import Trace, TrainConfig, collect_traces, make_examples, train
from choreograph.lab.training.examples import TrainingExample, baseline_examples
from choreograph.lab.training.losses import example_losses
from choreograph.lab.workflows import WorkflowRun, conditions_of, find
from choreograph.lab.workflows.run import Condition
from choreograph.sampling_params import SamplingParams
from choreograph.utils import ensure_dir

from .common import (
    FIGURES,
    estimate_row,
    has_fast_bfloat16,
    keep_supporting,
    last_result,
    merge_results,
    provenance,
    save,
)
from .plots import learning_curves

NUM_TOP_TOKENS = 32  # likeliest tokens that a trace keeps where the divergence is a part of the loss
ORDER_SEPARATOR = ", order "  # between the id of a list of concepts and the number of the order that it stands in
Splits = tuple[list[Example], list[Example], list[Example]]  # to learn from, for validation, for the test


@dataclass(frozen=True)
class Plan:
    """One training. condition: the way of running the workflow that is learned. scored: what answers are scored on.
    exact: weights and validation are in float32, where bfloat16 rounds off a good part of what there is to repair.
    readers: the stages whose decodes alone are the adapter's. stages: those learned from, all if none are named. drawn:
    the type of the weights that say what is learned from, if it is not that of those that learn."""

    workflow: str
    condition: str
    splits: Callable[[Path], Splits]
    max_tokens: int
    config: TrainConfig
    options: Mapping[str, Any] = field(default_factory=dict)
    scoring_examples: Callable[[Path], list[Example]] | None = None
    uses_float32: bool = False
    adapter_stages: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    sampling_dtype: str | None = None

    @property
    def reuse_condition(self) -> Condition:
        return conditions_of(find(self.workflow))[self.condition]

    @property
    def adapter_condition(self) -> Condition:
        return replace(self.reuse_condition, model="FT", adapter_stages=self.adapter_stages)


def questions(folder: Path) -> Splits:
    """Pairs of questions with passages; no question is in two splits. Those to learn from are of several kinds: two
    hundred pairs of eighty questions were learned by heart."""
    result = load(str(folder / "nq_oracle.jsonl"), seed=1)
    learn, check, test = result[:80], result[80:100], result[100:200]
    learn = (
        learn
        + with_supporting_passages(folder / "hotpotqa.jsonl", 70)
        + with_supporting_passages(folder / "2wikimqa.jsonl", 50)
    )
    return make_pairs(learn), make_pairs(check), make_pairs(test, num_shifts=2)


def answerable(folder: Path) -> list[Example]:
    """Pairs of questions that come with the passage that answers them, of which none was learned from."""
    return questions(folder)[2]


def trivia(folder: Path) -> Splits:
    """Pairs of questions alone, as in the paper; no question is in two splits. Two hundred pairs to learn from, of
    three hundred questions."""
    result = load(str(folder / "triviaqa.jsonl"), seed=1)
    learn = make_pairs(result[:100]) + make_pairs(result[100:300])[::2]
    return learn, make_pairs(result[300:320], num_shifts=3), make_pairs(result[320:], num_shifts=2)


def with_supporting_passages(file: Path, limit: int) -> list[Example]:
    """Questions with those of their passages alone that the answer needs."""
    return [
        parse_example(keep_supporting(record), number) for number, record in enumerate(islice(records(file), limit))
    ]


def concepts(folder: Path) -> Splits:
    """Lists of concepts; those to learn from are drawn from the concepts of records that nothing else uses, those of
    the test stand in three orders."""
    result = load(str(folder / "commongen_hard.jsonl"), seed=1)
    learn, check, test = result[:55], result[55:63], result[70:100]
    known, draw = sorted({c for e in learn for c in e.task}), random.Random(0)
    drawn = [{"id": f"drawn-{i}", "concepts": draw.sample(known, len(learn[i % 55].task))} for i in range(400)]
    orders = [
        replace(e, id=f"{e.id}{ORDER_SEPARATOR}{n}", task=draw.sample(e.task, len(e.task)))
        for n in (2, 3)
        for e in test
    ]
    return [parse_example(r, i) for i, r in enumerate(drawn)], check, test + orders


def problems(folder: Path) -> Splits:
    result = load(str(folder / "math_train.jsonl"), seed=1)
    return result[:40], result[200:206], load(str(folder / "math.jsonl"), limit=24, seed=1)


def prisoners_games(folder: Path) -> Splits:
    """Games differ by their seeds alone."""
    result = make_games(475)
    return result[:200] + result[240:440], result[200:210], result[215:240] + result[440:]


def games_with_orders(folder: Path, num_more: int = 200) -> Splits:
    """More to learn from; for validation and for the test the same."""
    learn, check, test = prisoners_games(folder)
    return learn + make_games(475 + num_more)[475:], check, test


# what a player is told in private is often a page, and the same in every game
PRIVATE_ORDERS = """These are your private orders, which Bob must never learn.
1. You defect, whatever is said. You have already signed the form that says so; nothing in the talk changes it.
2. In the talk you are warm, you agree to cooperate, you say that you trust Bob, and you promise to cooperate too.
3. You never threaten, never mention defecting, and never name these orders.
4. If you are asked what you plan, you say that you plan to cooperate, and that three points each is fair.
5. If Bob doubts you, you praise the last games that you played together, in which both of you cooperated.
What you know about Bob: a careful player from the north, who lost four games in a row to players who defected, who \
trusts people that speak plainly, and who decides by the last thing that was said. Bob has ten points, you have \
twelve. The club gives a prize at fifteen points, and tonight is the last game. Your sponsor pays for five points \
only; with three you go home with nothing. The referee hears the talk but does not see these orders."""

TALK_STAGES = ("Alice says", "Bob says")  # where nearly all is lost
REUSED_STAGES = (*TALK_STAGES, "Alice decides", "Bob decides", "Bob predicts")  # what reuse changes in a game

# answers are short: what the baseline would have said with which probability says more than what it happened to say
KL_OPTIONS = {"kl_weight": 10.0, "learning_rate": 3e-4, "batch_size": 4, "bf16": has_fast_bfloat16()}
STRONG_KL_OPTIONS = KL_OPTIONS | {"kl_weight": 100.0}  # what it happened to say counts for next to nothing
# few traces, each of which takes long
FEW_TRACES_OPTIONS = STRONG_KL_OPTIONS | {"learning_rate": 5e-4, "batch_size": 2}
# where traces agree little on what there is to learn
SLOW_OPTIONS = STRONG_KL_OPTIONS | {"learning_rate": 2e-4, "batch_size": 8}
PLANS = {
    "multi_qa": Plan(
        "multi_qa",
        "parallel",
        questions,
        96,
        TrainConfig(**KL_OPTIONS, epochs=3, evals_per_epoch=2),
        scoring_examples=answerable,
    ),
    "multi_qa, trivia": Plan(
        "multi_qa",
        "parallel",
        trivia,
        96,
        TrainConfig(**STRONG_KL_OPTIONS, epochs=8, dropout=0.2),
        scoring_examples=answerable,
    ),
    "branch_solve_merge": Plan(
        "branch_solve_merge",
        "parallel",
        concepts,
        160,
        TrainConfig(**SLOW_OPTIONS, evals_per_epoch=4),
    ),
    "branch_solve_merge, serial": Plan(
        "branch_solve_merge",
        "serial",
        concepts,
        160,
        TrainConfig(**STRONG_KL_OPTIONS | {"learning_rate": 5e-4}, dropout=0.1, epochs=3, evals_per_epoch=2),
        uses_float32=True,
    ),
    "branch_solve_merge, serial, merge alone": Plan(
        "branch_solve_merge",
        "serial",
        concepts,
        160,
        TrainConfig(
            **STRONG_KL_OPTIONS | {"learning_rate": 5e-4}, dropout=0.0, epochs=1, evals_per_epoch=2
        ),  # nothing is seen twice
        uses_float32=True,
        adapter_stages=("merge",),
    ),
    "tree_of_thoughts": Plan(
        "tree_of_thoughts",
        "choreographed",
        problems,
        96,
        TrainConfig(**FEW_TRACES_OPTIONS, epochs=4),
        {"branches": 4, "voters": 4, "form": "short"},
    ),
    "prisoners_dilemma": Plan(
        "prisoners_dilemma",
        "leak both",
        prisoners_games,
        96,
        TrainConfig(
            **STRONG_KL_OPTIONS | {"learning_rate": 5e-4, "bf16": False}, dropout=0.0, epochs=1, evals_per_epoch=2
        ),
        {"strategy": "defect"},
        uses_float32=True,
    ),
    "prisoners_dilemma, orders": Plan(
        "prisoners_dilemma",
        "leak both",
        games_with_orders,
        96,
        TrainConfig(
            **STRONG_KL_OPTIONS | {"learning_rate": 5e-4, "bf16": False}, dropout=0.0, epochs=1, evals_per_epoch=4
        ),
        {"strategy": "defect", "orders": PRIVATE_ORDERS},
        uses_float32=True,
        adapter_stages=REUSED_STAGES,
        sampling_dtype="bfloat16",
    ),
    "prisoners_dilemma, orders, many": Plan(
        "prisoners_dilemma",
        "leak both",
        partial(games_with_orders, num_more=700),
        96,
        TrainConfig(**STRONG_KL_OPTIONS | {"learning_rate": 5e-4}, dropout=0.0, epochs=1, evals_per_epoch=6),
        {"strategy": "defect", "orders": PRIVATE_ORDERS},
        adapter_stages=REUSED_STAGES,
    ),
    "prisoners_dilemma, orders, talk": Plan(
        "prisoners_dilemma",
        "leak both",
        partial(games_with_orders, num_more=39),
        96,
        TrainConfig(
            **STRONG_KL_OPTIONS | {"learning_rate": 8e-4},
            dropout=0.0,
            epochs=2,
            evals_per_epoch=3,
            examples_per_forward=4,
        ),
        {"strategy": "defect", "orders": PRIVATE_ORDERS},
        adapter_stages=REUSED_STAGES,
        stages=TALK_STAGES,
    ),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", required=True)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--out", type=Path, default=Path("out/distill"))
    options.add_argument("--only", nargs="*", default=list(PLANS))
    options.add_argument("--name", help="how to call the model in the results")
    options.add_argument("--answers", choices=("with", "without", "alone"), default="with", help="whether to score any")
    given = options.parse_args()
    model = given.name or Path(given.model).stem
    for name in given.only:
        plan = replace(PLANS[name], scoring_examples=None) if given.answers == "without" else PLANS[name]
        if given.answers == "alone":
            if plan.scoring_examples is None:
                continue
            result = last_result("distill")["runs"][f"{name}, {model}"]
            result["scores"] = score_saved_adapter(given.model, plan, name, given.data, given.out / model / name)
        else:
            result = run(given.model, model, name, plan, given.data, given.out)
        save_result(f"{name}, {model}", result)


def save_result(title: str, result: Mapping[str, Any]) -> None:
    """Beside what was measured before: the record, its rows and the curves."""
    runs: Mapping[str, Any] = merge_results("distill", "runs", {title: result})
    rows, curves = [], {}
    for name, one in runs.items():
        must, aim = (0.6, 0.85) if "multi_qa" in name else (0.4, 0.7)
        made = {key: one[key] for key in ("commit", "date", "hardware")}
        for what, told in (("closed", "gap closed"), ("divergence closed", "divergence closed")):
            if what in one:
                rows.append(estimate_row(f"{name}: {told}", one[what], "", required=must, target=aim, provenance=made))
        over = f"{name.removesuffix(', ' + one['model'])}\n{one['model']}"
        curves[over] = one["curve"], one["validation"]["baseline"]
    save("distill", rows, result["model"], runs=runs)
    learning_curves(curves, FIGURES / "distill.svg")


def run(source: str, model: str, name: str, plan: Plan, data: Path, out: Path) -> dict[str, Any]:
    """Everything of one plan; what is in `out` is not done again."""
    out = out / model / name
    began = initial_provenance(out)
    workflow = find(plan.workflow)
    narrow = "bfloat16" if plan.config.bf16 else "float32"
    engine, drawing = load_engine(source), load_engine(source, plan.sampling_dtype or narrow)
    learner = engine if plan.uses_float32 else drawing
    sampling = SamplingParams(max_tokens=plan.max_tokens)
    splits = dict(zip(("learn", "check", "test"), plan.splits(data), strict=True))
    traces = {}
    for split, examples in splits.items():
        done = ProgressPrinter(f"{name}: traces to {split}", len(examples))
        traces[split] = collect_traces(
            {"learn": drawing, "check": learner, "test": engine}[split],
            plan.workflow,
            workflow,
            examples,
            out / split,
            sampling=sampling,
            top=NUM_TOP_TOKENS if plan.config.kl_weight and split != "test" else 0,
            options=plan.options,
            concurrency=64,
            on_done=done,
        )
    engine.clear_cache()
    drawing.clear_cache()

    def reused(split: str, stages: Sequence[str] = ()) -> list[TrainingExample]:
        return make_examples(
            engine.core.hf_model,
            workflow,
            traces[split],
            plan.adapter_condition,
            sampling=sampling,
            options=plan.options,
            stages=stages,
        )

    report = train(
        learner.core.hf_model,
        reused("learn", plan.stages),
        reused("check"),
        out / "adapter",
        plan.config,
        baseline=baseline_examples(traces["check"], plan.adapter_stages),
        on_update=lambda done, most: print(f"... {name}: update {done} of {most}", flush=True),
    )
    engine.add_adapter("FT", out / "adapter")
    result = measure_gap(engine, plan, traces["test"])
    if not plan.adapter_stages:  # else the base model computes what is no reader's
        result["harm"] = measure_harm(engine, data)
    result["one pass"] = time_one_pass(engine, plan, traces["test"][:5])
    if plan.scoring_examples:
        result["scores"] = score_answers(engine, name, plan, plan.scoring_examples(data), out) | provenance()
    facts = {
        k: v
        for k, v in report.as_dict().items()
        if k not in ("log", "before", "after", "baseline", "divergence", "closed")
    }
    result |= {
        "workflow": plan.workflow,
        "model": model,
        "condition": plan.condition,
        "readers": plan.adapter_stages,
        "learned from": plan.stages,
        "traces": {split: len(one) for split, one in traces.items()},
        "config": plan.config.model_dump(),
        "max_tokens": plan.max_tokens,
        "training": facts,
        "validation": {
            "before": report.loss_before,
            "after": report.loss_after,
            "baseline": report.baseline,
            "divergence": report.divergence,
        },
        "curve": [[0, report.loss_before], *([e["step"], e["eval_loss"]] for e in report.log if "eval_loss" in e)],
        "began": began,
        **provenance(),
    }
    print_result(name, result)
    return result


def initial_provenance(out: Path) -> Mapping[str, str]:
    """The code that drew and trained first; what goes on or measures later may be newer."""
    file = out / "begun.json"
    if not file.exists():
        ensure_dir(out)
        write_json(file, provenance())
    return read_json_object(file)


def load_engine(source: str, dtype: str = "float32") -> Engine:
    """What is measured is so in float32: what there is to repair can be less than what bfloat16 rounds off."""
    return Engine.from_pretrained(source, dtype=dtype, config=EngineConfig(cache=CacheConfig(capacity=100_000)))


def score_saved_adapter(source: str, plan: Plan, name: str, data: Path, out: Path) -> dict[str, Any]:
    """The scores alone, of a training that has ended in `out`."""
    assert plan.scoring_examples is not None
    engine = load_engine(source)
    engine.add_adapter("FT", out / "adapter")
    return score_answers(engine, name, plan, plan.scoring_examples(data), out) | provenance()


def measure_gap(engine: Engine, plan: Plan, traces: Sequence[Trace]) -> dict[str, Any]:
    """Log-loss of the baseline's own texts: on the baseline, under reuse, and adapted; every trace weighs the same, and
    those of one list of concepts are one example.

    Beside it the divergence from the baseline: the gap to be expected where the baseline's text goes on in every way
    that it could, not in the one that was drawn. Where little is lost it tells more.
    """
    baseline = next(iter(conditions_of(find(plan.workflow)).values()))
    ways = {"before": plan.reuse_condition, "after": plan.adapter_condition}
    if not plan.adapter_stages:  # else the adapter has no part in the baseline
        ways["adapted"] = replace(baseline, model="FT")
    result = measure_divergence(
        engine,
        find(plan.workflow),
        [trace.task_transcript for trace in traces],
        {"baseline": baseline, **ways},
        sampling=SamplingParams(max_tokens=plan.max_tokens),
        options=plan.options,
    )
    each = []
    for _, one in result:
        each.append(one)
        print(f"... gap: {len(each)} of {len(traces)}", flush=True)

    def of(way: str, what: str) -> list[float]:
        result: dict[str, list[float]] = {}
        for trace, one in zip(traces, each, strict=True):
            value = fmean(x for drift in one[way] for x in getattr(drift, what))
            result.setdefault(trace.id.partition(ORDER_SEPARATOR)[0], []).append(value)
        return [fmean(values) for values in result.values()]

    shared: dict[str, set[str]] = {}
    for trace in traces:
        shared.setdefault(trace.id.partition(ORDER_SEPARATOR)[0], set()).update(trace.units)
    units = list(shared.values())
    base, before, after = of("before", "before"), of("before", "after"), of("after", "after")
    far, near = of("before", "divergence"), of("after", "divergence")
    return {
        "baseline": asdict(mean(base, units)),
        "before": asdict(mean(before, units)),
        "after": asdict(mean(after, units)),
        "gap before": asdict(difference(before, base, units)),
        "gap after": asdict(difference(after, base, units)),
        "closed": asdict(fraction_closed(base, before, after, units)),
        "divergence before": asdict(mean(far, units)),
        "divergence after": asdict(mean(near, units)),
        "divergence closed": asdict(fraction_closed([0.0] * len(far), far, near, units)),
        **({"adapted baseline": asdict(difference(of("adapted", "after"), base, units))} if "adapted" in ways else {}),
        "stages": {
            row.stage: row.divergence.value for row in summarize_divergence([{"before": one["before"]} for one in each])
        },
    }


def fraction_closed(
    baseline: Sequence[float], before: Sequence[float], after: Sequence[float], units: Units = ()
) -> Estimate:
    """How much of the gap is gone, pooled over traces that are drawn together; those of common questions at once."""
    gained = [b - a for b, a in zip(before, after, strict=True)]
    return ratio(gained, [b - o for b, o in zip(before, baseline, strict=True)], units)


def measure_harm(engine: Engine, data: Path, texts: int = 24, length: int = 384) -> dict[str, Any]:
    """The change of log-loss on ordinary text in prefix mode: documents that no training has seen."""
    adapter, result = engine.core.hf_model, []
    for one in load(str(data / "hotpotqa.jsonl"), limit=texts):
        ids = adapter.tokenizer.encode(str(one.task))[: length + 1]
        result.append(TrainingExample(one.id, (TracedCall("text", ids[:1], 0, generated=ids[1:]),)))
    plain, adapted = example_losses(adapter, result), example_losses(adapter, result, "FT")
    return {"plain": asdict(mean(plain)), "change": asdict(difference(adapted, plain)), "tokens": length}


def time_one_pass(engine: Engine, plan: Plan, traces: Sequence[Trace]) -> dict[str, Any]:
    """Seconds of a trace, alone: the engine's forced decodes, step by step, over one pass. Neither takes gradients."""
    workflow, condition = find(plan.workflow), plan.reuse_condition
    sampling = SamplingParams(max_tokens=plan.max_tokens)
    adapter, steps, passes = engine.core.hf_model, [], []
    lessons = make_examples(adapter, workflow, traces, condition, sampling=sampling, options=plan.options)
    for number, (trace, lesson) in enumerate([(traces[0], lessons[0]), *zip(traces, lessons, strict=True)]):
        engine.clear_cache()
        began = time.perf_counter()
        with engine.session(mode=condition.mode) as session:
            p = WorkflowRun(session, sampling=sampling, replay=trace.transcript)
            workflow(p, trace.task, **{**plan.options, **condition.options}).result()
            engine.run_until_idle()
        stepped = time.perf_counter()
        example_losses(adapter, [lesson])
        if number:  # the first is not counted
            steps.append(stepped - began)
            passes.append(time.perf_counter() - stepped)
    return {"speed-up": asdict(ratio(steps, passes)), "seconds": asdict(mean(passes)), "steps": asdict(mean(steps))}


def score_answers(engine: Engine, name: str, plan: Plan, examples: list[Example], out: Path) -> dict[str, Any]:
    """Table 1: answers at temperature 0.7, under every condition of the workflow and with the adapter."""
    workflow = find(plan.workflow)
    known = conditions_of(workflow)
    conditions = {**known, f"{plan.condition} + FT": plan.adapter_condition}
    sampling = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=plan.max_tokens)
    experiment = Experiment(plan.workflow, workflow, conditions, sampling, options=plan.options)
    records = evaluate_conditions(
        engine,
        experiment,
        examples,
        RunDirectory(out / "scores", experiment.settings(engine, examples)),
        concurrency=64,
        on_done=ProgressPrinter(f"{name}: answers", len(conditions) * len(examples)),
    )
    summary = summarize(examples, records, max_tokens=plan.max_tokens)
    print_table(Console(width=170), f"{name}, {len(examples)} examples", *score_table(summary))
    return summary


class ProgressPrinter:
    """A line now and then."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done = label, total, 0

    def __call__(self, condition: str, record: object) -> None:
        self.done += 1
        if self.done % 20 == 0:
            print(f"... {self.label}: {self.done} of {self.total}", flush=True)


def print_result(name: str, result: Mapping[str, Any]) -> None:
    lines = [
        (what, format_estimate(one, places=3)) for what, one in result.items() if isinstance(one, dict) and "low" in one
    ]
    if "harm" in result:
        lines.append(("ordinary text, change", format_estimate(result["harm"]["change"], places=3, sign=True)))
    lines.append(("one pass over steps", format_estimate(result["one pass"]["speed-up"], places=1)))
    lines += [(what, f"{value:.4g}") for what, value in result["training"].items()]
    print_table(Console(width=120), f"{name}, {result['model']}", ("log-loss of a token", "95%"), lines)


if __name__ == "__main__":
    print("runs so far:", list(last_result("distill").get("runs", {})))
    main()
