"""What repair buys: share of the context recomputed, gap in log-loss closed, and time to first token.

`make bench NAME=repair ARGS="--data folder"`: every example runs once in prefix mode; its messages are then forced
in prefix mode again and choreographed with each strategy and share, in another order for every example. The gap is that
of the mean log-loss a token of the baseline's own messages, in stages that read reused messages out of their context.
Intervals are of a bootstrap over examples, paired. Results are saved after every example.

Ten minutes on two cores are enough for `--only math-tree_of_thoughts --limit 6 --max-tokens 32 --shares 0.2`, and for
`--only qa-nq_oracle --limit 8 --max-tokens 32 --shares 0.2 --early`.

`--cost` measures first tokens instead, paired: questions over five encoded documents in an order of their own, and votes over
eight encoded solutions. Each is compared with reuse, with prefix mode, and with the time of reuse, 1.25 times the
prefill of as many tokens and one decode step. `--answers hotpotqa nq_oracle` answers such questions, and compares F1.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

from choreograph import Budget, Engine, Message, Repair, SamplingParams, Session
from choreograph.api.chat import Turn
from choreograph.console import print_table
from choreograph.features.agent_tags import RequestTag, tag_requests
from choreograph.features.repair.attention import select_attended
from choreograph.features.repair.options import REPAIR_STRATEGIES
from choreograph.features.repair.strategy import ContextView, Strategy, TokenRanges
from choreograph.lab.evaluation.experiment import example_seed
from choreograph.lab.evaluation.metrics import f1
from choreograph.lab.evaluation.statistics import Estimate, bootstrap, ratio
from choreograph.lab.workflows import find
from choreograph.lab.workflows.run import Transcript, WorkflowRun, call_workflow
from choreograph.lab.workflows.tree_of_thoughts import VOTE
from choreograph.outputs import Mode
from choreograph.viz import Point

from .common import (
    FIGURES,
    interval,
    keep_supporting,
    last_result,
    merge_results,
    model_title,
    provenance,
    write,
)
from .common import engine as make_engine
from .plots import repair_curves
from .quality import PLANS, examples_of

RUNS = ("qa-nq_oracle", "math-tree_of_thoughts", "math-mad_par", "math-mad_iter", "bsm", "pd-none")
SHARES = (0.1, 0.2, 0.4)
LATE = 0.6, 1.0  # layers that InfoFlow KV observes (arXiv:2603.05353), as shares
COMPUTING = [name for name, strategy in REPAIR_STRATEGIES.items() if not strategy.aligns]  # `align` measures the other
TITLES = {
    "qa-nq_oracle": "MultiQA",
    "math-tree_of_thoughts": "Tree of Thoughts",
    "math-mad_par": "parallel debate",
    "math-mad_iter": "iterative debate",
    "bsm": "Branch-Solve-Merge",
    "pd-none": "Prisoner's Dilemma",
}


def select_parents(view: ContextView) -> list[TokenRanges]:
    """Select the first tokens of the parents that the header attends to most, each whole before the next."""
    assert view.attention is not None
    lengths = [len(parent.tokens) for parent in view.parents]
    attention = [part.sum().item() for part in view.attention.split(lengths)]
    lengths = [0 if parent.is_exact else length for parent, length in zip(view.parents, lengths, strict=True)]
    selected: list[TokenRanges] = [[] for _ in lengths]
    remaining = math.ceil(view.share * sum(lengths))
    for index in sorted(range(len(lengths)), key=lambda index: -attention[index]):
        if num_tokens := min(lengths[index], remaining):
            selected[index] = [(0, num_tokens)]
            remaining -= num_tokens
    return selected


STRATEGIES = {  # by name, also others than the library's
    **REPAIR_STRATEGIES,
    "late layers": Strategy(select_attended, reads_prompt=True, observed_layers=LATE),
    "runs of 32": Strategy(partial(select_attended, block_size=32), reads_prompt=True),
    "parents": Strategy(select_parents, reads_prompt=True),
}


class Measured:
    """Losses and times of one run, by stage."""

    def __init__(self) -> None:
        self.rows: dict[int, list[torch.Tensor]] = {}  # log-probabilities (V,) of every token, by message
        self.messages: list[tuple[str, Message]] = []
        self.ttft: dict[str, list[float]] = defaultdict(list)  # seconds
        self.repaired: dict[str, int] = defaultdict(int)  # tokens


def run(
    engine: Engine,
    workflow: Any,
    task: str,
    *,
    mode: Mode,
    repair: Repair | None,
    max_kl: Budget | None = None,
    sampling: SamplingParams,
    options: dict[str, Any],
    seed: int,
    replay: Transcript | None = None,
    early: bool = False,
) -> tuple[Measured, Transcript]:
    """Run an example from an empty cache and keep the distribution of every generated token.

    early: prefills are computed when they are submitted, before the calls that read them.
    """
    engine.clear_cache()
    measured = Measured()

    def watch(message: Message) -> None:
        if message.kind == "decode":
            rows = measured.rows[message.id] = []
            message.on_logprobs(lambda row: rows.append(row.clone()))
        elif early:
            message.wait_encoded()

    with (
        engine.session(mode=mode, seed=seed, repair=repair, max_kl=max_kl) as session,
        tag_requests(RequestTag(session, None, watch)),
    ):
        wf = WorkflowRun(session, sampling=sampling, replay=replay)
        call_workflow(workflow, wf, task, options).result()
        engine.run_until_idle()
        for stage, message in wf.calls:
            measured.repaired[stage] += message.usage.repaired_tokens
            if message.kind == "decode":
                measured.messages.append((stage, message))
                measured.ttft[stage].append(message.timing.ttft or 0.0)
        return measured, wf.transcript()


def losses(baseline: Measured, other: Measured) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """By stage: log-loss of every token on the baseline and under the condition, and the KL divergence, in nats."""
    result: dict[str, tuple[list[float], list[float], list[float]]] = defaultdict(lambda: ([], [], []))
    for (stage, message), (_, forced) in zip(baseline.messages, other.messages, strict=True):
        tokens = message.output_token_ids
        before, after = torch.stack(baseline.rows[message.id]), torch.stack(other.rows[forced.id])
        ids = torch.tensor(tokens)[:, None]
        old, new, divergence = result[stage]
        old += (-before.gather(1, ids)[:, 0]).tolist()
        new += (-after.gather(1, ids)[:, 0]).tolist()
        divergence += (before.exp() * (before - after)).sum(-1).clamp_min(0).tolist()
    return result


def average(values: Sequence[float]) -> Estimate:
    """Mean of examples; zeros and ones are numbers like others."""
    return bootstrap(np.mean, np.asarray(values))


def closed(values: Sequence[float], full: Sequence[float]) -> Estimate | None:
    """Share of a mean gap that a condition closes; None without a gap."""
    if sum(full) <= 0:
        return None
    left = ratio(values, full)
    return Estimate(1 - left.value, 1 - left.high, 1 - left.low, left.n)


def summarize(gathered: Mapping[tuple[str, str], Mapping[str, list[float]]]) -> list[dict[str, Any]]:
    """One record a stage and condition."""
    records = []
    for (stage, condition), values in sorted(gathered.items()):
        reuse, prefix = gathered[stage, "reuse"], gathered[stage, "prefix"]
        estimates = {
            "gap": average(values["gap"]),
            "kl": average(values["kl"]),
            "gap_closed": closed(values["gap"], reuse["gap"]),
            "kl_closed": closed(values["kl"], reuse["kl"]),
            "ttft_over_prefix": ratio(prefix["ttft"], values["ttft"]),
            "repaired_tokens": average(values["repaired"]),
        }
        records.append({"stage": stage, "condition": condition, **{k: e and asdict(e) for k, e in estimates.items()}})
    return records


def show(record: Mapping[str, float] | None, form: str) -> str:
    """A value and its interval."""
    return "-" if record is None else f"{record['value']:{form}} ({record['low']:{form}}, {record['high']:{form}})"


def draw(runs: Mapping[str, Any]) -> None:
    """Draw what strategies close over their speed, of stages where reuse diverges by 0.01 nats or more."""
    stages: dict[str, dict[str, list[Point]]] = {}
    for name, run in runs.items():
        points = {
            (record["stage"], record["condition"]): (
                record["ttft_over_prefix"]["value"],
                100 * record["kl_closed"]["value"],
            )
            for record in run["rows"]
            if record["kl_closed"] is not None
        }
        for record in run["rows"]:
            if record["condition"] == "reuse" and record["kl"]["value"] >= 0.01:
                stages[f"{TITLES[name]}: {record['stage']}"] = {
                    strategy: [
                        points[record["stage"], condition]
                        for condition in ("reuse", *(f"{strategy} {share:g}" for share in SHARES))
                        if (record["stage"], condition) in points
                    ]
                    for strategy in COMPUTING
                }
    repair_curves(stages, FIGURES / "repair.svg")


class Question(NamedTuple):
    """A question over documents that are encoded once, in the order in which it reads them."""

    text: str
    answers: list[str]
    documents: list[str]


def questions_of(data: Path, name: str) -> list[Question]:
    """Questions over five documents in an order of their own: of ten of the record, the supporting ones among them
    (`hotpotqa`, `2wikimqa`), or of those of ten records (`nq_oracle`)."""
    records = [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]
    questions = []
    for number, record in enumerate(records):
        needed, others, draw = record["documents"], record["documents"], random.Random(number)
        if "supporting_titles" in record:
            needed = keep_supporting(record)["documents"][:4]
            others = [document for document in others if document["title"] not in record["supporting_titles"]]
        else:
            near = records[number // 10 * 10 : number // 10 * 10 + 10]
            others = [document for other in near if other is not record for document in other["documents"]]
        read = [*needed, *draw.sample(others, min(len(others), 5 - len(needed)))]
        texts = [f"{document['title']}\n{document['text']}" for document in draw.sample(read, len(read))]
        questions.append(Question(record["question"], record.get("answers") or [record["answer"]], texts))
    return questions


Clock = Callable[[], float]  # seconds


class Read(NamedTuple):
    """Encoded messages, and the header of a call that reads them."""

    parents: list[Message]
    header: list[Turn]


def read_documents(session: Session, question: Question) -> Read:
    """Encode the documents of a question behind a system turn; the question sees them."""
    system = session.prefill(session.system("Answer the question from the documents."))
    documents = [session.prefill(session.user(text), [system]) for text in question.documents]
    return Read([system, *documents], [session.user(f"Question: {question.text}"), session.assistant("Short answer:")])


def read_solutions(session: Session, problem: str, solutions: Sequence[str]) -> Read:
    """Encode solutions of a problem, for a vote of Tree of Thoughts."""
    task = session.prefill(session.user(f"Solve this problem step by step.\n\n{problem}"))
    turns = [session.assistant(f"Solution {number}:\n{text}") for number, text in enumerate(solutions, 1)]
    branches = [session.prefill(turn, [task]) for turn in turns]
    instructions = session.prefill(session.user(VOTE.format(task=problem)))
    return Read([instructions, *branches], [session.assistant("Analysis:\n")])


def reads_of(data: Path, limit: int) -> dict[str, list[Callable[[Session], Read]]]:
    """What `measure_costs` measures: `limit` reads of each kind, and one to warm up."""
    problems = [json.loads(line) for line in (data / "math.jsonl").read_text().splitlines()]
    votes: list[Callable[[Session], Read]] = []
    for number in range(limit + 1):
        solutions = [record["solution"][:400] for record in problems[8 * number : 8 * number + 8]]
        votes.append(partial(read_solutions, problem=problems[8 * number]["problem"], solutions=solutions))
    questions = questions_of(data, "hotpotqa")[: limit + 1]
    return {"retrieval": [partial(read_documents, question=question) for question in questions], "vote": votes}


def first_token(
    engine: Engine, read: Callable[[Session], Read], mode: Mode, repair: Repair | None, clock: Clock
) -> tuple[float, float, Message]:
    """Call over encoded messages; return the time to first token and that of a decode step, in seconds."""
    engine.clear_cache()
    with engine.session(mode=mode, repair=repair, seed=0) as session:
        parents, header = read(session)
        for parent in parents if mode == "choreographed" else ():
            parent.wait_encoded()
        answer = session.decode(header, parents, temperature=0, max_tokens=9, ignore_eos=True)
        start = clock()
        next(answer.stream())
        first = clock()
        answer.result()
        return first - start, (clock() - first) / 8, answer


def measure_costs(
    engine: Engine, name: str, data: Path, limit: int, conditions: Mapping[str, Repair | None], clock: Clock
) -> None:
    """Print and save what the first token costs under each condition, paired by read."""
    for kind, reads in reads_of(data, limit).items():
        ttft, bounds, repaired = (defaultdict[str, list[float]](list) for _ in range(3))
        for number, read in enumerate(reads):
            times = {}
            for condition in random.Random(number).sample(list(conditions), len(conditions)):
                mode: Mode = "prefix" if condition == "prefix" else "choreographed"
                times[condition] = first_token(engine, read, mode, conditions[condition], clock)
            for condition, (value, _, answer) in times.items() if number else ():  # the first one warms up
                ttft[condition].append(value)
                if num_tokens := answer.usage.repaired_tokens:
                    bound = times["reuse"][0] + 1.25 * prefill_seconds(engine, num_tokens, clock) + times["reuse"][1]
                    bounds[condition].append(bound)
                    repaired[condition].append(num_tokens)
            ttft["decode step"] += [times["reuse"][1]] if number else []
            ttft["prefill of 256 tokens"] += [prefill_seconds(engine, 256, clock)] if number else []
        records = []
        for condition, values in ttft.items():
            ratios = {
                "over_reuse": (values, ttft["reuse"]),
                "prefix_over": (ttft["prefix"], values),
                "over_bound": (values, bounds[condition] or None),
            }
            record: dict[str, Any] = {"condition": condition, "ms": median_of([1e3 * value for value in values])}
            record["tokens"] = statistics.mean(repaired[condition] or [0])
            for key, (above, below) in ratios.items():
                record[key] = below and median_of([a / b for a, b in zip(above, below, strict=True)])
            records.append(record)
        unit = "CPU time" if clock is time.process_time else "time"
        title = f"{kind}, {name}, {torch.get_num_threads()} threads, {unit}"
        update = {title: {**provenance(), "n": limit, "rows": records}}
        keep("costs", update)
        header = ["condition", "ms", "over reuse", "prefix mode over this", "over its bound", "repaired"]
        rows = [
            [one["condition"], *(show(one[key], ".3g") for key in ("ms", *ratios)), f"{one['tokens']:.0f}"]
            for one in records
        ]
        print_table(Console(width=140), f"first token: {title}, n = {limit}", header, rows)


def prefill_seconds(engine: Engine, num_tokens: int, clock: Clock) -> float:
    """Time of a prefill of new tokens, with nothing in the cache."""
    engine.clear_cache()
    with engine.session() as session:
        prompt = session.prefill([7 + i % 1000 for i in range(num_tokens)])
        start = clock()
        prompt.wait_encoded()
        return clock() - start


def median_of(values: Sequence[float]) -> dict[str, float]:
    """A median and its interval."""
    low, high = interval(values)
    return {"value": statistics.median(values), "low": low, "high": high}


def measure_answers(
    engine: Engine,
    name: str,
    questions: Mapping[str, Sequence[Question]],
    conditions: Mapping[str, Repair | None],
) -> None:
    """Print and save F1 of greedy answers, and the divergence from prefix mode along the right one, paired."""
    for dataset, asked in questions.items():
        gathered: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        records: list[dict[str, Any]] = []
        for number, question in enumerate(asked):
            for condition, values in ask(engine, question, conditions).items():
                for key, value in values.items():
                    gathered[condition][key].append(value)
            prefix, reuse = gathered["prefix"], gathered["reuse"]
            records = [
                {
                    "condition": condition,
                    "f1": asdict(average([100 * value for value in values["f1"]])),
                    "f1_change": asdict(
                        average([100 * (a - b) for a, b in zip(values["f1"], prefix["f1"], strict=True)])
                    ),
                    "right": sum(values["right"]),
                    "kl": asdict(average(values["kl"])),
                    "kl_closed": (estimate := closed(values["kl"], reuse["kl"])) and asdict(estimate),
                    "repaired_tokens": statistics.mean(values["repaired"]),
                }
                for condition, values in gathered.items()
            ]
            print(f"... {dataset}: {number + 1} of {len(asked)}", flush=True)
            keep("answers", {f"{dataset}, {name}": {**provenance(), "n": number + 1, "rows": records}})
        columns = {"f1": ".1f", "f1_change": "+.1f", "kl": ".3f", "kl_closed": ".0%"}
        rows = [
            [one["condition"], *(show(one[key], form) for key, form in columns.items()), one["right"]]
            for one in records
        ]
        header = ["condition", "F1", "minus prefix mode", "KL", "closed", f"right of {len(asked)}"]
        print_table(Console(width=140), f"retrieval, {dataset}, {name}", header, [list(map(str, row)) for row in rows])


def ask(engine: Engine, question: Question, conditions: Mapping[str, Repair | None]) -> dict[str, dict[str, float]]:
    """Ask a question under all conditions at once, and score the answers."""
    engine.clear_cache()
    target = engine.tokenizer(" " + question.answers[0], add_special_tokens=False)["input_ids"][:8]
    result: dict[str, dict[str, float]] = {}
    rows: dict[str, list[torch.Tensor]] = {condition: [] for condition in conditions}
    calls = {}
    with engine.session(mode="prefix") as prefix, engine.session() as session:
        for condition, repair in conditions.items():
            reader = prefix if condition == "prefix" else session
            parents, header = read_documents(reader, question)
            forced = reader.decode(header, parents, forced_tokens=target, repair=repair)
            forced.on_logprobs(partial(append_copy, rows[condition]))
            calls[condition] = reader.decode(header, parents, temperature=0, max_tokens=12, repair=repair), forced
        engine.run_until_idle()
        expected = torch.stack(rows["prefix"])
        for condition, (answer, forced) in calls.items():
            divergence = (expected.exp() * (expected - torch.stack(rows[condition]))).sum(-1).clamp_min(0)
            text = answer.text.strip().partition("\n")[0]
            is_right = any(right.lower() in text.lower() for right in question.answers)
            result[condition] = {
                "f1": f1(text, question.answers),
                "right": float(is_right),
                "kl": divergence.mean().item(),
                "repaired": max(message.usage.repaired_tokens for message in (answer, forced)),
            }
    return result


def append_copy(rows: list[torch.Tensor], row: torch.Tensor) -> None:
    rows.append(row.clone())


def keep(key: str, update: Mapping[str, object]) -> None:
    """Save a part of the results beside the others."""
    others = {other: last_result("repair").get(other, {}) for other in ("runs", "costs", "answers")}
    write("repair", [], "bundled", **{**others, key: merge_results("repair", key, update)})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default=None, help="default: the bundled model")
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--only", nargs="*", default=list(RUNS))
    options.add_argument("--limit", type=int, default=8, help="examples of each workflow")
    options.add_argument("--skip", type=int, default=0, help="examples to leave out at the start")
    options.add_argument("--max-tokens", type=int, default=64, help="of a message")
    options.add_argument("--shares", type=float, nargs="*", default=list(SHARES))
    options.add_argument("--strategies", nargs="*", choices=STRATEGIES, default=COMPUTING)
    options.add_argument("--cost", action="store_true", help="measure first tokens of retrieval and votes instead")
    options.add_argument(
        "--cpu-time", action="store_true", help="of --cost, for busy machines; use it with OMP_NUM_THREADS=1"
    )
    options.add_argument("--answers", nargs="*", default=(), help="data of questions over documents to answer instead")
    options.add_argument("--early", action="store_true", help="compute prefills before the calls that read them")
    options.add_argument("--dtype", default="bfloat16")
    given = options.parse_args()
    if given.model is None:
        engine, name = make_engine(tokens=40_000, dtype=given.dtype), "bundled"
    else:
        engine, name = Engine.from_pretrained(given.model, dtype=given.dtype), model_title(given.model)
    conditions: dict[str, Repair | None] = {"prefix": None, "reuse": None}
    conditions |= {
        f"{kind} {share:g}": Repair(share, STRATEGIES[kind]) for share in given.shares for kind in given.strategies
    }
    if given.cost:
        measure_costs(
            engine,
            name,
            given.data,
            given.limit,
            conditions,
            time.process_time if given.cpu_time else time.perf_counter,
        )
        return
    if given.answers:
        asked = {dataset: questions_of(given.data, dataset) for dataset in given.answers}
        chosen = slice(given.skip, given.skip + given.limit)
        measure_answers(engine, name, {dataset: all_[chosen] for dataset, all_ in asked.items()}, conditions)
        return
    for plan_name in given.only:
        plan = PLANS[plan_name]
        workflow = find(plan.workflow)
        sampling = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=given.max_tokens)
        gathered: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        examples = examples_of(plan, given.data)[given.skip : given.skip + given.limit]
        records: list[dict[str, Any]] = []
        for number, example in enumerate(examples):
            common = {
                "sampling": sampling,
                "options": dict(plan.options),
                "seed": example_seed(0, example.id),
                "early": given.early,
            }
            baseline, transcript = run(engine, workflow, example.task, mode="prefix", repair=None, **common)
            for condition in random.Random(number).sample(list(conditions), len(conditions)):
                mode: Mode = "prefix" if condition == "prefix" else "choreographed"
                repair = conditions[condition]
                other, _ = run(engine, workflow, example.task, mode=mode, repair=repair, replay=transcript, **common)
                for stage, (old, new, divergence) in losses(baseline, other).items():
                    values = gathered[stage, condition]
                    values["gap"].append(sum(new) / len(new) - sum(old) / len(old))
                    values["kl"].append(sum(divergence) / len(divergence))
                    values["ttft"].append(sum(other.ttft[stage]) / len(other.ttft[stage]))
                    values["repaired"].append(other.repaired[stage])
            print(f"... {plan_name}: {number + 1} of {len(examples)}", flush=True)
            records = summarize(gathered)
            facts = {"workflow": plan.workflow, "data": plan.data, "n": number + 1, "early": given.early}
            update = {plan_name: {**facts, **provenance(), "rows": records}}
            keep("runs", update)
        columns = {
            "gap": "+.3f",
            "gap_closed": ".0%",
            "kl": ".3f",
            "kl_closed": ".0%",
            "ttft_over_prefix": ".1f",
            "repaired_tokens": ".0f",
        }
        rows = [
            [record["stage"], record["condition"], *(show(record[key], form) for key, form in columns.items())]
            for record in records
        ]
        header = ["stage", "condition", "log-loss gap", "closed", "KL", "closed", "TTFT, prefix over this", "repaired"]
        print_table(Console(width=170), plan_name, header, rows)
    draw(last_result("repair")["runs"])


if __name__ == "__main__":
    main()
