"""Reuse of equal headers over the same context.

Messages with equal parents often start with equal tokens (branches, voters, agents). The first one
computes them; the others read its tokens, and copy them after the step that computes them.
"""

from itertools import islice

from ..namespace import Namespace
from .entry import KVEntry, KVSlice
from .hashing import content_hash
from .prefix_tree import common_prefix_len

MIN_SHARED_TOKENS = 4  # shorter headers are cheaper to compute than to copy
MIN_SHARED_PREFILL_TOKENS = 16  # likewise for prefills: sharing may delay their readers by a step
MAX_COMPARED = 64  # messages with the same first tokens that a new one is compared with, the latest ones

_HeaderKey = tuple[bytes, int, tuple[int, ...]]  # context, base position, first tokens


class SharedHeaderIndex:
    """Index of messages by context, base position and first tokens."""

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
            if other.shared_header is not None or not other.pages:
                continue
            num_ready = other.num_computed_tokens or other.num_final_tokens
            count = common_prefix_len(other.tokens, entry.tokens, 0, num_ready, 0, max_length)
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
