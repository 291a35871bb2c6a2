"""Contexts with questions, from records of reading tasks. Knows no model."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..evaluation.data import example, located, records, with_context
from .profiling import Asked


def read_asked(path: Path, *, limit: int | None = None, seed: int | None = None, first: int = 0) -> list[Asked]:
    """From a .jsonl file of questions with `documents` or a `context`, and answers. Takes `limit` from `first` on,
    after shuffling if a seed is given."""
    found = []
    for number, record in enumerate(records(path)):
        with located(str(path)):
            found.append(asked(record, number))
    if seed is not None:
        random.Random(seed).shuffle(found)
    found = found[first:] if limit is None else found[first : first + limit]
    if not found:
        raise DataError(f"{path}: no records from number {first} on")
    return found


def asked(record: Mapping[str, Any], number: int) -> Asked:
    """A record as a context and a question."""
    with located(f"record {number}"):
        context = with_context("", record)
        question = record.get("question") or record.get("input")
        if not context or not question:
            raise DataError(f"needs a question, and documents or a context; has {sorted(record)}")
    answers = tuple(example({**record, "question": question}, number).gold.get("answers") or ())
    if not answers:
        raise DataError(f"record {number}: has no answers to compare with")
    return Asked(str(record.get("id", number)), context, str(question), answers)
