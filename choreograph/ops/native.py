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

import torch
from jaxtyping import Float
from platformdirs import user_cache_path
from torch import Tensor

from .plan import Plan

ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16"}
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SIGNATURE = (
    *(_POINTER, _LONG, _LONG) * 3,
    *(_POINTER,) * 4,
    *(_INT,) * 3,
    _FLOAT,
    *(_POINTER, _INT) * 2,
    *(_POINTER,) * 2,
    *(_INT,) * 3,
)


class NativeUnavailable(Exception):
    """Why the compiled kernel cannot be used here: no compiler, another device, head size or type."""


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
    return NativeKernel(ctypes.CDLL(str(_build(width, ELEMENTS[dtype]))))


class NativeKernel:
    """One compiled `choreograph_attend`."""

    def __init__(self, library: ctypes.CDLL) -> None:
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
    ) -> Float[Tensor, "N H D"]:
        """Writes the rows' own keys and values into their slots, then attends."""
        heads, rows, width = query.shape
        out = torch.empty(rows, heads, width, dtype=query.dtype)
        query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
        self._call(
            *(query.data_ptr(), query.stride(1), query.stride(0)),
            *(key.data_ptr(), key.stride(1), key.stride(0)),
            *(value.data_ptr(), value.stride(1), value.stride(0)),
            *(keys.data_ptr(), values.data_ptr(), out.data_ptr()),
            *self._plan_arguments(plan, rows, heads, keys.shape[1], scale),
        )
        return out

    @staticmethod
    def _plan_arguments(plan: Plan, rows: int, heads: int, groups: int, scale: float) -> tuple:
        if "native" not in plan.memo:
            half, interleaved = (plan.rotary.half, plan.rotary.interleaved) if plan.rotary else (0, False)
            plan.memo["native"] = (
                (plan.segments.ctypes.data, len(plan.segments), plan.readers.ctypes.data, len(plan.readers)),
                (plan.cos.ctypes.data, plan.sin.ctypes.data, half, int(interleaved), torch.get_num_threads()),
                plan.slots.ctypes.data,
            )
        reads, rotation, slots = cast(tuple[tuple, tuple, int], plan.memo["native"])
        return (slots, rows, heads, groups, scale, *reads, *rotation)


def _build(width: int, element: str) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise NativeUnavailable("no C++ compiler: install g++ or name one in CXX")
    source = Path(__file__).with_name("native.cpp")
    flags = (*FLAGS, f"-DWIDTH={width}", f"-DELEMENT={element}")
    identity = "\0".join((source.read_text(), *flags, compiler, platform.machine(), _processor()))
    name = f"attend-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    folder = user_cache_path("choreograph") / "native"
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
        raise NativeUnavailable(f"the C++ compiler {compiler} could not build {source.name}: {problem}")
    os.replace(draft.name, target)


def _processor() -> str:
    """What -march=native depends on: the processor's feature flags."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    return next((line for line in info.read_text().splitlines() if line.startswith("flags")), "")
