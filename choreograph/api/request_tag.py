"""Attribution of requests to the agents that make them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .message import Message


@dataclass(frozen=True, eq=False)
class RequestTag:
    """Attribution to an agent of the requests made inside a `tag_requests` block."""

    session: object  # session whose requests are tagged
    agent_key: object  # given to every request
    on_message: "Callable[[Message], None]"  # called with every message


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
