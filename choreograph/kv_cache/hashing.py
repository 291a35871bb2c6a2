"""Content hashes of KV entries: entries with equal inputs have equal hashes."""

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping

from .entry import KVSlice


def content_hash(cache_salt: str, tokens: Iterable[int], base_position: int, context: Iterable[KVSlice]) -> bytes:
    """Hash salt, tokens, and the context entries with their positions relative to the base."""
    digest = hashlib.sha256(hashlib.sha256(cache_salt.encode()).digest())  # every field below has a fixed length
    for kv_slice in context:
        assert kv_slice.entry.content_hash is not None, "context entries must be hashed first"
        place = (kv_slice.token_start, kv_slice.num_tokens, kv_slice.position - base_position)
        digest.update(b"seen" + kv_slice.entry.content_hash + struct.pack("<3q", *place))
        if kv_slice.layers is not None:
            layer_ids = sorted(kv_slice.layers)
            digest.update(b"only" + struct.pack(f"<{len(layer_ids) + 1}q", len(layer_ids), *layer_ids))
    numbers = list(tokens)
    digest.update(b"mine" + struct.pack(f"<{len(numbers)}q", *numbers))
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
    context, names = tuple(context), dict[tuple[int, int], str]()
    stack = [(kv_slice.entry, kv_slice.token_start + kv_slice.num_tokens) for kv_slice in context]
    while stack:
        entry, end = stack[-1]
        context_items = [(kv_slice.entry, kv_slice.token_start + kv_slice.num_tokens) for kv_slice in entry.context]
        missing = [(item, last) for item, last in context_items if (item.id, last) not in names]
        if missing:
            stack += missing
            continue
        stack.pop()
        names[entry.id, end] = _hash_entry(
            weights_hash_of(entry.model),
            entry.computed_layers,
            entry.tokens[:end],
            entry.base_position,
            entry.context,
            names,
        )
    return _hash_entry(weights_hash_of(model), None, tokens, base_position, context, names)


def _hash_entry(
    weights_hash: str,
    layers: frozenset[int] | None,
    tokens: Iterable[int],
    base_position: int,
    context: Iterable[KVSlice],
    hashes: Mapping[tuple[int, int], str],
) -> str:
    numbers = list(tokens)
    context_items = [
        (
            hashes[s.entry.id, s.token_start + s.num_tokens],
            s.token_start,
            s.num_tokens,
            s.position - base_position,
            _sorted_layers(s.layers),
        )
        for s in context
    ]
    digest = hashlib.sha256(repr((weights_hash, _sorted_layers(layers), context_items)).encode())
    digest.update(struct.pack(f"<{len(numbers)}q", *numbers))
    return digest.hexdigest()


def _sorted_layers(layers: frozenset[int] | None) -> list[int] | None:
    return None if layers is None else sorted(layers)
