"""KV cache manager: allocation, references, lookup, eviction, offloading and loading of entries."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..errors import CacheBusyError, CacheFullError
from ..events import EventBus
from ..outputs import BASE_MODEL
from . import invariants
from .entry import KVEntry, KVSlice
from .eviction import EVICTION_POLICIES, HintRegistry, PinTable
from .offload import OffloadManager
from .pool import KVPool
from .prefix_tree import PrefixTree
from .shared_headers import SharedHeaderIndex
from .tiers import Tier
from .transfer import TransferExecutor, make_executor

POLL_SECONDS = 0.02  # maximum sleep while waiting for a pin to expire

EVICTION_SLACK_DIVISOR = (
    32  # evict 1/32 of the pool more than required, so that not every allocation sorts the candidates
)


class KVCacheManager:
    """Page pool, the KV entries in it, and the offload tiers below it.

    Args:
        pool: Pages on the device.
        eviction: Key of `EVICTION_POLICIES`.
        tiers: Offload tiers, highest first.
        executor: Runs transfers; by default the one made for the pool's device.
        clock: Monotonic seconds, for the expiry of pins.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        eviction: str,
        events: EventBus,
        tiers: Sequence[Tier] = (),
        executor: TransferExecutor | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.pool = pool
        self.offload_manager = OffloadManager(pool, tiers, executor or make_executor(pool.keys[0].device), events)
        self.sleep = sleep
        self._policy_name, self._policy = eviction, EVICTION_POLICIES[eviction]
        self._events = events
        self._entries: dict[int, KVEntry] = {}
        self._by_hash: dict[bytes, KVEntry] = {}
        self._prefix_trees: dict[str, PrefixTree] = {}
        self._clock = 0
        self.pins = PinTable(self.acquire, self.release, clock)
        self.hints = HintRegistry()
        self.shared_headers = SharedHeaderIndex()

    # -- lifetime -----------------------------------------------------------------------------------------

    def allocate_entry(
        self,
        tokens: list[int],
        base_position: int,
        context: Iterable[KVSlice],
        *,
        capacity: int,
        owner: tuple[str, object],
        model: str = BASE_MODEL,
        computed_layers: frozenset[int] | None = None,
    ) -> KVEntry:
        """Create an entry with pages for `capacity` tokens, evicting others if needed.

        Args:
            tokens: Token IDs known so far; the entry keeps this list.
            base_position: Position of token 0.
            context: Slices that every token attends to.
            capacity: Tokens to allocate pages for.
            owner: First owner, as (kind, key).
            model: Model or adapter that computes the entry.
            computed_layers: Layers it is computed in; None for all.

        Raises:
            CacheFullError: if not enough pages can be freed.
            CacheBusyError: if pages become free only when a transfer completes.
        """
        pages = self._allocate(self.pool.num_pages_for(capacity), partial=computed_layers is not None)
        self._clock += 1
        entry = KVEntry(
            id=self._clock,
            tokens=tokens,
            base_position=base_position,
            context=tuple(context),
            pages=pages,
            page_size=self.pool.page_size,
            num_final_tokens=len(tokens),
            last_access=self._clock,
            model=model,
            computed_layers=computed_layers,
        )
        entry.owners.add(owner)
        self._entries[entry.id] = entry
        return entry

    def uses_model(self, model: str) -> bool:
        """Return whether a referenced entry was computed by `model` or attended to its output."""
        return invariants.uses_model(self._entries.values(), model)

    def acquire(self, entry: KVEntry, owner: tuple[str, object]) -> None:
        """Add an owner. A deleted entry is registered again, without pages."""
        if entry.id not in self._entries:
            self._entries[entry.id] = entry
            if entry.content_hash is not None:
                self.register(entry, entry.content_hash)
        entry.owners.add(owner)
        entry.hit_count += owner[0] != "plan"
        self._mark_used(entry)

    def release(self, entry: KVEntry, owner: tuple[str, object]) -> None:
        """Remove an owner; delete the entry if it has no other and cannot be looked up.

        Idempotent.
        """
        if owner not in entry.owners:
            return
        entry.owners.discard(owner)
        self._mark_used(entry)
        if not entry.owners and not (entry.is_indexed and entry.has_data):
            self._delete(entry)

    def free_unused_pages(self, entry: KVEntry) -> None:
        """Free the pages that a finished entry does not need and mark its tokens final."""
        entry.num_final_tokens = len(entry.tokens)
        self.pool.release(entry.truncate_pages(self.pool.num_pages_for(len(entry.tokens))))

    def _mark_used(self, entry: KVEntry) -> None:
        self._clock += 1
        entry.last_access = self._clock

    def _delete(self, entry: KVEntry) -> None:
        """Delete an unreferenced entry; if a transfer is running, cancel that and delete later."""
        if entry.transfer is not None:
            self.offload_manager.cancel(entry)
            return
        if entry.content_hash is not None and self._by_hash.get(entry.content_hash) is entry:
            del self._by_hash[entry.content_hash]
        entry.is_indexed = False
        self._detach(entry)
        self.shared_headers.remove(entry)
        self.offload_manager.free_copies(entry)
        self._free_pages(entry)
        del self._entries[entry.id]

    def _detach(self, entry: KVEntry) -> None:
        """Remove an entry and its descendants from their prefix tree."""
        tree = entry.prefix_tree
        if tree is None:
            return
        for child in reversed(list(tree.descendants(entry))):
            tree.remove(child)
            child.is_indexed = False
            if not child.owners and child.transfer is None:
                self._delete(child)
        tree.remove(entry)
        if tree.is_empty:
            self._prefix_trees.pop(tree.cache_salt, None)

    def _subtree_unused(self, entry: KVEntry) -> bool:
        """Return whether no descendant in the prefix tree has an owner."""
        return not entry.prefix_tree or not any(child.owners for child in entry.prefix_tree.descendants(entry))

    def _free_pages(self, entry: KVEntry) -> None:
        self.pool.release(entry.truncate_pages(0))
        entry.num_computed_tokens = entry.num_scheduled_tokens = 0

    def discard(self, entry: KVEntry) -> None:
        """Free the pages of an entry whose computation failed; tokens and context remain."""
        self._free_pages(entry)
        if not entry.owners:
            self._delete(entry)

    # -- lookup by content --------------------------------------------------------------------------------

    def lookup(self, content_hash: bytes) -> KVEntry | None:
        return self._by_hash.get(content_hash)

    def register(self, entry: KVEntry, content_hash: bytes) -> None:
        """Set the content hash; `lookup` returns the first entry registered under a hash."""
        entry.content_hash = content_hash
        if self._by_hash.setdefault(content_hash, entry) is entry:
            entry.is_indexed = True

    def prefix_tree(self, cache_salt: str, *, create: bool = False) -> PrefixTree:
        """Return the prefix tree of a salt; store a new one only if `create`."""
        return (
            self._prefix_trees.setdefault(cache_salt, PrefixTree(cache_salt))
            if create
            else self._prefix_trees.get(cache_salt, PrefixTree(cache_salt))
        )

    # -- capacity -----------------------------------------------------------------------------------------

    def _evictable(self, partial: bool) -> Iterator[KVEntry]:
        """Yield the evictable entries of the main or of the partial-layer pool."""
        for e in self._entries.values():
            if (
                e.pages
                and (e.computed_layers is not None) == partial
                and not e.in_use
                and e.transfer is None
                and e.is_complete
            ):
                yield e

    def _num_free(self, partial: bool) -> int:
        """Return the pages that are free or are being freed by running offloads."""
        return self.pool.num_free(partial) + (0 if partial else self.offload_manager.pages_being_freed)

    def num_free_or_evictable(self, partial: bool = False) -> int:
        """Return the pages that are free, being freed or evictable."""
        return self._num_free(partial) + sum(len(e.pages) for e in self._evictable(partial))

    def evict_unreferenced(self) -> None:
        """Delete every unreferenced entry, on every tier, after waiting for all transfers."""
        while self.offload_manager.wait():
            self.poll_transfers()
        progress = True
        while progress:
            idle = [e for e in self._entries.values() if not e.owners and not e.num_tree_children]
            for entry in idle:
                self._delete(entry)
            progress = bool(idle)

    def _allocate(self, pages: int, *, partial: bool) -> list[int]:
        if self.pool.num_free(partial) < pages:
            self._reclaim(pages, partial)
        return self.pool.allocate(pages, partial=partial)

    def _reclaim(self, pages: int, partial: bool) -> None:
        pool, reclaimable = self.pool, self.num_free_or_evictable(partial)
        if reclaimable < pages:
            raise CacheFullError(
                f"needs {pages} pages of {pool.page_size} tokens; {pool.num_free(partial)} of "
                f"{pool.num_pages(partial)} are free and {reclaimable - pool.num_free(partial)} can be evicted: "
                "release messages or raise " + ("the partial-layer capacity" if partial else "CacheConfig.capacity")
            )
        self._evict(pages, slack=pool.num_pages(partial) // EVICTION_SLACK_DIVISOR, partial=partial)
        if pool.num_free(partial) < pages and not self.offload_manager.jobs:
            self._evict(
                pages, with_descendants=True, partial=partial
            )  # their children are on lower tiers and cannot be evicted first
        if pool.num_free(partial) < pages:
            kind, why = (
                (CacheBusyError, "wait for the running transfers")
                if self.offload_manager.jobs
                else (CacheFullError, "the remaining unused pages are pinned")
            )
            raise kind(f"needs {pages} pages, {pool.num_free(partial)} free, {why}")

    def _evict(
        self,
        pages: int,
        *,
        slack: int = 0,
        incoming: KVEntry | None = None,
        with_descendants: bool = False,
        partial: bool = False,
    ) -> None:
        """Evict entries until `pages` pages are free or being freed, or no candidate is left.

        Args:
            pages: Pages required.
            slack: Pages to free beyond that.
            incoming: Evict only entries that the policy ranks below this one and that are not
                needed as soon (used by prefetch).
            with_descendants: Also evict entries that have unreferenced children in the prefix tree.
            partial: Evict from the partial-layer pool.
        """
        progress, enough = True, lambda: self._num_free(partial) >= pages + slack
        while progress and not enough():
            progress = False
            candidates = {e.id: e for e in self._evictable(partial)}
            incoming_by_id = {} if incoming is None else {incoming.id: incoming}
            for item in self._policy(map(self.hints.candidate, (candidates | incoming_by_id).values())):
                if enough() or item in incoming_by_id:
                    break
                if item in self._entries and (
                    incoming is None or not self.hints.needed_no_later_than(candidates[item], incoming)
                ):
                    progress |= self._evict_one(candidates[item], with_descendants)

    def _evict_one(self, entry: KVEntry, with_descendants: bool) -> bool:
        """Offload an entry or free its pages; return whether either was possible."""
        to = "dropped"
        if entry.tier_copies:
            to = next(iter(entry.tier_copies))
        elif entry.computed_layers is None and (entry.owners or not self.hints.candidate(entry).ephemeral):
            # Not worth a copy: ephemeral entries without owners, and partial-layer ones (cheap to recompute).
            tier = self._pick_tier(entry)
            if tier is not None:
                self.offload_manager.offload(entry, tier)
                return True
            if any(self.offload_manager.tokens_being_freed(item) for item in self.offload_manager.tiers):
                return False
        needed = entry.num_tree_children and not (with_descendants and self._subtree_unused(entry))
        if to == "dropped" and (needed or (entry.owners and not entry.can_recompute)):
            return False
        self._emit_evicted(entry, to)
        self._free_pages(entry)
        if to == "dropped" and not entry.owners:
            self._delete(entry)
        return True

    def _emit_evicted(self, entry: KVEntry, destination: str) -> None:
        """Emit an `evicted` event with the destination and the policy inputs."""
        candidate, size = self.hints.candidate(entry), len(entry.tokens)
        why = {
            "policy": self._policy_name,
            "steps": candidate.steps_to_execution,
            "varying": candidate.ephemeral,
            "held": candidate.referenced,
        }
        self._events.emit("evicted", encoding=entry.id, tokens=size, to=destination, **why)

    # -- lower tiers --------------------------------------------------------------------------------------

    def _pick_tier(self, entry: KVEntry) -> Tier | None:
        """Reclaim space for a copy; return the highest tier that now fits it, or None."""
        for depth, tier in enumerate(self.offload_manager.tiers):
            if not self.offload_manager.accepts(tier, entry):
                continue
            if self._reclaim_tier(depth, entry):
                return tier
            if self.offload_manager.tokens_being_freed(tier):
                return None
        return None

    def _reclaim_tier(self, depth: int, incoming: KVEntry) -> bool:
        """Evict lower-ranked copies from tier `depth`; return whether `incoming` fits now."""
        tier, size = self.offload_manager.tiers[depth], len(incoming.tokens)
        if tier.fits(size):
            return True
        expected = (e for e in self._entries.values() if tier.name in e.tier_copies and e.transfer is None)
        candidates = {e.id: e for e in expected if e.is_complete or not e.in_use}  # requests wait for the rest
        for item in self._policy(map(self.hints.candidate, (candidates | {incoming.id: incoming}).values())):
            if item == incoming.id or tier.fits(size) or self.offload_manager.tokens_being_freed(tier) >= size:
                break
            self._evict_from_tier(depth, candidates[item])
        return tier.fits(size)

    def _evict_from_tier(self, depth: int, entry: KVEntry) -> None:
        """Free a tier's copy, or demote it if it is the only one and a lower tier has space."""
        tier, below = self.offload_manager.tiers[depth], self.offload_manager.tiers[depth + 1 :]
        elsewhere = entry.is_complete or len(entry.tier_copies) > 1
        lower = None if elsewhere else next((t for t in below if self.offload_manager.accepts(t, entry)), None)
        if lower is not None and self._reclaim_tier(depth + 1, entry):
            self.offload_manager.demote(entry, tier, lower)
            return
        if not elsewhere and (entry.num_tree_children or (entry.owners and not entry.can_recompute)):
            return
        self.offload_manager.free(entry, tier, entry.tier_copies[tier.name])
        if not elsewhere:
            self._emit_evicted(entry, "dropped")
            if not entry.owners:
                self._delete(entry)

    def allocate_pages(self, entry: KVEntry) -> None:
        """Allocate device pages for an entry that has none.

        Raises:
            CacheFullError: if not enough pages can be freed.
            CacheBusyError: if pages become free only when a transfer completes.
        """
        assert not entry.pages
        partial_pool = entry.computed_layers is not None
        entry.pages = self._allocate(self.pool.num_pages_for(len(entry.tokens)), partial=partial_pool)
        entry.truncate_pages(len(entry.pages))

    def load(self, entry: KVEntry) -> None:
        """Allocate pages and start loading an entry from its nearest copy.

        Raises:
            CacheFullError: if not enough pages can be freed.
            CacheBusyError: if the entry is being offloaded, or pages become free only later.
        """
        if entry.transfer is not None:
            raise CacheBusyError(f"KV entry {entry.id} is being offloaded; retry after the transfer completes")
        self.allocate_pages(entry)
        self.offload_manager.load(entry)

    def prefetch(self, content_hash: bytes, max_loads: int) -> bool:
        """Start loading an offloaded entry if only entries needed later are evicted for it.

        Return whether a load was started; at most `max_loads` run at a time.
        """
        entry = self._by_hash.get(content_hash)
        if entry is None or entry.pages or not entry.tier_copies or entry.transfer is not None:
            return False
        if self.offload_manager.num_loads >= max_loads:
            return False
        pages = self.pool.num_pages_for(len(entry.tokens))
        self._evict(pages, incoming=entry)
        if self.pool.free_pages < pages:
            return False
        self._events.emit("prefetch", encoding=entry.id, tokens=len(entry.tokens))
        self.load(entry)
        return True

    def poll_transfers(self) -> list[KVEntry]:
        """Process completed transfers and expired pins; return entries whose load failed.

        Those have no pages now; the caller fails or recomputes the requests that need them.
        """
        failed = []
        for job in self.offload_manager.pop_finished():
            entry = job.entry
            if job.kind == "load" and job.transfer.error is None:
                entry.num_computed_tokens = entry.num_scheduled_tokens = len(entry.tokens)
            elif job.kind == "load":
                failed.append(entry)
                self._free_pages(entry)
            elif job.kind == "offload" and job.transfer.error is None and not entry.in_use:
                self._emit_evicted(entry, job.tier.name)
                self._free_pages(entry)
            if not entry.owners and not (entry.is_indexed and entry.has_data and not job.transfer.cancelled):
                self._delete(entry)
        self.pins.expire()
        return failed

    @property
    def has_pending(self) -> bool:
        """Return whether pages may become free without a step: by a transfer or an expiring pin."""
        return bool(self.offload_manager.jobs) or self.pins.next_expiry is not None

    def wait_for_space(self) -> bool:
        """Wait for the oldest transfer, or briefly for a pin to expire.

        Return False if there is neither.
        """
        if self.offload_manager.jobs:
            return self.offload_manager.wait()
        seconds_left = self.pins.next_expiry
        if seconds_left is None:
            return False
        self.sleep(min(POLL_SECONDS, seconds_left))
        return True

    # -- state --------------------------------------------------------------------------------------------

    @property
    def stats(self) -> dict[str, int]:
        """Entry and page counts of the device pool; see `stats`."""
        return invariants.stats(self._entries.values(), self.pool)

    def check(self) -> None:
        """Check all invariants: pages, references, index, pins, tier copies and prefix trees."""
        invariants.check(self._entries, self.pool)
        for key, e in self._by_hash.items():
            assert e.content_hash == key and e.id in self._entries
        self.pins.check()
        self.offload_manager.check(list(self._entries.values()))
        for tree in self._prefix_trees.values():
            tree.check()
