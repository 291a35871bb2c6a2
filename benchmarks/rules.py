"""What the rules of `docs/quality.md` change: programs that differ in one rule, asked the same questions.

`make bench NAME=rules ARGS="--model model.gguf --data folder"`. Documents are encoded once, and every question reads five of
them in an order of its own, greedily. Questions of Natural Questions are taken by tens with the documents of all ten, those
of HotpotQA have documents of their own. Documents and instructions are complete before the question is asked; a question that
is prefilled counts towards the first token. Intervals are of the questions, paired; results are saved after each set.
"""

import argparse
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from choreograph import CacheConfig, Engine, EngineConfig, Message, SamplingParams
from choreograph.console import print_table
from choreograph.lab.evaluation.metrics import f1, is_correct
from choreograph.lab.evaluation.report import format_estimate
from choreograph.lab.evaluation.statistics import difference, mean
from choreograph.outputs import Mode

from .common import interval, merge_results, provenance, write

DATA = ("nq_oracle", "hotpotqa")
SYSTEM = "You answer questions about documents."
INSTRUCTION = "Answer the question with a few words of the documents."
NUM_READ = 5  # documents of a question


class Question(NamedTuple):
    """A question and the documents that it reads."""

    text: str
    answers: list[str]
    reads: list[int]  # of the group's documents, in order
    needed: list[int]  # those that have the answer


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
    "question first, prefix mode": Program("prefix", question="first"),
    "instruction on its own, behind the documents": Program(instruction="last, on its own"),
    "instruction first": Program(instruction="first"),
    "instruction first, prefix mode": Program("prefix", instruction="first"),
    "documents encoded without the system turn": Program(system="apart"),
    "documents without markers": Program(documents="text"),
    "documents and question without markers": Program(documents="text", question="last, as text"),
    "no rule": Program(question="last, on its own", system="apart", documents="text"),
}
REFERENCE = "all rules"
SOME_PROGRAMS = (*list(PROGRAMS)[:3], "instruction first", "documents encoded without the system turn", "no rule")


@dataclass
class Measured:
    """What one program did, by question."""

    right: list[float] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)  # seconds
    computed: list[float] = field(default_factory=list)  # tokens, with the question's share of the documents

    def add(self, question: Question, answer: Message) -> None:
        """Score an answer."""
        self.right.append(float(is_correct(answer.text, question.answers)))
        self.f1.append(f1(answer.text, question.answers))
        self.ttft.append(answer.timing.ttft or 0.0)


def groups_of(data: str, folder: Path, limit: int) -> list[Group]:
    """Return groups with `limit` questions in all."""
    records = [json.loads(line) for line in (folder / f"{data}.jsonl").read_text().splitlines()[:limit]]
    rng, groups = random.Random(0), []
    size = 10 if data == "nq_oracle" else 1
    for start in range(0, len(records), size):
        members = records[start : start + size]
        documents = [document for record in members for document in record["documents"]]
        questions = []
        for number, record in enumerate(members):
            titles = record.get("supporting_titles")
            needed = [
                i for i, document in enumerate(documents) if (document["title"] in titles if titles else i == number)
            ]
            others = [i for i in range(len(documents)) if i not in needed]
            reads = needed + rng.sample(others, min(len(others), NUM_READ - len(needed)))
            rng.shuffle(reads)
            questions.append(Question(record["question"], record.get("answers") or [record["answer"]], reads, needed))
        groups.append(Group([f"{document['title']}\n{document['text']}" for document in documents], questions))
    return groups


def ask(engine: Engine, group: Group, program: Program, sampling: SamplingParams) -> tuple[list[Message], float]:
    """Return the answers to a group's questions, and the tokens that were computed for one of them."""
    engine.clear_cache()
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
            answers.append(session.decode(header, [*before, *after], sampling=sampling).result())
        return answers, session.usage.computed_tokens / len(answers)


def middle(values: Sequence[float]) -> dict[str, float]:
    """Return the median and its interval."""
    low, high = interval(values)
    return {"value": statistics.median(values), "low": low, "high": high, "n": len(values)}


def measure_documents(engine: Engine, groups: Sequence[Group], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a record of every program."""
    sampling = SamplingParams(temperature=0, max_tokens=12)
    measured: dict[str, Measured] = {name: Measured() for name in names}
    for number, group in enumerate(groups):
        for name in random.Random(number).sample(list(names), len(names)):
            answers, computed = ask(engine, group, PROGRAMS[name], sampling)
            for question, answer in zip(group.questions, answers, strict=True):
                measured[name].add(question, answer)
                measured[name].computed.append(computed)
        print(f"... {number + 1} of {len(groups)} groups", flush=True)
    reference, prefix = measured[REFERENCE], measured[f"{REFERENCE}, prefix mode"]
    return [
        {
            "program": name,
            "right": asdict(mean(values.right)),
            "right_over_reference": asdict(difference(values.right, reference.right)),
            "f1": asdict(mean(values.f1)),
            "f1_over_reference": asdict(difference(values.f1, reference.f1)),
            "ttft": middle(values.ttft),
            "prefix_over_ttft": middle([a / b for a, b in zip(prefix.ttft, values.ttft, strict=True)]),
            "computed": asdict(mean(values.computed)),
        }
        for name, values in measured.items()
    ]


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
    options.add_argument("--sets", nargs="*", choices=DATA, default=DATA)
    options.add_argument("--limit", type=int, default=60, help="questions of each set")
    options.add_argument("--dtype", default="bfloat16")
    given = options.parse_args()
    config, name = EngineConfig(cache=CacheConfig(capacity=40_000)), Path(given.model or "bundled").stem
    engine = Engine.from_pretrained(*([given.model] if given.model else []), dtype=given.dtype, config=config)
    for data in given.sets:
        programs = list(PROGRAMS) if data == "nq_oracle" else SOME_PROGRAMS
        groups = groups_of(data, given.data, given.limit)
        rows = measure_documents(engine, groups, programs)
        save(f"documents, {data}", name, sum(len(group.questions) for group in groups), rows)


if __name__ == "__main__":
    main()
