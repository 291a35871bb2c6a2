"""How close eviction comes to the best that any could do (Belady's optimum), with and without a declared graph.

`make bench NAME=kvflow_policies`. Agents with prompts of equal length on a device with nothing below it; every policy
runs the same recorded sequence of turns through the engine (on a virtual clock: only hits are counted here). "learned"
has no graph and starts with nothing known.
"""

import random
from collections.abc import Callable, Iterator

import numpy as np

from choreograph import CacheConfig, EngineConfig
from choreograph.evaluation.statistics import bootstrap
from choreograph.evaluation.virtual import Machine, virtual_engine
from choreograph.workflow import LearnedSteps, Progress, StepGraph, Workflow, agreement
from choreograph.workflow.optimum import optimum

from .common import VIRTUAL, Row, estimate_row, greedy, save, some_tokens

FIXED, TURNS, SEEDS = 256, 200, 8
ANY = Machine("any", 1e9, 1e9, 1, 1024, 1024, 1e12, 1e12, 1e12, 1e9)
Walk = Callable[[random.Random], Iterator[str]]


def cycle(_: random.Random) -> Iterator[str]:
    while True:
        yield from (f"agent {i}" for i in range(10))


def chooser(chance: random.Random) -> Iterator[str]:
    """A router that picks one of four specialists, each with a checker of its own; then a writer."""
    while True:
        expert = chance.randrange(4)
        yield from ("router", f"expert {expert}", f"checker {expert}", "writer")


def review(chance: random.Random) -> Iterator[str]:
    """Plan, execute, express, review (PEER); a review sends back to the execution in half of the cases."""
    while True:
        yield "planner"
        while True:
            yield from ("executor", "expresser", "reviewer")
            if chance.random() < 0.5:
                break


GRAPHS: dict[str, tuple[Walk, StepGraph, int]] = {
    "ten in a cycle": (
        cycle,
        StepGraph.read({"agents": {f"agent {i}": f"agent {i - 1}" if i else None for i in range(10)}, "repeats": True}),
        5,
    ),
    "a router and four pairs": (
        chooser,
        StepGraph.read(
            {
                "agents": {
                    "router": None,
                    **{f"expert {i}": "router" for i in range(4)},
                    **{f"checker {i}": f"expert {i}" for i in range(4)},
                    "writer": {"any_of": [f"checker {i}" for i in range(4)]},
                },
                "choosers": ["router"],
                "repeats": True,
            }
        ),
        4,
    ),
    "plan, execute, express, review": (
        review,
        StepGraph.read(
            {
                "agents": {
                    "planner": {"any_of": ["reviewer"]},
                    "executor": {"any_of": ["planner", "reviewer"]},
                    "expresser": "executor",
                    "reviewer": "expresser",
                },
                "choosers": ["reviewer"],
            }
        ),
        2,
    ),
}
WAYS = ("lru", "lfu", "fifo", "learned", "declared")


def hits(turns: list[str], room: int, way: str, graph: StepGraph) -> tuple[float, LearnedSteps]:
    """Share of turns whose fixed prompt was found."""
    eviction = "workflow" if way in ("learned", "declared") else way
    call = FIXED + 16 + 16
    config = EngineConfig(CacheConfig(tokens=(room - 1) * FIXED + call + 32, eviction=eviction), backend="reference")
    engine, _ = virtual_engine(ANY, config)
    found, learned = 0, LearnedSteps()
    prompts = {name: some_tokens(FIXED, index) for index, name in enumerate(graph.agents)}
    with engine.session(seed=0) as s:
        team = Workflow(s, graph if way == "declared" else None, learned=learned, guess_fixed=False)
        for number, name in enumerate(turns):
            with team.agent(name) as agent:
                role = agent.fixed(prompts[name])
                said = s.decode(some_tokens(16, 10**6 + number), [role], sampling=greedy(4)).result()
            found += role.finish_reason == "cached"
            said.release()
            role.release()
    return found / len(turns), learned


def main() -> None:
    rows: list[Row] = []
    closeness: dict[str, dict[str, float]] = {}
    for title, (walk, graph, room) in GRAPHS.items():
        rates: dict[str, list[float]] = {way: [] for way in (*WAYS, "optimum")}
        near: dict[str, list[float]] = {}
        for seed in range(SEEDS):
            steps = walk(random.Random(seed))
            turns = [next(steps) for _ in range(TURNS)]
            for way in WAYS:
                rate, learned = hits(turns, room, way, graph)
                rates[way].append(rate)
                if way == "learned":
                    for name, value in compared(graph, learned, turns).items():
                        near.setdefault(name, []).append(value)
            rates["optimum"].append(optimum(turns, room) / len(turns))
        for way, values in rates.items():
            estimate = bootstrap(np.mean, np.array(values))  # of shares; `mean` would take 0 and 1 for yes and no
            facts = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
            rows.append(estimate_row(f"{title}, room for {room}: {way}", facts, "hit rate"))
        closeness[title] = {name: float(np.mean(values)) for name, values in near.items()}
        print(title, {way: round(float(np.mean(v)), 3) for way, v in rates.items()}, closeness[title], flush=True)
    save("kvflow_policies", rows, VIRTUAL, closeness=closeness, turns=TURNS, seeds=SEEDS)


def compared(graph: StepGraph, learned: LearnedSteps, turns: list[str]) -> dict[str, float]:
    """Learned steps, at the end, against declared ones: while each of the last turns runs, averaged over them."""
    found: dict[str, list[float]] = {}
    progress = Progress()
    for number, name in enumerate(turns):
        progress.start(name)
        if number >= len(turns) // 2:
            for key, value in agreement(graph.steps(progress), learned.steps(progress)).items():
                found.setdefault(key, []).append(value)
        progress.end(name)
    return {key: sum(values) / len(values) for key, values in found.items()}


if __name__ == "__main__":
    main()
