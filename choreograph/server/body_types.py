"""Types of fields that bodies share, with their bounds."""

from typing import Annotated, TypeVar

from pydantic import Field

T = TypeVar("T")

# the first invalid item is the error: a million of them would each take the interpreter's lock for a microsecond
Items = Annotated[list[T], Field(fail_fast=True)]

MAX_NAME_CHARS = 256  # of workflows, agents and labels

MAX_LABELS = 64  # of one request, session or call

LabelNames = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]], Field(fail_fast=True, max_length=MAX_LABELS)
]

MAX_TOP_LOGPROBS = 20
