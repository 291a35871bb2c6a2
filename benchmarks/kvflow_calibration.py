"""Whether the virtual clock tells the time: a machine fitted to measured costs here, then `kvflow.py`'s shapes on it.

`make bench NAME=kvflow_calibration`, behind `kvflow`. Three rates and an overhead are fitted to prefills and decode
steps of one call; how fast encodings are copied is measured apart. None of the workflows' times are fitted.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.evaluation.virtual import Machine, virtual_engine
from choreograph.kv.tiers import HostTier
from choreograph.kv.transfers import Transfer

from .common import Row, engine, greedy, last, median_row, save, seconds, some_tokens
from .kvflow import BEFORE, REACTIVE, alone, read
from .kvflow_machines import on

PREFILLS = (64, 256, 1024, 2048, 4096)
CONTEXTS = (64, 1024, 4096)
ROUNDS, STEPS = 5, 16
Cost = tuple[str, int]


def seconds_of(e: Engine, clock: Callable[[], float], what: Cost, seed: int) -> float:
    """Of a prefill of so many tokens, or of a decode step behind so many."""
    kind, tokens = what
    with e.session(seed=0) as s:
        began = clock()
        parent = s.prefill(some_tokens(tokens, seed)).encode()
        taken = clock() - began
        if kind == "decode":
            s.decode([10], [parent], sampling=greedy(1)).encode()
            began = clock()
            s.decode([11], [parent], sampling=greedy(STEPS)).result()
            taken = (clock() - began) / STEPS
    e.clear_cache()
    return taken


def link(e: Engine, tokens: int = 2048) -> float:
    """Bytes a second, copied to host memory and back, median of several times."""
    arena, rates = e.runner.store.arena, []
    tier = HostTier(arena, tokens)
    copy, pages = tier.reserve(tokens), arena.allocate(arena.pages_for(tokens))
    for _ in range(ROUNDS):
        for kind, work in (("offloading", tier.put(arena, pages, copy)), ("loading", tier.get(copy, arena, pages))):
            transfer = Transfer(kind, len(arena.keys), tokens, work.copy_layer)  # type: ignore[arg-type]
            rates.append(tokens * arena.bytes_per_token / seconds(transfer.run))
    arena.release(pages)
    return median(rates)


def fit(e: Engine, measured: dict[Cost, float]) -> Machine:
    """The machine that comes nearest to the measured costs, by the sum of squared logarithms of ratios."""
    facts = e.runner.adapter.facts
    like = Machine(
        name="SmolLM2-135M, here",
        parameters=facts.parameters,
        weights=facts.parameters * facts.dtype.itemsize,
        layers=facts.layers,
        width=facts.query_heads * facts.head_dim,
        token_bytes=e.runner.store.arena.bytes_per_token,
        arithmetic=1e11,
        memory=1e10,
        link=link(e),
        cache=1e12,
        overhead=1e-3,
    )

    def at(x: np.ndarray) -> Machine:
        arithmetic, memory, overhead = np.exp(x)
        return replace(like, arithmetic=float(arithmetic), memory=float(memory), overhead=float(overhead))

    def misses(x: np.ndarray) -> list[float]:
        return [float(np.log(simulated(at(x), what) / taken)) for what, taken in measured.items()]

    start = np.log([like.arithmetic, like.memory, like.overhead])
    return at(least_squares(misses, start, diff_step=1e-3).x)


def simulated(machine: Machine, what: Cost) -> float:
    return seconds_of(*virtual_engine(machine, EngineConfig(CacheConfig(tokens=8192), backend="reference")), what, 0)


def main() -> None:
    e = engine(tokens=8192, compile=True)
    e.warm_up()
    kinds: list[Cost] = [("prefill", n) for n in PREFILLS] + [("decode", n) for n in CONTEXTS]
    taken: dict[Cost, list[float]] = {what: [] for what in kinds}
    for number in range(ROUNDS):
        for what in kinds:
            taken[what].append(seconds_of(e, time.perf_counter, what, number))
    machine = fit(e, {what: median(times) for what, times in taken.items()})
    rows: list[Row] = []
    for (kind, tokens), times in taken.items():
        label = f"{kind}, {tokens} tokens"
        rows.append(median_row(f"{label}: measured", [1e3 * t for t in times], "ms", better="lower"))
        rows.append(exactly(f"{label}: fitted", 1e3 * simulated(machine, (kind, tokens)), "ms"))
    had = {row["measure"]: row for row in last("kvflow")["rows"]}
    for label in last("kvflow")["found"]["alone"]:
        found, _ = alone(on(machine), read(label, "/"), rounds=3)
        values = {row.measure: row.value for row in found}
        for other in (BEFORE, REACTIVE):
            name = f"{label}: over {other}"
            rows.append(replace(Row(**had[name]), measure=f"{name}, measured"))
            rows.append(exactly(f"{name}, virtual", values[name], "x"))
    save("kvflow_calibration", rows, machine=asdict(machine))


def exactly(measure: str, value: float, unit: str) -> Row:
    return Row(measure, value, unit, value, value)


if __name__ == "__main__":
    main()
