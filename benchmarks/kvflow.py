"""Ten agents in a cycle over a cache that holds half of their prompts (KVFlow, Figure 5), and many at once (Figure 6).

`make bench NAME=kvflow`. Three ways to run the same program on the same model, round by round in turns: the device
alone with LRU (what is gone is computed again), host memory below it with LRU and loads when a call needs them (layer
by layer, under the computation), and the step graph: eviction, prefetch and status-aware scheduling.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from choreograph import CacheConfig, Engine, EngineConfig, SchedulerConfig
from choreograph.evaluation.statistics import ratio
from choreograph.events import Event
from choreograph.together import together
from choreograph.workflow import StepGraph, Workflow

from .common import Row, engine, estimate_row, greedy, median_row, save, some_tokens

GRID = ((512, 32, 32), (1024, 32, 32), (2048, 32, 32), (2048, 32, 128), (2048, 256, 32), (4096, 32, 32))
CROWDS = ((256, 8), (256, 16), (512, 8), (512, 16))
BEFORE, REACTIVE, AWARE = "device only", "host, reactive", "workflow-aware"


@dataclass
class Side:
    """One way to manage the cache, and what it had to compute of fixed prompts."""

    engine: Engine
    clock: Callable[[], float]
    guided: bool
    fixed: int
    uses: int = 0
    computed: int = 0
    loads: int = 0
    rounds: list[float] = field(default_factory=list)

    def hear(self, event: Event) -> None:
        tokens = {"admitted": "encode", "rebuilding": "tokens"}.get(event.kind)
        self.computed += tokens is not None and event.facts[tokens] == self.fixed
        self.loads += event.kind == "loaded"


Make = Callable[[EngineConfig], tuple[Engine, Callable[[], float]]]


def over(base: Engine) -> Make:
    """Engines that share a model, in real time."""
    return lambda config: (Engine(base.runner.adapter, config), time.perf_counter)


def sides(make: Make, *, fixed: int, device: int, host: int) -> dict[str, Side]:
    """The three engines. Only the cache and the scheduler differ."""

    def side(guided: bool, *, aware: bool = True, **cache) -> Side:
        config = EngineConfig(cache=CacheConfig(tokens=device, **cache), scheduler=SchedulerConfig(status_aware=aware))
        found = Side(*make(config), guided, fixed)
        found.engine.events.listen(found.hear)
        return found

    return {
        BEFORE: side(False, eviction="lru"),
        REACTIVE: side(False, aware=False, eviction="lru", host=host),
        AWARE: side(True, eviction="workflow", host=host),
    }


@dataclass(frozen=True)
class Team:
    """Agents in a cycle: random prompts that stay, random parts that change with every turn."""

    agents: int
    fixed: int
    dynamic: int
    output: int
    seed: int = 0

    @property
    def graph(self) -> StepGraph:
        names = [f"agent {i}" for i in range(self.agents)]
        return StepGraph.read({"agents": dict(zip(names, (None, *names), strict=False)), "repeats": True})

    def rounds(self, side: Side, client: str = "default") -> Iterator[None]:
        """One round after the other, as often as it is asked."""
        graph = self.graph
        prompts = [some_tokens(self.fixed, self.seed * 1000 + i) for i in range(self.agents)]
        with side.engine.session(seed=0, client_id=client) as s:
            team = Workflow(s, graph if side.guided else None, prefetch=4 if side.guided else 0, guess_fixed=False)
            turn = 0
            while True:
                for index, name in enumerate(graph.agents):
                    turn += 1
                    with team.agent(name) as agent:
                        role = agent.fixed(prompts[index])
                        task = s.prefill(some_tokens(self.dynamic, 10**6 + self.seed * 1000 + turn), [role])
                        said = s.decode([10], [role, task], sampling=greedy(self.output)).result()
                    side.uses += 1
                    for message in (said, task, role):
                        message.release()
                yield


def alone(
    make: Make, shape: tuple[int, int, int], rounds: int, device: int | None = None
) -> tuple[list[Row], dict[str, Any]]:
    """One workflow of ten agents, the sides taking turns round by round; the first round fills the caches. device:
    tokens of its cache; None: room for half of the fixed prompts and a call."""
    fixed, dynamic, output = shape
    team = Team(10, fixed, dynamic, output)
    call = fixed + dynamic + output + 64
    every = sides(make, fixed=fixed, device=device or 5 * fixed + call, host=11 * fixed + 16 * call)
    runs = {name: team.rounds(side) for name, side in every.items()}
    for run in runs.values():
        next(run)
    for side in every.values():
        side.uses = side.computed = side.loads = 0
    names = list(every)
    for index in range(rounds):
        for name in names[index % 3 :] + names[: index % 3]:
            began = every[name].clock()
            next(runs[name])
            every[name].rounds.append(every[name].clock() - began)
    for run in runs.values():
        run.close()
    label = "/".join(map(str, shape))
    return rows_of(label, every), facts_of(every)


def crowd(
    make: Make, fixed: int, workflows: int, repeats: int, *, agents: int = 4, said: int = 64, device: int | None = None
) -> tuple[list[Row], dict[str, Any]]:
    """Many workflows at once, each of its own client; a round is one of every workflow. said: tokens that vary, and
    tokens that are generated, in a turn. device: as in `alone`, but half of the calls in flight fit beside."""
    teams = [Team(agents, fixed, said, said, seed=1 + i) for i in range(workflows)]
    call, prompts = fixed + 2 * said + 64, agents * workflows * fixed
    device = device or prompts // 2 + workflows * call // 2
    every = sides(make, fixed=fixed, device=device, host=prompts + workflows * (fixed + call))
    runs = {name: [t.rounds(side, f"client {i}") for i, t in enumerate(teams)] for name, side in every.items()}

    def once(name: str) -> float:
        began = every[name].clock()
        programs: list[Callable[[], None]] = [lambda run=run: next(run) for run in runs[name]]
        for outcome in together(every[name].engine, programs, at_once=workflows, calls=4 * workflows):
            if outcome.error:
                raise outcome.error
        return every[name].clock() - began

    for name in every:
        once(name)
        every[name].uses = every[name].computed = every[name].loads = 0
    names = list(every)
    for index in range(repeats):
        for name in names[index % 3 :] + names[: index % 3]:
            every[name].rounds.append(once(name))
    return rows_of(f"{fixed} x {workflows}", every), facts_of(every)


def rows_of(label: str, every: dict[str, Side]) -> list[Row]:
    times = {name: side.rounds for name, side in every.items()}
    rows = [
        median_row(f"{label}: {name}, a round", [1000 * t for t in taken], "ms", better="lower")
        for name, taken in times.items()
    ]
    for other in (BEFORE, REACTIVE):
        found = ratio(times[other], times[AWARE])
        facts = {"value": found.value, "low": found.low, "high": found.high}
        rows.append(estimate_row(f"{label}: over {other}", facts, "x"))
    return rows


def facts_of(every: dict[str, Side]) -> dict:
    """Of every side: uses of fixed prompts, how many were computed again, loads, and the share found in the cache."""
    return {
        name: {"uses": s.uses, "computed": s.computed, "loads": s.loads, "hit rate": 1 - s.computed / max(s.uses, 1)}
        for name, s in every.items()
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--only", nargs="*", choices=("alone", "crowd"), default=["alone", "crowd"])
    given = options.parse_args()
    base = engine(tokens=8192, compile=True)
    base.warm_up()
    rows: list[Row] = []
    found: dict[str, dict] = {"alone": {}, "crowd": {}}
    for shape in GRID if "alone" in given.only else ():
        more, facts = alone(over(base), shape, given.rounds)
        rows += more
        found["alone"]["/".join(map(str, shape))] = facts
        print(shape, facts, flush=True)
    for fixed, workflows in CROWDS if "crowd" in given.only else ():
        more, facts = crowd(over(base), fixed, workflows, given.repeats)
        rows += more
        found["crowd"][f"{fixed} x {workflows}"] = facts
        print(fixed, workflows, facts, flush=True)
    save("kvflow", rows, found=found)


if __name__ == "__main__":
    main()
