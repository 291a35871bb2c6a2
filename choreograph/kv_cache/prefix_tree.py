"""Prefix tree of prompts, and their longest cached prefix."""

from collections import Counter
from collections.abc import Iterable, Iterator

from ..namespace import Namespace
from .entry import KVEntry, KVSlice

_Node = Namespace | KVEntry  # a namespace is the root of its prompts


class PrefixTree:
    """Prefix tree of every namespace; matches a prompt's longest cached prefix.

    Baseline of Prompt Choreography (§3.1): text is concatenated and the longest cached prefix is
    reused. An entry is attached to another at the token where they diverge, and split there once no
    request uses it (`split`). Entries may still be growing: only final or computed tokens are
    matched.
    """

    def __init__(self) -> None:
        # parent -> index in the parent -> first token -> (child, index of that token in the child)
        self._children: dict[_Node, dict[int, dict[int, tuple[KVEntry, int]]]] = {}
        self._attached_at: dict[KVEntry, tuple[_Node, int, int]] = {}  # child -> parent, index, first token

    def __contains__(self, entry: KVEntry) -> bool:
        return entry in self._attached_at

    def __len__(self) -> int:
        return len(self._attached_at)

    def match(self, namespace: Namespace, tokens: list[int], limit: int | None = None) -> list[KVSlice]:
        """Return slices of the longest cached prefix, up to `limit` tokens.

        Uses an explicit stack: the tree is as deep as a conversation is long.
        """
        limit = len(tokens) if limit is None else limit
        best: list[KVSlice] = []
        paths = [best]  # slices from the root to a position in the tree
        while paths:
            path = paths.pop()
            parent, index, num_matched = _end_of(namespace, path)
            if num_matched > _end_of(namespace, best)[2]:  # the first of equally long paths wins
                best = path
            children = self._children.get(parent, {}).get(index, {})
            if num_matched >= limit or tokens[num_matched] not in children:
                continue
            entry, first = children[tokens[num_matched]]
            num_ready = max(entry.num_final_tokens, entry.num_computed_tokens)
            end = first + common_prefix_len(entry.tokens, tokens, first, num_ready, num_matched, limit)
            # A path leaves the entry where the match ends or, since the entry may have grown past
            # children attached at its former end, at any index with children before it.
            ends = [end, *(i for i in self._children.get(entry, {}) if first < i < end)] if end > first else []
            paths += [[*path, KVSlice(entry, first, i - first, num_matched)] for i in reversed(ends)]
        return best

    def insert(self, namespace: Namespace, entry: KVEntry, prefix: list[int]) -> bool:
        """Attach an entry after `prefix`; return False if already covered."""
        tokens = prefix + entry.tokens
        parent, index, num_matched = _end_of(namespace, self.match(namespace, tokens))
        if not len(prefix) <= num_matched < len(tokens) or entry in self._attached_at:
            return False
        first_token = tokens[num_matched]
        siblings = self._children.setdefault(parent, {}).setdefault(index, {})
        if first_token in siblings:
            return False
        siblings[first_token] = (entry, num_matched - entry.base_position)
        self._attached_at[entry] = (parent, index, first_token)
        return True

    def has_children(self, entry: KVEntry) -> bool:
        """Return whether entries are attached to this one."""
        return entry in self._children

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
        if moved:
            self._children[tail] = moved
        for i, siblings in moved.items():
            for token, (child, _) in siblings.items():
                self._attached_at[child] = (tail, i, token)
        for descendant in self.descendants(tail):
            descendant.context = tuple(
                part for kv_slice in descendant.context for part in _split_slice(kv_slice, entry, index, tail)
            )

    def remove(self, entry: KVEntry) -> None:
        """Detach an entry without children; no-op if it is not attached."""
        if entry not in self._attached_at:
            return
        assert entry not in self._children, "this KV entry has children in the prefix tree"
        parent, index, first_token = self._attached_at.pop(entry)
        siblings_by_index = self._children[parent]
        del siblings_by_index[index][first_token]
        if not siblings_by_index[index]:
            del siblings_by_index[index]
        if not siblings_by_index:
            del self._children[parent]

    def check(self) -> None:
        """Check that entries are attached once, and to attached ones."""
        groups = [siblings for by_index in self._children.values() for siblings in by_index.values()]
        entries = [entry for siblings in groups for entry, _ in siblings.values()]
        assert Counter(entries) == Counter(self._attached_at.keys()), "a KV entry is attached twice or not at all"
        parents = {parent for parent, _, _ in self._attached_at.values()}
        assert parents == self._children.keys(), "a KV entry is attached to another place"
        assert {p for p in parents if isinstance(p, KVEntry)} <= self._attached_at.keys(), (
            "a removed entry has children"
        )


def _end_of(namespace: Namespace, path: list[KVSlice]) -> tuple[_Node, int, int]:
    """Return a path's last node, end index in it, and token count."""
    if not path:
        return namespace, 0, 0
    entry, token_start, num_tokens, position, *_ = path[-1]
    return entry, token_start + num_tokens, position + num_tokens


def _split_slice(kv_slice: KVSlice, entry: KVEntry, index: int, tail: KVEntry) -> Iterator[KVSlice]:
    """Yield a slice, with `tail` in place of `entry` from `index` on."""
    _, start, count, position, *_ = kv_slice
    if kv_slice.entry is not entry or start + count <= index:
        yield kv_slice
        return
    num_before = max(0, index - start)
    if num_before:
        yield kv_slice._replace(num_tokens=num_before)
    yield kv_slice._replace(
        entry=tail,
        token_start=start + num_before - index,
        num_tokens=count - num_before,
        position=position + num_before,
    )


def common_prefix_len(
    a: list[int], b: list[int], start_a: int = 0, end_a: int | None = None, start_b: int = 0, end_b: int | None = None
) -> int:
    """Return the length of the common start of a[start_a:end_a] and b[start_b:end_b]."""
    end_a, end_b = len(a) if end_a is None else end_a, len(b) if end_b is None else end_b
    max_len = max(0, min(end_a - start_a, end_b - start_b))
    if a[start_a : start_a + max_len] == b[start_b : start_b + max_len]:
        return max_len
    return next(i for i in range(max_len) if a[start_a + i] != b[start_b + i])
