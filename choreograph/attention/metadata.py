"""Attention specs, attention metadata of a batch, and inputs of a backend."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy as np
from jaxtyping import Float
from torch import Tensor

from .int8_rows import StoredRows
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
            f"window {self.sliding_window}" if self.sliding_window else "",
            f"cap {self.logit_softcap:g}" if self.logit_softcap else "",
        ]
        return ", ".join(part for part in parts if part) or "no positions"

    @property
    def is_plain(self) -> bool:
        """True without sliding window, soft cap and ALiBi."""
        return self.sliding_window is None and self.logit_softcap is None and self.alibi_slopes is None


class Alignment(NamedTuple):
    """Correction of attention to keys that are reused out of their context (APE, arXiv:2502.05431).

    A query's aligned keys, all its reads with an alignment, get scores s: products with the query times the layer's
    scale, divided by the temperature, before soft cap and ALiBi. In the softmax over all keys they count as one, with
    the logit ``temperature * logsumexp(s) + log(scale)``, and the value that softmax(s) averages. A constant added to
    all of a query's products changes nothing, as in ordinary attention, which temperature and scale of 1 give.
    """

    temperature: float  # above 0
    scale: float  # above 0


class KVRead(NamedTuple):
    """Read of a contiguous slot range by consecutive query tokens.

    The query tokens are q_start <= r < q_end. Token r attends to the first
    ``kv_len + causal * (r - q_start)`` slots from `slot_start` on.
    """

    slot_start: int
    q_start: int
    q_end: int
    shift: int  # position minus base position of the range, in tokens
    kv_len: int  # slots that the first query token attends to
    causal: int  # 0 for context (same length for all), 1 for own tokens (one slot more per token)
    position: int  # position of the first slot
    alignment: Alignment | None = None  # one for all reads of a query token that have any


class AlignedRows(NamedTuple):
    """Metadata of a batch in which the reads with an alignment have query rows of their own.

    These rows follow those of the N tokens of the batch. Backends compute both parts of a token, with their
    log-sum-exps, and merge them as `Alignment` says. Keys and values are written for the N tokens alone.
    """

    metadata: "AttentionMetadata"  # of N + A rows
    token_of: np.ndarray  # (A,) int32: query token of each row, ascending
    temperatures: np.ndarray  # (A,) float32
    log_scales: np.ndarray  # (A,) float32, natural logarithms


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Attention metadata of a batch: slots, positions and slot ranges read.

    Backends store derived data in `cache`. Cached values with a `next_step` method are carried over to the
    next step.
    """

    slots: np.ndarray  # (N,) int64: slot that each token's key and value are written to
    positions: np.ndarray  # (N,) int64: position of each query token
    kv_runs: np.ndarray  # (S, 3) int32: first slot, end slot (exclusive), first row in `reads`
    reads: np.ndarray  # (E, 6) int32: q_start, q_end, index into `shifts`, kv_len, causal, position
    shifts: list[int]  # distinct shifts in tokens; shifts[0] is 0
    cache: dict[str, object] = field(default_factory=dict)  # derived data, by key
    num_padding: int = 0  # padding tokens at the end, which read nothing
    alignments: tuple[Alignment, ...] = ()  # distinct ones of `reads`; empty: ordinary attention
    alignment_of: np.ndarray | None = None  # (E,) int32: 1 + index into `alignments`, or 0; None without alignments

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    def next_step(self) -> "AttentionMetadata":
        """Return the metadata of the following decode step.

        Requires one token per request and a free next slot. The reads stay the same, except that each token's
        own range grows by one slot.
        """
        reads, kv_runs, step = self.reads.copy(), self.kv_runs.copy(), np.ones(self.num_tokens, dtype=np.int64)
        step[self.num_tokens - self.num_padding :] = 0
        causal_reads = np.flatnonzero(reads[:, 4] == 1)
        reads[causal_reads, 3] += 1
        kv_runs[np.searchsorted(kv_runs[:, 2], causal_reads, side="right") - 1, 1] += 1
        cache = {key: value.next_step() for key, value in self.cache.items() if hasattr(value, "next_step")}
        cache = {key: value for key, value in cache.items() if value is not None}
        return replace(
            self, slots=self.slots + step, positions=self.positions + step, kv_runs=kv_runs, reads=reads, cache=cache
        )

    def pad_to(self, num_tokens: int) -> "AttentionMetadata":
        """Pad with tokens that write to the null page and read nothing.

        The null page is slot 0. The result is cached, so data derived from it is shared.
        """
        key = f"padded {num_tokens}"
        if key not in self.cache:
            zeros = np.zeros(num_tokens - self.num_tokens, dtype=np.int64)
            slots, positions = (np.concatenate([array, zeros]) for array in (self.slots, self.positions))
            self.cache[key] = replace(self, slots=slots, positions=positions, cache={}, num_padding=len(zeros))
        return cast(AttentionMetadata, self.cache[key])

    def reads_of(self, index: int) -> np.ndarray:
        """Return the rows of `reads` that read slot range `index`."""
        first = self.kv_runs[index, 2]
        end = self.kv_runs[index + 1, 2] if index + 1 < len(self.kv_runs) else len(self.reads)
        return self.reads[first:end]

    def alignment(self, read: int) -> Alignment | None:
        """Return the alignment of row `read` of `reads`."""
        index = 0 if self.alignment_of is None else self.alignment_of[read]
        return self.alignments[index - 1] if index else None

    def with_aligned_rows(self) -> AlignedRows | None:
        """Return the batch with aligned reads apart; None without alignments."""
        if self.alignment_of is None:
            return None
        if "aligned rows" not in self.cache:
            is_aligned = self.alignment_of > 0
            ranges, ids = self.reads[is_aligned, :2], self.alignment_of[is_aligned] - 1
            alignment_of_token = np.full(self.num_tokens, -1)
            for (start, end), index in zip(ranges, ids, strict=True):
                alignment_of_token[start:end] = index
            token_of = np.flatnonzero(alignment_of_token >= 0)
            reads = self.reads.copy()  # the tokens of a read are adjacent, and so are their aligned rows
            first_rows = self.num_tokens + np.searchsorted(token_of, ranges[:, 0])
            reads[is_aligned, 1] = first_rows + ranges[:, 1] - ranges[:, 0]
            reads[is_aligned, 0] = first_rows
            runs = np.searchsorted(self.kv_runs[:, 2], np.arange(len(reads)), side="right")
            numbers = np.array([(a.temperature, np.log(a.scale)) for a in self.alignments], dtype=np.float32)
            temperatures, log_scales = np.ascontiguousarray(numbers[alignment_of_token[token_of]].T)
            metadata = AttentionMetadata(
                slots=np.append(self.slots, np.zeros(len(token_of), dtype=np.int64)),
                positions=np.append(self.positions, self.positions[token_of]),
                kv_runs=self.kv_runs,
                reads=np.ascontiguousarray(reads[np.lexsort((reads[:, 0], runs))]),  # of each run, in order of tokens
                shifts=self.shifts,
            )
            self.cache["aligned rows"] = AlignedRows(metadata, token_of.astype(np.int32), temperatures, log_scales)
        return cast(AlignedRows, self.cache["aligned rows"])

    def rope_tables(self, rope: Rope | None) -> tuple[np.ndarray, np.ndarray]:
        """Return cos and sin of every shift, (len(shifts), half_dim) float32 each.

        The tables have 0 columns without rope. They are cached for all layers with the same `rope`.
        """
        key = f"rope {id(rope)}"
        if key not in self.cache:
            empty = np.zeros((len(self.shifts), 0), dtype=np.float32)
            cos, sin = (empty, empty) if rope is None else rope.cos_sin(self.shifts)
            self.cache[key] = _RopeTables(cos, sin, rope)
        return cast(_RopeTables, self.cache[key])[:2]

    def check(self) -> None:
        """Assert the invariants that every backend relies on."""
        assert self.shifts[0] == 0 and len(self.positions) == self.num_tokens
        for index, (start, end, _) in enumerate(self.kv_runs):
            readers: set[int] = set()
            for q_start, q_end, shift, kv_len, causal, _ in self.reads_of(index):
                assert 0 <= q_start < q_end <= self.num_tokens and causal in (0, 1) and kv_len >= 0
                assert kv_len + causal * (q_end - 1 - q_start) <= end - start
                assert 0 <= shift < len(self.shifts)
                assert readers.isdisjoint(range(q_start, q_end)), "a query token reads a range at one position only"
                readers.update(range(q_start, q_end))
        if self.alignment_of is not None:
            alignments: dict[int, int] = {}
            for (q_start, q_end, *_), index in zip(self.reads, self.alignment_of, strict=True):
                for token in range(q_start, q_end) if index else ():
                    assert alignments.setdefault(token, index) == index, "a query token has one alignment"


class _RopeTables(NamedTuple):
    """Rotation tables of all shifts, cached in the metadata."""

    cos: np.ndarray  # (len(shifts), half_dim) float32
    sin: np.ndarray  # (len(shifts), half_dim) float32
    rope: Rope | None  # referenced so that its id(), part of the cache key, is not reused

    def next_step(self) -> "_RopeTables":
        return self


@dataclass(eq=False)
class AttentionCall:
    """Inputs of a backend for one layer's attention over the KV cache."""

    metadata: AttentionMetadata
    query: Float[Tensor, "H N D"]  # rotated to the tokens' positions
    key: Float[Tensor, "G N D"]  # of the batch's tokens, written into their slots
    value: Float[Tensor, "G N D"]
    keys: StoredRows  # of all slots, rotated to their base positions
    values: StoredRows
    scale: float  # factor of the scores
    spec: AttentionSpec
    sinks: Float[Tensor, "H"] | None = None  # extra softmax logit per head, with a value of zero


def build_metadata(slots: list[int], reads: Iterable[KVRead], positions: list[int]) -> AttentionMetadata:
    """Build the attention metadata of a batch; a pure function.

    Reads are grouped by slot range and must be in increasing order of query tokens. Reads of adjacent query
    tokens of the same non-causal range are merged. A range that one token reads at two positions (messages
    of equal content share a KV entry) is listed twice, since each token reads a listed range at one position.
    """
    runs: dict[tuple[int, int], list[KVRead]] = {}  # by first slot and number of the copy
    ends: dict[tuple[int, int], int] = {}  # end slot, exclusive
    for read in reads:
        max_kv_len = read.kv_len + read.causal * (read.q_end - 1 - read.q_start)
        if max_kv_len <= 0:
            continue
        key = read.slot_start, 0
        while key in runs and runs[key][-1].q_end > read.q_start:
            key = read.slot_start, key[1] + 1
        ends[key] = max(ends.get(key, 0), read.slot_start + max_kv_len)
        run = runs.setdefault(key, [])
        # adjacent, with equal shift, kv_len, causal, position and alignment
        if run and not read.causal and run[-1][2:] == (read.q_start, *read[3:]):
            run[-1] = run[-1]._replace(q_end=read.q_end)
        else:
            run.append(read)
    shifts: dict[int, int] = {0: 0}
    alignments: dict[Alignment | None, int] = {None: 0}
    alignment_of: list[int] = []
    kv_runs: list[tuple[int, int, int]] = []
    rows: list[tuple[int, ...]] = []
    for key in sorted(runs):
        kv_runs.append((key[0], ends[key], len(rows)))
        for read in runs[key]:
            shift = shifts.setdefault(read.shift, len(shifts))
            rows.append((read.q_start, read.q_end, shift, read.kv_len, read.causal, read.position))
            alignment_of.append(alignments.setdefault(read.alignment, len(alignments)))
    return AttentionMetadata(
        slots=np.asarray(slots, dtype=np.int64),
        positions=np.asarray(positions, dtype=np.int64),
        kv_runs=np.asarray(kv_runs, dtype=np.int32).reshape(-1, 3),
        reads=np.asarray(rows, dtype=np.int32).reshape(-1, 6),
        shifts=list(shifts),
        alignments=tuple(a for a in alignments if a is not None),
        alignment_of=np.asarray(alignment_of, dtype=np.int32) if len(alignments) > 1 else None,
    )
