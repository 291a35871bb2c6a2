"""KV entries, slices of them, and the slot ranges that attention reads."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Literal, NamedTuple

from ..attention.metadata import Alignment, KVRead
from ..outputs import BASE_MODEL
from .pool import consecutive_runs
from .transfer import Transfer

KVLocation = Literal["device", "host", "disk", "loading", "offloading", "dropped"]


class TokenRuns(NamedTuple):
    """Runs of consecutive positions, of tokens that are scattered over a context.

    Each token attends to the slices of its context that are placed before it.
    """

    tokens: tuple[int, ...]  # first token of each run, ascending from 0
    positions: tuple[int, ...]  # of those tokens, ascending
    are_read_apart: bool  # attention depends on distances: a read has one run; else as many as are in adjacent slots

    def position(self, token: int) -> int:
        run = bisect_right(self.tokens, token) - 1
        return self.positions[run] + token - self.tokens[run]

    def num_tokens_up_to(self, position: int, num_tokens: int) -> int:
        """Count the tokens of runs that start at a position or before it."""
        run = bisect_right(self.positions, position)
        return self.tokens[run] if run < len(self.tokens) else num_tokens

    def split(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of tokens [start, end) in each run."""
        for first, last in zip(self.tokens, (*self.tokens[1:], end), strict=True):
            if max(first, start) < min(last, end):
                yield max(first, start), min(last, end)


class KVSlice(NamedTuple):
    """Slice of an entry's tokens, placed at a position in a context.

    Tokens in runs keep their distances.
    """

    entry: "KVEntry"
    token_start: int  # first token of the half-open slice
    num_tokens: int
    position: int  # position of token `token_start` in the context
    layers: frozenset[int] | None = None  # layers in which it is visible; None for all
    alignment: Alignment | None = None  # of attention to it; None: ordinary

    @property
    def shift(self) -> int:
        """Position of every token relative to its base position, in tokens."""
        return self.position - self.entry.position(self.token_start)

    def visible_in(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers


def in_order(context: Sequence[KVSlice]) -> Sequence[KVSlice]:
    """Return the slices of a context in order of the prompt, split into runs."""
    if all(kv_slice.entry.runs is None for kv_slice in context):
        return context
    parts = []
    for kv_slice in context:
        entry, start = kv_slice.entry, kv_slice.token_start
        spans = (
            [(start, start + kv_slice.num_tokens)]
            if entry.runs is None
            else entry.runs.split(start, start + kv_slice.num_tokens)
        )
        shift = kv_slice.shift
        parts += [
            kv_slice._replace(token_start=a, num_tokens=b - a, position=entry.position(a) + shift) for a, b in spans
        ]
    return sorted(parts, key=attrgetter("position"))


class SlotRange(NamedTuple):
    """Contiguous tokens of an entry in contiguous slots."""

    token_start: int
    slot_start: int
    length: int  # tokens, equal to slots


class EntryLayers(NamedTuple):
    """Layers of which an entry has keys and values, or inputs."""

    computed: frozenset[int] | None = None  # layers it is computed in; None for all
    hidden: frozenset[int] = frozenset()  # layers whose inputs (hidden states) are cached too
    missing: frozenset[int] = frozenset()  # layers that an imported entry came without
    hidden_source: "KVEntry | None" = None  # entry with the inputs that a partial prefill starts from


ALL_LAYERS = EntryLayers()


@dataclass
class TierCopy:
    """Copy of one KV entry on a tier."""

    tier: str  # name of the tier
    tokens: int  # number of tokens
    pages: list[int] = field(default_factory=list)  # pages of the host pool
    file: Path | None = None  # file of the disk tier
    checksum: bytes = b""  # of the header of its file


@dataclass
class EntryStorage:
    """Where an entry is besides its device pages, and how it comes back."""

    copies: dict[str, TierCopy] = field(default_factory=dict)  # by tier; complete entries only
    transfer: Transfer | None = None  # copy in flight, from or to a tier
    failed_tiers: set[str] = field(default_factory=set)  # tiers where writing a copy failed
    can_recompute: bool = True  # False if the model or the context that it was computed with is not loaded here
    lost_reason: str = ""  # why its last load failed


@dataclass(eq=False)
class KVEntry:
    """KV cache of one message, with its tokens and context.

    ``num_computed_tokens <= num_scheduled_tokens <= len(tokens)``. An entry with neither pages nor
    tier copies is dropped; it is recomputed from `tokens` and `read_entries`.
    """

    id: int
    tokens: list[int]  # token IDs; grows while the message decodes
    base_position: int  # keys of token j are rotated to base_position + j
    context: tuple[KVSlice, ...]  # slices that every token attends to
    pages: list[int]  # page numbers on the device, in token order; empty if not on the device
    page_size: int  # slots per page
    model: str = BASE_MODEL  # model or adapter that computes it
    layers: EntryLayers = ALL_LAYERS
    runs: TokenRuns | None = None  # where positions are not consecutive; such an entry is read whole
    content_hash: bytes | None = None
    num_final_tokens: int = 0  # tokens that no longer depend on sampling
    num_scheduled_tokens: int = 0  # computed, or part of the running step
    num_computed_tokens: int = 0  # present in the pool
    shared_header: KVSlice | None = None  # slice that is read in place of its first tokens until they are copied
    owners: "set[tuple[str, object]]" = field(default_factory=set)  # references, as (kind, key)
    last_access: int = 0  # counter of the cache manager, not seconds
    hit_count: int = 0  # references taken since creation, without those of plans
    storage: EntryStorage = field(default_factory=EntryStorage)
    error: Exception | None = None  # raised when it was computed; its tokens are incomplete
    slot_ranges: list[SlotRange] = field(init=False)  # slots of the tokens, one range per run of consecutive pages

    def __post_init__(self) -> None:
        self.set_pages(self.pages)

    @property
    def transfer(self) -> Transfer | None:
        return self.storage.transfer

    @property
    def tier_copies(self) -> dict[str, TierCopy]:
        return self.storage.copies

    @property
    def is_partial(self) -> bool:
        """True if it is computed in some layers only."""
        return self.layers.computed is not None

    @property
    def read_entries(self) -> "list[KVEntry]":
        """Entries that must be on the device while it is computed."""
        return entries_of(self.context, self.layers.hidden_source)

    @property
    def is_complete(self) -> bool:
        return self.num_computed_tokens == len(self.tokens)

    @property
    def location(self) -> KVLocation:
        if self.storage.transfer is not None:
            return self.storage.transfer.direction
        if self.pages:
            return "device"
        copies = self.storage.copies
        return "host" if "host" in copies else "disk" if "disk" in copies else "dropped"

    @property
    def has_data(self) -> bool:
        """True if all tokens are on the device or a tier."""
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
        return not (self.storage.can_recompute or self.pages or self.tier_copies)

    @property
    def in_use(self) -> bool:
        """True if a running request, pin or other non-message owner exists."""
        return any(owner[0] != "message" for owner in self.owners)

    def position(self, token: int) -> int:
        """Return the position that a token's key is rotated to."""
        return self.base_position + token if self.runs is None else self.runs.position(token)

    def positions(self, start: int, end: int) -> Iterable[int]:
        """Return the positions of tokens [start, end)."""
        if self.runs is None:
            return range(self.base_position + start, self.base_position + end)
        return map(self.runs.position, range(start, end))

    def slot(self, token: int) -> int:
        return self.pages[token // self.page_size] * self.page_size + token % self.page_size

    @property
    def slots(self) -> list[int]:
        return self.slots_in(self.pages)

    def slots_in(self, pages: list[int]) -> list[int]:
        """Return the slots of all tokens if these are its pages."""
        size = self.page_size
        return [pages[token // size] * size + token % size for token in range(len(self.tokens))]

    def set_pages(self, pages: list[int]) -> None:
        """Replace the device pages, in token order."""
        self.pages, self.slot_ranges, first = pages, [], 0
        for page, count in consecutive_runs(pages):
            slot, end = page * self.page_size - first, first + count * self.page_size
            spans = (
                self.runs.split(first, end) if self.runs is not None and self.runs.are_read_apart else ((first, end),)
            )
            self.slot_ranges += [SlotRange(start, slot + start, stop - start) for start, stop in spans]
            first = end


def entries_of(context: Iterable[KVSlice], hidden_source: KVEntry | None) -> list[KVEntry]:
    """Return the entries that tokens over a context are computed from."""
    entries = [kv_slice.entry for kv_slice in context]
    return entries if hidden_source is None else [*entries, hidden_source]


def context_reads(slices: Iterable[KVSlice], q_start: int, q_end: int, layer: int = 0) -> list[KVRead]:
    """Return the reads of context slices by query tokens [q_start, q_end).

    Every query token attends to every token of every slice visible in the layer.
    """
    reads = []
    for entry, token_start, num_tokens, position, layers, alignment in slices:
        if layers is not None and layer not in layers:
            continue
        shift = position - entry.position(token_start)
        for range_start, slot_start, length in entry.slot_ranges:
            first, last = max(range_start, token_start), min(range_start + length, token_start + num_tokens)
            if first < last:
                slot, range_position = slot_start + first - range_start, entry.position(first) + shift
                reads.append(KVRead(slot, q_start, q_end, shift, last - first, 0, range_position, alignment))
    return reads


def scattered_reads(
    entry: KVEntry, context: Iterable[KVSlice], q_start: int, token_start: int, token_end: int, layer: int = 0
) -> Iterator[KVRead]:
    """Yield the reads of a context by tokens [token_start, token_end) in runs.

    Each token attends to the slices before it.
    """
    assert entry.runs is not None
    for kv_slice in context:
        first = max(token_start, entry.runs.num_tokens_up_to(kv_slice.position, len(entry.tokens)))
        if first < token_end:
            rows = q_start + first - token_start, q_start + token_end - token_start
            yield from context_reads((kv_slice,), *rows, layer)


def causal_reads(
    entry: KVEntry, q_start: int, token_start: int, token_end: int, first_visible: int = 0
) -> list[KVRead]:
    """Return the causal reads of an entry's own tokens.

    Query token q_start + i computes token token_start + i, which attends to the entry's tokens from
    `first_visible` up to itself.
    """
    reads, num_rows = [], token_end - token_start
    for range_start, slot_start, length in entry.slot_ranges:
        first, end = max(range_start, first_visible), range_start + length
        if first >= min(end, token_end):
            continue
        slot, position = slot_start + first - range_start, entry.position(first)
        partial_start = min(max(first - token_start, 0), num_rows)  # attends to the first slot
        full_start = min(max(end - token_start, 0), num_rows)  # attends to all slots
        if partial_start < full_start:
            limit = token_start + partial_start + 1 - first
            reads.append(KVRead(slot, q_start + partial_start, q_start + full_start, 0, limit, 1, position))
        if full_start < num_rows:
            reads.append(KVRead(slot, q_start + full_start, q_start + num_rows, 0, end - first, 0, position))
    return reads


def prefix_reads(slices: Sequence[KVSlice], q_start: int, start: int, end: int, layer: int = 0) -> list[KVRead]:
    """Return the reads of a context by queries at its tokens' places.

    Query token q_start + i is at the place of context token start + i, up to `end`, and attends to the context's
    tokens up to that one, itself included.
    """
    reads, index = [], 0  # index: of the slice's first token in the context
    for entry, token_start, num_tokens, position, layers, alignment in in_order(slices):
        if layers is not None and layer not in layers:
            continue
        shift, q_first = position - entry.position(token_start), q_start - start
        for range_start, slot_start, length in entry.slot_ranges:
            first, last = max(range_start, token_start), min(range_start + length, token_start + num_tokens)
            if first >= last:
                continue
            slot, range_position = slot_start + first - range_start, position + first - token_start
            partial_start, full_start = index + first - token_start, index + last - token_start
            low, high = max(partial_start, start), min(full_start, end)
            if low < high:
                limit = low - partial_start + 1
                reads.append(KVRead(slot, q_first + low, q_first + high, shift, limit, 1, range_position, alignment))
            if max(full_start, start) < end:
                rows = q_first + max(full_start, start), q_first + end
                reads.append(KVRead(slot, *rows, shift, last - first, 0, range_position, alignment))
        index += num_tokens
    return reads


def group_layers_by_context(slices: Iterable[KVSlice], num_layers: int) -> list[list[int]]:
    """Group the layers that share the same visible slices."""
    layer_sets = {kv_slice.layers for kv_slice in slices if kv_slice.layers is not None}
    groups: dict[tuple[bool, ...], list[int]] = {}
    for layer in range(num_layers) if layer_sets else ():
        groups.setdefault(tuple(layer in layer_set for layer_set in layer_sets), []).append(layer)
    return list(groups.values()) or [list(range(num_layers))]
