"""Attention with PyTorch's FlexAttention, as the paper suggests, for GPUs without Triton kernels.

A query token that attends to messages at several shifts is expanded to one entry per shift; their
softmaxes are merged by log-sum-exp. The slots that are read are gathered layer by layer, since unread
slots may contain NaN, which a mask does not keep out of a sum. FlexAttention is compiled on a GPU; on a
CPU it runs eagerly, with all scores in memory, for tests.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast, no_type_check

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from choreograph.attention.metadata import AttentionCall, AttentionMetadata, AttentionSpec
from choreograph.attention.rope import rotate


class _FlexInputs(NamedTuple):
    """Expanded queries (E entries, one per query token and shift) and C gathered slots.

    `base_query_positions - base_positions` is the distance of query and key, which ALiBi needs.
    """

    query_indices: Tensor  # (E,) int64: query token
    base_query_positions: Tensor  # (E,) int64: query position minus shift
    base_positions: Tensor  # (C,) int64: base position of each slot
    cos: Tensor  # (E, half_dim) float32
    sin: Tensor  # (E, half_dim) float32, negated
    has_shift: bool  # False if no query is rotated
    slots: Tensor  # (C,) int64
    mask: BlockMask
    is_visible: Tensor  # (E,) bool, False for entries without visible keys
    spec: AttentionSpec


def attend(call: AttentionCall) -> Float[Tensor, "N H D"]:
    """Compute `reference.attend` with FlexAttention."""
    query, spec, sinks = call.query, call.spec, call.sinks
    heads, rows, width = query.shape
    if not len(call.metadata.kv_runs):
        return query.new_zeros(rows, heads, width)
    e = _flex_inputs(call.metadata, spec, query.device)
    q = query[:, e.query_indices]
    if e.has_shift and spec.rope is not None:
        q = rotate(q, e.cos, e.sin, spec.rope.interleaved).to(query.dtype)
    k, v = (x[e.slots].transpose(0, 1)[None] for x in (call.keys, call.values))
    options = {"score_mod": _score_mod(e), "block_mask": e.mask, "scale": call.scale, "enable_gqa": True}
    result, aux = _flex(query.device.type)(q[None], k, v, **options, return_aux=AuxRequest(lse=True))
    out, norm = result[0].float(), aux.lse[0].float().masked_fill(~e.is_visible, float("-inf"))
    top = torch.full((heads, rows), float("-inf"), device=query.device)
    top = top.scatter_reduce(1, e.query_indices.expand(heads, -1), norm, "amax")
    if sinks is not None:
        top = torch.maximum(top, sinks.float()[:, None])
    weight = torch.exp(norm - top[:, e.query_indices]).nan_to_num(0.0)
    total = torch.zeros_like(top).index_add(1, e.query_indices, weight)
    if sinks is not None:
        total = total + torch.exp(sinks.float()[:, None] - top)
    mixed = torch.zeros(heads, rows, width, device=query.device)
    mixed = mixed.index_add(1, e.query_indices, out.nan_to_num(0.0) * weight[..., None])
    return (mixed / total.clamp(min=1e-38)[..., None]).to(query.dtype).transpose(0, 1)


@cache
def _flex(device_type: str) -> Callable[..., Any]:
    kernel: Any = flex_attention
    return torch.compile(kernel, dynamic=True) if device_type == "cuda" else kernel


def _score_mod(inputs: _FlexInputs) -> Callable[..., Tensor] | None:
    """Return the score modification for soft cap and ALiBi; None if there is none."""
    softcap, slopes = inputs.spec.logit_softcap, inputs.spec.alibi_slopes
    if softcap is None and slopes is None:
        return None
    slope_tensor = torch.tensor(slopes or (), device=inputs.query_indices.device)

    @no_type_check  # traced by the compiler
    def shaped(score: Tensor, _: Tensor, head: Tensor, entry: Tensor, slot: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return (
            score
            if slopes is None
            else score - slope_tensor[head] * (inputs.base_query_positions[entry] - inputs.base_positions[slot])
        )

    return shaped


def _flex_inputs(metadata: AttentionMetadata, spec: AttentionSpec, device: torch.device) -> _FlexInputs:
    """Return the inputs of a plan, cached for all layers with the same spec."""
    key = f"flex {id(spec)} {device}"
    if key not in metadata.cache:
        metadata.cache[key] = _build_flex_inputs(metadata, spec, device)
    return cast(_FlexInputs, metadata.cache[key])


def _build_flex_inputs(metadata: AttentionMetadata, spec: AttentionSpec, device: torch.device) -> _FlexInputs:
    slots = np.unique(np.concatenate([np.arange(lo, hi) for lo, hi, _ in metadata.kv_runs]))
    slot_positions = np.zeros(len(slots), dtype=np.int64)
    entries: list[tuple[int, int]] = []
    visible: list[np.ndarray] = []
    entries_of: dict[tuple[int, int], list[int]] = {}
    for index, (lo, hi, _) in enumerate(metadata.kv_runs):
        first, count = int(np.searchsorted(slots, lo)), int(hi - lo)
        for row0, row1, shift, limit, step, position in metadata.reads_of(index):
            slot_positions[first : first + count] = position - metadata.shifts[shift] + np.arange(count)
            for row in range(row0, row1):
                run = slice(first, first + limit + step * (row - row0))
                entry = next((e for e in entries_of.get((row, shift), []) if not visible[e][run].any()), None)
                if entry is None:
                    entry = len(entries)
                    entries.append((row, shift))
                    visible.append(np.zeros(len(slots), dtype=bool))
                    entries_of.setdefault((row, shift), []).append(entry)
                visible[entry][run] = True
    rows, shifts = np.asarray(entries, dtype=np.int64).T
    query_positions = metadata.positions[rows] - np.asarray(metadata.shifts)[shifts]
    mask = np.stack(visible)
    if spec.sliding_window is not None:
        mask &= np.abs(query_positions[:, None] - slot_positions) < spec.sliding_window
    visible_mask = torch.from_numpy(mask).to(device)
    cos, sin = (torch.from_numpy(table[shifts]).to(device) for table in metadata.rope_tables(spec.rope))

    @no_type_check
    def visible_to(_: Any, head: Any, entry: Any, slot: Any) -> Any:
        return visible_mask[entry, slot]

    mask_of = create_block_mask(visible_to, None, None, len(visible_mask), len(slots), device=str(device))
    row_tensor, query_tensor, position_tensor, slot_tensor = (
        torch.from_numpy(x).to(device) for x in (rows, query_positions, slot_positions, slots)
    )
    is_shifted = bool(shifts.any())
    return _FlexInputs(
        row_tensor,
        query_tensor,
        position_tensor,
        cos,
        -sin,
        is_shifted,
        slot_tensor,
        mask_of,
        visible_mask.any(1),
        spec,
    )
