"""Placed attention by PyTorch's `scaled_dot_product_attention` on any device: what is seen is copied together.

Every run is copied once for each shift at which somebody sees it, and its keys are turned to that place; then one
call and a mask do the rest. It needs neither a compiler nor Triton, and shows what virtual placement saves. Capped
scores, which that function does not know, are computed densely.
"""

from typing import NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import reference
from .kind import Kind
from .plan import Plan
from .rope import turn


class _Columns(NamedTuple):
    """slots: what is copied. cos, sin: what turns each key. mask: (N, C) what each row sees; or (H, N, C), added to the
    scores. blind: (N,) rows that see nothing."""

    slots: Tensor
    cos: Tensor
    sin: Tensor
    moved: bool
    mask: Tensor
    blind: Tensor


def attend(
    plan: Plan,
    query: Float[Tensor, "H N D"],
    keys: Float[Tensor, "S G D"],
    values: Float[Tensor, "S G D"],
    scale: float,
    kind: Kind,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "N H D"]:
    """As `reference.attend`."""
    if kind.softcap is not None:
        return reference.attend(plan, query, keys, values, scale, kind, sinks)
    seen = _columns(plan, kind, query)
    k, v = keys[seen.slots].transpose(0, 1), values[seen.slots].transpose(0, 1)
    if seen.moved and kind.rotary is not None:
        k = turn(k, seen.cos, seen.sin, kind.rotary.interleaved).to(keys.dtype)
    mask = seen.mask
    if sinks is not None:  # a key of zeros whose score is the sink, with a value of zeros
        k, v = (torch.cat([x, x.new_zeros(x.shape[0], 1, x.shape[2])], 1) for x in (k, v))
        mask = _added(mask, query.dtype).expand(len(query), -1, -1)
        mask = torch.cat([mask, sinks.to(query.dtype)[:, None, None].expand(-1, mask.shape[1], 1)], -1)
    out = scaled_dot_product_attention(query[None], k[None], v[None], mask[None], scale=scale, enable_gqa=True)[0]
    return out.masked_fill(seen.blind[:, None], 0.0).transpose(0, 1)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))


def _columns(plan: Plan, kind: Kind, query: Tensor) -> _Columns:
    """Worked out once for all layers of a kind."""
    key = f"gathered {id(kind)} {query.device} {query.dtype}"
    if key not in plan.memo:
        plan.memo[key] = _make_columns(plan, kind, query.device, query.dtype)
    return cast(_Columns, plan.memo[key])


def _make_columns(plan: Plan, kind: Kind, device: torch.device, dtype: torch.dtype) -> _Columns:
    blocks: dict[tuple[int, int, int], int] = {}
    slots, shifts, homes = [], [], []
    count = 0
    reads = [(i, *map(int, read)) for i in range(len(plan.segments)) for read in plan.segment_readers(i)]
    for index, _, _, shift, _, _, position in reads:
        lo, hi, _ = (int(x) for x in plan.segments[index])
        if blocks.setdefault((index, shift, position), count) == count:
            slots.append(np.arange(lo, hi))
            shifts.append(np.full(hi - lo, shift))
            homes.append(position + np.arange(hi - lo))
            count += hi - lo
    mask = np.zeros((plan.rows, count), dtype=bool)
    for index, row0, row1, shift, limit, step, position in reads:
        first = blocks[index, shift, position]
        for row in range(row0, row1):
            mask[row, first : first + limit + step * (row - row0)] = True
    nothing = np.zeros(0, dtype=np.int64)
    slot, turned, home = (np.concatenate(parts) if parts else nothing for parts in (slots, shifts, homes))
    distance = plan.positions[:, None] - home
    if kind.window is not None:
        mask &= np.abs(distance) < kind.window
    used = mask.any(0)  # what nobody sees may hold anything
    mask, distance = mask[:, used], distance[:, used]
    cos, sin = (torch.from_numpy(table[turned[used]]).to(device) for table in plan.turns(kind.rotary))
    seen = torch.from_numpy(mask).to(device)
    if kind.slopes is not None:
        slopes = torch.tensor(kind.slopes)[:, None, None]
        bias = -slopes * torch.from_numpy(distance)
        seen = bias.masked_fill(torch.from_numpy(~mask), float("-inf")).to(dtype).to(device)
    blind = torch.from_numpy(~mask.any(1)).to(device)
    return _Columns(torch.from_numpy(slot[used]).to(device), cos, sin, bool(turned[used].any()), seen, blind)
