"""Agent Step Graph: steps to the next execution of agents (KVFlow §3.1).

An agent runs one step after its dependencies: after the last of `all_of`, or the first of `any_of`.
A dependency on an agent is satisfied while that agent runs, or if it ended after the dependent
agent last started. Of an `any_of`, the others that had started by then no longer count. Steps are
the least solution of these rules, also in cyclic graphs; an agent that cannot run again has
infinitely many.
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
from ..utils import RepeatedKeyError, parse_yaml

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

    @property
    def alternatives(self) -> Iterator[str]:
        """Agents below an `any_of` of several operands."""
        is_choice = self.kind == "any_of" and len(self.operands) > 1
        for operand in self.operands:
            if isinstance(operand, Dependency):
                yield from operand.agents if is_choice else operand.alternatives
            elif is_choice:
                yield operand

    def steps(self, agent_steps: Mapping[str, float]) -> float:
        """Return the steps until the dependency is satisfied."""
        if len(self.operands) == 1 and isinstance(self.operands[0], str):
            return agent_steps[self.operands[0]]
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

    def is_stale(self, agent: str, predecessor: str) -> bool:
        """Return whether `agent` started after the last start of `predecessor`.

        As one of several alternatives, that execution no longer satisfies `agent`, which has run
        for another one.
        """
        return self.started.get(predecessor, 0) < self.started.get(agent, 0)


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
            raise GraphError(f"dependencies={dependencies!r}: a step graph needs at least one agent")
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
        self._predecessors = {agent: tuple(dict.fromkeys(join.agents)) for agent, join in self._effective.items()}
        self._dependents: dict[str, list[str]] = {}
        for agent, predecessors in self._predecessors.items():
            for before in predecessors:
                self._dependents.setdefault(before, []).append(agent)
        # pairs (agent, predecessor) of which any of several suffices
        self._alternatives = {
            (agent, before) for agent, join in self._effective.items() for before in join.alternatives
        }

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
                raise GraphError(f"agent {agent!r}: what it waits for is nested too deep: use fewer levels") from None
            dependencies[agent] = Dependency("any_of", (operand,)) if isinstance(operand, str) else operand
        return cls(dependencies, exclusive_branches=choosers, cyclic=repeats, name=name)

    @property
    def edges(self) -> list[tuple[str, str]]:
        """Unique pairs (predecessor, agent), in the order of declaration."""
        return [(before, agent) for agent, predecessors in self._predecessors.items() for before in predecessors]

    def steps(self, progress: Progress) -> dict[str, float]:
        """Return the steps to the next execution of every agent.

        0 for running agents, infinite for agents that cannot run again. Agents are settled in the
        order of their steps, so that each dependency is looked at once.
        """
        steps = {agent: 0.0 if agent in progress.running else UNREACHABLE for agent in self.agents}
        for agent in self.entry_agents:
            if agent not in progress.started:
                steps[agent] = 1.0
        waits: dict[str, dict[str, float]] = {}  # steps until each predecessor satisfies a dependency, by agent
        settled: set[tuple[str, str]] = set()  # dependencies (agent, predecessor) whose steps are final
        for agent in self.agents:
            if steps[agent] == 0:
                continue
            waits[agent] = dict.fromkeys(self._predecessors[agent], UNREACHABLE)
            for before in waits[agent]:
                if before not in progress.started:
                    continue
                is_stale = (agent, before) in self._alternatives and progress.is_stale(agent, before)
                if not is_stale and self._is_satisfied(agent, before, progress):
                    waits[agent][before] = 0.0
                if waits[agent][before] == 0 or before in progress.running:
                    settled.add((agent, before))
            if 0.0 in waits[agent].values():  # else it waits for an agent that is not settled yet
                steps[agent] = min(steps[agent], self._effective[agent].steps(waits[agent]) + 1)
        queue = [agent for agent, value in steps.items() if 0 < value < UNREACHABLE]  # all have 1
        for before in queue:  # grows during iteration
            for agent in self._dependents.get(before, ()):
                if agent in waits and (agent, before) not in settled:
                    waits[agent][before] = steps[before]
                    is_single = len(waits[agent]) == 1
                    value = (steps[before] if is_single else self._effective[agent].steps(waits[agent])) + 1
                    if value < steps[agent]:
                        steps[agent] = value
                        queue.append(agent)
        return steps

    def _is_satisfied(self, agent: str, predecessor: str, progress: Progress) -> bool:
        """Return whether a dependency is satisfied, as `Progress.is_satisfied`.

        If only one dependent of `predecessor` may run and another one has started since, `agent` waits
        for the next execution of `predecessor`.
        """
        is_satisfied = progress.is_satisfied(agent, predecessor)
        if not is_satisfied or predecessor in progress.running or predecessor not in self.exclusive_branches:
            return is_satisfied
        ended, siblings = progress.ended[predecessor], self._dependents[predecessor]
        return not any(progress.started.get(sibling, 0) > ended for sibling in siblings if sibling != agent)


def _load_file(path: Path) -> Mapping[str, Any]:
    is_json = path.suffix.lower() == ".json"
    try:
        text = path.read_text(encoding="utf-8-sig")
        result = json.loads(text, object_pairs_hook=_unique_keys) if is_json else parse_yaml(text, "agents")
    except OSError as exc:
        raise GraphError(f"{exc.strerror or exc}: check the path") from None
    except GraphError:
        raise
    except RepeatedKeyError as exc:
        raise GraphError(str(exc)) from None
    except (ValueError, RecursionError) as exc:
        kind, reason = "JSON" if is_json else "YAML", " ".join(str(exc).split())
        raise GraphError(f"not {kind}: {reason}: correct the file") from None
    if not isinstance(result, Mapping):
        raise GraphError(f"{type(result).__name__} instead of a mapping: map agents to what they wait for")
    return result


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
        self.num_observed = 0  # starts
        self._hitting_times: np.ndarray | None = None  # cached until the probabilities change
        self._num_counted: dict[str, int] = {}  # transitions from each agent when they were computed

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(self.counts)

    def observe(self, previous: str | None, agent: str) -> None:
        """Count a start of `agent` after the start of `previous`."""
        self.num_observed += 1
        is_new = agent not in self.counts
        self.counts.setdefault(agent, Counter())
        if previous is not None:
            row = self.counts.setdefault(previous, Counter())
            row[agent] += 1
            is_new |= row[agent] == 1
            # the probabilities of a row with one transition stay, those of a long row change little
            is_new |= len(row) > 1 and row.total() > RECOMPUTE_GROWTH * self._num_counted.get(previous, 0)
        if is_new:
            self._hitting_times = None

    def steps(self, progress: Progress) -> dict[str, float]:
        """Return the expected steps to the next execution of every agent.

        0 for running agents, infinite for agents that cannot be reached from those that run or ran
        last.
        """
        recent = set(progress.running) or ({progress.last_started} if progress.last_started else set())
        names = list(self.counts)
        rows = [names.index(agent) for agent in recent if agent in self.counts]
        times = self.hitting_times()[rows].min(axis=0, initial=UNREACHABLE).tolist() if names else []
        return {agent: 0.0 if agent in progress.running else value for agent, value in zip(names, times, strict=True)}

    def hitting_times(self) -> np.ndarray:
        """Return the expected steps to next starts, (A, A) float64 (from, to).

        Computed again when a transition is new, or an agent with several successors has been
        followed an eighth more often.
        """
        if self._hitting_times is None:
            names = list(self.counts)
            counts = np.array([[self.counts[name][after] for after in names] for name in names], dtype=float)
            counts = counts.reshape(len(names), len(names))  # also without agents
            totals = counts.sum(axis=1, keepdims=True)
            self._num_counted = {name: row.total() for name, row in self.counts.items()}
            self._hitting_times = compute_hitting_times(counts / np.maximum(totals, 1))
        return self._hitting_times


DISCOUNT = 1 - 1e-6  # of each step: times are exact in a cycle, else too low by a millionth of their variance
RECOMPUTE_GROWTH = 1.125


def compute_hitting_times(probabilities: np.ndarray) -> np.ndarray:
    """Return the expected steps between states of a Markov chain.

    With N = (I - gP)^-1 for a discount g close to 1, the generating function of the steps from s to t
    is F(g) = (N - I)[s, t] / N[t, t], and their expectation is g F'(g) / F(g), where dN/dg is
    N (N - I) / g. This is one inverse for all pairs, in O(A^3).

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
    identity = np.eye(num_states)
    visits = np.linalg.inv(identity - DISCOUNT * probabilities)
    after_start = visits - identity
    slope = visits @ after_start  # g dN/dg
    own, own_slope = np.diag(visits), np.diag(slope)
    reach = np.where(reachable, after_start / own, 1.0)
    times = (slope - reach * own_slope) / own / reach
    return np.where(reachable, times, UNREACHABLE)
