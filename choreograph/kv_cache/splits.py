"""Cuts of KV entries where prompts diverge and fixed parts end (KVFlow §3.1).

Before entries are evicted, unused ones are cut, so that every piece is evicted by its own priority.
"""

from collections.abc import Iterable

from .entry import KVEntry, KVSlice
from .entry_table import EntryTable


def split_unused(table: EntryTable, entries: Iterable[KVEntry]) -> None:
    """Cut unused entries where prompts diverge and fixed parts end.

    Cuts of prefix-mode entries are rounded up to whole pages, so nothing is copied. Of a message of
    which only the first tokens are fixed, the rest is dropped.
    """
    for entry in entries:
        if entry.owners:
            continue
        if entry in table.prefix_tree:
            for end in _ends(table, entry):
                _split_at(table, entry, end)
        elif table.fixed_parts.ends(entry):
            _trim(table, entry)


def split_path(table: EntryTable, path: Iterable[KVSlice], num_tokens: int) -> None:
    """Cut prefix-mode entries after what a prompt uses of them.

    Only if its own tokens do not fit. The first prompt ever would stay whole otherwise, since all others use its start.
    """
    pool = table.pool
    if pool.num_pages_for(num_tokens) <= pool.free_pages:
        return
    for entry, start, count, *_ in path:
        used_end = table.prefix_tree.used_end(entry)
        if used_end is not None:
            _split_at(table, entry, start + count, used_end)


def split_used(table: EntryTable) -> None:
    """Cut prefix-mode entries of which running requests use only the start."""
    for entry in list(table.resident.values()):
        if entry.in_use and entry in table.prefix_tree:
            used_end = table.prefix_tree.used_end(entry)
            if used_end is None:
                continue
            for end in _ends(table, entry):
                _split_at(table, entry, end, used_end)


def _ends(table: EntryTable, entry: KVEntry) -> list[int]:
    """Return the tokens where prompts leave an entry, the last one first: the entry keeps the head."""
    ends = {*table.prefix_tree.branch_points(entry), *table.fixed_parts.ends(entry)}
    return sorted(ends, reverse=True)


def _split_at(table: EntryTable, entry: KVEntry, end: int, used_end: int = 0) -> None:
    """Move the tokens from the page after token `end` on to another entry, if unused there."""
    cut = -(-end // entry.page_size) * entry.page_size
    tree, is_idle = table.prefix_tree, entry.is_complete and entry.transfer is None
    if used_end > cut or not is_idle or not tree.can_split(entry, cut):
        return
    for copy in list(entry.tier_copies.values()):
        table.offload_manager.free(entry, copy)
    num_pages = cut // entry.page_size
    tail_context = (*entry.context, KVSlice(entry, 0, cut, entry.base_position))
    tail = _add_part(table, entry, entry.tokens[cut:], cut, tail_context, entry.pages[num_pages:])
    tree.split(entry, cut, tail)
    table.fixed_parts.split(entry, cut, tail)
    entry.tokens = entry.tokens[:cut]
    entry.set_pages(entry.pages[:num_pages])
    entry.num_final_tokens = entry.num_scheduled_tokens = entry.num_computed_tokens = cut
    # Later prompts have used the head; of the tail, only what is above other entries.
    tail.last_access = max([entry.id, *(child.last_access for child in tree.descendants(tail))])


def _add_part(
    table: EntryTable,
    entry: KVEntry,
    tokens: list[int],
    offset: int,
    context: tuple[KVSlice, ...],
    pages: list[int],
) -> KVEntry:
    """Add a complete entry with some of the tokens and pages of another."""
    position = entry.base_position + offset
    part = table.add_entry(tokens, position, context, pages, model=entry.model, layers=entry.layers)
    part.num_scheduled_tokens = part.num_computed_tokens = len(tokens)
    part.hit_count, part.last_access = entry.hit_count, entry.last_access
    part.storage.can_recompute = entry.storage.can_recompute
    table.hints.set_agent(part, table.hints.agent(entry))
    return part


def _trim(table: EntryTable, entry: KVEntry) -> None:
    """Replace a message by its longest fixed part, unless that is cached."""
    hints, parts = table.hints.steps_to_execution, table.fixed_parts
    fixed_ends = parts.ends(entry)
    ends = sorted(end for end, keys in fixed_ends.items() if any(hints.get(key) is not None for key in keys))
    if not ends or entry.content_hash is None or hints.get(entry.content_hash) is not None:
        return
    end = ends[-1]
    (key,) = fixed_ends[end]  # equal tokens over an equal context
    if table.lookup(key) is not None:
        parts.remove(entry)  # the rest of the message varies
        return
    num_pages = table.pool.num_pages_for(end)
    head = _add_part(table, entry, entry.tokens[:end], 0, entry.context, entry.pages[:num_pages])
    entry.set_pages(entry.pages[num_pages:])
    table.register(head, key)
    for shorter in ends[:-1]:
        for other in fixed_ends[shorter]:
            parts.add(other, head, shorter)
    table.shared_headers.replace(entry, head)
    table.discard(entry)
