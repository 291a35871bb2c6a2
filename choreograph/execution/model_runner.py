"""Batches and their execution, with overlap scheduling.

After each step the next one is planned, assuming that every decode continues: its attention
metadata is that of the last step, advanced by one token. A GPU computes meanwhile.

If small batches are CUDA graphs, the next step is also launched, with the sampled tokens still on
the device, so the device does not wait for Python. The launched step is used for every request that
continued. Rows of finished requests are discarded: they write to slots that the request owned at
launch, and a new owner writes to these slots later on the same stream.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..attention.backend import Backend, ForwardContext, ObservedRows, to_device
from ..attention.metadata import AttentionMetadata, KVRead, build_metadata
from ..features.cross_model import LayerPattern
from ..kv_cache.entry import KVEntry, KVSlice, causal_reads, context_reads, group_layers_by_context
from ..kv_cache.pool import KVPool
from ..models.model_set import ModelSet
from ..models.tensor_parallel import TPGroup
from ..outputs import TokenLogprob
from ..request.request import DecodeState, Request, RequestState
from .prompt_scoring import ScoredRows, record_scores
from .sampler import SampleOutput, sample

if TYPE_CHECKING:
    from torch import Tensor


class ScheduledChunk(NamedTuple):
    """Tokens of one request that are computed in a batch."""

    request: Request
    q_start: int  # batch row of the first token
    token_start: int  # first token of the entry
    token_end: int  # end token (exclusive)
    num_drafts: int = 0  # rows that follow: drafted tokens, which are not part of the entry


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
    observed: list[ObservedRows] = field(default_factory=list)
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
        self.positions += range(entry.base_position + token_start, entry.base_position + row_end)
        pages, page_size = entry.pages, entry.page_size
        for token in range(token_start, row_end):
            self.slots.append(pages[token // page_size] * page_size + token % page_size)
        self.models += [entry.model] * (row_end - token_start)
        self.chunks.append(ScheduledChunk(request, q_start, token_start, token_end, len(draft)))
        self.computed_layers = entry.layers.computed
        entry.num_scheduled_tokens = token_end
        if entry.shared_header is not None:
            self.shared_headers.append(request)
        if request.observer is not None:
            self.observed.append(ObservedRows(request.observer, q_start, q_start + num_tokens))
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
                yield from context_reads(request.context, q_start, q_start + row_end - token_start, layer)
                header = request.entry.shared_header
                num_shared = 0 if header is None else header.num_tokens
                yield from causal_reads(request.entry, q_start, token_start, row_end, num_shared)
            if request.id in self.scored:
                yield from self.scored[request.id].reads(layer)


class OverlapScheduler:
    """Scheduler of the next decode step while the current one runs.

    `plan_next` builds the next batch and its metadata, assuming that every decode continues. On a
    GPU with CUDA graphs, `launch_next` also launches it. At most one step is prepared; it is
    discarded if the scheduler's next batch differs.
    """

    def __init__(
        self, model_set: ModelSet, make_forward_context: Callable[[Batch], ForwardContext], overlaps: bool
    ) -> None:
        self._model_set, self._make_forward_context, self.overlaps = model_set, make_forward_context, overlaps
        self._out_of_memory = False  # no memory for the results of two steps
        self.reset()

    def reset(self) -> None:
        """Discard the planned and the launched step."""
        self._planned: PlannedStep | None = None
        self._launched: LaunchedStep | None = None
        self._current: PlannedStep | None = None  # the running step, if it was planned

    def plan_next(self, batch: Batch) -> None:
        """Plan the step after `batch`, assuming that all sampled requests continue."""
        previous, self._current = self._current, None
        if not batch.sampled or batch.shared_headers or batch.drafts:
            return
        next_batch, contexts = Batch(tokens=[0] * len(batch.sampled)), []
        for row, request in enumerate(batch.sampled):
            entry, token = request.entry, len(request.entry.tokens)
            page, slot = divmod(token, entry.page_size)
            if page >= len(entry.pages):
                return
            next_batch.models.append(request.model)
            next_batch.positions.append(entry.base_position + token)
            next_batch.slots.append(entry.pages[page] * entry.page_size + slot)
            next_batch.chunks.append(ScheduledChunk(request, row, token, token + 1))
            contexts.append(request.context)
        if previous is not None and previous.is_continued_by(next_batch, contexts):
            step = previous.forward_context.next_step()
        else:
            step = self._make_forward_context(next_batch)
        step.layer_waiters = batch.layer_waiters
        if self.overlaps:
            self._model_set.get(next_batch.models[0]).prepare_graph(step)
        self._planned = PlannedStep(next_batch, contexts, step)

    def take_plan(self, batch: Batch) -> ForwardContext | None:
        """Return the forward context planned for `batch`; None if the batch differs."""
        planned, self._planned = self._planned, None
        if planned is None or not planned.matches(batch):
            return None
        self._current = planned
        planned.forward_context.layer_waiters = batch.layer_waiters
        return planned.forward_context

    def launch_next(self, sample_output: SampleOutput) -> None:
        """Launch the planned step on the device's sampled tokens.

        Skipped if a request reaches its token limit, or if its token may be sampled again on the
        host.
        """
        if self._planned is None or self._out_of_memory:
            return
        batch, _, step = self._planned
        requests = [chunk.request for chunk in batch.chunks]
        if any(
            request.finishes_next_step or (request.decode_state and request.decode_state.needs_host_sampling)
            for request in requests
        ):
            return
        try:
            tokens = sample_output.tokens.clamp(min=0)
            logits = self._model_set.get(batch.models[0]).launch_graph(tokens, batch.positions, step, batch.models)
        except torch.OutOfMemoryError:
            self._out_of_memory = True
            warnings.warn("not enough memory for the results of two steps: steps no longer overlap", stacklevel=2)
            return
        if logits is not None:
            self._launched = LaunchedStep(self._planned, sample_output, logits, _record_event(logits.device))

    def launched(self) -> list[Request]:
        """Return the requests whose next token the launched step computes.

        A request that ended or changed since the launch is not included.
        """
        if self._launched is None:
            return []
        if self._launched.event is not None:  # the current stream may differ from the launch stream
            torch.cuda.current_stream(self._launched.logits.device).wait_event(self._launched.event)
        chunks = self._launched.valid_rows
        self._launched = (
            self._launched._replace(row_by_request={chunk.request.id: chunk.q_start for chunk in chunks})
            if chunks
            else None
        )
        return [chunk.request for chunk in chunks]

    def take_logits(self, batch: Batch) -> "Tensor | None":
        """Return the launched step's logits for `batch`, at most once.

        None unless every request of the batch has a valid row in it.
        """
        launched, self._launched, self._current = self._launched, None, None
        if launched is None or not batch.chunks:
            return None
        rows = [launched.row_by_request.get(chunk.request.id) for chunk in batch.chunks]
        if None in rows:
            return None
        self._planned = None
        if rows == list(range(len(launched.logits))):
            self._current = launched.planned
            return launched.logits
        return launched.logits[to_device(rows, torch.long, launched.logits.device)]


class PlannedStep(NamedTuple):
    """Batch planned before its tokens are final, with its forward context."""

    batch: Batch
    contexts: list[tuple[KVSlice, ...]]  # of each request at planning time
    forward_context: ForwardContext

    def matches(self, batch: Batch) -> bool:
        """True if `batch` has the same rows, requests and contexts."""
        planned = self.batch
        if (planned.chunks, planned.slots, planned.positions) != (batch.chunks, batch.slots, batch.positions):
            return False
        is_same = True
        for context, chunk in zip(self.contexts, batch.chunks, strict=True):
            is_same &= context is chunk.request.context
        return is_same

    def is_continued_by(self, batch: Batch, contexts: list[tuple[KVSlice, ...]]) -> bool:
        """True if `batch` has the same requests, one token later.

        Each request's slot must follow its last one directly.
        """
        if len(batch.chunks) != len(self.batch.chunks):
            return False
        for i, chunk in enumerate(batch.chunks):
            is_same_request = chunk.request is self.batch.chunks[i].request and contexts[i] is self.contexts[i]
            if not is_same_request or batch.slots[i] != self.batch.slots[i] + 1:
                return False
        return True


class LaunchedStep(NamedTuple):
    """Planned step that the device is computing."""

    planned: PlannedStep
    sample_output: SampleOutput  # provides the input tokens
    logits: "Tensor"  # (B, V)
    event: Any  # CUDA event recorded after the step, or None
    # logits row by request id, set by `launched`
    row_by_request: Mapping[int, int] = MappingProxyType({})

    @property
    def valid_rows(self) -> list[ScheduledChunk]:
        """Chunks whose request continued with the token assumed at launch."""
        if not self.sample_output.host_tokens:  # the read was interrupted
            return []
        return [chunk for i, chunk in enumerate(self.planned.batch.chunks) if self._is_valid(i, chunk.request)]

    def _is_valid(self, row: int, request: Request) -> bool:
        batch, kv_slices, _ = self.planned
        if (
            request.state is not RequestState.RUNNING
            or request.cancel_when_computed
            or request.context is not kv_slices[row]
        ):
            return False
        entry, token_index = request.entry, batch.chunks[row].token_start
        same_place = (
            entry.num_computed_tokens == token_index
            and entry.slot(token_index) == batch.slots[row]
            and entry.base_position + token_index == batch.positions[row]
        )
        return same_place and entry.tokens[token_index:] == [self.sample_output.host_tokens[row]]


def _record_event(device: torch.device) -> Any:
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class ModelRunner:
    """Model execution and sampling; on a GPU, overlapped with scheduling."""

    def __init__(self, model_set: ModelSet, pool: KVPool, backend: Backend) -> None:
        self.overlaps = pool.keys[0].device.type == "cuda"
        self._model_set, self._pool = model_set, pool
        self.backend = backend
        self._overlap_scheduler = OverlapScheduler(model_set, self._make_forward_context, self.overlaps)

    def launched_requests(self) -> list[Request]:
        """Return the requests whose next token the device already computes.

        A batch of only these requests needs no further computation.
        """
        return self._overlap_scheduler.launched()

    def reset(self) -> None:
        """Discard planned and launched steps; called when no request runs."""
        self._overlap_scheduler.reset()

    def forward(self, batch: Batch) -> "Tensor | None":
        """Run the model on a batch.

        Returns the logits of the sampled rows, (len(batch.sampled), V) float32; None for a batch
        that is computed in some layers only.
        """
        if self.overlaps:
            logits = self._overlap_scheduler.take_logits(batch)
            if logits is not None:
                self._overlap_scheduler.plan_next(batch)
                return logits
        forward_context = self._overlap_scheduler.take_plan(batch) or self._make_forward_context(batch)
        hf_model = self._model_set.by_group[batch.chunks[0].request.weights_group]
        if batch.computed_layers is not None:
            for first, end in LayerPattern.from_layers(batch.computed_layers).ranges:
                forward_context.injected_hidden = {first: _hidden_inputs(batch, self._pool, first)} if first else {}
                hf_model.forward_layers(first, end, batch.tokens, batch.positions, forward_context, batch.models)
            return None
        rows = batch.logits_rows
        if hf_model.tp_group is None:
            logits = hf_model.forward(batch.tokens, batch.positions, forward_context, rows, batch.models)
        else:
            with _synchronized(batch, hf_model.tp_group):
                logits = hf_model.forward(batch.tokens, batch.positions, forward_context, rows, batch.models)
        self._overlap_scheduler.plan_next(batch)
        return record_scores(batch, logits) if batch.scored else logits

    def sample(self, logits: "Tensor", batch: Batch, *, launch_next: bool) -> list[int | None]:
        """Sample a token per row of `batch.sampled`; None for NaN logits.

        With tensor parallelism, every rank takes the tokens and log-probabilities of rank 0.

        Args:
            launch_next: launch the next step early; set if no other request could compute now.
        """
        decode_states: list[DecodeState] = []
        for request in batch.sampled:
            assert request.decode_state is not None
            decode_states.append(request.decode_state)
        for index, decode_state in batch.draft_states.items():
            decode_states[index] = decode_state
        sample_output = sample(logits, decode_states)
        if launch_next:
            self._overlap_scheduler.launch_next(sample_output)
        sampled, tp_group = sample_output.read(), self._model_set.base.tp_group
        if tp_group is None:
            return sampled
        logprobs = [
            g.next_logprob and [g.next_logprob.logprob, list(g.next_logprob.top.items())] for g in decode_states
        ]
        synced = tp_group.broadcast("tokens", [sampled, logprobs])
        for decode_state, token, logprob in zip(decode_states, *synced, strict=True):
            decode_state.next_logprob = logprob and TokenLogprob(token, logprob[0], dict(map(tuple, logprob[1])))
        tokens: list[int | None] = synced[0]
        return tokens

    def _make_forward_context(self, batch: Batch) -> ForwardContext:
        pool, model_info = self._pool, self._model_set.get(batch.models[0]).model_info
        metadata, layer_metadata = _build_metadata(batch, len(pool.keys))
        hidden = {}
        if batch.computed_layers is None and pool.hidden:
            hidden = {
                layer: pool.hidden[layer] for layer in self._model_set.captured_layers(batch.models[0], pool.hidden)
            }
        return ForwardContext(
            metadata,
            pool.keys,
            pool.values,
            model_info.attention_specs,
            self.backend,
            batch.layer_waiters,
            layer_metadata,
            hidden,
            observed=batch.observed,
        )


@contextmanager
def _synchronized(batch: Batch, tp_group: TPGroup) -> Iterator[None]:
    """Compute only if the batch is the same on every rank."""
    # wait for all loads first: a failed one must raise before any rank computes
    for wait_for_layer in batch.layer_waiters:
        wait_for_layer(0)
    with tp_group.synchronized_step(
        (batch.tokens, batch.positions, batch.slots, batch.logits_rows, list(batch.reads()))
    ):
        yield


def _build_metadata(batch: Batch, num_layers: int) -> tuple[AttentionMetadata, dict[int, AttentionMetadata]]:
    """Return attention metadata of layer 0 and of layers that differ.

    A layer differs if its context does. For most steps the second mapping is empty.
    """
    main_group, *other_groups = group_layers_by_context(batch.context_slices, num_layers)
    layer_metadata: dict[int, AttentionMetadata] = {}
    for layers in other_groups:
        metadata = build_metadata(batch.slots, batch.reads(layers[0]), batch.positions)
        layer_metadata |= dict.fromkeys(layers, metadata)
    return build_metadata(batch.slots, batch.reads(main_group[0]), batch.positions), layer_metadata


def _hidden_inputs(batch: Batch, pool: KVPool, layer: int) -> "Tensor":
    """Return the cached input hidden states of `layer`, (1, N, E)."""
    slots = []
    for chunk in batch.chunks:
        source = chunk.request.entry.layers.hidden_source
        assert source is not None and layer in source.layers.hidden
        batch.wait_for_inputs(source, layer)
        slots += [source.slot(token) for token in range(chunk.token_start, chunk.token_end)]
    return pool.hidden[layer][slots][None]
