"""What happened, as values, in order. Observation is passive: nobody asks before writing an event."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from .spite import call_all


class Event(NamedTuple):
    """kind: submitted admitted hit miss step token known finished failed cancelled released rebuilding restored, and of
    encodings: evicted offloaded loaded lowered prefetch failed_transfer left_behind, and of models that share: shared
    recomputed.

    A hit is a prefill that is known; `where` says in which memory, or that it was dropped and has to be rebuilt. A miss
    is one that is not known, or no longer. evicted: `to` where, by which policy, and what that knew: steps until an
    agent wants it, whether it varies, whether a message still names it.

    facts are plain values (ids of calls and encodings, counts), so that an event keeps nothing alive.
    """

    kind: str
    at: float
    facts: dict[str, object]


class EventLog:
    """The last events and the count of every kind. Listeners hear of events in order, between steps."""

    def __init__(self, keep: int = 4096) -> None:
        self.recent: deque[Event] = deque(maxlen=keep)
        self.counts: Counter[str] = Counter()
        self._listeners: dict[object, Callable[[Event], None]] = {}
        self._undelivered: deque[Event] = deque()
        self._delivering = threading.Lock()

    def write(self, kind: str, **facts: object) -> None:
        event = Event(kind, time.perf_counter(), facts)
        self.counts[kind] += 1
        self.recent.append(event)
        if self._listeners:
            self._undelivered.append(event)

    def deliver(self) -> None:
        """Calls the listeners. The engine does so between steps, when a listener may call anything.

        All of them hear of every event, even if one raises; then the first problem is raised where the engine was used.
        What happens while they hear, in a listener or another thread, is told when all have heard of what was before.
        """
        problems: list[Exception] = []
        while self._undelivered and self._delivering.acquire(blocking=False):
            try:
                while self._undelivered:
                    problems += self._tell(self._undelivered.popleft())
            finally:
                self._delivering.release()
        if problems:
            raise problems[0]

    def _tell(self, event: Event) -> list[Exception]:
        """What went wrong in those who heard."""
        return call_all(partial(listener, event) for listener in list(self._listeners.values()))

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Adds a listener; returns a function that takes it off again, and does nothing where it is off."""
        place = object()  # one listener may be added twice
        self._listeners[place] = listener

        def forget() -> None:
            self._listeners.pop(place, None)

        return forget
