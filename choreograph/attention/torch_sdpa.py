"""Attention with PyTorch's `scaled_dot_product_attention`: one call per group of query tokens.

Works on every device and for every head dimension, and needs neither a compiler nor Triton. Query tokens
that read the same slot ranges, usually those of one request, form a group. Their keys and values are
gathered, with the keys rotated by the shift of their range. A group that reads one range at its base
position (every ordinary prompt) needs no copy, and its result is bit-identical to the unmodified model's.
"""

from typing import NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .int8_rows import to_float
from .metadata import AlignedRows, AttentionCall, AttentionMetadata, AttentionSpec
from .rope import rotate

MAX_FOLDED_TOKENS = 8  # query tokens up to which the heads of a group are cheaper as extra rows than as a batch


class _RowGroup(NamedTuple):
    """Group of n query tokens that read the same C slots."""

    rows: slice | Tensor  # (n,) query tokens
    slots: slice | Tensor  # (C,)
    cos: Tensor | None  # (C, half_dim) float32; None if no key is rotated
    sin: Tensor | None  # (C, half_dim) float32; None if no key is rotated
    mask: Tensor | None  # (1, 1, n, C), or (G, H / G, n, C) with ALiBi; added to the scores
    causal: bool  # True: the mask is causal over n = C tokens, and the kernel applies it
    fully_masked: Tensor | None  # (n,) bool, tokens without visible keys; None if there are none


def attend(call: AttentionCall) -> Float[Tensor, "N H D"]:
    """Compute attention like `reference.attend`, in query dtype with float32 accumulation."""
    if (aligned := call.metadata.with_aligned_rows()) is not None:
        return _attend_with_aligned_rows(call, aligned)
    query, spec, sinks = call.query, call.spec, call.sinks
    num_kv_heads, group_size = call.keys.shape[1], len(query) // call.keys.shape[1]
    needs_mask = sinks is not None or spec.logit_softcap is not None
    out = torch.zeros_like(query)
    for group in _row_groups(call.metadata, spec, query, num_kv_heads, needs_mask):
        q = query[:, group.rows].unflatten(0, (num_kv_heads, group_size))  # G H/G n D
        k, v = _keys_values(call, group)
        mask, num_rows = group.mask, q.shape[2]
        if sinks is not None and mask is not None:  # a key and value of zeros, with the sink as its bias
            k, v = (torch.cat([x, torch.zeros_like(x[:, :, :1])], dim=2) for x in (k, v))
            bias = sinks.to(mask.dtype).view(num_kv_heads, group_size, 1, 1).expand(-1, -1, num_rows, 1)
            mask = torch.cat([mask.expand(num_kv_heads, group_size, -1, -1), bias], dim=-1)
        if num_rows <= MAX_FOLDED_TOKENS and not group.causal:
            q = q.flatten(1, 2)[:, None]
            mask = None if mask is None else mask.expand(-1, group_size, -1, -1).flatten(1, 2)[:, None]
        if spec.logit_softcap is None or mask is None:
            k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
            result = scaled_dot_product_attention(q, k, v, mask, is_causal=group.causal, scale=call.scale)
        else:
            result = (_scores(q, k, call) + mask).softmax(-1) @ v.float()
        result = result.reshape(len(query), num_rows, -1)
        if group.fully_masked is not None:
            result = result.masked_fill(group.fully_masked[:, None], 0.0)
        out[:, group.rows] = result.to(query.dtype)
    return out.transpose(0, 1)


def _attend_with_aligned_rows(call: AttentionCall, aligned: AlignedRows) -> Float[Tensor, "N H D"]:
    """Compute aligned attention in float32, with materialized scores."""
    num_tokens, device, num_kv_heads = call.metadata.num_tokens, call.query.device, call.keys.shape[1]
    token_of = torch.from_numpy(aligned.token_of).long().to(device)
    temperatures, log_scales = (
        torch.from_numpy(x).to(device)[:, None] for x in (aligned.temperatures, aligned.log_scales)
    )
    query = torch.cat([call.query.float(), call.query[:, token_of].float() / temperatures], dim=1)
    out = torch.zeros(query.shape[1], len(query), query.shape[2], device=device)
    lse = torch.full(out.shape[:2], float("-inf"), device=device)
    for group in _row_groups(aligned.metadata, call.spec, query, num_kv_heads, True):
        assert group.mask is not None, "a mask was asked for"
        q = query[:, group.rows].unflatten(0, (num_kv_heads, -1))  # G H/G n D
        k, v = _keys_values(call, group)
        score = _scores(q, k, call) + group.mask
        out[group.rows] = (score.softmax(-1).nan_to_num(0.0) @ v.float()).flatten(0, 1).transpose(0, 1)
        lse[group.rows] = score.logsumexp(-1).flatten(0, 1).T
    logits = torch.stack([lse[:num_tokens], torch.full_like(lse[:num_tokens], float("-inf"))])
    logits[1, token_of] = lse[num_tokens:] * temperatures + log_scales
    if call.sinks is not None:
        logits = torch.cat([logits, call.sinks.float().expand_as(logits[:1])])
    weights = logits.softmax(0).nan_to_num(0.0)[:, :, :, None]
    result = weights[0] * out[:num_tokens]
    result[token_of] += weights[1, token_of] * out[num_tokens:]
    return result.to(call.query.dtype)


def _keys_values(call: AttentionCall, group: _RowGroup) -> tuple[Tensor, Tensor]:
    """Return the keys, rotated to their positions, and values that a group reads, (G, 1, C, D) each."""
    rows = (to_float(_take(x, group.slots)) for x in (call.keys, call.values))
    k, v = (x.transpose(0, 1)[:, None] for x in rows)
    if group.cos is not None and group.sin is not None and call.spec.rope is not None:
        k = rotate(k, group.cos, group.sin, call.spec.rope.interleaved)
    return k.to(call.query.dtype), v.to(call.query.dtype)


def _scores(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """Return scores in float32, soft cap included."""
    scores, cap = q.float() @ k.float().mT * call.scale, call.spec.logit_softcap
    return scores if cap is None else cap * torch.tanh(scores / cap)


def _row_groups(
    metadata: AttentionMetadata, spec: AttentionSpec, query: Tensor, num_kv_heads: int, needs_mask: bool
) -> list[_RowGroup]:
    """Return the groups of query tokens, cached per attention spec."""
    key = f"sdpa {id(spec)} {query.device} {query.dtype} {needs_mask}"
    if key not in metadata.cache:
        tokens = np.arange(metadata.num_tokens)[:, None]
        is_reader = (metadata.reads[:, 0] <= tokens) & (tokens < metadata.reads[:, 1])  # (N, E)
        members, group_of_token = np.unique(is_reader, axis=0, return_inverse=True)
        groups = []
        for index, is_member in enumerate(members):
            rows, reads = np.flatnonzero(group_of_token.ravel() == index), np.flatnonzero(is_member)
            group = _build_row_group(metadata, spec, query, num_kv_heads, needs_mask, rows, reads)
            groups += [] if group is None else [group]
        metadata.cache[key] = groups, spec
    return cast(tuple[list[_RowGroup], AttentionSpec], metadata.cache[key])[0]


def _build_row_group(
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    query: Tensor,
    num_kv_heads: int,
    needs_mask: bool,
    rows: np.ndarray,
    read_indices: np.ndarray,
) -> _RowGroup | None:
    """Build the group of tokens `rows`; None if no slot is visible."""
    device = query.device
    q_start, _, shift, kv_len, causal, position = metadata.reads[read_indices].T
    run = np.searchsorted(metadata.kv_runs[:, 2], read_indices, side="right") - 1
    kv_lens = kv_len + causal * (rows[:, None] - q_start)  # (n, reads)
    max_kv_lens = kv_lens.max(0, initial=0)
    read = np.repeat(np.arange(len(read_indices)), max_kv_lens)  # (C,) as below: read of every gathered slot
    offset = np.arange(len(read)) - (np.cumsum(max_kv_lens) - max_kv_lens)[read]  # within the slot range
    distance = metadata.positions[rows, None] - (position[read] + offset)  # (n, C)
    visible = offset < kv_lens[:, read]
    if spec.sliding_window is not None:
        visible &= np.abs(distance) < spec.sliding_window
    is_used = visible.any(0)  # other slots may contain NaN
    if not is_used.any():
        return None
    read, visible, distance = read[is_used], visible[:, is_used], distance[:, is_used]
    slots = metadata.kv_runs[run[read], 0] + offset[is_used]
    is_causal = not needs_mask and spec.alibi_slopes is None and len(rows) == len(slots) > 1
    is_causal = is_causal and np.array_equal(visible, np.tri(len(rows), dtype=bool))
    mask = None
    if needs_mask or spec.alibi_slopes is not None or not (is_causal or visible.all()):
        bias = torch.zeros(1, 1, *visible.shape)
        if spec.alibi_slopes is not None:
            slopes = torch.tensor(spec.alibi_slopes).view(num_kv_heads, -1, 1, 1)
            bias = -slopes * torch.from_numpy(distance)
        # the CPU kernel takes biases in float32 for every dtype of the query
        dtype = torch.float32 if device.type == "cpu" else query.dtype
        mask = bias.masked_fill(torch.from_numpy(~visible), float("-inf")).to(dtype).to(device)
    cos, sin = metadata.rope_tables(spec.rope)
    is_shifted = spec.rope is not None and shift[read].any()
    is_blind = ~visible.any(1)
    return _RowGroup(
        rows=_as_index(rows, device),
        slots=_as_index(slots, device),
        cos=torch.from_numpy(cos[shift[read]]).to(device) if is_shifted else None,
        sin=torch.from_numpy(sin[shift[read]]).to(device) if is_shifted else None,
        mask=mask,
        causal=is_causal,
        fully_masked=torch.from_numpy(is_blind).to(device) if is_blind.any() else None,
    )


def _take(x: Tensor, index: slice | Tensor) -> Tensor:
    # index_select is twice as fast as indexing on a CPU
    return x[index] if isinstance(index, slice) else x.index_select(0, index)


def _as_index(indices: np.ndarray, device: torch.device) -> slice | Tensor:
    """Return a slice if indices are consecutive, since it needs no copy."""
    if (np.diff(indices) == 1).all():
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return torch.from_numpy(indices).to(device)
