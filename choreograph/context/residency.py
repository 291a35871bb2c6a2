"""Load or recompute the context of a request before it runs.

Entries are collected depth first: the context of a discarded entry is collected before the entry is
recomputed, recursively. Only one request at a time owns part of its context, so two requests cannot
deadlock on capacity. If capacity is short, the entries acquired so far are kept and the request
continues when running requests have ended. If none is running and the acquired entries occupy the
capacity that a recomputation needs, they are evicted and loaded again afterwards, a bounded number
of times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import CacheBusyError, CacheFullError, LostContextError, RequestFailedError, RequestTooLargeError
from ..kv_cache.entry import KVEntry
from ..kv_cache.manager import KVCacheManager
from ..request.request import Request
from .placement import Placement

_CAPACITY_HINT = "shorten the call (max_tokens counts) or raise CacheConfig.capacity"


@dataclass
class _Frame:
    """Entries that must be resident before `target` can be computed."""

    needed: list[KVEntry]
    target: KVEntry | None  # None: the request itself
    acquired: list[KVEntry] = field(default_factory=list)  # owned for this frame alone


class ContextLoader:
    """Loader of the context of one request at a time."""

    def __init__(
        self,
        cache_manager: KVCacheManager,
        max_positions: int,
        is_idle: Callable[[], bool],
        start_recompute: Callable[[KVEntry], None],
    ) -> None:
        """Create a loader.

        Args:
            is_idle: returns whether no request is running, whose end would free pages.
            start_recompute: computes a discarded entry again in its newly allocated pages.
        """
        self._cache_manager, self._max_positions = cache_manager, max_positions
        self._is_idle, self._start_recompute = is_idle, start_recompute
        self.request_id: int | None = None  # request whose context is collected
        self._retries_left = 0
        self._acquired: dict[int, KVEntry] = {}
        self._passing: dict[int, list[KVEntry]] = {}  # entries owned by requests that pass over that one

    def ensure_resident(
        self,
        request_id: int,
        needed: Sequence[KVEntry],
        capacity: int = 0,
        *,
        partial: bool = False,
        may_load: bool = True,
    ) -> None:
        """Bring the entries of a context onto the device and own them until `release`.

        Entries may still be loading or recomputing on return. On CacheFullError, the entries
        acquired so far are kept until the next attempt.

        Args:
            needed: entries that the request reads; their own contexts only if they are recomputed.
            capacity: tokens that the request's own entry needs.
            partial: allocate that entry in the partial-layer pool.
            may_load: load what is missing; without it, raise CacheBusyError.

        Raises:
            CacheFullError: if there is no capacity at the moment.
            RequestTooLargeError: if context and entry do not fit even in an empty cache.
            RequestFailedError: if an entry of another process is lost.
        """
        entries = list(dict.fromkeys(needed))
        self.check_fits(entries, capacity, partial)
        if not may_load:
            if not all(entry.has_pages for entry in entries):
                raise CacheBusyError("its context is not on the device")
            self._passing[request_id] = entries
            for entry in entries:
                self._cache_manager.acquire(entry, ("plan", request_id))
            return
        if self.request_id != request_id:
            self.release(self.request_id)
            self._retries_left = 2 * len(needed) + 8
        self.request_id = request_id
        previous, self._acquired = self._acquired, {}
        try:
            self._collect(entries)
        finally:
            for entry in previous.values():
                if entry.id not in self._acquired:
                    self._cache_manager.release(entry, ("plan", request_id))

    def check_fits(self, needed: Sequence[KVEntry], capacity: int, is_partial: bool = False) -> None:
        """Check that the entries of the context and the request's own fit together."""
        pool = self._cache_manager.pool
        for is_partial_pool in (False, True):
            context_lengths = {e.id: len(e.tokens) for e in needed if e.is_partial == is_partial_pool}
            own_length = capacity if is_partial_pool == is_partial else 0
            num_pages = sum(map(pool.num_pages_for, (*context_lengths.values(), own_length)))
            if num_pages > pool.num_pages(is_partial_pool):
                raise RequestTooLargeError(
                    f"needs room for {sum(context_lengths.values())} context tokens and {own_length} own tokens, "
                    f"in whole pages {num_pages * pool.page_size}; the whole "
                    f"{'partial-layer pool' if is_partial_pool else 'cache'} "
                    f"holds {pool.num_pages(is_partial_pool) * pool.page_size}: "
                    + ("enable_layer_reuse(capacity=...) sets it" if is_partial_pool else _CAPACITY_HINT)
                )

    def fits(self, request: Request, placement: Placement) -> bool:
        """True if a request and its context fit into an empty cache."""
        num_prompt_tokens = len(placement.tokens) - request.num_generated
        num_tokens, _ = request.token_limits(num_prompt_tokens, self._max_positions)
        try:
            self.check_fits(placement.read_entries, num_tokens)
        except RequestTooLargeError:
            return False
        return True

    def release(self, request_id: int | None) -> None:
        """Release collected entries; called when the request owns them or has ended."""
        for entry in self._passing.pop(request_id, ()) if self._passing else ():  # type: ignore[arg-type]
            self._cache_manager.release(entry, ("plan", request_id))
        if request_id is None or request_id != self.request_id:
            return
        acquired, self._acquired, self.request_id = self._acquired, {}, None
        for entry in acquired.values():
            self._cache_manager.release(entry, ("plan", request_id))

    def _collect(self, needed: list[KVEntry]) -> None:
        stack = [_Frame(needed, None)]
        while stack:
            frame = stack[-1]
            self._acquire(frame)
            missing = _next_to_load(frame.needed)
            if missing is not None and missing.error is not None:
                raise RequestFailedError(f"its context failed: {missing.error}") from missing.error
            if missing is not None and missing.is_lost:
                raise LostContextError("its context came from another process and is lost: prefill it again")
            if missing is not None and not missing.tier_copies:
                stack.append(_Frame(list(dict.fromkeys(missing.read_entries)), missing))
                continue
            try:
                if missing is None:
                    self._finish(frame)
                    stack.pop()
                else:
                    self._cache_manager.load(missing)
            except CacheBusyError:
                raise
            except CacheFullError:
                if not self._yield_pages(stack):
                    raise

    def _acquire(self, frame: _Frame) -> None:
        for entry in frame.needed:
            if entry.id not in self._acquired:
                self._acquired[entry.id] = entry
                frame.acquired.append(entry)
                self._cache_manager.acquire(entry, ("plan", self.request_id))

    def _yield_pages(self, stack: Sequence[_Frame]) -> bool:
        """Release acquired entries whose pages a recomputation needs first."""
        if not self._retries_left or not self._is_idle():
            return False
        needed_ids = {e.id for e in stack[-1].needed} | {frame.target.id for frame in stack if frame.target is not None}
        deferred = [
            e
            for f in stack[:-1]
            for e in f.needed
            if e.id in self._acquired and e.id not in needed_ids and e.is_complete
        ]
        for entry in deferred:
            if self._acquired.pop(entry.id, None) is not None:
                self._cache_manager.release(entry, ("plan", self.request_id))
        self._retries_left -= bool(deferred)
        return bool(deferred)

    def _finish(self, frame: _Frame) -> None:
        if frame.target is None:
            return
        self._cache_manager.grow(frame.target, len(frame.target.tokens))
        try:
            self._start_recompute(frame.target)  # acquires its own context
        except BaseException:
            self._cache_manager.discard(frame.target)
            raise
        for entry in frame.acquired:
            if self._acquired.pop(entry.id, None) is not None:
                self._cache_manager.release(entry, ("plan", self.request_id))


def _next_to_load(needed: list[KVEntry]) -> KVEntry | None:
    """Return the missing entry to restore next; None if there is none.

    Restored entries reduce the capacity for the rest. Entries recomputed from a context need the
    most capacity, so they come before entries that are loaded or have no context.
    """
    missing = [entry for entry in needed if not entry.has_pages]
    return min(missing, key=lambda entry: bool(entry.tier_copies) or not entry.read_entries, default=None)
