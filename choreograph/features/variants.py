"""Variants of messages: the same text, encoded again under a rule.

A variant exists once for every key in `MessageHandle.variants`, and is released with its message.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from ..kv_cache.entry import TokenRuns
from ..messages.handle import MessageHandle, MessageSlice, Parent, unwrap_slice
from ..request.request import Request


@dataclass
class TextOrigin:
    """Message and token from which the text of a request is repeated."""

    request: Request
    start: int = 0
    runs: TokenRuns | None = None  # of the request that repeats it, if that has runs

    def spans(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the spans of the message's tokens that tokens [start, end) repeat."""
        for first, last in ((start, end),) if self.runs is None else self.runs.split(start, end):
            token = self.start + (first if self.runs is None else self.runs.position(first) - self.runs.positions[0])
            yield token, token + last - first


def parents_of(message: MessageHandle) -> tuple[Parent, ...]:
    """Return what a message attended to; of an imported one, the original."""
    return (message.imported_from or message).parents


@dataclass(frozen=True)
class VariantRule:
    """Which variant of a message its readers need."""

    find: Callable[[MessageHandle], MessageHandle | None]  # the message or its unreleased variant, if it exists
    key: Callable[[MessageHandle], Hashable]  # of a new variant
    # encodes a message again over the variants of its parents
    reencode: Callable[[MessageHandle, tuple[Parent, ...]], MessageHandle]
    # parents that the variant attends to; default: those of the message
    parents: Callable[[MessageHandle], Sequence[Parent]] = parents_of

    def ensure(self, parent: Parent) -> Parent:
        """Return a parent's variant.

        Missing variants of the message and its ancestors are made, the oldest first.
        """
        stack = [unwrap_slice(parent)]
        while stack:
            message = stack[-1]
            if self.find(message) is not None:
                stack.pop()
                continue
            parents = self.parents(message)
            if missing := [m for m in map(unwrap_slice, parents) if self.find(m) is None]:
                stack += missing
            else:
                variant = self.reencode(message, tuple(map(self._existing, parents)))
                message.variants[self.key(message)] = variant
        return self._existing(parent)

    def _existing(self, parent: Parent) -> Parent:
        variant = self.find(unwrap_slice(parent))
        assert variant is not None, "a variant was made and is missing"
        return MessageSlice(variant, parent.start, parent.stop) if isinstance(parent, MessageSlice) else variant


def is_usable(message: MessageHandle | None) -> bool:
    """True for a variant that exists and is not released."""
    return message is not None and not message._request.released
