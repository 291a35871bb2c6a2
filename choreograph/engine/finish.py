"""How requests end: finished, failed, cancelled or released; and log-probability callbacks."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..errors import ChoreographError, RequestFailedError
from ..events import EventBus
from ..kv_cache.entry import KVSlice
from ..kv_cache.manager import KVCacheManager
from ..outputs import FinishReason
from .request import Request, RequestState
from .residency import ContextLoader
from .scheduler import Scheduler

if TYPE_CHECKING:
    from torch import Tensor


class RequestFinisher:
    """End requests on completion, on errors, or when their message is released.

    Args:
        on_idle: called when the last running request has ended.
    """

    def __init__(
        self,
        cache_manager: KVCacheManager,
        scheduler: Scheduler,
        context_loader: ContextLoader,
        events: EventBus,
        on_idle: Callable[[], None],
    ) -> None:
        self._cache_manager, self._scheduler, self._context_loader = cache_manager, scheduler, context_loader
        self._events, self._on_idle = events, on_idle

    def finish(self, request: Request, state: RequestState, reason: FinishReason | None) -> None:
        """Move a request to a final state.

        This is the only way out of the queues.

        Frees the unused pages of its KV entry and releases every reference except the message's
        own.
        """
        previous_state = request.state
        request.state, request.finish_reason = state, reason
        self._context_loader.release(request.id)
        request.finish_time = request.finish_time or time.perf_counter()
        for queue in (self._scheduler.waiting, self._scheduler.running):
            if request in queue:
                queue.remove(request)
        if not self._scheduler.running:
            self._on_idle()
        if previous_state is RequestState.WAITING:
            self._release_dependencies(request)
        self._release_context(request, request.context)
        request.context = ()
        if request.decode_state is not None:
            request.decode_state.prompt = []
        if request.entry is not None and previous_state is not RequestState.WAITING:
            if request.entry.is_complete:
                self._cache_manager.free_unused_pages(request.entry)
            self._cache_manager.release(request.entry, request.request_owner)
        if state in (RequestState.FAILED, RequestState.CANCELLED) and request.entry is not None:
            self._cache_manager.release(request.entry, request.message_owner)
        if request.released and request.entry is not None and not request.num_waiting_dependents:
            self._cache_manager.release(request.entry, request.message_owner)
        self._events.emit({RequestState.DONE: "finished"}.get(state, state.value), call=request.id)

    def fail(self, request: Request, exc: ChoreographError) -> None:
        """End a request with an error."""
        request.error = exc
        self.finish(request, RequestState.FAILED, None)

    def _release_context(self, request: Request, context: Iterable[KVSlice]) -> None:
        for kv_slice in context:
            self._cache_manager.release(kv_slice.entry, request.request_owner)

    def _release_dependencies(self, request: Request) -> None:
        """Drop the request's claim on its dependencies when it is admitted.

        Parents whose release was deferred for this request are released.
        """
        for parent in request.dependencies:
            parent.num_waiting_dependents -= 1
            if parent.released and not parent.num_waiting_dependents:
                self._release_message(parent)

    def release(self, request: Request) -> None:
        """Release a message, deferred until no waiting request depends on it."""
        if request.released:
            return
        request.released = True
        self._events.emit("released", call=request.id)
        if not request.num_waiting_dependents:
            self._release_message(request)

    def _release_message(self, request: Request) -> None:
        if request.state is RequestState.WAITING:
            self.finish(request, RequestState.CANCELLED, "cancelled")
        elif request.state in (RequestState.RUNNING, RequestState.TOKENS_FINAL):
            self._cancel(request)
        elif request.entry is not None:
            self._cache_manager.release(request.entry, request.message_owner)

    def _cancel(self, request: Request) -> None:
        """Cancel a request in flight.

        If other requests attend to its KV entry, the tokens it already has are computed first.
        """
        entry = request.entry
        assert entry is not None
        other_owners = entry.owners - {request.request_owner, request.message_owner} or entry.num_tree_children
        if other_owners and not entry.is_complete:
            request.cancel_when_computed = True
            request.finish_reason = request.finish_reason or "cancelled"
        elif request.state is RequestState.TOKENS_FINAL:
            self.finish(request, RequestState.DONE, request.finish_reason)
        else:
            self.finish(request, RequestState.CANCELLED, "cancelled")


class LogprobCallbacks:
    """Queue and run the callbacks that receive log-probabilities, in step order.

    Args:
        fail: ends a request with an error.
    """

    def __init__(self, fail: Callable[[Request, ChoreographError], None]) -> None:
        self._fail = fail
        self._pending: deque[tuple[Request, Tensor]] = deque()

    def enqueue(self, request: Request) -> None:
        """Queue the log-probabilities of the token about to be appended, if observed."""
        generation = request.decode_state
        if generation is not None and generation.on_logprobs is not None and generation.pending_logprobs is not None:
            self._pending.append((request, generation.pending_logprobs))

    def dispatch(self) -> None:
        """Run the queued callbacks.

        A callback that raises fails only its own request.
        """
        while self._pending:
            request, logprobs = self._pending.popleft()
            if request.state not in (RequestState.FAILED, RequestState.CANCELLED):
                self._dispatch_one(request, logprobs)

    def _dispatch_one(self, request: Request, logprobs: "Tensor") -> None:
        assert request.decode_state is not None and request.decode_state.on_logprobs is not None
        try:
            request.decode_state.on_logprobs(logprobs)
        except Exception as exc:
            self._fail(request, wrap_error(request, "what watches it raised", exc))


def wrap_error(request: Request, description: str, exc: Exception) -> RequestFailedError:
    """Build the error that readers of the message get, caused by `exc`."""
    failed = RequestFailedError(f"message {request.id}: {description} {type(exc).__name__}: {exc}")
    failed.__cause__ = exc
    return failed
