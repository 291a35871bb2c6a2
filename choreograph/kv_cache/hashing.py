"""Content hashes of KV entries: entries with equal inputs have equal hashes."""

import hashlib
import struct
from collections.abc import Callable, Iterable

from ..namespace import Namespace
from .entry import KVSlice


def content_hash(namespace: Namespace, tokens: Iterable[int], base_position: int, context: Iterable[KVSlice]) -> bytes:
    """Hash namespace, tokens, and the context at positions relative to the base."""
    # fields have a fixed length, or their length before them; the tokens are last
    digest = hashlib.sha256(namespace.digest)
    for kv_slice in context:
        assert kv_slice.entry.content_hash is not None, "context entries must be hashed first"
        place = (kv_slice.token_start, kv_slice.num_tokens, kv_slice.position - base_position)
        digest.update(b"seen" + kv_slice.entry.content_hash + struct.pack("<3q", *place))
        if kv_slice.layers is not None:
            layer_ids = sorted(kv_slice.layers)
            digest.update(b"only" + struct.pack(f"<{len(layer_ids) + 1}q", len(layer_ids), *layer_ids))
    token_ids = list(tokens)
    digest.update(b"mine" + struct.pack(f"<{len(token_ids)}q", *token_ids))
    return digest.digest()


def portable_content_hash(
    tokens: Iterable[int],
    base_position: int,
    context: Iterable[KVSlice],
    model: str,
    weights_hash_of: Callable[[str], str],
) -> str:
    """Hash an entry's inputs independently of process and model name.

    Covers the weights, the tokens and the context at relative positions, recursively. Tokens of a
    context entry after the end of its slice are not included.

    Args:
        weights_hash_of: Maps a model name to the hash of its weights.
    """
    hashes: dict[tuple[int, int], str] = {}  # by entry ID and end of the slice

    def hash_inputs(
        model: str, layers: frozenset[int] | None, tokens: Iterable[int], base: int, context: Iterable[KVSlice]
    ) -> str:
        context_items = [
            (
                hashes[s.entry.id, s.token_start + s.num_tokens],
                s.token_start,
                s.num_tokens,
                s.position - base,
                _sorted_layers(s.layers),
            )
            for s in context
        ]
        digest = hashlib.sha256(repr((weights_hash_of(model), _sorted_layers(layers), context_items)).encode())
        token_ids = list(tokens)
        digest.update(struct.pack(f"<{len(token_ids)}q", *token_ids))
        return digest.hexdigest()

    context = tuple(context)
    stack = [(s.entry, s.token_start + s.num_tokens) for s in context]
    while stack:  # not recursive: contexts nest deeper than Python calls may
        entry, end = stack[-1]
        items = [(s.entry, s.token_start + s.num_tokens) for s in entry.context]
        missing = [(item, item_end) for item, item_end in items if (item.id, item_end) not in hashes]
        stack += missing
        if not missing:
            stack.pop()
            hashes[entry.id, end] = hash_inputs(
                entry.model, entry.computed_layers, entry.tokens[:end], entry.base_position, entry.context
            )
    return hash_inputs(model, None, tokens, base_position, context)


def _sorted_layers(layers: frozenset[int] | None) -> list[int] | None:
    return None if layers is None else sorted(layers)
