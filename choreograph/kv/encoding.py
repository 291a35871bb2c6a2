"""An encoding: what a model computed for a span of tokens in a context, and what it saw. Owns no policy."""

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..types import BASE
from .pages import page_runs

if TYPE_CHECKING:
    from .tiers import Copy
    from .transfers import Transfer

Where = Literal["device", "host", "disk", "loading", "offloading", "dropped"]


class Sight(NamedTuple):
    """Tokens first <= j < first + count of an encoding are seen, the first of them at logical position `start`.

    layers: where alone they are seen; None: in all. A sight of no tokens shows nothing, but what is computed from the
    encoding in another way needs it (a partial prefill: what came into its layers).
    """

    encoding: "Encoding"
    first: int
    count: int  # type: ignore[assignment] # not tuple.count
    start: int
    layers: frozenset[int] | None = None

    @property
    def shift(self) -> int:
        """Logical minus home position, the same for every token."""
        return self.start - self.first - self.encoding.start

    def reaches(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers


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
    copies: what lower tiers keep of a whole encoding, which never changes again. moving: a copy under way, which
    `state` names; an encoding without pages and copies is dropped, and its tokens and context say how to rebuild it.
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
    holders: "set[tuple[str, object]]" = field(default_factory=set)
    children: int = 0
    used_at: int = 0
    tree: Any = None  # the prefix tree that it hangs on
    copies: "dict[str, Copy]" = field(default_factory=dict)
    moving: "Transfer | None" = None
    uses: int = 0
    borrows: bool = False  # its first tokens are still those of another encoding
    refused: "set[str]" = field(default_factory=set)  # tiers where a copy could not be written
    group: object = None  # whoever made it, for those who give advice
    model: str = BASE  # what computes it
    layers: frozenset[int] | None = None  # where alone it is computed; None: in all
    inputs: frozenset[int] = frozenset()  # the layers whose inputs are kept beside it
    absent: frozenset[int] = frozenset()  # of one that came from elsewhere: the layers that did not come
    rebuildable: bool = True  # whether its model is here to compute it again
    _spans: list[Span] | None = None

    @property
    def whole(self) -> bool:
        return self.encoded == len(self.tokens)

    @property
    def state(self) -> Where:
        if self.moving is not None:
            return self.moving.kind
        if self.pages:
            return "device"
        return "host" if "host" in self.copies else "disk" if "disk" in self.copies else "dropped"

    @property
    def kept(self) -> bool:
        """Whether all of it exists somewhere."""
        return self.whole or bool(self.copies)

    @property
    def settled(self) -> bool:
        """Whether nothing of it is left to compute for the first time."""
        return self.kept or self.state in ("loading", "dropped")

    @property
    def resident(self) -> bool:
        """Whether it is on the device, is being computed there, or on its way to it."""
        return bool(self.pages)

    @property
    def lost(self) -> bool:
        """Whether it is nowhere, for good."""
        return not (self.rebuildable or self.pages or self.copies)

    @property
    def in_use(self) -> bool:
        """Whether anybody but messages holds it: a call in flight, a pin."""
        return any(holder[0] != "message" for holder in self.holders)

    @property
    def lender(self) -> "Encoding | None":
        """Of one that is computed in some layers only: the encoding of another model that it begins from."""
        return None if self.layers is None else next(s.encoding for s in self.context if not s.count)

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


def common(known: list[int], first: int, end: int, tokens: list[int], at: int, limit: int) -> int:
    """How many tokens known[first:end] and tokens[at:limit] share from their start."""
    most = min(end - first, limit - at)
    if known[first : first + most] == tokens[at : at + most]:
        return max(most, 0)
    return next(i for i in range(most) if known[first + i] != tokens[at + i])


def content_key(salt: str, tokens: Iterable[int], start: int, context: Iterable[Sight]) -> bytes:
    """Names equal work: the same salt, tokens, and context encodings at the same *relative* places."""
    digest = hashlib.sha256(hashlib.sha256(salt.encode()).digest())  # every field below has a fixed length
    for sight in context:
        assert sight.encoding.key is not None, "a context is named before what saw it"
        place = (sight.first, sight.count, sight.start - start)
        digest.update(b"seen" + sight.encoding.key + struct.pack("<3q", *place))
        if sight.layers is not None:
            some = sorted(sight.layers)
            digest.update(b"only" + struct.pack(f"<{len(some) + 1}q", len(some), *some))
    numbers = list(tokens)
    digest.update(b"mine" + struct.pack(f"<{len(numbers)}q", *numbers))
    return digest.digest()


def work_name(
    tokens: Iterable[int], start: int, context: Iterable[Sight], model: str, maker: Callable[[str], str]
) -> str:
    """Names equal work wherever it was done: what computed it, its tokens, and what they saw at the same relative
    places, as deep as it goes. maker: the name of a model's weights. Of what is seen, tokens that stand behind it are
    no part of the name."""
    context, names = tuple(context), dict[tuple[int, int], str]()
    waiting = [(sight.encoding, sight.first + sight.count) for sight in context]
    while waiting:
        made, end = waiting[-1]
        seen = [(sight.encoding, sight.first + sight.count) for sight in made.context]
        missing = [(one, last) for one, last in seen if (one.id, last) not in names]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        names[made.id, end] = _named(maker(made.model), made.layers, made.tokens[:end], made.start, made.context, names)
    return _named(maker(model), None, tokens, start, context, names)


def _named(
    maker: str,
    layers: frozenset[int] | None,
    tokens: Iterable[int],
    start: int,
    context: Iterable[Sight],
    names: Mapping[tuple[int, int], str],
) -> str:
    numbers = list(tokens)
    seen = [
        (names[s.encoding.id, s.first + s.count], s.first, s.count, s.start - start, _listed(s.layers)) for s in context
    ]
    digest = hashlib.sha256(repr((maker, _listed(layers), seen)).encode())
    digest.update(struct.pack(f"<{len(numbers)}q", *numbers))
    return digest.hexdigest()


def _listed(layers: frozenset[int] | None) -> list[int] | None:
    return None if layers is None else sorted(layers)
