"""The slow oracle of the backends: one dense masked softmax over every slot the plan names, in float32."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .kind import Kind
from .plan import Plan
from .rope import turn


def attend(
    plan: Plan,
    query: Float[Tensor, "H N D"],
    keys: Float[Tensor, "S G D"],
    values: Float[Tensor, "S G D"],
    scale: float,
    kind: Kind,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "N H D"]:
    """Attention of every row over what its plan and its layer's kind show it; rows that see nothing give zeros.
    sinks: a score of every head for nothing at all, which takes its share of the softmax."""
    heads, rows, _ = query.shape
    group = heads // keys.shape[1]
    scores, gathered = [], []
    device = query.device
    cos, sin = (torch.from_numpy(table).to(device) for table in plan.turns(kind.rotary))
    for index, (lo, hi, _) in enumerate(plan.segments):
        k = keys[lo:hi].float().repeat_interleave(group, dim=1)  # T H D
        gathered.append(values[lo:hi].float().repeat_interleave(group, dim=1))
        part = torch.full((heads, rows, hi - lo), float("-inf"), device=device)
        for row0, row1, shift, limit, step, position in plan.segment_readers(index):
            q = query[:, row0:row1].float()
            if shift and kind.rotary is not None:
                q = turn(q, cos[shift], -sin[shift], kind.rotary.interleaved)
            score = torch.einsum("hnd,thd->hnt", q, k) * scale
            stands, slot = torch.from_numpy(plan.positions[row0:row1]).to(device), torch.arange(hi - lo, device=device)
            distance = stands[:, None] - (position + slot)
            score = shaped(score, distance, kind)
            seen = limit + step * torch.arange(row1 - row0, device=device)
            hidden = (slot[None, :] >= seen[:, None]) | beyond(distance, kind)
            part[:, row0:row1] = score.masked_fill(hidden, float("-inf"))
        scores.append(part)
    if not scores:
        return query.new_zeros(rows, heads, query.shape[-1])
    every = torch.cat(scores, dim=-1)
    if sinks is not None:
        every = torch.cat([every, sinks.float()[:, None, None].expand(-1, rows, 1)], dim=-1)
    weights = every.softmax(dim=-1).nan_to_num(0.0)
    weights = weights if sinks is None else weights[..., :-1]
    return torch.einsum("hnt,thd->nhd", weights, torch.cat(gathered)).to(query.dtype)


def shaped(score: Float[Tensor, "H N T"], distance: Tensor, kind: Kind) -> Float[Tensor, "H N T"]:
    """Scores as a layer of this kind makes them. distance: (N, T), logical position of the row minus the key's."""
    if kind.softcap is not None:
        score = kind.softcap * torch.tanh(score / kind.softcap)
    if kind.slopes is not None:
        score = score - torch.tensor(kind.slopes, device=score.device)[:, None, None] * distance
    return score


def beyond(distance: Tensor, kind: Kind) -> Bool[Tensor, "N T"]:
    """What a window hides: keys that are too far away, before the row or behind it."""
    return torch.zeros_like(distance, dtype=torch.bool) if kind.window is None else distance.abs() >= kind.window
