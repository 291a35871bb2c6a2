"""Checks of what callers hand over, before anything is changed. Knows values, not sessions."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from .engine.call import State
from .errors import (
    BadPosition,
    BadTokens,
    CallError,
    ForeignMessage,
    ReleasedMessage,
    RepeatedParent,
    SamplingError,
    UnknownMessage,
)
from .message import Message, Part, whole
from .types import SamplingParams, whole_number

Offsets = Sequence[int | None] | None


def is_calls(given: object) -> bool:
    """Whether it is a list of calls, each a dict of arguments."""
    return isinstance(given, (list, tuple)) and bool(given) and all(isinstance(call, Mapping) for call in given)


def make_each(
    calls: Iterable[Mapping[str, Any]], make: Callable[..., Message], beside: dict[str, Any]
) -> list[Message]:
    """Makes every call of a list. What stands beside the list would be lost, so it is refused."""
    known = _arguments(getattr(make, "__func__", make))
    first = next(iter(known))
    for name, value in beside.items():
        default = known[name].default
        if value is not default and not (type(value) is type(default) and value == default):
            raise CallError(f"{name}={value!r} beside a list of calls: put it into each call")
    for call in calls:
        for name in call:
            if name not in known:
                mend = (
                    "for a chat turn use session.user(text)" if name in ("role", "content") else f"known: {list(known)}"
                )
                raise CallError(f"{name}={call[name]!r}: no such argument; {mend}")
        if first not in call:
            raise CallError(f"{dict(call)!r}: a call needs {first!r}")
    return [make(**call) for call in calls]


@lru_cache(16)
def _arguments(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """What a function takes, but for the object whose method it is."""
    return {name: one for name, one in inspect.signature(function).parameters.items() if name != "self"}


def refuse_empty(ids: list[int], what: str) -> None:
    """Raises BadTokens where there is not a single token."""
    if not ids:
        raise BadTokens(f"{what} is empty: give at least one token")


def check_parents(parents: Iterable[Message | Part], runner: object, session: int) -> tuple[Message | Part, ...]:
    """Messages of this session, or parts of them that do not overlap."""
    if isinstance(parents, (Message, Part)):
        raise CallError("parents is one message: put it into a list")
    if not isinstance(parents, Iterable):
        raise CallError(f"parents={parents!r}: use a list of messages")
    parents = tuple(parents)
    seen: dict[int, list[range]] = {}
    for index, given in enumerate(parents):
        parent, at = whole(given), f"parents[{index}]"
        if not isinstance(parent, Message):
            raise UnknownMessage(f"{at}={parent!r} is not a message of this session")
        if parent._runner is not runner or parent._call.session != session:
            raise ForeignMessage(f"{at} (message {parent.id}) belongs to another session or engine: make it here")
        if parent._call.released:
            raise ReleasedMessage(f"{at} (message {parent.id}) was released: keep it until its last use")
        if parent._call.state is State.FAILED:
            raise CallError(f"{at} (message {parent.id}) failed: {parent._call.error}")
        tokens = range(given.first, given.last) if isinstance(given, Part) else range(1 << 40)
        others = seen.setdefault(parent.id, [])
        if any(tokens.start < other.stop and other.start < tokens.stop for other in others):
            what = (
                "is given twice"
                if not isinstance(given, Part)
                else f"is given twice in part ({given.first}:{given.last})"
            )
            raise RepeatedParent(f"{at} (message {parent.id}) {what}: prefill it again to show it twice")
        others.append(tokens)
    return parents


def check_offsets(offsets: Offsets, count: int, most: int) -> tuple[int | None, ...]:
    """One offset or None for each of `count` parents, below `most`."""
    if offsets is None:
        return (None,) * count
    if not isinstance(offsets, Iterable) or getattr(offsets, "ndim", 1) == 0:
        raise BadPosition(f"offsets={offsets!r}: give a list, one for each parent")
    placed = tuple(offsets)
    if len(placed) != count:
        raise BadPosition(f"{len(placed)} offsets for {count} parents: give one each, None for the default")
    return tuple(check_position(f"offsets[{index}]", offset, most) for index, offset in enumerate(placed))


def check_position(name: str, given: object, most: int) -> int | None:
    """A position below `most`, or None."""
    if given is None:
        return None
    value = whole_number(given)
    if value is None:
        raise BadPosition(f"{name}={given!r}: use a whole number or None")
    if not 0 <= value < most:
        raise BadPosition(f"{name}={value}: positions are 0 to {most - 1} for this model")
    return value


def check_shares(mode: str) -> None:
    """A mode in which models take what others encoded."""
    if mode != "choreographed":
        raise CallError(f"there is no partial prefill in {mode} mode, where nothing is shared")


def check_tokens(tokens: Iterable[object], what: str, size: int) -> list[int]:
    """Token ids below `size`."""
    ids: list[int] = []
    rest = iter(tokens)
    while some := list(islice(rest, 4096)):  # plain numbers are looked at together: one by one takes ten times as long
        plain: Any = some if set(map(type, some)) == {int} else ()
        sound = plain and min(plain) >= 0 and max(plain) < size
        ids += plain if sound else [check_token(token, what, size) for token in some]
    return ids


def check_token(token: object, what: str, size: int) -> int:
    """A token id below `size`."""
    value = whole_number(token)
    if value is None:
        raise BadTokens(f"{what}: {token!r} is not a token id; give a string, token ids or a chat turn")
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
