"""What `ops/tiles.py` works out in arrays, a second time, tile by tile in plain loops."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from choreograph.attention import triton_partition as tiles
from choreograph.attention.metadata import AttentionMetadata


class Tile(NamedTuple):
    """Rows that read the same runs. pieces: (first slot of the run, first and last slot read, place in `reads`)."""

    rows: np.ndarray
    pieces: list[tuple[int, int, int, int]]


def parts(plan: AttentionMetadata, window: int | None, tile: int, groups: int) -> list[np.ndarray]:
    reads: list[np.ndarray] = []
    every = list(_tiles(plan, window, tile, reads))
    lengths = [sum(end - begin for _, begin, end, _ in one.pieces) for one in every]
    places = tiles.NUM_SMS * (3 if plan.num_tokens <= 16 else 2 if plan.num_tokens < 128 else 1)
    longest = max(tiles.MIN_SPLIT, -(-sum(lengths) * groups // places))
    items: list[tuple[int, int, int, int]] = []
    pieces: list[tuple[int, int, int, int]] = []
    rows: list[np.ndarray] = []
    known = 0
    for one, length in zip(every, lengths, strict=True):
        for some in _stripes(one.pieces, _even(length, longest)):
            items.append((known, len(one.rows), len(pieces), len(pieces) + len(some)))
            pieces += some
            rows.append(one.rows)
            known += len(one.rows)
    results = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
    order = np.argsort(results, kind="stable")
    result = [
        np.asarray(sorted(items, key=lambda item: -_slots(pieces, item))).reshape(-1, 4),  # the longest begin first
        np.asarray(pieces).reshape(-1, 4),
        np.concatenate(reads) if reads else np.zeros((0, 3)),
        np.stack([results, plan.positions[results]], axis=1),
        order,
        np.searchsorted(results[order], np.arange(plan.num_tokens + 1)),
    ]
    return [part.astype(np.int32) for part in result]


def _tiles(plan: AttentionMetadata, window: int | None, tile: int, reads: list[np.ndarray]) -> Iterator[Tile]:
    """Rows by the runs that they read. What each reads of a piece goes to the end of `reads`."""
    alike: dict[bytes, list[tuple[int, np.ndarray, np.ndarray]]] = {}
    for index in range(len(plan.kv_runs)):
        readers = plan.reads_of(index)
        rows = np.concatenate([np.arange(r[0], r[1]) for r in readers])
        read = np.concatenate(
            [
                np.stack([np.full(n, r[2]), r[3] + r[4] * np.arange(n), np.full(n, r[5])], axis=1)
                for r in readers
                for n in (r[1] - r[0],)
            ]
        )
        alike.setdefault(rows.tobytes(), []).append((int(plan.kv_runs[index, 0]), rows, read))
    known = 0
    for runs in alike.values():
        rows = runs[0][1]
        for first in range(0, len(rows), tile):
            some = rows[first : first + tile]
            pieces: list[tuple[int, int, int, int]] = []
            for lo, _, read in runs:
                mine = read[first : first + tile]
                begin, end = _reach(mine, plan.positions[some], window)
                if begin < end:
                    pieces.append((lo, begin, end, known))
                    reads.append(mine)
                    known += len(mine)
            if pieces:
                yield Tile(some, pieces)


def _reach(read: np.ndarray, positions: np.ndarray, window: int | None) -> tuple[int, int]:
    """The slots of a run that any of some rows sees."""
    begin, end = np.zeros(len(read), dtype=np.int64), read[:, 1]
    if window is not None:
        here = positions - read[:, 2]
        begin, end = np.maximum(0, here - window + 1), np.minimum(end, here + window)
    some = begin < end
    return (int(begin[some].min()), int(end[some].max())) if some.any() else (0, 0)


def _even(length: int, longest: int) -> int:
    """Slots of each of the stripes that a tile is cut into, all of about the same size."""
    count = max(1, round(length / longest))
    return -(-length // (count * tiles.SLOTS)) * tiles.SLOTS


def _slots(pieces: list[tuple[int, int, int, int]], item: tuple[int, int, int, int]) -> int:
    return sum(end - begin for _, begin, end, _ in pieces[item[2] : item[3]])


def _stripes(pieces: list[tuple[int, int, int, int]], longest: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """Pieces in order, cut into stripes of `longest` slots."""
    stripe: list[tuple[int, int, int, int]] = []
    room = longest
    for lo, begin, end, known in pieces:
        while begin < end:
            cut = min(end, begin + room)
            stripe.append((lo, begin, cut, known))
            room -= cut - begin
            begin = cut
            if room <= 0:
                yield stripe
                stripe, room = [], longest
    if stripe:
        yield stripe
