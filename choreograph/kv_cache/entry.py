"""KV entries, slices of them, and the slot ranges that attention reads."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..attention.metadata import KVRead
from ..outputs import BASE_MODEL
from .pool import consecutive_runs

if TYPE_CHECKING:
    from .prefix_tree import PrefixTree
    from .tiers import TierCopy
    from .transfer import Transfer

KVLocation = Literal["device", "host", "disk", "loading", "offloading", "dropped"]


class KVSlice(NamedTuple):
    """Slice of an entry's tokens, placed at a position in a context.

    A slice of zero tokens is attended to by nothing; it references the source entry of a partial
    prefill, whose cached layer inputs are read.
    """

    entry: "KVEntry"
    token_start: int  # first token of the half-open slice
    num_tokens: int
    position: int  # position of token `token_start` in the context
    layers: frozenset[int] | None = None  # layers in which it is visible; None for all

    @property
    def shift(self) -> int:
        """Position minus base position, in tokens; equal for all tokens of the slice."""
        return self.position - self.token_start - self.entry.base_position

    def visible_in(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers


class SlotRange(NamedTuple):
    """Contiguous tokens of an entry in contiguous slots."""

    token_start: int
    slot_start: int
    length: int  # tokens, equal to slots


@dataclass(eq=False)
class KVEntry:
    """KV cache of one message, with the tokens and the context it was computed from.

    ``num_computed_tokens <= num_scheduled_tokens <= len(tokens)``. An entry with neither pages nor
    tier copies is dropped; it is recomputed from `tokens` and `context`.
    """

    id: int
    tokens: list[int]  # token IDs; grows while the message decodes
    base_position: int  # keys of token j are rotated to base_position + j
    context: tuple[KVSlice, ...]  # slices that every token attends to
    pages: list[int]  # page numbers on the device, in token order; empty if not on the device
    page_size: int  # slots per page
    content_hash: bytes | None = None
    num_final_tokens: int = 0  # tokens that no longer depend on sampling
    num_scheduled_tokens: int = 0  # computed, or part of the running step
    num_computed_tokens: int = 0  # present in the pool
    is_indexed: bool = False  # can be looked up by hash or in its prefix tree
    owners: "set[tuple[str, object]]" = field(default_factory=set)  # references, as (kind, key)
    num_tree_children: int = 0  # entries attached to this one in the prefix tree
    last_access: int = 0  # counter of the cache manager, not seconds
    prefix_tree: "PrefixTree | None" = None  # tree the entry is attached to
    tier_copies: "dict[str, TierCopy]" = field(default_factory=dict)  # by tier; complete entries only
    transfer: "Transfer | None" = None  # copy in flight, from or to a tier
    hit_count: int = 0  # references taken since creation, without those of plans
    is_aliased: bool = False  # its first tokens are still read from another entry's slots
    failed_tiers: "set[str]" = field(default_factory=set)  # tiers where writing a copy failed
    agent_key: object = None  # key of the agent that created it, for eviction hints
    model: str = BASE_MODEL  # model or adapter that computes it
    computed_layers: frozenset[int] | None = None  # layers it is computed in; None for all
    cached_hidden_layers: frozenset[int] = frozenset()  # layers whose inputs are cached too
    missing_layers: frozenset[int] = frozenset()  # layers that an imported entry came without
    can_recompute: bool = True  # False if the model that computed it is not loaded here
    _slot_ranges: list[SlotRange] | None = None

    @property
    def is_complete(self) -> bool:
        return self.num_computed_tokens == len(self.tokens)

    @property
    def location(self) -> KVLocation:
        if self.transfer is not None:
            return self.transfer.direction
        if self.pages:
            return "device"
        return "host" if "host" in self.tier_copies else "disk" if "disk" in self.tier_copies else "dropped"

    @property
    def has_data(self) -> bool:
        """True if every token is computed on the device or copied to a tier."""
        return self.is_complete or bool(self.tier_copies)

    @property
    def is_materialized(self) -> bool:
        """True if every token was computed at least once."""
        return self.has_data or self.location in ("loading", "dropped")

    @property
    def has_pages(self) -> bool:
        """True if it has device pages: computed, being computed or being loaded."""
        return bool(self.pages)

    @property
    def is_lost(self) -> bool:
        """True if it has no data and cannot be recomputed."""
        return not (self.can_recompute or self.pages or self.tier_copies)

    @property
    def in_use(self) -> bool:
        """True if it has an owner other than a message, e.g. a running request or a pin."""
        return any(owner[0] != "message" for owner in self.owners)

    @property
    def source_entry(self) -> "KVEntry | None":
        """Entry of another model that a partial prefill starts from; None for a full one."""
        return None if self.computed_layers is None else next(s.entry for s in self.context if not s.num_tokens)

    @property
    def slot_ranges(self) -> list[SlotRange]:
        """Slot ranges of the tokens, one per run of consecutive pages. Cached."""
        if self._slot_ranges is None:
            self._slot_ranges, first = [], 0
            for page, length in consecutive_runs(self.pages):
                self._slot_ranges.append(SlotRange(first, page * self.page_size, length * self.page_size))
                first += length * self.page_size
        return self._slot_ranges

    def slot(self, token: int) -> int:
        return self.pages[token // self.page_size] * self.page_size + token % self.page_size

    @property
    def slots(self) -> list[int]:
        return [self.slot(token) for token in range(len(self.tokens))]

    def truncate_pages(self, count: int) -> list[int]:
        """Keep the first `count` pages; return the others."""
        self.pages, rest = self.pages[:count], self.pages[count:]
        self._slot_ranges = None
        return rest


def common_prefix_len(
    cached_tokens: list[int], start: int, end: int, tokens: list[int], offset: int, limit: int
) -> int:
    """Return the common prefix length of cached_tokens[start:end] and tokens[offset:limit]."""
    max_len = min(end - start, limit - offset)
    if cached_tokens[start : start + max_len] == tokens[offset : offset + max_len]:
        return max(max_len, 0)
    return next(i for i in range(max_len) if cached_tokens[start + i] != tokens[offset + i])


def context_reads(slices: Iterable[KVSlice], q_start: int, q_end: int, layer: int = 0) -> Iterator[KVRead]:
    """Yield the reads of context slices by query tokens q_start <= r < q_end in a layer.

    Every query token attends to every token of every slice visible in the layer.
    """
    for kv_slice in slices:
        if not kv_slice.visible_in(layer):
            continue
        end = kv_slice.token_start + kv_slice.num_tokens
        for span in kv_slice.entry.slot_ranges:
            first, last = max(span.token_start, kv_slice.token_start), min(span.token_start + span.length, end)
            if first < last:
                slot = span.slot_start + first - span.token_start
                position = kv_slice.position + first - kv_slice.token_start
                yield KVRead(slot, q_start, q_end, kv_slice.shift, last - first, 0, position)


def causal_reads(
    entry: KVEntry, q_start: int, token_start: int, token_end: int, first_visible: int = 0
) -> Iterator[KVRead]:
    """Yield the causal reads of an entry's own tokens.

    Query token q_start + i computes token token_start + i, which attends to the entry's tokens from
    `first_visible` up to itself.
    """
    rows = token_end - token_start
    for span in slot_ranges_from(entry, first_visible):
        if span.token_start >= token_end:
            break
        position = entry.base_position + span.token_start
        partial_start = min(max(span.token_start - token_start, 0), rows)  # attends to the first slot
        full_start = min(max(span.token_start + span.length - token_start, 0), rows)  # attends to all slots
        if partial_start < full_start:
            limit = token_start + partial_start + 1 - span.token_start
            yield KVRead(span.slot_start, q_start + partial_start, q_start + full_start, 0, limit, 1, position)
        if full_start < rows:
            yield KVRead(span.slot_start, q_start + full_start, q_start + rows, 0, span.length, 0, position)


def slot_ranges_from(entry: KVEntry, token_start: int) -> Iterator[SlotRange]:
    for span in entry.slot_ranges:
        skipped = max(0, token_start - span.token_start)
        if skipped < span.length:
            yield SlotRange(span.token_start + skipped, span.slot_start + skipped, span.length - skipped)


def group_layers_by_context(slices: Iterable[KVSlice], num_layers: int) -> list[list[int]]:
    """Group the layers that share the same visible slices; each group has one attention plan."""
    layer_sets = {kv_slice.layers for kv_slice in slices if kv_slice.layers is not None and kv_slice.num_tokens}
    if not layer_sets:
        return [list(range(num_layers))]
    groups: dict[tuple[bool, ...], list[int]] = {}
    for layer in range(num_layers):
        groups.setdefault(tuple(layer in some for some in layer_sets), []).append(layer)
    return list(groups.values())
