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

from choreograph.attention import triton_kernels as kernels
from choreograph.attention.metadata import AttentionSpec, HeadShape
from choreograph.attention.rope import Rope
from choreograph.attention.triton_backend import launch_config, tile_rows
from choreograph.console import print_table

from ..common import write

SHARED_MEMORY_KIB = {
    80: (163, 164),
    86: (99, 100),
    89: (99, 100),
    90: (227, 228),
}  # KiB of shared memory: for a program, of all
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
STEPS = {"decode": 8, "mixed": 64, "prefill": 512}  # rows


def _rope(half_dim: int, interleaved: bool = False) -> Rope:
    return Rope(tuple(1e4 ** (-i / half_dim) for i in range(half_dim)), interleaved)


SHAPES: dict[str, tuple[HeadShape, AttentionSpec]] = {
    "Llama 3.1 8B": (HeadShape(32, 8, 128), AttentionSpec(_rope(64))),
    "Llama 2 7B": (HeadShape(32, 32, 128), AttentionSpec(_rope(64))),
    "SmolLM2 135M": (HeadShape(9, 3, 64), AttentionSpec(_rope(32))),
    "Qwen2.5 0.5B": (HeadShape(14, 2, 64), AttentionSpec(_rope(32))),
    "Gemma 2 2B": (HeadShape(8, 4, 256), AttentionSpec(_rope(128), sliding_window=4096, logit_softcap=50.0)),
    "Gemma 3 270M": (HeadShape(4, 1, 256), AttentionSpec(_rope(128), sliding_window=512)),
    "Falcon 7B": (HeadShape(71, 1, 64), AttentionSpec(_rope(32))),
    "MPT 7B": (HeadShape(32, 32, 128), AttentionSpec(alibi_slopes=(0.5,) * 32)),
    "GPT-2": (HeadShape(12, 12, 64), AttentionSpec()),
    "GPT-J 6B": (HeadShape(16, 16, 256), AttentionSpec(_rope(32, interleaved=True))),
    "Phi-2": (HeadShape(32, 32, 80), AttentionSpec(_rope(16))),
    "gpt-oss 20B": (HeadShape(64, 8, 64), AttentionSpec(_rope(32), sliding_window=128)),
}


@dataclass(frozen=True)
class KernelBinary:
    """One kernel for one kind of GPU. spilled: bytes of a thread that found no register. programs: how many fit on a
    multiprocessor at a time, none where one is too large. products: the instructions that multiply matrices."""

    registers: int
    spilled: int
    shared: int
    warps: int
    programs: int
    products: str


def compile_attend(
    head_shape: HeadShape,
    spec: AttentionSpec,
    dtype: str,
    rows: int,
    arch: int,
    *,
    single_split: bool = False,
    is_int8: bool = False,
) -> KernelBinary:
    size = DTYPES[dtype]
    given = launch_config(head_shape, tile_rows(head_shape, rows, size), size, spec, single_split)
    options = {name: given.pop(name) for name in ("num_warps", "num_stages")}
    given |= {"INT8": is_int8, "ALIGNED": False}
    types = dict.fromkeys(("query", "rotated_q"), f"*{dtype}") | dict.fromkeys(given, "constexpr")
    types |= dict.fromkeys(("keys", "values"), "*i8" if is_int8 else f"*{dtype}")
    types |= dict.fromkeys(("key_scales", "value_scales"), "*fp32" if is_int8 else f"*{dtype}")
    types |= dict.fromkeys(("work_items", "kv_chunks", "row_params", "rows"), "*i32")
    types |= dict.fromkeys(("cos", "sin", "alibi_slopes", "lse", "temperatures"), "*fp32") | {
        "partial_out": f"*{dtype if single_split else 'fp32'}"
    }
    types |= dict.fromkeys(("q_head_stride", "q_token_stride", "slot_stride", "window"), "i32") | {
        "scale": "fp32",
        "softcap": "fp32",
    }
    return _binary(kernels.attend, types, given, options, arch)


def compile_merge(head_shape: HeadShape, dtype: str, arch: int, *, has_sinks: bool) -> KernelBinary:
    wide = max(16, triton.next_power_of_2(head_shape.head_dim))
    given = {"HEADS": head_shape.num_q_heads, "D": head_shape.head_dim, "D_PAD": wide, "SINKS": has_sinks}
    given["ALIGNED"] = False
    types = dict.fromkeys(("partial_out", "lse", "alignments"), "*fp32")
    types |= dict.fromkeys(("merge_order", "merge_indptr", "aligned_rows"), "*i32")
    types |= {"sinks": f"*{dtype if has_sinks else 'fp32'}", "out": f"*{dtype}"} | dict.fromkeys(given, "constexpr")
    return _binary(kernels.merge, types, given, {"num_warps": 4}, arch)


def _binary(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int], arch: int
) -> KernelBinary:
    names = kernel.arg_names
    whole = [
        n
        for n, name in enumerate(names)
        if types[name][0] == "*" or name in ("q_head_stride", "q_token_stride", "slot_stride")
    ]
    made = triton.compile(
        ASTSource(
            kernel,
            {name: types[name] for name in names},
            {(names.index(name),): value for name, value in constants.items()},
            {(n,): [["tt.divisibility", 16]] for n in whole},  # as the launcher finds pointers and strides
        ),
        target=GPUTarget("cuda", arch, 32),
        options=options,
    )
    registers, spilled = _usage(made.asm["cubin"])
    ptx, warps = made.asm["ptx"], options["num_warps"]
    most, of = SHARED_MEMORY_KIB[arch]
    fits = made.metadata.shared <= most * 1024
    programs = min(65536 // (-(-registers // 8) * 256 * warps), of * 1024 // (made.metadata.shared + 1024), 64 // warps)
    products = next((name for name in ("wgmma", "mma.sync") if name in ptx), "none")
    return KernelBinary(registers, spilled, made.metadata.shared, warps, programs if fits else 0, products)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    result = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert result is not None, said
    return int(result[1]), int(result[2])


def compile_all(
    archs: tuple[int, ...] = tuple(SHARED_MEMORY_KIB), dtypes: tuple[str, ...] = ("bf16", "fp32")
) -> Iterator[dict[str, Any]]:
    for name, (heads, kind) in SHAPES.items():
        for dtype in dtypes:
            seen: set[int] = set()
            for step, rows in STEPS.items():
                tile = tile_rows(heads, rows, DTYPES[dtype])
                if tile in seen:
                    continue
                seen.add(tile)
                for arch in archs:
                    about = {"model": name, "dtype": dtype, "step": step, "arch": arch}
                    yield about | asdict(compile_attend(heads, kind, dtype, rows, arch))


def check() -> None:
    """Every shape for every kind of GPU, in one table."""
    result, lines = [], []
    for one in compile_all():
        result.append(one)
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
    print_table(Console(width=140), "attention kernels as compiled", head, lines, num_text_columns=4)
    write("gpu_binaries", [], "no model", found=result, triton=triton.__version__)


if __name__ == "__main__":
    check()
