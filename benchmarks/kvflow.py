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
from choreograph.agents import Agent, StepGraph, Workflow
from choreograph.api.call import PromptInput
from choreograph.api.concurrency import run_concurrently
from choreograph.api.session import Session
from choreograph.events import Event
from choreograph.lab.evaluation.statistics import mean, ratio

from .common import (
    FIGURES,
    Row,
    engine,
    estimate_row,
    greedy,
    last_result,
    median_row,
    random_tokens,
    row_from_record,
    save,
)
from .plots import difference_bars

GRID = ((512, 32, 32), (1024, 32, 32), (2048, 32, 32), (2048, 32, 128), (2048, 256, 32), (4096, 32, 32))
CONCURRENT_SHAPES = ((256, 4), (256, 8), (256, 16), (512, 8), (512, 16))
DEVICE_ONLY, REACTIVE, AWARE = "device only", "host, reactive", "workflow-aware"


@dataclass
class CacheSetup:
    """One way to manage the cache, and what it had to compute of fixed prompts."""

    engine: Engine
    clock: Callable[[], float]
    uses_step_graph: bool
    num_loads: int = 0
    round_seconds: list[float] = field(default_factory=list)
    _used_prompts: list[int] = field(default_factory=list)
    _fixed_prompts: set[int] = field(default_factory=set)
    _entry_of_request: dict[int, int] = field(default_factory=dict)  # of every call that was admitted
    _recomputed_entries: list[int] = field(default_factory=list)

    def on_event(self, event: Event) -> None:
        if event.kind == "admitted":
            self._entry_of_request[event.data["request"]] = event.data["entry"]
        elif event.kind == "recomputing":
            self._recomputed_entries.append(event.data["entry"])
        self.num_loads += event.kind == "loaded"

    def record_use(self, fixed: Message) -> None:
        """Notes that a call uses a fixed prompt."""
        self._used_prompts.append(fixed.id)
        self._fixed_prompts.add(fixed.id)

    def reset_counts(self) -> None:
        """Counts from here on."""
        self._used_prompts, self._recomputed_entries, self.num_loads = [], [], 0

    @property
    def num_uses(self) -> int:
        return len(self._used_prompts)

    @property
    def num_computed(self) -> int:
        """How many of the fixed prompts that were used had to be computed for it, or again while they were held."""
        fixed = {self._entry_of_request[call] for call in self._fixed_prompts if call in self._entry_of_request}
        return sum(call in self._entry_of_request for call in self._used_prompts) + sum(
            one in fixed for one in self._recomputed_entries
        )


EngineFactory = Callable[[EngineConfig], tuple[Engine, Callable[[], float]]]


def real_engines(base_engine: Engine) -> EngineFactory:
    """Engines that share a model, in real time."""
    return lambda config: (Engine(base_engine.core.hf_model, config), time.perf_counter)


def make_setups(make_engine: EngineFactory, *, device: int, host: int) -> dict[str, CacheSetup]:
    """The three engines. Only the cache and the scheduler differ."""

    def side(guided: bool, *, aware: bool = True, **cache) -> CacheSetup:
        config = EngineConfig(
            cache=CacheConfig(capacity=device, **cache), scheduler=SchedulerConfig(skip_loading=aware)
        )
        result = CacheSetup(*make_engine(config), guided)
        result.engine.events.subscribe(result.on_event)
        return result

    return {
        DEVICE_ONLY: side(False, eviction="lru"),
        REACTIVE: side(False, aware=False, eviction="lru", host_capacity=host),
        AWARE: side(True, eviction="workflow", host_capacity=host),
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

    def rounds(self, setup: CacheSetup, client: str = "default") -> Iterator[None]:
        """One round after the other, as often as it is asked."""
        graph = self.graph
        prompts = [random_tokens(self.fixed, self.seed * 1000 + i) for i in range(self.agents)]
        with setup.engine.session(seed=0, client_id=client) as s:
            team = Workflow(s, graph, infer_fixed_prefix=False) if setup.uses_step_graph else None
            turn = 0
            while True:
                for index, name in enumerate(graph.agents):
                    turn += 1
                    with team.agent(name) if team else nullcontext(s) as agent:
                        role = fixed_part(agent, prompts[index])
                        task = s.prefill(random_tokens(self.dynamic, 10**6 + self.seed * 1000 + turn), [role])
                        said = s.decode([10], [role, task], sampling=greedy(self.output)).result()
                    setup.record_use(role)
                    for message in (said, task, role):
                        message.release()
                yield


def fixed_part(agent: Agent | Session, tokens: PromptInput, parents: Iterable[Message] = ()) -> Message:
    """Part of an agent's prompt that stays, told to the cache where an agent says it and not a mere session."""
    return agent.prefill_fixed(tokens, parents) if isinstance(agent, Agent) else agent.prefill(tokens, parents)


def single_workflow(
    make_engine: EngineFactory, shape: tuple[int, int, int], rounds: int, device: int | None = None
) -> tuple[list[Row], dict[str, Any]]:
    """One workflow of ten agents, the sides taking turns round by round; the first round fills the caches. device:
    tokens of its cache; None: room for half of the fixed prompts and a call."""
    fixed, dynamic, output = shape
    team = Team(10, fixed, dynamic, output)
    call = fixed + dynamic + output + 64
    every = make_setups(make_engine, device=device or 5 * fixed + call, host=11 * fixed + 16 * call)
    runs = {name: team.rounds(side) for name, side in every.items()}
    time_rounds(every, rounds, lambda name: next(runs[name]))
    for run in runs.values():
        run.close()
    return rows_of("/".join(map(str, shape)), every, team.agents), usage_counts(every)


def time_rounds(setups: dict[str, CacheSetup], rounds: int, run_round: Callable[[str], object]) -> None:
    """`once` of every side, in turns; the first time fills the caches and does not count."""
    names = list(setups)
    for name in names:
        run_round(name)
        setups[name].reset_counts()
    for index in range(rounds):
        for name in names[index % 3 :] + names[: index % 3]:
            began = setups[name].clock()
            run_round(name)
            setups[name].round_seconds.append(setups[name].clock() - began)


def concurrent_workflows(
    make_engine: EngineFactory,
    fixed: int,
    workflows: int,
    repeats: int,
    *,
    agents: int = 4,
    turn_tokens: int = 64,
    device: int | None = None,
) -> tuple[list[Row], dict[str, Any]]:
    """Many workflows at once, each of its own client; a round is one of every workflow. said: tokens that vary, and
    tokens that are generated, in a turn. device: as in `alone`, but half of the calls in flight fit beside."""
    teams = [Team(agents, fixed, turn_tokens, turn_tokens, seed=1 + i) for i in range(workflows)]
    call, prompts = fixed + 2 * turn_tokens + 64, agents * workflows * fixed
    device = device or prompts // 2 + workflows * call // 2
    every = make_setups(make_engine, device=device, host=prompts + workflows * (fixed + call))
    runs = {name: [t.rounds(side, f"client {i}") for i, t in enumerate(teams)] for name, side in every.items()}

    time_rounds(every, repeats, lambda name: run_all(every[name].engine, [partial(next, run) for run in runs[name]]))
    for run in (one for some in runs.values() for one in some):
        run.close()
    return rows_of(f"{fixed} x {workflows}", every, agents * workflows), usage_counts(every)


def run_all(engine: Engine, programs: list[Callable[[], None]]) -> None:
    """Runs programs together until all have ended well."""
    for outcome in run_concurrently(engine, programs, max_programs=len(programs), max_requests=4 * len(programs)):
        if outcome.error:
            raise outcome.error


def rows_of(label: str, setups: dict[str, CacheSetup], turns: int) -> list[Row]:
    """Throughput, hits and speed-ups. turns: of agents, in a round."""
    times = {name: side.round_seconds for name, side in setups.items()}
    rows = [
        median_row(f"{label}: {name}, throughput", [turns / t for t in taken], "turns/s")
        for name, taken in times.items()
    ]
    for name, side in setups.items():
        assert side.num_computed <= side.num_uses, "a fixed prompt was computed twice for one use"
        result = mean([0] * side.num_computed + [1] * (side.num_uses - side.num_computed))
        rows.append(estimate_row(f"{label}: {name}, fixed prompts found", asdict(result), "share"))
    for other in (DEVICE_ONLY, REACTIVE):
        result = ratio(times[other], times[AWARE])
        facts = {"value": result.value, "low": result.low, "high": result.high}
        rows.append(estimate_row(f"{label}: over {other}", facts, "x"))
    return rows


def usage_counts(setups: dict[str, CacheSetup]) -> dict:
    """Of every side: uses of fixed prompts, how many were computed again, and loads."""
    return {name: {"uses": s.num_uses, "computed": s.num_computed, "loads": s.num_loads} for name, s in setups.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--shapes", nargs="*", default=["/".join(map(str, shape)) for shape in GRID])
    options.add_argument("--crowds", nargs="*", default=[" x ".join(map(str, crowd)) for crowd in CONCURRENT_SHAPES])
    given = options.parse_args()
    base = engine(tokens=8192)
    for label in given.shapes:
        save_result(*single_workflow(real_engines(base), parse_label(label, "/"), given.rounds), label, "alone")
    for label in given.crowds:
        save_result(
            *concurrent_workflows(real_engines(base), *parse_label(label, " x "), given.repeats), label, "crowd"
        )


def parse_label(label: str, separator: str) -> tuple[Any, ...]:
    return tuple(int(part) for part in label.split(separator))


def save_result(rows: list[Row], counts: dict[str, Any], label: str, kind: str) -> None:
    """Saves one measurement beside those of the others."""
    result = {"alone": {}, "crowd": {}, **last_result("kvflow").get("found", {})}
    result[kind] = {**result[kind], label: counts}
    had = [row_from_record(r) for r in last_result("kvflow").get("rows", []) if r["measure"].partition(":")[0] != label]
    save("kvflow", had + rows, found=result)
    print(label, counts, flush=True)
    draw_figures(had + rows, result)


def draw_figures(rows: list[Row], counts: dict[str, Any]) -> None:
    at = {r.measure: (r.value, r.low, r.high) for r in rows}
    for kind, sets in counts.items():
        groups = {label: {f"over {o}": at[f"{label}: over {o}"] for o in (DEVICE_ONLY, REACTIVE)} for label in sets}
        if groups:
            difference_bars(groups, FIGURES / f"kvflow-{kind}.svg", ylabel="speed-up of a round", baseline=1)


if __name__ == "__main__":
    main()
