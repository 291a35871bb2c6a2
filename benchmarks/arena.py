"""A decode step over the same visible tokens in an arena of 2k and of 64k slots: nothing may depend on capacity."""

import time
from statistics import median

from choreograph import Engine

from .common import engine, greedy, interleaved, median_row, random_tokens, ratio_row, save

CONTEXT, STEPS, ROUNDS = 1024, 60, 15


def step(e: Engine) -> float:
    with e.session(seed=0) as session:
        session.decode([5], [session.prefill(random_tokens(CONTEXT))], sampling=greedy(STEPS))
        taken = []
        for _ in range(STEPS - 1):
            began = time.perf_counter()
            e.step()
            taken.append(time.perf_counter() - began)
    e.clear_cache()
    return median(taken[4:])


def main() -> None:
    small, large = engine(tokens=2048), engine(tokens=65536)
    sides = (lambda: step(large), lambda: step(small))
    interleaved(1, *sides)
    a, b = interleaved(ROUNDS, *sides)
    rows = [
        median_row("step, 64k slots", [t * 1e3 for t in a], "ms", better="lower"),
        median_row("step, 2k slots", [t * 1e3 for t in b], "ms", better="lower"),
        ratio_row("64k over 2k slots", a, b, better="lower", required=1.0),
    ]
    save("arena", rows)


if __name__ == "__main__":
    main()
