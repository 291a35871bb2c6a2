"""Fixed parts of prompts in KV entries (KVFlow §3.1).

An entry may hold more than the fixed part of a prompt: in prefix mode the varying rest, and the
fixed parts of several agents. `fixed_ends` of an entry has the keys of all fixed parts that go
through it, so the steps-to-execution of an entry are the minimum over the agents below it in the
prefix tree. Before entries are evicted, unused ones are cut where prompts diverge and where a
fixed part ends, so that every piece is evicted by its own priority.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..namespace import Namespace
from .entry import KVEntry, KVSlice
from .hashing import content_hash

if TYPE_CHECKING:
    from .manager import KVCacheManager
    from .prefix_tree import PrefixTree


_INHERITED = ("hit_count", "last_access", "agent_key", "cached_hidden_layers", "can_recompute", "is_indexed")


class FixedPartIndex:
    """Entries that hold a fixed part of a prompt, by its key."""

    def __init__(self) -> None:
        self._entries: dict[bytes, dict[KVEntry, None]] = {}

    def add(self, key: bytes, entry: KVEntry, end: int) -> None:
        """Add an entry that has a fixed part up to token `end`."""
        entry.fixed_ends.setdefault(end, set()).add(key)
        self._entries.setdefault(key, {})[entry] = None

    def add_prefix(self, key: bytes, path: Iterable[KVSlice]) -> None:
        """Add the slices in the prefix tree of a fixed part."""
        for entry, token_start, num_tokens, *_ in path:
            self.add(key, entry, token_start + num_tokens)

    def get(self, key: bytes) -> list[KVEntry]:
        """Return the entries that hold a fixed part, in token order."""
        return sorted(self._entries.get(key, ()), key=lambda entry: entry.base_position)

    def split(self, entry: KVEntry, index: int, tail: KVEntry) -> None:
        """Move the ends behind token `index` of an entry to its tail."""
        for end in [end for end in entry.fixed_ends if end > index]:
            for key in entry.fixed_ends.pop(end):
                self.add(key, entry, index)
                self.add(key, tail, end - index)

    def remove(self, entry: KVEntry) -> None:
        """Forget a deleted entry."""
        for keys in entry.fixed_ends.values():
            for key in keys:
                self._entries[key].pop(entry, None)
                if not self._entries[key]:
                    del self._entries[key]
        entry.fixed_ends = {}

    def check(self, entries: Iterable[KVEntry]) -> None:
        """Check that index and entries agree."""
        pairs = {(key, entry.id) for entry in entries for keys in entry.fixed_ends.values() for key in keys}
        assert pairs == {(key, entry.id) for key, some in self._entries.items() for entry in some}


def prefix_key(namespace: Namespace, tokens: Sequence[int]) -> bytes:
    """Return the key of a fixed part of a prefix-mode prompt."""
    return content_hash(replace(namespace, is_prompt=True), tokens, 0, ())


def split_unused(cache_manager: "KVCacheManager", entries: Iterable[KVEntry]) -> None:
    """Cut unused entries where prompts diverge and fixed parts end.

    Cuts of prefix-mode entries are rounded up to whole pages, so nothing is copied. Of a message of
    which only the first tokens are fixed, the rest is dropped.
    """
    for entry in entries:
        tree, page_size = entry.prefix_tree, entry.page_size
        if entry.owners:
            continue
        if tree is None:
            if entry.fixed_ends:
                _trim(cache_manager, entry)
            continue
        for end in sorted({*tree.branch_points(entry), *entry.fixed_ends}, reverse=True):  # `entry` keeps the head
            cut = -(-end // page_size) * page_size
            if tree.can_split(entry, cut):
                _split(cache_manager, tree, entry, cut)


def split_path(cache_manager: "KVCacheManager", path: Iterable[KVSlice], num_tokens: int) -> None:
    """Cut prefix-mode entries after what a prompt uses of them.

    Only if its own tokens do not fit. The first prompt ever would stay whole otherwise, since all others use its start.
    """
    pool = cache_manager.pool
    if pool.num_pages_for(num_tokens) <= pool.free_pages:
        return
    for entry, start, count, *_ in path:
        tree = entry.prefix_tree
        if tree is not None and (used_end := tree.used_end(entry)) is not None:
            _split_at(cache_manager, entry, start + count, used_end)


def split_used(cache_manager: "KVCacheManager") -> None:
    """Cut prefix-mode entries of which running requests use only the start."""
    for entry in list(cache_manager.resident.values()):
        tree = entry.prefix_tree
        if tree is None or not entry.in_use or (used_end := tree.used_end(entry)) is None:
            continue
        for end in sorted({*tree.branch_points(entry), *entry.fixed_ends}, reverse=True):
            _split_at(cache_manager, entry, end, used_end)


def _split_at(cache_manager: "KVCacheManager", entry: KVEntry, end: int, used_end: int) -> None:
    """Cut an entry at the page after token `end`, if unused there."""
    tree, cut = entry.prefix_tree, -(-end // entry.page_size) * entry.page_size
    if tree is None or used_end > cut or not entry.is_complete or entry.transfer is not None:
        return
    if tree.can_split(entry, cut):
        _split(cache_manager, tree, entry, cut)


def _split(cache_manager: "KVCacheManager", tree: "PrefixTree", entry: KVEntry, cut: int) -> None:
    """Move the tokens from `cut` on, in whole pages, to another entry."""
    for copy in list(entry.tier_copies.values()):
        cache_manager.offload_manager.free(entry, copy)
    num_pages = cut // entry.page_size
    tail = cache_manager.add_entry(
        entry.tokens[cut:],
        entry.base_position + cut,
        (*entry.context, KVSlice(entry, 0, cut, entry.base_position)),
        entry.pages[num_pages:],
        model=entry.model,
    )
    for name in _INHERITED:
        setattr(tail, name, getattr(entry, name))
    tree.split(entry, cut, tail)
    cache_manager.fixed_parts.split(entry, cut, tail)
    entry.tokens = entry.tokens[:cut]
    entry.set_pages(entry.pages[:num_pages])
    for part in (entry, tail):
        part.num_final_tokens = part.num_scheduled_tokens = part.num_computed_tokens = len(part.tokens)
    # Later prompts have used the head; of the tail, only what is above other entries.
    tail.last_access = max([entry.id, *(child.last_access for child in tree.descendants(tail))])


def _trim(cache_manager: "KVCacheManager", entry: KVEntry) -> None:
    """Replace a message by its longest fixed part, unless that is cached."""
    hints, parts = cache_manager.hints.steps_to_execution, cache_manager.fixed_parts
    ends = sorted(end for end, keys in entry.fixed_ends.items() if any(hints.get(key) is not None for key in keys))
    if not ends or entry.content_hash is None or hints.get(entry.content_hash) is not None:
        return
    end = ends[-1]
    (key,) = entry.fixed_ends[end]  # equal tokens over an equal context
    if cache_manager.lookup(key) is not None:
        parts.remove(entry)  # the rest of the message varies
        return
    num_pages = cache_manager.pool.num_pages_for(end)
    head = cache_manager.add_entry(
        entry.tokens[:end], entry.base_position, entry.context, entry.pages[:num_pages], model=entry.model
    )
    for name in _INHERITED:
        setattr(head, name, getattr(entry, name))
    head.num_scheduled_tokens = head.num_computed_tokens = end
    entry.set_pages(entry.pages[num_pages:])
    cache_manager.register(head, key)
    for shorter in ends[:-1]:
        for other in entry.fixed_ends[shorter]:
            parts.add(other, head, shorter)
    cache_manager.shared_headers.replace(entry, head)
    cache_manager.discard(entry)
