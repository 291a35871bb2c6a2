"""Autotuning of the attention backend, once per machine and model shape.

`auto` selects the fastest measured backends. Without a measurement, it selects the default of the
device. Measurements are stored in the user's cache folder.
"""

import platform
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from platformdirs import user_cache_path
from pydantic import TypeAdapter
from torch import Tensor

from ..utils import atomic_write_text, ensure_dir
from ..version import __version__
from .backend import Backend, create_backend
from .cpp_backend import BackendUnavailableError, cpu_limits
from .metadata import AttentionCall, AttentionMetadata, AttentionSpec, HeadShape, KVRead, build_metadata

ROUNDS = 7  # measurements per backend and case; the median counts

CONTEXT = 2048  # context length in slots

SMALL_BATCH = 16  # maximum query tokens of a small batch

Table = dict[str, dict[str, float]]  # seconds, by backend name and case

_TABLES = TypeAdapter(dict[str, Table])  # by machine, versions and model shape


class SizeDispatchBackend:
    """Pair of backends: one for up to `SMALL_BATCH` query tokens, one beyond."""

    def __init__(self, small: Backend, large: Backend) -> None:
        self.name = f"{small.name}, {large.name} from {SMALL_BATCH + 1} rows on"
        self._small, self._large = small, large

    def __call__(self, call: AttentionCall) -> Tensor:
        return (self._small if call.metadata.num_tokens <= SMALL_BATCH else self._large)(call)


def create_tuned_backend(
    name: str, head_shape: HeadShape, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None = None
) -> tuple[Backend, str | None]:
    """Create a backend by name; `auto` selects the fastest measured ones.

    Small and large batches may use different backends. Without a measurement, which an int8 cache never has, the
    result is that of `create_backend`.
    """
    is_measured = name == "auto" and kv_dtype in (None, dtype)
    table = _load_tables().get(_key(head_shape, dtype, device), {}) if is_measured else {}
    backends = _create_available(list(table), head_shape, dtype, device)
    if not backends:
        return create_backend(name, head_shape.head_dim, dtype, device, kv_dtype)
    small, large = fastest({name: table[name] for name in backends})
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
    """Return the fastest backends' names for small and for large batches."""

    def seconds(name: str, is_small: bool) -> float:
        return sum(timing for case, timing in table[name].items() if case.startswith("few") == is_small)

    return min(table, key=lambda name: seconds(name, True)), min(table, key=lambda name: seconds(name, False))


def run(
    head_shape: HeadShape, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, *, context: int = CONTEXT
) -> Table:
    """Measure one layer with all available backends.

    Returns the median seconds of each typical batch; backends are timed interleaved.
    """
    names = ("native", "sdpa") if device.type == "cpu" else ("triton", "sdpa")
    backends = _create_available(names, head_shape, dtype, device)
    generator = torch.Generator().manual_seed(0)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    keys, values = (noise(2 * context, head_shape.num_kv_heads, head_shape.head_dim) for _ in range(2))
    result: Table = {name: {} for name in backends}
    for case, metadata in _workloads(context).items():
        query, key, value = (
            noise(num_heads, metadata.num_tokens, head_shape.head_dim)
            for num_heads in (head_shape.num_q_heads, head_shape.num_kv_heads, head_shape.num_kv_heads)
        )
        call = AttentionCall(metadata, query, key, value, keys, values, head_shape.head_dim**-0.5, spec)
        timings: dict[str, list[float]] = {name: [] for name in backends}
        for _ in range(ROUNDS):
            for name, backend in list(backends.items()):
                try:
                    timings[name].append(_time_layer(backend, call))
                except Exception as exc:  # compiler error or out of memory
                    warnings.warn(f"backend {name!r} is left out, it fails here: {str(exc)[:300]}", stacklevel=2)
                    del backends[name], result[name]
        for name in backends:
            result[name][case] = sorted(timings[name])[ROUNDS // 2]
    return result


def _workloads(context: int) -> dict[str, AttentionMetadata]:
    """Return the attention metadata of typical decodes and prefills, by case."""
    half = context // 2
    shifted = [
        KVRead(0, 0, 1, 3, half, 0, 3),
        KVRead(half, 0, 1, -half, half, 0, 0),
        KVRead(context, 0, 1, 0, 1, 1, context),
    ]
    shared = [KVRead(0, row, row + 1, 0, context, 0, 0) for row in range(8)]
    shared += [KVRead(context + row, row, row + 1, 0, 1, 1, context) for row in range(8)]
    prefill = [KVRead(0, 0, half, 0, half, 0, 0), KVRead(context, 0, half, 0, 1, 1, half)]
    return {
        "few rows: one": build_metadata([context], shifted, [context]),
        "few rows: eight that share": build_metadata(list(range(context, context + 8)), shared, [context] * 8),
        "many rows": build_metadata(list(range(context, context + half)), prefill, list(range(half, context))),
    }


def _time_layer(backend: Backend, call: AttentionCall) -> float:
    """Return the seconds of a second run, with cached metadata."""
    device = call.keys.device
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        backend(call)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def save(table: Table, head_shape: HeadShape, dtype: torch.dtype, device: torch.device) -> Path:
    """Store a measurement in the user's cache folder; return the file's path."""
    path = _path()
    ensure_dir(path.parent)
    tables = _load_tables() | {_key(head_shape, dtype, device): table}
    atomic_write_text(path, _TABLES.dump_json(tables, indent=1).decode())
    return path


def _load_tables() -> dict[str, Table]:
    """Return the stored measurements; none if the file is missing or invalid."""
    try:
        return _TABLES.validate_json(_path().read_bytes())
    except (OSError, ValueError):
        return {}


def _path() -> Path:
    return user_cache_path("choreograph") / "backends.json"


def _key(head_shape: HeadShape, dtype: torch.dtype, device: torch.device) -> str:
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else platform.processor() or platform.machine()
    threads, limits = (0, "") if is_gpu else (torch.get_num_threads(), cpu_limits())
    versions = f"choreograph {__version__}, torch {torch.__version__}"
    heads = f"{head_shape.num_q_heads}/{head_shape.num_kv_heads}/{head_shape.head_dim}"
    return ", ".join(filter(None, (name, f"{threads} threads", limits, versions, str(dtype), heads)))
