"""Placed attention through PyTorch's FlexAttention, as the paper suggests: for GPUs where our kernels do not run.

A row that sees messages at several shifts is several rows here, one for each shift, whose softmaxes are merged by
log-sum-exp. What anybody sees in a step is copied together, layer by layer (slots between may hold anything, and a mask
does not keep NaN out of a sum); a mask says which of it a row sees. On a GPU it is compiled; on a CPU it is computed
eagerly, with all scores in memory, for tests.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast, no_type_check

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from .kind import Kind
from .plan import Plan
from .rope import turn


class _Rows(NamedTuple):
    """rows: of every entry, a row at one shift. places: where it stands minus its shift, so that a slot's home is as
    far from it as what the slot holds is from the row. slots: what anybody sees, with their homes."""

    rows: Tensor
    places: Tensor
    homes: Tensor
    cos: Tensor
    sin: Tensor
    moved: bool
    slots: Tensor
    mask: BlockMask
    seen: Tensor
    kind: Kind


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
    heads, rows, width = query.shape
    if not len(plan.segments):
        return query.new_zeros(rows, heads, width)
    e = _rows(plan, kind, keys.device)
    q = query[:, e.rows]
    if e.moved and kind.rotary is not None:
        q = turn(q, e.cos, e.sin, kind.rotary.interleaved).to(query.dtype)
    k, v = (x[e.slots].transpose(0, 1)[None] for x in (keys, values))
    options = {"score_mod": _scores(e), "block_mask": e.mask, "scale": scale, "enable_gqa": True}
    found, beside = _flex(keys.device.type)(q[None], k, v, **options, return_aux=AuxRequest(lse=True))
    out, norm = found[0].float(), beside.lse[0].float().masked_fill(~e.seen, float("-inf"))
    top = torch.full((heads, rows), float("-inf"), device=keys.device)
    top = top.scatter_reduce(1, e.rows.expand(heads, -1), norm, "amax")
    if sinks is not None:
        top = torch.maximum(top, sinks.float()[:, None])
    weight = torch.exp(norm - top[:, e.rows]).nan_to_num(0.0)
    total = torch.zeros_like(top).index_add(1, e.rows, weight)
    if sinks is not None:
        total = total + torch.exp(sinks.float()[:, None] - top)
    mixed = torch.zeros(heads, rows, width, device=keys.device)
    mixed = mixed.index_add(1, e.rows, out.nan_to_num(0.0) * weight[..., None])
    return (mixed / total.clamp(min=1e-38)[..., None]).to(query.dtype).transpose(0, 1)


@cache
def _flex(kind: str) -> Callable[..., Any]:
    work: Any = flex_attention
    return torch.compile(work, dynamic=True) if kind == "cuda" else work


def _scores(e: _Rows) -> Callable[..., Tensor] | None:
    """What happens to a score before the softmax."""
    softcap, slopes = e.kind.softcap, e.kind.slopes
    if softcap is None and slopes is None:
        return None
    falls = torch.tensor(slopes or (), device=e.rows.device)

    @no_type_check  # it is traced
    def shaped(score: Tensor, _: Tensor, head: Tensor, entry: Tensor, slot: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if slopes is None else score - falls[head] * (e.places[entry] - e.homes[slot])

    return shaped


def _rows(plan: Plan, kind: Kind, device: torch.device) -> _Rows:
    """Worked out once for all layers of a kind."""
    key = f"flex {id(kind)} {device}"
    if key not in plan.memo:
        plan.memo[key] = _make_rows(plan, kind, device)
    return cast(_Rows, plan.memo[key])


def _make_rows(plan: Plan, kind: Kind, device: torch.device) -> _Rows:
    slots = np.unique(np.concatenate([np.arange(lo, hi) for lo, hi, _ in plan.segments]))
    homes = np.zeros(len(slots), dtype=np.int64)
    entries: list[tuple[int, int]] = []
    visible: list[np.ndarray] = []
    known: dict[tuple[int, int], list[int]] = {}
    for index, (lo, hi, _) in enumerate(plan.segments):
        first, count = int(np.searchsorted(slots, lo)), int(hi - lo)
        for row0, row1, shift, limit, step, position in plan.segment_readers(index):
            homes[first : first + count] = position - plan.shifts[shift] + np.arange(count)
            for row in range(row0, row1):
                run = slice(first, first + limit + step * (row - row0))
                entry = next((e for e in known.get((row, shift), []) if not visible[e][run].any()), None)
                if entry is None:
                    entry = len(entries)
                    entries.append((row, shift))
                    visible.append(np.zeros(len(slots), dtype=bool))
                    known.setdefault((row, shift), []).append(entry)
                visible[entry][run] = True
    rows, shifts = np.asarray(entries, dtype=np.int64).T
    places = plan.positions[rows] - np.asarray(plan.shifts)[shifts]
    mask = np.stack(visible)
    if kind.window is not None:
        mask &= np.abs(places[:, None] - homes) < kind.window
    seen = torch.from_numpy(mask).to(device)
    cos, sin = (torch.from_numpy(table[shifts]).to(device) for table in plan.turns(kind.rotary))

    @no_type_check
    def visible_to(_: Any, head: Any, entry: Any, slot: Any) -> Any:
        return seen[entry, slot]

    mask_of = create_block_mask(visible_to, None, None, len(seen), len(slots), device=str(device))
    rows_, places_, homes_, slots_ = (torch.from_numpy(x).to(device) for x in (rows, places, homes, slots))
    moved = bool(shifts.any())
    return _Rows(rows_, places_, homes_, cos, -sin, moved, slots_, mask_of, seen.any(1), kind)
