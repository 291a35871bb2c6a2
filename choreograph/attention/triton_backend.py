"""GPU attention backend: launches the Triton kernels over the tiles of a plan.

A slot range shared by many requests (branches of a tree, voters, agents) is loaded once for all of them.
Queries are rotated per slot range in the kernel, so a shifted message costs no more than one at its base
position. A second kernel merges the partial softmaxes of KV splits. Tests run the same code on a CPU
with Triton's interpreter.
"""

from typing import Any, NamedTuple, cast

import numpy as np
import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor

from . import triton_kernels as kernels
from .metadata import AttentionMetadata, AttentionSpec, HeadShape
from .triton_partition import partition

MAX_ROTATED_Q_BYTES = 1 << 28  # maximum bytes of rotated queries in global memory; above, they are kept in registers


class DeviceTiles(NamedTuple):
    """`TileMetadata` on a device, with the rotation tables of all shifts."""

    work_items: Tensor  # int32; this and the next five as in `TileMetadata`
    kv_chunks: Tensor
    row_params: Tensor
    rows: Tensor
    merge_order: Tensor
    merge_indptr: Tensor
    cos: Tensor  # (shifts, half_dim) float32
    sin: Tensor  # (shifts, half_dim) float32
    alibi_slopes: Tensor  # (H,) float32, or (1,) zeros without ALiBi
    max_tile_rows: int  # maximum query tokens of a work item
    single_split: bool  # every query token has exactly one partial result


def attend(
    metadata: AttentionMetadata,
    query: Float[Tensor, "H N D"],
    keys: Float[Tensor, "S G D"],
    values: Float[Tensor, "S G D"],
    scale: float,
    spec: AttentionSpec,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "N H D"]:
    """Compute `reference.attend` in the dtype of the keys with float32 accumulation."""
    heads = HeadShape(query.shape[0], keys.shape[1], keys.shape[2])
    tile = tile_rows(heads, query.shape[1], keys.element_size())
    return run(_device_tiles(metadata, spec, tile, keys.shape[1], keys.device), query, keys, values, scale, spec, sinks)


def write(
    slots: Int[Tensor, "N"],
    key: Float[Tensor, "G N D"],
    value: Float[Tensor, "G N D"],
    keys: Float[Tensor, "S G D"],
    values: Float[Tensor, "S G D"],
) -> None:
    """Write the keys and values of the batch into their slots."""
    groups, count, width = key.shape
    assert key.dtype == value.dtype == keys.dtype == values.dtype and slots.is_contiguous()
    assert keys.stride() == values.stride() and keys.stride()[1:] == (width, 1)
    key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (key, value))
    rows = 8 if count <= 64 else 16
    kernels.write[triton.cdiv(count, rows), groups](
        *(key, value, slots, keys, values, key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
        *(keys.stride(0), count),
        ROWS=rows,
        D=width,
        D_PAD=_pad_size(width),
    )


def tile_rows(head_shape: HeadShape, num_tokens: int, element_size: int) -> int:
    """Return the maximum query tokens of a work item.

    Times the heads per KV head, they fill one matrix product. `element_size` is in bytes.
    """
    max_rows = next(
        max_rows
        for max_rows in (128, 64, 32, 16)
        if _row_bytes(head_shape.head_dim, element_size) * max_rows <= 32768 or max_rows == 16
    )
    expected = 128 if num_tokens >= 128 else 64 if num_tokens > 16 else 16
    return max(1, min(max_rows, expected) // triton.next_power_of_2(head_shape.num_q_heads // head_shape.num_kv_heads))


def _row_bytes(head_dim: int, element_size: int) -> int:
    """Return the register and shared memory bytes of a tile row (float32 counts twice).

    The limits used with it are those at which kernels for sm_80 and sm_90 do not spill
    (`benchmarks/gpu/binaries`).
    """
    return _pad_size(head_dim) * element_size * (2 if element_size == 4 else 1)


def launch_config(
    head_shape: HeadShape, max_tile_rows: int, element_size: int, spec: AttentionSpec, single_split: bool
) -> dict[str, Any]:
    """Return the compile-time constants and launch options of `kernels.attend`."""
    share, half, width = (
        head_shape.num_q_heads // head_shape.num_kv_heads,
        spec.rope.half_dim if spec.rope is not None else 0,
        head_shape.head_dim,
    )
    shared = triton.next_power_of_2(share)
    rows = max(max_tile_rows, 16 // shared)
    row_bytes = _row_bytes(width, element_size)
    q_via_gmem = element_size == 2 and half > 0 and rows * shared >= 128
    light = row_bytes <= 256 or (row_bytes <= 512 and rows * shared <= 16)
    slots = 64 if light else 32 if row_bytes <= 1024 else 16  # per loop iteration
    is_half_split = spec.rope is None or not spec.rope.interleaved
    return {
        "HEADS": head_shape.num_q_heads,
        "GQA": share,
        "GQA_PAD": shared,
        "ROWS": rows,
        "SLOTS": slots,
        "D": width,
        "D_PAD": _pad_size(width),
        "ROT": half,
        "ROT_PAD": _pad_size(half),
        "NOROT": width - 2 * half,
        "NOROT_PAD": _pad_size(width - 2 * half),
        "PAIR_STRIDE": 1 if is_half_split else 2,
        "PAIR_OFFSET": half if is_half_split else 1,
        "SOFTCAP": spec.logit_softcap is not None,
        "SLIDING_WINDOW": spec.sliding_window is not None,
        "ALIBI": spec.alibi_slopes is not None,
        "SINGLE_SPLIT": single_split,
        "Q_VIA_GMEM": q_via_gmem,
        "UNMASKED_LOOP": int(rows * shared >= 64 and spec.sliding_window is None),
        "PRECISION": "tf32x3" if element_size == 4 else "ieee",  # float32 without tensor cores spills registers
        "num_warps": 4 if light and rows * shared < 128 else 8,
        "num_stages": 3 if row_bytes <= 256 else 2,  # tiles of keys and values in flight
    }


def run(
    tiles: DeviceTiles,
    query: Float[Tensor, "H N D"],
    keys: Float[Tensor, "S G D"],
    values: Float[Tensor, "S G D"],
    scale: float,
    spec: AttentionSpec,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "N H D"]:
    """Launch the attention kernel and, if needed, the merge kernel, without synchronizing."""
    rows, heads, device = query.shape[1], HeadShape(query.shape[0], keys.shape[1], query.shape[2]), keys.device
    direct = tiles.single_split and sinks is None
    parts = 0 if direct else len(tiles.rows)
    out = torch.empty(rows, heads.num_q_heads, heads.head_dim, dtype=query.dtype, device=device)
    partial = out if direct else torch.empty(parts, *out.shape[1:], dtype=torch.float32, device=device)
    norms = torch.empty(parts, heads.num_q_heads, dtype=torch.float32, device=device)
    query = query if query.stride(2) == 1 else query.contiguous()
    config = launch_config(heads, tiles.max_tile_rows, keys.element_size(), spec, direct)
    programs = len(tiles.work_items) * heads.num_kv_heads
    rotated_numel = programs * config["ROWS"] * config["GQA_PAD"] * heads.head_dim if config["Q_VIA_GMEM"] else 0
    if rotated_numel * keys.element_size() > MAX_ROTATED_Q_BYTES:
        rotated_numel, config["Q_VIA_GMEM"] = 0, False
    rotated_q = torch.empty(rotated_numel, dtype=keys.dtype, device=device)
    if programs:
        kernels.attend[(programs,)](
            *(
                query,
                keys,
                values,
                tiles.work_items,
                tiles.kv_chunks,
                tiles.row_params,
                tiles.rows,
                tiles.cos,
                tiles.sin,
                tiles.alibi_slopes,
            ),
            *(partial, norms, rotated_q, query.stride(0), query.stride(1), keys.stride(0)),
            *(scale, (spec.logit_softcap or 1.0) * kernels.LOG2E.value, spec.sliding_window or 0),
            **config,
        )
    if not direct:
        kernels.merge[rows, heads.num_q_heads](
            *(partial, norms, tiles.merge_order, tiles.merge_indptr, norms if sinks is None else sinks, out),
            HEADS=heads.num_q_heads,
            D=heads.head_dim,
            D_PAD=_pad_size(heads.head_dim),
            SINKS=sinks is not None,
        )
    return out


def _pad_size(size: int) -> int:
    """Return the next power of two, at least 16, the minimum of `tl.dot`."""
    return max(16, triton.next_power_of_2(size))


def _device_tiles(
    metadata: AttentionMetadata, spec: AttentionSpec, max_tile_rows: int, num_kv_heads: int, device: torch.device
) -> DeviceTiles:
    """Return the tiles of a plan on the device, cached for all layers with the same spec."""
    key = f"triton {id(spec)} {max_tile_rows} {num_kv_heads} {device}"
    if key not in metadata.cache:
        result = partition(metadata, spec, max_tile_rows, num_kv_heads)
        items, chunks, reads, rows, order, starts = _copy_to_device(list(result.device_arrays), np.int32, device)
        cos, sin, slopes = _copy_to_device(
            [*metadata.rope_tables(spec.rope), alibi_slopes_array(spec)], np.float32, device
        )
        metadata.cache[key] = DeviceTiles(
            items, chunks, reads, rows, order, starts, cos, sin, slopes, max_tile_rows, result.single_split
        )
    return cast(DeviceTiles, metadata.cache[key])


def alibi_slopes_array(spec: AttentionSpec) -> np.ndarray:
    """Return the ALiBi slopes as float32, or one zero without ALiBi."""
    return np.array(spec.alibi_slopes or (0.0,), dtype=np.float32)


def _copy_to_device(host_arrays: list[np.ndarray], dtype: type, device: torch.device) -> list[Tensor]:
    """Copy arrays to the device in one asynchronous copy."""
    sizes = [
        -(-part.size // 4) * 4 for part in host_arrays
    ]  # multiples of 16 bytes, else Triton recompiles for other alignments
    *offsets, end = np.cumsum([0, *sizes])
    flat_host = np.zeros(end, dtype=dtype)
    for start, part in zip(offsets, host_arrays, strict=True):
        flat_host[start : start + part.size] = part.ravel()
    flat = torch.from_numpy(flat_host)
    if device.type == "cuda":
        flat = flat.pin_memory()
    flat = flat.to(device, non_blocking=True)
    return [flat[start : start + part.size].view(*part.shape) for start, part in zip(offsets, host_arrays, strict=True)]
