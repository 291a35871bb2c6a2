"""Attention specs of layers, and the attention metadata of a batch."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np

from .rope import Rope


class HeadShape(NamedTuple):
    """Head counts and head dimension of a model's attention."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class AttentionSpec:
    """Attention variant of a layer: positional encoding, window and logit soft cap."""

    rope: Rope | None = None  # None without rotary embeddings
    sliding_window: int | None = None  # visible if |query position - key position| < window
    logit_softcap: float | None = None  # scores become cap * tanh(score / cap)
    alibi_slopes: tuple[float, ...] | None = None  # one per query head

    def __str__(self) -> str:
        parts = [
            f"rotary on {2 * self.rope.half_dim} dimensions" if self.rope else "",
            "ALiBi" if self.alibi_slopes else "",
        ]
        parts += [
            f"window {self.sliding_window}" if self.sliding_window else "",
            f"cap {self.logit_softcap:g}" if self.logit_softcap else "",
        ]
        return ", ".join(part for part in parts if part) or "no positions"

    @property
    def is_plain(self) -> bool:
        """True without sliding window, soft cap and ALiBi."""
        return self.sliding_window is None and self.logit_softcap is None and self.alibi_slopes is None


class KVRead(NamedTuple):
    """Query tokens q_start <= r < q_end read a contiguous slot range.

    Token r attends to the first ``kv_len + causal * (r - q_start)`` slots from `slot_start` on.
    """

    slot_start: int
    q_start: int
    q_end: int
    shift: int  # position minus base position of the range, in tokens
    kv_len: int  # slots that the first query token attends to
    causal: int  # 0 for context (same length for all), 1 for own tokens (one slot more per token)
    position: int  # position of the first slot

    @property
    def max_kv_len(self) -> int:
        """Number of slots that the last query token attends to."""
        return self.kv_len + self.causal * (self.q_end - 1 - self.q_start)


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Attention plan of a batch: target slots, positions and the slot ranges that are read.

    Backends keep derived data in `cache`; values with a `next_step` method carry over to the next step.
    """

    slots: np.ndarray  # (N,) int64: slot that each token's key and value are written to
    positions: np.ndarray  # (N,) int64: position of each query token
    kv_runs: np.ndarray  # (S, 3) int32: first slot, end slot, first row in `reads`
    reads: np.ndarray  # (E, 6) int32: q_start, q_end, index into `shifts`, kv_len, causal, position
    shifts: list[int]  # distinct shifts in tokens; shifts[0] is 0
    cache: dict[str, object] = field(default_factory=dict)  # data derived from the plan, by key
    num_padding: int = 0  # padding tokens at the end, which read nothing

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    def next_step(self) -> "AttentionMetadata":
        """Return the plan of the following decode step.

        Requires one token per request and a free next slot: the reads stay the same, with one more
        slot of each token's own range.
        """
        readers, segments, more = self.reads.copy(), self.kv_runs.copy(), np.ones(self.num_tokens, dtype=np.int64)
        more[self.num_tokens - self.num_padding :] = 0
        causal_reads = np.flatnonzero(readers[:, 4] == 1)
        readers[causal_reads, 3] += 1
        segments[np.searchsorted(segments[:, 2], causal_reads, side="right") - 1, 1] += 1
        next_cache = {
            name: advance() for name, value in self.cache.items() if (advance := getattr(value, "next_step", None))
        }
        next_cache = {name: value for name, value in next_cache.items() if value is not None}
        return AttentionMetadata(
            self.slots + more, self.positions + more, segments, readers, self.shifts, next_cache, self.num_padding
        )

    def reads_of(self, index: int) -> np.ndarray:
        """Return the rows of `reads` that read slot range `index`."""
        first = self.kv_runs[index, 2]
        end = self.kv_runs[index + 1, 2] if index + 1 < len(self.kv_runs) else len(self.reads)
        return self.reads[first:end]

    def rope_tables(self, rope: Rope | None) -> tuple[np.ndarray, np.ndarray]:
        """Return cos and sin of every shift, (len(shifts), half_dim) float32 each.

        Empty (0 columns) without rope. Cached for all layers with the same spec.
        """
        key = f"turns {id(rope)}"
        if key not in self.cache:
            nothing = np.zeros((len(self.shifts), 0), dtype=np.float32)
            cos, sin = (nothing, nothing) if rope is None else rope.cos_sin(self.shifts)
            self.cache[key] = _RopeTables(cos, sin, rope)
        return cast(_RopeTables, self.cache[key])[:2]

    def check(self) -> None:
        """Check the invariants that every backend relies on."""
        assert self.shifts[0] == 0 and len(self.positions) == self.num_tokens
        for index, (lo, hi, _) in enumerate(self.kv_runs):
            covered: set[int] = set()
            for row0, row1, shift, limit, step, _ in self.reads_of(index):
                assert 0 <= row0 < row1 <= self.num_tokens and step in (0, 1) and limit >= 0
                assert limit + step * (row1 - 1 - row0) <= hi - lo
                assert 0 <= shift < len(self.shifts)
                rows = set(range(row0, row1))
                assert not rows & covered, "a query token reads a slot range at one position only"
                covered |= rows


class _RopeTables(NamedTuple):
    """Cached rotation tables of a plan."""

    cos: np.ndarray  # (len(shifts), half_dim) float32
    sin: np.ndarray  # (len(shifts), half_dim) float32
    rope: Rope | None  # referenced so that its id(), part of the cache key, is not reused

    def next_step(self) -> "_RopeTables":
        return self


def build_metadata(slots: list[int], reads: Iterable[KVRead], positions: list[int]) -> AttentionMetadata:
    """Group reads by slot range; query tokens must be in increasing order. Pure."""
    shifts: dict[int, int] = {0: 0}
    segments: list[tuple[int, int, int]] = []
    readers: list[tuple[int, ...]] = []
    for run in _group_by_run(reads):
        segments.append((run[0].slot_start, run[0].slot_start + max(read.max_kv_len for read in run), len(readers)))
        for read in run:
            index = shifts.setdefault(read.shift, len(shifts))
            readers.append((read.q_start, read.q_end, index, read.kv_len, read.causal, read.position))
    return AttentionMetadata(
        slots=np.asarray(slots, dtype=np.int64),
        positions=np.asarray(positions, dtype=np.int64),
        kv_runs=np.asarray(segments, dtype=np.int32).reshape(-1, 3),
        reads=np.asarray(readers, dtype=np.int32).reshape(-1, 6),
        shifts=list(shifts),
    )


def _group_by_run(reads: Iterable[KVRead]) -> list[list[KVRead]]:
    """Group the reads by slot range, in slot order.

    A range that one token reads at two positions (messages of equal content share an entry) is
    listed twice, since each token reads a listed range at one position.
    """
    runs: dict[tuple[int, int], list[KVRead]] = {}
    for read in reads:
        copy = 0
        while (read.slot_start, copy) in runs and runs[read.slot_start, copy][-1].q_end > read.q_start:
            copy += 1
        if read.max_kv_len > 0:
            runs.setdefault((read.slot_start, copy), []).append(read)
    return [_merge_adjacent(runs[name]) for name in sorted(runs)]


def _merge_adjacent(reads: list[KVRead]) -> list[KVRead]:
    """Merge reads of adjacent query tokens with the same non-causal range."""
    merged = [reads[0]]
    for read in reads[1:]:
        last = merged[-1]
        same = (read.shift, read.kv_len, read.causal) == (last.shift, last.kv_len, 0)
        if same and last.causal == 0 and read.q_start == last.q_end:
            merged[-1] = last._replace(q_end=read.q_end)
        else:
            merged.append(read)
    return merged
