"""Entries of the KV cache: references, lookup, deletion, and headers that entries share."""

import itertools
from collections.abc import Callable, Iterable, Sequence

from ..namespace import Namespace
from ..outputs import BASE_MODEL
from .entry import ALL_LAYERS, EntryLayers, KVEntry, KVSlice, TokenRuns
from .hints import FixedPartIndex, HintRegistry
from .pins import PinTable
from .pool import KVPool
from .prefix_tree import PrefixTree
from .shared_headers import SharedHeaderIndex
from .tiers import OffloadManager

Owner = tuple[str, object]  # reference to an entry, as (kind, key)


class EntryTable:
    """All KV entries and the indexes that find them.

    An entry exists while it has an owner, or while it has data and can be looked up.

    Args:
        pool: Pages on the device.
        offload_manager: Copies of entries on lower tiers.
        clock: Monotonic seconds, for the expiry of pins.
    """

    def __init__(self, pool: KVPool, offload_manager: OffloadManager, clock: Callable[[], float]) -> None:
        self.pool = pool
        self.offload_manager = offload_manager
        self.entries: dict[int, KVEntry] = {}
        self.resident: dict[int, KVEntry] = {}  # those with device pages, which evictions search
        self.prefix_tree = PrefixTree()
        self.shared_headers = SharedHeaderIndex()
        self.fixed_parts = FixedPartIndex()
        self.hints = HintRegistry(self.fixed_parts)
        self.pins = PinTable(self.acquire, self.release, clock)
        self.num_usable_pages = 0  # pages that became free or evictable so far
        self._by_hash: dict[bytes, KVEntry] = {}
        self._clock = itertools.count(1)

    # -- lifetime -----------------------------------------------------------------------------------------

    def add_entry(
        self,
        tokens: list[int],
        base_position: int,
        context: tuple[KVSlice, ...],
        pages: list[int],
        *,
        model: str = BASE_MODEL,
        layers: EntryLayers = ALL_LAYERS,
        runs: TokenRuns | None = None,
    ) -> KVEntry:
        """Create an entry without owners in allocated pages."""
        entry_id, page_size = next(self._clock), self.pool.page_size
        entry = KVEntry(entry_id, tokens, base_position, context, pages, page_size, model, layers, runs)
        entry.last_access, entry.num_final_tokens = entry_id, len(tokens)
        self.entries[entry.id] = entry
        if pages:
            self.resident[entry.id] = entry
        return entry

    def acquire(self, entry: KVEntry, owner: Owner) -> None:
        """Add an owner. A deleted entry is registered again, without pages."""
        if entry.id not in self.entries:
            self.entries[entry.id] = entry
            if entry.content_hash is not None:
                self.register(entry, entry.content_hash)
        entry.owners.add(owner)
        entry.hit_count += owner[0] != "plan"
        entry.last_access = next(self._clock)

    def release(self, entry: KVEntry, owner: Owner) -> None:
        """Remove an owner; delete an unowned entry that lookups cannot return.

        Idempotent.
        """
        if owner not in entry.owners:
            return
        entry.owners.discard(owner)
        entry.last_access = next(self._clock)
        if not entry.in_use:
            self.num_usable_pages += len(entry.pages)
        if not self._is_needed(entry):
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

    def truncate_pages(self, entry: KVEntry, count: int) -> None:
        """Free an entry's pages after the first `count`."""
        unused = entry.pages[count:]
        entry.set_pages(entry.pages[:count])
        if not count:
            self.resident.pop(entry.id, None)
        self.num_usable_pages += len(unused)
        self.pool.release(unused)

    def _free_pages(self, entry: KVEntry) -> None:
        self.truncate_pages(entry, 0)
        entry.num_computed_tokens = entry.num_scheduled_tokens = 0
        entry.shared_header = None

    def _is_needed(self, entry: KVEntry) -> bool:
        """Return whether an entry has an owner, or data that a lookup can return."""
        return bool(entry.owners) or (entry.has_data and (self._is_registered(entry) or entry in self.prefix_tree))

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

    # -- headers shared with other entries ----------------------------------------------------------------

    def share_header(
        self, entry: KVEntry, namespace: Namespace, owner: Owner, *, min_length: int, copy_now: bool
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

    def copy_headers(self, sharing: Sequence[tuple[KVEntry, Owner]]) -> None:
        """Copy shared headers into the entries' own slots after a step.

        Args:
            sharing: entries with a shared header, and the owner that references the other entry.
        """
        headers = [(entry.shared_header, entry, owner) for entry, owner in sharing if entry.shared_header is not None]
        self._copy_tokens((header, entry) for header, entry, _ in headers)
        for header, entry, owner in headers:
            entry.shared_header = None
            self.release(header.entry, owner)

    def _copy_tokens(self, copies: Iterable[tuple[KVSlice, KVEntry]]) -> None:
        """Copy each slice to the start of another entry."""
        slots: list[int] = []
        target_slots: list[int] = []
        for kv_slice, target in copies:
            slots += map(kv_slice.entry.slot, range(kv_slice.num_tokens))
            target_slots += map(target.slot, range(kv_slice.num_tokens))
        self.pool.copy_slots(slots, target_slots)

    # -- numbers and invariants ---------------------------------------------------------------------------

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
        """Check all invariants: pages, references, indexes, pins, tier copies and transfers."""
        entries = list(self.entries.values())
        self.pool.check()
        pages = [page for entry in entries for page in entry.pages]
        assert len(pages) == len(set(pages)), "two KV entries share a page"
        for partial in (False, True):
            num_used = sum((page > self.pool.pages) == partial for page in pages)
            assert num_used + self.pool.num_free(partial) == self.pool.num_pages(partial), "pages are lost"
        for e in entries:
            assert e.transfer or self._is_needed(e), f"KV entry {e.id} is leaked"
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
