"""A plan as work for the programs of a GPU: which rows stand in one tile, and where long contexts are cut. Pure.

Rows that read the same runs of slots stand in one tile, so that a run is loaded once for all of them. A tile that reads
more than a fair share of slots is cut into even stripes. Everything is worked out in arrays, for all rows at once: a
step of 256 calls has no time for loops.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np

from .kind import Kind
from .plan import Plan

STRIPE = 128  # slots of the shortest stripe
SLOTS = 64  # that a program reads at a time, at most: stripes are whole multiples
MULTIPROCESSORS = 132  # of an H100 or H200: what is longer than a fair share of one is cut
AGE = 64  # steps for which a division into stripes is kept while the rows' own tokens grow


class Arrays(NamedTuple):
    """A plan as programs take it. items: (W, 4) first row, rows, first piece, last piece; the partial result of an
    item's row i is number `first row + i`. pieces: (P, 4) first slot of the run, first and last slot read, place in
    `reads`. reads: (X, 3) shift, limit, position of every row of every piece. rows: (R, 2) of every partial result,
    with its position. order, starts: the partial results of every row. own: the reads of rows' own tokens, which are
    one more for the next token. age: steps since it was worked out. Pieces stand in the order of their reads."""

    items: np.ndarray
    pieces: np.ndarray
    reads: np.ndarray
    rows: np.ndarray
    order: np.ndarray
    starts: np.ndarray
    own: np.ndarray
    windowed: bool
    age: int = 0

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """What a device is sent."""
        return self[:6]

    @property
    def direct(self) -> bool:
        """Whether every row has one partial result, which is its result then."""
        return len(self.order) == len(self.starts) - 1 and bool((np.diff(self.starts) == 1).all())

    def advanced(self) -> "Arrays | None":
        """The work of the plan that is `advanced`: the last stripe of a row's own run is a slot longer. None where it
        has to be worked out again: a window moves, and stripes do not stay even for ever."""
        if self.windowed or self.age >= AGE:
            return None
        reads, pieces, rows = self.reads.copy(), self.pieces.copy(), self.rows + np.array([0, 1], dtype=np.int32)
        own = np.flatnonzero(self.own)
        reads[own, 1] += 1
        last = np.searchsorted(pieces[:, 3], own, side="right") - 1  # of the piece with this read, its last part
        np.maximum.at(pieces[:, 2], last, reads[own, 1])
        return self._replace(pieces=pieces, reads=reads, rows=rows, age=self.age + 1)


def arrays(plan: Plan, kind: Kind, tile: int, groups: int) -> Arrays:
    """A plan's work for layers of a kind, worked out once. tile: rows of one at most."""
    key = f"arrays {id(kind)} {tile} {groups}"
    if key not in plan.memo:
        plan.memo[key] = _make_arrays(plan, kind.window, tile, groups)
    return cast(Arrays, plan.memo[key])


def _make_arrays(plan: Plan, window: int | None, tile: int, groups: int) -> Arrays:
    e = _entries(plan)
    first = np.flatnonzero(e.place % tile == 0)  # of every piece: the rows of a tile in a run
    begin, end = _reach(e, first, plan.positions, window)
    counts = np.diff(first, append=len(e.row))
    named = e.alike[first], e.place[first] // tile
    kept = np.lexsort(named[::-1])  # pieces of one tile stand together
    kept = kept[begin[kept] < end[kept]]
    first, begin, end, counts = first[kept], begin[kept], end[kept], counts[kept]
    heads = _changes(named[0][kept], named[1][kept])  # the first piece of every tile
    every, in_reads = _ranges(first, counts), np.cumsum(counts) - counts

    places = MULTIPROCESSORS * (3 if plan.rows <= 16 else 2 if plan.rows < 128 else 1)  # programs that run at a time
    p = _parts(end - begin, heads, lambda slots: max(STRIPE, -(-slots * groups // places)))
    pieces = np.stack([e.lo[first], begin, begin, in_reads], axis=1)[p.piece]
    pieces[:, 1] += p.low
    pieces[:, 2] += p.high

    starts = _changes(p.tile, p.stripe)  # the first piece of every item
    of = heads[p.tile[starts]]
    rows = counts[of]
    results = e.row[_ranges(first[of], rows)]
    items = np.stack([np.cumsum(rows) - rows, rows, starts, np.append(starts, len(pieces))[1:]], axis=1)
    slots = _sums(p.high - p.low, starts)
    order = np.argsort(results, kind="stable")
    return Arrays(
        items=_short(items[np.argsort(-slots, kind="stable")]),  # the longest begin first
        pieces=_short(pieces),
        reads=_short(np.stack([e.shift, e.limit, e.position], axis=1)[every]),
        rows=_short(np.stack([results, plan.positions[results]], axis=1)),
        order=_short(order),
        starts=_short(np.searchsorted(results[order], np.arange(plan.rows + 1))),
        own=e.own[every],
        windowed=window is not None,
    )


class _Parts(NamedTuple):
    """Pieces that were cut: slots low <= j < high of a piece are in a stripe of a tile."""

    piece: np.ndarray
    tile: np.ndarray
    stripe: np.ndarray
    low: np.ndarray
    high: np.ndarray


def _parts(sizes: np.ndarray, heads: np.ndarray, longest: Callable[[int], int]) -> _Parts:
    """Cuts tiles, whose first pieces are `heads`, into even stripes. longest: by the slots of all tiles."""
    lengths = _sums(sizes, heads)
    cuts = _even(lengths, longest(int(lengths.sum())))
    tile = np.repeat(np.arange(len(heads)), np.diff(heads, append=len(sizes)))
    before = np.cumsum(sizes) - sizes
    before -= before[heads][tile]  # slots of its tile in front of every piece
    cut = cuts[tile]
    first, last = before // cut, (before + sizes - 1) // cut
    piece = np.repeat(np.arange(len(sizes)), last - first + 1)
    stripe = _ranges(first, last - first + 1)
    before, cut = before[piece], cut[piece]
    low, high = np.maximum(stripe * cut - before, 0), np.minimum((stripe + 1) * cut - before, sizes[piece])
    return _Parts(piece, tile[piece], stripe, low, high)


class _Entries(NamedTuple):
    """Every row of every run. place: of the row among the run's. alike: equal for runs that the same rows read."""

    row: np.ndarray
    shift: np.ndarray
    limit: np.ndarray
    position: np.ndarray
    own: np.ndarray
    lo: np.ndarray
    place: np.ndarray
    alike: np.ndarray


def _entries(plan: Plan) -> _Entries:
    readers = plan.readers.astype(np.int64)
    row0, row1, shift, limit, step, position = readers.T
    counts = row1 - row0
    reader, within = np.repeat(np.arange(len(readers)), counts), _ranges(np.zeros(len(readers), dtype=np.int64), counts)
    row = row0[reader] + within
    known = np.append(np.cumsum(counts) - counts, len(row))  # entries in front of every reader
    begins = known[plan.segments[:, 2]]
    sizes = np.diff(begins, append=len(row))
    segment = np.repeat(np.arange(len(sizes)), sizes)
    names: dict[bytes, int] = {}
    data = row.tobytes()
    ends = (begins + sizes).tolist()
    alike = [names.setdefault(data[8 * a : 8 * b], len(names)) for a, b in zip(begins.tolist(), ends, strict=True)]
    return _Entries(
        row=row,
        shift=shift[reader],
        limit=limit[reader] + step[reader] * within,
        position=position[reader],
        own=step[reader] == 1,
        lo=plan.segments[segment, 0],
        place=np.arange(len(row)) - begins[segment],
        alike=np.asarray(alike, dtype=np.int64)[segment],
    )


def _reach(e: _Entries, first: np.ndarray, positions: np.ndarray, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The slots of a run that any row of a piece sees."""
    begin, end = np.zeros(len(e.row), dtype=np.int64), e.limit
    if window is not None:
        here = positions[e.row] - e.position
        begin, end = np.maximum(0, here - window + 1), np.minimum(end, here + window)
        some = begin < end
        begin, end = np.where(some, begin, np.iinfo(np.int64).max), np.where(some, end, 0)
    if not len(first):
        return first, first
    return np.minimum.reduceat(begin, first), np.maximum.reduceat(end, first)


def _even(lengths: np.ndarray, longest: int) -> np.ndarray:
    """Slots of each of the stripes that tiles are cut into, those of one tile all of about the same size."""
    count = np.maximum(1, np.rint(lengths / longest)).astype(np.int64)
    return -(-lengths // (count * SLOTS)) * SLOTS


def _short(part: np.ndarray) -> np.ndarray:
    return part.astype(np.int32)


def _sums(numbers: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Of the numbers from each start up to the next one."""
    return np.add.reduceat(numbers, starts) if len(starts) else numbers[:0]


def _ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ... (counts[0] numbers), first[1], ..."""
    return np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)


def _changes(*names: np.ndarray) -> np.ndarray:
    """Where a pair of numbers differs from the one before."""
    new = np.ones(len(names[0]), dtype=bool)
    new[1:] = np.any([one[1:] != one[:-1] for one in names], axis=0)
    return np.flatnonzero(new)
