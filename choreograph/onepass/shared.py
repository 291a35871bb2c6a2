"""Encodings by the base model that the passes of a training share, such as those of instructions: computed once."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..models.adapter import Adapter
from .packed import Encoding, Pack, Span, encoded_apart

_Name = tuple[Any, ...]  # of an encoding: its tokens, where they stand, and what they see


class Shared:
    """What the base model makes of calls, while its weights and the types it computes in stay as they are.

    packs: all that will be asked for. What several of them have is kept, the most frequent first, `limit` tokens at
    most. Each is computed by itself, so that it comes out the same, bit by bit, whoever asks first.
    """

    def __init__(self, adapter: Adapter, packs: Iterable[Pack], limit: int = 8192) -> None:
        self._adapter = adapter
        self._kept: dict[_Name, Encoding | None] = {}
        for name, count in Counter(name for one in packs for name in dict.fromkeys(_names(one))).most_common():
            tokens, _, sees = name
            if count > 1 and len(tokens) <= limit and all(seen[0] in self._kept for seen in sees):
                self._kept[name] = None
                limit -= len(tokens)

    def __call__(self, packed: Pack) -> list[Encoding]:
        """Call by call. To be used inside `adapter.hooked()`."""
        found: dict[int, Encoding] = {}
        names = _names(packed)
        for n, name in enumerate(names):
            if name in self._kept:
                if (known := self._kept[name]) is None:
                    known = self._kept[name] = self._made(packed, found, [n])[0]
                found[n] = known
        if new := [n for n in range(len(names)) if n not in found]:
            found |= dict(zip(new, self._made(packed, found, new), strict=True))
        return [found[n] for n in range(len(names))]

    def _made(self, packed: Pack, known: Mapping[int, Encoding], new: Sequence[int]) -> list[Encoding]:
        return encoded_apart(self._adapter, _behind(packed, list(known), new), list(known.values()))


def _names(packed: Pack) -> list[_Name]:
    starts, found = [span.lo for span in packed.spans], list[_Name]()
    for lo, hi, sees in packed.spans:
        homes = ((bisect_right(starts, run.lo) - 1, run) for run in sees)
        seen = tuple((found[n], run.lo - starts[n], run.hi - starts[n], run.shift) for n, run in homes)
        found.append((tuple(packed.tokens[lo:hi]), packed.positions[lo], seen))
    return found


def _behind(packed: Pack, known: Sequence[int], new: Sequence[int]) -> Pack:
    """Some calls of a pass, behind others that are encoded already."""
    starts = [span.lo for span in packed.spans]
    moved, at = dict[int, int](), 0  # of every call: by how much its rows are moved
    for n in (*known, *new):
        moved[n] = at - starts[n]
        at += packed.spans[n].hi - starts[n]

    def part(numbers: Sequence[int], past: Pack | None) -> Pack:
        spans, tokens, positions = list[Span](), list[int](), list[int]()
        for n in numbers:
            lo, hi, sees = packed.spans[n]
            tokens += packed.tokens[lo:hi]
            positions += packed.positions[lo:hi]
            runs = [(run, moved[bisect_right(starts, run.lo) - 1]) for run in sees if past is not None]
            sees = tuple(run._replace(lo=run.lo + by, hi=run.hi + by) for run, by in runs)
            spans.append(Span(lo + moved[n], hi + moved[n], sees))
        return Pack(tokens, positions, tuple(spans), [], [], past)

    return part(new, part(known, None))
