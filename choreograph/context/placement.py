"""Execution modes: tokens to compute, their position and context.

choreographed: Prompt Choreography §2.3. prefix: its baseline, §3.1, with the longest cached prefix,
matched token by token. naive: §3.1 without any cache.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ..errors import InvalidPositionError, InvalidRequestError
from ..kv_cache.entry import KVEntry, KVSlice, entries_of
from ..kv_cache.hashing import content_hash
from ..kv_cache.manager import KVCacheManager
from ..kv_cache.shared_headers import MIN_SHARED_PREFILL_TOKENS, MIN_SHARED_TOKENS
from ..models.info import ModelInfo
from ..namespace import Namespace
from ..request.request import Request


class Placement(NamedTuple):
    """Tokens to compute for a request, their position and their context."""

    tokens: list[int]  # to compute
    position: int  # of the first token
    context: tuple[KVSlice, ...]  # slices the tokens attend to
    content_hash: bytes | None = None  # None if the entry is not shared by content
    cached_entry: KVEntry | None = None  # existing entry of exactly this work
    hidden_source: KVEntry | None = None  # entry with the inputs that a partial prefill starts from

    @property
    def read_entries(self) -> list[KVEntry]:
        """Entries that the tokens are computed from."""
        return entries_of(self.context, self.hidden_source)


def resolve_offsets(
    lengths: list[int], offsets: tuple[int | None, ...], new_offset: int | None
) -> tuple[tuple[int, ...], int]:
    """Return the position of each parent and of the new message.

    By default the first parent starts at position 0; each later parent, and the message, starts
    where the previous one ends.
    """
    positions, end = [], 0
    for length, offset in zip(lengths, offsets, strict=True):
        position = end if offset is None else offset
        positions.append(position)
        end = position + length
    return tuple(positions), end if new_offset is None else new_offset


def check_positions(request: Request, lengths: list[int], max_positions: int) -> None:
    """Check that parents and message stay below the model's maximum position.

    Counts the prompt, the minimum of generated tokens and the footer. Called at submission with the
    parents' lengths so far, and at admission with the final lengths. Outside of choreographed mode
    a decode concatenates its parents and ignores their offsets.
    """
    decode_state, end = request.decode_state, 0
    is_concatenated = request.mode != "choreographed" and decode_state is not None
    for index, (length, offset) in enumerate(zip(lengths, request.offsets, strict=True)):
        start = end if offset is None or is_concatenated else offset
        end = start + length
        if end > max_positions and not is_concatenated:
            raise _position_error(
                f"parents[{index}] (message {request.parents[index].id}) from offset {start}", end, max_positions
            )
    start = end if request.new_offset is None or is_concatenated else request.new_offset
    end = start + len(request.prompt)
    if decode_state is not None:
        end += len(decode_state.forced_tokens or [0]) + (0 if is_concatenated else len(request.footer))
    if end > max_positions:
        what = "the concatenated prompt" if is_concatenated else f"the message from offset {start}"
        raise _position_error(what, end, max_positions)


def _position_error(description: str, end: int, max_positions: int) -> InvalidPositionError:
    return InvalidPositionError(
        f"{description} would reach position {end - 1}, past the model's last one, {max_positions - 1}: "
        f"use at most {max_positions} tokens in all"
    )


def choreographed(request: Request, cache_manager: KVCacheManager, model_info: ModelInfo) -> Placement:
    """Place every parent at its offset and attend to its KV."""
    lengths = parent_lengths(request)
    check_positions(request, lengths, model_info.max_positions)
    positions, request.position = resolve_offsets(lengths, request.offsets, request.new_offset)
    request.parent_positions = request.parent_positions or positions  # set if a feature has replaced the parents
    starts = [token_range[0] if token_range else 0 for token_range in request.parent_slices]
    num_layers = len(cache_manager.pool.keys)
    alignments = request.alignments or (None,) * len(lengths)
    parents = zip(request.parents, starts, lengths, positions, alignments, strict=True)
    kv_slices = tuple(
        kv_slice._replace(alignment=alignment)
        for parent, start, length, offset, alignment in parents
        for kv_slice in parent_slices(parent, start, length, offset, num_layers)
    )
    if not model_info.supports_shift:
        _check_unshifted(kv_slices, model_info.name)
    if request.is_decode or request.hook is not None:
        return Placement(list(request.prompt), request.position, kv_slices)
    namespace, source, copy = namespace_of(request, model_info), None, request.reencoding
    if copy is not None and copy.layers is not None:
        source = copy.source.entry
        if not copy.layers:
            return Placement(list(request.prompt), request.position, (), cached_entry=source)
        namespace = replace(namespace, layers=copy.layers)
    key = content_hash(namespace, request.prompt, request.position, kv_slices, source, request.runs)
    return Placement(list(request.prompt), request.position, kv_slices, key, cache_manager.lookup(key), source)


def namespace_of(request: Request, model_info: ModelInfo) -> Namespace:
    """Return the namespace of the request's content hash.

    Includes the position if keys cannot be rotated (learned positions).
    """
    return request.namespace if model_info.supports_shift else replace(request.namespace, position=request.position)


def _check_unshifted(context: tuple[KVSlice, ...], model_name: str) -> None:
    for index, kv_slice in enumerate(context):
        if kv_slice.shift:
            base_position = kv_slice.position - kv_slice.shift
            raise InvalidPositionError(
                f"parents[{index}] was encoded at {base_position} and is placed at {kv_slice.position}: {model_name} "
                "has learned positions, so its KV cannot be rotated; "
                'give it that new_offset when it is computed, or use mode="prefix"'
            )


def parent_slices(
    parent: Request, token_start: int, num_tokens: int, position: int, num_layers: int
) -> Iterator[KVSlice]:
    """Yield the KV slices of one parent.

    A partial prefill has its own entry in the computed layers, those of its source in the others.
    """
    layers: frozenset[int] | None = None  # all
    while parent.reencoding is not None and parent.reencoding.layers is not None:
        layers = frozenset(range(num_layers)) if layers is None else layers
        own = layers & parent.reencoding.layers
        if own:
            yield KVSlice(parent.entry, token_start, num_tokens, position, own)
        parent, layers = parent.reencoding.source, layers - own
    assert not parent.entry.is_partial, "a partial KV entry is used in all layers"
    missing = parent.entry.layers.missing
    if layers is not None:
        missing &= layers
    if missing:
        raise InvalidRequestError(f"parent {parent.id} came without layers {sorted(missing)}: use a variant of it")
    yield KVSlice(parent.entry, token_start, num_tokens, position, layers)


def parent_lengths(request: Request) -> list[int]:
    """Return the number of visible tokens of each parent, after checking slices."""
    for parent, token_range in zip(request.parents, request.parent_slices, strict=True):
        if token_range is not None and token_range[1] > len(parent.tokens):
            raise InvalidPositionError(
                f"part {token_range[0]}:{token_range[1]} of message {parent.id}, which has {len(parent.tokens)} tokens"
            )
    return [len(tokens) for tokens in request.parent_tokens()]


def _flatten_prompt(request: Request, max_positions: int) -> list[int]:
    """Concatenate parents, prompt and generated tokens at default positions."""
    lengths = parent_lengths(request)
    tokens = [token for parent in request.parent_tokens() for token in parent]
    request.parent_positions, request.position = resolve_offsets(lengths, (None,) * len(lengths), None)
    check_positions(request, lengths, max_positions)
    generated = [] if request.decode_state is None else request.decode_state.tokens
    return tokens + request.prompt + generated


def prefix(request: Request, cache_manager: KVCacheManager, model_info: ModelInfo) -> Placement:
    """Concatenate the prompt and reuse its longest cached prefix."""
    tokens = _flatten_prompt(request, model_info.max_positions)
    kv_slices = tuple(cache_manager.prefix_tree.match(request.namespace, tokens, limit=len(tokens) - 1))
    num_cached = sum(kv_slice.num_tokens for kv_slice in kv_slices)
    return Placement(tokens[num_cached:], num_cached, kv_slices)


def insert_into_prefix_tree(request: Request, cache_manager: KVCacheManager) -> None:
    """Make a prefix-mode KV entry available to later prompts."""
    entry = request.entry
    prefix_tokens = [t for s in entry.context for t in s.entry.tokens[s.token_start : s.token_start + s.num_tokens]]
    cache_manager.prefix_tree.insert(request.namespace, entry, prefix_tokens)


def reuse_header(cache_manager: KVCacheManager, request: Request) -> None:
    """Skip first tokens that another message over the same context has."""
    num_tokens = cache_manager.share_header(
        request.entry,
        request.namespace,
        request.request_owner,
        min_length=MIN_SHARED_TOKENS if request.is_decode else MIN_SHARED_PREFILL_TOKENS,
        copy_now=not request.is_decode,
    )
    if not num_tokens:
        return
    usage = request.usage
    request.usage = replace(
        usage, cached_tokens=usage.cached_tokens + num_tokens, computed_tokens=usage.computed_tokens - num_tokens
    )
    if request.entry.shared_header is not None:
        request.context = (*request.context, request.entry.shared_header)


def copy_headers(cache_manager: KVCacheManager, requests: Iterable[Request]) -> None:
    """Copy shared headers into the requests' own slots after a step."""
    cache_manager.copy_headers([(request.entry, request.request_owner) for request in requests])
    for request in requests:
        request.context = request.entry.context


def naive(request: Request, cache_manager: KVCacheManager, model_info: ModelInfo) -> Placement:
    """Concatenate the prompt and compute all of it."""
    return Placement(_flatten_prompt(request, model_info.max_positions), 0, ())


PLACERS: dict[str, Callable[[Request, KVCacheManager, ModelInfo], Placement]] = {
    "choreographed": choreographed,
    "prefix": prefix,
    "naive": naive,
}
