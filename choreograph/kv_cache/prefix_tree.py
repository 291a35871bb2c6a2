"""Prefix tree, and reuse of equal headers over the same context."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from ..namespace import Namespace
from .entry import KVEntry, KVSlice
from .hashing import content_hash

if TYPE_CHECKING:
    from ..request.request import Request
    from .manager import KVCacheManager

MIN_SHARED_TOKENS = 4  # shorter headers are cheaper to compute than to copy
MAX_COMPARED = 64  # messages with the same first tokens that a new one is compared with, the latest ones
MIN_SHARED_PREFILL_TOKENS = 16  # likewise for prefills: sharing may delay their readers by a step


class PrefixTree:
    """Prefix tree of one namespace; matches a prompt's longest cached prefix.

    Baseline of Prompt Choreography (§3.1): text is concatenated and the longest cached prefix is
    reused. An entry is attached to another at the token where they diverge, and split there once no
    request uses it (`split`). Entries may still be growing: only final or computed tokens are
    matched.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        # parent -> index in the parent -> first token -> (child, index of that token in the child)
        self._children: dict[KVEntry | None, dict[int, dict[int, tuple[KVEntry, int]]]] = {}
        self._attached_at: dict[KVEntry, tuple[KVEntry | None, int, int]] = {}  # child -> parent, index, first token

    @property
    def is_empty(self) -> bool:
        return not self._attached_at

    def match(self, tokens: list[int], limit: int | None = None) -> list[KVSlice]:
        """Return slices of the longest cached prefix, up to `limit` tokens.

        Uses an explicit stack: the tree is as deep as a conversation is long.
        """
        limit = len(tokens) if limit is None else limit
        best: list[KVSlice] = []
        paths = [best]  # slices from the root to a position in the tree
        while paths:
            path = paths.pop()
            parent, index, num_matched = _end_of(path)
            if num_matched > _end_of(best)[2]:  # the first of equally long paths wins
                best = path
            children = self._children.get(parent, {}).get(index, {})
            if num_matched >= limit or tokens[num_matched] not in children:
                continue
            entry, first = children[tokens[num_matched]]
            num_ready = max(entry.num_final_tokens, entry.num_computed_tokens)
            end = first + _common_prefix_len(entry.tokens, first, num_ready, tokens, num_matched, limit)
            # A path leaves the entry where the match ends or, since the entry may have grown past
            # children attached at its former end, at any index with children before it.
            ends = [end, *(i for i in self._children.get(entry, {}) if first < i < end)] if end > first else []
            paths += [[*path, KVSlice(entry, first, i - first, num_matched)] for i in reversed(ends)]
        return best

    def insert(self, entry: KVEntry, prefix: list[int]) -> bool:
        """Attach an entry after `prefix`; return False if already covered."""
        tokens = prefix + entry.tokens
        parent, index, num_matched = _end_of(self.match(tokens))
        if not len(prefix) <= num_matched < len(tokens) or entry in self._attached_at:
            return False
        first_token = tokens[num_matched]
        siblings = self._children.setdefault(parent, {}).setdefault(index, {})
        if first_token in siblings:
            return False
        siblings[first_token] = (entry, num_matched - entry.base_position)
        self._attached_at[entry] = (parent, index, first_token)
        entry.prefix_tree = self
        if parent is not None:
            parent.num_tree_children += 1
        return True

    def descendants(self, entry: KVEntry) -> Iterator[KVEntry]:
        """Yield all entries below an entry, parents before children."""
        ancestors = [entry]
        for ancestor in ancestors:  # grows during iteration
            for siblings in self._children.get(ancestor, {}).values():
                children = [child for child, _ in siblings.values()]
                ancestors += children
                yield from children

    def used_end(self, entry: KVEntry) -> int | None:
        """Return the token at which all owners of an entry leave it.

        None if some owner is no request whose own entry is below: it may use all tokens.
        """
        others, end = set(entry.owners), 0
        for index, siblings in self._children.get(entry, {}).items() if others else ():
            for child, _ in siblings.values():
                for below in (child, *self.descendants(child)):
                    if not entry.owners.isdisjoint(below.owners):
                        others -= below.owners
                        end = max(end, index)
        return None if others else end

    def branch_points(self, entry: KVEntry) -> Iterable[int]:
        """Return the tokens of an entry at which others are attached."""
        return self._children.get(entry, ())

    def can_split(self, entry: KVEntry, index: int) -> bool:
        """Return whether `split` can cut an entry at token `index`."""
        first = self._first_token(entry)
        if not first < index < len(entry.tokens):
            return False
        return entry.tokens[index] not in self._children.get(entry, {}).get(index, {})

    def _first_token(self, entry: KVEntry) -> int:
        """Return an entry's first token that its parent lacks."""
        parent, index, token = self._attached_at[entry]
        return self._children[parent][index][token][1]

    def split(self, entry: KVEntry, index: int, tail: KVEntry) -> None:
        """Attach `tail`, the tokens of `entry` from `index` on, with their children.

        Contexts that refer to these tokens are rewritten. No request may use them.
        """
        first_token = tail.tokens[0]
        by_index = self._children.setdefault(entry, {})
        moved = {i - index: by_index.pop(i) for i in [i for i in by_index if i > index]}
        by_index.setdefault(index, {})[first_token] = (tail, 0)
        self._attached_at[tail] = (entry, index, first_token)
        tail.prefix_tree = self
        if moved:
            self._children[tail] = moved
        for i, siblings in moved.items():
            for token, (child, _) in siblings.items():
                self._attached_at[child] = (tail, i, token)
                tail.num_tree_children += 1
        entry.num_tree_children += 1 - tail.num_tree_children
        for descendant in self.descendants(tail):
            descendant.context = tuple(
                part for kv_slice in descendant.context for part in _split_slice(kv_slice, entry, index, tail)
            )

    def remove(self, entry: KVEntry) -> None:
        """Detach an entry without children; no-op if it is not attached."""
        if entry not in self._attached_at:
            return
        assert not entry.num_tree_children, "this KV entry has children in the prefix tree"
        parent, index, first_token = self._attached_at.pop(entry)
        siblings_by_index = self._children[parent]
        del siblings_by_index[index][first_token]
        if not siblings_by_index[index]:
            del siblings_by_index[index]
        if not siblings_by_index:
            del self._children[parent]
        entry.prefix_tree = None
        if parent is not None:
            parent.num_tree_children -= 1

    def check(self) -> None:
        """Check that entries are attached once and child counts are right."""
        groups = [siblings for by_index in self._children.values() for siblings in by_index.values()]
        entries = [entry for siblings in groups for entry, _ in siblings.values()]
        assert Counter(entries) == Counter(self._attached_at.keys()), "a KV entry is attached twice or not at all"
        num_children = Counter(parent for parent, _, _ in self._attached_at.values() if parent is not None)
        assert num_children.keys() <= self._attached_at.keys(), "a KV entry is attached to a removed one"
        assert all(entry.num_tree_children == num_children[entry] for entry in entries), "wrong child count"


def _end_of(path: list[KVSlice]) -> tuple[KVEntry | None, int, int]:
    """Return a path's last entry, end index in it, and token count."""
    if not path:
        return None, 0, 0
    entry, token_start, num_tokens, position, _ = path[-1]
    return entry, token_start + num_tokens, position + num_tokens


def _split_slice(kv_slice: KVSlice, entry: KVEntry, index: int, tail: KVEntry) -> Iterator[KVSlice]:
    """Yield a slice, with `tail` in place of `entry` from `index` on."""
    _, start, count, position, layers = kv_slice
    if kv_slice.entry is not entry or start + count <= index:
        yield kv_slice
        return
    num_before = max(0, index - start)
    if num_before:
        yield KVSlice(entry, start, num_before, position, layers)
    yield KVSlice(tail, start + num_before - index, count - num_before, position + num_before, layers)


def common_prefix_len(a: list[int], b: list[int]) -> int:
    """Return the length of the common start of two token lists."""
    return _common_prefix_len(a, 0, len(a), b, 0, len(b))


def _common_prefix_len(
    cached_tokens: list[int], start: int, end: int, tokens: list[int], offset: int, limit: int
) -> int:
    """Return the common prefix length of cached_tokens[start:end] and tokens[offset:limit]."""
    max_len = max(0, min(end - start, limit - offset))
    if cached_tokens[start : start + max_len] == tokens[offset : offset + max_len]:
        return max_len
    return next(i for i in range(max_len) if cached_tokens[start + i] != tokens[offset + i])


_HeaderKey = tuple[bytes, int, tuple[int, ...]]  # context, base position, first tokens


class SharedHeaderIndex:
    """Index of messages by context, base position and first tokens.

    Messages with equal parents often start with equal tokens (branches, voters, agents). The first
    one computes them; the others read its tokens and copy them.
    """

    def __init__(self) -> None:
        self._entries: dict[_HeaderKey, dict[KVEntry, None]] = {}
        self._keys: dict[KVEntry, _HeaderKey] = {}

    def add(self, namespace: Namespace, entry: KVEntry, min_length: int) -> KVSlice | None:
        """Index an entry; return the longest proper prefix in another entry.

        None if no prefix of `min_length` tokens was found. Its tokens are computed by the next step
        at the latest.
        """
        max_length = len(entry.tokens) - 1
        if max_length < min_length:
            return None
        position = entry.base_position  # keys are stored rotated to it
        first_tokens = tuple(entry.tokens[:min_length])
        key = self._keys[entry] = (content_hash(namespace, (), position, entry.context), position, first_tokens)
        best = None
        others = self._entries.setdefault(key, {})
        for other in islice(reversed(others), MAX_COMPARED):
            if other.is_aliased or not other.pages:
                continue
            num_ready = other.num_computed_tokens or other.num_final_tokens
            count = _common_prefix_len(other.tokens, 0, num_ready, entry.tokens, 0, max_length)
            if count >= min_length and (best is None or count >= best.num_tokens):  # of equal ones, the oldest
                best = KVSlice(other, 0, count, position)
                if count == max_length and other.num_computed_tokens >= count:
                    break  # none is better
        others[entry] = None
        return best

    def replace(self, entry: KVEntry, head: KVEntry) -> None:
        """Index `head`, the first tokens of an entry, in its place."""
        key = self._keys.get(entry)
        self.remove(entry)
        if key is not None and len(head.tokens) >= len(key[2]):
            self._keys[head] = key
            self._entries.setdefault(key, {})[head] = None

    def remove(self, entry: KVEntry) -> None:
        key = self._keys.pop(entry, None)
        if key is not None:
            del self._entries[key][entry]
            if not self._entries[key]:
                del self._entries[key]


def reuse_header(cache_manager: "KVCacheManager", request: "Request") -> None:
    """Skip first tokens that another message over the same context has."""
    entry = request.entry
    min_length = MIN_SHARED_TOKENS if request.is_decode else MIN_SHARED_PREFILL_TOKENS
    result = cache_manager.shared_headers.add(request.namespace, entry, min_length)
    if result is None:
        return
    source, num_tokens = result.entry, result.num_tokens
    entry.num_scheduled_tokens = entry.num_computed_tokens = num_tokens
    entry.cached_hidden_layers &= source.cached_hidden_layers
    usage = request.usage
    request.usage = replace(
        usage, cached_tokens=usage.cached_tokens + num_tokens, computed_tokens=usage.computed_tokens - num_tokens
    )
    if not request.is_decode and source.num_computed_tokens >= num_tokens:  # else the next step computes them
        _copy_tokens(cache_manager, [(result, entry)])
        return
    cache_manager.acquire(source, request.request_owner)
    request.shared_header, request.context = result, (*request.context, result)
    entry.is_aliased = True


def copy_headers(cache_manager: "KVCacheManager", requests: Iterable["Request"]) -> None:
    """Copy shared headers into the requests' own slots after a step."""
    _copy_tokens(cache_manager, [(r.shared_header, r.entry) for r in requests if r.shared_header is not None])
    for request in requests:
        assert request.shared_header is not None
        cache_manager.release(request.shared_header.entry, request.request_owner)
        request.shared_header, request.context, request.entry.is_aliased = None, request.entry.context, False


def _copy_tokens(cache_manager: "KVCacheManager", copies: Iterable[tuple[KVSlice, KVEntry]]) -> None:
    """Copy each slice to the start of another entry."""
    slots: list[int] = []
    target_slots: list[int] = []
    for kv_slice, target in copies:
        slots += map(kv_slice.entry.slot, range(kv_slice.num_tokens))
        target_slots += map(target.slot, range(kv_slice.num_tokens))
    cache_manager.pool.copy_slots(slots, target_slots)
