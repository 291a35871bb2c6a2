"""Checks of what callers hand over, before anything is changed. Knows values, not sessions."""

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .errors import BadPosition, BadTokens, CallError, SamplingError
from .message import Message
from .types import SamplingParams

Offsets = Sequence[int | None] | None


def is_calls(given: object) -> bool:
    """Whether it is a list of calls, each a dict of arguments."""
    return isinstance(given, (list, tuple)) and bool(given) and all(isinstance(call, Mapping) for call in given)


def make_each(
    calls: Iterable[Mapping[str, Any]], make: Callable[..., Message], beside: dict[str, Any]
) -> list[Message]:
    """Makes every call of a list. What stands beside the list would be lost, so it is refused."""
    known = inspect.signature(make).parameters
    first = next(iter(known))
    for name, value in beside.items():
        if value != known[name].default:
            raise CallError(f"{name}={value!r} beside a list of calls: put it into each call")
    for call in calls:
        for name in call:
            if name not in known:
                raise CallError(f"{name}={call[name]!r}: no such argument; known: {list(known)}")
        if first not in call:
            raise CallError(f"{dict(call)!r}: a call needs {first!r}")
    return [make(**call) for call in calls]


def refuse_empty(ids: list[int], what: str) -> None:
    """Raises BadTokens where there is not a single token."""
    if not ids:
        raise BadTokens(f"{what} is empty: give at least one token")


def check_offsets(offsets: Offsets, count: int, most: int) -> tuple[int | None, ...]:
    """One offset or None for each of `count` parents, below `most`."""
    if offsets is None:
        return (None,) * count
    if not isinstance(offsets, Iterable):
        raise BadPosition(f"offsets={offsets!r}: give a list, one for each parent")
    placed = tuple(offsets)
    if len(placed) != count:
        raise BadPosition(f"{len(placed)} offsets for {count} parents: give one each, None for the default")
    for index, offset in enumerate(placed):
        check_position(f"offsets[{index}]", offset, most)
    return placed


def check_position(name: str, value: int | None, most: int) -> None:
    """A position below `most`, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadPosition(f"{name}={value!r}: use a whole number or None")
    if not 0 <= value < most:
        raise BadPosition(f"{name}={value}: positions are 0 to {most - 1} for this model")


def check_token(token: object, what: str, size: int) -> int:
    """A token id below `size`."""
    try:
        value = operator.index(None if isinstance(token, bool) else token)  # type: ignore[arg-type]
    except TypeError:
        raise BadTokens(f"{what}: {token!r} is not a token id; give a string, token ids or a chat turn") from None
    if not 0 <= value < size:
        raise BadTokens(f"{what}: token id {value} is outside the vocabulary of {size}")
    return value


def check_sampling(sampling: object, size: int, *, text: bool) -> None:
    """Options whose token ids are below `size`; stop strings only where there is text."""
    if not isinstance(sampling, SamplingParams):
        raise SamplingError(f"sampling={sampling!r}: use SamplingParams(...)")
    for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
        for token in ids:
            if token >= size:
                raise SamplingError(f"{name}: token id {token} is outside the vocabulary of {size}")
    if sampling.stop and not text:
        raise SamplingError(f"stop={sampling.stop!r}: stop strings need a tokenizer")
