"""Linear layers over packed weights against oneDNN's prepacked products and ATen's in int4.

Weights of 1,536 x 576 one after the other, 270 MB in bfloat16 and 83 MB in int4, so that they come from memory as in a
step. The speed of memory is that of a sum over the bfloat16 weights. Without AVX-512 bfloat16 instructions, oneDNN's
weights are float32, which is faster for it, and results are saved as `linear_avx2`.
"""

from functools import partial

import torch
from torch import Tensor

from choreograph.models.kernels import int4_linear
from choreograph.models.kernels.packed_linear import load_kernel, pack

from .common import Row, has_fast_bfloat16, interleaved, median_row, ratio_row, save, seconds

FEATURES, WIDTH, LAYERS, ROUNDS = 1536, 576, 150, 12
COUNT = FEATURES * WIDTH * LAYERS
GROUP = int4_linear.GROUP_SIZE


def packed(x: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        torch.ops.choreograph.linear(x, weight, None, FEATURES)


def packed_int4(x: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        torch.ops.choreograph.linear_int4(x, weight, None, FEATURES)


def prepacked(x: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def aten_int4(x: Tensor, weights: list[tuple[Tensor, Tensor]]) -> None:
    rows = x.view(-1, WIDTH)
    for weight, scales_and_zeros in weights:
        torch.ops.aten._weight_int4pack_mm_for_cpu(rows, weight, GROUP, scales_and_zeros)


def for_aten(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize as `int4_linear` does, but for scales and zero points in bfloat16: (value - 8) * scale + zero."""
    values, scales, minimums = int4_linear.quantize(weight)
    zeros = minimums.float() + 8 * scales.float()
    layout = torch.stack([scales.float(), zeros], -1).transpose(0, 1).bfloat16().contiguous()
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.flatten(1).int(), 1), layout


def compare(name: str, sides: dict[str, partial[float]], num_bytes: float) -> list[Row]:
    """Measure two sides in turns, ours first."""
    (ours, own), (theirs, other) = zip(sides, interleaved(ROUNDS, *sides.values()), strict=True)
    result = [
        median_row(f"{name}: {side}", [t / LAYERS * 1e6 for t in times], "us", better="lower")
        for side, times in ((ours, own), (theirs, other))
    ]
    result.append(median_row(f"{name}: {ours}, weights read", [num_bytes / 1e9 / t for t in own], "GB/s"))
    return [*result, ratio_row(name, other, own, peer=theirs)]


def main() -> None:
    load_kernel()
    assert int4_linear.is_kernel_available()
    weights = [torch.randn(FEATURES, WIDTH).bfloat16() for _ in range(LAYERS)]
    ours = [pack(weight) for weight in weights]
    ours_int4 = [int4_linear.pack(*int4_linear.quantize(weight)) for weight in weights]
    theirs_int4 = [for_aten(weight) for weight in weights]
    words = torch.stack(weights).view(torch.float32)
    (reading,) = interleaved(ROUNDS, lambda: seconds(words.sum))
    rows: list[Row] = [median_row("memory: sum over the weights", [2 * COUNT / 1e9 / t for t in reading], "GB/s")]
    for num_rows in (1, 8, 32, 512):
        x = torch.randn(1, num_rows, WIDTH).bfloat16()
        dtype, name = (torch.bfloat16, "") if has_fast_bfloat16() else (torch.float32, " in float32")
        theirs = [torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), num_rows) for weight in weights]
        sides = {"packed": partial(seconds, partial(packed, x, ours))}
        sides[f"oneDNN, prepacked{name}"] = partial(seconds, partial(prepacked, x.to(dtype), theirs))
        interleaved(2, *sides.values())
        rows += compare(f"{num_rows} rows", sides, 2 * COUNT)
        sides = {"packed": partial(seconds, partial(packed_int4, x, ours_int4))}
        sides["ATen"] = partial(seconds, partial(aten_int4, x, theirs_int4))
        interleaved(2, *sides.values())
        rows += compare(f"int4, {num_rows} rows", sides, 0.625 * COUNT)
    save("linear" if has_fast_bfloat16() else "linear_avx2", rows)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
