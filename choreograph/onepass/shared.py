"""Encodings by the base model that the passes of a training share, such as those of instructions: computed once."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..models.adapter import Adapter
from .packed import Encoding, Pack, Span, encoded_apart

MEMORY = 1 << 30  # bytes of keys and values to keep at most


class _Name(NamedTuple):
    """Of an encoding. sees: of everything that the call sees the number of its name, which part, and how far it is
    moved."""

    tokens: tuple[int, ...]
    start: int
    sees: tuple[tuple[int, int, int, int], ...]


class Shared:
    """What the base model makes of calls, while its weights and the types it computes in stay as they are.

    packs: all that will be asked for. What several of them have is kept, the most frequent first, as long as there is
    room. tokens: how many there is room for, if not as many as `MEMORY` holds. Each is computed by itself, so that it
    comes out the same, bit by bit, whoever asks first.
    """

    def __init__(self, adapter: Adapter, packs: Iterable[Pack], tokens: int | None = None) -> None:
        self._adapter = adapter
        self._numbers: dict[_Name, int] = {}
        self._kept: dict[int, Encoding | None] = {}
        self._room = MEMORY // adapter.facts.kv_bytes_per_token if tokens is None else tokens
        self._tokens = 0  # to keep
        count = Counter(number for packed in packs for number in dict.fromkeys(self._numbered(packed)))
        names = list(self._numbers)
        for number, times in count.most_common():
            name = names[number]
            fits = self._tokens + len(name.tokens) <= self._room
            if times > 1 and fits and all(seen[0] in self._kept for seen in name.sees):
                self._kept[number] = None
                self._tokens += len(name.tokens)

    def __call__(self, packed: Pack) -> list[Encoding]:
        """Call by call. To be used inside `adapter.hooked()`."""
        found: dict[int, Encoding] = {}
        numbers = self._numbered(packed)
        for n, number in enumerate(numbers):
            if number in self._kept:
                known = self._kept[number]
                if known is None:
                    made = self._made(packed, found, [n])[0].items()  # which may be a part of something larger
                    known = self._kept[number] = {layer: (k.clone(), v.clone()) for layer, (k, v) in made}
                found[n] = known
        if new := [n for n in range(len(numbers)) if n not in found]:
            found |= dict(zip(new, self._made(packed, found, new), strict=True))
        return [found[n] for n in range(len(numbers))]

    def forget(self) -> None:
        """Keeps nothing from now on."""
        self._kept.clear()
        self._tokens = 0

    def check(self) -> None:
        """What is kept fits, is whole, and all that it sees is kept too."""
        names = list(self._numbers)
        assert self._tokens == sum(len(names[number].tokens) for number in self._kept) <= self._room
        assert all(seen[0] in self._kept for number in self._kept for seen in names[number].sees)
        for number, known in self._kept.items():
            for keys, values in (known or {}).values():
                assert keys.shape[2] == values.shape[2] == len(names[number].tokens)

    def _made(self, packed: Pack, known: Mapping[int, Encoding], new: Sequence[int]) -> list[Encoding]:
        return encoded_apart(self._adapter, behind(packed, list(known), new), list(known.values()))

    def _numbered(self, packed: Pack) -> list[int]:
        """The numbers of the names of all calls."""
        found: list[int] = []
        for span in packed.spans:
            homes = ((*packed.home(run), run.shift) for run in span.sees)
            sees = tuple((found[n], part.start, part.stop, shift) for n, part, shift in homes)
            name = _Name(tuple(packed.tokens[span.lo : span.hi]), packed.positions[span.lo], sees)
            found.append(self._numbers.setdefault(name, len(self._numbers)))
        return found


def behind(packed: Pack, known: Sequence[int], new: Sequence[int]) -> Pack:
    """Some calls of a pass, behind others that are encoded already."""
    moved, at = dict[int, int](), 0  # of every call: by how much its rows are moved
    for n in (*known, *new):
        moved[n] = at - packed.spans[n].lo
        at += packed.spans[n].hi - packed.spans[n].lo

    def part(numbers: Sequence[int], past: Pack | None) -> Pack:
        spans, tokens, positions = list[Span](), list[int](), list[int]()
        for n in numbers:
            lo, hi, sees = packed.spans[n]
            tokens += packed.tokens[lo:hi]
            positions += packed.positions[lo:hi]
            runs = ((run, moved[packed.home(run)[0]]) for run in sees if past is not None)
            sees = tuple(run._replace(lo=run.lo + by, hi=run.hi + by) for run, by in runs)
            spans.append(Span(lo + moved[n], hi + moved[n], sees))
        return Pack(tokens, positions, tuple(spans), [], [], past)

    return part(new, part(known, None))
