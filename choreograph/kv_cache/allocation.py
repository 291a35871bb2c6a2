"""Allocation of device pages to KV entries.

A growing entry gets a chunk at a time, next to its last page where that is free, so that it remains
few slot ranges. Chunks beyond the next token are taken from free pages only: they evict nothing.
"""

from typing import TYPE_CHECKING

from .entry import KVEntry
from .pool import KVPool

if TYPE_CHECKING:
    from .manager import KVCacheManager

MAX_CHUNK_TOKENS = 64  # tokens that an entry grows by at once
CHUNK_DIVISOR = 64  # of a small cache a chunk is at most 1/64


def allocate_pages(
    cache_manager: "KVCacheManager",
    num_pages: int,
    max_pages: int = 0,
    *,
    after: int | None = None,
    partial: bool = False,
) -> list[int]:
    """Allocate at least `num_pages` pages, evicting entries if needed.

    Args:
        max_pages: pages that the entry may need in the end; up to a chunk of them is allocated if free.
        after: last page of the entry that grows.
        partial: allocate in the partial-layer pool.

    Raises:
        CacheFullError: if not enough pages can be freed.
        CacheBusyError: if pages become free only when a transfer completes.
    """
    pool = cache_manager.pool
    room = max(0, max_pages - num_pages)
    if pool.num_free(partial) < num_pages:
        cache_manager.reclaim(num_pages, partial)
    elif room:
        num_pages += min(room, _chunk_pages(pool), pool.num_free(partial) - num_pages)
    return pool.allocate(num_pages, partial=partial, after=after, room=room)


def grow_entry(cache_manager: "KVCacheManager", entry: KVEntry, num_tokens: int, max_tokens: int = 0) -> None:
    """Allocate the pages that an entry lacks for `num_tokens` tokens.

    Raises the errors of `allocate_pages`; the entry is unchanged then. `max_tokens` is its final length.
    """
    pool, num_pages = cache_manager.pool, len(entry.pages)
    missing = pool.num_pages_for(num_tokens) - num_pages
    if missing > 0:
        max_pages, after = pool.num_pages_for(max_tokens) - num_pages, entry.pages[-1] if entry.pages else None
        pages = allocate_pages(cache_manager, missing, max_pages, after=after, partial=entry.is_partial)
        entry.set_pages(entry.pages + pages)
        cache_manager.resident[entry.id] = entry


def _chunk_pages(pool: KVPool) -> int:
    num_tokens = min(MAX_CHUNK_TOKENS, pool.pages * pool.page_size // CHUNK_DIVISOR)
    return max(1, num_tokens // pool.page_size)
