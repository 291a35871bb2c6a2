"""Partition of an attention plan into GPU work items: query tiles and KV splits. Pure.

Query tokens that read the same slot ranges share a tile, so that a range is loaded once for all of them.
A tile that reads more than an even share of the slots is split into equal KV splits. Everything is
vectorized over all tokens: Python loops are too slow for a batch of 256 requests.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np

from .metadata import AttentionMetadata, AttentionSpec

MIN_SPLIT = 128  # minimum slots of a KV split

SLOTS = 64  # maximum slots per loop iteration of the kernel; KV splits are multiples of it

NUM_SMS = 132  # of an H100 or H200; tiles longer than the share of one SM are split

MAX_AGE = 64  # decode steps for which a partition is reused while the own ranges grow


class TileMetadata(NamedTuple):
    """Work items of the kernels. KV chunks are in the order of their row parameters.

    Row i of a work item writes partial result `first partial row + i`. Offsets within a slot range are
    relative to its first slot, and half-open.
    """

    work_items: np.ndarray  # (W, 4) int32: first partial row, number of rows, first and end KV chunk
    kv_chunks: np.ndarray  # (C, 4) int32: first slot of the range, begin, end, offset into row_params
    row_params: np.ndarray  # (X, 3) int32: shift index, kv_len, position of the range's first slot
    rows: np.ndarray  # (R, 2) int32: query token and its position, per partial result
    merge_order: np.ndarray  # (R,) int32: partial results sorted by query token
    merge_indptr: np.ndarray  # (N + 1,) int32: start of each query token in merge_order
    causal_rows: np.ndarray  # (X,) bool: reads of own tokens, one slot longer in the next step
    has_window: bool  # the layers have a sliding window
    age: int = 0  # decode steps since the partition was computed

    @property
    def device_arrays(self) -> tuple[np.ndarray, ...]:
        """Arrays that are copied to the device."""
        return self[:6]

    @property
    def single_split(self) -> bool:
        """True if every query token has exactly one partial result, which needs no merge."""
        return len(self.merge_order) == len(self.merge_indptr) - 1 and bool((np.diff(self.merge_indptr) == 1).all())

    def next_step(self) -> "TileMetadata | None":
        """Return the partition of the next step's plan, with one more slot per own range.

        None if it must be recomputed: with a sliding window, or after `MAX_AGE` steps, since the splits
        become uneven.
        """
        if self.has_window or self.age >= MAX_AGE:
            return None
        reads, chunks, rows = (
            self.row_params.copy(),
            self.kv_chunks.copy(),
            self.rows + np.array([0, 1], dtype=np.int32),
        )
        own_rows = np.flatnonzero(self.causal_rows)
        reads[own_rows, 1] += 1
        last = np.searchsorted(chunks[:, 3], own_rows, side="right") - 1  # last chunk of each range
        np.maximum.at(chunks[:, 2], last, reads[own_rows, 1])
        return self._replace(kv_chunks=chunks, row_params=reads, rows=rows, age=self.age + 1)


def partition(metadata: AttentionMetadata, spec: AttentionSpec, max_tile_rows: int, num_kv_heads: int) -> TileMetadata:
    """Return the partition of a plan, cached for all layers with the same spec."""
    key = f"arrays {id(spec)} {max_tile_rows} {num_kv_heads}"
    if key not in metadata.cache:
        metadata.cache[key] = _compute_partition(metadata, spec.sliding_window, max_tile_rows, num_kv_heads)
    return cast(TileMetadata, metadata.cache[key])


def _compute_partition(
    metadata: AttentionMetadata, window: int | None, max_tile_rows: int, num_kv_heads: int
) -> TileMetadata:
    e = _expand_rows(metadata)
    first = np.flatnonzero(e.row_in_run % max_tile_rows == 0)  # of every chunk: rows of a tile in a range
    begin, end = _visible_range(e, first, metadata.positions, window)
    counts = np.diff(first, append=len(e.row))
    tile_key = e.same_readers_id[first], e.row_in_run[first] // max_tile_rows
    chunk_order = np.lexsort(tile_key[::-1])  # chunks of one tile are adjacent
    chunk_order = chunk_order[begin[chunk_order] < end[chunk_order]]
    first, begin, end, counts = first[chunk_order], begin[chunk_order], end[chunk_order], counts[chunk_order]
    heads = _run_starts(tile_key[0][chunk_order], tile_key[1][chunk_order])  # first chunk of every tile
    expanded, in_reads = _concat_ranges(first, counts), np.cumsum(counts) - counts

    num_programs = NUM_SMS * (
        3 if metadata.num_tokens <= 16 else 2 if metadata.num_tokens < 128 else 1
    )  # concurrent programs
    p = _split_kv(end - begin, heads, lambda slots: max(MIN_SPLIT, -(-slots * num_kv_heads // num_programs)))
    chunks = np.stack([e.slot_start[first], begin, begin, in_reads], axis=1)[p.chunk]
    chunks[:, 1] += p.low
    chunks[:, 2] += p.high

    starts = _run_starts(p.tile, p.kv_split)  # first chunk of every work item
    tile_head = heads[p.tile[starts]]
    rows = counts[tile_head]
    results = e.row[_concat_ranges(first[tile_head], rows)]
    items = np.stack([np.cumsum(rows) - rows, rows, starts, np.append(starts, len(chunks))[1:]], axis=1)
    slots = _segment_sums(p.high - p.low, starts)
    order = np.argsort(results, kind="stable")
    return TileMetadata(
        work_items=_to_int32(items[np.argsort(-slots, kind="stable")]),  # longest first
        kv_chunks=_to_int32(chunks),
        row_params=_to_int32(np.stack([e.shift, e.kv_len, e.position], axis=1)[expanded]),
        rows=_to_int32(np.stack([results, metadata.positions[results]], axis=1)),
        merge_order=_to_int32(order),
        merge_indptr=_to_int32(np.searchsorted(results[order], np.arange(metadata.num_tokens + 1))),
        causal_rows=e.causal[expanded],
        has_window=window is not None,
    )


class _SplitChunks(NamedTuple):
    """KV chunks after splitting, one array element per part. All (P,) int64."""

    chunk: np.ndarray  # chunk that the part belongs to
    tile: np.ndarray  # tile of that chunk
    kv_split: np.ndarray  # KV split of the tile
    low: np.ndarray  # first slot, relative to the chunk's first one
    high: np.ndarray  # end slot, exclusive


def _split_kv(sizes: np.ndarray, tile_starts: np.ndarray, max_split_len: Callable[[int], int]) -> _SplitChunks:
    """Split tiles into equal KV splits.

    Args:
        sizes: Slots per chunk.
        tile_starts: First chunk of every tile.
        max_split_len: Maps the total slots of all tiles to the target slots of a split.
    """
    lengths = _segment_sums(sizes, tile_starts)
    cuts = _even_split(lengths, max_split_len(int(lengths.sum())))
    tile = np.repeat(np.arange(len(tile_starts)), np.diff(tile_starts, append=len(sizes)))
    before = np.cumsum(sizes) - sizes
    before -= before[tile_starts][tile]  # slots of the tile before each chunk
    cut = cuts[tile]
    first, last = before // cut, (before + sizes - 1) // cut
    chunk_index = np.repeat(np.arange(len(sizes)), last - first + 1)
    split = _concat_ranges(first, last - first + 1)
    before, cut = before[chunk_index], cut[chunk_index]
    low, high = np.maximum(split * cut - before, 0), np.minimum((split + 1) * cut - before, sizes[chunk_index])
    return _SplitChunks(chunk_index, tile[chunk_index], split, low, high)


class _ExpandedReads(NamedTuple):
    """Reads expanded to one element per query token and slot range. All (X,)."""

    row: np.ndarray  # query token
    shift: np.ndarray  # index into the plan's shifts
    kv_len: np.ndarray  # slots the token attends to
    position: np.ndarray  # position of the range's first slot
    causal: np.ndarray  # bool: the token's own range
    slot_start: np.ndarray  # first slot of the range
    row_in_run: np.ndarray  # index of the token among the readers of the range
    same_readers_id: np.ndarray  # equal for ranges with the same query tokens


def _expand_rows(metadata: AttentionMetadata) -> _ExpandedReads:
    readers = metadata.reads.astype(np.int64)
    row0, row1, shift, limit, step, position = readers.T
    counts = row1 - row0
    reader, within = (
        np.repeat(np.arange(len(readers)), counts),
        _concat_ranges(np.zeros(len(readers), dtype=np.int64), counts),
    )
    row = row0[reader] + within
    num_before = np.append(np.cumsum(counts) - counts, len(row))  # elements before every read
    begins = num_before[metadata.kv_runs[:, 2]]
    sizes = np.diff(begins, append=len(row))
    segment = np.repeat(np.arange(len(sizes)), sizes)
    names: dict[bytes, int] = {}
    data = row.tobytes()
    ends = (begins + sizes).tolist()
    reader_ids = [names.setdefault(data[8 * a : 8 * b], len(names)) for a, b in zip(begins.tolist(), ends, strict=True)]
    return _ExpandedReads(
        row=row,
        shift=shift[reader],
        kv_len=limit[reader] + step[reader] * within,
        position=position[reader],
        causal=step[reader] == 1,
        slot_start=metadata.kv_runs[segment, 0],
        row_in_run=np.arange(len(row)) - begins[segment],
        same_readers_id=np.asarray(reader_ids, dtype=np.int64)[segment],
    )


def _visible_range(
    reads: _ExpandedReads, first: np.ndarray, positions: np.ndarray, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the half-open slots of a range that any token of a chunk attends to."""
    begin, end = np.zeros(len(reads.row), dtype=np.int64), reads.kv_len
    if window is not None:
        q_offset = positions[reads.row] - reads.position
        begin, end = np.maximum(0, q_offset - window + 1), np.minimum(end, q_offset + window)
        non_empty = begin < end
        begin, end = np.where(non_empty, begin, np.iinfo(np.int64).max), np.where(non_empty, end, 0)
    if not len(first):
        return first, first
    return np.minimum.reduceat(begin, first), np.maximum.reduceat(end, first)


def _even_split(lengths: np.ndarray, max_split_len: int) -> np.ndarray:
    """Return the slots per KV split of every tile, a multiple of `SLOTS`."""
    count = np.maximum(1, np.rint(lengths / max_split_len)).astype(np.int64)
    return -(-lengths // (count * SLOTS)) * SLOTS


def _to_int32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int32)


def _segment_sums(numbers: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the sums of the numbers from each start to the next."""
    return np.add.reduceat(numbers, starts) if len(starts) else numbers[:0]


def _concat_ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ... (counts[0] numbers), first[1], ..."""
    return np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)


def _run_starts(*names: np.ndarray) -> np.ndarray:
    """Return the indices at which any of the arrays changes."""
    new = np.ones(len(names[0]), dtype=bool)
    new[1:] = np.any([values[1:] != values[:-1] for values in names], axis=0)
    return np.flatnonzero(new)
