"""What the rules of `docs/quality.md` change: programs that differ in one rule, asked the same questions.

`make bench NAME=rules ARGS="--model model.gguf --data folder"`. Four parts:

- `documents`: documents are encoded once, and every question reads five of them in an order of its own, greedily. Questions of
  Natural Questions are taken by tens with the documents of all ten, those of HotpotQA have documents of their own.
- `first-tokens`: first tokens and tokens computed of ten of these questions, each asked alone, when documents and instructions
  are complete. A question that is prefilled counts towards the first token. For a machine with nothing else to do.
- `judges`: four workers answer a question of Natural Questions from two of five documents each; a judge, who sees their
  answers alone, names the right one. All judges judge the same answers.
- `workflows`: the forms of the workflows that differ in a rule, in prefix mode and choreographed, on the same examples.

Intervals are of the questions, paired; results are saved after every ten questions, the judges and every workflow.
"""

import argparse
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from choreograph import CacheConfig, Engine, EngineConfig, Message, Repair, SamplingParams
from choreograph.console import print_table
from choreograph.lab.evaluation.experiment import Experiment
from choreograph.lab.evaluation.metrics import SCORERS, f1, is_correct, score
from choreograph.lab.evaluation.report import format_estimate
from choreograph.lab.evaluation.run_dir import RunDirectory
from choreograph.lab.evaluation.runner import evaluate_conditions
from choreograph.lab.evaluation.splits import shared_units
from choreograph.lab.evaluation.statistics import difference, mean
from choreograph.lab.workflows import Condition, find
from choreograph.lab.workflows.parsing import first_choice
from choreograph.outputs import Mode

from .common import interval, merge_results, model_title, provenance, write
from .quality import Plan, examples_of

DATA = ("nq_oracle", "hotpotqa")
SYSTEM = "You answer questions about documents."
INSTRUCTION = "Answer the question with a few words of the documents."
NUM_READ = 5  # documents of a question
GROUP_SIZE = 10  # questions
NUM_WORKERS = 4
ANSWER = "Answer the question with one sentence, from the documents."
JUDGE = (
    "There are four answers to a question, each from other documents. Judge which one is right. Answer with its number."
)


class Question(NamedTuple):
    """A question and the documents that it reads."""

    text: str
    answers: list[str]
    reads: list[int]  # of the group's documents, in order


class Group(NamedTuple):
    """Documents and the questions about them."""

    documents: list[str]
    questions: list[Question]


@dataclass(frozen=True)
class Program:
    """One way to ask about documents; the defaults follow all rules."""

    mode: Mode = "choreographed"
    question: str = "last, in the header"  # or "last, as text", "last, on its own", "first"
    instruction: str = "with the question"  # or "first" or "last, on its own"
    system: str = "first"  # the documents are encoded "first": behind it; or "apart": without it
    documents: str = "whole turns"  # or "text"


PROGRAMS = {
    "all rules, prefix mode": Program("prefix"),
    "all rules": Program(),
    "question on its own, last": Program(question="last, on its own"),
    "question first": Program(question="first"),
    "instruction on its own, behind the documents": Program(instruction="last, on its own"),
    "instruction first": Program(instruction="first"),
    "documents encoded without the system turn": Program(system="apart"),
    "documents without markers": Program(documents="text"),
    "documents and question without markers": Program(documents="text", question="last, as text"),
    "no rule": Program(question="last, on its own", system="apart", documents="text"),
}
REFERENCE = "all rules"
PARTS = ("documents", "first-tokens", "judges", "workflows")
TEXT = {"prompt": "text"}
WORKFLOWS: dict[
    str, tuple[Plan, dict[str, dict[str, Any]]]
] = {  # and forms by name, what others are compared with first
    "multi_qa": (
        Plan("multi_qa", "nq_oracle", 60, 64),
        {form: {"form": form} for form in ("paper", "guided", "in_context")},
    ),
    "tree_of_thoughts": (
        Plan("tree_of_thoughts", "nq_oracle", 60, 48, {**TEXT, "branches": 4, "voters": 2}),
        {
            "short": {"form": "short"},
            "short, exact judges": {"form": "short", "exact_judges": True},
            "in_context": {"form": "in_context"},
            "in_context, exact judges": {"form": "in_context", "exact_judges": True},
        },
    ),
    "debate_parallel": (
        Plan("debate_parallel", "nq_oracle", 60, 48, {**TEXT, "rounds": 2}),
        {form: {"form": form} for form in ("paper", "guided", "in_context")},
    ),
    "peer": (Plan("peer", "nq_oracle", 60, 48, TEXT), {form: {"form": form} for form in ("shared", "in_context")}),
    "branch_solve_merge": (
        Plan("branch_solve_merge", "commongen_hard", 60, 128),
        {form: {"form": form} for form in ("paper", "in_context")},
    ),
    "debate_iterative": (
        Plan("debate_iterative", "gsm8k", 60, 96, {"form": "short", "rounds": 2}),
        {"short": {}, "short, exact judges": {"exact_judges": True}},
    ),
}
SOME_PROGRAMS = (*list(PROGRAMS)[:3], "documents encoded without the system turn")


def groups_of(data: str, folder: Path, limit: int) -> list[Group]:
    """Return groups with `limit` questions in all."""
    records = [json.loads(line) for line in (folder / f"{data}.jsonl").read_text().splitlines()[:limit]]
    rng, groups = random.Random(0), []
    for start in range(0, len(records), GROUP_SIZE):
        members = records[start : start + GROUP_SIZE]
        documents: list[str] = []
        questions: list[tuple[str, list[str], Sequence[int], list[int]]] = []
        for record in members:
            own = range(len(documents), len(documents) + len(record["documents"]))
            documents += [f"{document['title']}\n{document['text']}" for document in record["documents"]]
            titles = record.get("supporting_titles")
            needed = [
                i
                for i, document in zip(own, record["documents"], strict=True)
                if not titles or document["title"] in titles
            ]
            questions.append(
                (record["question"], record.get("answers") or [record["answer"]], own if titles else (), needed)
            )
        group = Group(documents, [])
        for text, answers, pool, needed in questions:
            others = [i for i in pool or range(len(documents)) if i not in needed]
            reads = needed + rng.sample(others, min(len(others), NUM_READ - len(needed)))
            rng.shuffle(reads)
            group.questions.append(Question(text, answers, reads))
        groups.append(group)
    return groups


def ask(
    engine: Engine, group: Group, program: Program, *, max_tokens: int = 12, together: bool = True
) -> tuple[list[Message], float]:
    """Return the answers to a group's questions, and the tokens that were computed for one of them.

    Args:
        together: all questions are answered in the same steps, else one after the other.
    """
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    with engine.session(mode=program.mode, seed=0, warn_blocked=False) as session:
        system = session.prefill(session.system(SYSTEM))
        context = [system] if program.system == "first" else []
        is_text = program.documents == "text"
        documents = {}
        for i in sorted({i for question in group.questions for i in question.reads}):
            text = group.documents[i]
            documents[i] = session.prefill(f"{text}\n\n" if is_text else session.user(text, opening=False), context)
        instruction = None
        if program.instruction != "with the question":
            instruction = session.prefill(session.user(INSTRUCTION), [system])
        for message in session.messages if program.mode == "choreographed" else ():
            message.wait_encoded()
        answers = []
        for question in group.questions:
            before, after = [system], [documents[i] for i in question.reads]
            header: Any = [session.assistant()]
            text = f"Question: {question.text}"
            if instruction is None:
                text = f"{INSTRUCTION}\n\n{text}"
            else:
                (before if program.instruction == "first" else after).append(instruction)
            if program.question == "last, in the header":
                header.insert(0, session.user(text))
            elif program.question == "last, as text":
                header = f"{text}\nAnswer:"
            else:
                (before if program.question == "first" else after).append(session.prefill(session.user(text), [system]))
            answers.append(session.decode(header, [*before, *after], sampling=sampling))
            if not together:
                answers[-1].result()
        return [answer.result() for answer in answers], session.usage.computed_tokens / len(answers)


def middle(values: Sequence[float]) -> dict[str, float]:
    """Return the median and its interval."""
    low, high = interval(values)
    return {"value": statistics.median(values), "low": low, "high": high, "n": len(values)}


def measure_documents(
    engine: Engine, groups: Sequence[Group], names: Sequence[str], done: Callable[[int, list[dict[str, Any]]], None]
) -> None:
    """Hand the number of questions so far and a record of every program to `done` after each group."""
    right: dict[str, list[float]] = {name: [] for name in names}
    scores: dict[str, list[float]] = {name: [] for name in names}
    for number, group in enumerate(groups):
        engine.clear_cache()
        for name in random.Random(number).sample(list(names), len(names)):
            for question, answer in zip(group.questions, ask(engine, group, PROGRAMS[name])[0], strict=True):
                right[name].append(float(is_correct(answer.text, question.answers)))
                scores[name].append(f1(answer.text, question.answers))
        rows = [
            {
                "program": name,
                "right": asdict(mean(right[name])),
                "right_over_reference": asdict(difference(right[name], right[REFERENCE])),
                "f1": asdict(mean(scores[name])),
                "f1_over_reference": asdict(difference(scores[name], scores[REFERENCE])),
            }
            for name in names
        ]
        done(len(right[REFERENCE]), rows)


def time_documents(engine: Engine, group: Group, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return first tokens and computed tokens of every program, of questions that are each asked alone."""
    times, computed = {}, {}
    for name in random.Random(0).sample(list(names), len(names)):
        for part in (Group(group.documents, group.questions[:1]), group):  # the first one warms up
            engine.clear_cache()
            answers, computed[name] = ask(engine, part, PROGRAMS[name], max_tokens=1, together=False)
            times[name] = [answer.timing.ttft or 0.0 for answer in answers]
    prefix = times[f"{REFERENCE}, prefix mode"]
    return [
        {
            "program": name,
            "ttft": middle(times[name]),
            "prefix_over_ttft": middle([a / b for a, b in zip(prefix, times[name], strict=True)]),
            "computed": {"value": computed[name], "low": computed[name], "high": computed[name], "n": len(prefix)},
        }
        for name in names
    ]


def judge(
    engine: Engine, group: Group, judges: Mapping[str, tuple[str, Repair | None]]
) -> tuple[list[bool], dict[str, Message]]:
    """Return whether each worker's answer is right, and the verdict of every judge, by where its question is and its repair."""
    engine.clear_cache()
    (question,) = group.questions
    with engine.session(seed=0) as session:
        system = session.prefill(session.system(SYSTEM))
        documents = [session.prefill(session.user(group.documents[i]), [system]) for i in question.reads]
        answers = []
        for number in range(NUM_WORKERS):
            header = [
                session.user(f"{ANSWER}\n\nQuestion: {question.text}"),
                session.assistant(f"Answer {number + 1}:\n"),
            ]
            read = [system, *documents[number : number + 2]]
            answers.append(session.decode(header, read, temperature=0, max_tokens=32))
        turn, verdicts = session.user(f"{JUDGE}\n\nQuestion: {question.text}"), {}
        first = session.prefill(turn, [system])
        for message in (*answers, first):
            message.result()
        for name, (place, repair) in judges.items():
            header = [*([turn] if place == "last" else []), session.assistant("The right answer is number")]
            parents = [system, *([first] if place == "first" else []), *answers]
            verdicts[name] = session.decode(header, parents, temperature=0, max_tokens=4, repair=repair).result()
        return [is_correct(answer.text, question.answers) for answer in answers], verdicts


def measure_judges(engine: Engine, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return a record of every judge."""
    conditions = {"reuse": Repair(0.0), "repair 0.2, attention": Repair(0.2, "attention"), "exact": Repair(1.0)}
    judges = {
        f"instruction {place}, {name}": (place, repair)
        for place in ("last", "first")
        for name, repair in conditions.items()
    }
    values: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in judges}
    for number, group in enumerate(groups):
        order = random.Random(number).sample(list(judges), len(judges))
        right, verdicts = judge(engine, group, {name: judges[name] for name in order})
        choices = {name: first_choice(verdict.text, NUM_WORKERS) for name, verdict in verdicts.items()}
        for name, choice in choices.items():
            column, place = values[name], judges[name][0]
            column["right"].append(float(choice is not None and right[choice - 1]))
            column["any answer right"].append(float(any(right)))
            column["as exact"].append(float(choice == choices[f"instruction {place}, exact"]))
            column["exact right"].append(
                float((other := choices[f"instruction {place}, exact"]) is not None and right[other - 1])
            )
            column["ttft"].append(verdicts[name].timing.ttft or 0.0)
            column["exact ttft"].append(verdicts[f"instruction {place}, exact"].timing.ttft or 0.0)
            column["computed"].append(float(verdicts[name].usage.computed_tokens))
    return [
        {
            "program": name,
            "right": asdict(mean(column["right"])),
            "right_over_exact": asdict(difference(column["right"], column["exact right"])),
            "as_exact": asdict(mean(column["as exact"])),
            "any_right": asdict(mean(column["any answer right"])),
            "ttft": middle(column["ttft"]),
            "exact_over_ttft": middle([a / b for a, b in zip(column["exact ttft"], column["ttft"], strict=True)]),
            "computed": asdict(mean(column["computed"])),
        }
        for name, column in values.items()
    ]


def measure_forms(engine: Engine, name: str, data: Path, limit: int, out: Path) -> list[dict[str, Any]]:
    """Return a record of every form of a workflow, in both modes."""
    plan, forms = WORKFLOWS[name]
    plan = replace(plan, limit=limit)
    conditions = {}
    for form, options in forms.items():
        if "exact_judges" not in options:
            conditions[f"{form}, prefix mode"] = Condition("prefix", options)
        conditions[form] = Condition("choreographed", options)
    sampling = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=plan.max_tokens)
    experiment = Experiment(plan.workflow, find(plan.workflow), conditions, sampling, options=plan.options)
    examples = examples_of(plan, data)
    runs = RunDirectory(out / name, experiment.settings(engine, examples))
    records = evaluate_conditions(engine, experiment, examples, runs, concurrency=20)
    metric, _ = SCORERS[examples[0].kind]
    units = [shared_units(example) for example in examples]
    scores = {
        condition: [score(example, record).get(metric, 0.0) for example, record in zip(examples, rows, strict=True)]
        for condition, rows in records.items()
    }
    rows = []
    for condition, values in scores.items():
        form = condition.removesuffix(", prefix mode").removesuffix(", exact judges")
        prefix, first = scores[f"{form}, prefix mode"], scores[next(iter(forms))]
        rows.append(
            {
                "program": condition,
                metric: asdict(mean(values, units)),
                "over_prefix_mode": asdict(difference(values, prefix, units)),
                "over_first_form": asdict(difference(values, first, units)),
                "computed": asdict(mean([float(record["encoded"]) for record in records[condition]])),
            }
        )
    return rows


def save(name: str, model: str, n: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the records of a part and merge them into the result file."""
    columns = [key for key, value in rows[0].items() if isinstance(value, dict)]
    lines = [[row["program"], *(format_estimate(row[key], places=3) for key in columns)] for row in rows]
    print_table(Console(width=200), f"{name}, n = {n}", ["program", *columns], lines)
    part = {"n": n, "model": model, **provenance(), "rows": list(rows)}
    write("rules", [], model, runs=merge_results("rules", "runs", {name: part}))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default=None, help="default: the bundled model")
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    options.add_argument("--workflows", nargs="*", choices=list(WORKFLOWS), default=list(WORKFLOWS))
    options.add_argument("--out", type=Path, default=Path("out/rules"), help="records of the workflows, to go on with")
    options.add_argument("--sets", nargs="*", choices=DATA, default=DATA)
    options.add_argument("--limit", type=int, default=60, help="questions of each part")
    options.add_argument("--dtype", default="bfloat16")
    given = options.parse_args()
    config, name = EngineConfig(cache=CacheConfig(capacity=40_000)), Path(given.model or "bundled").stem
    engine = Engine.from_pretrained(*([given.model] if given.model else []), dtype=given.dtype, config=config)
    for data in given.sets:
        programs = list(PROGRAMS) if data == "nq_oracle" else SOME_PROGRAMS
        groups = groups_of(data, given.data, given.limit)
        if "documents" in given.only:
            measure_documents(engine, groups, programs, partial(save, f"documents, {data}", name))
        if "first-tokens" in given.only:
            save(f"first tokens, {data}", name, GROUP_SIZE, time_documents(engine, groups[0], programs))
    if "judges" in given.only:
        groups = [
            Group(group.documents, [question])
            for group in groups_of("nq_oracle", given.data, given.limit)
            for question in group.questions
        ]
        save("judges", name, len(groups), measure_judges(engine, groups))
    for workflow in given.workflows if "workflows" in given.only else ():
        rows = measure_forms(engine, workflow, given.data, given.limit, given.out / name)
        parts = ["workflows", workflow, *([model_title(given.model)] if given.model else [])]
        save(", ".join(parts), name, rows[0]["computed"]["n"], rows)


if __name__ == "__main__":
    main()
