"""Stored tokens by the context that they follow.

A lineage is a hash of everything before some tokens: two texts with one lineage were encoded in the same context.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Generic, TypeVar

from ...namespace import serialize
from .span_index import MIN_SPAN, common_length

ROOT = b""  # lineage of a prompt that starts anew


Item = TypeVar("Item", bound=Any)  # with `tokens`, and the `lineage` of the context before them; None: unknown


def extend_lineage(lineage: bytes, *part: object) -> bytes:
    """Return the lineage behind a part of a context."""
    return hashlib.sha256(serialize((lineage, *part))).digest()


class ContextIndex(Generic[Item]):
    """Stored tokens by lineage and first token."""

    def __init__(self) -> None:
        self._items: dict[tuple[bytes | None, int], list[Item]] = {}

    def __iter__(self) -> Iterator[Item]:
        return chain.from_iterable(self._items.values())

    def add(self, item: Item) -> None:
        self._items.setdefault((item.lineage, item.tokens[0]), []).append(item)

    def remove(self, item: Item) -> None:
        place = item.lineage, item.tokens[0]
        self._items[place].remove(item)
        if not self._items[place]:
            del self._items[place]

    def followers(self, lineage: bytes, token: int) -> Iterable[Item]:
        """Return what starts with a token behind a context."""
        return self._items.get((lineage, token), ())


def longest(
    followers: Iterable[Item],
    tokens: list[int],
    start: int,
    stop: int,
    is_usable: Callable[[Item], bool] = lambda item: True,
) -> tuple[Item, int] | None:
    """Return the one that equals most of tokens[start:stop], and how many; None if these are too few."""
    best, best_length = None, 0
    for item in followers:
        length = common_length(item.tokens, tokens, start, stop)
        if length > best_length and is_usable(item):
            best, best_length = item, length
    return (best, best_length) if best is not None and best_length >= min(MIN_SPAN, len(best.tokens)) else None
