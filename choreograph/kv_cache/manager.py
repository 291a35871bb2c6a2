"""KV cache manager: allocation, references, lookup, eviction, offloading and loading of entries."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..errors import CacheBusyError, CacheFullError
from ..events import EventBus
from ..namespace import Namespace
from ..outputs import BASE_MODEL
from .allocation import allocate_pages, grow_entry
from .entry import ALL_LAYERS, EntryLayers, KVEntry, KVSlice
from .eviction import EvictionOrder, EvictionPolicy, PinTable
from .fixed_parts import split_unused, split_used
from .hints import FixedPartIndex, HintRegistry
from .pool import KVPool
from .prefetch import EVICTION_SLACK_DIVISOR, Prefetcher
from .prefix_tree import PrefixTree
from .shared_headers import SharedHeaderIndex
from .tiers import HostTier, OffloadManager, Tier
from .transfer import ThreadExecutor, make_executor

POLL_SECONDS = 0.02  # maximum sleep while waiting for a pin to expire


class KVCacheManager:
    """Page pool, the KV entries in it, and the lower tiers.

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
        self.pool = pool
        self.offload_manager = OffloadManager(pool, tiers, executor or make_executor(pool.keys[0].device), events)
        self.sleep = sleep
        self._eviction_order = EvictionOrder(eviction)
        self._events = events
        self.entries: dict[int, KVEntry] = {}
        self.resident: dict[int, KVEntry] = {}  # those with device pages, which evictions search
        self._by_hash: dict[bytes, KVEntry] = {}
        self.prefix_tree = PrefixTree()
        self._clock = itertools.count(1)
        self.pins = PinTable(self.acquire, self.release, clock)
        self.shared_headers = SharedHeaderIndex()
        self.fixed_parts = FixedPartIndex()
        self.hints = HintRegistry(self.fixed_parts)
        self.prefetcher = Prefetcher(self, events)

    # -- lifetime -----------------------------------------------------------------------------------------

    def allocate_entry(
        self,
        tokens: list[int],
        base_position: int,
        context: Iterable[KVSlice],
        *,
        capacity: int,
        max_tokens: int = 0,
        owner: tuple[str, object],
        model: str = BASE_MODEL,
        layers: EntryLayers = ALL_LAYERS,
    ) -> KVEntry:
        """Create an entry with pages for `capacity` tokens, evicting others if needed.

        Args:
            tokens: Final token IDs so far; the entry keeps this list.
            capacity: Tokens to allocate pages for.
            max_tokens: Tokens that the entry may grow to.
            owner: First owner, as (kind, key). For the others see `KVEntry`.

        Raises:
            CacheFullError: if not enough pages can be freed.
            CacheBusyError: if pages become free only when a transfer completes.
        """
        num_pages, max_pages = self.pool.num_pages_for(capacity), self.pool.num_pages_for(max_tokens)
        pages = allocate_pages(self, num_pages, max_pages, partial=layers.computed is not None)
        entry = self.add_entry(tokens, base_position, tuple(context), pages, model=model, layers=layers)
        entry.owners.add(owner)
        return entry

    def add_entry(
        self,
        tokens: list[int],
        base_position: int,
        context: tuple[KVSlice, ...],
        pages: list[int],
        *,
        model: str = BASE_MODEL,
        layers: EntryLayers = ALL_LAYERS,
    ) -> KVEntry:
        """Create an entry without owners in allocated pages."""
        entry_id, page_size = next(self._clock), self.pool.page_size
        entry = KVEntry(entry_id, tokens, base_position, context, pages, page_size, model, layers)
        entry.last_access, entry.num_final_tokens = entry_id, len(tokens)
        self.entries[entry.id] = entry
        if pages:
            self.resident[entry.id] = entry
        return entry

    def acquire(self, entry: KVEntry, owner: tuple[str, object]) -> None:
        """Add an owner. A deleted entry is registered again, without pages."""
        if entry.id not in self.entries:
            self.entries[entry.id] = entry
            if entry.content_hash is not None:
                self.register(entry, entry.content_hash)
        entry.owners.add(owner)
        entry.hit_count += owner[0] != "plan"
        entry.last_access = next(self._clock)

    def release(self, entry: KVEntry, owner: tuple[str, object]) -> None:
        """Remove an owner; delete an unowned entry that lookups cannot return.

        Idempotent.
        """
        if owner not in entry.owners:
            return
        entry.owners.discard(owner)
        entry.last_access = next(self._clock)
        if not entry.in_use:
            self.prefetcher.num_usable_pages += len(entry.pages)
        if not entry.owners and not (self.is_indexed(entry) and entry.has_data):
            self._delete(entry)

    def free_unused_pages(self, entry: KVEntry) -> None:
        """Free a finished entry's unused pages and mark its tokens final."""
        entry.num_final_tokens = len(entry.tokens)
        self.truncate_pages(entry, self.pool.num_pages_for(len(entry.tokens)))

    def discard(self, entry: KVEntry) -> None:
        """Free the pages of an entry whose computation failed."""
        self._free_pages(entry)
        if not entry.owners:
            self._delete(entry)

    def fail(self, entry: KVEntry, error: Exception | None) -> None:
        """Truncate or discard an entry whose computation raised `error`.

        A prefix-mode entry keeps computed tokens; requests that need any other entry get the error.
        """
        if entry.id not in self.entries:  # deleted with its last owner
            return
        if entry in self.prefix_tree and entry.num_computed_tokens:
            del entry.tokens[entry.num_computed_tokens :]
            self.free_unused_pages(entry)
            return
        entry.error = error
        self._unregister(entry)
        if not entry.in_use:
            self.discard(entry)

    def evict_unreferenced(self) -> None:
        """Delete every unreferenced entry, on every tier, after waiting for all transfers."""
        while self.offload_manager.wait():
            self.poll_transfers()
        tree = self.prefix_tree
        while leaves := [e for e in self.entries.values() if not e.owners and not tree.has_children(e)]:
            for entry in leaves:
                self._delete(entry)

    def _free_pages(self, entry: KVEntry) -> None:
        self.truncate_pages(entry, 0)
        entry.num_computed_tokens = entry.num_scheduled_tokens = 0
        entry.shared_header = None

    def truncate_pages(self, entry: KVEntry, count: int) -> None:
        """Free an entry's pages after the first `count`."""
        unused = entry.pages[count:]
        entry.set_pages(entry.pages[:count])
        if not count:
            self.resident.pop(entry.id, None)
        self.prefetcher.num_usable_pages += len(unused)
        self.pool.release(unused)

    def _delete(self, entry: KVEntry) -> None:
        """Delete an unreferenced entry and detach its prefix subtree.

        A running transfer is cancelled first; the entry is deleted when it ends.
        """
        if entry.transfer is not None:
            entry.transfer.cancel()
            return
        self._unregister(entry)
        for child in reversed(list(self.prefix_tree.descendants(entry))):
            self.prefix_tree.remove(child)
            if not child.owners and child.transfer is None:
                self._delete(child)
        self.prefix_tree.remove(entry)
        self.shared_headers.remove(entry)
        self.fixed_parts.remove(entry)
        for copy in list(entry.tier_copies.values()):
            self.offload_manager.free(entry, copy)
        self._free_pages(entry)
        del self.entries[entry.id]

    # -- lookup by content --------------------------------------------------------------------------------

    def lookup(self, content_hash: bytes) -> KVEntry | None:
        return self._by_hash.get(content_hash)

    def entries_with(self, key: bytes) -> list[KVEntry]:
        """Return the entries that have a fixed part, in token order."""
        entry = self._by_hash.get(key)
        return self.fixed_parts.get(key) if entry is None else [entry]

    def register(self, entry: KVEntry, content_hash: bytes) -> None:
        """Set the content hash; `lookup` returns its first registered entry."""
        entry.content_hash = content_hash
        self._by_hash.setdefault(content_hash, entry)

    def _unregister(self, entry: KVEntry) -> None:
        if self._is_registered(entry):
            del self._by_hash[entry.content_hash]  # type: ignore[arg-type]

    def _is_registered(self, entry: KVEntry) -> bool:
        return entry.content_hash is not None and self._by_hash.get(entry.content_hash) is entry

    def is_indexed(self, entry: KVEntry) -> bool:
        """Return whether an entry can be looked up by hash or in the prefix tree."""
        return self._is_registered(entry) or entry in self.prefix_tree

    # -- headers shared with other entries ----------------------------------------------------------------

    def share_header(
        self, entry: KVEntry, namespace: Namespace, owner: tuple[str, object], *, min_length: int, copy_now: bool
    ) -> int:
        """Skip first tokens of a new entry that another one over the same context has.

        They are read from the other entry (`KVEntry.shared_header`), which `owner` references until
        `copy_headers`.

        Args:
            min_length: tokens from which sharing is worth it.
            copy_now: copy them at once if they are computed.

        Returns:
            The number of tokens that need not be computed.
        """
        header = self.shared_headers.add(namespace, entry, min_length)
        if header is None:
            return 0
        other, num_tokens = header.entry, header.num_tokens
        entry.num_scheduled_tokens = entry.num_computed_tokens = num_tokens
        entry.layers = entry.layers._replace(hidden=entry.layers.hidden & other.layers.hidden)
        if copy_now and other.num_computed_tokens >= num_tokens:  # else the next step computes them
            self._copy_tokens([(header, entry)])
        else:
            self.acquire(other, owner)
            entry.shared_header = header
        return num_tokens

    def copy_headers(self, sharing: Sequence[tuple[KVEntry, tuple[str, object]]]) -> None:
        """Copy shared headers into the entries' own slots after a step.

        Args:
            sharing: entries with a shared header, and the owner that references the other entry.
        """
        self._copy_tokens([(entry.shared_header, entry) for entry, _ in sharing if entry.shared_header is not None])
        for entry, owner in sharing:
            if entry.shared_header is not None:
                self.release(entry.shared_header.entry, owner)
                entry.shared_header = None

    def _copy_tokens(self, copies: Iterable[tuple[KVSlice, KVEntry]]) -> None:
        """Copy each slice to the start of another entry."""
        slots: list[int] = []
        target_slots: list[int] = []
        for kv_slice, target in copies:
            slots += map(kv_slice.entry.slot, range(kv_slice.num_tokens))
            target_slots += map(target.slot, range(kv_slice.num_tokens))
        self.pool.copy_slots(slots, target_slots)

    # -- eviction from the device -------------------------------------------------------------------------

    def reclaim(self, num_pages: int, partial: bool) -> None:
        """Evict entries until `num_pages` pages are free, or raise."""
        pool, jobs = self.pool, self.offload_manager.jobs
        split_used(self)
        candidates = self.evictable(partial)
        reclaimable = self.num_free(partial) + sum(len(entry.pages) for entry in candidates)
        split_unused(self, candidates)
        if reclaimable < num_pages:
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
        if entry.owners or not self.hints.candidate(entry).ephemeral:
            for tier in self.offload_manager.tiers:
                num_tokens = reserved[tier.name] + len(entry.tokens)
                if self.offload_manager.accepts(tier, entry) and tier.fits(num_tokens):
                    reserved[tier.name] = num_tokens
                    return True
        return not self.prefix_tree.has_children(entry) and (not entry.owners or entry.storage.can_recompute)

    def evict_entry(self, entry: KVEntry, with_descendants: bool = False) -> bool:
        """Offload an entry or free its pages; return whether either was possible."""
        is_worth_copying = entry.owners or not self.hints.candidate(entry).ephemeral
        if not entry.tier_copies and not entry.is_partial and is_worth_copying:
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
        grow_entry(self, entry, len(entry.tokens))
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
            if not entry.owners and not (self.is_indexed(entry) and entry.has_data and not job.transfer.cancelled):
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

    @property
    def stats(self) -> dict[str, int]:
        """Return entry and page counts of the device; see `EngineStats`."""
        entries = list(self.entries.values())  # a copy: another thread may be running a step
        referenced = [entry for entry in entries if entry.owners]
        num_partial = sum(len(e.pages) for e in referenced if e.is_partial)
        return {
            "num_pages": self.pool.pages,
            "num_free_pages": self.pool.free_pages,
            "num_referenced_pages": sum(len(e.pages) for e in referenced) - num_partial,
            "num_referenced_entries": len(referenced),
            "num_unreferenced_entries": len(entries) - len(referenced),
            "num_partial_pages": self.pool.num_pages(partial=True),
            "num_referenced_partial_pages": num_partial,
        }

    def check(self) -> None:
        """Check all invariants: pages, references, index, pins, tier copies and prefix trees."""
        entries = list(self.entries.values())
        self.pool.check()
        pages = [page for entry in entries for page in entry.pages]
        assert len(pages) == len(set(pages)), "two KV entries share a page"
        for partial in (False, True):
            num_used = sum((page > self.pool.pages) == partial for page in pages)
            assert num_used + self.pool.num_free(partial) == self.pool.num_pages(partial), "pages are lost"
        for e in entries:
            assert e.owners or e.transfer or (self.is_indexed(e) and e.has_data), f"KV entry {e.id} is leaked"
            assert e.num_computed_tokens <= e.num_scheduled_tokens <= len(e.tokens)
            assert not e.pages or len(e.tokens) <= len(e.pages) * e.page_size
            assert e.pages or not e.num_computed_tokens, f"KV entry {e.id} has computed tokens but no pages"
            assert all((page > self.pool.pages) == e.is_partial for page in e.pages)
        assert self.resident == {e.id: e for e in entries if e.pages}, "the index of resident entries is wrong"
        for key, e in self._by_hash.items():
            assert e.content_hash == key and e.id in self.entries
        self.pins.check()
        self.offload_manager.check(entries)
        self.fixed_parts.check(entries)
        self.prefix_tree.check()
