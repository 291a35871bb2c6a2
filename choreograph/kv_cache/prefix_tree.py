"""Sharing of cached prefixes: the prefix tree, and equal headers of decodes over the same context."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..outputs import Usage
from .entry import KVEntry, KVSlice
from .hashing import content_hash

if TYPE_CHECKING:
    from ..engine.request import Request
    from .manager import KVCacheManager

MIN_SHARED_TOKENS = 4  # shorter headers are cheaper to compute than to copy


class _Node(NamedTuple):
    """Tree position after token `offset` - 1 of an entry; the root is (None, 0)."""

    parent: KVEntry | None
    offset: int

    @property
    def key(self) -> tuple[int | None, int]:
        return (self.parent.id if self.parent else None, self.offset)


class _Path(NamedTuple):
    """Path from the root to a node, as a linked list."""

    node: _Node
    num_matched: int  # tokens matched up to the node
    last_slice: KVSlice | None  # None at the root
    previous: "_Path | None"  # None at the root


class PrefixTree:
    """Prefix tree of the KV entries of one cache salt: finds the longest cached prefix of a prompt.

    The baseline of Prompt Choreography (§3.1): text is concatenated and the longest cached prefix is
    reused. An entry is attached to another at the token where they diverge, so entries are never
    split. Entries may still be growing: only final or computed tokens are matched.
    """

    def __init__(self, cache_salt: str = "") -> None:
        self.cache_salt = cache_salt
        # children by node and first token, each with the index of that token in the child
        self._children: dict[tuple[int | None, int], dict[int, tuple[KVEntry, int]]] = {}
        self._attached_at: dict[int, tuple[_Node, int]] = {}  # node and first token by entry ID
        self._offsets: dict[int, dict[int, int]] = {}  # entry ID -> offset -> number of children

    @property
    def is_empty(self) -> bool:
        return not self._attached_at

    def match(self, tokens: list[int], limit: int | None = None) -> list[KVSlice]:
        """Return slices that cover the longest cached prefix of `tokens`, up to `limit` tokens."""
        path: _Path | None = self._walk(tokens, len(tokens) if limit is None else limit)
        slices = []
        while path is not None and path.last_slice is not None:
            slices.append(path.last_slice)
            path = path.previous
        return slices[::-1]

    def _walk(self, tokens: list[int], limit: int) -> _Path:
        """Return the path of the longest match; the first of equally long ones.

        Uses an explicit stack: the tree is as deep as a conversation is long.
        """
        best = _Path(_Node(None, 0), 0, None, None)
        stack = [best]
        while stack:
            path = stack.pop()
            start = path.num_matched
            if start > best.num_matched:
                best = path
            children = self._children.get(path.node.key, {}) if start < limit else {}
            if start >= limit or tokens[start] not in children:
                continue
            entry, first = children[tokens[start]]
            num_ready = max(entry.num_final_tokens, entry.num_computed_tokens)
            end = first + _common_prefix_len(entry.tokens, first, num_ready, tokens, start, limit)
            # A path leaves the entry where the match ends or, since the entry may have grown past
            # children attached at its former end, at any offset with children before it.
            offsets = [end, *(offset for offset in self._offsets.get(entry.id, {}) if first < offset < end)]
            for offset in reversed(offsets if end > first else []):
                kv_slice = KVSlice(entry, first, offset - first, start)
                stack.append(_Path(_Node(entry, offset), start + offset - first, kv_slice, path))
        return best

    def insert(self, entry: KVEntry, prefix: list[int]) -> bool:
        """Attach an entry that continues `prefix`; return False if the tree already covers it."""
        tokens = prefix + entry.tokens
        path = self._walk(tokens, len(tokens))
        if not len(prefix) <= path.num_matched < len(tokens) or entry.id in self._attached_at:
            return False
        first_token, (parent, offset) = tokens[path.num_matched], path.node
        siblings = self._children.setdefault(path.node.key, {})
        if first_token in siblings:
            return False
        siblings[first_token] = (entry, path.num_matched - entry.base_position)
        self._attached_at[entry.id] = (path.node, first_token)
        entry.prefix_tree = self
        if parent is not None:
            parent.num_tree_children += 1
            offsets = self._offsets.setdefault(parent.id, {})
            offsets[offset] = offsets.get(offset, 0) + 1
        return True

    def descendants(self, entry: KVEntry) -> Iterator[KVEntry]:
        """Yield all entries below an entry, parents before children."""
        ancestors = [entry]
        for ancestor in ancestors:  # grows during iteration
            for offset in self._offsets.get(ancestor.id, {}):
                children = [child for child, _ in self._children[ancestor.id, offset].values()]
                ancestors += children
                yield from children

    def remove(self, entry: KVEntry) -> None:
        """Detach an entry without children; no-op if it is not attached."""
        if entry.id not in self._attached_at:
            return
        assert not entry.num_tree_children, "this KV entry has children in the prefix tree"
        node, first_token = self._attached_at.pop(entry.id)
        del self._children[node.key][first_token]
        if not self._children[node.key]:
            del self._children[node.key]
        entry.prefix_tree = None
        if node.parent is not None:
            node.parent.num_tree_children -= 1
            offsets = self._offsets[node.parent.id]
            offsets[node.offset] -= 1
            if not offsets[node.offset]:
                del offsets[node.offset]
            if not offsets:
                del self._offsets[node.parent.id]

    def check(self) -> None:
        """Check that every entry is attached once and that child counts are right."""
        entries = [entry for siblings in self._children.values() for entry, _ in siblings.values()]
        assert sorted(e.id for e in entries) == sorted(self._attached_at), "a KV entry is attached twice or not at all"
        num_children = Counter(node.parent.id for node, _ in self._attached_at.values() if node.parent is not None)
        assert num_children.keys() <= self._attached_at.keys(), "a KV entry is attached to a removed one"
        assert all(e.num_tree_children == num_children[e.id] for e in entries), "wrong child count"


def _common_prefix_len(
    cached_tokens: list[int], start: int, end: int, tokens: list[int], offset: int, limit: int
) -> int:
    """Return the common prefix length of cached_tokens[start:end] and tokens[offset:limit]."""
    max_len = max(0, min(end - start, limit - offset))
    if cached_tokens[start : start + max_len] == tokens[offset : offset + max_len]:
        return max_len
    return next(i for i in range(max_len) if cached_tokens[start + i] != tokens[offset + i])


class SharedHeaderIndex:
    """Index of decodes by context and base position.

    Branches, voters and agents often start with equal headers over equal parents. The header is
    computed for the first of them; the others read its tokens and copy them.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[bytes, int], dict[int, KVEntry]] = {}
        self._keys: dict[int, tuple[bytes, int]] = {}  # by entry ID

    def lookup(
        self, cache_salt: str, tokens: list[int], base_position: int, context: Iterable[KVSlice]
    ) -> KVSlice | None:
        """Return the longest proper prefix of `tokens` that is computed by the next step."""
        best = None
        for other in self._entries.get(self._key(cache_salt, base_position, context), {}).values():
            if other.is_aliased or not other.pages:
                continue
            num_ready = other.num_computed_tokens or other.num_final_tokens
            count = _common_prefix_len(other.tokens, 0, num_ready, tokens, 0, len(tokens) - 1)
            if count >= MIN_SHARED_TOKENS and (best is None or count > best.num_tokens):
                best = KVSlice(other, 0, count, base_position)
            if count == len(tokens) - 1:
                break  # no longer match is possible
        return best

    def add(self, cache_salt: str, entry: KVEntry) -> None:
        key = self._key(cache_salt, entry.base_position, entry.context)
        self._entries.setdefault(key, {})[entry.id] = entry
        self._keys[entry.id] = key

    def remove(self, entry: KVEntry) -> None:
        key = self._keys.pop(entry.id, None)
        if key is not None:
            del self._entries[key][entry.id]
            if not self._entries[key]:
                del self._entries[key]

    @staticmethod
    def _key(cache_salt: str, base_position: int, context: Iterable[KVSlice]) -> tuple[bytes, int]:
        """Return the index key, with the absolute base position since keys are stored rotated."""
        return content_hash(cache_salt, (), base_position, context), base_position


def reuse_header(cache_manager: "KVCacheManager", request: "Request") -> None:
    """Skip the header tokens of a new decode that another decode over the same context has."""
    entry = request.kv
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
    slots: list[int] = []
    target_slots: list[int] = []
    released = []
    for request in requests:
        if request.shared_header is not None:
            source, tokens = request.shared_header.entry, range(request.shared_header.num_tokens)
            slots += [source.slot(token) for token in tokens]
            target_slots += [request.kv.slot(token) for token in tokens]
            released.append(request)
    if slots:
        cache_manager.pool.copy_slots(slots, target_slots)
    for request in released:
        assert request.shared_header is not None
        cache_manager.release(request.shared_header.entry, request.request_owner)
        request.shared_header, request.context, request.kv.is_aliased = None, request.kv.context, False
