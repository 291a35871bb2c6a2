"""How close eviction comes to the best that any could do (Belady's optimum), with and without a declared graph.

`make bench NAME=kvflow_policies`. Agents with prompts of equal length on a device with nothing below it; every policy
runs the same recorded sequence of turns through the engine (on a virtual clock: only hits are counted here). "learned"
has no graph and starts with nothing known.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import product

import numpy as np
from scipy.stats import kendalltau

from benchmarks.belady import belady_hits
from benchmarks.simulator import HardwareModel, simulated_engine
from choreograph import CacheConfig, EngineConfig
from choreograph.agents import Progress, StepGraph, TransitionStats, Workflow
from choreograph.agents.step_graph import UNREACHABLE
from choreograph.lab.evaluation.statistics import bootstrap

from .common import SIMULATED, Row, estimate_row, greedy, median_row, random_tokens, save
from .kvflow import MODES, label_of

FIXED, TURNS, SEEDS = 256, 200, 8
LEARNED_AGENTS = (10, 50)
ANY_HARDWARE = HardwareModel("any", 1e9, 1e9, 1, 1024, 1024, 1e12, 1e12, 1e12, 1e9)
TurnGenerator = Callable[[random.Random], Iterator[str]]


def cycle(_: random.Random) -> Iterator[str]:
    while True:
        yield from (f"agent {i}" for i in range(10))


def router(rng: random.Random) -> Iterator[str]:
    """A router that picks one of four specialists, each with a checker of its own; then a writer."""
    while True:
        expert = rng.randrange(4)
        yield from ("router", f"expert {expert}", f"checker {expert}", "writer")


def review(rng: random.Random) -> Iterator[str]:
    """Plan, execute, express, review (PEER); a review sends back to the execution in half of the cases."""
    while True:
        yield "planner"
        while True:
            yield from ("executor", "expresser", "reviewer")
            if rng.random() < 0.5:
                break


GRAPHS: dict[str, tuple[TurnGenerator, StepGraph, int]] = {
    "ten in a cycle": (
        cycle,
        StepGraph.read({"agents": {f"agent {i}": f"agent {i - 1}" if i else None for i in range(10)}, "repeats": True}),
        5,
    ),
    "a router and four pairs": (
        router,
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
POLICIES = ("lru", "lfu", "fifo", "learned", "declared")


def hit_rate(
    turns: list[str], capacity: int, policy: str, graph: StepGraph, mode: str = "choreographed"
) -> tuple[float, TransitionStats]:
    """Share of turns whose fixed prompt was found, and the learned steps at the end."""
    eviction = "workflow" if policy in ("learned", "declared") else policy
    call = FIXED + 16 + 16
    config = EngineConfig(
        CacheConfig(capacity=(capacity - 1) * FIXED + call + 32, eviction=eviction), backend="reference"
    )
    engine, _ = simulated_engine(ANY_HARDWARE, config)
    result, learned = 0, TransitionStats()
    prompts = {name: random_tokens(FIXED, index) for index, name in enumerate(graph.agents)}
    with engine.session(seed=0, mode=mode) as s:
        team = Workflow(s, graph if policy == "declared" else None, learned=learned, infer_fixed_prefix=False)
        for number, name in enumerate(turns):
            with team.agent(name) as agent:
                role = agent.prefill_fixed(prompts[name])
                said = s.decode(random_tokens(16, 10**6 + number), [role], sampling=greedy(4)).result()
            result += said.usage.cached_tokens >= FIXED if mode == "prefix" else role.finish_reason == "cached"
            said.release()
            role.release()
    return result / len(turns), learned


def main() -> None:
    rows: list[Row] = []
    closeness: dict[str, dict[str, float]] = {}
    for mode, (name, (walk, graph, room)) in product(MODES, GRAPHS.items()):
        title = label_of(name, mode)
        rates: dict[str, list[float]] = {way: [] for way in (*POLICIES, "optimum")}
        near: dict[str, list[float]] = {}
        for seed in range(SEEDS):
            steps = walk(random.Random(seed))
            turns = [next(steps) for _ in range(TURNS)]
            for way in POLICIES:
                rate, learned = hit_rate(turns, room, way, graph, mode)
                rates[way].append(rate)
                if way == "learned":
                    for fact, value in compare_learned(graph, learned, turns).items():
                        near.setdefault(fact, []).append(value)
            rates["optimum"].append(belady_hits(turns, room) / len(turns))
        for way, values in rates.items():
            estimate = bootstrap(np.mean, np.array(values))  # of shares; `mean` would take 0 and 1 for yes and no
            facts = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
            rows.append(estimate_row(f"{title}, room for {room}: {way}", facts, "hit rate"))
        closeness[title] = {fact: float(np.mean(values)) for fact, values in near.items()}
        print(title, {way: round(float(np.mean(v)), 3) for way, v in rates.items()}, closeness[title], flush=True)
    rows += [steps_row(count) for count in LEARNED_AGENTS]
    save("kvflow_policies", rows, SIMULATED, closeness=closeness, turns=TURNS, seeds=SEEDS)


def steps_row(num_agents: int, num_starts: int = 1000) -> Row:
    """Milliseconds to observe a start and to compute the steps of agents that follow each other at random."""
    rng, learned, progress, samples = random.Random(0), TransitionStats(), Progress(), []
    for number in range(num_starts):
        name, began = f"agent {rng.randrange(num_agents)}", time.perf_counter()
        learned.observe(progress.last_started, name)
        progress.start(name)
        learned.steps(progress)
        progress.end(name)
        if number >= num_starts // 2:
            samples.append(1e3 * (time.perf_counter() - began))
    return median_row(f"learned steps of {num_agents} agents after a start", samples, "ms", better="lower")


def compare_learned(graph: StepGraph, learned: TransitionStats, turns: list[str]) -> dict[str, float]:
    """Learned steps, at the end, against declared ones: while each of the last turns runs, averaged over them."""
    result: dict[str, list[float]] = {}
    progress = Progress()
    for number, name in enumerate(turns):
        progress.start(name)
        if number >= len(turns) // 2:
            for key, value in compare_steps(graph.steps(progress), learned.steps(progress)).items():
                result.setdefault(key, []).append(value)
        progress.end(name)
    return {key: sum(values) / len(values) for key, values in result.items()}


def compare_steps(declared: Mapping[str, float], learned: Mapping[str, float]) -> dict[str, float]:
    """Compare two sets of steps to execution.

    Returns:
        distance: mean difference over the agents for which both are finite.
        reachable: share of the agents for which both are finite, or neither.
        tau: Kendall's tau between the two orders of eviction.
    """
    both = [name for name in declared if max(declared[name], learned.get(name, UNREACHABLE)) < UNREACHABLE]
    same = sum((declared[n] < UNREACHABLE) == (learned.get(n, UNREACHABLE) < UNREACHABLE) for n in declared)
    a, b = [declared[name] for name in both], [learned[name] for name in both]
    is_constant = len(set(a)) < 2 or len(set(b)) < 2
    return {
        "distance": float(np.mean(np.abs(np.subtract(a, b)))) if both else 0.0,
        "reachable": same / len(declared) if declared else 1.0,
        "tau": 1.0 if is_constant else float(kendalltau(a, b).statistic),
    }


if __name__ == "__main__":
    main()
