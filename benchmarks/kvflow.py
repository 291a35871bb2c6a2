"""Ten agents in a cycle over a cache that holds half of their prompts (KVFlow, Figure 5), and many at once (Figure 6).

`make bench NAME=kvflow`. Three ways to run the same program on the same model, round by round in turns: the device
alone with LRU (what is gone is computed again), host memory below it with LRU and loads when a call needs them (layer
by layer, under the computation), and the step graph: eviction, prefetch and status-aware scheduling.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from choreograph import CacheConfig, Engine, EngineConfig, Message, SchedulerConfig
from choreograph.evaluation.statistics import mean, ratio
from choreograph.events import Event
from choreograph.session import Session, Text
from choreograph.together import together
from choreograph.viz.charts import shifts
from choreograph.workflow import Agent, StepGraph, Workflow

from .common import FIGURES, Row, engine, estimate_row, greedy, last, median_row, save, some_tokens

GRID = ((512, 32, 32), (1024, 32, 32), (2048, 32, 32), (2048, 32, 128), (2048, 256, 32), (4096, 32, 32))
CROWDS = ((256, 4), (256, 8), (256, 16), (512, 8), (512, 16))
BEFORE, REACTIVE, AWARE = "device only", "host, reactive", "workflow-aware"


@dataclass
class Side:
    """One way to manage the cache, and what it had to compute of fixed prompts."""

    engine: Engine
    clock: Callable[[], float]
    guided: bool
    loads: int = 0
    rounds: list[float] = field(default_factory=list)
    _used: list[int] = field(default_factory=list)
    _fixed: set[int] = field(default_factory=set)
    _encodings: dict[int, int] = field(default_factory=dict)  # of every call that was admitted
    _rebuilt: list[int] = field(default_factory=list)

    def hear(self, event: Event) -> None:
        if event.kind == "admitted":
            self._encodings[event.facts["call"]] = event.facts["encoding"]
        elif event.kind == "rebuilding":
            self._rebuilt.append(event.facts["encoding"])
        self.loads += event.kind == "loaded"

    def use(self, fixed: Message) -> None:
        """Notes that a call uses a fixed prompt."""
        self._used.append(fixed.id)
        self._fixed.add(fixed.id)

    def forget(self) -> None:
        """Counts from here on."""
        self._used, self._rebuilt, self.loads = [], [], 0

    @property
    def uses(self) -> int:
        return len(self._used)

    @property
    def computed(self) -> int:
        """How many of the fixed prompts that were used had to be computed for it, or again while they were held."""
        fixed = {self._encodings[call] for call in self._fixed if call in self._encodings}
        return sum(call in self._encodings for call in self._used) + sum(one in fixed for one in self._rebuilt)


Make = Callable[[EngineConfig], tuple[Engine, Callable[[], float]]]


def over(base: Engine) -> Make:
    """Engines that share a model, in real time."""
    return lambda config: (Engine(base.runner.adapter, config), time.perf_counter)


def sides(make: Make, *, device: int, host: int) -> dict[str, Side]:
    """The three engines. Only the cache and the scheduler differ."""

    def side(guided: bool, *, aware: bool = True, **cache) -> Side:
        config = EngineConfig(cache=CacheConfig(tokens=device, **cache), scheduler=SchedulerConfig(status_aware=aware))
        found = Side(*make(config), guided)
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
            team = Workflow(s, graph, guess_fixed=False) if side.guided else None
            turn = 0
            while True:
                for index, name in enumerate(graph.agents):
                    turn += 1
                    with team.agent(name) if team else nullcontext(s) as agent:
                        role = fixed_part(agent, prompts[index])
                        task = s.prefill(some_tokens(self.dynamic, 10**6 + self.seed * 1000 + turn), [role])
                        said = s.decode([10], [role, task], sampling=greedy(self.output)).result()
                    side.use(role)
                    for message in (said, task, role):
                        message.release()
                yield


def fixed_part(who: Agent | Session, tokens: Text, parents: Iterable[Message] = ()) -> Message:
    """Part of an agent's prompt that stays, told to the cache where an agent says it and not a mere session."""
    return who.fixed(tokens, parents) if isinstance(who, Agent) else who.prefill(tokens, parents)


def alone(
    make: Make, shape: tuple[int, int, int], rounds: int, device: int | None = None
) -> tuple[list[Row], dict[str, Any]]:
    """One workflow of ten agents, the sides taking turns round by round; the first round fills the caches. device:
    tokens of its cache; None: room for half of the fixed prompts and a call."""
    fixed, dynamic, output = shape
    team = Team(10, fixed, dynamic, output)
    call = fixed + dynamic + output + 64
    every = sides(make, device=device or 5 * fixed + call, host=11 * fixed + 16 * call)
    runs = {name: team.rounds(side) for name, side in every.items()}
    timed(every, rounds, lambda name: next(runs[name]))
    for run in runs.values():
        run.close()
    return rows_of("/".join(map(str, shape)), every, team.agents), facts_of(every)


def timed(every: dict[str, Side], rounds: int, once: Callable[[str], object]) -> None:
    """`once` of every side, in turns; the first time fills the caches and does not count."""
    names = list(every)
    for name in names:
        once(name)
        every[name].forget()
    for index in range(rounds):
        for name in names[index % 3 :] + names[: index % 3]:
            began = every[name].clock()
            once(name)
            every[name].rounds.append(every[name].clock() - began)


def crowd(
    make: Make, fixed: int, workflows: int, repeats: int, *, agents: int = 4, said: int = 64, device: int | None = None
) -> tuple[list[Row], dict[str, Any]]:
    """Many workflows at once, each of its own client; a round is one of every workflow. said: tokens that vary, and
    tokens that are generated, in a turn. device: as in `alone`, but half of the calls in flight fit beside."""
    teams = [Team(agents, fixed, said, said, seed=1 + i) for i in range(workflows)]
    call, prompts = fixed + 2 * said + 64, agents * workflows * fixed
    device = device or prompts // 2 + workflows * call // 2
    every = sides(make, device=device, host=prompts + workflows * (fixed + call))
    runs = {name: [t.rounds(side, f"client {i}") for i, t in enumerate(teams)] for name, side in every.items()}

    timed(every, repeats, lambda name: at_once(every[name].engine, [partial(next, run) for run in runs[name]]))
    for run in (one for some in runs.values() for one in some):
        run.close()
    return rows_of(f"{fixed} x {workflows}", every, agents * workflows), facts_of(every)


def at_once(engine: Engine, programs: list[Callable[[], None]]) -> None:
    """Runs programs together until all have ended well."""
    for outcome in together(engine, programs, at_once=len(programs), calls=4 * len(programs)):
        if outcome.error:
            raise outcome.error


def rows_of(label: str, every: dict[str, Side], turns: int) -> list[Row]:
    """Throughput, hits and speed-ups. turns: of agents, in a round."""
    times = {name: side.rounds for name, side in every.items()}
    rows = [
        median_row(f"{label}: {name}, throughput", [turns / t for t in taken], "turns/s")
        for name, taken in times.items()
    ]
    for name, side in every.items():
        assert side.computed <= side.uses, "a fixed prompt was computed twice for one use"
        found = mean([0] * side.computed + [1] * (side.uses - side.computed))
        rows.append(estimate_row(f"{label}: {name}, fixed prompts found", asdict(found), "share"))
    for other in (BEFORE, REACTIVE):
        found = ratio(times[other], times[AWARE])
        facts = {"value": found.value, "low": found.low, "high": found.high}
        rows.append(estimate_row(f"{label}: over {other}", facts, "x"))
    return rows


def facts_of(every: dict[str, Side]) -> dict:
    """Of every side: uses of fixed prompts, how many were computed again, and loads."""
    return {name: {"uses": s.uses, "computed": s.computed, "loads": s.loads} for name, s in every.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--shapes", nargs="*", default=["/".join(map(str, shape)) for shape in GRID])
    options.add_argument("--crowds", nargs="*", default=[" x ".join(map(str, crowd)) for crowd in CROWDS])
    given = options.parse_args()
    base = engine(tokens=8192, compile=True)
    base.warm_up()
    for label in given.shapes:
        keep(*alone(over(base), read(label, "/"), given.rounds), label, "alone")
    for label in given.crowds:
        keep(*crowd(over(base), *read(label, " x "), given.repeats), label, "crowd")


def read(label: str, between: str) -> tuple[Any, ...]:
    return tuple(int(part) for part in label.split(between))


def keep(rows: list[Row], facts: dict[str, Any], label: str, kind: str) -> None:
    """Saves one measurement beside those of the others."""
    found = {"alone": {}, "crowd": {}, **last("kvflow").get("found", {})}
    found[kind] = {**found[kind], label: facts}
    had = [Row(**r) for r in last("kvflow").get("rows", []) if r["measure"].partition(":")[0] != label]
    save("kvflow", had + rows, found=found)
    print(label, facts, flush=True)
    draw(had + rows, found)


def draw(rows: list[Row], found: dict[str, Any]) -> None:
    at = {r.measure: (r.value, r.low, r.high) for r in rows}
    for kind, sets in found.items():
        groups = {label: {f"over {o}": at[f"{label}: over {o}"] for o in (BEFORE, REACTIVE)} for label in sets}
        if groups:
            shifts(groups, FIGURES / f"kvflow-{kind}.svg", ylabel="speed-up of a round", level=1)


if __name__ == "__main__":
    main()
