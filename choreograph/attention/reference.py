"""Reference attention backend: one dense masked softmax over all slots, in float32."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .int8_rows import to_float
from .metadata import AttentionCall, AttentionSpec
from .rope import rotate


def attend(call: AttentionCall) -> Float[Tensor, "N H D"]:
    """Compute attention of every query token; zero without visible keys."""
    metadata, spec, query, device = call.metadata, call.spec, call.query, call.query.device
    num_heads, num_tokens, head_dim = query.shape
    group_size = num_heads // call.keys.shape[1]
    scores, gathered_values = [], []
    cos, sin = (torch.from_numpy(table).to(device) for table in metadata.rope_tables(spec.rope))
    for index, (start, end, _) in enumerate(metadata.kv_runs):
        run = (to_float(x[start:end]).float() for x in (call.keys, call.values))
        keys, values = (x.repeat_interleave(group_size, dim=1) for x in run)
        gathered_values.append(values)  # T H D
        run_scores = torch.full((num_heads, num_tokens, end - start), float("-inf"), device=device)
        for q_start, q_end, shift, kv_len, causal, position in metadata.reads_of(index):
            q = query[:, q_start:q_end].float()
            if shift and spec.rope is not None:
                q = rotate(q, cos[shift], -sin[shift], spec.rope.interleaved)
            q_positions = torch.from_numpy(metadata.positions[q_start:q_end]).to(device)
            offset = torch.arange(end - start, device=device)
            distance = q_positions[:, None] - (position + offset)
            score = apply_softcap_alibi(torch.einsum("hnd,thd->hnt", q, keys) * call.scale, distance, spec)
            kv_lens = kv_len + causal * torch.arange(q_end - q_start, device=device)
            masked = (offset >= kv_lens[:, None]) | outside_window(distance, spec)
            run_scores[:, q_start:q_end] = score.masked_fill(masked, float("-inf"))
        scores.append(run_scores)
    if not scores:
        return query.new_zeros(num_tokens, num_heads, head_dim)
    if call.sinks is not None:
        scores.append(call.sinks.float()[:, None, None].expand(-1, num_tokens, 1))
    all_values = torch.cat(gathered_values)
    weights = torch.cat(scores, dim=-1).softmax(dim=-1).nan_to_num(0.0)[..., : len(all_values)]
    return torch.einsum("hnt,thd->nhd", weights, all_values).to(query.dtype)


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
