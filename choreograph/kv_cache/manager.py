"""KV cache manager: allocation, eviction, offloading and loading of entries."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..errors import CacheBusyError, CacheFullError
from ..events import EventBus
from ..outputs import BASE_MODEL
from .entry import ALL_LAYERS, EntryLayers, KVEntry, KVSlice, TokenRuns
from .entry_table import EntryTable, Owner
from .eviction import EvictionOrder, EvictionPolicy
from .pool import KVPool
from .splits import split_unused, split_used
from .tiers import HostTier, OffloadManager, Tier
from .transfer import ThreadExecutor, make_executor

EVICTION_SLACK_DIVISOR = 32  # evict 1/32 of the pool more than required: not every allocation sorts the candidates
MAX_CHUNK_TOKENS = 64  # tokens that an entry grows by at once
CHUNK_DIVISOR = 64  # of a small cache a chunk is at most 1/64
POLL_SECONDS = 0.02  # maximum sleep while waiting for a pin to expire


class KVCacheManager(EntryTable):
    """KV entries on the device and the lower tiers, evicted when pages are needed.

    Args:
        pool: Pages on the device.
        eviction: Key of `EVICTION_POLICIES`, or a function like those.
        tiers: Offload tiers, highest first.
        executor: Runs transfers; by default the one made for the pool's device.
        clock: Monotonic seconds, for the expiry of pins.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        eviction: str | EvictionPolicy,
        events: EventBus,
        tiers: Sequence[Tier] = (),
        executor: ThreadExecutor | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        executor = executor or make_executor(pool.keys[0].device)
        super().__init__(pool, OffloadManager(pool, tiers, executor, events), clock)
        self.sleep = sleep
        self.offloads_evicted = True  # False: an entry without a copy is dropped when it is evicted
        self._eviction_order = EvictionOrder(eviction)
        self._events = events

    # -- allocation ---------------------------------------------------------------------------------------

    def allocate_entry(
        self,
        tokens: list[int],
        base_position: int,
        context: Iterable[KVSlice],
        *,
        capacity: int,
        max_tokens: int = 0,
        owner: Owner,
        model: str = BASE_MODEL,
        layers: EntryLayers = ALL_LAYERS,
        runs: TokenRuns | None = None,
    ) -> KVEntry:
        """Create an entry with pages for `capacity` tokens, evicting others if needed.

        Args:
            tokens: Final token IDs so far; the entry keeps this list.
            capacity: Tokens to allocate pages for.
            max_tokens: Tokens that the entry may grow to.
            owner: First owner. For the others, and `runs`, see `KVEntry`.

        Raises:
            CacheFullError: if not enough pages can be freed.
            CacheBusyError: if pages become free only when a transfer completes.
        """
        num_pages, max_pages = self.pool.num_pages_for(capacity), self.pool.num_pages_for(max_tokens)
        pages = self._allocate_pages(num_pages, max_pages, partial=layers.computed is not None)
        entry = self.add_entry(tokens, base_position, tuple(context), pages, model=model, layers=layers, runs=runs)
        entry.owners.add(owner)
        return entry

    def grow(self, entry: KVEntry, num_tokens: int, max_tokens: int = 0) -> None:
        """Allocate the pages that an entry lacks for `num_tokens` tokens.

        Raises the errors of `allocate_entry`; the entry is unchanged then. `max_tokens` is its final length.
        """
        num_pages = len(entry.pages)
        missing = self.pool.num_pages_for(num_tokens) - num_pages
        if missing > 0:
            max_pages, after = self.pool.num_pages_for(max_tokens) - num_pages, entry.pages[-1] if num_pages else None
            pages = self._allocate_pages(missing, max_pages, after=after, partial=entry.is_partial)
            entry.set_pages(entry.pages + pages)
            self.resident[entry.id] = entry

    def _allocate_pages(self, num_pages: int, max_pages: int, *, partial: bool, after: int | None = None) -> list[int]:
        """Allocate at least `num_pages` pages, evicting entries if needed.

        A growing entry gets a chunk at a time, next to its last page where that is free, so that it
        remains few slot ranges. More than `num_pages` are taken from free pages only: they evict nothing.

        Args:
            max_pages: pages that the entry may need in the end; up to a chunk of them is allocated if free.
            partial: allocate in the partial-layer pool.
            after: last page of the entry that grows.
        """
        pool, room = self.pool, max(0, max_pages - num_pages)
        if pool.num_free(partial) < num_pages:
            self.reclaim(num_pages, partial)
        elif room:
            chunk_tokens = min(MAX_CHUNK_TOKENS, pool.pages * pool.page_size // CHUNK_DIVISOR)
            chunk_pages = max(1, chunk_tokens // pool.page_size)
            num_pages += min(room, chunk_pages, pool.num_free(partial) - num_pages)
        return pool.allocate(num_pages, partial=partial, after=after, room=room)

    def evict_unreferenced(self) -> None:
        """Delete every unreferenced entry, on every tier, after waiting for all transfers."""
        while self.offload_manager.wait():
            self.poll_transfers()
        tree = self.prefix_tree
        while leaves := [e for e in self.entries.values() if not e.owners and not tree.has_children(e)]:
            for entry in leaves:
                self._delete(entry)

    # -- eviction from the device -------------------------------------------------------------------------

    def reclaim(self, num_pages: int, partial: bool) -> None:
        """Evict entries until `num_pages` pages are free, or raise."""
        pool, jobs = self.pool, self.offload_manager.jobs
        split_used(self)
        candidates = self.evictable(partial)
        reclaimable = self.num_free(partial) + sum(len(entry.pages) for entry in candidates)
        split_unused(self, candidates)
        if reclaimable < num_pages:
            moving = [e for e in self.resident.values() if e.is_partial == partial and not e.in_use and e.transfer]
            if reclaimable + sum(len(entry.pages) for entry in moving) >= num_pages:
                raise CacheBusyError(f"needs {num_pages} pages, some of which are being copied: wait for the transfers")
            raise CacheFullError(
                f"needs {num_pages} pages of {pool.page_size} tokens; {pool.num_free(partial)} of "
                f"{pool.num_pages(partial)} are free and {reclaimable - pool.num_free(partial)} can be evicted: "
                "release messages or raise " + ("the partial-layer capacity" if partial else "CacheConfig.capacity")
            )
        self._evict(num_pages + pool.num_pages(partial) // EVICTION_SLACK_DIVISOR, partial=partial)
        if pool.num_free(partial) < num_pages and not jobs:
            # The rest has children on lower tiers, which cannot be evicted first.
            self._evict(num_pages, with_descendants=True, partial=partial)
        if pool.num_free(partial) < num_pages:
            shortage = f"needs {num_pages} pages, {pool.num_free(partial)} free"
            if jobs:
                raise CacheBusyError(f"{shortage}, wait for the running transfers")
            raise CacheFullError(f"{shortage}, the remaining unused pages are pinned")

    def num_reclaimable(self, partial: bool = False) -> int:
        """Return the pages that are free or can be evicted."""
        return self.num_free(partial) + sum(len(entry.pages) for entry in self.evictable(partial))

    def num_free(self, partial: bool) -> int:
        """Return the pages that are free or being freed by offloads."""
        return self.pool.num_free(partial) + (0 if partial else self.offload_manager.pages_being_freed)

    def evictable(self, partial: bool) -> list[KVEntry]:
        """Return the evictable entries of the main or of the partial-layer pool."""
        return [
            entry
            for entry in self.resident.values()
            if entry.is_partial == partial and not entry.in_use and entry.transfer is None and entry.is_complete
        ]

    def victims(self, entries: Iterable[KVEntry], incoming: KVEntry | None = None) -> Iterator[KVEntry]:
        """Yield entries in policy order, up to `incoming` if given."""
        candidates = {entry.id: entry for entry in (*entries, incoming) if entry is not None}
        for entry_id in self._eviction_order([self.hints.candidate(entry) for entry in candidates.values()]):
            if incoming is not None and entry_id == incoming.id:
                break
            yield candidates[entry_id]

    def _evict(self, num_pages: int, *, with_descendants: bool = False, partial: bool = False) -> None:
        """Evict entries until `num_pages` pages are free or being freed.

        Args:
            num_pages: Pages required.
            with_descendants: Also evict entries that have unreferenced children in the prefix tree.
            partial: Evict from the partial-layer pool.
        """
        progress = True
        while progress and self.num_free(partial) < num_pages:
            progress = False
            for entry in self.victims(self.evictable(partial)):
                if self.num_free(partial) >= num_pages:
                    break
                if entry.id in self.entries:  # else it was deleted with its parent in the prefix tree
                    progress |= self.evict_entry(entry, with_descendants)

    def can_evict(self, entry: KVEntry, reserved: Counter[str]) -> bool:
        """Return whether `evict_entry` could free the pages; update `reserved` tier tokens."""
        if entry.tier_copies:
            return True
        if self._is_worth_copying(entry):
            for tier in self.offload_manager.tiers:
                num_tokens = reserved[tier.name] + len(entry.tokens)
                if self.offload_manager.accepts(tier, entry) and tier.fits(num_tokens):
                    reserved[tier.name] = num_tokens
                    return True
        return not self.prefix_tree.has_children(entry) and (not entry.owners or entry.storage.can_recompute)

    def evict_entry(self, entry: KVEntry, with_descendants: bool = False) -> bool:
        """Offload an entry or free its pages; return whether either was possible."""
        if not entry.tier_copies and not entry.is_partial and self._is_worth_copying(entry):
            tiers = self.offload_manager.tiers
            for depth, tier in enumerate(tiers):
                if not self.offload_manager.accepts(tier, entry):
                    continue
                if self._reclaim_tier(depth, entry):
                    self.offload_manager.offload(entry, tier)
                    return True
                if self.offload_manager.tokens_being_freed(tier):
                    break  # wait for this tier instead of using a lower one
            if any(self.offload_manager.tokens_being_freed(tier) for tier in tiers):
                return False
        if not entry.tier_copies:
            if self.prefix_tree.has_children(entry) and not (
                with_descendants and all(not child.owners for child in self.prefix_tree.descendants(entry))
            ):
                return False
            if entry.owners and not entry.storage.can_recompute:
                return False
        self._emit_evicted(entry, next(iter(entry.tier_copies), "dropped"))
        self._free_pages(entry)
        if not entry.tier_copies and not entry.owners:
            self._delete(entry)
        return True

    def _is_worth_copying(self, entry: KVEntry) -> bool:
        """Return whether an entry that is evicted is offloaded if a tier has space."""
        return self.offloads_evicted and bool(entry.owners or not self.hints.candidate(entry).ephemeral)

    def copy_ahead(self, entry: KVEntry) -> bool:
        """Start copying an entry to the highest tier before it is evicted; return whether it is.

        It stays on the device; with a copy, its eviction frees its pages at once. What is copied and when is the
        caller's choice.
        """
        tiers = self.offload_manager.tiers
        if not tiers or not entry.pages or not entry.is_complete or entry.tier_copies or entry.transfer is not None:
            return False
        if not self.offload_manager.accepts(tiers[0], entry) or not self._reclaim_tier(0, entry):
            return False
        self.offload_manager.offload(entry, tiers[0], stays=True)
        return True

    def _emit_evicted(self, entry: KVEntry, destination: str) -> None:
        """Emit an `evicted` event with the destination and the policy inputs."""
        inputs = self.hints.candidate(entry)
        why = {"steps": inputs.steps_to_execution, "ephemeral": inputs.ephemeral, "referenced": inputs.referenced}
        self._events.emit(
            "evicted", entry=entry.id, tokens=len(entry.tokens), to=destination, policy=self._eviction_order.name, **why
        )

    # -- lower tiers --------------------------------------------------------------------------------------

    def _reclaim_tier(self, depth: int, incoming: KVEntry) -> bool:
        """Evict lower-ranked copies from tier `depth`; return whether `incoming` fits now."""
        tier, size = self.offload_manager.tiers[depth], len(incoming.tokens)
        if tier.fits(size):
            return True
        entries = [e for e in self.entries.values() if tier.name in e.tier_copies and e.transfer is None]
        evictable = [e for e in entries if e.is_complete or not e.in_use]  # requests wait for the others
        for entry in self.victims(evictable, incoming):
            if tier.fits(size) or self.offload_manager.tokens_being_freed(tier) >= size:
                break
            self._evict_from_tier(depth, entry)
        return tier.fits(size)

    def _evict_from_tier(self, depth: int, entry: KVEntry) -> None:
        """Free a tier's copy, or demote an only copy if possible."""
        tier, below = self.offload_manager.tiers[depth], self.offload_manager.tiers[depth + 1 :]
        is_only_copy = not entry.is_complete and len(entry.tier_copies) == 1
        if is_only_copy:
            lower = next((t for t in below if self.offload_manager.accepts(t, entry)), None)
            if lower is not None and self._reclaim_tier(depth + 1, entry):
                assert isinstance(tier, HostTier), "the disk tier is the lowest"
                self.offload_manager.demote(entry, tier, lower)
                return
            if self.prefix_tree.has_children(entry) or (entry.owners and not entry.storage.can_recompute):
                return
        self.offload_manager.free(entry, entry.tier_copies[tier.name])
        if is_only_copy:
            self._emit_evicted(entry, "dropped")
            if not entry.owners:
                self._delete(entry)

    def load(self, entry: KVEntry) -> None:
        """Allocate pages and start loading an entry from its nearest copy.

        Raises:
            CacheFullError: if not enough pages can be freed.
            CacheBusyError: if the entry is being offloaded, or pages become free only later.
        """
        if entry.transfer is not None:
            raise CacheBusyError(f"KV entry {entry.id} is being offloaded; retry after the transfer completes")
        self.grow(entry, len(entry.tokens))
        try:
            self.offload_manager.load(entry)
        except BaseException:
            self._free_pages(entry)
            raise

    def poll_transfers(self) -> list[KVEntry]:
        """Process completed transfers and expired pins; return entries whose load failed.

        Failed entries have no pages; the caller fails or recomputes the requests that need them.
        """
        failed = []
        for job in list(self.offload_manager.jobs):
            if not job.transfer.is_finished:
                continue
            self.offload_manager.complete(job)
            entry, error = job.entry, job.transfer.error
            if job.kind == "load" and error is None:
                entry.num_computed_tokens = entry.num_scheduled_tokens = len(entry.tokens)
            elif job.kind == "load":
                failed.append(entry)
                self._free_pages(entry)
            elif job.kind == "offload" and error is None and not entry.in_use:
                self._emit_evicted(entry, job.copy.tier)
                self._free_pages(entry)
            if not self._is_needed(entry) or (job.transfer.cancelled and not entry.owners):
                self._delete(entry)
        self.pins.expire()
        return failed

    @property
    def has_pending(self) -> bool:
        """True if a transfer or an expiring pin may free pages."""
        return bool(self.offload_manager.jobs) or self.pins.next_expiry is not None

    def wait_for_space(self) -> bool:
        """Wait for a transfer, or briefly for a pin; False without either."""
        if self.offload_manager.wait():
            return True
        if (seconds_left := self.pins.next_expiry) is not None:
            self.sleep(min(POLL_SECONDS, seconds_left))
        return seconds_left is not None
