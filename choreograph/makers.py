"""Who makes the calls of a session just now. Knows nothing of what agents are.

Held by the context, so that tasks, threads and programs that take turns each have their own, blocks nest, and sessions
do not meet. What starts in a copy of a context, as tasks do, begins as what started it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from .message import Message


@dataclass(frozen=True, eq=False)
class Maker:
    """group: given to every call of the session. on_message: hears of every message."""

    session: object
    group: object
    on_message: Callable[[Message], None]


_MAKERS: ContextVar[tuple[Maker, ...]] = ContextVar("choreograph_makers", default=())


@contextmanager
def making(maker: Maker) -> Iterator[None]:
    """Calls that are made in the block are the maker's. Takes out itself alone at the end, in whatever order blocks
    that share a context (those of generators do) are left."""
    _MAKERS.set((*_MAKERS.get(), maker))
    try:
        yield
    finally:
        _MAKERS.set(tuple(one for one in _MAKERS.get() if one is not maker))


def maker_of(session: object) -> Maker | None:
    """Who makes the session's calls here: the innermost block."""
    return next((one for one in reversed(_MAKERS.get()) if one.session is session), None)
