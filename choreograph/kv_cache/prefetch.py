"""Prefetch of the fixed parts of agents that run next (KVFlow §3.2)."""

from collections import Counter
from collections.abc import Iterable

from ..events import EventBus
from .entry import KVEntry
from .manager import EVICTION_SLACK_DIVISOR, KVCacheManager
from .splits import split_unused


class Prefetcher:
    """Loads fixed parts that agents need next.

    Loads take free pages and those of entries that are needed later. Nothing is evicted unless
    enough can be.
    """

    def __init__(self, cache_manager: KVCacheManager, events: EventBus) -> None:
        self._cache_manager, self._events = cache_manager, events
        self.missing: dict[object, tuple[list[bytes], int]] = {}  # keys, nearest first, and maximum loads, by source
        self._retry_at = 0  # value of `KVCacheManager.num_usable_pages` from which there may be room again

    @property
    def is_pending(self) -> bool:
        """True if a part is missing and may fit."""
        return bool(self.missing) and self._cache_manager.num_usable_pages >= self._retry_at

    def update(self, source: object, keys: Iterable[bytes], max_loads: int) -> None:
        """Replace the parts that a source needs next, the nearest first."""
        missing = [key for key in keys if any(_is_missing(entry) for entry in self._cache_manager.entries_with(key))]
        self.missing.pop(source, None)
        if missing and max_loads:
            self.missing[source] = missing, max_loads
            self._retry_at = 0  # with other steps, other entries may be evicted

    def run(self) -> None:
        """Start as many loads as each source allows at a time."""
        for source, (keys, max_loads) in list(self.missing.items()):
            rest = []
            for key in keys:
                entries = [entry for entry in self._cache_manager.entries_with(key) if _is_missing(entry)]
                for entry in entries:  # in token order
                    if entry.transfer is None and self.is_pending and self._has_load(max_loads):
                        self._load(entry)
                rest += [key] if any(map(_is_missing, entries)) else []
            if rest:
                self.missing[source] = rest, max_loads
            else:
                del self.missing[source]

    def _has_load(self, max_loads: int) -> bool:
        return self._cache_manager.offload_manager.num_loads < max_loads

    def _load(self, entry: KVEntry) -> None:
        manager = self._cache_manager
        num_pages = manager.pool.num_pages_for(len(entry.tokens))
        num_short = self._evict(entry, num_pages)
        if num_short:
            self._retry_at = manager.num_usable_pages + num_short
        if manager.pool.free_pages >= num_pages:
            self._events.emit("prefetch", entry=entry.id, tokens=len(entry.tokens))
            manager.load(entry)

    def _evict(self, incoming: KVEntry, num_pages: int) -> int:
        """Evict what is needed later, or nothing; return the missing pages."""
        manager = self._cache_manager
        num_needed = num_pages - manager.num_free(partial=False)
        if num_needed <= 0:
            return num_pages - manager.pool.free_pages  # offloads are freeing them
        split_unused(manager, manager.evictable(partial=False))
        needed_in = manager.hints.candidate(incoming).steps_to_execution
        victims: list[KVEntry] = []
        num_found, reserved = 0, Counter[str]()
        for entry in manager.victims(manager.evictable(partial=False), incoming):
            if num_found >= num_needed + manager.pool.pages // EVICTION_SLACK_DIVISOR:
                break
            steps = manager.hints.candidate(entry).steps_to_execution
            is_later = steps is None or needed_in is None or steps > needed_in
            if is_later and manager.can_evict(entry, reserved):
                victims.append(entry)
                num_found += len(entry.pages)
        if num_found < num_needed:
            return num_needed - num_found
        for entry in victims:
            manager.evict_entry(entry)
        return max(0, num_pages - manager.pool.free_pages)


def _is_missing(entry: KVEntry) -> bool:
    """Return whether an entry is, or soon is, on lower tiers only."""
    if entry.transfer is not None:
        return entry.transfer.direction == "offloading"
    return not entry.pages and bool(entry.tier_copies)
