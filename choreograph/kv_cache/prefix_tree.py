"""Prefix tree of KV entries: finds the longest cached prefix of a prompt.

The baseline of Prompt Choreography (§3.1): text is concatenated and the longest cached prefix is
reused. An entry is attached to another at the token where they diverge, so entries are never split.
"""

from collections.abc import Iterator
from typing import NamedTuple

from .entry import KVEntry, KVSlice, common_prefix_len


class _Node(NamedTuple):
    """Tree position after token `offset` - 1 of an entry; the root is (None, 0)."""

    parent: KVEntry | None
    offset: int


class _Path(NamedTuple):
    """Path from the walk's start to a node, as a linked list."""

    node: _Node
    num_matched: int  # tokens matched up to the node
    last_slice: KVSlice | None  # None for the first element
    previous: "_Path | None"

    @property
    def slices(self) -> list[KVSlice]:
        result, current = [], self
        while current.last_slice is not None and current.previous is not None:
            result.append(current.last_slice)
            current = current.previous
        return result[::-1]


class PrefixTree:
    """Prefix tree of one cache salt.

    Entries may still be growing: only final or computed tokens are matched.
    """

    def __init__(self, cache_salt: str = "") -> None:
        self.cache_salt = cache_salt
        self._children: dict[tuple[int | None, int], dict[int, tuple[KVEntry, int]]] = {}
        self._attached_at: dict[int, tuple[_Node, int]] = {}
        self._offsets: dict[int, dict[int, int]] = {}  # entry ID -> offset -> number of children

    @property
    def is_empty(self) -> bool:
        return not self._attached_at

    def match(self, tokens: list[int], limit: int | None = None) -> list[KVSlice]:
        """Return slices that cover the longest cached prefix of `tokens`, up to `limit` tokens."""
        return self._walk(_Node(None, 0), 0, tokens, len(tokens) if limit is None else limit)[0]

    def _walk(self, node: _Node, num_matched: int, tokens: list[int], limit: int) -> tuple[list[KVSlice], _Node, int]:
        """Follow the longest match from a node: (slices, end node, tokens matched).

        Uses an explicit stack: the tree is as deep as a conversation is long.
        """
        best = _Path(node, num_matched, None, None)
        paths = [best]
        while paths:
            current = paths.pop()
            if current.num_matched > best.num_matched:
                best = current
            paths += reversed(self._extend(current, tokens, limit))  # the first of equally long paths wins
        return best.slices, best.node, best.num_matched

    def _extend(self, path: "_Path", tokens: list[int], limit: int) -> list["_Path"]:
        """Return the paths that extend `path` by one entry."""
        at = path.num_matched
        if at >= limit:
            return []
        entry, first = self._children.get(self._node_key(path.node), {}).get(tokens[at], (None, 0))
        if entry is None:
            return []
        count = common_prefix_len(
            entry.tokens, first, max(entry.num_final_tokens, entry.num_computed_tokens), tokens, at, limit
        )
        return [
            _Path(_Node(entry, offset), at + offset - first, KVSlice(entry, first, offset - first, at), path)
            for offset in self._branch_offsets(entry, first, count)
        ]

    def _branch_offsets(self, entry: KVEntry, token_start: int, num_tokens: int) -> list[int]:
        """Return the offsets at which a path may leave an entry.

        These are the end of the match and, since the entry may have grown past children attached at
        its former end, every offset with children before it.
        """
        if not num_tokens:
            return []
        last = token_start + num_tokens
        attached = self._offsets.get(entry.id, {})
        return [last, *(offset for offset in attached if token_start < offset < last)]

    def insert(self, entry: KVEntry, prefix: list[int]) -> bool:
        """Attach an entry that continues `prefix`; return False if the tree already covers it."""
        tokens = prefix + entry.tokens
        _, parent_node, prefix_len = self._walk(_Node(None, 0), 0, tokens, len(tokens))
        if not len(prefix) <= prefix_len < len(tokens) or entry.id in self._attached_at:
            return False
        siblings = self._children.setdefault(self._node_key(parent_node), {})
        if tokens[prefix_len] in siblings:
            return False
        siblings[tokens[prefix_len]] = (entry, prefix_len - entry.base_position)
        self._attached_at[entry.id] = (parent_node, tokens[prefix_len])
        entry.prefix_tree = self
        if parent_node.parent is not None:
            parent_node.parent.num_tree_children += 1
            offsets = self._offsets.setdefault(parent_node.parent.id, {})
            offsets[parent_node.offset] = offsets.get(parent_node.offset, 0) + 1
        return True

    def children(self, entry: KVEntry) -> list[KVEntry]:
        """Return the entries attached directly to an entry."""
        nodes = [(entry.id, offset) for offset in self._offsets.get(entry.id, {})]
        return [child for parent_node in nodes for child, _ in self._children[parent_node].values()]

    def descendants(self, entry: KVEntry) -> Iterator[KVEntry]:
        """Yield all entries below an entry, parents before children."""
        result = [entry]
        for ancestor in result:  # grows during iteration
            children = self.children(ancestor)
            result += children
            yield from children

    def remove(self, entry: KVEntry) -> None:
        """Detach an entry without children; no-op if it is not attached."""
        attachment = self._attached_at.pop(entry.id, None)
        if attachment is None:
            return
        assert not entry.num_tree_children, "this KV entry has children in the prefix tree"
        parent_node, token = attachment
        siblings = self._children[self._node_key(parent_node)]
        del siblings[token]
        if not siblings:
            del self._children[self._node_key(parent_node)]
        entry.prefix_tree = None
        if parent_node.parent is not None:
            parent_node.parent.num_tree_children -= 1
            offsets = self._offsets[parent_node.parent.id]
            offsets[parent_node.offset] -= 1
            if not offsets[parent_node.offset]:
                del offsets[parent_node.offset]
            if not offsets:
                del self._offsets[parent_node.parent.id]

    @staticmethod
    def _node_key(node: _Node) -> tuple[int | None, int]:
        return (node.parent.id if node.parent else None, node.offset)

    def check(self) -> None:
        """Check that every entry is attached once and that child counts are right."""
        attached = [pair[0].id for siblings in self._children.values() for pair in siblings.values()]
        assert sorted(attached) == sorted(self._attached_at), "a KV entry is attached twice or nowhere"
        counts: dict[int, int] = {}
        for parent_node, _ in self._attached_at.values():
            if parent_node.parent is not None:
                counts[parent_node.parent.id] = counts.get(parent_node.parent.id, 0) + 1
                assert parent_node.parent.id in self._attached_at, "a KV entry is attached to a removed one"
        for siblings in self._children.values():
            for entry, _ in siblings.values():
                assert entry.num_tree_children == counts.get(entry.id, 0), "wrong child count"
