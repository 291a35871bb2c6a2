"""What the Triton programs do with a work, a second time, in plain tensors: for tests in which the interpreter's
milliseconds for every program would add up."""

import torch
from torch import Tensor

from choreograph.attention.metadata import AttentionSpec
from choreograph.attention.triton_backend import DeviceTiles


def run(
    tiles: DeviceTiles, query: Tensor, keys: Tensor, values: Tensor, scale: float, spec: AttentionSpec, sinks=None
) -> Tensor:
    """As `ops.triton.run`. Plain rotary embedding alone: no other layers are asked for where this stands in."""
    heads, count, width = query.shape
    share, half = heads // keys.shape[1], spec.rope.half_dim if spec.rope else 0
    top = torch.full((len(tiles.rows), heads), float("-inf"))
    part = torch.zeros(len(tiles.rows), heads, width)
    for first, rows, begin, end in tiles.work_items.tolist():
        if not rows:
            continue
        row, stands = tiles.rows[first : first + rows].long().T
        scores, seen = [], []
        for run_, lo, hi, known in tiles.kv_chunks[begin:end].tolist():
            shift, limit, position = tiles.row_params[known : known + rows].long().T
            j = torch.arange(lo, hi)
            q, x, y = query[:, row].float().transpose(0, 1), tiles.cos[shift][:, None], tiles.sin[shift][:, None]
            a, b, rest = q[..., :half], q[..., half : 2 * half], q[..., 2 * half :]
            turned = torch.cat([a * x + b * y, b * x - a * y, rest], -1)
            k, v = (t[run_ + lo : run_ + hi].float().repeat_interleave(share, 1) for t in (keys, values))
            score = torch.einsum("rhd,shd->rhs", turned, k) * scale
            if spec.logit_softcap is not None:
                score = spec.logit_softcap * torch.tanh(score / spec.logit_softcap)
            visible = j[None] < limit[:, None]
            if spec.sliding_window is not None:
                visible &= (stands[:, None] - position[:, None] - j[None]).abs() < spec.sliding_window
            scores.append(score.masked_fill(~visible[:, None], float("-inf")))
            seen.append(v)
        score, value = torch.cat(scores, -1), torch.cat(seen)
        top[first : first + rows] = score.logsumexp(-1)
        weights = score.softmax(-1).nan_to_num()  # a row that sees nothing of the item
        part[first : first + rows] = torch.einsum("rhs,shd->rhd", weights, value)
    out = torch.zeros(count, heads, width, dtype=query.dtype)
    starts = tiles.merge_indptr.tolist()
    for r in range(count):
        some = tiles.merge_order[starts[r] : starts[r + 1]].long()
        norms = top[some] if sinks is None else torch.cat([top[some], sinks.float()[None]])
        if len(some):
            out[r] = (norms.softmax(0)[: len(some), :, None] * part[some]).sum(0).to(out.dtype)
    return out
