"""Batches: the tokens of one step, and the requests that they belong to."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..attention.backend import HookedRows
from ..attention.metadata import KVRead
from ..kv_cache.entry import KVEntry, KVSlice, causal_reads, context_reads, prefix_reads, scattered_reads
from ..request.decode_state import DecodeState
from ..request.request import Request, RequestState


class ScheduledChunk(NamedTuple):
    """Tokens of one request that are computed in a batch."""

    request: Request
    q_start: int  # batch row of the first token
    token_start: int  # first token of the entry
    token_end: int  # end token (exclusive)
    num_drafts: int = 0  # rows that follow: drafted tokens, which are not part of the entry


class ScoredRows(NamedTuple):
    """Rows of one request after which its prompt's tokens are scored."""

    request: Request
    targets: list[int]  # token id that follows each row in the prompt
    rows: list[int]  # batch rows
    first_query: int  # batch row of the first query
    context_range: tuple[int, int]  # [start, end) of the context tokens that are queries

    def reads(self, layer: int) -> Iterable[KVRead]:
        """Return what the queries read in one layer."""
        return prefix_reads(self.request.context, self.first_query, *self.context_range, layer)


@dataclass
class Batch:
    """Tokens of one step and the requests they belong to."""

    tokens: list[int] = field(default_factory=list)  # (N,) token ids
    positions: list[int] = field(default_factory=list)  # (N,) logical positions
    slots: list[int] = field(default_factory=list)  # (N,) KV cache slots to write
    models: list[str] = field(default_factory=list)  # (N,) model or adapter of each token
    chunks: list[ScheduledChunk] = field(default_factory=list)  # in row order
    sampled: list[Request] = field(default_factory=list)  # requests that get a token in this step
    sampled_rows: list[int] = field(default_factory=list)  # batch rows whose logits they are sampled from
    # drafted tokens by request id; such a request is in `sampled` once for each of its rows
    drafts: dict[int, list[int]] = field(default_factory=dict)
    draft_states: dict[int, DecodeState] = field(default_factory=dict)  # by index into `sampled`, of drafted rows
    scored: dict[int, ScoredRows] = field(default_factory=dict)  # rows that score prompts, by request id
    shared_headers: list[Request] = field(default_factory=list)  # requests that read another one's header
    computed_layers: frozenset[int] | None = None  # layers that are computed; None: all
    hooked: list[HookedRows] = field(default_factory=list)
    # called with a layer; each blocks until that layer is loaded
    layer_waiters: tuple[Callable[[int], None], ...] = ()
    # called with an entry and a layer; blocks until the cached inputs of that layer are loaded
    wait_for_inputs: Callable[[KVEntry, int], None] = lambda entry, layer: None

    def add_chunk(
        self, request: Request, num_tokens: int, draft: Sequence[int] = (), num_queries: int | None = None
    ) -> None:
        """Append the request's next `num_tokens` tokens, and a draft after its last.

        Args:
            num_queries: queries that score its context; None if its prompt is not scored.
        """
        entry = request.entry
        q_start, token_start = len(self.tokens), entry.num_scheduled_tokens
        token_end = token_start + num_tokens
        self.tokens += entry.tokens[token_start:token_end]
        self.tokens += draft
        row_end = token_end + len(draft)
        self.positions += entry.positions(token_start, row_end)
        pages, page_size = entry.pages, entry.page_size
        for token in range(token_start, row_end):
            self.slots.append(pages[token // page_size] * page_size + token % page_size)
        self.models += [entry.model] * (row_end - token_start)
        self.chunks.append(ScheduledChunk(request, q_start, token_start, token_end, len(draft)))
        self.computed_layers = entry.layers.computed
        entry.num_scheduled_tokens = token_end
        if entry.shared_header is not None:
            self.shared_headers.append(request)
        if request.hook is not None:
            self.hooked.append(HookedRows(request.hook, q_start, q_start + num_tokens))
        is_sampled = request.state is RequestState.RUNNING and request.decode_state is not None
        if is_sampled and not request.cancel_when_computed and token_end == len(entry.tokens):
            self.sampled.append(request)
            self.sampled_rows.append(q_start + num_tokens - 1)
            if draft:
                self._add_draft(request, list(draft))
        if num_queries is not None:
            assert request.decode_state is not None and request.decode_state.prompt_scorer is not None
            request.decode_state.prompt_scorer.add_rows(request, self, num_queries)

    def _add_draft(self, request: Request, draft: list[int]) -> None:
        """Sample from drafted rows too, as if the tokens before were generated."""
        assert request.decode_state is not None
        self.drafts[request.id] = draft
        for index in range(1, len(draft) + 1):
            self.draft_states[len(self.sampled)] = request.decode_state.after(draft[:index])
            self.sampled.append(request)
            self.sampled_rows.append(self.sampled_rows[-1] + 1)

    @property
    def num_layers(self) -> int | None:
        """First layers that are computed, if hooks alone need the result; None for all."""
        num_hooked = sum(rows.end - rows.start for rows in self.hooked)
        return max(rows.hook.num_layers for rows in self.hooked) if num_hooked == len(self.tokens) else None

    @property
    def logits_rows(self) -> list[int]:
        """Batch rows whose logits are needed: sampled ones, then scored ones."""
        return self.sampled_rows + [row for scored in self.scored.values() for row in scored.rows]

    @property
    def context_slices(self) -> Iterator[KVSlice]:
        """KV slices that the batch's requests attend to."""
        return (kv_slice for chunk in self.chunks for kv_slice in chunk.request.context)

    def reads(self, layer: int = 0) -> Iterator[KVRead]:
        """Yield the KV reads of every chunk in one layer."""
        for request, q_start, token_start, token_end, num_drafts in self.chunks:
            row_end = token_end + num_drafts
            if row_end > token_start:
                if request.entry.runs is None:
                    yield from context_reads(request.context, q_start, q_start + row_end - token_start, layer)
                else:
                    yield from scattered_reads(request.entry, request.context, q_start, token_start, row_end, layer)
                header = request.entry.shared_header
                num_shared = 0 if header is None else header.num_tokens
                yield from causal_reads(request.entry, q_start, token_start, row_end, num_shared)
            if request.id in self.scored:
                yield from self.scored[request.id].reads(layer)
