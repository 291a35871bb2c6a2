"""Stored messages of workflows, which later requests find by their content.

All functions run in the engine's thread, but those of `MessageStore` that find messages and senders: they only read.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..agents import StepGraph
from ..engine.budget import Budget
from ..engine.engine import Engine
from ..engine.labels import Labels, OnLeak
from ..engine.message import Message
from ..engine.request import RequestState
from ..engine.session import Session
from ..kv_cache.entry import KVEntry
from .agent_tracking import MAX_GRAPHS, AgentSessions, AgentTracker
from .api_errors import ApiError
from .span_index import SpanIndex

MAX_EQUAL = 8  # stored messages of equal content

MessageKey = tuple[object, int]  # content of a message, and its number among equal ones

MAX_BUDGETS = 1024  # workflows whose divergences are remembered


class WorkflowKey(NamedTuple):
    """What separates stored messages: nothing is found under another key."""

    client_id: str  # tenant and cache salt
    workflow: str
    model: str
    labels: Labels = Labels()  # of the request's texts
    clearance: Labels | None = None  # other labels that the request may read; None: it reads equal labels only
    on_leak: OnLeak = "reencode"

    @property
    def tenant(self) -> str:
        return self.client_id.partition("\0")[0]

    @property
    def readable(self) -> Labels:
        """Labels that the request may read, those of its own texts included."""
        return self.labels | (self.clearance or Labels())

    @property
    def session_key(self) -> "WorkflowKey":
        """Key of all requests that share a session.

        Those have equal labels, or all have a clearance.
        """
        return (
            self if self.clearance is None else self._replace(labels=Labels(), clearance=Labels(), on_leak="reencode")
        )


def may_reuse_layers(key: WorkflowKey, repair: float | None, max_kl: float | None) -> bool:
    """Return whether a request may reuse layers of other models.

    Repairs, budgets and clearances know messages of one model.
    """
    return not repair and max_kl is None and key.clearance is None


@dataclass(eq=False)
class StoredMessage:
    """Message kept for later requests of its workflow."""

    message: Message
    workflow: "StoredWorkflow"
    index: "MessageIndex"
    tokens: list[int]
    lineage: int | None  # of the messages before it; None: another engine computed it
    content_keys: list[MessageKey] = field(default_factory=list)  # under which `by_content` has it
    source: "StoredMessage | None" = None  # message of another model, some layers of which were computed again
    # submitted over messages that were still arriving from another engine, directly or through others
    may_lose_context: bool = False

    @property
    def is_partial(self) -> bool:
        """True if only some layers were computed, or may be."""
        request = self.message._request
        is_selected_later = request.selects_from is not None and request.state is RequestState.WAITING
        return request.computed_layers is not None or is_selected_later

    @property
    def is_imported(self) -> bool:
        """True if another engine computed it, or some of its layers."""
        return self.lineage is None or (self.is_partial and self.source is not None and self.source.is_imported)

    @property
    def is_arriving(self) -> bool:
        """True if some of it has not arrived from another engine."""
        entry = self.message._request.entry
        return self.lineage is None and (entry is None or not entry.can_recompute)  # which it can once it is here

    @property
    def is_usable(self) -> bool:
        """False if it failed, or was evicted and may lack its context.

        Requests compute its tokens again then, in their own context.
        """
        if self.message.error is not None:
            return False
        if not (self.is_imported or self.may_lose_context):
            return True
        return not any(entry.location == "dropped" for entry in self.entries)

    @property
    def entries(self) -> list[KVEntry]:
        """KV entries that hold its layers; none before it is admitted."""
        owners = self.message._request.source_chain
        return [entry for owner in owners if (entry := owner.entry) is not None]  # other threads release entries


class MessageIndex:
    """Stored messages of one workflow with equal labels, as requests find them.

    What a request finds does not depend on messages that it may not read.
    """

    def __init__(self) -> None:
        self.by_content: dict[object, StoredMessage] = {}  # by `MessageKey`
        self.children: dict[tuple[int | None, int], list[StoredMessage]] = {}  # by lineage and first token
        self.spans: SpanIndex[StoredMessage] = SpanIndex()

    def find_content(self, key: object, *, allow_partial: bool = True) -> StoredMessage | None:
        stored = self.by_content.get(key)
        if stored is None or not stored.is_usable or (stored.is_partial and not allow_partial):
            return None
        return stored

    def unused_key(self, content: object) -> MessageKey:
        """Return a key of `content` in `by_content` that no message has.

        Messages of equal content get several, since a message cannot be twice in one context.
        """
        keys = ((content, number) for number in range(MAX_EQUAL))
        return next((key for key in keys if self.find_content(key) is None), (content, 0))


def find_content(indexes: Iterable[MessageIndex], key: object, *, allow_partial: bool = True) -> StoredMessage | None:
    """Return the first stored message of a content key.

    Args:
        allow_partial: also those with layers of another model.
    """
    found = (index.find_content(key, allow_partial=allow_partial) for index in indexes)
    return next(filter(None, found), None)


class StoredWorkflow:
    """Stored messages of one workflow, and their session."""

    def __init__(self, session: Session, tracker: AgentTracker | None) -> None:
        self.session = session
        self.tracker = tracker  # of the agents, for eviction by steps to the next use
        self.num_active = 0  # requests that run
        self.indexes: dict[Labels, MessageIndex] = {}  # by the labels of the messages' keys and values
        self.num_stored = 0

    def readable(self, labels: Labels) -> list[MessageIndex]:
        """Return the indexes of messages that have none but these labels."""
        return [self.indexes[other] for other in sorted(self.indexes, key=sorted) if other <= labels]


class MessageStore:
    """Stored messages of all workflows; the least recently used are dropped."""

    def __init__(self, engine: Engine, max_tokens: int, shadow_calls: float = 0.0) -> None:
        self._budgets: OrderedDict[WorkflowKey, Budget] = OrderedDict()  # the least recently used first
        self._shadow_calls = shadow_calls  # share of calls that budgets measure
        self._engine, self._max_tokens = engine, max_tokens
        self._workflows: dict[WorkflowKey, StoredWorkflow] = {}
        self._stored: OrderedDict[StoredMessage, WorkflowKey] = OrderedDict()  # least recently used first
        self.num_tokens = 0
        self.graphs: dict[tuple[str, str], StepGraph] = {}  # declared ones, by tenant and workflow
        self.agent_sessions = AgentSessions(engine, self.track)  # of requests that keep no messages
        self.agent_labels: dict[tuple[str, str], Mapping[str, frozenset[str]]] = {}  # declared with them, by agent

    @property
    def workflows(self) -> list[StoredWorkflow]:
        return list(self._workflows.values())

    def senders_of(self, model: str) -> tuple[str, ...]:
        """Return the models whose layers a model reuses."""
        return self._engine.core.cross_model_reuse.senders_of(model)

    def sender_keys(self, key: WorkflowKey, repair: float | None, max_kl: float | None) -> list[WorkflowKey]:
        """Return the keys of the messages whose layers a request may reuse."""
        senders = self.senders_of(key.model) if may_reuse_layers(key, repair, max_kl) else ()
        return [key._replace(model=model) for model in senders]

    def find(self, key: WorkflowKey, content_key: object, *, allow_partial: bool = True) -> StoredMessage | None:
        """Return a stored message of a workflow by its content key.

        Args:
            allow_partial: also one with layers of another model.
        """
        workflow = self._workflows.get(key.session_key)
        indexes = [] if workflow is None else workflow.readable(key.readable)
        return find_content(indexes, content_key, allow_partial=allow_partial)

    def find_usable(
        self, key: WorkflowKey, senders: Sequence[WorkflowKey], contents: Iterable[object]
    ) -> StoredMessage | None:
        """Return a message that a request uses, whole or in some layers.

        Args:
            senders: `sender_keys` of the request.
        """
        places = itertools.product((key, *senders), contents)
        found = (
            self.find(place, (content, 0), allow_partial=place is key and bool(senders)) for place, content in places
        )
        return next(filter(None, found), None)

    @property
    def num_workflows(self) -> int:
        return len(self._workflows)

    def open(self, key: WorkflowKey) -> StoredWorkflow:
        """Return a workflow for a request; `close` it when the request ends."""
        key = key.session_key
        workflow = self._workflows.get(key)
        if workflow is None:
            session = self._engine.session(seed=0, client_id=key.client_id, model=key.model, labels=key.labels)
            workflow = self._workflows[key] = StoredWorkflow(session, self.track(key.tenant, key.workflow, session))
        workflow.num_active += 1
        return workflow

    def budget(self, key: WorkflowKey, max_kl: float | None, agent: str | None) -> Budget | None:
        """Return a workflow's budget, set to an agent; None without limit."""
        if max_kl is None:
            return None
        budget = self._budgets.pop(key, None) or Budget(max_kl, shadow_calls=self._shadow_calls)
        self._budgets[key], budget.max_kl, budget.stage = budget, max_kl, agent
        if len(self._budgets) > MAX_BUDGETS:
            self._budgets.popitem(last=False)
        return budget

    def track(self, tenant: str, name: str, session: Session) -> AgentTracker | None:
        """Track the agents of a workflow if the eviction policy uses it."""
        if self._engine.core.config.cache.eviction != "workflow":
            return None
        return AgentTracker(session, self.graphs.get((tenant, name)))

    def declare(self, tenant: str, name: str, graph: StepGraph, labels: Mapping[str, frozenset[str]]) -> None:
        """Declare the step graph of a workflow, as a client does.

        Raises:
            ApiError: if the tenant has too many.
        """
        num_graphs = sum(owner == tenant for owner, _ in self.graphs)
        if num_graphs >= MAX_GRAPHS and (tenant, name) not in self.graphs:
            raise ApiError(429, f"the server keeps {MAX_GRAPHS} step graphs: delete one", code="too_many_graphs")
        self.set_graph(tenant, name, graph, labels)

    def set_graph(
        self, tenant: str, name: str, graph: StepGraph | None, labels: Mapping[str, frozenset[str]] | None = None
    ) -> None:
        """Declare the step graph of a workflow; None: learn it.

        Args:
            labels: of the requests that name an agent.
        """
        self.graphs.pop((tenant, name), None)
        self.agent_labels.pop((tenant, name), None)
        if labels:
            self.agent_labels[tenant, name] = labels
        if graph is not None:
            self.graphs[tenant, name] = graph
            own = [place for place in self.graphs if place[0] == tenant]
            for place in own[: max(0, len(own) - MAX_GRAPHS)]:  # of a replica, which is sent those that it lacks
                del self.graphs[place]
        for key, workflow in self._workflows.items():
            if (key.tenant, key.workflow) == (tenant, name) and workflow.tracker is not None:
                workflow.tracker.close()
                workflow.tracker = self.track(tenant, name, workflow.session)
        self.agent_sessions.set_graph(tenant, name)

    def close(self, key: WorkflowKey) -> None:
        """End a request's use of a workflow; drop what exceeds the limit."""
        key = key.session_key
        self._workflows[key].num_active -= 1
        while self.num_tokens > self._max_tokens and self._stored:
            self._drop(next(iter(self._stored)))
        self._close_if_unused(key)

    def add(
        self,
        key: WorkflowKey,
        message: Message,
        lineage: int | None,
        content_keys: Sequence[MessageKey] = (),
        *,
        with_spans: bool = False,
        source: StoredMessage | None = None,
        may_lose_context: bool = False,
    ) -> StoredMessage:
        """Keep a message for later requests.

        The arguments are fields of `StoredMessage`.
        """
        key = key.session_key
        workflow = self._workflows[key]
        index = workflow.indexes.setdefault(message.labels, MessageIndex())
        stored = StoredMessage(
            message, workflow, index, message.tokens, lineage, list(content_keys), source, may_lose_context
        )
        for content_key in content_keys:
            index.by_content[content_key] = stored
        index.children.setdefault((lineage, stored.tokens[0]), []).append(stored)
        if with_spans:
            index.spans.add(stored, stored.tokens)
        workflow.num_stored += 1
        self._stored[stored] = key
        self.num_tokens += len(stored.tokens)
        return stored

    def use(self, stored: StoredMessage) -> None:
        """Mark a message and its `source` as recently used."""
        source = stored.source if stored.is_partial else None
        if source is not None and source in self._stored:
            self._stored.move_to_end(source)
        self._stored.move_to_end(stored)

    def clear(self) -> None:
        """Drop all messages and close their sessions."""
        while self._stored:
            self._drop(next(iter(self._stored)))
        self.agent_sessions.clear()

    def _drop(self, stored: StoredMessage) -> None:
        key, workflow, index = self._stored.pop(stored), stored.workflow, stored.index
        self.num_tokens -= len(stored.tokens)
        workflow.num_stored -= 1
        for content_key in stored.content_keys:
            if index.by_content.get(content_key) is stored:
                del index.by_content[content_key]
        branch = stored.lineage, stored.tokens[0]
        index.children[branch].remove(stored)
        if not index.children[branch]:
            del index.children[branch]
        if stored in index.spans:
            index.spans.remove(stored)
        stored.message.release()
        self._close_if_unused(key)

    def _close_if_unused(self, key: WorkflowKey) -> None:
        workflow = self._workflows.get(key)
        if workflow is not None and not workflow.num_active and not workflow.num_stored:
            workflow.session.close()
            del self._workflows[key]

    def check(self) -> None:
        """Raise AssertionError if counts and indexes disagree."""
        self.agent_sessions.check()
        assert self.num_tokens == sum(len(stored.tokens) for stored in self._stored), "wrong token count"
        for key, workflow in self._workflows.items():
            own = [stored for stored, its_key in self._stored.items() if its_key == key]
            indexed = [
                item for index in workflow.indexes.values() for items in index.children.values() for item in items
            ]
            assert workflow.num_stored == len(own) == len(indexed), "wrong message count"
            assert all(stored.index is workflow.indexes[stored.message.labels] for stored in own), "wrong labels"
            assert {stored.message for stored in own} <= set(workflow.session.messages), "a stored message was released"
