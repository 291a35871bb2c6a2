"""Attribution of requests to the agents that make them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..context.feature import ContextFeature, RequestDraft
from ..request.request import Request


@dataclass(frozen=True, eq=False)
class RequestTag:
    """Attribution to an agent of the requests made inside a `tag_requests` block."""

    session: object  # session whose requests are tagged
    agent_key: object  # given to every request
    on_message: Callable[[Any], None]  # called with every message


# Tasks, threads and concurrent programs each have their own; a new task inherits the tags of its creator.
_TAGS: ContextVar[tuple[RequestTag, ...]] = ContextVar("choreograph_request_tags", default=())


@contextmanager
def tag_requests(tag: RequestTag) -> Iterator[None]:
    """Tag all requests made inside the block.

    Blocks nest; blocks in the same context (`contextvars`) may end in any order.
    """
    _TAGS.set((*_TAGS.get(), tag))
    try:
        yield
    finally:
        _TAGS.set(tuple(other for other in _TAGS.get() if other is not tag))


def current_tag(session: object) -> RequestTag | None:
    """Return the innermost tag of a session; None if there is none."""
    for tag in reversed(_TAGS.get()):
        if tag.session is session:
            return tag
    return None


@dataclass
class AgentKey:
    """Agent that a request's KV entry belongs to, for eviction hints."""

    key: object


def agent_key_of(request: Request) -> object:
    """Return the key of the agent that made a request; None if there is none."""
    agent = request.extension(AgentKey)
    return None if agent is None else agent.key


class AgentTags(ContextFeature):
    """Attribution of requests and their KV entries to agents."""

    def attach(self, core: Any) -> None:
        self._core = core

    def prepare(self, draft: RequestDraft) -> None:
        """Attribute a request to the agent whose block it is made in."""
        tag = current_tag(draft.session)
        if tag is not None and tag.agent_key is not None:
            draft.request.extend(AgentKey(tag.agent_key))

    def admitted(self, request: Request) -> None:
        """Attribute the KV entry to the request's agent."""
        agent = request.extension(AgentKey)
        if agent is not None:
            self._core.cache_manager.hints.set_agent(request.entry, agent.key)
