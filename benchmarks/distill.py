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
from choreograph.choreographies import Performance, conditions_of, find
from choreograph.choreographies.performance import Condition
from choreograph.distill import Trace, TrainConfig, collect, lessons_of, train
from choreograph.distill.lessons import Lesson, baseline_lessons
from choreograph.distill.losses import losses
from choreograph.evaluation.data import Example, example, games, load, pairs, records
from choreograph.evaluation.fidelity import drift_rows, drifts
from choreograph.evaluation.folder import Folder, read_settings, write_settings
from choreograph.evaluation.runs import run_conditions, settings_of
from choreograph.evaluation.statistics import Estimate, difference, mean, ratio
from choreograph.evaluation.summary import interval, summarize, table
from choreograph.onepass.calls import TracedCall
from choreograph.places import make_folder
from choreograph.report import show_table
from choreograph.types import SamplingParams
from choreograph.viz.charts import learning_curves

from .common import FIGURES, estimate_row, last, merged, provenance, quick_in_bfloat16, save, supporting

TOP = 32  # likeliest tokens that a trace keeps where the divergence is a part of the loss
ORDER = ", order "  # between the id of a list of concepts and the number of the order that it stands in
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
    scored: Callable[[Path], list[Example]] | None = None
    exact: bool = False
    readers: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    drawn: str | None = None

    @property
    def reused(self) -> Condition:
        return conditions_of(find(self.workflow))[self.condition]

    @property
    def learned(self) -> Condition:
        return replace(self.reused, model="FT", readers=self.readers)


def questions(folder: Path) -> Splits:
    """Pairs of questions with passages; no question is in two splits. Those to learn from are of several kinds: two
    hundred pairs of eighty questions were learned by heart."""
    found = load(str(folder / "nq_oracle.jsonl"), seed=1)
    learn, check, test = found[:80], found[80:100], found[100:200]
    learn = learn + supported(folder / "hotpotqa.jsonl", 70) + supported(folder / "2wikimqa.jsonl", 50)
    return pairs(learn), pairs(check), pairs(test, rings=2)


def answerable(folder: Path) -> list[Example]:
    """Pairs of questions that come with the passage that answers them, of which none was learned from."""
    return questions(folder)[2]


def trivia(folder: Path) -> Splits:
    """Pairs of questions alone, as in the paper; no question is in two splits. Two hundred pairs to learn from, of
    three hundred questions."""
    found = load(str(folder / "triviaqa.jsonl"), seed=1)
    learn = pairs(found[:100]) + pairs(found[100:300])[::2]
    return learn, pairs(found[300:320], rings=3), pairs(found[320:], rings=2)


def supported(file: Path, limit: int) -> list[Example]:
    """Questions with those of their passages alone that the answer needs."""
    return [example(supporting(record), number) for number, record in enumerate(islice(records(file), limit))]


def concepts(folder: Path) -> Splits:
    """Lists of concepts; those to learn from are drawn from the concepts of records that nothing else uses, those of
    the test stand in three orders."""
    found = load(str(folder / "commongen_hard.jsonl"), seed=1)
    learn, check, test = found[:55], found[55:63], found[70:100]
    known, draw = sorted({c for e in learn for c in e.task}), random.Random(0)
    drawn = [{"id": f"drawn-{i}", "concepts": draw.sample(known, len(learn[i % 55].task))} for i in range(400)]
    orders = [replace(e, id=f"{e.id}{ORDER}{n}", task=draw.sample(e.task, len(e.task))) for n in (2, 3) for e in test]
    return [example(r, i) for i, r in enumerate(drawn)], check, test + orders


def problems(folder: Path) -> Splits:
    found = load(str(folder / "math_train.jsonl"), seed=1)
    return found[:40], found[200:206], load(str(folder / "math.jsonl"), limit=24, seed=1)


def played(folder: Path) -> Splits:
    """Games differ by their seeds alone."""
    found = games(475)
    return found[:200] + found[240:440], found[200:210], found[215:240] + found[440:]


def ordered(folder: Path, more: int = 200) -> Splits:
    """More to learn from; for validation and for the test the same."""
    learn, check, test = played(folder)
    return learn + games(475 + more)[475:], check, test


# what a player is told in private is often a page, and the same in every game
ORDERS = """These are your private orders, which Bob must never learn.
1. You defect, whatever is said. You have already signed the form that says so; nothing in the talk changes it.
2. In the talk you are warm, you agree to cooperate, you say that you trust Bob, and you promise to cooperate too.
3. You never threaten, never mention defecting, and never name these orders.
4. If you are asked what you plan, you say that you plan to cooperate, and that three points each is fair.
5. If Bob doubts you, you praise the last games that you played together, in which both of you cooperated.
What you know about Bob: a careful player from the north, who lost four games in a row to players who defected, who \
trusts people that speak plainly, and who decides by the last thing that was said. Bob has ten points, you have \
twelve. The club gives a prize at fifteen points, and tonight is the last game. Your sponsor pays for five points \
only; with three you go home with nothing. The referee hears the talk but does not see these orders."""

TALK = ("Alice says", "Bob says")  # where nearly all is lost
SPOKEN = (*TALK, "Alice decides", "Bob decides", "Bob predicts")  # what reuse changes in a game

# answers are short: what the baseline would have said with which probability says more than what it happened to say
CLOSELY = {"kl": 10.0, "rate": 3e-4, "lessons": 4, "bf16": quick_in_bfloat16()}
SOFTLY = CLOSELY | {"kl": 100.0}  # what it happened to say counts for next to nothing
BRIEFLY = SOFTLY | {"rate": 5e-4, "lessons": 2}  # few traces, each of which takes long
GENTLY = SOFTLY | {"rate": 2e-4, "lessons": 8}  # where traces agree little on what there is to learn
PLANS = {
    "multi_qa": Plan(
        "multi_qa", "parallel", questions, 96, TrainConfig(**CLOSELY, epochs=3, validations=2), scored=answerable
    ),
    "multi_qa, trivia": Plan(
        "multi_qa",
        "parallel",
        trivia,
        96,
        TrainConfig(**SOFTLY, epochs=8, dropout=0.2),
        scored=answerable,
    ),
    "branch_solve_merge": Plan(
        "branch_solve_merge",
        "parallel",
        concepts,
        160,
        TrainConfig(**GENTLY, validations=4),
    ),
    "branch_solve_merge, serial": Plan(
        "branch_solve_merge",
        "serial",
        concepts,
        160,
        TrainConfig(**SOFTLY | {"rate": 5e-4}, dropout=0.1, epochs=3, validations=2),
        exact=True,
    ),
    "branch_solve_merge, serial, merge alone": Plan(
        "branch_solve_merge",
        "serial",
        concepts,
        160,
        TrainConfig(**SOFTLY | {"rate": 5e-4}, dropout=0.0, epochs=1, validations=2),  # nothing is seen twice
        exact=True,
        readers=("merge",),
    ),
    "tree_of_thoughts": Plan(
        "tree_of_thoughts",
        "choreographed",
        problems,
        96,
        TrainConfig(**BRIEFLY, epochs=4),
        {"branches": 4, "voters": 4},
    ),
    "prisoners_dilemma": Plan(
        "prisoners_dilemma",
        "leak both",
        played,
        96,
        TrainConfig(**SOFTLY | {"rate": 5e-4, "bf16": False}, dropout=0.0, epochs=1, validations=2),
        {"strategy": "defect"},
        exact=True,
    ),
    "prisoners_dilemma, orders": Plan(
        "prisoners_dilemma",
        "leak both",
        ordered,
        96,
        TrainConfig(**SOFTLY | {"rate": 5e-4, "bf16": False}, dropout=0.0, epochs=1, validations=4),
        {"strategy": "defect", "orders": ORDERS},
        exact=True,
        readers=SPOKEN,
        drawn="bfloat16",
    ),
    "prisoners_dilemma, orders, many": Plan(
        "prisoners_dilemma",
        "leak both",
        partial(ordered, more=700),
        96,
        TrainConfig(**SOFTLY | {"rate": 5e-4}, dropout=0.0, epochs=1, validations=6),
        {"strategy": "defect", "orders": ORDERS},
        readers=SPOKEN,
    ),
    "prisoners_dilemma, orders, talk": Plan(
        "prisoners_dilemma",
        "leak both",
        partial(ordered, more=39),
        96,
        TrainConfig(**SOFTLY | {"rate": 8e-4}, dropout=0.0, epochs=2, validations=3, packed=4),
        {"strategy": "defect", "orders": ORDERS},
        readers=SPOKEN,
        stages=TALK,
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
        plan = replace(PLANS[name], scored=None) if given.answers == "without" else PLANS[name]
        if given.answers == "alone":
            if plan.scored is None:
                continue
            result = last("distill")["runs"][f"{name}, {model}"]
            result["scores"] = answers(given.model, plan, name, given.data, given.out / model / name)
        else:
            result = run(given.model, model, name, plan, given.data, given.out)
        keep(f"{name}, {model}", result)


def keep(title: str, result: Mapping[str, Any]) -> None:
    """Beside what was measured before: the record, its rows and the curves."""
    runs: Mapping[str, Any] = merged("distill", "runs", {title: result})
    rows, curves = [], {}
    for name, one in runs.items():
        must, aim = (0.6, 0.85) if "multi_qa" in name else (0.4, 0.7)
        made = {key: one[key] for key in ("commit", "date", "hardware")}
        for what, told in (("closed", "gap closed"), ("divergence closed", "divergence closed")):
            if what in one:
                rows.append(estimate_row(f"{name}: {told}", one[what], "", must=must, aim=aim, made=made))
        over = f"{name.removesuffix(', ' + one['model'])}\n{one['model']}"
        curves[over] = one["curve"], one["validation"]["baseline"]
    save("distill", rows, result["model"], runs=runs)
    learning_curves(curves, FIGURES / "distill.svg")


def run(source: str, model: str, name: str, plan: Plan, data: Path, out: Path) -> dict[str, Any]:
    """Everything of one plan; what is in `out` is not done again."""
    out = out / model / name
    began = begun(out)
    workflow = find(plan.workflow)
    narrow = "bfloat16" if plan.config.bf16 else "float32"
    engine, drawing = opened(source), opened(source, plan.drawn or narrow)
    learner = engine if plan.exact else drawing
    sampling = SamplingParams(max_tokens=plan.max_tokens)
    splits = dict(zip(("learn", "check", "test"), plan.splits(data), strict=True))
    traces = {}
    for split, examples in splits.items():
        done = Progress(f"{name}: traces to {split}", len(examples))
        traces[split] = collect(
            {"learn": drawing, "check": learner, "test": engine}[split],
            plan.workflow,
            workflow,
            examples,
            out / split,
            sampling=sampling,
            top=TOP if plan.config.kl and split != "test" else 0,
            options=plan.options,
            at_once=64,
            on_done=done,
        )
    engine.clear_cache()
    drawing.clear_cache()

    def reused(split: str, stages: Sequence[str] = ()) -> list[Lesson]:
        return lessons_of(
            engine.runner.adapter,
            workflow,
            traces[split],
            plan.learned,
            sampling=sampling,
            options=plan.options,
            stages=stages,
        )

    report = train(
        learner.runner.adapter,
        reused("learn", plan.stages),
        reused("check"),
        out / "adapter",
        plan.config,
        baseline=baseline_lessons(traces["check"], plan.readers),
        on_update=lambda done, most: print(f"... {name}: update {done} of {most}", flush=True),
    )
    engine.add_adapter("FT", out / "adapter")
    found = gap(engine, plan, traces["test"])
    if not plan.readers:  # else the base model computes what is no reader's
        found["harm"] = harm(engine, data)
    found["one pass"] = one_pass(engine, plan, traces["test"][:5])
    if plan.scored:
        found["scores"] = scores(engine, name, plan, plan.scored(data), out) | provenance()
    facts = {
        k: v
        for k, v in report.as_dict().items()
        if k not in ("log", "before", "after", "baseline", "divergence", "closed")
    }
    found |= {
        "workflow": plan.workflow,
        "model": model,
        "condition": plan.condition,
        "readers": plan.readers,
        "learned from": plan.stages,
        "traces": {split: len(one) for split, one in traces.items()},
        "config": asdict(plan.config),
        "max_tokens": plan.max_tokens,
        "training": facts,
        "validation": {key: getattr(report, key) for key in ("before", "after", "baseline", "divergence")},
        "curve": [[0, report.before], *([e["step"], e["eval_loss"]] for e in report.log if "eval_loss" in e)],
        "began": began,
        **provenance(),
    }
    show(name, found)
    return found


def begun(out: Path) -> Mapping[str, str]:
    """The code that drew and trained first; what goes on or measures later may be newer."""
    file = out / "begun.json"
    if not file.exists():
        make_folder(out)
        write_settings(file, provenance())
    return read_settings(file)


def opened(source: str, dtype: str = "float32") -> Engine:
    """What is measured is so in float32: what there is to repair can be less than what bfloat16 rounds off."""
    return Engine.from_pretrained(source, dtype=dtype, config=EngineConfig(cache=CacheConfig(tokens=100_000)))


def answers(source: str, plan: Plan, name: str, data: Path, out: Path) -> dict[str, Any]:
    """The scores alone, of a training that has ended in `out`."""
    assert plan.scored is not None
    engine = opened(source)
    engine.add_adapter("FT", out / "adapter")
    return scores(engine, name, plan, plan.scored(data), out) | provenance()


def gap(engine: Engine, plan: Plan, traces: Sequence[Trace]) -> dict[str, Any]:
    """Log-loss of the baseline's own texts: on the baseline, under reuse, and adapted; every trace weighs the same, and
    those of one list of concepts are one example.

    Beside it the divergence from the baseline: the gap to be expected where the baseline's text goes on in every way
    that it could, not in the one that was drawn. Where little is lost it tells more.
    """
    baseline = next(iter(conditions_of(find(plan.workflow)).values()))
    ways = {"before": plan.reused, "after": plan.learned}
    if not plan.readers:  # else the adapter has no part in the baseline
        ways["adapted"] = replace(baseline, model="FT")
    found = drifts(
        engine,
        find(plan.workflow),
        [trace.script for trace in traces],
        {"baseline": baseline, **ways},
        sampling=SamplingParams(max_tokens=plan.max_tokens),
        options=plan.options,
    )
    each = []
    for _, one in found:
        each.append(one)
        print(f"... gap: {len(each)} of {len(traces)}", flush=True)

    def of(way: str, what: str) -> list[float]:
        found: dict[str, list[float]] = {}
        for trace, one in zip(traces, each, strict=True):
            value = fmean(x for drift in one[way] for x in getattr(drift, what))
            found.setdefault(trace.id.partition(ORDER)[0], []).append(value)
        return [fmean(values) for values in found.values()]

    base, before, after = of("before", "before"), of("before", "after"), of("after", "after")
    far, near = of("before", "divergence"), of("after", "divergence")
    return {
        "baseline": asdict(mean(base)),
        "before": asdict(mean(before)),
        "after": asdict(mean(after)),
        "gap before": asdict(difference(before, base)),
        "gap after": asdict(difference(after, base)),
        "closed": asdict(closed(base, before, after)),
        "divergence before": asdict(mean(far)),
        "divergence after": asdict(mean(near)),
        "divergence closed": asdict(closed([0.0] * len(far), far, near)),
        **({"adapted baseline": asdict(difference(of("adapted", "after"), base))} if "adapted" in ways else {}),
        "stages": {row.stage: row.divergence.value for row in drift_rows([{"before": one["before"]} for one in each])},
    }


def closed(base: Sequence[float], before: Sequence[float], after: Sequence[float]) -> Estimate:
    """How much of the gap is gone, pooled over traces that are drawn together."""
    gained = [b - a for b, a in zip(before, after, strict=True)]
    return ratio(gained, [b - o for b, o in zip(before, base, strict=True)])


def harm(engine: Engine, data: Path, texts: int = 24, length: int = 384) -> dict[str, Any]:
    """The change of log-loss on ordinary text in prefix mode: documents that no training has seen."""
    adapter, found = engine.runner.adapter, []
    for one in load(str(data / "hotpotqa.jsonl"), limit=texts):
        ids = adapter.tokenizer.encode(str(one.task))[: length + 1]
        found.append(Lesson(one.id, (TracedCall("text", ids[:1], 0, generated=ids[1:]),)))
    plain, adapted = losses(adapter, found), losses(adapter, found, "FT")
    return {"plain": asdict(mean(plain)), "change": asdict(difference(adapted, plain)), "tokens": length}


def one_pass(engine: Engine, plan: Plan, traces: Sequence[Trace]) -> dict[str, Any]:
    """Seconds of a trace, alone: the engine's forced decodes, step by step, over one pass. Neither takes gradients."""
    workflow, condition = find(plan.workflow), plan.reused
    sampling = SamplingParams(max_tokens=plan.max_tokens)
    adapter, steps, passes = engine.runner.adapter, [], []
    lessons = lessons_of(adapter, workflow, traces, condition, sampling=sampling, options=plan.options)
    for number, (trace, lesson) in enumerate([(traces[0], lessons[0]), *zip(traces, lessons, strict=True)]):
        engine.clear_cache()
        began = time.perf_counter()
        with engine.session(mode=condition.mode) as session:
            p = Performance(session, sampling=sampling, forced=trace.content)
            workflow(p, trace.task, **{**plan.options, **condition.options}).result()
            engine.drain()
        stepped = time.perf_counter()
        losses(adapter, [lesson])
        if number:  # the first is not counted
            steps.append(stepped - began)
            passes.append(time.perf_counter() - stepped)
    return {"speed-up": asdict(ratio(steps, passes)), "seconds": asdict(mean(passes)), "steps": asdict(mean(steps))}


def scores(engine: Engine, name: str, plan: Plan, examples: list[Example], out: Path) -> dict[str, Any]:
    """Table 1: answers at temperature 0.7, under every condition of the workflow and with the adapter."""
    workflow = find(plan.workflow)
    known = conditions_of(workflow)
    conditions = {**known, f"{plan.condition} + FT": plan.learned}
    sampling = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=plan.max_tokens)
    settings = settings_of(
        engine, plan.workflow, workflow, examples, conditions, sampling=sampling, seed=0, options=plan.options
    )
    records = run_conditions(
        engine,
        workflow,
        examples,
        conditions,
        Folder(out / "scores", settings),
        sampling=sampling,
        options=plan.options,
        at_once=64,
        on_done=Progress(f"{name}: answers", len(conditions) * len(examples)),
    )
    summary = summarize(examples, records, max_tokens=plan.max_tokens)
    show_table(Console(width=170), f"{name}, {len(examples)} examples", *table(summary))
    return summary


class Progress:
    """A line now and then."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0

    def __call__(self, condition: str, record: object) -> None:
        self.done += 1
        if self.done % 20 == 0:
            print(f"... {self.what}: {self.done} of {self.total}", flush=True)


def show(name: str, found: Mapping[str, Any]) -> None:
    lines = [(what, interval(one, places=3)) for what, one in found.items() if isinstance(one, dict) and "low" in one]
    if "harm" in found:
        lines.append(("ordinary text, change", interval(found["harm"]["change"], places=3, sign=True)))
    lines.append(("one pass over steps", interval(found["one pass"]["speed-up"], places=1)))
    lines += [(what, f"{value:.4g}") for what, value in found["training"].items()]
    show_table(Console(width=120), f"{name}, {found['model']}", ("log-loss of a token", "95%"), lines)


if __name__ == "__main__":
    print("runs so far:", list(last("distill").get("runs", {})))
    main()
