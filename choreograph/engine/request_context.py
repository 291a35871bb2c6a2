"""Context-local tag that attributes a session's requests to an agent.

Stored in a context variable, so tasks, threads and concurrent programs each have their own, blocks
nest, and sessions are independent. A copied context (as of a new task) inherits the tags.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from .message import Message


@dataclass(frozen=True, eq=False)
class RequestTag:
    """Attribution of the requests that are made inside a block."""

    session: object  # session whose requests are tagged
    agent_key: object  # given to every request
    on_message: Callable[[Message], None]  # called with every message


_TAGS: ContextVar[tuple[RequestTag, ...]] = ContextVar("choreograph_makers", default=())


@contextmanager
def tag_requests(tag: RequestTag) -> Iterator[None]:
    """Tag all requests made inside the block.

    Removes only its own tag at the end, so blocks that share a context (as generators do) may end
    in any order.
    """
    _TAGS.set((*_TAGS.get(), tag))
    try:
        yield
    finally:
        _TAGS.set(tuple(other for other in _TAGS.get() if other is not tag))


def current_tag(session: object) -> RequestTag | None:
    """Return the innermost tag for the session; None if there is none."""
    return next((tag for tag in reversed(_TAGS.get()) if tag.session is session), None)
