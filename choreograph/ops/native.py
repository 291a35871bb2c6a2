"""Builds `native.cpp` for one head size and type with the machine's C++ compiler, and calls it.

The library lies in the user's cache folder, named by the hash of source, flags and processor: built once, in
a few seconds. Where there is no compiler, `load` says so and the engine uses the SDPA backend.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from platformdirs import user_cache_path
from torch import Tensor

from .kind import Kind
from .plan import Plan

ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16"}
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_SIGNATURE = (_POINTER, ctypes.c_float, *(_POINTER, _LONG, _LONG) * 3, *(_POINTER,) * 4)


class _PlanView(ctypes.Structure):
    """What all layers of a kind share in a step. Mirrors `PlanView` in native.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("slots", "positions", "segments", "readers", "cos", "sin", "slopes")),
        *((name, _LONG) for name in ("rows", "heads", "groups", "segment_count", "reader_count")),
        *((name, _LONG) for name in ("half", "interleaved", "threads", "window")),
        ("softcap", ctypes.c_float),
    )


class BackendUnavailable(Exception):
    """Why a backend cannot be used here: no compiler, another device, head size or type."""


def supports(width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """None if the kernel covers this shape, else the reason why not."""
    if device.type != "cpu":
        return f"device {device} is not the CPU"
    if dtype not in ELEMENTS:
        return f"type {dtype} is not float32 or bfloat16"
    if width % 16 or not 16 <= width <= 256:
        return f"head size {width} is not a multiple of 16 up to 256"
    return None


@cache
def load(width: int, dtype: torch.dtype) -> "NativeKernel":
    """The kernel for one head size and type, built if it is not in the cache yet."""
    try:
        library = ctypes.CDLL(str(build(width, dtype, user_cache_path("choreograph") / "native")))
    except OSError as problem:  # a cache folder that cannot be written, a library that cannot be loaded
        raise BackendUnavailable(str(problem)) from None
    return NativeKernel(library, width, dtype)


class NativeKernel:
    """One compiled `choreograph_attend`, for tensors of exactly one head size and type."""

    def __init__(self, library: ctypes.CDLL, width: int, dtype: torch.dtype) -> None:
        self._shape = (width, dtype)
        self._call = library.choreograph_attend
        self._call.argtypes = _SIGNATURE
        self._call.restype = None

    def attend(
        self,
        plan: Plan,
        query: Float[Tensor, "H N D"],
        key: Float[Tensor, "G N D"],
        value: Float[Tensor, "G N D"],
        keys: Float[Tensor, "S G D"],
        values: Float[Tensor, "S G D"],
        scale: float,
        kind: Kind,
        sinks: Float[Tensor, "H"] | None = None,
    ) -> Float[Tensor, "N H D"]:
        """Writes the rows' own keys and values into their slots, then attends."""
        heads, rows, width = query.shape
        for given in (query, key, value, keys, values):
            if (given.shape[-1], given.dtype) != self._shape:
                raise TypeError(f"the kernel is built for {self._shape}, not {(given.shape[-1], given.dtype)}")
        out = torch.empty(rows, heads, width, dtype=query.dtype)
        if not query.stride(2) == key.stride(2) == value.stride(2) == 1:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        empty = None if sinks is None else sinks.detach().float().contiguous()
        self._call(
            _plan_view(plan, heads, keys.shape[1], kind),
            scale,
            *(query.data_ptr(), *query.stride()[:2], key.data_ptr(), *key.stride()[:2]),
            *(value.data_ptr(), *value.stride()[:2], keys.data_ptr(), values.data_ptr(), out.data_ptr()),
            None if empty is None else empty.data_ptr(),
        )
        return out


def _plan_view(plan: Plan, heads: int, groups: int, kind: Kind) -> int:
    """The address of the plan as the kernel reads it; kept by the plan as long as it lives."""
    key = f"native {id(kind)}"
    if key not in plan.memo:
        rotary = kind.rotary
        slopes = np.asarray(kind.slopes, dtype=np.float32) if kind.slopes else None
        arrays = (plan.slots, plan.positions, plan.segments, plan.readers, *plan.turns(rotary))
        view = _PlanView(
            *(array.ctypes.data for array in arrays),
            None if slopes is None else slopes.ctypes.data,
            *(plan.rows, heads, groups, len(plan.segments), len(plan.readers)),
            *((rotary.half, rotary.interleaved) if rotary else (0, 0)),
            *(torch.get_num_threads(), kind.window or 0, kind.softcap or 0.0),
        )
        plan.memo[key] = (view, ctypes.addressof(view), slopes, kind)
    return cast(tuple[_PlanView, int, object, Kind], plan.memo[key])[1]


def build(width: int, dtype: torch.dtype, folder: Path, *more: str) -> Path:
    """The library for one head size and type; built if the folder does not hold it. more: flags for the compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise BackendUnavailable("no C++ compiler: install g++ or name one in CXX")
    source = Path(__file__).with_name("native.cpp")
    flags = (*FLAGS, f"-DWIDTH={width}", f"-DELEMENT={ELEMENTS[dtype]}", *more)
    identity = "\0".join((source.read_text(), *flags, compiler, platform.machine(), _processor()))
    name = f"attend-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(compiler, flags, source, folder / name)
    return folder / name


def _compile(compiler: str, flags: tuple[str, ...], source: Path, target: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".so", delete=False) as draft:
        command = [compiler, *flags, str(source), "-o", draft.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        problem = done.stderr.strip()[-400:] if done.returncode else None
    except OSError as error:
        problem = str(error)
    if problem is not None:
        os.unlink(draft.name)
        raise BackendUnavailable(f"the C++ compiler {compiler} could not build {source.name}: {problem}")
    os.replace(draft.name, target)


def _processor() -> str:
    """What -march=native depends on: the processor's feature flags."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    return next((line for line in info.read_text().splitlines() if line.startswith("flags")), "")
