"""Autotuning of the attention backend: measured once per machine and model shape, used by `auto`.

Without a measurement `auto` uses the default backend of the device. Measurements are stored in the user's
cache folder.
"""

import json
import platform
import time
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from platformdirs import user_cache_path
from torch import Tensor

from ..utils import atomic_write_text, ensure_dir
from .backend import SMALL_BATCH, Backend, SizeDispatchBackend, create_backend
from .cpp_backend import BackendUnavailableError
from .metadata import AttentionMetadata, AttentionSpec, HeadShape, KVRead, build_metadata

ROUNDS = 7  # measurements per backend and case; the median counts

CONTEXT = 2048  # context length in slots

Table = dict[str, dict[str, float]]  # seconds, by backend name and case


def create_tuned_backend(
    name: str, head_shape: HeadShape, dtype: torch.dtype, device: torch.device
) -> tuple[Backend, str | None]:
    """Create a backend as `create_backend` does; `auto` uses the fastest measured ones.

    Small and large batches may use different backends.
    """
    table = _load_tables().get(_key(head_shape, dtype, device), {}) if name == "auto" else {}
    backends = _create_available(list(table), head_shape, dtype, device)
    table = {name: timings for name, timings in table.items() if name in backends}
    if not table:
        return create_backend(name, head_shape.head_dim, dtype, device)
    small, large = fastest(table)
    return (backends[small] if small == large else SizeDispatchBackend(backends[small], backends[large])), None


def _create_available(
    names: Sequence[str], head_shape: HeadShape, dtype: torch.dtype, device: torch.device
) -> dict[str, Backend]:
    """Create the backends that can run here."""
    result = {}
    for name in names:
        try:
            result[name] = create_backend(name, head_shape.head_dim, dtype, device)[0]
        except BackendUnavailableError:
            continue
    return result


def fastest(table: Table) -> tuple[str, str]:
    """Return the names of the fastest backends for small and for large batches."""

    def seconds(name: str, is_small: bool) -> float:
        return sum(timings for case, timings in table[name].items() if case.startswith("few") == is_small)

    return min(table, key=lambda name: seconds(name, True)), min(table, key=lambda name: seconds(name, False))


def run(
    head_shape: HeadShape, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, *, context: int = CONTEXT
) -> Table:
    """Measure one layer with all available backends.

    Returns the median seconds of each typical batch; backends are timed interleaved.
    """
    names = ("native", "sdpa") if device.type == "cpu" else ("triton", "flex", "sdpa")
    backends = _create_available(names, head_shape, dtype, device)
    made = torch.Generator().manual_seed(0)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=made).to(dtype).to(device)

    keys, values = (noise(2 * context, head_shape.num_kv_heads, head_shape.head_dim) for _ in range(2))
    result: Table = {name: {} for name in backends}
    for case, metadata in _workloads(context):
        rows = [
            noise(count, metadata.num_tokens, head_shape.head_dim)
            for count in (head_shape.num_q_heads, head_shape.num_kv_heads, head_shape.num_kv_heads)
        ]
        timings: dict[str, list[float]] = {name: [] for name in backends}
        for _ in range(ROUNDS):
            for name, candidate in list(backends.items()):
                try:
                    timings[name].append(_time_layer(candidate, metadata, rows, keys, values, spec, device))
                except Exception as exc:  # compiler error or out of memory: leave the backend out
                    warnings.warn(f"{name} is left out, it fails here: {str(exc)[:300]}", stacklevel=2)
                    del backends[name]
        for name in backends:
            result[name][case] = sorted(timings[name])[ROUNDS // 2]
    return {name: result[name] for name in backends}


def save(table: Table, head_shape: HeadShape, dtype: torch.dtype, device: torch.device) -> Path:
    """Store a measurement in the user's cache folder; return the file."""
    path = _path()
    ensure_dir(path.parent)
    atomic_write_text(path, json.dumps(_load_tables() | {_key(head_shape, dtype, device): table}, indent=1))
    return path


def _workloads(context: int) -> Iterator[tuple[str, AttentionMetadata]]:
    """Yield typical batches: decodes over a shifted and a shared context, and a prefill."""
    half = context // 2
    own = range(context, context + SMALL_BATCH)
    shifted = [
        KVRead(0, 0, 1, 3, half, 0, 3),
        KVRead(half, 0, 1, -half, half, 0, 0),
        KVRead(own[0], 0, 1, 0, 1, 1, context),
    ]
    shared = [KVRead(0, row, row + 1, 0, context, 0, 0) for row in range(8)]
    shared += [KVRead(own[row], row, row + 1, 0, 1, 1, context) for row in range(8)]
    many = [KVRead(0, 0, half, 0, half, 0, 0), KVRead(context, 0, half, 0, 1, 1, half)]
    yield "few rows: one", build_metadata([own[0]], shifted, [context])
    yield "few rows: eight that share", build_metadata(list(own[:8]), shared, [context] * 8)
    yield "many rows", build_metadata(list(range(context, context + half)), many, list(range(half, context)))


def _time_layer(
    backend: Backend,
    metadata: AttentionMetadata,
    rows: list[Tensor],
    keys: Tensor,
    values: Tensor,
    spec: AttentionSpec,
    device: torch.device,
) -> float:
    """Return the seconds of the second layer; the first also computes the cached plan data."""
    for last in (False, True):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        backend(metadata, rows[0], rows[1], rows[2], keys, values, keys.shape[-1] ** -0.5, spec)
        if last and device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _path() -> Path:
    return user_cache_path("choreograph") / "backends.json"


def _load_tables() -> dict[str, Table]:
    try:
        result: dict[str, Table] = json.loads(_path().read_text())
    except (OSError, ValueError):
        return {}
    tables = result if isinstance(result, dict) else {}
    return {key: table for key, table in tables.items() if _is_table(table)}


def _is_table(table: object) -> bool:
    """Return whether the value is a valid table; the file may have been edited."""
    return isinstance(table, dict) and all(
        isinstance(cases, dict) and cases and all(isinstance(timings, float) for timings in cases.values())
        for cases in table.values()
    )


def _key(head_shape: HeadShape, dtype: torch.dtype, device: torch.device) -> str:
    device_name = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    )
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    made = f"choreograph {_version()}, torch {torch.__version__}"
    return f"{device_name}, {threads} threads, {made}, {dtype}, {head_shape.num_q_heads}/{head_shape.num_kv_heads}/{head_shape.head_dim}"


def _version() -> str:
    try:
        return version("choreograph")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "not installed"
