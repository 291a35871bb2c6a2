"""C++ attention kernel for the CPU, compiled on demand.

A library for one head dimension and dtype is built once, in a few seconds. It is stored in the user's
cache folder under the hash of source, flags and processor. Without a compiler, `load_kernel` raises and
the engine uses the SDPA backend.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float
from platformdirs import user_cache_path
from torch import Tensor

from ..errors import ConfigError
from .int8_rows import SCALE_BYTES
from .metadata import AttentionCall, AttentionMetadata, AttentionSpec

C_TYPES = {torch.float32: "float", torch.bfloat16: "bf16"}

FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")

ISA_VARIABLE = "CHOREOGRAPH_MAX_CPU_ISA"  # environment variable: kernels use no instructions beyond the set it names


class InstructionSet(NamedTuple):
    """What `ISA_VARIABLE` hides, and how kernels are compiled if that hides anything."""

    hidden: tuple[str, ...]  # first letters of CPU flags
    options: tuple[str, ...]  # of the compiler


INSTRUCTION_SETS = {  # ascending
    "sse4": InstructionSet(("avx", "fma", "f16c", "amx"), ("-march=x86-64-v2", "-mtune=native")),
    "avx2": InstructionSet(("avx512", "avx10", "amx"), ("-march=x86-64-v3", "-mtune=native")),
    "avx512": InstructionSet(("avx512_bf16", "avx512_fp16", "avx10", "amx"), ("-march=x86-64-v4", "-mtune=native")),
    "avx512_bf16": InstructionSet(("avx10", "amx"), ("-march=x86-64-v4", "-mavx512bf16", "-mtune=native")),
    "amx": InstructionSet((), ()),
}

# Variables that limit what our kernels, PyTorch, oneDNN and MKL compute with.
LIMIT_VARIABLES = (
    *(ISA_VARIABLE, "ATEN_CPU_CAPABILITY"),
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"),
)

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class _CMetadata(ctypes.Structure):
    """Kernel arguments shared by all layers with one spec (C++ `PlanView`)."""

    _fields_ = (
        *((name, _POINTER) for name in ("slots", "positions", "segments", "readers", "cos", "sin", "slopes")),
        *((name, _POINTER) for name in ("token_of", "temperatures", "log_scales")),
        *((name, _LONG) for name in ("tokens", "rows", "heads", "groups", "segment_count", "reader_count")),
        *((name, _LONG) for name in ("half", "interleaved", "threads", "window")),
        ("softcap", ctypes.c_float),
    )


class BackendUnavailableError(Exception):
    """Error for an attention backend that cannot run here.

    For example, there is no compiler, or the device, head dimension or dtype is not supported.
    """


def unsupported_reason(head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    if device.type != "cpu":
        return f"device {device} is not the CPU"
    if dtype not in C_TYPES:
        return f"type {dtype} is not float32 or bfloat16"
    if head_dim % 16 or not 16 <= head_dim <= 256:
        return f"head size {head_dim} is not a multiple of 16 up to 256"
    return None


@cache
def load_kernel(
    head_dim: int, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None = None
) -> "CppBackend":
    """Load the kernel for a head dimension and dtype; build if missing.

    Args:
        kv_dtype: of stored keys and values, `dtype` or int8; None for `dtype`.

    Raises:
        BackendUnavailableError: if the arguments are not supported, or it cannot be built or loaded.
    """
    if reason := unsupported_reason(head_dim, dtype, device):
        raise BackendUnavailableError(reason)
    try:
        library = ctypes.CDLL(str(build(head_dim, dtype, user_cache_path("choreograph") / "native", kv_dtype=kv_dtype)))
    except OSError as exc:  # a cache folder that cannot be written, a library that cannot be loaded
        raise BackendUnavailableError(str(exc)) from None
    return CppBackend(library, head_dim, dtype, kv_dtype)


class CppBackend:
    """Backend that writes and attends in one call of the C++ kernel."""

    name = "native"

    def __init__(
        self, library: ctypes.CDLL, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> None:
        row = (head_dim + SCALE_BYTES, torch.int8) if kv_dtype == torch.int8 else (head_dim, dtype)
        self._expected = head_dim, dtype, *row
        self._kernel = library.choreograph_attend
        self._kernel.argtypes = (_POINTER, ctypes.c_float, *(_POINTER, _LONG, _LONG) * 3, *(_POINTER,) * 4)
        self._kernel.restype = None
        self.address = ctypes.cast(self._kernel, _POINTER).value

    def check(self, head_dim: int, dtype: torch.dtype, keys: Tensor) -> None:
        """Check that the kernel is built for these shapes and types.

        Args:
            dtype: of the batch.
            keys: stored ones of a layer.

        Raises:
            TypeError: if it does not.
        """
        if (actual := (head_dim, dtype, keys.shape[-1], keys.dtype)) != self._expected:
            raise TypeError(
                f"the kernel is built for head dimensions and types of the batch and cache {self._expected}, not {actual}"
            )

    def __call__(self, call: AttentionCall) -> Float[Tensor, "N H D"]:
        """Write the batch's keys and values into their slots, then compute attention."""
        query, key, value, keys, values = call.query, call.key, call.value, call.keys, call.values
        num_heads, num_tokens, head_dim = query.shape
        self.check(head_dim, query.dtype, keys)
        aligned = call.metadata.with_aligned_rows()
        num_rows = num_tokens if aligned is None else aligned.metadata.num_tokens
        out = torch.empty(num_rows, num_heads, head_dim, dtype=query.dtype)
        if not query.stride(2) == key.stride(2) == value.stride(2) == 1:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        sinks = None if call.sinks is None else call.sinks.detach().float().contiguous()
        self._kernel(
            metadata_address(call.metadata, call.spec, num_heads, keys.shape[1]),
            call.scale,
            *(query.data_ptr(), *query.stride()[:2], key.data_ptr(), *key.stride()[:2]),
            *(value.data_ptr(), *value.stride()[:2], keys.data_ptr(), values.data_ptr(), out.data_ptr()),
            None if sinks is None else sinks.data_ptr(),
        )
        return out[:num_tokens]


def metadata_address(metadata: AttentionMetadata, spec: AttentionSpec, num_heads: int, num_kv_heads: int) -> int:
    """Return the address of the kernel's C struct, which is built once and lives as long as `metadata`."""
    key = f"native {id(spec)}"
    if key not in metadata.cache:
        metadata.cache[key] = _c_metadata(metadata, spec, num_heads, num_kv_heads)
    return cast(tuple[int], metadata.cache[key])[0]


def _c_metadata(own: AttentionMetadata, spec: AttentionSpec, num_heads: int, num_kv_heads: int) -> tuple[int, object]:
    """Return the address of the kernel's C struct, and the objects that must live as long as it."""
    rope, aligned = spec.rope, own.with_aligned_rows()
    metadata = own if aligned is None else aligned.metadata
    cos, sin = metadata.rope_tables(rope)
    slopes = None if spec.alibi_slopes is None else np.array(spec.alibi_slopes, dtype=np.float32)
    struct = _CMetadata(
        slots=metadata.slots.ctypes.data,
        positions=metadata.positions.ctypes.data,
        segments=metadata.kv_runs.ctypes.data,
        readers=metadata.reads.ctypes.data,
        cos=cos.ctypes.data,
        sin=sin.ctypes.data,
        slopes=None if slopes is None else slopes.ctypes.data,
        token_of=None if aligned is None else aligned.token_of.ctypes.data,
        temperatures=None if aligned is None else aligned.temperatures.ctypes.data,
        log_scales=None if aligned is None else aligned.log_scales.ctypes.data,
        tokens=own.num_tokens,
        rows=metadata.num_tokens,
        heads=num_heads,
        groups=num_kv_heads,
        segment_count=len(metadata.kv_runs),
        reader_count=len(metadata.reads),
        half=cos.shape[1],
        interleaved=rope is not None and rope.interleaved,
        threads=torch.get_num_threads(),
        window=spec.sliding_window or 0,
        softcap=spec.logit_softcap or 0.0,
    )
    return ctypes.addressof(struct), (struct, slopes, spec, aligned)


def build(
    head_dim: int, dtype: torch.dtype, folder: Path, *extra_flags: str, kv_dtype: torch.dtype | None = None
) -> Path:
    """Compile the kernel library into `folder`, if missing; return its path."""
    stored = "int8_t" if kv_dtype == torch.int8 else C_TYPES[dtype]
    sources = [
        Path(__file__).with_name(name) for name in ("cpp_kernel.cpp", "cpp_tiles.h", "cpp_amx.h", "cpp_vector.h")
    ]
    flags = (f"-DWIDTH={head_dim}", f"-DELEMENT={C_TYPES[dtype]}", f"-DSTORED={stored}", *extra_flags)
    return compile_library("attend", sources, flags, folder)


def compile_library(name: str, sources: Sequence[Path], flags: Sequence[str], folder: Path) -> Path:
    """Compile a library into `folder`, if missing; return its path.

    Args:
        sources: the file to compile, then those that it includes.
        flags: compiler flags in addition to `FLAGS` and those of the instruction set.

    Raises:
        BackendUnavailableError: without a compiler, or if it fails.
        ConfigError: if `ISA_VARIABLE` names no instruction set.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise BackendUnavailableError("no C++ compiler: install g++ or name one in CXX")
    code, flags = [source.read_text() for source in sources], (*_isa_options(), *FLAGS, *flags)
    identity = "\0".join((*code, *flags, compiler, platform.machine(), cpu_flags()))
    target = folder / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as draft:
        command = [compiler, *flags, str(sources[0]), "-o", draft.name]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
        error = result.stderr.strip()[-400:] if result.returncode else None
    except OSError as exc:
        error = str(exc)
    if error is not None:
        os.unlink(draft.name)
        raise BackendUnavailableError(f"the C++ compiler {compiler} could not build {sources[0].name}: {error}")
    os.replace(draft.name, target)
    return target


def has_avx2() -> bool:
    """Return whether kernels may use AVX2, FMA and F16C."""
    return {"avx2", "fma", "f16c"} <= set(cpu_flags().split())


def cpu_flags() -> str:
    """Return the CPU feature flags that kernels may use.

    Raises:
        ConfigError: if `ISA_VARIABLE` names no instruction set.
    """
    isa = _max_isa()
    return " ".join(flag for flag in _all_cpu_flags() if isa is None or not flag.startswith(isa.hidden))


def cpu_limits() -> str:
    """Return the environment's limits of instructions, as part of cache keys."""
    return " ".join(f"{name}={os.environ[name]}" for name in LIMIT_VARIABLES if os.environ.get(name))


def _isa_options() -> tuple[str, ...]:
    """Return the compiler's options for the instruction set."""
    isa = _max_isa()
    if isa is not None and any(flag.startswith(isa.hidden) for flag in _all_cpu_flags()):
        return isa.options
    return ("-march=native",)


def _max_isa() -> InstructionSet | None:
    name = os.environ.get(ISA_VARIABLE)
    if name and name not in INSTRUCTION_SETS:
        raise ConfigError(f"{ISA_VARIABLE}={name!r}: use one of {list(INSTRUCTION_SETS)}, or leave it unset")
    return INSTRUCTION_SETS[name] if name else None


def _all_cpu_flags() -> list[str]:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor().split()
    lines = info.read_text().splitlines()
    return next((line.split()[1:] for line in lines if line.startswith(("flags", "Features"))), [])
