"""Tasks with what is known of their answers, from JSONL files, the Hub, or made here. Knows no model.

What a record is follows from its fields: a table, first match. A field that holds several documents is put in
front of the question.
"""

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..choreographies.reading import boxed
from ..errors import DataError

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Example:
    """One input of a workflow. kind names the scorer, gold is what it compares with."""

    id: str
    kind: str
    task: Any
    gold: Mapping[str, Any] = field(default_factory=dict)


def _math(r: Record) -> tuple[str, Any, dict[str, Any]]:
    answer = r.get("answer", boxed(r.get("solution", "")))
    return "math", r["problem"], {"answer": None if answer is None else str(answer)}


def _grade_school(r: Record) -> tuple[str, Any, dict[str, Any]]:
    final = r.get("final_answer") or r["answer"].rpartition("####")[2].strip().replace(",", "")
    return "math", r["question"], {"answer": final}


def _question(r: Record) -> tuple[str, Any, dict[str, Any]]:
    answers = r.get("answers") or r["answer"]
    if isinstance(answers, Mapping):  # as some Hub datasets hold them
        answers = answers.get("text") or [*answers.get("aliases", ()), answers.get("value")]
    elif not isinstance(answers, (list, tuple)):
        answers = [answers, *r.get("answer_aliases", ())]
    asked = r.get("question") or r.get("input") or ""
    return "qa", with_context(asked, r), {"answers": [str(a) for a in answers if a is not None]}


def with_context(question: str, r: Record) -> str:
    """The question behind its documents or its context, if it has any."""
    documents = r.get("documents")
    texts = [f"{d.get('title', '')}\n{d['text']}".strip() for d in documents] if documents else []
    texts += [r["context"]] if isinstance(r.get("context"), str) else []
    if not texts:
        return question
    asked = f"Question: {question.rstrip('?')}?" if question else ""
    return "\n\n".join([*texts, asked]).strip()


KINDS: tuple[tuple[Callable[[Record], bool], Callable[[Record], tuple[str, Any, dict[str, Any]]]], ...] = (
    (lambda r: "problem" in r, _math),
    (lambda r: "question" in r and ("final_answer" in r or "####" in str(r.get("answer", ""))), _grade_school),
    (lambda r: "concepts" in r, lambda r: ("concepts", list(r["concepts"]), {"concepts": list(r["concepts"])})),
    (lambda r: "turns" in r, lambda r: ("text", r["turns"][0], {"reference": r.get("reference")})),
    (lambda r: "answers" in r or "answer" in r, _question),
    (lambda r: "task" in r, lambda r: (r.get("kind", "text"), r["task"], dict(r.get("gold", {})))),
    (lambda r: "question" in r, lambda r: ("text", r["question"], {})),
)
GOLD = {  # what a scorer of the kind compares with
    "math": ("answer",),
    "qa": ("answers",),
    "pair": ("first", "second"),
    "concepts": ("concepts",),
    "game": (),
    "text": (),
}


def example(record: Record, number: int) -> Example:
    """A record of a dataset as an example; its id is its own, or its number."""
    for fits, read in KINDS:
        if fits(record):
            kind, task, gold = read(record)
            lacking = [name for name in GOLD.get(kind, ()) if gold.get(name) in (None, [], "")]
            if kind not in GOLD or lacking:
                raise DataError(f"record {number}: kind {kind!r} of {sorted(GOLD)} lacks {lacking or 'a scorer'}")
            return Example(str(record.get("id", number)), kind, task, gold)
    raise DataError(f"record {number}: fields {sorted(record)} are of no known kind; give `task` (and `gold`)")


def load(source: str, *, limit: int | None = None, seed: int | None = None, split: str = "test") -> list[Example]:
    """Examples from `games:N`, a .jsonl file, or a Hub dataset (`name` or `name:configuration`).

    Takes the first `limit`, after shuffling if a seed is given.
    """
    if source.startswith("games:"):
        count = source.removeprefix("games:")
        if not count.isdigit():
            raise DataError(f"{source}: use games:N with a number")
        found = games(int(count))
    else:
        path = Path(source)
        lines = records(path) if path.suffix in (".jsonl", ".json") or path.exists() else _hub(source, split)
        found = [example(record, number) for number, record in enumerate(lines)]
    if len({e.id for e in found}) != len(found):
        raise DataError(f"{source}: two records have the same id")
    if seed is not None:
        random.Random(seed).shuffle(found)
    return found[:limit]


def records(path: Path) -> Iterable[Record]:
    """The objects of a .jsonl file."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as problem:
            raise DataError(f"{path}, line {number}: not JSON ({problem})") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: {type(record).__name__}, not an object")
        yield record


def _hub(source: str, split: str) -> Iterable[Record]:
    try:
        import datasets
    except ImportError:
        raise DataError(f"{source}: no such file; a Hub dataset needs `pip install choreograph[hub]`") from None
    name, _, configuration = source.partition(":")
    try:
        return datasets.load_dataset(name, configuration or None, split=split)
    except Exception as problem:  # the library raises many kinds for what cannot be found or read
        raise DataError(f"{source}: neither a file nor a dataset that can be loaded ({problem})") from None


def pairs(examples: Sequence[Example], seed: int = 0, *, rings: int = 1) -> list[Example]:
    """Every example once first and once second in each ring: in a seeded random order, with its n-th successor."""
    if len(examples) < 2:
        raise DataError(f"{len(examples)} examples: pairs need two or more")
    if any(e.kind != "qa" for e in examples):
        raise DataError(f"pairs are made of questions with answers, not of {sorted({e.kind for e in examples})}")
    if not 0 < rings < len(examples):
        raise DataError(f"rings={rings}: use 1 to {len(examples) - 1} for {len(examples)} examples")
    ring = list(examples)
    random.Random(seed).shuffle(ring)
    return [
        Example(f"{a.id}+{b.id}", "pair", [a.task, b.task], {"first": dict(a.gold), "second": dict(b.gold)})
        for distance in range(1, rings + 1)
        for a, b in zip(ring, [*ring[distance:], *ring[:distance]], strict=True)
    ]


def games(count: int) -> list[Example]:
    """Games of two players; Alice speaks first in every other one."""
    return [Example(f"game-{i}", "game", ("Alice", "Bob")[i % 2]) for i in range(count)]
