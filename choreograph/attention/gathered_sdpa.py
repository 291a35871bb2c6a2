"""Attention with `scaled_dot_product_attention` on any device, over gathered keys and values.

Every slot range is copied once per distinct shift, with its keys rotated by that shift; one call with a
mask does the rest. Needs neither a compiler nor Triton, and serves as the baseline without virtual
placement. The function does not support soft caps: those layers use the reference backend.
"""

from typing import NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import reference
from .metadata import AttentionMetadata, AttentionSpec
from .rope import rotate


class _GatheredKV(NamedTuple):
    """Indices and mask of the C gathered keys and values."""

    slots: Tensor  # (C,) int64
    cos: Tensor  # (C, half_dim) float32
    sin: Tensor  # (C, half_dim) float32
    has_shift: bool  # False if no key is rotated
    mask: Tensor  # (N, C) bool visible keys, or (H, N, C) additive with ALiBi
    fully_masked: Tensor  # (N,) bool, query tokens without visible keys


def attend(
    metadata: AttentionMetadata,
    query: Float[Tensor, "H N D"],
    keys: Float[Tensor, "S G D"],
    values: Float[Tensor, "S G D"],
    scale: float,
    spec: AttentionSpec,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "N H D"]:
    """Compute `reference.attend` on gathered keys and values."""
    if spec.logit_softcap is not None:
        return reference.attend(metadata, query, keys, values, scale, spec, sinks)
    visible = _gathered_kv(metadata, spec, query)
    k, v = keys[visible.slots].transpose(0, 1), values[visible.slots].transpose(0, 1)
    if visible.has_shift and spec.rope is not None:
        k = rotate(k, visible.cos, visible.sin, spec.rope.interleaved).to(keys.dtype)
    mask = visible.mask
    if sinks is not None:  # a zero key with the sink as its bias, and a zero value
        k, v = (torch.cat([x, x.new_zeros(x.shape[0], 1, x.shape[2])], 1) for x in (k, v))
        mask = _additive_mask(mask, query.dtype).expand(len(query), -1, -1)
        mask = torch.cat([mask, sinks.to(query.dtype)[:, None, None].expand(-1, mask.shape[1], 1)], -1)
    out = scaled_dot_product_attention(query[None], k[None], v[None], mask[None], scale=scale, enable_gqa=True)[0]
    return out.masked_fill(visible.fully_masked[:, None], 0.0).transpose(0, 1)


def _additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to an additive one."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))


def _gathered_kv(metadata: AttentionMetadata, spec: AttentionSpec, query: Tensor) -> _GatheredKV:
    """Return the gather indices of a plan, cached for all layers with the same spec."""
    key = f"gathered {id(spec)} {query.device} {query.dtype}"
    if key not in metadata.cache:
        metadata.cache[key] = _build_gathered_kv(metadata, spec, query.device, query.dtype)
    return cast(_GatheredKV, metadata.cache[key])


def _build_gathered_kv(
    metadata: AttentionMetadata, spec: AttentionSpec, device: torch.device, dtype: torch.dtype
) -> _GatheredKV:
    blocks: dict[tuple[int, int, int], int] = {}
    slots, shifts, positions = [], [], []
    count = 0
    reads = [(i, *map(int, read)) for i in range(len(metadata.kv_runs)) for read in metadata.reads_of(i)]
    for index, _, _, shift, _, _, position in reads:
        lo, hi, _ = (int(x) for x in metadata.kv_runs[index])
        if blocks.setdefault((index, shift, position), count) == count:
            slots.append(np.arange(lo, hi))
            shifts.append(np.full(hi - lo, shift))
            positions.append(position + np.arange(hi - lo))
            count += hi - lo
    mask = np.zeros((metadata.num_tokens, count), dtype=bool)
    for index, row0, row1, shift, limit, step, position in reads:
        first = blocks[index, shift, position]
        for row in range(row0, row1):
            mask[row, first : first + limit + step * (row - row0)] = True
    empty = np.zeros(0, dtype=np.int64)
    slot, key_shifts, key_positions = (
        np.concatenate(parts) if parts else empty for parts in (slots, shifts, positions)
    )
    distance = metadata.positions[:, None] - key_positions
    if spec.sliding_window is not None:
        mask &= np.abs(distance) < spec.sliding_window
    used = mask.any(0)  # unread slots may contain NaN
    mask, distance = mask[:, used], distance[:, used]
    cos, sin = (torch.from_numpy(table[key_shifts[used]]).to(device) for table in metadata.rope_tables(spec.rope))
    visible = torch.from_numpy(mask).to(device)
    if spec.alibi_slopes is not None:
        slopes = torch.tensor(spec.alibi_slopes)[:, None, None]
        bias = -slopes * torch.from_numpy(distance)
        visible = bias.masked_fill(torch.from_numpy(~mask), float("-inf")).to(dtype).to(device)
    blind = torch.from_numpy(~mask.any(1)).to(device)
    return _GatheredKV(torch.from_numpy(slot[used]).to(device), cos, sin, bool(key_shifts[used].any()), visible, blind)
