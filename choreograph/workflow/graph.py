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

import yaml

from ..errors import GraphError

NEVER = math.inf
KINDS = ("all_of", "any_of")


class Join(NamedTuple):
    """What an agent waits for: all or any of some agents and joins. `any_of` nothing: it never starts by itself."""

    kind: str
    of: "tuple[str | Join, ...]"

    @property
    def agents(self) -> Iterator[str]:
        for one in self.of:
            if isinstance(one, Join):
                yield from one.agents
            else:
                yield one

    def steps(self, known: Mapping[str, float]) -> float:
        values = [one.steps(known) if isinstance(one, Join) else known[one] for one in self.of]
        return (max if self.kind == "all_of" else min)(values, default=NEVER)


@dataclass
class Progress:
    """What runs and what has ended in one run of a workflow. Times are a rising count of what happened."""

    running: Counter[str] = field(default_factory=Counter)
    started: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    last: str | None = None
    now: int = 0

    @classmethod
    def after(cls, events: Iterable[str], agents: Iterable[str]) -> "Progress":
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
        self.started[agent], self.last = self.now, agent

    def end(self, agent: str) -> None:
        assert self.running[agent] > 0, f"agent {agent} does not run"
        self.now += 1
        self.running[agent] -= 1
        self.running += Counter()  # forgets zeros
        self.ended[agent] = self.now

    def waits_no_more(self, agent: str, before: str) -> bool:
        """Whether `before` has done its part for the next start of `agent`."""
        return before in self.running or self.ended.get(before, 0) > self.started.get(agent, 0)


class StepGraph:
    """waits: what each agent waits for (None: nothing, it may start first). choosers: agents after which exactly one
    of those that wait for them runs. repeats: agents that start first may start again after any last one."""

    def __init__(
        self, waits: Mapping[str, Join | None], *, choosers: Iterable[str] = (), repeats: bool = False, name: str = ""
    ) -> None:
        if not waits:
            raise GraphError("a step graph needs at least one agent")
        self.name = name
        self.waits = dict(waits)
        self.choosers = frozenset(choosers)
        self.repeats = repeats
        for agent in self.choosers:
            self._known(agent, "chooses")
        for agent, join in self.waits.items():
            for before in join.agents if join else ():
                self._known(before, f"{agent!r} waits for it")
        self.first = tuple(a for a, join in self.waits.items() if join is None) or (next(iter(self.waits)),)
        waited = {before for join in self.waits.values() if join for before in join.agents}
        self.last = tuple(agent for agent in self.waits if agent not in waited)
        self._joins = {agent: self._with_repeats(agent, join) for agent, join in self.waits.items()}

    def _known(self, agent: str, why: str) -> None:
        if agent not in self.waits:
            raise GraphError(f"agent {agent!r} is not declared ({why}); declared: {list(self.waits)}")

    def _with_repeats(self, agent: str, join: Join | None) -> Join:
        if self.repeats and agent in self.first:
            return Join("any_of", (*(() if join is None else (join,)), *self.last))
        return join or Join("any_of", ())

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
            return cls._of(source, "")
        try:
            return cls._of(_loaded(Path(source)), Path(source).stem)
        except GraphError as problem:
            raise GraphError(f"{source}: {problem}") from None

    @classmethod
    def _of(cls, source: Mapping[str, Any], name: str) -> "StepGraph":
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
        waits = {_agent(a): _top(join, f"agent {a!r}") for a, join in agents.items()}
        return cls(waits, choosers=map(_agent, choosers), repeats=repeats, name=str(given.get("name", name)))

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(self.waits)

    @property
    def edges(self) -> list[tuple[str, str]]:
        """(before, agent), each once, in order of declaration."""
        return list(dict.fromkeys((b, agent) for agent, join in self._joins.items() for b in join.agents))

    def followers(self, agent: str) -> list[str]:
        return [after for before, after in self.edges if before == agent]

    def steps(self, progress: Progress) -> dict[str, float]:
        """Steps to the next execution of every agent: 0 for those that run."""
        steps = {agent: 0.0 if agent in progress.running else NEVER for agent in self.waits}
        for agent in self.first:
            if agent not in progress.started:
                steps[agent] = 1.0
        for _ in self.waits:
            changed = False
            for agent, join in self._joins.items():
                if agent in progress.running:
                    continue
                known = {b: self._seen_from(agent, b, steps, progress) for b in join.agents}
                value = join.steps(known) + 1
                if value < steps[agent]:
                    steps[agent], changed = value, True
            if not changed:
                break
        return steps

    def _seen_from(self, agent: str, before: str, steps: Mapping[str, float], progress: Progress) -> float:
        """When `before` will have done its part for `agent`."""
        if progress.waits_no_more(agent, before) and not self._chose_another(agent, before, progress):
            return 0.0
        return steps[before] if before not in progress.running else 0.0

    def _chose_another(self, agent: str, before: str, progress: Progress) -> bool:
        """Whether what `before` ended with has led to another agent already."""
        if before not in self.choosers or before in progress.running:
            return False
        ended = progress.ended.get(before, 0)
        return any(progress.started.get(other, 0) > ended for other in self.followers(before) if other != agent)


def _loaded(path: Path) -> Mapping[str, Any]:
    is_json = path.suffix.lower() == ".json"
    try:
        text = path.read_text(encoding="utf-8-sig")
        found = json.loads(text, object_pairs_hook=_once_each) if is_json else yaml.load(text, _OnceEach)
    except OSError as problem:
        raise GraphError(problem.strerror or str(problem)) from None
    except GraphError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise GraphError(f"not {'JSON' if is_json else 'YAML'}: {' '.join(str(problem).split())}") from None
    if not isinstance(found, Mapping):
        raise GraphError("map agents to what they wait for")
    return found


class _OnceEach(yaml.SafeLoader):
    """A name that stands twice in one map is refused: YAML's own loader keeps the last one silently, as JSON's does."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        _once_each((name.value, value) for name, value in node.value if isinstance(name, yaml.ScalarNode))
        return node


def _once_each(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise GraphError(f"{name!r} stands twice: give each agent once")
        found[name] = value
    return found


def _agent(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise GraphError(f"agent {name!r}: use a name")
    return name


def _top(given: object, where: str) -> Join | None:
    if given is None or given == [] or given == {}:
        return None
    try:
        found = _join(given, where)
    except RecursionError:  # an alias in YAML may hold itself
        raise GraphError(f"{where}: what it waits for is nested too deep") from None
    return found if isinstance(found, Join) else Join("any_of", (found,))


def _join(given: object, where: str) -> "str | Join":
    """A name, a list of one name, or {all_of | any_of: [...]}, nested as deep as one likes."""
    if isinstance(given, str):
        return _agent(given)
    if isinstance(given, (list, tuple)):
        if len(given) != 1:
            raise GraphError(f"{where} waits for {list(given)!r}: say {{all_of: [...]}} or {{any_of: [...]}}")
        return _join(given[0], where)
    if isinstance(given, Mapping) and len(given) == 1:
        kind, of = next(iter(given.items()))
        if kind in KINDS and isinstance(of, (list, tuple)) and of:
            return Join(kind, tuple(_join(one, where) for one in of))
    raise GraphError(f"{where} waits for {given!r}: use a name, {{all_of: [...]}} or {{any_of: [...]}}")
