"""Examples with reference answers, from JSONL files or the Hugging Face Hub."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import DataError
from ..workflows.parsing import boxed
from .longbench import PROMPTS

DatasetRecord = Mapping[str, Any]

SENTENCE_ENDS = tuple("?.!:。？！：")  # a question that ends with one needs no question mark


@dataclass(frozen=True)
class Example:
    """One input of a workflow."""

    id: str
    kind: str  # names the scorer
    task: Any  # input of the workflow
    reference: Mapping[str, Any] = field(default_factory=dict)  # what the scorer compares with


@contextmanager
def error_context(location: str) -> Iterator[None]:
    """Prefix a DataError with the record or file it is about."""
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


def _question(name: str, value: object, record: DatasetRecord) -> str:
    """Return a nonblank question with its context prepended."""
    if not _text(name, value).strip():
        raise _invalid(name, value, "ask something")
    return prepend_context(_text(name, value), record)


def _answer(name: str, value: object) -> str:
    """Return a string, a number, or yes or no as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (str, int, float)):
        raise _invalid(name, value, "use a string or a number")
    return str(value)


def _answers(name: str, value: object) -> list[str]:
    """Return one or several answers as a list of nonblank texts."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [text for item in values if item is not None and (text := _answer(name, item)).strip()]


def _pair_side(name: str, value: object) -> Mapping[str, Any]:
    answers = _answers(name, value.get("answers") if isinstance(value, Mapping) else value)
    return {"answers": answers} if answers else {}


def _concepts(name: str, value: object) -> list[str]:
    """Return the items of a list or of a comma-separated string."""
    if isinstance(value, str):
        return [concept.strip() for concept in value.split(",") if concept.strip()]
    if not isinstance(value, (list, tuple)):
        raise _invalid(name, value, "use a list of strings, or a string with commas")
    return [_text(name, concept) for concept in value]


REFERENCE_FIELDS: Mapping[str, Mapping[str, Callable[[str, Any], Any]]] = {  # what the scorer of a kind needs
    "math": {"answer": _answer},
    "qa": {"answers": _answers},
    "pair": {"first": _pair_side, "second": _pair_side},
    "concepts": {"concepts": _concepts},
    "game": {},
    "text": {},
    **{f"longbench/{task}": {"answers": _answers} for task in PROMPTS},
    "longbench/trec": {"answers": _answers, "classes": _answers},
}


def documents_in(record: DatasetRecord) -> list[str]:
    """Return the texts of a record's documents, with their titles."""
    documents = record.get("documents") or []
    if not isinstance(documents, (str, list, tuple)):
        raise _invalid("documents", documents, "use a list of texts")
    texts = []
    for document in [documents] if isinstance(documents, str) else documents:
        if isinstance(document, Mapping) and isinstance(document.get("text"), str):
            texts.append(f"{document.get('title') or ''}\n{document['text']}".strip())
        elif isinstance(document, str):
            texts.append(document.strip())
        else:
            raise _invalid("documents", document, "use strings, or objects with `text` (and `title`)")
    return texts


def context_of(record: DatasetRecord) -> str:
    """Return a record's context, empty without one."""
    context = record.get("context") or ""
    if not isinstance(context, str):
        raise _invalid("context", context, "use a string, or `documents` for a list of texts")
    return context


def prepend_context(question: str, record: DatasetRecord) -> str:
    """Return the question after the documents and the context of its record."""
    texts = [*documents_in(record), *filter(None, [context_of(record)])]
    if not texts:
        return question
    if question:
        texts.append(f"Question: {question}" + ("" if question.rstrip()[-1:] in SENTENCE_ENDS else "?"))
    return "\n\n".join(texts).strip()


def _parse_task(r: DatasetRecord) -> tuple[str, Any, Mapping[str, Any]]:
    """Return kind, task and reference of a record with explicit fields."""
    reference = {} if r.get("gold") is None else r["gold"]
    if not isinstance(reference, Mapping):
        raise _invalid("gold", reference, "use an object")
    if r["task"] in (None, "", []):
        raise _invalid("task", r["task"], "ask something")
    return _text("kind", r.get("kind", "text")), r["task"], reference


def _parse_qa(r: DatasetRecord) -> tuple[str, Any, Mapping[str, Any]]:
    """Parse a record of SQuAD, TriviaQA or HotpotQA."""
    name = "answer" if r.get("answers") in (None, "", [], {}) else "answers"
    value = r.get(name)
    if isinstance(value, Mapping):
        answers = _answers("answers.text", value.get("text"))
        answers = answers or _answers("aliases", value.get("aliases")) + _answers("value", value.get("value"))
    else:
        answers = _answers(name, value) + _answers("answer_aliases", r.get("answer_aliases"))
    names = ("question", "input") if "question" in r or "input" in r else ("task", "prompt")  # else task names a set
    text = prepend_context(_text("question", next((r[name] for name in names if r.get(name)), "")), r)
    return "qa", _question("question", text, {}), {"answers": answers}


def _parse_longbench(r: DatasetRecord) -> tuple[str, Any, Mapping[str, Any]]:
    """Parse a record in LongBench's own format, also of LongBench-E."""
    task = _text("dataset", r["dataset"]).removesuffix("_e")
    if task not in PROMPTS:
        raise _invalid("dataset", task, f"the English tasks have metrics: {sorted(PROMPTS)}")
    texts = {name: _text(name, r.get(name, "")) for name in ("context", "input")}
    reference = {"answers": r.get("answers")} | ({"classes": r["all_classes"]} if task == "trec" else {})
    return f"longbench/{task}", PROMPTS[task].format(**texts), reference


def _parse_fields(r: DatasetRecord) -> tuple[str, Any, Mapping[str, Any]]:
    """Return kind, task and reference, detected from the field names."""
    if "task" in r and ("kind" in r or "gold" in r):
        return _parse_task(r)
    if "dataset" in r and "all_classes" in r:
        return _parse_longbench(r)
    if "problem" in r:
        answer = r["answer"] if "answer" in r else boxed(_text("solution", r.get("solution", "")))
        return "math", _question("problem", r["problem"], r), {"answer": answer}
    if "question" in r and ("final_answer" in r or "####" in str(r.get("answer", ""))):  # GSM8K
        answer = r.get("final_answer")
        if answer in (None, ""):
            answer = _text("answer", r.get("answer")).rpartition("####")[2].strip().replace(",", "")
        return "math", _question("question", r["question"], r), {"answer": answer}
    if "concepts" in r:
        concepts = _concepts("concepts", r["concepts"])
        return "concepts", concepts, {"concepts": concepts}
    if "turns" in r:
        turns = [r["turns"]] if isinstance(r["turns"], str) else r["turns"]
        if not isinstance(turns, (list, tuple)) or not turns:
            raise _invalid("turns", turns, "use a list of strings, the first of which is asked")
        return "text", _question("turns", turns[0], {}), {"reference": r.get("reference")}
    if "answers" in r or "answer" in r:
        return _parse_qa(r)
    if "question" in r:
        return "text", _question("question", r["question"], r), {}
    if "task" in r:
        return _parse_task(r)
    raise DataError(f"fields {sorted(r)} are of no known kind: give `task` (and `gold`)")


def parse_example(record: DatasetRecord, number: int) -> Example:
    """Convert a record to an example; `number` replaces a missing id."""
    with error_context(f"record {number}"):
        kind, task, reference = _parse_fields(record)
        if kind not in REFERENCE_FIELDS:
            raise DataError(f"kind {kind!r} has no scorer: use one of {sorted(REFERENCE_FIELDS)}")
        readers, result = REFERENCE_FIELDS[kind], dict(reference)
        for name, read in readers.items():
            if result.get(name) is not None:
                result[name] = read(name, result[name])
        if missing := [name for name in readers if result.get(name) in (None, [], "", {})]:
            raise DataError(f"a record of kind {kind!r} lacks {missing}: give the right answer")
        own_id = next((record[name] for name in ("id", "_id") if record.get(name) is not None), number)
        return Example(str(own_id), kind, task, result)


def load(data: str, *, limit: int | None = None, seed: int | None = None, split: str = "test") -> list[Example]:
    """Load examples from `games:N`, a .jsonl file, or a Hub dataset (`name[:configuration]`).

    Args:
        limit: Return only the first examples, after shuffling.
        seed: Shuffle with this seed; None keeps the order.
        split: The split of a Hub dataset.
    """
    if data.startswith("games:"):
        count = data.removeprefix("games:")
        if not (count.isascii() and count.isdigit()):
            raise DataError(f"{data}: use games:N with a number")
        examples = make_games(int(count))
    else:
        examples = []
        for number, record in enumerate(records(Path(data)) if is_file(data) else _load_hub_dataset(data, split)):
            with error_context(data):
                examples.append(parse_example(record, number))
    if repeated := [id for id, count in Counter(e.id for e in examples).items() if count > 1]:
        raise DataError(
            f"{data}: several records have the same id, of {repeated[:5]}: give each its own (without an id, the number is used)"
        )
    if seed is not None:
        random.Random(seed).shuffle(examples)
    return examples[:limit]


def is_file(data: str) -> bool:
    """Return whether the data is a file, not a Hub dataset."""
    return Path(data).suffix in (".jsonl", ".json") or Path(data).exists()


def records(path: Path) -> Iterator[DatasetRecord]:
    """Yield the objects of a .jsonl file in UTF-8."""
    if not path.is_file():
        raise DataError(f"{path}: no such file: check the path")
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            json.dumps(record, ensure_ascii=False).encode()  # fails for a lone surrogate that was escaped
        except (ValueError, RecursionError) as exc:
            raise DataError(f"{path}, line {number}: not JSON in UTF-8 ({exc})") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: {type(record).__name__}: each line must be a JSON object")
        yield record


def _load_hub_dataset(data: str, split: str) -> Iterable[DatasetRecord]:
    try:
        import datasets
    except ImportError:
        raise DataError(f"{data}: no such file; a Hub dataset needs `pip install choreograph[hub]`") from None
    name, _, configuration = data.partition(":")
    try:
        return datasets.load_dataset(name, configuration or None, split=split)
    except Exception as exc:  # the library raises many types
        raise DataError(f"{data}: neither a file nor a dataset that can be loaded ({exc})") from None


def make_pairs(examples: Sequence[Example], seed: int = 0, *, num_shifts: int = 1) -> list[Example]:
    """Pair every example with its `num_shifts` successors in a shuffled ring."""
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
        for shift in range(1, num_shifts + 1)
        for a, b in zip(ring, [*ring[shift:], *ring[:shift]], strict=True)
    ]


def make_games(count: int, split: str = "") -> list[Example]:
    """Return two-player games; Alice and Bob alternate as first speaker.

    A game's seed depends on its id, so that games of different splits differ.
    """
    prefix = f"{split}-" if split else ""
    return [Example(f"{prefix}game-{i}", "game", ("Alice", "Bob")[i % 2]) for i in range(count)]
