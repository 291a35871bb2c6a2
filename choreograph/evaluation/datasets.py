"""Tasks with what is known of their answers, from JSONL files, the Hub, or made here. Knows no model.

What a record is follows from its fields: a table, first match. A field that holds several documents is put in
front of the question. One text stands for a list of one; what is of another type than its scorer needs is refused.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..workflows.parsing import boxed

DatasetRecord = Mapping[str, Any]

SENTENCE_ENDS = tuple("?.!:。？！：")  # of questions that need no further mark


@dataclass(frozen=True)
class Example:
    """One input of a workflow. kind names the scorer, gold is what it compares with."""

    id: str
    kind: str
    task: Any
    reference: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def error_context(location: str) -> Iterator[None]:
    """Names the record, or the file, of a DataError."""
    try:
        yield
    except DataError as exc:
        raise DataError(f"{location}: {exc}") from None


def _invalid(name: str, value: object, hint: str) -> DataError:
    return DataError(f"{name}={value!r:.60}: {hint}")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _invalid(name, value, "use a string")
    return value


def _nonempty_question(name: str, value: object) -> str:
    if not (text := _text(name, value)).strip():
        raise _invalid(name, value, "ask something")
    return text


def _answer(name: str, value: object) -> str:
    """A string, a number as one, or yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (str, int, float)):
        raise _invalid(name, value, "use a string or a number")
    return str(value)


def _answers(name: str, value: object) -> list[str]:
    """One answer or a list of them; None is none, nor is a blank."""
    given = value if isinstance(value, (list, tuple)) else [value]
    return [said for one in given if one is not None and (said := _answer(name, one)).strip()]


def _concepts(value: object) -> list[str]:
    """A list, or a string with commas."""
    if isinstance(value, str):
        return [concept.strip() for concept in value.split(",") if concept.strip()]
    if not isinstance(value, (list, tuple)):
        raise _invalid("concepts", value, "use a list of strings, or a string with commas")
    return [_text("concepts", concept) for concept in value]


def _parse_math(r: DatasetRecord) -> tuple[str, Any, dict[str, Any]]:
    answer = r["answer"] if "answer" in r else boxed(_text("solution", r.get("solution", "")))
    gold = None if answer is None else _answer("answer", answer)
    return "math", prepend_context(_nonempty_question("problem", r["problem"]), r), {"answer": gold}


def _parse_grade_school(r: DatasetRecord) -> tuple[str, Any, dict[str, Any]]:
    final = r.get("final_answer")
    if final in (None, ""):
        final = _text("answer", r.get("answer")).rpartition("####")[2].strip().replace(",", "")
    return (
        "math",
        prepend_context(_nonempty_question("question", r["question"]), r),
        {"answer": _answer("final_answer", final)},
    )


def _parse_qa(r: DatasetRecord) -> tuple[str, Any, dict[str, Any]]:
    name = "answer" if r.get("answers") in (None, "", [], {}) else "answers"
    given = r.get(name)
    if isinstance(given, Mapping):  # as some Hub datasets hold them
        answers = _answers("answers.text", given.get("text"))
        answers = answers or _answers("aliases", given.get("aliases")) + _answers("value", given.get("value"))
    else:
        answers = _answers(name, given) + _answers("answer_aliases", r.get("answer_aliases"))
    questions = "question" in r or "input" in r  # beside one, a task is the name of a set
    names = ("question", "input") if questions else ("task", "prompt")
    requested = next((r[name] for name in names if r.get(name)), "")
    return "qa", _nonempty_question("question", prepend_context(_text("question", requested), r)), {"answers": answers}


def _parse_turns(r: DatasetRecord) -> tuple[str, Any, dict[str, Any]]:
    turns = [r["turns"]] if isinstance(r["turns"], str) else r["turns"]
    if not isinstance(turns, (list, tuple)) or not turns:
        raise _invalid("turns", turns, "use a list of strings, the first of which is asked")
    return "text", _nonempty_question("turns", turns[0]), {"reference": r.get("reference")}


def _parse_task(r: DatasetRecord) -> tuple[str, Any, dict[str, Any]]:
    """The gold of each kind as its scorer wants it."""
    kind, given = _text("kind", r.get("kind", "text")), {} if r.get("gold") is None else r["gold"]
    if not isinstance(given, Mapping):
        raise _invalid("gold", given, "use an object")
    if r["task"] in (None, "", []):
        raise _invalid("task", r["task"], "ask something")
    return kind, r["task"], {name: _parse_reference(kind, name, value) for name, value in given.items()}


def _parse_reference(kind: str, name: str, value: Any) -> Any:
    if value is None or name not in REQUIRED_FIELDS.get(kind, ()):
        return value
    if kind == "math":
        return _answer(name, value)
    if kind == "concepts":
        return _concepts(value)
    answers = _answers(name, value.get("answers") if isinstance(value, Mapping) else value)
    return {"answers": answers} if kind == "pair" and answers else answers


def prepend_context(question: str, record: DatasetRecord) -> str:
    """The question behind its documents or its context, if it has any."""
    documents = record.get("documents") or []
    if not isinstance(documents, (str, list, tuple)):
        raise _invalid("documents", documents, "use a list of texts")
    texts = [_document_text(one) for one in ([documents] if isinstance(documents, str) else documents)]
    context = record.get("context") or ""
    if not isinstance(context, str):
        raise _invalid("context", context, "use a string, or `documents` for a list of texts")
    texts += [context] if context else []
    if not texts:
        return question
    requested = f"Question: {question}" if question else ""
    requested += "?" if requested and question.rstrip()[-1:] not in SENTENCE_ENDS else ""
    return "\n\n".join([*texts, requested]).strip()


def _document_text(document: object) -> str:
    """A string, or an object with a text and perhaps a title."""
    if isinstance(document, str):
        return document.strip()
    if not isinstance(document, Mapping) or not isinstance(document.get("text"), str):
        raise _invalid("documents", document, "use strings, or objects with `text` (and `title`)")
    return f"{document.get('title') or ''}\n{document['text']}".strip()


RECORD_PARSERS: tuple[
    tuple[Callable[[DatasetRecord], bool], Callable[[DatasetRecord], tuple[str, Any, dict[str, Any]]]], ...
] = (
    (lambda r: "task" in r and ("kind" in r or "gold" in r), _parse_task),
    (lambda r: "problem" in r, _parse_math),
    (lambda r: "question" in r and ("final_answer" in r or "####" in str(r.get("answer", ""))), _parse_grade_school),
    (lambda r: "concepts" in r, lambda r: ("concepts", (found := _concepts(r["concepts"])), {"concepts": found})),
    (lambda r: "turns" in r, _parse_turns),
    (lambda r: "answers" in r or "answer" in r, _parse_qa),
    (
        lambda r: "question" in r,
        lambda r: ("text", prepend_context(_nonempty_question("question", r["question"]), r), {}),
    ),
    (lambda r: "task" in r, _parse_task),
)

REQUIRED_FIELDS = {  # what a scorer of the kind compares with
    "math": ("answer",),
    "qa": ("answers",),
    "pair": ("first", "second"),
    "concepts": ("concepts",),
    "game": (),
    "text": (),
}


def parse_example(record: DatasetRecord, number: int) -> Example:
    """A record of a dataset as an example; its id is its own, or its number."""
    with error_context(f"record {number}"):
        for fits, read in RECORD_PARSERS:
            if fits(record):
                kind, task, gold = read(record)
                if kind not in REQUIRED_FIELDS:
                    raise DataError(f"kind {kind!r} has no scorer: use one of {sorted(REQUIRED_FIELDS)}")
                if lacking := [name for name in REQUIRED_FIELDS[kind] if gold.get(name) in (None, [], "")]:
                    raise DataError(f"a record of kind {kind!r} lacks {lacking}: say what is right")
                own = next((record[name] for name in ("id", "_id") if record.get(name) is not None), number)
                return Example(str(own), kind, task, gold)
        raise DataError(f"fields {sorted(record)} are of no known kind; give `task` (and `gold`)")


def load(source: str, *, limit: int | None = None, seed: int | None = None, split: str = "test") -> list[Example]:
    """Examples from `games:N`, a .jsonl file, or a Hub dataset (`name` or `name:configuration`).

    Takes the first `limit`, after shuffling if a seed is given.
    """
    if source.startswith("games:"):
        count = source.removeprefix("games:")
        if not (count.isascii() and count.isdigit()):
            raise DataError(f"{source}: use games:N with a number")
        found = make_games(int(count))
    else:
        path = Path(source)
        lines = (
            records(path) if path.suffix in (".jsonl", ".json") or path.exists() else _load_hub_dataset(source, split)
        )
        found = []
        for number, record in enumerate(lines):
            with error_context(source):
                found.append(parse_example(record, number))
    if twice := [id for id, count in Counter(e.id for e in found).items() if count > 1]:
        raise DataError(f"{source}: several records have the same id, of {twice[:5]}; one without an id has its number")
    if seed is not None:
        random.Random(seed).shuffle(found)
    return found[:limit]


def records(path: Path) -> Iterable[DatasetRecord]:
    """The objects of a .jsonl file, in UTF-8 with or without its mark."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            json.dumps(record, ensure_ascii=False).encode()  # half a character that was written as an escape
        except (ValueError, RecursionError) as exc:  # no JSON, or not UTF-8
            raise DataError(f"{path}, line {number}: not JSON in UTF-8 ({exc})") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: {type(record).__name__}; each line is an object of JSON")
        yield record


def _load_hub_dataset(source: str, split: str) -> Iterable[DatasetRecord]:
    try:
        import datasets
    except ImportError:
        raise DataError(f"{source}: no such file; a Hub dataset needs `pip install choreograph[hub]`") from None
    name, _, configuration = source.partition(":")
    try:
        return datasets.load_dataset(name, configuration or None, split=split)
    except Exception as exc:  # the library raises many kinds for what cannot be found or read
        raise DataError(f"{source}: neither a file nor a dataset that can be loaded ({exc})") from None


def make_pairs(examples: Sequence[Example], seed: int = 0, *, num_shifts: int = 1) -> list[Example]:
    """Every example once first and once second in each ring: in a seeded random order, with its n-th successor."""
    if len(examples) < 2:
        raise DataError(f"{len(examples)} examples: pairs need two or more")
    if any(e.kind != "qa" for e in examples):
        raise DataError(f"pairs are made of questions with answers, not of {sorted({e.kind for e in examples})}")
    if not 0 < num_shifts < len(examples):
        raise DataError(f"rings={num_shifts}: use 1 to {len(examples) - 1} for {len(examples)} examples")
    ring = list(examples)
    random.Random(seed).shuffle(ring)
    return [
        Example(f"{a.id}+{b.id}", "pair", [a.task, b.task], {"first": dict(a.reference), "second": dict(b.reference)})
        for distance in range(1, num_shifts + 1)
        for a, b in zip(ring, [*ring[distance:], *ring[:distance]], strict=True)
    ]


def make_games(count: int) -> list[Example]:
    """Games of two players; Alice speaks first in every other one."""
    return [Example(f"game-{i}", "game", ("Alice", "Bob")[i % 2]) for i in range(count)]
