"""Reference backend: one dense masked softmax over all slots of the plan, in float32."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .metadata import AttentionMetadata, AttentionSpec
from .rope import rotate


def attend(
    metadata: AttentionMetadata,
    query: Float[Tensor, "H N D"],
    keys: Float[Tensor, "S G D"],
    values: Float[Tensor, "S G D"],
    scale: float,
    spec: AttentionSpec,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "N H D"]:
    """Compute the attention of every query token; tokens without visible keys give zeros.

    Args:
        metadata: Attention plan of the batch.
        query: Queries, rotated to their positions.
        keys: Keys of all slots, rotated to their base positions.
        values: Values of all slots.
        scale: Factor of the scores.
        spec: Attention variant of the layer.
        sinks: Extra softmax logit per head, with a value of zero.
    """
    heads, rows, _ = query.shape
    group = heads // keys.shape[1]
    scores, gathered = [], []
    device = query.device
    cos, sin = (torch.from_numpy(table).to(device) for table in metadata.rope_tables(spec.rope))
    for index, (lo, hi, _) in enumerate(metadata.kv_runs):
        k = keys[lo:hi].float().repeat_interleave(group, dim=1)  # T H D
        gathered.append(values[lo:hi].float().repeat_interleave(group, dim=1))
        part = torch.full((heads, rows, hi - lo), float("-inf"), device=device)
        for row0, row1, shift, limit, step, position in metadata.reads_of(index):
            q = query[:, row0:row1].float()
            if shift and spec.rope is not None:
                q = rotate(q, cos[shift], -sin[shift], spec.rope.interleaved)
            score = torch.einsum("hnd,thd->hnt", q, k) * scale
            q_positions, slot = (
                torch.from_numpy(metadata.positions[row0:row1]).to(device),
                torch.arange(hi - lo, device=device),
            )
            distance = q_positions[:, None] - (position + slot)
            score = apply_softcap_alibi(score, distance, spec)
            kv_lens = limit + step * torch.arange(row1 - row0, device=device)
            masked = (slot[None, :] >= kv_lens[:, None]) | outside_window(distance, spec)
            part[:, row0:row1] = score.masked_fill(masked, float("-inf"))
        scores.append(part)
    if not scores:
        return query.new_zeros(rows, heads, query.shape[-1])
    all_scores = torch.cat(scores, dim=-1)
    if sinks is not None:
        all_scores = torch.cat([all_scores, sinks.float()[:, None, None].expand(-1, rows, 1)], dim=-1)
    weights = all_scores.softmax(dim=-1).nan_to_num(0.0)
    weights = weights if sinks is None else weights[..., :-1]
    return torch.einsum("hnt,thd->nhd", weights, torch.cat(gathered)).to(query.dtype)


def apply_softcap_alibi(score: Float[Tensor, "H N T"], distance: Tensor, spec: AttentionSpec) -> Float[Tensor, "H N T"]:
    """Apply soft cap and ALiBi to scores. distance: (N, T), query minus key position."""
    if spec.logit_softcap is not None:
        score = spec.logit_softcap * torch.tanh(score / spec.logit_softcap)
    if spec.alibi_slopes is not None:
        score = score - torch.tensor(spec.alibi_slopes, device=score.device)[:, None, None] * distance
    return score


def outside_window(distance: Tensor, spec: AttentionSpec) -> Bool[Tensor, "N T"]:
    """Return the mask of keys outside the sliding window, before or after the query token."""
    return (
        torch.zeros_like(distance, dtype=torch.bool)
        if spec.sliding_window is None
        else distance.abs() >= spec.sliding_window
    )
