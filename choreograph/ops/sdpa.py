"""Placed attention through PyTorch's own CPU flash kernel: one call per segment, merged by log-sum-exp.

Works for every head size and needs no compiler. A plan of one segment (every ordinary prompt) is a single
kernel call with nothing merged, and gives the bits that a plain model gives.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from .plan import Plan
from .rope import turn

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FOLDED_ROWS = 8  # up to here, query heads of a group are cheaper as extra rows than as a batch


class _Pass(NamedTuple):
    lo: int
    hi: int
    rows: slice | Tensor
    cos: Tensor | None  # (rows, half), None where nothing moves
    sin: Tensor | None
    mask: Tensor | None  # (rows, hi - lo), additive
    causal: bool


def attend(
    plan: Plan,
    query: Float[Tensor, "H N D"],
    keys: Float[Tensor, "S G D"],
    values: Float[Tensor, "S G D"],
    scale: float,
) -> Float[Tensor, "N H D"]:
    """As `reference.attend`, in the type of the query with float32 accumulation."""
    passes = _passes(plan, query.dtype)
    if len(passes) == 1 and passes[0].rows == slice(0, plan.rows):
        out, _ = _flash_pass(passes[0], query, keys, values, scale, plan)
        return out.transpose(0, 1)
    heads, rows, width = query.shape
    total = torch.zeros(heads, rows, width, dtype=torch.float32)
    norm = torch.full((heads, rows), float("-inf"))
    for one in passes:
        out, lse = _flash_pass(one, query[:, one.rows], keys, values, scale, plan)
        before = norm[:, one.rows]
        after = torch.logaddexp(before, lse)
        keep = torch.exp(before - after).nan_to_num(0.0)[..., None]
        add = torch.exp(lse - after).nan_to_num(0.0)[..., None]
        total[:, one.rows] = total[:, one.rows] * keep + out.float().nan_to_num(0.0) * add
        norm[:, one.rows] = after
    return total.to(query.dtype).transpose(0, 1)


def _flash_pass(
    one: _Pass, query: Tensor, keys: Tensor, values: Tensor, scale: float, plan: Plan
) -> tuple[Tensor, Tensor]:
    """(H, n, D) attended and (H, n) log-sum-exp of one run of slots."""
    heads, rows, width = query.shape
    groups = keys.shape[1]
    share = heads // groups
    if one.cos is not None and one.sin is not None and plan.rotary is not None:
        query = turn(query, one.cos, one.sin, plan.rotary.interleaved).to(query.dtype)
    k = keys[one.lo : one.hi].transpose(0, 1)[None]  # 1 G T D
    v = values[one.lo : one.hi].transpose(0, 1)[None]
    if rows <= FOLDED_ROWS and not one.causal:
        q = query.reshape(1, groups, share * rows, width)
        mask = None if one.mask is None else one.mask.repeat(share, 1)[None, None]
        out, lse = _flash(q, k, v, attn_mask=mask, scale=scale)
        return out.reshape(heads, rows, width), lse.reshape(heads, rows)
    q = query.unflatten(0, (groups, share)).transpose(0, 1)  # share G n D
    k, v = k.expand(share, -1, -1, -1), v.expand(share, -1, -1, -1)
    out, lse = _flash(q, k, v, is_causal=one.causal, attn_mask=one.mask, scale=scale)
    return out.transpose(0, 1).reshape(heads, rows, width), lse.transpose(0, 1).reshape(heads, rows)


def _passes(plan: Plan, dtype: torch.dtype) -> list[_Pass]:
    """The plan as kernel calls, worked out once for all layers."""
    key = f"sdpa {dtype}"
    if key not in plan.memo:
        plan.memo[key] = [_one_pass(plan, index, dtype) for index in range(len(plan.segments))]
    return plan.memo[key]  # type: ignore[return-value]


def _one_pass(plan: Plan, index: int, dtype: torch.dtype) -> _Pass:
    lo, hi, _ = (int(x) for x in plan.segments[index])
    readers = plan.segment_readers(index)
    rows = np.concatenate([np.arange(r[0], r[1]) for r in readers])
    shift = np.concatenate([np.full(r[1] - r[0], r[2]) for r in readers])
    seen = np.concatenate([r[3] + r[4] * np.arange(r[1] - r[0]) for r in readers])
    order = np.argsort(rows, kind="stable")
    rows, shift, seen = rows[order], shift[order], seen[order]
    count = hi - lo
    consecutive = rows[-1] - rows[0] + 1 == len(rows)
    causal = len(rows) == count > 1 and np.array_equal(seen, np.arange(1, count + 1))
    mask = None
    if not causal and not (seen == count).all():
        hidden = torch.from_numpy(np.arange(count)[None, :] >= seen[:, None])
        mask = torch.zeros(len(rows), count, dtype=dtype).masked_fill_(hidden, float("-inf"))
    moved = plan.rotary is not None and shift.any()
    return _Pass(
        lo=lo,
        hi=hi,
        rows=slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else torch.from_numpy(rows),
        cos=torch.from_numpy(plan.cos[shift]) if moved else None,
        sin=torch.from_numpy(-plan.sin[shift]) if moved else None,
        mask=mask,
        causal=bool(causal),
    )
