"""The slow oracle of the backends: one dense masked softmax over every slot the plan names, in float32."""

import torch
from jaxtyping import Float
from torch import Tensor

from .plan import Plan
from .rope import turn


def attend(
    plan: Plan,
    query: Float[Tensor, "H N D"],
    keys: Float[Tensor, "S G D"],
    values: Float[Tensor, "S G D"],
    scale: float,
) -> Float[Tensor, "N H D"]:
    """Attention of every row over what its plan shows it; rows that see nothing give zeros."""
    heads, rows, _ = query.shape
    group = heads // keys.shape[1]
    scores, gathered = [], []
    cos, sin = torch.from_numpy(plan.cos), torch.from_numpy(plan.sin)
    for index, (lo, hi, _) in enumerate(plan.segments):
        k = keys[lo:hi].float().repeat_interleave(group, dim=1)  # T H D
        gathered.append(values[lo:hi].float().repeat_interleave(group, dim=1))
        part = torch.full((heads, rows, hi - lo), float("-inf"))
        for row0, row1, shift, limit, step, _ in plan.segment_readers(index):
            q = query[:, row0:row1].float()
            if shift and plan.rotary is not None:
                q = turn(q, cos[shift], -sin[shift], plan.rotary.interleaved)
            score = torch.einsum("hnd,thd->hnt", q, k) * scale
            seen = limit + step * torch.arange(row1 - row0)
            hidden = torch.arange(hi - lo)[None, :] >= seen[:, None]
            part[:, row0:row1] = score.masked_fill(hidden, float("-inf"))
        scores.append(part)
    if not scores:
        return query.new_zeros(rows, heads, query.shape[-1])
    weights = torch.cat(scores, dim=-1).softmax(dim=-1).nan_to_num(0.0)
    return torch.einsum("hnt,thd->nhd", weights, torch.cat(gathered)).to(query.dtype)
