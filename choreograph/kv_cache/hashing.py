"""Content hashes of KV entries: entries with equal inputs have equal hashes."""

import hashlib
import struct
from collections.abc import Callable, Iterable

from ..namespace import Namespace
from .entry import EntryLayers, KVEntry, KVSlice, TokenRuns


def content_hash(
    namespace: Namespace,
    tokens: Iterable[int],
    base_position: int,
    context: Iterable[KVSlice],
    hidden_source: KVEntry | None = None,
    runs: TokenRuns | None = None,
) -> bytes:
    """Hash namespace, tokens, and the context at positions relative to the base.

    Args:
        hidden_source: entry with the inputs that a partial prefill starts from.
        runs: of tokens whose positions are not consecutive.
    """
    # fields have a fixed length, or their length before them; the tokens are last
    digest = hashlib.sha256(namespace.digest)
    for kv_slice in context:
        assert kv_slice.entry.content_hash is not None, "context entries must be hashed first"
        place = (kv_slice.token_start, kv_slice.num_tokens, kv_slice.position - base_position)
        digest.update(b"seen" + kv_slice.entry.content_hash + struct.pack("<3q", *place))
        if kv_slice.layers is not None:
            layer_ids = sorted(kv_slice.layers)
            digest.update(b"only" + struct.pack(f"<{len(layer_ids) + 1}q", len(layer_ids), *layer_ids))
        if kv_slice.alignment is not None:
            digest.update(b"aligned" + struct.pack("<2d", *kv_slice.alignment))
    if hidden_source is not None:
        assert hidden_source.content_hash is not None, "the source must be hashed first"
        digest.update(b"from" + hidden_source.content_hash)
    if runs is not None:
        numbers = *runs.tokens, *(position - base_position for position in runs.positions)
        digest.update(b"runs" + struct.pack(f"<{len(numbers) + 1}q", len(numbers), *numbers))
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
        model: str,
        layers: EntryLayers,
        tokens: Iterable[int],
        base: int,
        context: Iterable[KVSlice],
        runs: TokenRuns | None = None,
    ) -> str:
        context_items = [
            (
                hashes[s.entry.id, s.token_start + s.num_tokens],
                s.token_start,
                s.num_tokens,
                s.position - base,
                _sorted_layers(s.layers),
                *(() if s.alignment is None else s.alignment),
            )
            for s in context
        ]
        source = layers.hidden_source
        inputs: tuple[object, ...] = (weights_hash_of(model), _sorted_layers(layers.computed), context_items)
        if runs is not None:
            inputs += (runs.tokens, [position - base for position in runs.positions])
        if source is not None:
            inputs += (hashes[source.id, len(source.tokens)],)
        digest = hashlib.sha256(repr(inputs).encode())
        token_ids = list(tokens)
        digest.update(struct.pack(f"<{len(token_ids)}q", *token_ids))
        return digest.hexdigest()

    context = tuple(context)
    stack = _slice_ends(context, None)
    while stack:  # not recursive: contexts nest deeper than Python calls may
        entry, end = stack[-1]
        items = _slice_ends(entry.context, entry.layers.hidden_source)
        missing = [(item, item_end) for item, item_end in items if (item.id, item_end) not in hashes]
        stack += missing
        if not missing:
            stack.pop()
            hashes[entry.id, end] = hash_inputs(
                entry.model, entry.layers, entry.tokens[:end], entry.base_position, entry.context, entry.runs
            )
    return hash_inputs(model, EntryLayers(), tokens, base_position, context)


def _slice_ends(context: Iterable[KVSlice], hidden_source: KVEntry | None) -> list[tuple[KVEntry, int]]:
    """Return each entry of a context with the end of the tokens it is read up to."""
    ends = [(s.entry, s.token_start + s.num_tokens) for s in context]
    return ends if hidden_source is None else [*ends, (hidden_source, len(hidden_source.tokens))]


def _sorted_layers(layers: frozenset[int] | None) -> list[int] | None:
    return None if layers is None else sorted(layers)
