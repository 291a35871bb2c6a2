"""Agents of requests, and trackers of workflows, bounded for each tenant.

A tracker follows the turns of agents by name (KVFlow §3.1), if the eviction policy uses it. All functions but `agent_step`
and `read_declaration` run in the engine's thread.
"""

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ...agents import Agent, StepGraph, Workflow
from ...api.engine import Engine
from ...api.session import Session
from ...errors import InvalidRequestError
from ...features.guard import parse_labels
from ..openai.chat_prompt import ChatPrompt
from ..openai.protocol import ChoreographyOptions
from ..request_body import MAX_NAME_CHARS, walk

if TYPE_CHECKING:
    from .message_store import WorkflowKey

MAX_WORKFLOWS = 64  # of one tenant that are tracked in `exact`; the least recently used are forgotten

MAX_AGENTS = 64  # names without a declared graph; a tracker of more starts anew

MAX_GRAPH_NAMES = 1024  # agents of a declared graph, names that they wait for, and labels

MAX_PROMPT_TOKENS = 1 << 20  # of one tenant's last prompts, from which fixed parts are inferred

IDLE_SECONDS = 600.0  # without a request after which a workflow's fixed parts are kept no longer than others


class AgentStep(NamedTuple):
    """Agent of a request, and what its client says of the workflow."""

    agent: str | None = None
    steps: Mapping[str, float | None] | None = None  # to the next execution of every agent; None: of the graph
    fixed_tokens: int | None = None  # of the prompt's start that every turn has; None: inferred


NO_AGENT = AgentStep()


def agent_step(agent: str | None, options: ChoreographyOptions | None, prompts: Sequence[ChatPrompt]) -> AgentStep:
    """Return the agent of a request, with its fixed part in tokens.

    Raises:
        InvalidRequestError: if an option needs an agent, or the prompt is shorter than its fixed part.
    """
    options = options or ChoreographyOptions()
    if agent is not None and not 1 <= len(agent) <= MAX_NAME_CHARS:
        raise InvalidRequestError(f"agent: {agent!r:.80}: use a name of 1 to {MAX_NAME_CHARS} characters")
    for name in ("steps", "fixed_messages", "fixed_tokens"):
        if agent is None and (value := getattr(options, name)) is not None:
            raise InvalidRequestError(f"{name}={value!r:.80}: belongs to an agent: give `agent` too")
    fixed_tokens, num_messages = options.fixed_tokens, options.fixed_messages
    if num_messages is not None:
        if fixed_tokens is not None:
            raise InvalidRequestError(f"fixed_messages={num_messages}: give it or fixed_tokens, not both")
        fixed_tokens = _tokens_of(num_messages, prompts[0])
    elif fixed_tokens is not None and fixed_tokens > (shortest := min(len(prompt.tokens) for prompt in prompts)):
        raise InvalidRequestError(f"fixed_tokens={fixed_tokens}: the prompt has {shortest} tokens: use at most as many")
    return AgentStep(agent, options.steps, fixed_tokens)


def _tokens_of(num_messages: int, prompt: ChatPrompt) -> int:
    """Return the tokens of the first messages of a chat."""
    ends = prompt.message_ends
    if not ends:
        raise InvalidRequestError(f"fixed_messages={num_messages}: the prompt has no messages: use fixed_tokens")
    if num_messages and num_messages not in ends:
        choices = sorted(set(ends))
        raise InvalidRequestError(
            f"fixed_messages={num_messages}: the prompt can be cut after {choices} messages: use one of these, "
            "or fixed_tokens"
        )
    num_segments = sum(end <= num_messages for end in ends)
    return sum(len(segment.tokens) for segment in prompt.segments[:num_segments])


def read_declaration(body: Mapping[str, Any]) -> tuple[StepGraph, dict[str, frozenset[str]]]:
    """Return the step graph and the labels that a client declares.

    Raises:
        InvalidRequestError: if it has too many names, or labels that are not of its agents.
        GraphError: if the graph is invalid.
    """
    if sum(1 for _ in itertools.islice(walk(body), MAX_GRAPH_NAMES + 1)) > MAX_GRAPH_NAMES:
        raise InvalidRequestError(f"agents: more than {MAX_GRAPH_NAMES} agents, names and labels: declare fewer")
    labels = body.get("labels") if "agents" in body else None
    graph = StepGraph.read({name: value for name, value in body.items() if labels is None or name != "labels"})
    if longest := [agent for agent in graph.agents if len(agent) > MAX_NAME_CHARS]:
        raise InvalidRequestError(f"agents: {longest[0]!r:.80}: use names of at most {MAX_NAME_CHARS} characters")
    if not isinstance(labels, dict | None) or not set(labels or ()) <= set(graph.agents):
        raise InvalidRequestError(f"labels: {labels!r:.80}: map declared agents to lists of labels")
    return graph, {agent: parse_labels(names, "labels") for agent, names in (labels or {}).items()}


class AgentTracker:
    """Tracker of one session's agents, bounded in their number."""

    def __init__(self, session: Session, graph: StepGraph | None) -> None:
        self.session, self._graph = session, graph
        self._names: set[str] = set()  # that are in no graph
        self._workflow = Workflow(session, graph)

    def agent(self, name: str, *, steps: Mapping[str, float | None] | None = None) -> AbstractContextManager[Agent]:
        """Attribute requests to an agent, as `Workflow.agent`."""
        if self._graph is None or name not in self._graph.dependencies:
            if name not in self._names and len(self._names) >= MAX_AGENTS:
                self._workflow.close()
                self._workflow, self._names = Workflow(self.session, self._graph), set()
            self._names.add(name)
        return self._workflow.agent(name, steps=steps)

    def set_steps(self, steps: Mapping[str, float | None]) -> None:
        """Replace the steps to the next execution of every agent."""
        self._workflow.set_steps(steps)

    @property
    def steps(self) -> dict[str, float]:
        """Steps to the next execution of every agent."""
        return self._workflow.steps

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the last prompts, from which fixed parts are inferred."""
        return self._workflow.num_prompt_tokens

    def close(self) -> None:
        self._workflow.close()


@dataclass(eq=False)
class TrackedWorkflow:
    """Session in prefix mode of one workflow, and its agents."""

    tenant: str
    session: Session
    tracker: AgentTracker
    num_active: int = 0  # requests that run
    num_prompt_tokens: int = 0  # of its last prompts, when they were counted
    used: float = field(default_factory=time.monotonic)  # seconds, of the last request


SessionKey = tuple[object, str]  # client and workflow


class AgentSessions:
    """Workflows in prefix mode whose agents are tracked.

    Args:
        track: creates the tracker of a session from its tenant and workflow; None: nothing is tracked.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: Engine,
        track: Callable[[str, str, Session], AgentTracker | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._track, self._clock = engine, track, clock
        self._workflows: OrderedDict[SessionKey, TrackedWorkflow] = OrderedDict()  # least recently used first
        self._uncounted: set[SessionKey] = set()  # workflows whose prompts have changed

    def __len__(self) -> int:
        return len(self._workflows)

    def open(self, key: "WorkflowKey") -> TrackedWorkflow | None:
        """Return the workflow of a request, which `close` ends; None: untracked."""
        self.expire()
        self._count_tokens()
        place = key.client, key.workflow
        workflow = self._workflows.get(place)
        if workflow is None:
            session = self._engine.session(mode="prefix", seed=0, client_id=key.client)
            tracker = self._track(key.tenant, key.workflow, session)
            if tracker is None:
                session.close()
                return None
            workflow = self._workflows[place] = TrackedWorkflow(key.tenant, session, tracker)
        self._workflows.move_to_end(place)
        workflow.num_active += 1
        workflow.used = self._clock()
        return workflow

    def close(self, key: "WorkflowKey") -> None:
        """End a request; forget workflows that exceed the tenant's share."""
        place = key.client, key.workflow
        workflow = self._workflows[place]
        workflow.num_active -= 1
        self._workflows.move_to_end(place)
        workflow.used = self._clock()
        self._count_tokens()
        self._uncounted.add(place)  # its turn ends after this call
        own = {place: workflow for place, workflow in self._workflows.items() if workflow.tenant == key.tenant}
        num_workflows, num_tokens = len(own), sum(workflow.num_prompt_tokens for workflow in own.values())
        for other, workflow in own.items():
            if num_workflows <= MAX_WORKFLOWS and num_tokens <= MAX_PROMPT_TOKENS:
                break
            if self._forget(other):
                num_workflows, num_tokens = num_workflows - 1, num_tokens - workflow.num_prompt_tokens

    def set_steps(self, key: "WorkflowKey", steps: Mapping[str, float | None]) -> None:
        """Replace the steps of a workflow between its requests, if tracked."""
        workflow = self._workflows.get((key.client, key.workflow))
        if workflow is not None:
            workflow.tracker.set_steps(steps)

    def expire(self) -> None:
        """Forget workflows that had no request for a while."""
        oldest = self._clock() - IDLE_SECONDS
        for place, workflow in list(self._workflows.items()):
            if workflow.used >= oldest:
                break
            self._forget(place)

    def set_graph(self, tenant: str, name: str) -> None:
        """Track the agents of a workflow anew, since its graph has changed."""
        for place, workflow in list(self._workflows.items()):
            if (workflow.tenant, place[1]) != (tenant, name) or self._forget(place):
                continue
            workflow.tracker.close()
            tracker = self._track(tenant, name, workflow.session)
            assert tracker is not None, "the eviction policy does not change"
            workflow.tracker = tracker

    def _count_tokens(self) -> None:
        """Count the prompts of workflows that had a request meanwhile."""
        for place in self._uncounted & self._workflows.keys():
            workflow = self._workflows[place]
            workflow.num_prompt_tokens = workflow.tracker.num_prompt_tokens
        self._uncounted.clear()

    def _forget(self, place: SessionKey) -> bool:
        """Close a workflow, unless a request of it runs."""
        workflow = self._workflows[place]
        if workflow.num_active:
            return False
        del self._workflows[place]
        workflow.session.close()
        return True

    def clear(self) -> None:
        """Close all workflows; no request runs any more."""
        for place in list(self._workflows):
            self._forget(place)

    def check(self) -> None:
        """Raise AssertionError if a message was kept or a limit is exceeded."""
        workflows = self._workflows.values()
        idle = [workflow for workflow in workflows if not workflow.num_active]
        assert not any(workflow.session.messages for workflow in idle), "a message was not released"
        if len(idle) == len(workflows):
            counts = Counter(workflow.tenant for workflow in workflows)
            assert max(counts.values(), default=0) <= MAX_WORKFLOWS, "too many workflows"
