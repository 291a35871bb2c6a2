"""Placed attention on a GPU: Triton kernels over the tiles of a plan (`ops/tiles.py`). Owns what they are started with.

A run that many calls share (branches of a tree, voters, agents) is loaded once for all of them. Queries are turned per
run, in the kernel, so that a moved message costs no more than one at home. A second kernel merges the softmaxes of
stripes. The same code runs on a CPU through Triton's interpreter, for tests.
"""

from typing import Any, NamedTuple, cast

import numpy as np
import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor

from ..kernels import attention as kernels
from .kind import Heads, Kind
from .plan import Plan
from .tiles import arrays

TURNED = 1 << 28  # bytes at most for queries that go through memory: else they are multiplied from registers


class Work(NamedTuple):
    """`tiles.Arrays` on a device, with the turns of all shifts. tile: rows of an item at most."""

    items: Tensor
    pieces: Tensor
    reads: Tensor
    rows: Tensor
    order: Tensor
    starts: Tensor
    cos: Tensor
    sin: Tensor
    slopes: Tensor
    tile: int
    direct: bool


def attend(
    plan: Plan,
    query: Float[Tensor, "H N D"],
    keys: Float[Tensor, "S G D"],
    values: Float[Tensor, "S G D"],
    scale: float,
    kind: Kind,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "N H D"]:
    """As `reference.attend`, in the type of the keys with float32 accumulation."""
    heads = Heads(query.shape[0], keys.shape[1], keys.shape[2])
    tile = tile_of(heads, query.shape[1], keys.element_size())
    return run(_work(plan, kind, tile, keys.shape[1], keys.device), query, keys, values, scale, kind, sinks)


def write(
    slots: Int[Tensor, "N"],
    key: Float[Tensor, "G N D"],
    value: Float[Tensor, "G N D"],
    keys: Float[Tensor, "S G D"],
    values: Float[Tensor, "S G D"],
) -> None:
    """Puts rows' own keys and values into their slots."""
    groups, count, width = key.shape
    assert key.dtype == value.dtype == keys.dtype == values.dtype and slots.is_contiguous()
    assert keys.stride() == values.stride() and keys.stride()[1:] == (width, 1)
    key, value = (one if one.stride(2) == 1 else one.contiguous() for one in (key, value))
    rows = 8 if count <= 64 else 16
    kernels.write[triton.cdiv(count, rows), groups](
        *(key, value, slots, keys, values, key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
        *(keys.stride(0), count),
        ROWS=rows,
        WIDTH=width,
        WIDE=_padded(width),
    )


def tile_of(heads: Heads, rows: int, size: int) -> int:
    """Rows of an item: with their heads, what one product of matrices takes. size: bytes of a number."""
    most = next(most for most in (128, 64, 32, 16) if _burden(heads.width, size) * most <= 32768 or most == 16)
    wanted = 128 if rows >= 128 else 64 if rows > 16 else 16
    return max(1, min(most, wanted) // triton.next_power_of_2(heads.query // heads.groups))


def _burden(width: int, size: int) -> int:
    """What a row of a tile asks of registers and shared memory: its bytes, which float32 multiplies with twice. The
    sizes that follow from it are those at which compilers for sm_80 and sm_90 find room (`benchmarks/gpu/binaries`)."""
    return _padded(width) * size * (2 if size == 4 else 1)


def launch(heads: Heads, tile: int, size: int, kind: Kind, direct: bool) -> dict[str, Any]:
    """What `kernels.attend` is compiled for."""
    share, half, width = heads.query // heads.groups, kind.rotary.half if kind.rotary is not None else 0, heads.width
    shared = triton.next_power_of_2(share)
    rows = max(tile, 16 // shared)
    burden = _burden(width, size)
    through = size == 2 and half > 0 and rows * shared >= 128
    light = burden <= 256 or (burden <= 512 and rows * shared <= 16)
    slots = 64 if light else 32 if burden <= 1024 else 16  # read at a time
    apart = kind.rotary is None or not kind.rotary.interleaved
    return {
        "HEADS": heads.query,
        "SHARE": share,
        "SHARED": shared,
        "ROWS": rows,
        "SLOTS": slots,
        "WIDTH": width,
        "WIDE": _padded(width),
        "HALF": half,
        "HALVES": _padded(half),
        "REST": width - 2 * half,
        "RESTS": _padded(width - 2 * half),
        "STEP": 1 if apart else 2,
        "SECOND": half if apart else 1,
        "CAPPED": kind.softcap is not None,
        "WINDOWED": kind.window is not None,
        "SLOPING": kind.slopes is not None,
        "DIRECT": direct,
        "THROUGH": through,
        "SPLIT": int(rows * shared >= 64 and kind.window is None),
        "PRECISION": "tf32x3" if size == 4 else "ieee",  # without tensor cores float32 spills its registers
        "num_warps": 4 if light and rows * shared < 128 else 8,
        "num_stages": 3 if burden <= 256 else 2,  # tiles of keys and values in flight
    }


def run(
    work: Work,
    query: Float[Tensor, "H N D"],
    keys: Float[Tensor, "S G D"],
    values: Float[Tensor, "S G D"],
    scale: float,
    kind: Kind,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "N H D"]:
    """Attention from work that is on the device: asks nothing of the host but to start two programs."""
    rows, heads, device = query.shape[1], Heads(query.shape[0], keys.shape[1], query.shape[2]), keys.device
    direct = work.direct and sinks is None
    parts = 0 if direct else len(work.rows)
    out = torch.empty(rows, heads.query, heads.width, dtype=query.dtype, device=device)
    partial = out if direct else torch.empty(parts, *out.shape[1:], dtype=torch.float32, device=device)
    norms = torch.empty(parts, heads.query, dtype=torch.float32, device=device)
    query = query if query.stride(2) == 1 else query.contiguous()
    given = launch(heads, work.tile, keys.element_size(), kind, direct)
    programs = len(work.items) * heads.groups
    room = programs * given["ROWS"] * given["SHARED"] * heads.width if given["THROUGH"] else 0
    if room * keys.element_size() > TURNED:
        room, given["THROUGH"] = 0, False
    turned = torch.empty(room, dtype=keys.dtype, device=device)
    if programs:
        kernels.attend[(programs,)](
            *(query, keys, values, work.items, work.pieces, work.reads, work.rows, work.cos, work.sin, work.slopes),
            *(partial, norms, turned, query.stride(0), query.stride(1), keys.stride(0)),
            *(scale, (kind.softcap or 1.0) * kernels.LOG2E.value, kind.window or 0),
            **given,
        )
    if not direct:
        kernels.merge[rows, heads.query](
            *(partial, norms, work.order, work.starts, norms if sinks is None else sinks, out),
            HEADS=heads.query,
            WIDTH=heads.width,
            WIDE=_padded(heads.width),
            SINKING=sinks is not None,
        )
    return out


def _padded(size: int) -> int:
    """The power of two that a program pads a size to; products of matrices take 16 and more."""
    return max(16, triton.next_power_of_2(size))


def _work(plan: Plan, kind: Kind, tile: int, groups: int, device: torch.device) -> Work:
    """Worked out once for all layers of a kind, and sent to the device in one piece."""
    key = f"triton {id(kind)} {tile} {groups} {device}"
    if key not in plan.memo:
        made = arrays(plan, kind, tile, groups)
        items, pieces, reads, rows, order, starts = _sent(list(made.parts), np.int32, device)
        cos, sin, slopes = _sent([*plan.turns(kind.rotary), slopes_of(kind)], np.float32, device)
        plan.memo[key] = Work(items, pieces, reads, rows, order, starts, cos, sin, slopes, tile, made.direct)
    return cast(Work, plan.memo[key])


def slopes_of(kind: Kind) -> np.ndarray:
    return np.array(kind.slopes or (0.0,), dtype=np.float32)


def _sent(parts: list[np.ndarray], dtype: type, device: torch.device) -> list[Tensor]:
    """Arrays of numbers on the device, after one copy, which nobody waits for."""
    sizes = [-(-part.size // 4) * 4 for part in parts]  # multiples of 16 bytes: else Triton compiles for every step
    *places, end = np.cumsum([0, *sizes])
    every = np.zeros(end, dtype=dtype)
    for at, part in zip(places, parts, strict=True):
        every[at : at + part.size] = part.ravel()
    flat = torch.from_numpy(every)
    if device.type == "cuda":
        flat = flat.pin_memory()
    flat = flat.to(device, non_blocking=True)
    return [flat[at : at + part.size].view(*part.shape) for at, part in zip(places, parts, strict=True)]
