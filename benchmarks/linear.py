"""Linear layers with int4 weights against PyTorch's in bfloat16.

Weights of 1,536 x 576 one after the other, 270 MB in bfloat16 and 83 MB in int4, so that they come from memory as in a
step. The speed of memory is that of a sum over the bfloat16 weights. Without AVX-512 bfloat16 instructions, PyTorch's
weights are float32, which is faster for it, and results are saved as `linear_avx2`.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from choreograph.models.kernels import int4_linear

from .common import Row, has_fast_bfloat16, interleaved, median_row, ratio_row, save, seconds

FEATURES, WIDTH, LAYERS, ROUNDS = 1536, 576, 150, 12
COUNT = FEATURES * WIDTH * LAYERS


def int4(x: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        int4_linear.linear_int4(x, weight, None, FEATURES)


def pytorch(x: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        linear(x, weight)


def compare(name: str, sides: dict[str, partial[float]], num_bytes: float) -> list[Row]:
    """Measure two sides in turns, ours first."""
    interleaved(2, *sides.values())
    (ours, own), (theirs, other) = zip(sides, interleaved(ROUNDS, *sides.values()), strict=True)
    result = [
        median_row(f"{name}: {side}", [t / LAYERS * 1e6 for t in times], "us", better="lower")
        for side, times in ((ours, own), (theirs, other))
    ]
    result.append(median_row(f"{name}: {ours}, weights read", [num_bytes / 1e9 / t for t in own], "GB/s"))
    return [*result, ratio_row(name, other, own, peer=theirs)]


def main() -> None:
    assert int4_linear.is_kernel_available()
    weights = [torch.randn(FEATURES, WIDTH).bfloat16() for _ in range(LAYERS)]
    packed = [int4_linear.pack(*int4_linear.quantize(weight)) for weight in weights]
    words = torch.stack(weights).view(torch.float32)
    (reading,) = interleaved(ROUNDS, lambda: seconds(words.sum))
    rows: list[Row] = [median_row("memory: sum over the weights", [2 * COUNT / 1e9 / t for t in reading], "GB/s")]
    dtype, theirs = (torch.bfloat16, "PyTorch") if has_fast_bfloat16() else (torch.float32, "PyTorch in float32")
    weights = [weight.to(dtype) for weight in weights]
    for num_rows in (1, 8, 32, 512):
        x = torch.randn(1, num_rows, WIDTH).bfloat16()
        sides = {"int4": partial(seconds, partial(int4, x, packed))}
        sides[theirs] = partial(seconds, partial(pytorch, x.to(dtype), weights))
        rows += compare(f"int4, {num_rows} rows", sides, 0.625 * COUNT)
    save("linear" if has_fast_bfloat16() else "linear_avx2", rows)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
