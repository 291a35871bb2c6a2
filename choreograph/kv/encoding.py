"""An encoding: what a model computed for a span of tokens in a context, and what it saw. Owns no policy."""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .arena import page_runs


class Sight(NamedTuple):
    """Tokens first <= j < first + count of an encoding are seen, the first of them at logical position `start`."""

    encoding: "Encoding"
    first: int
    count: int  # type: ignore[assignment] # not tuple.count
    start: int

    @property
    def shift(self) -> int:
        """Logical minus home position, the same for every token."""
        return self.start - self.first - self.encoding.start


class Span(NamedTuple):
    """Tokens first <= j < first + count lie in the slots from `slot` on."""

    first: int
    slot: int
    count: int  # type: ignore[assignment] # not tuple.count


@dataclass(eq=False)
class Encoding:
    """start: home position of token 0; token j is stored rotated to start + j. context: what every token saw.

    tokens may grow while a message decodes. `promised` tokens will be encoded without further decisions;
    `encoded` ones lie in the arena; `scheduled` counts those and the ones of the step being computed.
    """

    id: int
    tokens: list[int]
    start: int
    context: tuple[Sight, ...]
    pages: list[int]
    page_size: int
    key: bytes | None = None
    promised: int = 0
    scheduled: int = 0
    encoded: int = 0
    reusable: bool = False
    holders: set[object] = field(default_factory=set)
    children: int = 0
    used_at: int = 0
    tree: Any = None  # the prefix tree that it hangs on
    _spans: list[Span] | None = None

    @property
    def whole(self) -> bool:
        return self.encoded == len(self.tokens)

    @property
    def spans(self) -> list[Span]:
        """Where the tokens lie: one span for each run of consecutive pages."""
        if self._spans is None:
            self._spans, first = [], 0
            for page, length in page_runs(self.pages):
                self._spans.append(Span(first, page * self.page_size, length * self.page_size))
                first += length * self.page_size
        return self._spans

    def slot(self, token: int) -> int:
        return self.pages[token // self.page_size] * self.page_size + token % self.page_size

    @property
    def slots(self) -> list[int]:
        return [self.slot(token) for token in range(len(self.tokens))]

    def keep_pages(self, count: int) -> list[int]:
        """Cuts the encoding down to its first `count` pages; returns the others."""
        self.pages, rest = self.pages[:count], self.pages[count:]
        self._spans = None
        return rest


def content_key(salt: str, tokens: Iterable[int], start: int, context: Iterable[Sight]) -> bytes:
    """Names equal work: the same salt, tokens, and context encodings at the same *relative* places."""
    digest = hashlib.sha256(hashlib.sha256(salt.encode()).digest())  # every field below has a fixed length
    for sight in context:
        assert sight.encoding.key is not None, "a context is named before what saw it"
        place = (sight.first, sight.count, sight.start - start)
        digest.update(b"seen" + sight.encoding.key + struct.pack("<3q", *place))
    numbers = list(tokens)
    digest.update(b"mine" + struct.pack(f"<{len(numbers)}q", *numbers))
    return digest.digest()
