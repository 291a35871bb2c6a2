"""Agents in a cycle over a cache that holds half of their fixed prompts (KVFlow, Figure 5): the device alone, host
memory below it with loads when a call needs them, and the step graph; measured, or on a virtual clock."""

import time
from collections.abc import Callable, Iterable

from benchmarks.simulator import HardwareModel, simulated_engine
from choreograph import Engine, EngineConfig
from choreograph.lab.evaluation.statistics import ratio

from ..kvflow import AWARE, DEVICE_ONLY, REACTIVE, CacheSetup, EngineFactory, Team, make_setups
from .bench import Bench, PartResult
from .budget import Allowance
from .shape import Shape


def measure(bench: Bench, allowance: Allowance) -> PartResult:
    def make(config: EngineConfig) -> tuple[Engine, Callable[[], float]]:
        return bench.new_engine(config, max_graph_rows=64), time.perf_counter

    first = 1 if bench.trial else 2  # the second is the first that loads
    every = run_rounds(make, bench.shape, allowance.rounds(bench.shape.max_rounds), num_warmup_rounds=first)
    for side in every.values():
        side.engine.close()
    return ratios(every)


def predicted(hardware: HardwareModel, shape: Shape) -> dict[str, float]:
    def make(config: EngineConfig) -> tuple[Engine, Callable[[], float]]:
        return simulated_engine(hardware, EngineConfig(config.cache, config.scheduler, backend="reference"))

    return {name: one.value for name, one in ratios(run_rounds(make, shape, range(2))).items()}


def run_rounds(
    make_engine: EngineFactory, shape: Shape, rounds: Iterable[int], *, num_warmup_rounds: int = 1
) -> dict[str, CacheSetup]:
    """Rounds of every side, in turns; the first ones before them fill the caches and do not count."""
    team = Team(shape.agents, shape.fixed, shape.dynamic, shape.dynamic, warm_ups=1)
    call = shape.fixed + 2 * shape.dynamic + 64
    room = shape.agents // 2 * shape.fixed + call
    host = (shape.agents + 1) * shape.fixed + 4 * call
    every = make_setups(make_engine, device=room, host=host, names=(DEVICE_ONLY, REACTIVE, AWARE))
    runs = {name: team.rounds(side) for name, side in every.items()}
    names = list(every)
    for name in names * num_warmup_rounds:
        next(runs[name])
        every[name].reset_counts()
    for number in rounds:
        for name in names[number % 3 :] + names[: number % 3]:
            began = every[name].clock()
            next(runs[name])
            every[name].round_seconds.append(every[name].clock() - began)
    for run in runs.values():
        run.close()
    return every


def ratios(setups: dict[str, CacheSetup]) -> PartResult:
    times = {name: side.round_seconds for name, side in setups.items()}
    return {
        "KVFlow: over device only": ratio(times[DEVICE_ONLY], times[AWARE]),
        "KVFlow: over reactive loading": ratio(times[REACTIVE], times[AWARE]),
    }
