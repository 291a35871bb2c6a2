"""GPU attention backend: Triton kernels over query tiles and KV splits.

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
from .int8_rows import SCALE_BYTES, StoredRows
from .metadata import AlignedRows, AttentionCall, AttentionSpec, HeadShape
from .triton_partition import TileMetadata, partition

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
    aligned: "DeviceAlignedRows | None" = None  # None without alignments


class DeviceAlignedRows(NamedTuple):
    """`AlignedRows` on a device."""

    temperatures: Tensor  # (R,) float32 of every partial result
    row_of: Tensor  # (N,) int32: aligned row of a query token, or -1
    alignments: Tensor  # (N, 2) float32: temperature, and base-2 logarithm of the scale


def attend(call: AttentionCall) -> Float[Tensor, "N H D"]:
    """Compute attention like `reference.attend`, in query dtype with float32 accumulation."""
    metadata, spec, device = call.metadata, call.spec, call.keys.device
    heads = HeadShape(call.query.shape[0], call.keys.shape[1], call.query.shape[2])
    max_tile_rows = tile_rows(heads, metadata.num_tokens, call.query.element_size())
    key = f"triton {id(spec)} {max_tile_rows} {heads.num_kv_heads} {device}"
    if key not in metadata.cache:
        aligned = metadata.with_aligned_rows()
        tiles = partition(metadata if aligned is None else aligned.metadata, spec, max_tile_rows, heads.num_kv_heads)
        device_rows = None
        if aligned is not None:
            tiles, arrays = _resolve_aligned_rows(tiles, aligned, metadata.num_tokens)
            device_rows = DeviceAlignedRows._make(torch.from_numpy(array).to(device) for array in arrays)
        tables = [*metadata.rope_tables(spec.rope), alibi_slopes_array(spec)]
        tensors = [*_copy_to_device(list(tiles.device_arrays), device), *_copy_to_device(tables, device)]
        metadata.cache[key] = DeviceTiles._make([*tensors, max_tile_rows, tiles.single_split, device_rows])
    device_tiles = cast(DeviceTiles, metadata.cache[key])
    return run(device_tiles, call.query, call.keys, call.values, call.scale, spec, call.sinks)


def _resolve_aligned_rows(
    tiles: TileMetadata, aligned: AlignedRows, num_tokens: int
) -> tuple[TileMetadata, tuple[np.ndarray, ...]]:
    """Give aligned rows the query of their token; return the arrays of `DeviceAlignedRows` too."""
    temperatures = np.append(np.ones(num_tokens, dtype=np.float32), aligned.temperatures)[tiles.rows[:, 0]]
    rows = tiles.rows.copy()
    rows[:, 0] = np.append(np.arange(num_tokens), aligned.token_of)[rows[:, 0]]
    row_of, alignments = np.full(num_tokens, -1, dtype=np.int32), np.ones((num_tokens, 2), dtype=np.float32)
    row_of[aligned.token_of] = num_tokens + np.arange(len(aligned.token_of))
    alignments[aligned.token_of] = np.stack([aligned.temperatures, aligned.log_scales * kernels.LOG2E.value], axis=1)
    return tiles._replace(rows=rows), (temperatures, row_of, alignments)


def write(
    slots: Int[Tensor, "N"],
    key: Float[Tensor, "G N D"],
    value: Float[Tensor, "G N D"],
    keys: StoredRows,
    values: StoredRows,
) -> None:
    """Write the keys and values of the batch into their slots."""
    groups, count, width = key.shape
    is_int8 = keys.dtype == torch.int8
    assert key.dtype == value.dtype and keys.dtype == values.dtype in (key.dtype, torch.int8) and slots.is_contiguous()
    assert keys.stride() == values.stride() and keys.stride()[1:] == (width + is_int8 * SCALE_BYTES, 1)
    key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (key, value))
    rows = 8 if count <= 64 else 16
    kernel, scales = (kernels.write_int8, _scales(keys, values)) if is_int8 else (kernels.write, ())
    kernel[triton.cdiv(count, rows), groups](
        *(key, value, slots, keys, values, *scales),
        *(key.stride(0), key.stride(1), value.stride(0), value.stride(1), keys.stride(0), count),
        ROWS=rows,
        D=width,
        D_PAD=_pad_size(width),
    )


def tile_rows(head_shape: HeadShape, num_tokens: int, element_size: int) -> int:
    """Return the maximum query tokens of a work item.

    This number times the query heads per KV head fills one matrix product. `element_size` is in bytes.
    """
    max_rows = 32768 // _row_bytes(head_shape.head_dim, element_size)  # a power of two
    expected = 128 if num_tokens >= 128 else 64 if num_tokens > 16 else 16
    group_size = triton.next_power_of_2(head_shape.num_q_heads // head_shape.num_kv_heads)
    return max(1, min(max(max_rows, 16), expected) // group_size)


def _row_bytes(head_dim: int, element_size: int) -> int:
    """Return the register and shared memory bytes of a tile row.

    float32 counts twice. Callers use limits at which kernels for sm_80 and sm_90 do not spill
    (`benchmarks/gpu/binaries`).
    """
    return _pad_size(head_dim) * element_size * (2 if element_size == 4 else 1)


def launch_config(
    head_shape: HeadShape, max_tile_rows: int, element_size: int, spec: AttentionSpec, single_split: bool
) -> dict[str, Any]:
    """Return the compile-time constants and launch options of `kernels.attend`."""
    group_size, width = head_shape.num_q_heads // head_shape.num_kv_heads, head_shape.head_dim
    half = spec.rope.half_dim if spec.rope is not None else 0
    padded_group = triton.next_power_of_2(group_size)
    rows = max(max_tile_rows, 16 // padded_group)
    row_bytes = _row_bytes(width, element_size)
    q_via_gmem = element_size == 2 and half > 0 and rows * padded_group >= 128
    light = row_bytes <= 256 or (row_bytes <= 512 and rows * padded_group <= 16)
    slots = 64 if light else 32 if row_bytes <= 1024 else 16  # per loop iteration
    is_half_split = spec.rope is None or not spec.rope.interleaved
    return {
        "HEADS": head_shape.num_q_heads,
        "GQA": group_size,
        "GQA_PAD": padded_group,
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
        "UNMASKED_LOOP": int(rows * padded_group >= 64 and spec.sliding_window is None),
        "PRECISION": "tf32x3" if element_size == 4 else "ieee",  # float32 without tensor cores spills registers
        "num_warps": 4 if light and rows * padded_group < 128 else 8,
        "num_stages": 3 if row_bytes <= 256 else 2,  # tiles of keys and values in flight
    }


def run(
    tiles: DeviceTiles,
    query: Float[Tensor, "H N D"],
    keys: StoredRows,
    values: StoredRows,
    scale: float,
    spec: AttentionSpec,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "N H D"]:
    """Launch the attention kernel and, if needed, the merge kernel, without synchronizing."""
    num_tokens, device, is_int8 = query.shape[1], keys.device, keys.dtype == torch.int8
    heads = HeadShape(query.shape[0], keys.shape[1], query.shape[2])
    aligned = tiles.aligned
    is_final = tiles.single_split and sinks is None and aligned is None
    num_partials = 0 if is_final else len(tiles.rows)
    out = torch.empty(num_tokens, heads.num_q_heads, heads.head_dim, dtype=query.dtype, device=device)
    partial_out = out if is_final else torch.empty(num_partials, *out.shape[1:], dtype=torch.float32, device=device)
    lse = torch.empty(num_partials, heads.num_q_heads, dtype=torch.float32, device=device)
    query = query if query.stride(2) == 1 else query.contiguous()
    config = launch_config(heads, tiles.max_tile_rows, query.element_size(), spec, is_final)
    num_programs = len(tiles.work_items) * heads.num_kv_heads
    rotated_numel = num_programs * config["ROWS"] * config["GQA_PAD"] * heads.head_dim if config["Q_VIA_GMEM"] else 0
    if rotated_numel * query.element_size() > MAX_ROTATED_Q_BYTES:
        rotated_numel, config["Q_VIA_GMEM"] = 0, False
    rotated_q = torch.empty(rotated_numel, dtype=query.dtype, device=device)
    if num_programs:
        kernels.attend[(num_programs,)](
            *(query, keys, values, *(_scales(keys, values) if is_int8 else (keys, values))),
            *(tiles.work_items, tiles.kv_chunks, tiles.row_params, tiles.rows),
            tiles.cos if aligned is None else aligned.temperatures,
            *(tiles.cos, tiles.sin, tiles.alibi_slopes, partial_out, lse, rotated_q),
            *(query.stride(0), query.stride(1), keys.stride(0), scale),
            *((spec.logit_softcap or 1.0) * kernels.LOG2E.value, spec.sliding_window or 0),
            **config,
            INT8=is_int8,
            ALIGNED=aligned is not None,
        )
    if not is_final:
        kernels.merge[num_tokens, heads.num_q_heads](
            *(partial_out, lse, tiles.merge_order, tiles.merge_indptr, lse if sinks is None else sinks),
            *((tiles.rows, lse) if aligned is None else (aligned.row_of, aligned.alignments)),
            out,
            HEADS=heads.num_q_heads,
            D=heads.head_dim,
            D_PAD=_pad_size(heads.head_dim),
            SINKS=sinks is not None,
            ALIGNED=aligned is not None,
        )
    return out


def _scales(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """View encoded keys and values as float32, of which the last number of each row is the scale."""
    return keys.view(torch.float32), values.view(torch.float32)


def _pad_size(size: int) -> int:
    """Return the next power of two, at least 16 for `tl.dot`."""
    return max(16, triton.next_power_of_2(size))


def alibi_slopes_array(spec: AttentionSpec) -> np.ndarray:
    """Return the ALiBi slopes as float32, or one zero without ALiBi."""
    return np.array(spec.alibi_slopes or (0.0,), dtype=np.float32)


def _copy_to_device(host_arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays of one dtype to the device in one asynchronous copy."""
    sizes = [-(-array.size // 4) * 4 for array in host_arrays]  # multiples of 16 bytes, else Triton recompiles
    *starts, end = np.cumsum([0, *sizes])
    flat_host = np.zeros(end, dtype=host_arrays[0].dtype)
    for start, array in zip(starts, host_arrays, strict=True):
        flat_host[start : start + array.size] = array.ravel()
    flat = torch.from_numpy(flat_host)
    flat = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
    return [
        flat[start : start + array.size].view(array.shape) for start, array in zip(starts, host_arrays, strict=True)
    ]
