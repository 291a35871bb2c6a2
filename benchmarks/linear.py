"""Linear layers over packed bfloat16 weights against oneDNN's prepacked products, which frozen graphs call.

Weights of 1,536 x 576 one after the other, 270 MB in all, so that they come from memory as in a step. The speed of memory
is that of a sum over the same weights. Needs AVX-512 bfloat16 instructions.
"""

from functools import partial

import torch
from torch import Tensor

from choreograph.models.packed_linear import load_kernel, pack

from .common import Row, interleaved, median_row, ratio_row, save, seconds

FEATURES, WIDTH, LAYERS, ROUNDS = 1536, 576, 150, 12
GIGABYTES = 2 * FEATURES * WIDTH * LAYERS / 1e9


def packed(x: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        torch.ops.choreograph.linear(x, weight, None, FEATURES)


def prepacked(x: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def main() -> None:
    load_kernel()
    weights = [torch.randn(FEATURES, WIDTH).bfloat16() for _ in range(LAYERS)]
    ours = [pack(weight) for weight in weights]
    words = torch.stack(weights).view(torch.float32)
    (reading,) = interleaved(ROUNDS, lambda: seconds(words.sum))
    rows: list[Row] = [median_row("memory: sum over the weights", [GIGABYTES / t for t in reading], "GB/s")]
    for num_rows in (1, 8, 32, 512):
        x = torch.randn(1, num_rows, WIDTH).bfloat16()
        theirs = [torch.ops.mkldnn._reorder_linear_weight(weight, num_rows) for weight in weights]
        sides = [partial(seconds, partial(run, x, each)) for run, each in ((prepacked, theirs), (packed, ours))]
        interleaved(2, *sides)
        other, own = interleaved(ROUNDS, *sides)
        for name, times in (("packed", own), ("oneDNN", other)):
            rows.append(median_row(f"{num_rows} rows: {name}", [t / LAYERS * 1e6 for t in times], "us", better="lower"))
        rows.append(median_row(f"{num_rows} rows: packed weights read", [GIGABYTES / t for t in own], "GB/s"))
        rows.append(ratio_row(f"{num_rows} rows", other, own, peer="oneDNN, prepacked"))
    save("linear", rows)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
