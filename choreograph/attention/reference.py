"""Reference attention backend: one dense masked softmax over all slots, in float32."""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .int8_rows import to_float
from .metadata import Alignment, AttentionCall, AttentionSpec
from .rope import rotate


def attend(call: AttentionCall) -> Float[Tensor, "N H D"]:
    """Compute attention of every query token; zero without visible keys."""
    metadata, spec, query, device = call.metadata, call.spec, call.query, call.query.device
    num_heads, num_tokens, head_dim = query.shape
    group_size = num_heads // call.keys.shape[1]
    scores, gathered_values, aligned_reads = [], [], []
    first_read = first_slot = 0
    cos, sin = (torch.from_numpy(table).to(device) for table in metadata.rope_tables(spec.rope))
    for index, (start, end, _) in enumerate(metadata.kv_runs):
        run = (to_float(x[start:end]).float() for x in (call.keys, call.values))
        keys, values = (x.repeat_interleave(group_size, dim=1) for x in run)
        gathered_values.append(values)  # T H D
        run_scores = torch.full((num_heads, num_tokens, end - start), float("-inf"), device=device)
        for number, read in enumerate(metadata.reads_of(index), first_read):
            q_start, q_end, shift, kv_len, causal, position = read
            alignment, scale = metadata.alignment(number), call.scale
            if alignment is not None:
                scale /= alignment.temperature
                aligned_reads.append((slice(q_start, q_end), slice(first_slot, first_slot + end - start), alignment))
            q = query[:, q_start:q_end].float()
            if shift and spec.rope is not None:
                q = rotate(q, cos[shift], -sin[shift], spec.rope.interleaved)
            q_positions = torch.from_numpy(metadata.positions[q_start:q_end]).to(device)
            offset = torch.arange(end - start, device=device)
            distance = q_positions[:, None] - (position + offset)
            score = apply_softcap_alibi(torch.einsum("hnd,thd->hnt", q, keys) * scale, distance, spec)
            kv_lens = kv_len + causal * torch.arange(q_end - q_start, device=device)
            masked = (offset >= kv_lens[:, None]) | outside_window(distance, spec)
            run_scores[:, q_start:q_end] = score.masked_fill(masked, float("-inf"))
        scores.append(run_scores)
        first_read, first_slot = first_read + len(metadata.reads_of(index)), first_slot + end - start
    if not scores:
        return query.new_zeros(num_tokens, num_heads, head_dim)
    all_scores = _align(torch.cat(scores, dim=-1), aligned_reads)
    if call.sinks is not None:
        all_scores = torch.cat([all_scores, call.sinks.float()[:, None, None].expand(-1, num_tokens, 1)], dim=-1)
    all_values = torch.cat(gathered_values)
    weights = all_scores.softmax(dim=-1).nan_to_num(0.0)[..., : len(all_values)]
    return torch.einsum("hnt,thd->nhd", weights, all_values).to(query.dtype)


def _align(
    scores: Float[Tensor, "H N T"], aligned_reads: list[tuple[slice, slice, Alignment]]
) -> Float[Tensor, "H N T"]:
    """Shift the scores of the keys of aligned reads: query tokens, keys and alignment of each."""
    if not aligned_reads:
        return scores
    is_aligned = torch.zeros(scores.shape[1:], dtype=torch.bool, device=scores.device)
    temperatures, log_scales = torch.ones(2, scores.shape[1], 1, device=scores.device)
    for tokens, keys, alignment in aligned_reads:
        is_aligned[tokens, keys] = True
        temperatures[tokens], log_scales[tokens] = alignment.temperature, math.log(alignment.scale)
    return shift_aligned(scores, is_aligned, temperatures, log_scales)


def shift_aligned(
    scores: Float[Tensor, "H N T"], is_aligned: Bool[Tensor, "#N T"], temperature: Any, log_scale: Any
) -> Float[Tensor, "H N T"]:
    """Shift the scores of aligned keys so that together they weigh what `Alignment` says; differentiable.

    Args:
        scores: those of aligned keys are divided by the temperature already; -inf where nothing is visible.
        temperature: a number, or (N, 1).
        log_scale: a number, or (N, 1).
    """
    visible = is_aligned & scores.isfinite()
    has_none = ~visible.any(dim=-1, keepdim=True)
    total = (
        scores.masked_fill(~visible & ~has_none, float("-inf")).masked_fill(has_none, 0.0).logsumexp(-1, keepdim=True)
    )
    return torch.where(visible, scores + (temperature - 1) * total + log_scale, scores)


def apply_softcap_alibi(score: Float[Tensor, "H N T"], distance: Tensor, spec: AttentionSpec) -> Float[Tensor, "H N T"]:
    """Apply soft cap and ALiBi to scores.

    `distance` is (N, T), query position minus key position.
    """
    if spec.logit_softcap is not None:
        score = spec.logit_softcap * torch.tanh(score / spec.logit_softcap)
    if spec.alibi_slopes is not None:
        score = score - torch.tensor(spec.alibi_slopes, device=score.device)[:, None, None] * distance
    return score


def outside_window(distance: Tensor, spec: AttentionSpec) -> Bool[Tensor, "N T"]:
    """Return the mask of keys outside the two-sided sliding window."""
    if spec.sliding_window is None:
        return torch.zeros_like(distance, dtype=torch.bool)
    return distance.abs() >= spec.sliding_window
