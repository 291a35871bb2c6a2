"""Placed attention through PyTorch's own CPU flash kernel: one call per segment, merged by log-sum-exp.

Works for every head size and needs no compiler. A plan of one segment (every ordinary prompt) is a single
kernel call with nothing merged, and gives the bits that a plain model gives. Scores that are capped are beyond that
kernel: those layers are computed densely, segment by segment.
"""

from typing import NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from . import reference
from .kind import Kind
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
    mask: Tensor | None  # (rows, hi - lo), or (H, rows, hi - lo) where heads differ; additive
    causal: bool
    distance: Tensor  # (rows, hi - lo), of the rows from the keys; empty for the flash kernel
    blind: Tensor | None  # (rows,), those that see nothing here; None where all see something


def attend(
    plan: Plan,
    query: Float[Tensor, "H N D"],
    keys: Float[Tensor, "S G D"],
    values: Float[Tensor, "S G D"],
    scale: float,
    kind: Kind,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "N H D"]:
    """As `reference.attend`, in the type of the query with float32 accumulation."""
    passes = _passes(plan, query.dtype, kind)
    compute = _flash_pass if kind.softcap is None else _dense_pass
    if len(passes) == 1 and passes[0].rows == slice(0, plan.rows) and sinks is None and kind.window is None:
        out, _ = compute(passes[0], query, keys, values, scale, kind)
        return out.transpose(0, 1).to(query.dtype)
    heads, rows, width = query.shape
    total = torch.zeros(heads, rows, width, dtype=torch.float32)
    norm = torch.full((heads, rows), float("-inf"))
    for one in passes:
        out, lse = compute(one, query[:, one.rows], keys, values, scale, kind)
        if one.blind is not None:
            lse = lse.masked_fill(one.blind, float("-inf"))
        before = norm[:, one.rows]
        after = torch.logaddexp(before, lse)
        keep = torch.exp(before - after).nan_to_num(0.0)[..., None]
        add = torch.exp(lse - after).nan_to_num(0.0)[..., None]
        total[:, one.rows] = total[:, one.rows] * keep + out.float().nan_to_num(0.0) * add
        norm[:, one.rows] = after
    if sinks is not None:
        total = total * torch.sigmoid(norm - sinks.float()[:, None])[..., None]
    return total.to(query.dtype).transpose(0, 1)


def _flash_pass(
    one: _Pass, query: Tensor, keys: Tensor, values: Tensor, scale: float, kind: Kind
) -> tuple[Tensor, Tensor]:
    """(H, n, D) attended and (H, n) log-sum-exp of one run of slots."""
    heads, rows, width = query.shape
    groups = keys.shape[1]
    share = heads // groups
    query = _turned(one, query, kind)
    k = keys[one.lo : one.hi].transpose(0, 1)[None]  # 1 G T D
    v = values[one.lo : one.hi].transpose(0, 1)[None]
    if rows <= FOLDED_ROWS and not one.causal:
        q = query.reshape(1, groups, share * rows, width)
        out, lse = _flash(q, k, v, attn_mask=_folded(one.mask, groups, share), scale=scale)
        return out.reshape(heads, rows, width), lse.reshape(heads, rows)
    q = query.unflatten(0, (groups, share)).transpose(0, 1)  # share G n D
    k, v = k.expand(share, -1, -1, -1), v.expand(share, -1, -1, -1)
    mask = one.mask
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (groups, share)).transpose(0, 1)
    out, lse = _flash(q, k, v, is_causal=one.causal, attn_mask=mask, scale=scale)
    return out.transpose(0, 1).reshape(heads, rows, width), lse.transpose(0, 1).reshape(heads, rows)


def _folded(mask: Tensor | None, groups: int, share: int) -> Tensor | None:
    """The mask of rows that stand for the heads of a group as well."""
    if mask is None:
        return None
    return (
        mask.repeat(share, 1)[None, None] if mask.dim() == 2 else mask.unflatten(0, (groups, share)).flatten(1, 2)[None]
    )


def _dense_pass(
    one: _Pass, query: Tensor, keys: Tensor, values: Tensor, scale: float, kind: Kind
) -> tuple[Tensor, Tensor]:
    """As `_flash_pass`, in float32, with all scores in memory."""
    share = query.shape[0] // keys.shape[1]
    q = _turned(one, query, kind).float().unflatten(0, (-1, share))  # G share n D
    k, v = (x[one.lo : one.hi].float().transpose(0, 1)[:, None] for x in (keys, values))  # G 1 T D
    score = reference.shaped((q @ k.transpose(-1, -2) * scale).flatten(0, 1), one.distance, kind)
    if one.causal:
        score = score + torch.full(score.shape[1:], float("-inf")).triu(1)
    elif one.mask is not None:
        score = score + one.mask
    lse = score.logsumexp(-1)
    weights = (score - lse[..., None]).exp().nan_to_num(0.0)
    return (weights.unflatten(0, (-1, share)) @ v).flatten(0, 1), lse


def _turned(one: _Pass, query: Tensor, kind: Kind) -> Tensor:
    if one.cos is None or one.sin is None or kind.rotary is None:
        return query
    return turn(query, one.cos, one.sin, kind.rotary.interleaved).to(query.dtype)


def _passes(plan: Plan, dtype: torch.dtype, kind: Kind) -> list[_Pass]:
    """The plan as kernel calls, worked out once for all layers of a kind."""
    key = f"sdpa {dtype} {id(kind)}"
    if key not in plan.memo:
        passes = (_one_pass(plan, index, dtype, kind) for index in range(len(plan.segments)))
        plan.memo[key] = ([one for one in passes if one is not None], kind)
    return cast(tuple[list[_Pass], Kind], plan.memo[key])[0]


def _one_pass(plan: Plan, index: int, dtype: torch.dtype, kind: Kind) -> _Pass | None:
    """One run of slots for all its readers; nothing where a window hides it from all of them."""
    lo, hi, _ = (int(x) for x in plan.segments[index])
    readers = plan.segment_readers(index)
    rows = np.concatenate([np.arange(r[0], r[1]) for r in readers])
    shift = np.concatenate([np.full(r[1] - r[0], r[2]) for r in readers])
    seen = np.concatenate([r[3] + r[4] * np.arange(r[1] - r[0]) for r in readers])
    first = np.concatenate([np.full(r[1] - r[0], r[5]) for r in readers])
    order = np.argsort(rows, kind="stable")
    rows, shift, seen, first = rows[order], shift[order], seen[order], first[order]
    distance = np.zeros((len(rows), 0), dtype=np.int64)
    if not kind.plain:
        distance = (plan.positions[rows] - first)[:, None] - np.arange(hi - lo)
    visible = (
        np.arange(hi - lo)[None, :] < seen[:, None] if kind.window is None else _in_window(distance, seen, kind.window)
    )
    if kind.window is not None:
        rows_seen, keys_seen = np.flatnonzero(visible.any(1)), np.flatnonzero(visible.any(0))
        if not len(rows_seen):
            return None
        few, some = slice(rows_seen[0], rows_seen[-1] + 1), slice(keys_seen[0], keys_seen[-1] + 1)
        rows, shift, visible, distance = rows[few], shift[few], visible[few, some], distance[few, some]
        lo, hi = lo + some.start, lo + some.stop
    count = hi - lo
    consecutive = rows[-1] - rows[0] + 1 == len(rows)
    causal = len(rows) == count > 1 and kind.slopes is None and np.array_equal(visible, np.tri(count, dtype=bool))
    moved = kind.rotary is not None and shift.any()
    cos, sin = plan.turns(kind.rotary)
    return _Pass(
        lo=lo,
        hi=hi,
        rows=slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else torch.from_numpy(rows),
        cos=torch.from_numpy(cos[shift]) if moved else None,
        sin=torch.from_numpy(-sin[shift]) if moved else None,
        mask=None if causal else _mask(visible, distance, dtype, kind),
        causal=bool(causal),
        distance=torch.from_numpy(distance if kind.softcap is not None else distance[:, :0]),
        blind=None if visible.any(1).all() else torch.from_numpy(~visible.any(1)),
    )


def _in_window(distance: np.ndarray, seen: np.ndarray, window: int) -> np.ndarray:
    return (np.arange(distance.shape[1])[None, :] < seen[:, None]) & (np.abs(distance) < window)


def _mask(visible: np.ndarray, distance: np.ndarray, dtype: torch.dtype, kind: Kind) -> Tensor | None:
    biased = kind.slopes is not None and kind.softcap is None  # dense passes have the bias in their scores
    if not biased and visible.all():
        return None
    hidden = torch.from_numpy(~visible)
    if not biased:
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    bias = -torch.tensor(kind.slopes or ())[:, None, None] * torch.from_numpy(distance)
    return bias.masked_fill(hidden, float("-inf"))
