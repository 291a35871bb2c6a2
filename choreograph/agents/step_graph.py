"""Agent Step Graph: steps to the next execution of agents (KVFlow §3.1).

An agent runs one step after its dependencies: after the last of `all_of`, or the first of `any_of`.
A dependency on an agent is satisfied while that agent runs, or if it ended after the dependent
agent last started. Steps are the least solution of these rules, also in cyclic graphs; an agent
that cannot run again has infinitely many.
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

from ..errors import GraphError
from ..utils import require

UNREACHABLE = math.inf  # steps of an agent that cannot run again


class Dependency(NamedTuple):
    """Agents, or nested dependencies, that must run before an agent."""

    kind: str  # "all_of" or "any_of"
    operands: "tuple[str | Dependency, ...]"  # any_of nothing is never satisfied

    @property
    def agents(self) -> Iterator[str]:
        for operand in self.operands:
            if isinstance(operand, Dependency):
                yield from operand.agents
            else:
                yield operand

    def steps(self, agent_steps: Mapping[str, float]) -> float:
        """Return the steps until the dependency is satisfied."""
        values = [
            operand.steps(agent_steps) if isinstance(operand, Dependency) else agent_steps[operand]
            for operand in self.operands
        ]
        return (max if self.kind == "all_of" else min)(values, default=UNREACHABLE)


@dataclass
class Progress:
    """Agents that are running or have ended in a workflow run.

    Times are numbers of start and end events.
    """

    running: Counter[str] = field(default_factory=Counter)  # turns in progress, by agent
    started: dict[str, int] = field(default_factory=dict)  # time of the last start
    ended: dict[str, int] = field(default_factory=dict)  # time of the last end
    last_started: str | None = None  # agent that started last
    now: int = 0

    @classmethod
    def from_events(cls, events: Iterable[str], agents: Iterable[str]) -> "Progress":
        """Replay events in order: "+agent" if it started, "-agent" if it ended."""
        progress, names = cls(), set(agents)
        for event in events:
            sign, agent = event[:1], event[1:]
            if sign not in ("+", "-") or agent not in names:
                raise GraphError(f"event {event!r}: use + or - and one of {sorted(names)}")
            if sign == "-" and agent not in progress.running:
                raise GraphError(f"event {event!r}: {agent!r} is not running then")
            (progress.start if sign == "+" else progress.end)(agent)
        return progress

    def start(self, agent: str) -> None:
        self.now += 1
        self.running[agent] += 1
        self.started[agent], self.last_started = self.now, agent

    def end(self, agent: str) -> None:
        assert self.running[agent] > 0, f"agent {agent} is not running"
        self.now += 1
        self.running[agent] -= 1
        self.running += Counter()  # drops zero counts
        self.ended[agent] = self.now

    def is_satisfied(self, agent: str, predecessor: str) -> bool:
        """Return whether the dependency of `agent` on `predecessor` is satisfied.

        True if `predecessor` runs, or ended after `agent` last started.
        """
        return predecessor in self.running or self.ended.get(predecessor, 0) > self.started.get(agent, 0)


class StepGraph:
    """Declared dependencies between agents.

    Args:
        dependencies: dependency of each agent; None for an agent that may start first.
        exclusive_branches: agents after which exactly one of their dependents runs.
        cyclic: agents that start first may start again after any agent without dependents.
    """

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
        waits = [(name, agent) for agent, join in self.dependencies.items() if join for name in join.agents]
        reasons = [(agent, "chooses") for agent in self.exclusive_branches]
        for agent, reason in reasons + [(before, f"{agent!r} waits for it") for before, agent in waits]:
            if agent not in self.dependencies:
                raise GraphError(f"agent {agent!r} is not declared ({reason}); declared: {list(self.dependencies)}")
        self.agents = tuple(self.dependencies)
        self.entry_agents = tuple(a for a, join in self.dependencies.items() if join is None) or self.agents[:1]
        last_agents = tuple(agent for agent in self.agents if agent not in {before for before, _ in waits})
        self._effective: dict[str, Dependency] = {}  # dependencies, cycles included
        for agent, join in self.dependencies.items():
            self._effective[agent] = join or Dependency("any_of", ())
            if cyclic and agent in self.entry_agents:
                self._effective[agent] = Dependency("any_of", (*((join,) if join else ()), *last_agents))

    @classmethod
    def read(cls, source: Mapping[str, Any] | str | PathLike[str]) -> "StepGraph":
        """Build a graph from a dict or a YAML or JSON file.

            agents:
              planner:
              coder: planner
              tester: planner
              reviewer: {all_of: [coder, tester]}
            choosers: []
            repeats: true

        A dict of agents alone is also accepted.

        Raises:
            GraphError: if the graph is invalid.
        """
        if isinstance(source, Mapping):
            return cls._from_mapping(source, "")
        try:
            return cls._from_mapping(_load_file(Path(source)), Path(source).stem)
        except GraphError as exc:
            raise GraphError(f"{source}: {exc}") from None

    @classmethod
    def _from_mapping(cls, source: Mapping[str, Any], name: str) -> "StepGraph":
        fields: dict[str, Any] = dict(source) if "agents" in source else {"agents": source}
        agents = fields.pop("agents")
        choosers, repeats = fields.pop("choosers", ()), fields.pop("repeats", False)
        name = str(fields.pop("name", name))
        if not isinstance(agents, Mapping):
            raise GraphError(f"agents: {agents!r}: map each agent to what it waits for")
        if fields:
            raise GraphError(f"{next(iter(fields))!r}: no such entry; use agents, choosers, repeats, name")
        if not isinstance(repeats, bool):
            raise GraphError(f"repeats: {repeats!r}: use true or false")
        if not isinstance(choosers, (list, tuple)):
            raise GraphError(f"choosers: {choosers!r}: use a list of agents")
        for agent in (*agents, *choosers):
            if not isinstance(agent, str) or not agent:
                raise GraphError(f"agent {agent!r}: use a name")
        dependencies: dict[str, Dependency | None] = {}
        for agent, spec in agents.items():
            try:
                operand = _parse_operand(spec, f"agent {agent!r}") if spec not in (None, [], {}) else None
            except RecursionError:  # a YAML alias may contain itself
                raise GraphError(f"agent {agent!r}: what it waits for is nested too deep") from None
            dependencies[agent] = Dependency("any_of", (operand,)) if isinstance(operand, str) else operand
        return cls(dependencies, exclusive_branches=choosers, cyclic=repeats, name=name)

    @property
    def edges(self) -> list[tuple[str, str]]:
        """Unique pairs (predecessor, agent), in the order of declaration."""
        pairs = ((before, agent) for agent, join in self._effective.items() for before in join.agents)
        return list(dict.fromkeys(pairs))

    def steps(self, progress: Progress) -> dict[str, float]:
        """Return the steps to the next execution of every agent.

        0 for running agents, infinite for agents that cannot run again.
        """
        steps = {agent: 0.0 if agent in progress.running else UNREACHABLE for agent in self.agents}
        for agent in self.entry_agents:
            if agent not in progress.started:
                steps[agent] = 1.0
        changed = True
        while changed:  # the smallest value falls into place first, so there are at most as many rounds as agents
            changed = False
            for agent, join in self._effective.items():
                waits = {before: self._steps_until(agent, before, steps, progress) for before in join.agents}
                if join.steps(waits) + 1 < steps[agent]:  # never true for a running agent, which has 0
                    steps[agent], changed = join.steps(waits) + 1, True
        return steps

    def _steps_until(self, agent: str, predecessor: str, steps: Mapping[str, float], progress: Progress) -> float:
        """Return the steps until `predecessor` satisfies the dependency of `agent`.

        0 if `predecessor` runs, or ended after `agent` last started. If only one dependent of
        `predecessor` may run and another one has started, `agent` waits for the next execution of
        `predecessor`.
        """
        is_running = predecessor in progress.running
        is_taken = False  # True: another branch has started since the predecessor ended
        if predecessor in self.exclusive_branches and not is_running:
            ended = progress.ended.get(predecessor, 0)
            siblings = [after for before, after in self.edges if before == predecessor and after != agent]
            is_taken = any(progress.started.get(sibling, 0) > ended for sibling in siblings)
        if is_running or (progress.is_satisfied(agent, predecessor) and not is_taken):
            return 0.0
        return steps[predecessor]


def _load_file(path: Path) -> Mapping[str, Any]:
    is_json = path.suffix.lower() == ".json"
    try:
        text = path.read_text(encoding="utf-8-sig")
        result = json.loads(text, object_pairs_hook=_unique_keys) if is_json else _load_yaml(text)
    except OSError as exc:
        raise GraphError(exc.strerror or str(exc)) from None
    except GraphError:
        raise
    except (ValueError, RecursionError) as exc:
        raise GraphError(f"not {'JSON' if is_json else 'YAML'}: {' '.join(str(exc).split())}") from None
    if not isinstance(result, Mapping):
        raise GraphError("map agents to what they wait for")
    return result


def _load_yaml(text: str) -> object:
    """Parse YAML as `yaml.safe_load`, but raise GraphError for duplicate keys."""
    require("yaml", "agents")
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            _unique_keys((key.value, value) for key, value in node.value if isinstance(key, yaml.ScalarNode))
            return node

    try:
        return yaml.load(text, UniqueKeyLoader)
    except yaml.YAMLError as exc:
        raise ValueError(exc) from None


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise GraphError(f"{name!r} stands twice: give each agent once")
        result[name] = value
    return result


def _parse_operand(spec: object, where: str) -> str | Dependency:
    """Parse one operand of a dependency.

    That is a name, a list of one name, or {all_of | any_of: [...]}, nested to any depth.
    """
    if isinstance(spec, str) and spec:
        return spec
    if isinstance(spec, (list, tuple)):
        if len(spec) != 1:
            raise GraphError(f"{where} waits for {list(spec)!r}: say {{all_of: [...]}} or {{any_of: [...]}}")
        return _parse_operand(spec[0], where)
    if isinstance(spec, Mapping) and len(spec) == 1:
        kind, operands = next(iter(spec.items()))
        if kind in ("all_of", "any_of") and isinstance(operands, (list, tuple)) and operands:
            return Dependency(kind, tuple(_parse_operand(operand, where) for operand in operands))
    raise GraphError(f"{where} waits for {spec!r}: use a name, {{all_of: [...]}} or {{any_of: [...]}}")


class TransitionStats:
    """Steps to execution, estimated from the observed order of agents.

    Counts the transitions between agents of one client's workflow.
    """

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}  # starts that followed directly, by agent
        self._hitting_times: dict[str, dict[str, float]] | None = None  # cached until the counts change

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(self.counts)

    def observe(self, previous: str | None, agent: str) -> None:
        """Count a start of `agent` after the start of `previous`."""
        self._hitting_times = None
        self.counts.setdefault(agent, Counter())
        if previous is not None:
            self.counts.setdefault(previous, Counter())[agent] += 1

    def steps(self, progress: Progress) -> dict[str, float]:
        """Return the expected steps to the next execution of every agent.

        0 for running agents, infinite for agents that cannot be reached from those that run or ran
        last.
        """
        sources = set(progress.running) or ({progress.last_started} if progress.last_started else set())
        times = [self.hitting_times()[source] for source in sources if source in self.counts]
        return {
            agent: 0.0 if agent in progress.running else min((row[agent] for row in times), default=UNREACHABLE)
            for agent in self.counts
        }

    def hitting_times(self) -> dict[str, dict[str, float]]:
        """Return the expected steps (from, to) to the agents' next starts."""
        if self._hitting_times is None:
            names = list(self.counts)
            counts = np.array([[self.counts[name][after] for after in names] for name in names], dtype=float)
            counts = counts.reshape(len(names), len(names))  # also without agents
            totals = counts.sum(axis=1, keepdims=True)
            times = _compute_hitting_times(counts / np.maximum(totals, 1))
            rows = (dict(zip(names, row.tolist(), strict=True)) for row in times)
            self._hitting_times = dict(zip(names, rows, strict=True))
        return self._hitting_times


def _compute_hitting_times(probabilities: np.ndarray) -> np.ndarray:
    """Return the expected steps between states of a Markov chain.

    Args:
        probabilities: (A, A) float64, transitions (from, to).

    Returns:
        (A, A) float64, (from, to): steps given that the target is reached; inf if unreachable.
    """
    num_states = len(probabilities)
    reachable = probabilities > 0
    for _ in range(num_states.bit_length()):  # paths of twice as many steps each time
        paths = reachable.astype(np.float32)
        reachable = reachable | (paths @ paths > 0)
    times = np.full((num_states, num_states), UNREACHABLE)
    for target in range(num_states):
        sources = np.flatnonzero(reachable[:, target])
        onward = probabilities[np.ix_(sources, sources)]
        onward[:, sources == target] = 0.0  # the chain ends at the target
        identity = np.eye(len(sources))
        reach = np.linalg.solve(identity - onward, probabilities[sources, target])  # probability of reaching it
        conditional = onward * reach[None, :] / reach[:, None]  # the chain, given that the target is reached
        times[sources, target] = np.linalg.solve(identity - conditional, np.ones(len(sources)))
    return times
