"""Overlap scheduling: the next step is prepared while the current one runs.

After each step the next one is planned, assuming that every decode continues: its attention
metadata is that of the last step, advanced by one token. A GPU computes meanwhile.

If small batches are CUDA graphs, the next step is also launched, with the sampled tokens still on
the device, so the device does not wait for Python. The launched step is used for every request that
continued. Rows of finished requests are discarded: they write to slots that the request owned at
launch, and a new owner writes to these slots later on the same stream.
"""

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.backend import ForwardContext, to_device
from ..kv_cache.entry import KVSlice
from ..models.model_set import ModelSet
from ..request.request import Request, RequestState
from .batch import Batch, ScheduledChunk
from .sampler import SampleOutput


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

    def take_logits(self, batch: Batch) -> Tensor | None:
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
    logits: Tensor  # (B, V)
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
