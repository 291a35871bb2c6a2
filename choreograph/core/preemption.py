"""Pages for running decodes, and preemption when memory ends.

A decode is admitted with pages for its prompt and next token and gets more while it generates. If
none can be freed, the youngest decode of the lowest priority is preempted: its tokens, generator and
text remain, its KV becomes evictable like that of any complete entry, and it waits for admission. If
every running decode comes before the one that needs a page, that one is skipped until others end.

The first running decode in order is never preempted for another one, so each step makes progress.
Prefills and recomputations have all their pages: they are neither skipped nor preempted.
"""

from collections.abc import Iterable
from operator import attrgetter

from ..context.placement import insert_into_prefix_tree
from ..context.residency import ContextLoader
from ..errors import CacheBusyError, CacheFullError, ChoreographError, RequestFailedError
from ..events import EventBus
from ..execution.model_runner import ModelRunner
from ..kv_cache.entry import KVEntry, KVSlice
from ..kv_cache.manager import KVCacheManager
from ..request.request import Purpose, Request, RequestState
from .lifecycle import Lifecycle
from .waiting_queue import Queues

MAX_PASSED_OVER = 32  # later requests that may be admitted before one that waits for capacity


class Preemptor:
    """Growth, preemption and resumption of the running decodes of a scheduler."""

    def __init__(
        self,
        queues: Queues,
        lifecycle: Lifecycle,
        cache_manager: KVCacheManager,
        context_loader: ContextLoader,
        model_runner: ModelRunner,
        max_positions: int,
        events: EventBus,
    ) -> None:
        self._queues, self._lifecycle, self._cache_manager = queues, lifecycle, cache_manager
        self._context_loader, self._model_runner = context_loader, model_runner
        self._max_positions, self._events = max_positions, events
        self.stalled: dict[Request, CacheFullError] = {}  # running decodes without a page for their next token

    def grow(self, requests: list[Request]) -> None:
        """Allocate pages for the next token of running decodes.

        Decodes that get none are skipped in this step (`stalled`).
        """
        self.stalled = {}
        for request in sorted(requests, key=attrgetter("order")):
            if request.state is RequestState.RUNNING:  # not preempted meanwhile
                self._queues.current = request
                self._grow(request)
        self._queues.current = None

    def _grow(self, request: Request) -> None:
        while True:
            try:
                self._grow_entry(request, request.entry.tokens)
                return
            except CacheFullError as exc:
                if isinstance(exc, CacheBusyError) or not self._free_pages_of_later(request):
                    self.stalled[request] = exc
                    return

    def _grow_entry(self, request: Request, tokens: list[int]) -> None:
        """Allocate pages for one more token than `tokens`, and for the footer."""
        assert request.decode_state is not None
        num_left = max(1, request.decode_state.max_new_tokens - len(request.decode_state.tokens))
        num_left = min(num_left, self._max_positions)
        num_footer = len(request.footer)
        num_tokens, max_tokens = len(tokens) + 1 + num_footer, len(tokens) + num_left + num_footer
        self._cache_manager.grow(request.entry, num_tokens, max_tokens)

    def _free_pages_of_later(self, request: Request) -> bool:
        """Release unused pages, or those of a request later in order.

        That is the one whose context is collected, else the last decode that can be preempted. Returns
        False if there is none.
        """
        if self._free_unused_pages():
            return True
        if self._queues.is_probing:
            return False
        loading = self._context_loader.request_id
        waiting = None if loading is None else next((r for r in self._queues.waiting if r.id == loading), None)
        if waiting is not None and waiting.order > request.order:
            self._context_loader.release(loading)
            return True
        last = self._last_preemptible()
        if last is None or last.order <= request.order:
            return False
        self.preempt(last)
        return True

    def _free_unused_pages(self) -> bool:
        """Free pages that running decodes do not need for their next token."""
        pool, num_free = self._cache_manager.pool, self._cache_manager.pool.free_pages
        for request in self._queues.running:
            if request.is_decode and request.state is RequestState.RUNNING:
                num_pages = pool.num_pages_for(len(request.entry.tokens) + 1 + len(request.footer))
                if len(request.entry.pages) > num_pages:
                    self._cache_manager.truncate_pages(request.entry, num_pages)
        return pool.free_pages > num_free

    def _last_preemptible(self) -> Request | None:
        return max(filter(_is_preemptible, self._queues.running), key=attrgetter("order"), default=None)

    def resolve_stall(self) -> bool:
        """Let the engine continue if no request can run.

        The last decode in order is preempted, which an earlier one may have to wait for because it
        reads its tokens. A decode that has the cache for itself ends: the rest of it is pinned.
        Returns whether anything changed.
        """
        if not self.stalled or self._cache_manager.offload_manager.jobs or self._queues.is_probing:
            return False
        loading, num_stalled = self._context_loader.request_id, len(self.stalled)
        self._context_loader.release(loading)
        last = self._last_preemptible()
        if last is not None and (len(self._queues.running) > 1 or loading is not None):
            self.preempt(last)
            return True
        if loading is not None:  # before that request is tried again
            self.grow(list(self.stalled))
            if len(self.stalled) < num_stalled:
                return True
        if self._cache_manager.has_pending:  # a pin expires
            return False
        request = max(self.stalled, key=attrgetter("order"))
        if request is last and request.mode == "prefix" and request.context:
            request.scheduling.skips_prefix = True  # entries that it reads a part of may have grown
            self.preempt(request)
        else:
            self._end(request, self.stalled[request])
        return True

    def _end(self, request: Request, exc: CacheFullError) -> None:
        """End a decode for which the cache has no page left."""
        assert request.decode_state is not None
        if request.decode_state.is_unlimited and request.decode_state.tokens:
            self._lifecycle.finish_at_limit(request)
        else:
            self._lifecycle.fail(request, exc)

    def preempt(self, request: Request) -> None:
        """Return a running decode to the waiting queue.

        Later ones do not pass it. What it has generated is kept. In choreographed mode its entry
        waits too, as an entry of a message; in prefix mode the computed tokens become a cached
        prefix.
        """
        cache, entry = self._cache_manager, request.entry
        self._events.emit("preempted", request=request.id, entry=entry.id, tokens=entry.num_computed_tokens)
        request.scheduling.num_passed_over = MAX_PASSED_OVER
        if not _has_computed_prompt(request):
            self._restart(request)
            return
        del entry.tokens[entry.num_computed_tokens :]
        cache.free_unused_pages(entry)
        keeps_entry = request.mode == "choreographed"
        if keeps_entry:
            for kv_slice in entry.context:  # evictable, but not deleted
                cache.acquire(kv_slice.entry, request.message_owner)
        elif request.mode == "prefix":
            insert_into_prefix_tree(request, cache)
        for kv_slice in request.context:
            cache.release(kv_slice.entry, request.request_owner)
        cache.release(entry, request.request_owner)
        request.context = ()
        self._queues.running.remove(request)
        self.requeue(request)
        request.entry = entry if keeps_entry else None  # type: ignore[assignment]

    def fail_incomplete(self, request: Request, exc: ChoreographError) -> None:
        """End a request with an error; its readers wait again or fail."""
        entry = request.entry
        self._lifecycle.fail(request, exc)
        if entry is not None and not entry.is_complete:
            self.preempt_readers(entry)
            self._cache_manager.fail(entry, exc)

    def preempt_readers(self, lost_entry: KVEntry) -> None:
        """Requeue all requests that need uncomputed tokens of a lost entry.

        Their readers are requeued too, unless what they have computed remains valid.
        """
        lost_entries = [lost_entry]
        for entry in lost_entries:  # grows during iteration
            for request in list(self._queues.running):
                needed = max((s.token_start + s.num_tokens for s in request.context if s.entry is entry), default=0)
                if entry is request.entry.layers.hidden_source and not request.entry.is_complete:
                    needed = len(entry.tokens)  # the inputs of all tokens
                if needed > entry.num_computed_tokens:
                    if _has_computed_prompt(request):
                        self.preempt(request)
                        continue
                    is_partial = request.entry.is_partial  # its first tokens need other layers only
                    has_header = request.entry.shared_header is not None
                    assert is_partial or has_header or not request.entry.num_computed_tokens, (
                        "a request has computed tokens without its context"
                    )
                    lost_entries.append(request.entry)
                    self._restart(request)

    def _restart(self, request: Request) -> None:
        """Undo the admission of a running request."""
        self._queues.running.remove(request)
        self.release_allocation(request)
        if request.purpose is Purpose.RECOMPUTE:
            request.state = RequestState.CANCELLED
        else:
            self.requeue(request)

    def requeue(self, request: Request) -> None:
        """Put a request back into the waiting queue."""
        request.state = RequestState.WAITING
        request.entry = None  # type: ignore[assignment]
        self._lifecycle.hold_dependencies(request.dependencies)
        self._queues.waiting.add(request)

    def release_allocation(self, request: Request) -> None:
        """Release all KV of an admitted request and discard its entry."""
        entry = request.entry
        read_entries = [*request.read_entries, *entry.read_entries]
        entry.owners -= {request.request_owner, request.message_owner}
        self._cache_manager.discard(entry)
        for read_entry in read_entries:
            self._cache_manager.release(read_entry, request.request_owner)
        request.entry = None  # type: ignore[assignment]
        request.context = ()

    def resume(self, request: Request, *, may_load: bool) -> None:
        """Continue a preempted decode with its own entry, or raise.

        Its entry and its context are loaded or recomputed first.

        Raises:
            CacheBusyError: if that is not complete yet.
        """
        cache, entry = self._cache_manager, request.entry
        assert request.decode_state is not None
        own_slice = KVSlice(entry, 0, len(entry.tokens), entry.base_position)
        context = (*entry.context, own_slice)
        self._context_loader.ensure_resident(request.id, [s.entry for s in context], may_load=may_load)
        _check_complete(context)
        tokens = request.prompt + request.decode_state.tokens
        self._grow_entry(request, tokens)
        try:
            for kv_slice in context:
                cache.acquire(kv_slice.entry, request.request_owner)
            for copy in list(entry.tier_copies.values()):  # without the tokens that follow
                cache.offload_manager.free(entry, copy)
            self._model_runner.reset()  # a planned step may have the entry's previous pages
        except BaseException:  # the request stays in the waiting queue
            for kv_slice in context:
                cache.release(kv_slice.entry, request.request_owner)
            raise
        entry.tokens += tokens[len(entry.tokens) :]
        request.context, request.state = entry.context, RequestState.RUNNING
        self._queues.waiting.discard(request)
        self._queues.waiting.wake(request)
        self._queues.running.append(request)
        for kv_slice in entry.context:
            cache.release(kv_slice.entry, request.message_owner)
        self._context_loader.release(request.id)
        self._lifecycle.release_dependencies(request.dependencies)
        self._events.emit("resumed", request=request.id, entry=entry.id)


def _has_computed_prompt(request: Request) -> bool:
    """True for a decode with generated tokens and a computed prompt."""
    return request.num_generated > 0 and request.entry.num_computed_tokens >= request.entry.num_final_tokens


def _is_preemptible(request: Request) -> bool:
    """True for a generating decode whose entry no other request uses."""
    if request.decode_state is None or request.state is not RequestState.RUNNING or request.cancel_when_computed:
        return False
    return all(owner[0] == "message" or owner == request.request_owner for owner in request.entry.owners)


def _check_complete(context: Iterable[KVSlice]) -> None:
    for kv_slice in context:
        entry = kv_slice.entry
        if entry.error is not None:
            raise RequestFailedError(f"its context failed: {entry.error}") from entry.error
        if entry.transfer is not None or not entry.is_complete:
            raise CacheBusyError(f"KV entry {entry.id} is being loaded or recomputed; retry in the next step")
