"""The Agent Step Graph: how soon each agent can run next. Pure; knows no cache and no session.

KVFlow, section 3.1. An agent starts one step after what it waits for: after the last of `all_of`, the first of
`any_of`. What it waits for is there where an agent runs now, or has ended since the waiting one last started. Steps
are the least numbers that satisfy this everywhere, loops included; an agent that nothing leads to has infinitely many.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from scipy.stats import kendalltau

from ..errors import GraphError

UNREACHABLE = math.inf

DEPENDENCY_KINDS = ("all_of", "any_of")


class Dependency(NamedTuple):
    """What an agent waits for: all or any of some agents and joins. `any_of` nothing: it never starts by itself."""

    kind: str
    operands: "tuple[str | Dependency, ...]"

    @property
    def agents(self) -> Iterator[str]:
        for one in self.operands:
            if isinstance(one, Dependency):
                yield from one.agents
            else:
                yield one

    def steps(self, agent_steps: Mapping[str, float]) -> float:
        values = [one.steps(agent_steps) if isinstance(one, Dependency) else agent_steps[one] for one in self.operands]
        return (max if self.kind == "all_of" else min)(values, default=UNREACHABLE)


@dataclass
class Progress:
    """What runs and what has ended in one run of a workflow. Times are a rising count of what happened."""

    running: Counter[str] = field(default_factory=Counter)
    started: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    last_started: str | None = None
    now: int = 0

    @classmethod
    def from_events(cls, events: Iterable[str], agents: Iterable[str]) -> "Progress":
        """From "+agent" (it started) and "-agent" (it ended), in order."""
        progress, known = cls(), set(agents)
        for event in events:
            sign, agent = event[:1], event[1:]
            if sign not in ("+", "-") or agent not in known:
                raise GraphError(f"event {event!r}: use + or - and one of {sorted(known)}")
            if sign == "-" and agent not in progress.running:
                raise GraphError(f"event {event!r}: {agent!r} does not run then")
            (progress.start if sign == "+" else progress.end)(agent)
        return progress

    def start(self, agent: str) -> None:
        self.now += 1
        self.running[agent] += 1
        self.started[agent], self.last_started = self.now, agent

    def end(self, agent: str) -> None:
        assert self.running[agent] > 0, f"agent {agent} does not run"
        self.now += 1
        self.running[agent] -= 1
        self.running += Counter()  # forgets zeros
        self.ended[agent] = self.now

    def is_satisfied(self, agent: str, predecessor: str) -> bool:
        """Whether `before` has done its part for the next start of `agent`."""
        return predecessor in self.running or self.ended.get(predecessor, 0) > self.started.get(agent, 0)


class StepGraph:
    """waits: what each agent waits for (None: nothing, it may start first). choosers: agents after which exactly one
    of those that wait for them runs. repeats: agents that start first may start again after any last one."""

    def __init__(
        self,
        dependencies: Mapping[str, Dependency | None],
        *,
        exclusive_branches: Iterable[str] = (),
        cyclic: bool = False,
        name: str = "",
    ) -> None:
        if not dependencies:
            raise GraphError("a step graph needs at least one agent")
        self.name = name
        self.dependencies = dict(dependencies)
        self.exclusive_branches = frozenset(exclusive_branches)
        self.cyclic = cyclic
        for agent in self.exclusive_branches:
            self._check_declared(agent, "chooses")
        for agent, join in self.dependencies.items():
            for before in join.agents if join else ():
                self._check_declared(before, f"{agent!r} waits for it")
        self.entry_agents = tuple(a for a, join in self.dependencies.items() if join is None) or (
            next(iter(self.dependencies)),
        )
        waited = {before for join in self.dependencies.values() if join for before in join.agents}
        self.exit_agents = tuple(agent for agent in self.dependencies if agent not in waited)
        self._effective_dependencies = {
            agent: self._add_cycle_edges(agent, join) for agent, join in self.dependencies.items()
        }

    def _check_declared(self, agent: str, reason: str) -> None:
        if agent not in self.dependencies:
            raise GraphError(f"agent {agent!r} is not declared ({reason}); declared: {list(self.dependencies)}")

    def _add_cycle_edges(self, agent: str, dependency: Dependency | None) -> Dependency:
        if self.cyclic and agent in self.entry_agents:
            return Dependency("any_of", (*(() if dependency is None else (dependency,)), *self.exit_agents))
        return dependency or Dependency("any_of", ())

    @classmethod
    def read(cls, source: Mapping[str, Any] | str | PathLike[str]) -> "StepGraph":
        """A graph from a dict, or from a YAML or JSON file that holds one.

            agents:
              planner:
              coder: planner
              tester: planner
              reviewer: {all_of: [coder, tester]}
            choosers: []
            repeats: true

        A dict of agents alone is also taken. Raises GraphError, which names what is wrong.
        """
        if isinstance(source, Mapping):
            return cls._from_mapping(source, "")
        try:
            return cls._from_mapping(_load_file(Path(source)), Path(source).stem)
        except GraphError as exc:
            raise GraphError(f"{source}: {exc}") from None

    @classmethod
    def _from_mapping(cls, source: Mapping[str, Any], name: str) -> "StepGraph":
        given: dict[str, Any] = dict(source) if "agents" in source else {"agents": source}
        agents = given.pop("agents")
        if not isinstance(agents, Mapping):
            raise GraphError(f"agents: {agents!r}: map each agent to what it waits for")
        if unknown := [entry for entry in given if entry not in ("choosers", "repeats", "name")]:
            raise GraphError(f"{unknown[0]!r}: no such entry; known: agents, choosers, repeats, name")
        choosers, repeats = given.get("choosers", ()), given.get("repeats", False)
        if not isinstance(repeats, bool):
            raise GraphError(f"repeats: {repeats!r}: use true or false")
        if not isinstance(choosers, (list, tuple)):
            raise GraphError(f"choosers: {choosers!r}: use a list of agents")
        waits = {_check_agent_name(a): _parse_dependency(join, f"agent {a!r}") for a, join in agents.items()}
        return cls(
            waits,
            exclusive_branches=map(_check_agent_name, choosers),
            cyclic=repeats,
            name=str(given.get("name", name)),
        )

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(self.dependencies)

    @property
    def edges(self) -> list[tuple[str, str]]:
        """(before, agent), each once, in order of declaration."""
        return list(
            dict.fromkeys((b, agent) for agent, join in self._effective_dependencies.items() for b in join.agents)
        )

    def successors(self, agent: str) -> list[str]:
        return [after for before, after in self.edges if before == agent]

    def steps(self, progress: Progress) -> dict[str, float]:
        """Steps to the next execution of every agent: 0 for those that run."""
        steps = {agent: 0.0 if agent in progress.running else UNREACHABLE for agent in self.dependencies}
        for agent in self.entry_agents:
            if agent not in progress.started:
                steps[agent] = 1.0
        for _ in self.dependencies:
            changed = False
            for agent, join in self._effective_dependencies.items():
                if agent in progress.running:
                    continue
                known = {b: self._steps_until(agent, b, steps, progress) for b in join.agents}
                value = join.steps(known) + 1
                if value < steps[agent]:
                    steps[agent], changed = value, True
            if not changed:
                break
        return steps

    def _steps_until(self, agent: str, predecessor: str, steps: Mapping[str, float], progress: Progress) -> float:
        """When `before` will have done its part for `agent`."""
        if progress.is_satisfied(agent, predecessor) and not self._branch_taken(agent, predecessor, progress):
            return 0.0
        return steps[predecessor] if predecessor not in progress.running else 0.0

    def _branch_taken(self, agent: str, predecessor: str, progress: Progress) -> bool:
        """Whether what `before` ended with has led to another agent already."""
        if predecessor not in self.exclusive_branches or predecessor in progress.running:
            return False
        ended = progress.ended.get(predecessor, 0)
        return any(progress.started.get(other, 0) > ended for other in self.successors(predecessor) if other != agent)


def _load_file(path: Path) -> Mapping[str, Any]:
    is_json = path.suffix.lower() == ".json"
    try:
        text = path.read_text(encoding="utf-8-sig")
        result = json.loads(text, object_pairs_hook=_unique_keys) if is_json else yaml.load(text, UniqueKeyLoader)
    except OSError as exc:
        raise GraphError(exc.strerror or str(exc)) from None
    except GraphError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise GraphError(f"not {'JSON' if is_json else 'YAML'}: {' '.join(str(exc).split())}") from None
    if not isinstance(result, Mapping):
        raise GraphError("map agents to what they wait for")
    return result


class UniqueKeyLoader(yaml.SafeLoader):
    """A name that stands twice in one map is refused: YAML's own loader keeps the last one silently, as JSON's does."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        _unique_keys((name.value, value) for name, value in node.value if isinstance(name, yaml.ScalarNode))
        return node


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise GraphError(f"{name!r} stands twice: give each agent once")
        result[name] = value
    return result


def _check_agent_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise GraphError(f"agent {name!r}: use a name")
    return name


def _parse_dependency(spec: object, where: str) -> Dependency | None:
    if spec is None or spec == [] or spec == {}:
        return None
    try:
        result = _parse_operand(spec, where)
    except RecursionError:  # an alias in YAML may hold itself
        raise GraphError(f"{where}: what it waits for is nested too deep") from None
    return result if isinstance(result, Dependency) else Dependency("any_of", (result,))


def _parse_operand(spec: object, where: str) -> "str | Dependency":
    """A name, a list of one name, or {all_of | any_of: [...]}, nested as deep as one likes."""
    if isinstance(spec, str):
        return _check_agent_name(spec)
    if isinstance(spec, (list, tuple)):
        if len(spec) != 1:
            raise GraphError(f"{where} waits for {list(spec)!r}: say {{all_of: [...]}} or {{any_of: [...]}}")
        return _parse_operand(spec[0], where)
    if isinstance(spec, Mapping) and len(spec) == 1:
        kind, of = next(iter(spec.items()))
        if kind in DEPENDENCY_KINDS and isinstance(of, (list, tuple)) and of:
            return Dependency(kind, tuple(_parse_operand(one, where) for one in of))
    raise GraphError(f"{where} waits for {spec!r}: use a name, {{all_of: [...]}} or {{any_of: [...]}}")


class TransitionStats:
    """Transitions of one client's workflow."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self._hitting_times: dict[str, dict[str, float]] | None = None  # from the counts as they are

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(self.counts)

    def observe(self, previous: str | None, agent: str) -> None:
        """`agent` started; `before` was the one that started last."""
        self._hitting_times = None
        self.counts.setdefault(agent, Counter())
        if previous is not None:
            self.counts.setdefault(previous, Counter())[agent] += 1

    def steps(self, progress: Progress) -> dict[str, float]:
        """Expected steps to the next execution: 0 for those that run, infinite for those that never followed."""
        sources = set(progress.running) or ({progress.last_started} if progress.last_started else set())
        passage = self.hitting_times()
        result = {}
        for agent in self.counts:
            ways = (passage[source][agent] for source in sources if source in passage)
            result[agent] = 0.0 if agent in progress.running else min(ways, default=UNREACHABLE)
        return result

    def hitting_times(self) -> dict[str, dict[str, float]]:
        """Expected steps from one agent to the next start of another (from itself: until it comes round)."""
        if self._hitting_times is None:  # asked with every event, and only a start changes it
            self._hitting_times = self._compute_hitting_times()
        return self._hitting_times

    def _compute_hitting_times(self) -> dict[str, dict[str, float]]:
        names = list(self.counts)
        chances = np.zeros((len(names), len(names)))
        for i, name in enumerate(names):
            total = self.counts[name].total()
            for j, after in enumerate(names):
                chances[i, j] = self.counts[name][after] / total if total else 0.0
        leads = _reachable(chances)
        columns = [_hitting_times_to(chances, leads[:, target], target) for target in range(len(names))]
        times = np.stack(columns, axis=1) if names else chances
        return {a: {b: float(times[i, j]) for j, b in enumerate(names)} for i, a in enumerate(names)}


def _hitting_times_to(probabilities: np.ndarray, can_reach: np.ndarray, target: int) -> np.ndarray:
    """Expected steps from every state to `target`, given that it is reached; infinite where it cannot be. able: which
    states lead to it."""
    times = np.full(len(probabilities), UNREACHABLE)
    if not can_reach.any():
        return times
    arrive, onward = probabilities[can_reach, target], probabilities[np.ix_(can_reach, can_reach)].copy()
    if can_reach[target]:
        onward[:, np.flatnonzero(can_reach) == target] = 0.0  # what happens behind the target does not matter
    unit = np.eye(len(arrive))
    reach = np.linalg.solve(unit - onward, arrive)  # the chance ever to get there
    given = onward * reach[None, :] / reach[:, None]  # the chain, given that it does
    times[can_reach] = np.linalg.solve(unit - given, np.ones(len(arrive)))
    return times


def _reachable(probabilities: np.ndarray) -> np.ndarray:
    """Which states (rows) lead to which at all: ways of twice as many steps each time."""
    result = probabilities > 0
    for _ in range(len(probabilities).bit_length()):
        ways = result.astype(np.float32)
        result = result | (ways @ ways > 0)
    return result


def compare_steps(declared: Mapping[str, float], learned: Mapping[str, float]) -> dict[str, float]:
    """How close two sets of steps come: mean distance over agents that both give finite steps, the share of agents on
    whose being reachable they agree, and Kendall's tau between the orders in which agents would be evicted."""
    names = [name for name in declared if name in learned]
    both = [n for n in names if declared[n] < UNREACHABLE and learned[n] < UNREACHABLE]
    same = sum((declared[n] < UNREACHABLE) == (learned.get(n, UNREACHABLE) < UNREACHABLE) for n in declared)
    far = [abs(declared[n] - learned[n]) for n in both]
    a, b = ([one[n] for n in both] for one in (declared, learned))
    constant = len(set(a)) < 2 or len(set(b)) < 2
    return {
        "distance": float(np.mean(far)) if far else 0.0,
        "reachable": same / len(declared) if declared else 1.0,
        "tau": 1.0 if constant else float(kendalltau(a, b).statistic),
    }
