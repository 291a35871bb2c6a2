"""Event bus of the engine: passive observation for metrics, dashboards and figures."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from .utils import call_all


class Event(NamedTuple):
    """One event of the engine.

    Request kinds: submitted, admitted, preempted, resumed, hit, miss, token, generated, finished, failed, cancelled,
    released, recomputing, imported, declassified. Step kind: step. Entry kinds: evicted, offloaded, copied, loaded, demoted,
    prefetch, failed_transfer, orphaned_file. Cross-model kinds: layers_reused, recomputed.

    `hit` is a prefill that was found in the KV cache, with the `where` of its entry; `miss` one that was not found.
    `step` has the tokens that were computed, and the number of `layers`, None for all of them.
    `evicted` has the destination tier `to`, the policy, and the policy's inputs.
    """

    kind: str
    time: float  # time.perf_counter(), seconds
    data: dict[str, object]  # ids and counts only, so that an event keeps nothing alive


# Kinds of events in the life of a request that `EventBus.watch` reports.
WATCHED_KINDS = frozenset({"admitted", "generated", "finished", "failed", "cancelled"})


class EventBus:
    """Recent events, counts by kind, and listeners that are called between steps."""

    def __init__(self, max_recent: int = 4096) -> None:
        self.recent: deque[Event] = deque(maxlen=max_recent)
        self.counts: Counter[str] = Counter()
        self._listeners: dict[object, Callable[[Event], None]] = {}
        self._watchers: dict[object, Callable[[Event], None]] = {}  # by request ID
        self._pending: deque[Event] = deque()
        self._dispatch_lock = threading.Lock()

    def emit(self, kind: str, **data: object) -> None:
        """Record an event and queue it for the listeners."""
        event = Event(kind, time.perf_counter(), data)
        self.counts[kind] += 1
        self.recent.append(event)
        if self._listeners or (kind in WATCHED_KINDS and data.get("request") in self._watchers):
            self._pending.append(event)

    def dispatch(self) -> None:
        """Call the listeners for all pending events, in order.

        The engine calls this between steps, when a listener may use the engine. Every listener is called for every
        event even if one raises; the first exception is raised afterwards. Events emitted meanwhile are dispatched
        after the current one.
        """
        errors: list[Exception] = []
        while self._pending and self._dispatch_lock.acquire(blocking=False):
            try:
                while self._pending:
                    event = self._pending.popleft()
                    listeners = list(self._listeners.values())
                    if event.kind in WATCHED_KINDS and (watcher := self._watchers.get(event.data.get("request"))):
                        listeners.append(watcher)
                    errors += call_all(partial(listener, event) for listener in listeners)
            finally:
                self._dispatch_lock.release()
        if errors:
            raise errors[0]

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Add a listener; return a function that removes it (idempotent)."""
        key = object()  # the same listener may be added twice
        self._listeners[key] = listener

        def unsubscribe() -> None:
            self._listeners.pop(key, None)

        return unsubscribe

    def watch(self, request_id: int, listener: Callable[[Event], None]) -> None:
        """Call a listener for events of `WATCHED_KINDS` of one request, until `unwatch`.

        The cost of other events does not depend on the number of watched requests.
        """
        self._watchers[request_id] = listener

    def unwatch(self, request_id: int) -> None:
        """Remove the listener of a request (idempotent)."""
        self._watchers.pop(request_id, None)
