"""Attention with PyTorch's CPU flash kernel: one call per slot range, merged by log-sum-exp.

Works for every head dimension and needs no compiler. A plan with one slot range (every ordinary prompt)
is a single kernel call without a merge, and bit-identical to the unmodified model. The kernel does not
support soft caps: those layers are computed densely, range by range.
"""

from typing import NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from . import reference
from .metadata import AttentionMetadata, AttentionSpec
from .rope import rotate

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

MAX_FOLDED_ROWS = 8  # query tokens up to which heads of a group are cheaper as extra rows than as a batch


class _SegmentCall(NamedTuple):
    """Arguments of one kernel call: a slot range and the n query tokens that read its T slots."""

    slot_start: int
    slot_end: int  # exclusive
    rows: slice | Tensor  # query tokens
    cos: Tensor | None  # (n, half_dim) float32; None without rotation
    sin: Tensor | None  # (n, half_dim) float32, negated; None without rotation
    mask: Tensor | None  # (n, T), or (H, n, T) with ALiBi; additive
    causal: bool
    distance: Tensor  # (n, T) int64, query minus key position; (n, 0) for the flash kernel
    fully_masked: Tensor | None  # (n,) bool, tokens without visible keys; None if there are none


def attend(
    metadata: AttentionMetadata,
    query: Float[Tensor, "H N D"],
    keys: Float[Tensor, "S G D"],
    values: Float[Tensor, "S G D"],
    scale: float,
    spec: AttentionSpec,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "N H D"]:
    """Compute `reference.attend` in the dtype of the query with float32 accumulation."""
    calls = _segment_calls(metadata, query.dtype, spec)
    compute = _flash_call if spec.logit_softcap is None else _dense_call
    if (
        len(calls) == 1
        and calls[0].rows == slice(0, metadata.num_tokens)
        and sinks is None
        and spec.sliding_window is None
    ):
        out, _ = compute(calls[0], query, keys, values, scale, spec)
        return out.transpose(0, 1).to(query.dtype)
    heads, rows, width = query.shape
    total = torch.zeros(heads, rows, width, dtype=torch.float32)
    norm = torch.full((heads, rows), float("-inf"))
    for segment in calls:
        out, lse = compute(segment, query[:, segment.rows], keys, values, scale, spec)
        if segment.fully_masked is not None:
            lse = lse.masked_fill(segment.fully_masked, float("-inf"))
        old_norm = norm[:, segment.rows]
        new_norm = torch.logaddexp(old_norm, lse)
        keep = torch.exp(old_norm - new_norm).nan_to_num(0.0)[..., None]
        gain = torch.exp(lse - new_norm).nan_to_num(0.0)[..., None]
        total[:, segment.rows] = total[:, segment.rows] * keep + out.float().nan_to_num(0.0) * gain
        norm[:, segment.rows] = new_norm
    if sinks is not None:
        total = total * torch.sigmoid(norm - sinks.float()[:, None])[..., None]
    return total.to(query.dtype).transpose(0, 1)


def _flash_call(
    call: _SegmentCall, query: Tensor, keys: Tensor, values: Tensor, scale: float, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Return the output (H, n, D) and log-sum-exp (H, n) over one slot range."""
    heads, rows, width = query.shape
    groups = keys.shape[1]
    group_size = heads // groups
    query = _rotate_query(call, query, spec)
    k = keys[call.slot_start : call.slot_end].transpose(0, 1)[None]  # 1 G T D
    v = values[call.slot_start : call.slot_end].transpose(0, 1)[None]
    if rows <= MAX_FOLDED_ROWS and not call.causal:
        q = query.reshape(1, groups, group_size * rows, width)
        out, lse = _flash(q, k, v, attn_mask=_fold_mask(call.mask, groups, group_size), scale=scale)
        return out.reshape(heads, rows, width), lse.reshape(heads, rows)
    q = query.unflatten(0, (groups, group_size)).transpose(0, 1)  # share G n D
    k, v = k.expand(group_size, -1, -1, -1), v.expand(group_size, -1, -1, -1)
    mask = call.mask
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (groups, group_size)).transpose(0, 1)
    out, lse = _flash(q, k, v, is_causal=call.causal, attn_mask=mask, scale=scale)
    return out.transpose(0, 1).reshape(heads, rows, width), lse.transpose(0, 1).reshape(heads, rows)


def _fold_mask(mask: Tensor | None, num_kv_heads: int, num_queries_per_kv: int) -> Tensor | None:
    """Expand the mask to rows that include the query heads of a group."""
    if mask is None:
        return None
    return (
        mask.repeat(num_queries_per_kv, 1)[None, None]
        if mask.dim() == 2
        else mask.unflatten(0, (num_kv_heads, num_queries_per_kv)).flatten(1, 2)[None]
    )


def _dense_call(
    call: _SegmentCall, query: Tensor, keys: Tensor, values: Tensor, scale: float, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Compute `_flash_call` in float32 with all scores in memory."""
    group_size = query.shape[0] // keys.shape[1]
    q = _rotate_query(call, query, spec).float().unflatten(0, (-1, group_size))  # G share n D
    k, v = (x[call.slot_start : call.slot_end].float().transpose(0, 1)[:, None] for x in (keys, values))  # G 1 T D
    score = reference.apply_softcap_alibi((q @ k.transpose(-1, -2) * scale).flatten(0, 1), call.distance, spec)
    if call.causal:
        score = score + torch.full(score.shape[1:], float("-inf")).triu(1)
    elif call.mask is not None:
        score = score + call.mask
    lse = score.logsumexp(-1)
    weights = (score - lse[..., None]).exp().nan_to_num(0.0)
    return (weights.unflatten(0, (-1, group_size)) @ v).flatten(0, 1), lse


def _rotate_query(call: _SegmentCall, query: Tensor, spec: AttentionSpec) -> Tensor:
    if call.cos is None or call.sin is None or spec.rope is None:
        return query
    return rotate(query, call.cos, call.sin, spec.rope.interleaved).to(query.dtype)


def _segment_calls(metadata: AttentionMetadata, dtype: torch.dtype, spec: AttentionSpec) -> list[_SegmentCall]:
    """Return the kernel calls of a plan, cached for all layers with the same spec."""
    key = f"sdpa {dtype} {id(spec)}"
    if key not in metadata.cache:
        calls = (_build_segment_call(metadata, index, dtype, spec) for index in range(len(metadata.kv_runs)))
        metadata.cache[key] = ([segment for segment in calls if segment is not None], spec)
    return cast(tuple[list[_SegmentCall], AttentionSpec], metadata.cache[key])[0]


def _build_segment_call(
    metadata: AttentionMetadata, index: int, dtype: torch.dtype, spec: AttentionSpec
) -> _SegmentCall | None:
    """Build the call of a slot range for all its reads; None if the window masks all of it."""
    lo, hi, _ = (int(x) for x in metadata.kv_runs[index])
    readers = metadata.reads_of(index)
    rows = np.concatenate([np.arange(r[0], r[1]) for r in readers])
    shift = np.concatenate([np.full(r[1] - r[0], r[2]) for r in readers])
    kv_limits = np.concatenate([r[3] + r[4] * np.arange(r[1] - r[0]) for r in readers])
    first = np.concatenate([np.full(r[1] - r[0], r[5]) for r in readers])
    order = np.argsort(rows, kind="stable")
    rows, shift, kv_limits, first = rows[order], shift[order], kv_limits[order], first[order]
    distance = np.zeros((len(rows), 0), dtype=np.int64)
    if not spec.is_plain:
        distance = (metadata.positions[rows] - first)[:, None] - np.arange(hi - lo)
    visible = (
        np.arange(hi - lo)[None, :] < kv_limits[:, None]
        if spec.sliding_window is None
        else _in_window(distance, kv_limits, spec.sliding_window)
    )
    if spec.sliding_window is not None:
        used_rows, used_keys = np.flatnonzero(visible.any(1)), np.flatnonzero(visible.any(0))
        if not len(used_rows):
            return None
        some_rows, some_keys = slice(used_rows[0], used_rows[-1] + 1), slice(used_keys[0], used_keys[-1] + 1)
        rows, shift, visible, distance = (
            rows[some_rows],
            shift[some_rows],
            visible[some_rows, some_keys],
            distance[some_rows, some_keys],
        )
        lo, hi = lo + some_keys.start, lo + some_keys.stop
    count = hi - lo
    consecutive = rows[-1] - rows[0] + 1 == len(rows)
    causal = len(rows) == count > 1 and spec.alibi_slopes is None and np.array_equal(visible, np.tri(count, dtype=bool))
    is_shifted = spec.rope is not None and shift.any()
    cos, sin = metadata.rope_tables(spec.rope)
    return _SegmentCall(
        slot_start=lo,
        slot_end=hi,
        rows=slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else torch.from_numpy(rows),
        cos=torch.from_numpy(cos[shift]) if is_shifted else None,
        sin=torch.from_numpy(-sin[shift]) if is_shifted else None,
        mask=None if causal else _mask(visible, distance, dtype, spec),
        causal=bool(causal),
        distance=torch.from_numpy(distance if spec.logit_softcap is not None else distance[:, :0]),
        fully_masked=None if visible.any(1).all() else torch.from_numpy(~visible.any(1)),
    )


def _in_window(distance: np.ndarray, kv_lens: np.ndarray, window: int) -> np.ndarray:
    return (np.arange(distance.shape[1])[None, :] < kv_lens[:, None]) & (np.abs(distance) < window)


def _mask(visible: np.ndarray, distance: np.ndarray, dtype: torch.dtype, spec: AttentionSpec) -> Tensor | None:
    biased = spec.alibi_slopes is not None and spec.logit_softcap is None  # the dense call adds the bias itself
    if not biased and visible.all():
        return None
    masked = torch.from_numpy(~visible)
    if not biased:
        return torch.zeros(masked.shape, dtype=dtype).masked_fill_(masked, float("-inf"))
    bias = -torch.tensor(spec.alibi_slopes or ())[:, None, None] * torch.from_numpy(distance)
    return bias.masked_fill(masked, float("-inf"))
