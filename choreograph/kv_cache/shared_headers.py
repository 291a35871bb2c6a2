"""Share the header tokens of decodes over the same context.

Branches, voters and agents often start with equal headers over equal parents. The header is computed
for the first of them; the others read its tokens and copy them.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..outputs import Usage
from .entry import KVEntry, KVSlice, common_prefix_len
from .hashing import content_hash

MIN_SHARED_TOKENS = 4  # tokens; fewer are cheaper to compute than to copy

if TYPE_CHECKING:
    from ..engine.request import Request
    from .manager import KVCacheManager


class SharedHeaderIndex:
    """Index of decodes by context and base position."""

    def __init__(self) -> None:
        self._entries: dict[tuple[bytes, int], dict[int, KVEntry]] = {}
        self._header_keys: dict[int, tuple[bytes, int]] = {}

    def lookup(
        self, cache_salt: str, tokens: list[int], base_position: int, context: Iterable[KVSlice]
    ) -> KVSlice | None:
        """Return the longest proper prefix of `tokens` that is computed by the next step."""
        best = None
        for other in self._entries.get(_header_key(cache_salt, base_position, context), {}).values():
            if other.is_aliased or not other.has_pages:
                continue
            num_ready = max(other.num_final_tokens if not other.num_computed_tokens else 0, other.num_computed_tokens)
            count = common_prefix_len(other.tokens, 0, num_ready, tokens, 0, len(tokens) - 1)
            if count >= MIN_SHARED_TOKENS and (best is None or count > best.num_tokens):
                best = KVSlice(other, 0, count, base_position)
            if count == len(tokens) - 1:
                break  # no longer match is possible
        return best

    def add(self, cache_salt: str, entry: KVEntry) -> None:
        key = _header_key(cache_salt, entry.base_position, entry.context)
        self._entries.setdefault(key, {})[entry.id] = entry
        self._header_keys[entry.id] = key

    def remove(self, entry: KVEntry) -> None:
        key = self._header_keys.pop(entry.id, None)
        if key is None:
            return
        del self._entries[key][entry.id]
        if not self._entries[key]:
            del self._entries[key]


def _header_key(cache_salt: str, base_position: int, context: Iterable[KVSlice]) -> tuple[bytes, int]:
    """Return the index key. Keys are stored rotated, so it includes the absolute base position."""
    return content_hash(cache_salt, (), base_position, context), base_position


def reuse_header(cache_manager: "KVCacheManager", request: "Request") -> None:
    """Skip the header tokens of a new decode that another decode over the same context has."""
    entry = request.entry
    result = cache_manager.shared_headers.lookup(request.cache_salt, request.prompt, entry.base_position, entry.context)
    cache_manager.shared_headers.add(request.cache_salt, entry)
    if result is None:
        return
    cache_manager.acquire(result.entry, request.request_owner)
    request.shared_header, request.context = result, (*request.context, result)
    entry.num_scheduled_tokens = entry.num_computed_tokens = result.num_tokens
    entry.is_aliased = True
    entry.cached_hidden_layers &= result.entry.cached_hidden_layers
    request.usage = Usage(
        request.usage.cached_tokens + result.num_tokens, request.usage.computed_tokens - result.num_tokens
    )


def copy_headers(cache_manager: "KVCacheManager", requests: Iterable["Request"]) -> None:
    """Copy shared headers into the requests' own slots after the step that computed them."""
    shared = [(req, req.shared_header) for req in requests if req.shared_header is not None]
    slots = [kv_slice.entry.slot(token) for _, kv_slice in shared for token in range(kv_slice.num_tokens)]
    cache_manager.pool.copy_slots(
        slots, [req.entry.slot(token) for req, kv_slice in shared for token in range(kv_slice.num_tokens)]
    )
    for req, kv_slice in shared:
        cache_manager.release(kv_slice.entry, req.request_owner)
        req.shared_header, req.context, req.entry.is_aliased = None, req.entry.context, False
