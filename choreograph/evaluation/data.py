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

from ..choreographies.reading import boxed
from ..errors import DataError

Record = Mapping[str, Any]
ENDS = tuple("?.!:。？！：")  # of questions that need no further mark


@dataclass(frozen=True)
class Example:
    """One input of a workflow. kind names the scorer, gold is what it compares with."""

    id: str
    kind: str
    task: Any
    gold: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def located(where: str) -> Iterator[None]:
    """Names the record, or the file, of a DataError."""
    try:
        yield
    except DataError as problem:
        raise DataError(f"{where}: {problem}") from None


def _wrong(name: str, value: object, mend: str) -> DataError:
    return DataError(f"{name}={value!r:.60}: {mend}")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "use a string")
    return value


def _asked(name: str, value: object) -> str:
    if not (text := _text(name, value)).strip():
        raise _wrong(name, value, "ask something")
    return text


def _answer(name: str, value: object) -> str:
    """A string, a number as one, or yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (str, int, float)):
        raise _wrong(name, value, "use a string or a number")
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
        raise _wrong("concepts", value, "use a list of strings, or a string with commas")
    return [_text("concepts", concept) for concept in value]


def _math(r: Record) -> tuple[str, Any, dict[str, Any]]:
    answer = r["answer"] if "answer" in r else boxed(_text("solution", r.get("solution", "")))
    gold = None if answer is None else _answer("answer", answer)
    return "math", with_context(_asked("problem", r["problem"]), r), {"answer": gold}


def _grade_school(r: Record) -> tuple[str, Any, dict[str, Any]]:
    final = r.get("final_answer")
    if final in (None, ""):
        final = _text("answer", r.get("answer")).rpartition("####")[2].strip().replace(",", "")
    return "math", with_context(_asked("question", r["question"]), r), {"answer": _answer("final_answer", final)}


def _question(r: Record) -> tuple[str, Any, dict[str, Any]]:
    name = "answer" if r.get("answers") in (None, "", [], {}) else "answers"
    given = r.get(name)
    if isinstance(given, Mapping):  # as some Hub datasets hold them
        answers = _answers("answers.text", given.get("text"))
        answers = answers or _answers("aliases", given.get("aliases")) + _answers("value", given.get("value"))
    else:
        answers = _answers(name, given) + _answers("answer_aliases", r.get("answer_aliases"))
    questions = "question" in r or "input" in r  # beside one, a task is the name of a set
    names = ("question", "input") if questions else ("task", "prompt")
    asked = next((r[name] for name in names if r.get(name)), "")
    return "qa", _asked("question", with_context(_text("question", asked), r)), {"answers": answers}


def _turns(r: Record) -> tuple[str, Any, dict[str, Any]]:
    turns = [r["turns"]] if isinstance(r["turns"], str) else r["turns"]
    if not isinstance(turns, (list, tuple)) or not turns:
        raise _wrong("turns", turns, "use a list of strings, the first of which is asked")
    return "text", _asked("turns", turns[0]), {"reference": r.get("reference")}


def _task(r: Record) -> tuple[str, Any, dict[str, Any]]:
    """The gold of each kind as its scorer wants it."""
    kind, given = _text("kind", r.get("kind", "text")), {} if r.get("gold") is None else r["gold"]
    if not isinstance(given, Mapping):
        raise _wrong("gold", given, "use an object")
    if r["task"] in (None, "", []):
        raise _wrong("task", r["task"], "ask something")
    return kind, r["task"], {name: _gold(kind, name, value) for name, value in given.items()}


def _gold(kind: str, name: str, value: Any) -> Any:
    if value is None or name not in GOLD.get(kind, ()):
        return value
    if kind == "math":
        return _answer(name, value)
    if kind == "concepts":
        return _concepts(value)
    answers = _answers(name, value.get("answers") if isinstance(value, Mapping) else value)
    return {"answers": answers} if kind == "pair" and answers else answers


def with_context(question: str, r: Record) -> str:
    """The question behind its documents or its context, if it has any."""
    documents = r.get("documents") or []
    if not isinstance(documents, (str, list, tuple)):
        raise _wrong("documents", documents, "use a list of texts")
    texts = [_document(one) for one in ([documents] if isinstance(documents, str) else documents)]
    context = r.get("context") or ""
    if not isinstance(context, str):
        raise _wrong("context", context, "use a string, or `documents` for a list of texts")
    texts += [context] if context else []
    if not texts:
        return question
    asked = f"Question: {question}" if question else ""
    asked += "?" if asked and question.rstrip()[-1:] not in ENDS else ""
    return "\n\n".join([*texts, asked]).strip()


def _document(given: object) -> str:
    """A string, or an object with a text and perhaps a title."""
    if isinstance(given, str):
        return given.strip()
    if not isinstance(given, Mapping) or not isinstance(given.get("text"), str):
        raise _wrong("documents", given, "use strings, or objects with `text` (and `title`)")
    return f"{given.get('title') or ''}\n{given['text']}".strip()


KINDS: tuple[tuple[Callable[[Record], bool], Callable[[Record], tuple[str, Any, dict[str, Any]]]], ...] = (
    (lambda r: "task" in r and ("kind" in r or "gold" in r), _task),
    (lambda r: "problem" in r, _math),
    (lambda r: "question" in r and ("final_answer" in r or "####" in str(r.get("answer", ""))), _grade_school),
    (lambda r: "concepts" in r, lambda r: ("concepts", (found := _concepts(r["concepts"])), {"concepts": found})),
    (lambda r: "turns" in r, _turns),
    (lambda r: "answers" in r or "answer" in r, _question),
    (lambda r: "question" in r, lambda r: ("text", with_context(_asked("question", r["question"]), r), {})),
    (lambda r: "task" in r, _task),
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
    with located(f"record {number}"):
        for fits, read in KINDS:
            if fits(record):
                kind, task, gold = read(record)
                if kind not in GOLD:
                    raise DataError(f"kind {kind!r} has no scorer: use one of {sorted(GOLD)}")
                if lacking := [name for name in GOLD[kind] if gold.get(name) in (None, [], "")]:
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
        found = games(int(count))
    else:
        path = Path(source)
        lines = records(path) if path.suffix in (".jsonl", ".json") or path.exists() else _hub(source, split)
        found = []
        for number, record in enumerate(lines):
            with located(source):
                found.append(example(record, number))
    if twice := [id for id, count in Counter(e.id for e in found).items() if count > 1]:
        raise DataError(f"{source}: several records have the same id, of {twice[:5]}; one without an id has its number")
    if seed is not None:
        random.Random(seed).shuffle(found)
    return found[:limit]


def records(path: Path) -> Iterable[Record]:
    """The objects of a .jsonl file, in UTF-8 with or without its mark."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            json.dumps(record, ensure_ascii=False).encode()  # half a character that was written as an escape
        except (ValueError, RecursionError) as problem:  # no JSON, or not UTF-8
            raise DataError(f"{path}, line {number}: not JSON in UTF-8 ({problem})") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: {type(record).__name__}; each line is an object of JSON")
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
