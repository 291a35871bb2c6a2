"""Stored messages of workflows, which later requests find by their content.

All functions run in the engine's thread, but those of `MessageStore` that find messages and senders: they only read.
"""

import itertools
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from ...agents import StepGraph
from ...api.engine import Engine
from ...api.message import Message
from ...api.session import Session
from ...features.budget import Budget
from ...features.guard import Labels, OnLeak
from ...features.other_models import LayerSelection
from ...kv_cache.entry import KVEntry
from ...namespace import Client
from ...request.request import RequestState
from ..api_errors import ApiError
from .agent_tracking import AgentSessions, AgentTracker
from .context_index import ContextIndex
from .span_index import SpanIndex

K = TypeVar("K")
V = TypeVar("V")

MAX_EQUAL = 8  # stored messages of equal content

MessageKey = tuple[object, int]  # content of a message, and its number among equal ones

MAX_BUDGETS = 1024  # workflows of a tenant whose divergences are remembered


class WorkflowKey(NamedTuple):
    """What separates stored messages: nothing is found under another key."""

    client: Client
    workflow: str
    model: str
    labels: Labels = Labels()  # of the request's texts
    clearance: Labels | None = None  # other labels that the request may read; None: it reads equal labels only
    on_leak: OnLeak = "reencode"

    @property
    def tenant(self) -> str:
        return self.client.tenant

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
    lineage: bytes | None  # of the messages before it; None: another engine computed it
    content_keys: list[MessageKey] = field(default_factory=list)  # under which `by_content` has it
    source: "StoredMessage | None" = None  # message of another model, some layers of which were computed again
    # submitted over messages that were still arriving from another engine, directly or through others
    may_lose_context: bool = False

    @property
    def tenant(self) -> str:
        return Client.of(self.workflow.session.client_id).tenant

    @property
    def is_partial(self) -> bool:
        """True if only some layers were computed, or may be."""
        request = self.message._request
        is_selected_later = request.extension(LayerSelection) is not None and request.state is RequestState.WAITING
        return request.layers is not None or is_selected_later

    @property
    def is_imported(self) -> bool:
        """True if another engine computed it, or some of its layers."""
        return self.lineage is None or (self.is_partial and self.source is not None and self.source.is_imported)

    @property
    def is_arriving(self) -> bool:
        """True if some of it has not arrived from another engine."""
        entry = self.message._request.entry
        return self.lineage is None and (
            entry is None or not entry.storage.can_recompute
        )  # which it can once it is here

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
        self.contexts: ContextIndex[StoredMessage] = ContextIndex()
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


def _assign(table: dict[K, V], key: K, value: V | None) -> None:
    """Set a value, or remove its key for None."""
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


class _TenantMessages:
    """Stored messages and budgets of one tenant, the least recently used first."""

    def __init__(self) -> None:
        self.stored: OrderedDict[StoredMessage, WorkflowKey] = OrderedDict()
        self.num_tokens = 0  # of these messages
        self.budgets: OrderedDict[WorkflowKey, Budget] = OrderedDict()


class MessageStore:
    """Stored messages of all workflows; a tenant's least recently used are dropped.

    Args:
        max_tokens: of one tenant.
        shadow_calls: share of calls that budgets measure.
        max_graphs: declared step graphs of one tenant.
    """

    def __init__(
        self, engine: Engine, max_tokens: int, shadow_calls: float = 0.0, max_graphs: int = sys.maxsize
    ) -> None:
        self._shadow_calls, self._max_graphs = shadow_calls, max_graphs
        self._engine, self._max_tokens = engine, max_tokens
        self._workflows: dict[WorkflowKey, StoredWorkflow] = {}
        self._tenants: dict[str, _TenantMessages] = {}
        self.graphs: dict[tuple[str, str], StepGraph] = {}  # declared ones, by tenant and workflow
        self.agent_sessions = AgentSessions(engine, self.track)  # of requests that keep no messages
        self.agent_labels: dict[tuple[str, str], Mapping[str, frozenset[str]]] = {}  # declared with them, by agent

    @property
    def num_tokens(self) -> int:
        return sum(messages.num_tokens for messages in list(self._tenants.values()))

    @property
    def messages(self) -> dict[StoredMessage, WorkflowKey]:
        """Stored messages of all tenants, with the keys of their sessions."""
        return {stored: key for messages in self._tenants.values() for stored, key in messages.stored.items()}

    def _tenant(self, key: WorkflowKey) -> _TenantMessages:
        return self._tenants.setdefault(key.tenant, _TenantMessages())

    @property
    def workflows(self) -> list[StoredWorkflow]:
        return list(self._workflows.values())

    def senders_of(self, model: str) -> tuple[str, ...]:
        """Return the models whose layers a model reuses."""
        return self._engine.other_models.senders_of(model)

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
            session = self._engine.session(seed=0, client_id=key.client, model=key.model, labels=key.labels)
            workflow = self._workflows[key] = StoredWorkflow(session, self.track(key.tenant, key.workflow, session))
        workflow.num_active += 1
        return workflow

    def budget(self, key: WorkflowKey, max_kl: float | None, agent: str | None) -> Budget | None:
        """Return a workflow's budget, set to an agent; None without limit."""
        if max_kl is None:
            return None
        budgets = self._tenant(key).budgets
        budget = budgets.pop(key, None) or Budget(max_kl, shadow_calls=self._shadow_calls)
        budgets[key], budget.max_kl, budget.stage = budget, max_kl, agent
        if len(budgets) > MAX_BUDGETS:
            budgets.popitem(last=False)
        return budget

    def track(self, tenant: str, name: str, session: Session) -> AgentTracker | None:
        """Track the agents of a workflow if the eviction policy uses it."""
        if not self._engine.core.config.cache.uses_hints:
            return None
        return AgentTracker(session, self.graphs.get((tenant, name)))

    def declare(self, tenant: str, name: str, graph: StepGraph, labels: Mapping[str, frozenset[str]]) -> None:
        """Declare the step graph of a workflow, as a client does.

        Raises:
            ApiError: if the tenant has too many.
        """
        num_graphs = sum(owner == tenant for owner, _ in self.graphs)
        if num_graphs >= self._max_graphs and (tenant, name) not in self.graphs:
            raise ApiError(
                429,
                f"{self._max_graphs} step graphs of this key are declared, its share: delete one",
                code="too_many_graphs",
            )
        self.set_graph(tenant, name, graph, labels)

    def set_graph(
        self, tenant: str, name: str, graph: StepGraph | None, labels: Mapping[str, frozenset[str]] | None = None
    ) -> None:
        """Declare the step graph of a workflow; None: learn it.

        Args:
            labels: of the requests that name an agent.
        """
        # replaced at once: other threads read both, and a request must not miss its labels
        _assign(self.agent_labels, (tenant, name), labels or None)
        _assign(self.graphs, (tenant, name), graph)
        if graph is not None:
            own = [place for place in self.graphs if place[0] == tenant]
            for place in own[: max(0, len(own) - self._max_graphs)]:  # of a replica, which is sent those that it lacks
                del self.graphs[place]
                self.agent_labels.pop(place, None)
        for key, workflow in self._workflows.items():
            if (key.tenant, key.workflow) == (tenant, name) and workflow.tracker is not None:
                workflow.tracker.close()
                workflow.tracker = self.track(tenant, name, workflow.session)
        self.agent_sessions.set_graph(tenant, name)

    def close(self, key: WorkflowKey) -> None:
        """End a request's use of a workflow; drop what exceeds the limit."""
        key = key.session_key
        self._workflows[key].num_active -= 1
        messages = self._tenant(key)
        while messages.num_tokens > self._max_tokens and messages.stored:
            self._drop(next(iter(messages.stored)), messages)
        self._close_if_unused(key)

    def add(
        self,
        key: WorkflowKey,
        message: Message,
        lineage: bytes | None,
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
        index.contexts.add(stored)
        if with_spans:
            index.spans.add(stored, stored.tokens)
        workflow.num_stored += 1
        messages = self._tenant(key)
        messages.stored[stored] = key
        messages.num_tokens += len(stored.tokens)
        return stored

    def use(self, stored: StoredMessage) -> None:
        """Mark a message and its `source` as recently used."""
        messages = self._tenants[stored.tenant].stored
        source = stored.source if stored.is_partial else None
        if source is not None and source in messages:
            messages.move_to_end(source)
        messages.move_to_end(stored)

    def clear(self) -> None:
        """Drop all messages and close their sessions."""
        for messages in self._tenants.values():
            while messages.stored:
                self._drop(next(iter(messages.stored)), messages)
        self.agent_sessions.clear()

    def _drop(self, stored: StoredMessage, messages: _TenantMessages) -> None:
        key, workflow, index = messages.stored.pop(stored), stored.workflow, stored.index
        messages.num_tokens -= len(stored.tokens)
        workflow.num_stored -= 1
        for content_key in stored.content_keys:
            if index.by_content.get(content_key) is stored:
                del index.by_content[content_key]
        index.contexts.remove(stored)
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
        for tenant, messages in self._tenants.items():
            assert messages.num_tokens == sum(len(stored.tokens) for stored in messages.stored), "wrong token count"
            assert all(key.tenant == stored.tenant == tenant for stored, key in messages.stored.items()), "wrong tenant"
        keys = self.messages
        for key, workflow in self._workflows.items():
            own = [stored for stored, its_key in keys.items() if its_key == key]
            indexed = [item for index in workflow.indexes.values() for item in index.contexts]
            assert workflow.num_stored == len(own) == len(indexed), "wrong message count"
            assert all(stored.index is workflow.indexes[stored.message.labels] for stored in own), "wrong labels"
            assert {stored.message for stored in own} <= set(workflow.session.messages), "a stored message was released"
