"""One layer of placed attention, compiled kernel against the flash-kernel backend, over plans that occur.

The embedded model's shape (9 query heads over 3 key-value heads of size 64), in the type that models load in on this
processor; what was measured in another type is kept. `auto` takes the compiled kernel wherever it can be built because
it wins in every row.
"""

import numpy as np
import torch

from choreograph.models.load import usual_dtype
from choreograph.ops.attend import make_backend
from choreograph.ops.kind import Kind
from choreograph.ops.plan import Plan, Read, make_plan
from choreograph.ops.rope import Rotary

from .common import Row, in_turns, last, median_row, ratio_row, save, seconds

HEADS, GROUPS, WIDTH, SLOTS = 9, 3, 64, 8192
KIND = Kind(Rotary(tuple(1e5 ** -(np.arange(0, WIDTH, 2) / WIDTH))))
CASES: dict[str, list[tuple[int, list[tuple[int, int, int]]]]] = {
    "1 row, 512 seen": [(1, [(0, 512, 0)])],
    "1 row, 4096 seen": [(1, [(0, 4096, 0)])],
    "1 row, 8 parents of 512, moved": [(1, [(512 * i, 512, 3 - i) for i in range(8)])],
    "8 rows, one shared 512": [(1, [(0, 512, 0)])] * 8,
    "4 rows, 9 shared parents, moved": [(1, [(0, 96, 0)] + [(128 + 160 * i, 150, 7 * i + 1) for i in range(8)])] * 4,
    "256 rows behind 512": [(256, [(0, 512, 0)])],
    "1024 rows, nothing before": [(1024, [])],
}


def plan_of(calls: list[tuple[int, list[tuple[int, int, int]]]]) -> Plan:
    reads, slots, positions, row, own = [], [], [], 0, 5000
    for rows, parents in calls:
        reads += [Read(lo, row, row + rows, shift, length, 0, lo + shift) for lo, length, shift in parents]
        reads.append(Read(own, row, row + rows, 0, 1, 1, 0))
        slots += range(own, own + rows)
        positions += range(4096, 4096 + rows)
        row, own = row + rows, own + rows + 8
    return make_plan(slots, reads, positions)


def main() -> None:
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    dtype = usual_dtype(cpu)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    keys, values, rows = noise(SLOTS, GROUPS, WIDTH), noise(SLOTS, GROUPS, WIDTH), []
    fast, plain = (make_backend(name, WIDTH, dtype, cpu)[0] for name in ("native", "sdpa"))
    for name, calls in CASES.items():
        plan = plan_of(calls)
        q, k, v = noise(HEADS, plan.rows, WIDTH), noise(GROUPS, plan.rows, WIDTH), noise(GROUPS, plan.rows, WIDTH)
        sides = [
            lambda b=backend: seconds(lambda: b(plan, q, k, v, keys, values, WIDTH**-0.5, KIND))  # noqa: B023 - used at once
            for backend in (plain, fast)
        ]
        in_turns(10, *sides)
        a, b = in_turns(60, *sides)
        name = f"{name}, {str(dtype).removeprefix('torch.')}"
        rows.append(median_row(f"{name}: compiled kernel", [t * 1e6 for t in b], "us", better="lower"))
        rows.append(ratio_row(name, a, b, peer="flash-kernel backend"))
    measured = {row.measure for row in rows}
    save("attention", [Row(**r) for r in last("attention").get("rows", []) if r["measure"] not in measured] + rows)


if __name__ == "__main__":
    main()
