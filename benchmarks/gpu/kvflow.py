"""Agents in a cycle over a cache that holds half of their fixed prompts (KVFlow, Figure 5): the device alone, host
memory below it with loads when a call needs them, and the step graph; measured, or on a virtual clock."""

import time
from collections.abc import Callable, Iterable

from choreograph import Engine, EngineConfig
from choreograph.evaluation.statistics import ratio
from choreograph.evaluation.virtual import Machine, virtual_engine

from ..kvflow import AWARE, BEFORE, REACTIVE, Make, Side, Team, sides
from .bench import Bench, Found
from .budget import Allowance
from .shape import Shape


def measure(bench: Bench, allowance: Allowance) -> Found:
    def make(config: EngineConfig) -> tuple[Engine, Callable[[], float]]:
        return bench.new_engine(config, most_rows=64), time.perf_counter

    first = 1 if bench.trial else 2  # the second is the first that loads
    every = play(make, bench.shape, allowance.rounds(bench.shape.most), first=first)
    for side in every.values():
        side.engine.close()
    return ratios(every)


def predicted(machine: Machine, shape: Shape) -> dict[str, float]:
    def make(config: EngineConfig) -> tuple[Engine, Callable[[], float]]:
        return virtual_engine(machine, EngineConfig(config.cache, config.scheduler, backend="reference"))

    return {name: one.value for name, one in ratios(play(make, shape, range(2))).items()}


def play(make: Make, shape: Shape, rounds: Iterable[int], *, first: int = 1) -> dict[str, Side]:
    """Rounds of every side, in turns; the first ones before them fill the caches and do not count."""
    team = Team(shape.agents, shape.fixed, shape.varying, shape.varying)
    call = shape.fixed + 2 * shape.varying + 64
    room = shape.agents // 2 * shape.fixed + call
    every = sides(make, device=room, host=(shape.agents + 1) * shape.fixed + 4 * call)
    runs = {name: team.rounds(side) for name, side in every.items()}
    names = list(every)
    for name in names * first:
        next(runs[name])
        every[name].forget()
    for number in rounds:
        for name in names[number % 3 :] + names[: number % 3]:
            began = every[name].clock()
            next(runs[name])
            every[name].rounds.append(every[name].clock() - began)
    for run in runs.values():
        run.close()
    return every


def ratios(every: dict[str, Side]) -> Found:
    times = {name: side.rounds for name, side in every.items()}
    return {
        "KVFlow: over device only": ratio(times[BEFORE], times[AWARE]),
        "KVFlow: over reactive loading": ratio(times[REACTIVE], times[AWARE]),
    }
