"""What the attention kernels become on GPUs, without one: Triton compiles them here as it would there, for the sizes
that `ops.triton.launch` chooses, and the binaries tell what they take of a multiprocessor.

`python -m benchmarks.gpu --binaries`. Says nothing of time, but a kernel that spills registers is slow, and one that
wants more shared memory than there is does not start; the interpreter, which the tests run, shows neither.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import triton
from rich.console import Console
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from choreograph.kernels import attention as kernels
from choreograph.ops.kind import Heads, Kind
from choreograph.ops.rope import Rotary
from choreograph.ops.triton import launch, tile_of
from choreograph.report import show_table

from ..common import write

ROOM = {80: (163, 164), 86: (99, 100), 89: (99, 100), 90: (227, 228)}  # KiB of shared memory: for a program, of all
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
STEPS = {"decode": 8, "mixed": 64, "prefill": 512}  # rows


def _turning(half: int, interleaved: bool = False) -> Rotary:
    return Rotary(tuple(1e4 ** (-i / half) for i in range(half)), interleaved)


SHAPES: dict[str, tuple[Heads, Kind]] = {
    "Llama 3.1 8B": (Heads(32, 8, 128), Kind(_turning(64))),
    "Llama 2 7B": (Heads(32, 32, 128), Kind(_turning(64))),
    "SmolLM2 135M": (Heads(9, 3, 64), Kind(_turning(32))),
    "Qwen2.5 0.5B": (Heads(14, 2, 64), Kind(_turning(32))),
    "Gemma 2 2B": (Heads(8, 4, 256), Kind(_turning(128), window=4096, softcap=50.0)),
    "Gemma 3 270M": (Heads(4, 1, 256), Kind(_turning(128), window=512)),
    "Falcon 7B": (Heads(71, 1, 64), Kind(_turning(32))),
    "MPT 7B": (Heads(32, 32, 128), Kind(slopes=(0.5,) * 32)),
    "GPT-2": (Heads(12, 12, 64), Kind()),
    "GPT-J 6B": (Heads(16, 16, 256), Kind(_turning(32, interleaved=True))),
    "Phi-2": (Heads(32, 32, 80), Kind(_turning(16))),
    "gpt-oss 20B": (Heads(64, 8, 64), Kind(_turning(32), window=128)),
}


@dataclass(frozen=True)
class Binary:
    """One kernel for one kind of GPU. spilled: bytes of a thread that found no register. programs: how many fit on a
    multiprocessor at a time, none where one is too large. products: the instructions that multiply matrices."""

    registers: int
    spilled: int
    shared: int
    warps: int
    programs: int
    products: str


def compiled(heads: Heads, kind: Kind, dtype: str, rows: int, arch: int, *, direct: bool = False) -> Binary:
    size = DTYPES[dtype]
    given = launch(heads, tile_of(heads, rows, size), size, kind, direct)
    options = {name: given.pop(name) for name in ("num_warps", "num_stages")}
    types = dict.fromkeys(("query", "keys", "values", "turned"), f"*{dtype}") | dict.fromkeys(given, "constexpr")
    types |= dict.fromkeys(("items", "pieces", "reads", "rows"), "*i32")
    types |= dict.fromkeys(("cos", "sin", "slopes", "norms"), "*fp32") | {"partial": f"*{dtype if direct else 'fp32'}"}
    types |= dict.fromkeys(("q_head", "q_row", "slot_stride", "window"), "i32") | {"scale": "fp32", "cap": "fp32"}
    return _binary(kernels.attend, types, given, options, arch)


def merging(heads: Heads, dtype: str, arch: int, *, sinking: bool) -> Binary:
    wide = max(16, triton.next_power_of_2(heads.width))
    given = {"HEADS": heads.query, "WIDTH": heads.width, "WIDE": wide, "SINKING": sinking}
    types = dict.fromkeys(("partial", "norms"), "*fp32") | dict.fromkeys(("order", "starts"), "*i32")
    types |= {"sinks": f"*{dtype if sinking else 'fp32'}", "out": f"*{dtype}"} | dict.fromkeys(given, "constexpr")
    return _binary(kernels.merge, types, given, {"num_warps": 4}, arch)


def _binary(kernel: Any, types: dict[str, str], given: dict[str, Any], options: dict[str, int], arch: int) -> Binary:
    names = kernel.arg_names
    whole = [n for n, name in enumerate(names) if types[name][0] == "*" or name in ("q_head", "q_row", "slot_stride")]
    made = triton.compile(
        ASTSource(
            kernel,
            {name: types[name] for name in names},
            {(names.index(name),): value for name, value in given.items()},
            {(n,): [["tt.divisibility", 16]] for n in whole},  # as the launcher finds pointers and strides
        ),
        target=GPUTarget("cuda", arch, 32),
        options=options,
    )
    registers, spilled = _usage(made.asm["cubin"])
    ptx, warps = made.asm["ptx"], options["num_warps"]
    most, of = ROOM[arch]
    fits = made.metadata.shared <= most * 1024
    programs = min(65536 // (-(-registers // 8) * 256 * warps), of * 1024 // (made.metadata.shared + 1024), 64 // warps)
    products = next((name for name in ("wgmma", "mma.sync") if name in ptx), "none")
    return Binary(registers, spilled, made.metadata.shared, warps, programs if fits else 0, products)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def binaries(
    archs: tuple[int, ...] = tuple(ROOM), dtypes: tuple[str, ...] = ("bf16", "fp32")
) -> Iterator[dict[str, Any]]:
    for name, (heads, kind) in SHAPES.items():
        for dtype in dtypes:
            seen: set[int] = set()
            for step, rows in STEPS.items():
                tile = tile_of(heads, rows, DTYPES[dtype])
                if tile in seen:
                    continue
                seen.add(tile)
                for arch in archs:
                    about = {"model": name, "dtype": dtype, "step": step, "arch": arch}
                    yield about | asdict(compiled(heads, kind, dtype, rows, arch))


def check() -> None:
    """Every shape for every kind of GPU, in one table."""
    found, lines = [], []
    for one in binaries():
        found.append(one)
        cells = ("registers", "spilled", "shared", "warps", "programs")
        lines.append(
            (
                one["model"],
                one["dtype"],
                one["step"],
                f"sm_{one['arch']}",
                *(str(one[c]) for c in cells),
                one["products"],
            )
        )
        print("...", *lines[-1], flush=True)
    head = ("model", "type", "step", "GPU", "registers", "spilled", "shared", "warps", "programs", "products")
    show_table(Console(width=140), "attention kernels as compiled", head, lines, texts=4)
    write("gpu_binaries", [], "no model", found=found, triton=triton.__version__)


if __name__ == "__main__":
    check()
