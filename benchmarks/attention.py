"""One layer of placed attention, compiled kernel against the flash-kernel backend, over plans that occur.

The embedded model's shape (9 query heads over 3 key-value heads of size 64), in the type that models load in on this
processor; what was measured in another type is kept. `auto` takes the compiled kernel wherever it can be built because
it wins in every row.
"""

import numpy as np
import torch

from choreograph.attention.backend import create_backend
from choreograph.attention.metadata import AttentionCall, AttentionMetadata, AttentionSpec, KVRead, build_metadata
from choreograph.attention.rope import Rope
from choreograph.models.loader import default_dtype

from .common import interleaved, last_result, median_row, ratio_row, row_from_record, save, seconds

HEADS, GROUPS, WIDTH, SLOTS = 9, 3, 64, 8192
SPEC = AttentionSpec(Rope(tuple(1e5 ** -(np.arange(0, WIDTH, 2) / WIDTH))))
CASES: dict[str, list[tuple[int, list[tuple[int, int, int]]]]] = {
    "1 row, 512 seen": [(1, [(0, 512, 0)])],
    "1 row, 4096 seen": [(1, [(0, 4096, 0)])],
    "1 row, 8 parents of 512, moved": [(1, [(512 * i, 512, 3 - i) for i in range(8)])],
    "8 rows, one shared 512": [(1, [(0, 512, 0)])] * 8,
    "4 rows, 9 shared parents, moved": [(1, [(0, 96, 0)] + [(128 + 160 * i, 150, 7 * i + 1) for i in range(8)])] * 4,
    "256 rows behind 512": [(256, [(0, 512, 0)])],
    "1024 rows, nothing before": [(1024, [])],
}


def metadata_of(requests: list[tuple[int, list[tuple[int, int, int]]]]) -> AttentionMetadata:
    reads, slots, positions, row, own = [], [], [], 0, 5000
    for rows, parents in requests:
        reads += [KVRead(lo, row, row + rows, shift, length, 0, lo + shift) for lo, length, shift in parents]
        reads.append(KVRead(own, row, row + rows, 0, 1, 1, 0))
        slots += range(own, own + rows)
        positions += range(4096, 4096 + rows)
        row, own = row + rows, own + rows + 8
    return build_metadata(slots, reads, positions)


def main() -> None:
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    dtype = default_dtype(cpu)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    keys, values, rows = noise(SLOTS, GROUPS, WIDTH), noise(SLOTS, GROUPS, WIDTH), []
    fast, plain = (create_backend(name, WIDTH, dtype, cpu)[0] for name in ("native", "sdpa"))
    for name, calls in CASES.items():
        plan = metadata_of(calls)
        q, k, v = (
            noise(HEADS, plan.num_tokens, WIDTH),
            noise(GROUPS, plan.num_tokens, WIDTH),
            noise(GROUPS, plan.num_tokens, WIDTH),
        )
        call = AttentionCall(plan, q, k, v, keys, values, WIDTH**-0.5, SPEC)
        sides = [
            lambda b=backend: seconds(lambda: b(call))  # noqa: B023 - used at once
            for backend in (plain, fast)
        ]
        interleaved(10, *sides)
        a, b = interleaved(60, *sides)
        name = f"{name}, {str(dtype).removeprefix('torch.')}"
        rows.append(median_row(f"{name}: compiled kernel", [t * 1e6 for t in b], "us", better="lower"))
        rows.append(ratio_row(name, a, b, peer="flash-kernel backend"))
    measured = {row.measure for row in rows}
    save(
        "attention",
        [row_from_record(r) for r in last_result("attention").get("rows", []) if r["measure"] not in measured] + rows,
    )


if __name__ == "__main__":
    main()
