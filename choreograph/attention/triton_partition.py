"""Partition attention metadata into query tiles and KV splits.

Query tokens that read the same slot ranges share a tile, so that a range is loaded once for all of them.
A tile that reads more than an even share of the slots is split into equal KV splits. The computation is
pure and vectorized over all tokens: Python loops are too slow for a batch of 256 requests.
"""

from typing import NamedTuple, cast

import numpy as np

from .metadata import AttentionMetadata, AttentionSpec

MIN_SPLIT = 128  # minimum slots of a KV split

SLOTS = 64  # maximum slots per loop iteration of the kernel; KV splits are multiples of it

NUM_SMS = 132  # of an H100 or H200; tiles longer than the share of one SM are split

MAX_AGE = 64  # decode steps for which a partition is reused while the own ranges grow


class TileMetadata(NamedTuple):
    """Work items of the attention kernel, and the arrays that they index.

    A work item is one KV split of a query tile. Its KV chunks are the parts of slot ranges that it reads.
    KV chunks are in the order of their row parameters. Row i of a work item writes partial result
    `first partial row + i`. Offsets within a slot range are relative to its first slot, and half-open.
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
        """True if every query token has one partial result, without a merge."""
        return len(self.merge_order) == len(self.merge_indptr) - 1 and bool((np.diff(self.merge_indptr) == 1).all())

    def next_step(self) -> "TileMetadata | None":
        """Return the partition of the next decode step, or None.

        Each token's own range grows by one slot. None means that the partition must be recomputed: with a
        sliding window, or after `MAX_AGE` steps, since the KV splits become uneven.
        """
        if self.has_window or self.age >= MAX_AGE:
            return None
        row_params, kv_chunks = self.row_params.copy(), self.kv_chunks.copy()
        own_rows = np.flatnonzero(self.causal_rows)
        row_params[own_rows, 1] += 1
        last = np.searchsorted(kv_chunks[:, 3], own_rows, side="right") - 1  # last chunk of each range
        np.maximum.at(kv_chunks[:, 2], last, row_params[own_rows, 1])
        rows = self.rows + np.array([0, 1], dtype=np.int32)
        return self._replace(kv_chunks=kv_chunks, row_params=row_params, rows=rows, age=self.age + 1)


def partition(metadata: AttentionMetadata, spec: AttentionSpec, max_tile_rows: int, num_kv_heads: int) -> TileMetadata:
    """Partition attention metadata into query tiles and KV splits.

    The result is cached in the metadata for all layers with the same spec.

    Args:
        max_tile_rows: Maximum query tokens of a tile.
        num_kv_heads: Every KV head runs all work items: more heads need fewer KV splits.
    """
    key = f"tiles {id(spec)} {max_tile_rows} {num_kv_heads}"
    if key not in metadata.cache:
        metadata.cache[key] = _compute_partition(metadata, spec.sliding_window, max_tile_rows, num_kv_heads)
    return cast(TileMetadata, metadata.cache[key])


def _compute_partition(
    metadata: AttentionMetadata, window: int | None, max_tile_rows: int, num_kv_heads: int
) -> TileMetadata:
    """Compute the result of `partition`; `window` is the sliding window, if any."""
    reads = _expand_reads(metadata)
    first = np.flatnonzero(reads.row_in_run % max_tile_rows == 0)  # of every chunk: rows of a tile in a range
    begin, end = _visible_range(reads, first, metadata.positions, window)
    counts = np.diff(first, append=len(reads.row))
    tile_key = reads.same_readers_id[first], reads.row_in_run[first] // max_tile_rows
    order = np.lexsort(tile_key[::-1])  # chunks of one tile are adjacent
    order = order[begin[order] < end[order]]
    first, begin, end, counts = first[order], begin[order], end[order], counts[order]
    tile_starts = _run_starts(tile_key[0][order], tile_key[1][order])  # first chunk of every tile

    programs_per_sm = 3 if metadata.num_tokens <= 16 else 2 if metadata.num_tokens < 128 else 1
    slots_per_program = -(-int((end - begin).sum()) * num_kv_heads // (NUM_SMS * programs_per_sm))
    parts = _split_kv(end - begin, tile_starts, max(MIN_SPLIT, slots_per_program))
    chunks = np.stack([reads.slot_start[first], begin, begin, np.cumsum(counts) - counts], axis=1)[parts.chunk]
    chunks[:, 1] += parts.low
    chunks[:, 2] += parts.high

    starts = _run_starts(parts.tile, parts.kv_split)  # first chunk of every work item
    item_head = tile_starts[parts.tile[starts]]
    num_rows = counts[item_head]
    rows = reads.row[_concat_ranges(first[item_head], num_rows)]
    items = np.stack([np.cumsum(num_rows) - num_rows, num_rows, starts, np.append(starts, len(chunks))[1:]], axis=1)
    num_slots = _segment_sums(parts.high - parts.low, starts)
    merge_order = np.argsort(rows, kind="stable")
    expanded = _concat_ranges(first, counts)
    return TileMetadata(
        work_items=_to_int32(items[np.argsort(-num_slots, kind="stable")]),  # longest first
        kv_chunks=_to_int32(chunks),
        row_params=_to_int32(np.stack([reads.shift, reads.kv_len, reads.position], axis=1)[expanded]),
        rows=_to_int32(np.stack([rows, metadata.positions[rows]], axis=1)),
        merge_order=_to_int32(merge_order),
        merge_indptr=_to_int32(np.searchsorted(rows[merge_order], np.arange(metadata.num_tokens + 1))),
        causal_rows=reads.causal[expanded],
        has_window=window is not None,
    )


class _SplitChunks(NamedTuple):
    """KV chunks after splitting, one array element per part. All (P,) int64."""

    chunk: np.ndarray  # chunk that the part belongs to
    tile: np.ndarray  # tile of that chunk
    kv_split: np.ndarray  # KV split of the tile
    low: np.ndarray  # first slot, relative to the chunk's first one
    high: np.ndarray  # end slot, exclusive


def _split_kv(sizes: np.ndarray, tile_starts: np.ndarray, max_split_len: int) -> _SplitChunks:
    """Split tiles into equal KV splits.

    Args:
        sizes: Slots per chunk.
        tile_starts: First chunk of every tile.
        max_split_len: Target slots of a split; every split is a multiple of `SLOTS`.
    """
    lengths = _segment_sums(sizes, tile_starts)
    num_splits = np.maximum(1, np.rint(lengths / max_split_len)).astype(np.int64)
    split_lens = -(-lengths // (num_splits * SLOTS)) * SLOTS
    tile = np.repeat(np.arange(len(tile_starts)), np.diff(tile_starts, append=len(sizes)))
    before = np.cumsum(sizes) - sizes
    before -= before[tile_starts][tile]  # slots of the tile before each chunk
    split_len = split_lens[tile]
    first, last = before // split_len, (before + sizes - 1) // split_len
    chunk = np.repeat(np.arange(len(sizes)), last - first + 1)
    split = _concat_ranges(first, last - first + 1)
    before, split_len = before[chunk], split_len[chunk]
    low, high = np.maximum(split * split_len - before, 0), np.minimum((split + 1) * split_len - before, sizes[chunk])
    return _SplitChunks(chunk, tile[chunk], split, low, high)


class _ExpandedReads(NamedTuple):
    """Reads expanded to one element per query token and slot range.

    All arrays are (X,) int64, except `causal`.
    """

    row: np.ndarray  # query token
    shift: np.ndarray  # index into the metadata's shifts
    kv_len: np.ndarray  # slots the token attends to
    position: np.ndarray  # position of the range's first slot
    causal: np.ndarray  # bool: the token's own range
    slot_start: np.ndarray  # first slot of the range
    row_in_run: np.ndarray  # index of the token among the readers of the range
    same_readers_id: np.ndarray  # equal for ranges with the same query tokens


def _expand_reads(metadata: AttentionMetadata) -> _ExpandedReads:
    q_start, q_end, shift, kv_len, causal, position = metadata.reads.astype(np.int64).T
    counts = q_end - q_start
    read = np.repeat(np.arange(len(counts)), counts)
    within = _concat_ranges(np.zeros_like(counts), counts)  # index of the token in the read
    row = q_start[read] + within
    num_before = np.append(np.cumsum(counts) - counts, len(row))  # elements before every read
    begins = num_before[metadata.kv_runs[:, 2]]
    sizes = np.diff(begins, append=len(row))
    run = np.repeat(np.arange(len(sizes)), sizes)
    ids: dict[bytes, int] = {}
    data = row.tobytes()
    bounds = zip(begins.tolist(), (begins + sizes).tolist(), strict=True)
    readers_ids = [ids.setdefault(data[8 * begin : 8 * end], len(ids)) for begin, end in bounds]
    return _ExpandedReads(
        row=row,
        shift=shift[read],
        kv_len=kv_len[read] + causal[read] * within,
        position=position[read],
        causal=causal[read] == 1,
        slot_start=metadata.kv_runs[run, 0],
        row_in_run=np.arange(len(row)) - begins[run],
        same_readers_id=np.asarray(readers_ids, dtype=np.int64)[run],
    )


def _visible_range(
    reads: _ExpandedReads, first: np.ndarray, positions: np.ndarray, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots that the tokens of each chunk attend to.

    Returns the first slot and the end slot (exclusive), relative to the first slot of the range.
    """
    begin, end = np.zeros(len(reads.row), dtype=np.int64), reads.kv_len
    if window is not None:
        q_offset = positions[reads.row] - reads.position
        begin, end = np.maximum(0, q_offset - window + 1), np.minimum(end, q_offset + window)
        non_empty = begin < end
        begin, end = np.where(non_empty, begin, np.iinfo(np.int64).max), np.where(non_empty, end, 0)
    if not len(first):
        return first, first
    return np.minimum.reduceat(begin, first), np.maximum.reduceat(end, first)


def _to_int32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int32)


def _segment_sums(numbers: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the sums of the numbers from each start to the next."""
    return np.add.reduceat(numbers, starts) if len(starts) else numbers[:0]


def _concat_ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate the ranges first[i], ..., first[i] + counts[i] - 1."""
    return np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)


def _run_starts(*arrays: np.ndarray) -> np.ndarray:
    """Return the indices at which any of the arrays changes."""
    is_start = np.ones(len(arrays[0]), dtype=bool)
    is_start[1:] = np.any([array[1:] != array[:-1] for array in arrays], axis=0)
    return np.flatnonzero(is_start)
