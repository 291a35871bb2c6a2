"""Ten agents in a cycle over a cache that holds half of their prompts (KVFlow, Figure 5), and many at once (Figure 6).

`make bench NAME=kvflow`. Several setups run the same program on the same model, round by round in turns:

- the device alone with LRU: what is gone is computed again;
- host memory below it with LRU, and loads when a call needs them, layer by layer, under the computation;
- the same, where entries are copied to host memory when they are used again, ahead of eviction, and others are dropped
  (SGLang's HiCache, policy write_through_selective);
- the step graph: eviction, prefetch and status-aware scheduling, with all varying content first (KVFlow §3.1);
- the same, where varying content that the next turn may read is kept.

In prefix mode, which is the paper's setting, no turn reads the varying content of others as a message, so the last two
setups are one. The last part is what hints cost: 64 workflows with room for all of their prompts.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from typing import Any

from choreograph import CacheConfig, Engine, EngineConfig, Message, SchedulerConfig
from choreograph.agents import Agent, StepGraph, Workflow
from choreograph.api.call import PromptInput
from choreograph.api.concurrency import run_concurrently
from choreograph.api.session import Session
from choreograph.events import Event
from choreograph.kv_cache.splits import split_used
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
COPIED_AHEAD, VARYING_FIRST = "host, copied ahead", "workflow-aware, varying first"
MODES = ("choreographed", "prefix")
SETUP_NAMES = {  # the last one is compared with each of the others
    "choreographed": (DEVICE_ONLY, REACTIVE, COPIED_AHEAD, VARYING_FIRST, AWARE),
    "prefix": (DEVICE_ONLY, REACTIVE, COPIED_AHEAD, AWARE),
}
WARM_UPS = 2  # turns of each agent in the first round, as in the paper: the second one finds what is copied ahead
OVERHEAD_LIMIT = 1.05  # of the time of reactive loading


@dataclass
class CacheSetup:
    """One way to manage the cache, and what it had to compute of fixed prompts."""

    engine: Engine
    clock: Callable[[], float]
    uses_step_graph: bool
    mode: str = "choreographed"
    keep_varying: bool = True
    copies_ahead: bool = False
    num_loads: int = 0
    num_uses: int = 0  # of fixed prompts
    round_seconds: list[float] = field(default_factory=list)
    _num_incomplete: int = 0  # uses for which a prefix-mode prompt did not find all of the fixed part
    _used_prompts: list[int] = field(default_factory=list)
    _fixed_prompts: set[int] = field(default_factory=set)
    _entry_of_request: dict[int, int] = field(default_factory=dict)  # of every call that was admitted
    _recomputed_entries: list[int] = field(default_factory=list)
    _num_reads: Counter[int] = field(default_factory=Counter)  # by entry

    def on_event(self, event: Event) -> None:
        if event.kind == "admitted":
            self._entry_of_request[event.data["request"]] = event.data["entry"]
            if self.copies_ahead:
                self._copy_ahead(event.data["entry"])
        elif event.kind == "recomputing":
            self._recomputed_entries.append(event.data["entry"])
        self.num_loads += event.kind == "loaded"

    def _copy_ahead(self, entry_id: int) -> None:
        """Copy what a request reads to host memory, if an earlier one has used it."""
        manager = self.engine.core.cache_manager
        entry = manager.entries.get(entry_id)
        if entry is not None and self.mode == "prefix" and any(not read.tier_copies for read in entry.read_entries):
            split_used(manager)  # the start that both have used is copied alone
        for read_entry in entry.read_entries if entry is not None else ():
            self._num_reads[read_entry.id] += 1
            # the first to read an entry of the prefix tree is the second to use it
            if self._num_reads[read_entry.id] >= (1 if self.mode == "prefix" else 2):
                manager.copy_ahead(read_entry)

    def workflow(self, session: Session, graph: StepGraph) -> Workflow | None:
        """Return the tracker of a program's agents; None without a step graph."""
        if not self.uses_step_graph:
            return None
        return Workflow(session, graph, infer_fixed_prefix=False, keep_varying=self.keep_varying)

    def record_use(self, fixed: Iterable[Message], answer: Message) -> None:
        """Count uses of fixed prompts by an answer that is complete."""
        end = 0
        for message in fixed:
            self.num_uses += 1
            end += message.length
            if self.mode == "prefix":
                self._num_incomplete += answer.usage.cached_tokens < end
            else:
                self._used_prompts.append(message.id)
                self._fixed_prompts.add(message.id)

    def reset_counts(self) -> None:
        """Count from here on."""
        self._used_prompts, self._recomputed_entries, self.num_loads = [], [], 0
        self.num_uses = self._num_incomplete = 0

    @property
    def num_computed(self) -> int:
        """How many of the fixed prompts that were used had to be computed for it, or again while they were held."""
        fixed = {self._entry_of_request[call] for call in self._fixed_prompts if call in self._entry_of_request}
        num_admitted = sum(call in self._entry_of_request for call in self._used_prompts)
        return self._num_incomplete + num_admitted + sum(entry in fixed for entry in self._recomputed_entries)


EngineFactory = Callable[[EngineConfig], tuple[Engine, Callable[[], float]]]


def real_engines(base_engine: Engine) -> EngineFactory:
    """Engines that share a model, in real time."""
    return lambda config: (Engine(base_engine.core.hf_model, config), time.perf_counter)


def make_setups(
    make_engine: EngineFactory, *, device: int, host: int, mode: str = "choreographed", names: Sequence[str] = ()
) -> dict[str, CacheSetup]:
    """Create the engines of a mode. Only the cache and the scheduler differ.

    Args:
        device: tokens of the cache on the device.
        host: tokens of host memory, for the setups that have it.
        names: of some setups; all of the mode by default.
    """

    def setup(
        guided: bool, *, aware: bool = True, keep_varying: bool = True, copies_ahead: bool = False, **cache
    ) -> CacheSetup:
        config = EngineConfig(
            cache=CacheConfig(capacity=device, **cache), scheduler=SchedulerConfig(skip_loading=aware)
        )
        result = CacheSetup(*make_engine(config), guided, mode, keep_varying, copies_ahead)
        result.engine.events.subscribe(result.on_event)
        result.engine.core.cache_manager.offloads_evicted = not copies_ahead
        return result

    makers: dict[str, Callable[[], CacheSetup]] = {
        DEVICE_ONLY: partial(setup, False, eviction="lru"),
        REACTIVE: partial(setup, False, aware=False, eviction="lru", host_capacity=host),
        COPIED_AHEAD: partial(setup, False, aware=False, copies_ahead=True, eviction="lru", host_capacity=host),
        VARYING_FIRST: partial(setup, True, keep_varying=False, eviction="workflow", host_capacity=host),
        AWARE: partial(setup, True, eviction="workflow", host_capacity=host),
    }
    return {name: makers[name]() for name in SETUP_NAMES[mode] if not names or name in names}


@dataclass(frozen=True)
class Team:
    """Agents in a cycle: random prompts that stay, random parts that change with every turn."""

    agents: int
    fixed: int
    dynamic: int
    output: int
    seed: int = 0
    warm_ups: int = WARM_UPS  # turns of each agent in the first round

    @property
    def graph(self) -> StepGraph:
        names = [f"agent {i}" for i in range(self.agents)]
        return StepGraph.read({"agents": dict(zip(names, (None, *names), strict=False)), "repeats": True})

    def rounds(self, setup: CacheSetup, client: str = "default") -> Iterator[None]:
        """Run one round after the other, as often as it is asked. The first one runs each agent several times."""
        graph = self.graph
        prompts = [random_tokens(self.fixed, self.seed * 1000 + i) for i in range(self.agents)]
        with setup.engine.session(seed=0, client_id=client, mode=setup.mode) as s:
            team = setup.workflow(s, graph)
            turn = 0
            for number in count():
                for index, name in enumerate(graph.agents):
                    with team.agent(name) if team else nullcontext(s) as agent:
                        for _ in range(1 if number else self.warm_ups):
                            turn += 1
                            role = fixed_part(agent, prompts[index])
                            task = s.prefill(random_tokens(self.dynamic, 10**6 + self.seed * 1000 + turn), [role])
                            said = s.decode([10], [role, task], sampling=greedy(self.output)).result()
                            setup.record_use([role], said)
                            for message in (said, task, role):
                                message.release()
                yield


def fixed_part(agent: Agent | Session, tokens: PromptInput, parents: Iterable[Message] = ()) -> Message:
    """Prefill the fixed part of a prompt, marked as fixed where an agent prefills it."""
    return agent.prefill_fixed(tokens, parents) if isinstance(agent, Agent) else agent.prefill(tokens, parents)


def single_workflow(
    make_engine: EngineFactory,
    shape: tuple[int, int, int],
    rounds: int,
    device: int | None = None,
    *,
    mode: str = "choreographed",
    names: Sequence[str] = (),
) -> tuple[list[Row], dict[str, Any]]:
    """One workflow of ten agents, the setups taking turns round by round; the first round fills the caches.

    Args:
        shape: fixed, varying and generated tokens of a turn.
        device: tokens of the cache; None: room for half of the fixed prompts and a call.
        names: of some setups; all of the mode by default.
    """
    fixed, dynamic, output = shape
    team = Team(10, fixed, dynamic, output)
    call = fixed + dynamic + output + 64
    host = 11 * fixed + 16 * call
    every = make_setups(make_engine, device=device or 5 * fixed + call, host=host, mode=mode, names=names)
    runs = {name: team.rounds(setup) for name, setup in every.items()}
    time_rounds(every, rounds, lambda name: next(runs[name]))
    for run in runs.values():
        run.close()
    return rows_of(label_of("/".join(map(str, shape)), mode), every, team.agents), usage_counts(every)


def label_of(shape: str, mode: str) -> str:
    """Return what results call a shape that was run in a mode."""
    return shape if mode == "choreographed" else f"{shape}, {mode} mode"


def time_rounds(setups: dict[str, CacheSetup], rounds: int, run_round: Callable[[str], object]) -> None:
    """Run rounds of every setup, in turns; the first time fills the caches and does not count."""
    names = list(setups)
    for name in names:
        run_round(name)
        setups[name].reset_counts()
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
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
    mode: str = "choreographed",
    names: Sequence[str] = (),
) -> tuple[list[Row], dict[str, Any]]:
    """Many workflows at once, each of its own client; a round is one of every workflow.

    Args:
        turn_tokens: tokens that vary, and tokens that are generated, in a turn.
        device: tokens of the cache; None: room for half of the fixed prompts and half of the calls in flight.
    """
    call, prompts = fixed + 2 * turn_tokens + 64, agents * workflows * fixed
    device = device or prompts // 2 + workflows * call // 2
    host = prompts + 2 * agents * workflows * (call - fixed) + workflows * call  # and what varies in two rounds
    every = make_setups(make_engine, device=device, host=host, mode=mode, names=names)
    time_workflows(
        every, [Team(agents, fixed, turn_tokens, turn_tokens, seed=1 + i) for i in range(workflows)], repeats
    )
    return rows_of(label_of(f"{fixed} x {workflows}", mode), every, agents * workflows), usage_counts(every)


def time_workflows(setups: dict[str, CacheSetup], teams: Sequence[Team], repeats: int) -> None:
    """Run all teams at once, every setup in turns; each team is a client of its own."""
    runs = {name: [t.rounds(setup, f"client {i}") for i, t in enumerate(teams)] for name, setup in setups.items()}
    time_rounds(setups, repeats, lambda name: run_all(setups[name].engine, [partial(next, run) for run in runs[name]]))
    for run in (run for several in runs.values() for run in several):
        run.close()


def overhead_of_hints(
    make_engine: EngineFactory,
    fixed: int,
    workflows: int,
    repeats: int,
    *,
    agents: int = 4,
    turn_tokens: int = 64,
    mode: str = "prefix",
) -> list[Row]:
    """Time of the step graph over that of reactive loading, where nothing is evicted.

    There is room for all prompts and all calls, so the difference is what steps, hints and prefetch cost the host.
    """
    call, prompts = fixed + 2 * turn_tokens + 64, agents * workflows * fixed
    room = prompts + 2 * (WARM_UPS + repeats) * agents * workflows * call
    every = make_setups(make_engine, device=room, host=prompts, mode=mode, names=(REACTIVE, AWARE))
    time_workflows(
        every, [Team(agents, fixed, turn_tokens, turn_tokens, seed=1 + i) for i in range(workflows)], repeats
    )
    for setup in every.values():
        assert not setup.engine.events.counts["evicted"], "the overhead is measured with room for everything"
    times = {name: setup.round_seconds for name, setup in every.items()}
    label = f"{label_of(f'{fixed} x {workflows}', mode)}, room for all: time over reactive"
    estimate = asdict(ratio(times[AWARE], times[REACTIVE]))
    return [estimate_row(label, estimate, "x", better="lower", required=OVERHEAD_LIMIT)]


def run_all(engine: Engine, programs: list[Callable[[], None]]) -> None:
    """Runs programs together until all have ended well."""
    for outcome in run_concurrently(engine, programs, max_programs=len(programs), max_requests=4 * len(programs)):
        if outcome.error:
            raise outcome.error


def rows_of(label: str, setups: dict[str, CacheSetup], turns: int) -> list[Row]:
    """Throughput, hits and speed-ups of the last setup. turns: of agents, in a round."""
    times = {name: setup.round_seconds for name, setup in setups.items()}
    rows = [
        median_row(f"{label}: {name}, throughput", [turns / t for t in taken], "turns/s")
        for name, taken in times.items()
    ]
    for name, setup in setups.items():
        assert setup.num_computed <= setup.num_uses, "a fixed prompt was computed twice for one use"
        result = mean([0] * setup.num_computed + [1] * (setup.num_uses - setup.num_computed))
        rows.append(estimate_row(f"{label}: {name}, fixed prompts found", asdict(result), "share"))
    *others, last = setups
    for other in others:
        result = ratio(times[other], times[last])
        facts = {"value": result.value, "low": result.low, "high": result.high}
        rows.append(estimate_row(f"{label}: over {other}", facts, "x"))
    return rows


def usage_counts(setups: dict[str, CacheSetup]) -> dict:
    """Of every setup: uses of fixed prompts, how many were computed again, and loads."""
    return {name: {"uses": s.num_uses, "computed": s.num_computed, "loads": s.num_loads} for name, s in setups.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--shapes", nargs="*", default=["/".join(map(str, shape)) for shape in GRID])
    options.add_argument("--crowds", nargs="*", default=[" x ".join(map(str, crowd)) for crowd in CONCURRENT_SHAPES])
    options.add_argument("--overhead", nargs="*", default=["128 x 64"], help="workflows with room for all prompts")
    options.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    options.add_argument("--setups", nargs="*", choices=SETUP_NAMES["choreographed"], default=[], help="by default all")
    given = options.parse_args()
    engines = real_engines(engine(tokens=8192))
    for mode in given.modes:
        for shape in given.shapes:
            result = single_workflow(engines, parse_label(shape, "/"), given.rounds, mode=mode, names=given.setups)
            save_result(*result, label_of(shape, mode), "alone")
        for crowd in given.crowds:
            fixed, workflows = parse_label(crowd, " x ")
            result = concurrent_workflows(engines, fixed, workflows, given.repeats, mode=mode, names=given.setups)
            save_result(*result, label_of(crowd, mode), "crowd")
        for crowd in given.overhead:
            save_overhead(overhead_of_hints(engines, *parse_label(crowd, " x "), given.repeats, mode=mode))


def parse_label(label: str, separator: str) -> tuple[Any, ...]:
    return tuple(int(part) for part in label.partition(",")[0].split(separator))


def save_result(rows: list[Row], counts: dict[str, Any], label: str, kind: str) -> None:
    """Saves one measurement beside those of the others."""
    result = {"alone": {}, "crowd": {}, **last_result("kvflow").get("found", {})}
    result[kind] = {**result[kind], label: counts}
    had = [row_from_record(r) for r in last_result("kvflow").get("rows", []) if r["measure"].partition(":")[0] != label]
    save("kvflow", had + rows, found=result)
    print(label, counts, flush=True)
    draw_figures(had + rows, result)


def save_overhead(rows: list[Row]) -> None:
    """Save rows that belong to no shape beside the others."""
    last, names = last_result("kvflow"), {row.measure for row in rows}
    had = [row_from_record(record) for record in last.get("rows", []) if record["measure"] not in names]
    save("kvflow", had + rows, found=last.get("found", {}))


def draw_figures(rows: list[Row], counts: dict[str, Any]) -> None:
    at = {r.measure: (r.value, r.low, r.high) for r in rows}
    for kind, sets in counts.items():
        groups = {
            label: {f"over {o}": at[f"{label}: over {o}"] for o in (DEVICE_ONLY, REACTIVE, COPIED_AHEAD) if o in setups}
            for label, setups in sets.items()
        }
        if groups:
            difference_bars(groups, FIGURES / f"kvflow-{kind}.svg", ylabel="speed-up of a round", baseline=1)


if __name__ == "__main__":
    main()
