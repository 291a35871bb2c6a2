"""Continuous-batching scheduler: admits requests and packs the next batch.

Requests are admitted in order of submission, each with all the pages it can ever need, so a
running request never waits for capacity and every step makes progress. A token may attend to
tokens of the same step (each layer writes its KV before it reads), so a chain of prefills, or a
finished message's last tokens and the header that follows, run in one batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..attention.metadata import KVRead
from ..errors import CacheFullError, ChoreographError, RequestFailedError, RequestTooLargeError
from ..kv_cache.entry import KVEntry, KVSlice, causal_reads, context_reads
from ..kv_cache.manager import KVCacheManager
from .request import Request, RequestState

BatchKey = tuple[str, frozenset[int] | None]  # weights group, computed layers (None: all)

MAX_SKIPPED_STEPS = 8  # steps for which a prompt without waiting readers may be deferred


class ScheduledChunk(NamedTuple):
    """Tokens of one request that are computed in a batch."""

    request: Request
    q_start: int  # batch row of the first token
    token_start: int  # first token of the entry
    token_end: int  # end token (exclusive)


@dataclass
class Batch:
    """Tokens of one step and the requests they belong to."""

    tokens: list[int] = field(default_factory=list)  # (N,) token ids
    positions: list[int] = field(default_factory=list)  # (N,) logical positions
    slots: list[int] = field(default_factory=list)  # (N,) KV cache slots to write
    models: list[str] = field(default_factory=list)  # (N,) model or adapter of each token
    chunks: list[ScheduledChunk] = field(default_factory=list)  # in row order
    # called with a layer; each blocks until that layer is loaded
    layer_waiters: tuple[Callable[[int], None], ...] = ()

    @property
    def sampled_rows(self) -> list[tuple[Request, int]]:
        """Return (request, batch row) pairs whose logits are sampled."""
        return [
            (request, q_start + token_end - token_start - 1)
            for request, q_start, token_start, token_end in self.chunks
            if request.state is RequestState.RUNNING
            and request.decode_state is not None
            and not request.cancel_when_computed
            and token_end == len(request.kv.tokens)
        ]

    @property
    def computed_layers(self) -> frozenset[int] | None:
        """Layers computed for all tokens of the batch; None: all layers."""
        return self.chunks[0].request.kv.computed_layers

    @property
    def context_slices(self) -> Iterator[KVSlice]:
        """KV slices that the batch's requests attend to."""
        return (kv_slice for chunk in self.chunks for kv_slice in chunk.request.context)

    def reads(self, layer: int = 0) -> Iterator[KVRead]:
        """Yield the KV reads of every chunk in one layer."""
        for request, q_start, token_start, token_end in self.chunks:
            yield from context_reads(request.context, q_start, q_start + token_end - token_start, layer)
            yield from causal_reads(
                request.kv,
                q_start,
                token_start,
                token_end,
                request.shared_header.num_tokens if request.shared_header else 0,
            )


class Scheduler:
    """Decides which requests compute next.

    Args:
        admit: places a request and allocates its KV entry, or raises.
        fail: ends a request with an error.
        weights_group: maps a model to its weights; models of equal weights share a batch.
        recover_lost: restores lost KV that waiting requests depend on.
    """

    def __init__(
        self,
        cache_manager: KVCacheManager,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        skip_loading: bool,
        admit: Callable[[Request], None],
        fail: Callable[[Request, ChoreographError], None],
        weights_group: Callable[[str], str],
        recover_lost: Callable[[Sequence[Request]], None],
    ) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._blocked_request: Request | None = None  # next in order, if it waits for capacity
        self._cache_manager = cache_manager
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._skip_loading = skip_loading
        self._admit = admit
        self._fail = fail
        self._weights_group = weights_group
        self._recover_lost = recover_lost
        self._last_scheduled_step: dict[BatchKey, int] = {}  # per batch group
        self._step_count = 0

    @property
    def num_unfinished(self) -> int:
        """Number of waiting and running requests."""
        return len(self.waiting) + len(self.running)

    @property
    def num_runnable(self) -> int:
        """Number of requests that run or wait only for capacity."""
        return len(self.running) + sum(self._dependencies_ready(request) for request in self.waiting)

    @property
    def has_runnable(self) -> bool:
        """True if a running request could compute in a step now."""
        allow_loading = not self._skip_loading
        return any(_num_pending_tokens(request) and _is_ready(request, allow_loading) for request in self.running)

    @property
    def blocked_on_memory(self) -> bool:
        """True if the next request in order waits for capacity."""
        return self._blocked_request in self.waiting

    def schedule(self, launched: Sequence[Request] = ()) -> Batch | None:
        """Build and schedule the next batch; None if nothing can run.

        Status-aware (KVFlow §3.2): requests whose context is being loaded are skipped in favor of
        ready ones. If none is ready, or without `skip_loading`, they run at once and each layer
        waits for its load.

        Args:
            launched: requests, of one weights group, whose next token is already being computed. If
                there are any, the batch consists of them alone.
        """
        self._admit_waiting()
        self._step_count += 1
        if launched:  # their context is fully loaded
            return self._first_nonempty([list(launched)], allow_loading=True)
        groups = self._group_by_model(self._priority_order())
        batch = self._first_nonempty(groups, allow_loading=not self._skip_loading)
        if batch is None and self._skip_loading and self._cache_manager.offload_manager.num_loads:
            batch = self._first_nonempty(groups, allow_loading=True)
        return batch

    def _group_by_model(self, requests: list[Request]) -> list[list[Request]]:
        """Group requests that can share a batch: same weights, same computed layers.

        The least recently scheduled group comes first.
        """
        groups: dict[BatchKey, list[Request]] = {}
        for request in requests:
            groups.setdefault((self._weights_group(request.model), request.kv.computed_layers), []).append(request)
        return [groups[key] for key in sorted(groups, key=lambda key: self._last_scheduled_step.get(key, 0))]

    def _first_nonempty(self, groups: list[list[Request]], *, allow_loading: bool) -> Batch | None:
        """Return the batch of the first group that has tokens to compute."""
        for requests in groups:
            batch = self._pack(requests, allow_loading=allow_loading)
            if batch.chunks:
                self._last_scheduled_step[self._weights_group(requests[0].model), requests[0].kv.computed_layers] = (
                    self._step_count
                )
                return batch
        return None

    def _pack(self, requests: list[Request], *, allow_loading: bool) -> Batch:
        """Fill a batch from requests in order, up to the token budget."""
        batch, token_budget, num_chunks = Batch(), self._max_num_batched_tokens, -1
        while num_chunks < len(batch.chunks) < len(requests):  # repeat while new chunks make others ready
            num_chunks = len(batch.chunks)
            for request in requests:
                entry, pending = request.kv, _num_pending_tokens(request)
                if (
                    not pending
                    or token_budget <= 0
                    or entry.num_scheduled_tokens > entry.num_computed_tokens
                    or not _is_ready(request, allow_loading)
                ):
                    continue
                num_tokens = min(pending, token_budget)
                _schedule_chunk(batch, request, num_tokens)
                request.last_scheduled_step = self._step_count
                token_budget -= num_tokens
        if self._cache_manager.offload_manager.num_loads:
            loading = {s.entry.transfer for s in batch.context_slices if s.entry.location == "loading"}
            batch.layer_waiters = self._cache_manager.offload_manager.layer_waiters(t for t in loading if t is not None)
        return batch

    def _priority_order(self) -> list[Request]:
        """Order requests: single tokens by longest wait, then prompts by arrival.

        While a decode waits for its first token, a prompt that no running decode attends to is
        deferred for at most MAX_SKIPPED_STEPS steps: it costs the same later and then delays no
        request.
        """
        single = sorted((c for c in self.running if _num_pending_tokens(c) == 1), key=lambda c: c.last_scheduled_step)
        prompts = [c for c in self.running if _num_pending_tokens(c) > 1]
        if not prompts:
            return single
        read_ids: set[int] = set()
        for request in reversed(self.running):
            if request.is_decode or request.kv.id in read_ids:
                read_ids.update(kv_slice.entry.id for kv_slice in request.context)
        urgent = [c for c in prompts if c.is_decode or c.kv.id in read_ids or c.num_skipped_steps >= MAX_SKIPPED_STEPS]
        if any(c.is_decode and c.first_token_time is None for c in self.running):
            for request in prompts:
                request.num_skipped_steps += request not in urgent
            prompts = urgent
        return [*single, *(prompts or urgent)]

    def _admit_waiting(self) -> None:
        """Admit requests in order until one has to wait for capacity.

        Requests that wait for parents are skipped.
        """
        self._blocked_request = None
        self._recover_lost(self.waiting)
        for request in list(self.waiting):
            if len(self.running) >= self._max_num_seqs:
                break
            if request.state is not RequestState.WAITING:
                continue
            failed = next(
                (p for p in request.dependencies if p.state in (RequestState.FAILED, RequestState.CANCELLED)), None
            )
            if failed is not None:
                self._fail(
                    request, RequestFailedError(f"parent {failed.id} failed: {failed.error or failed.state.value}")
                )
            elif self._dependencies_ready(request) and not self._try_admit(request):
                self._blocked_request = request
                break

    def _dependencies_ready(self, request: Request) -> bool:
        """True if all tokens the request depends on are final."""
        if request.source is not None and not (request.source.tokens_final and request.source.position is not None):
            return False
        if request.mode != "choreographed":
            return all(p.tokens_final for p in request.parents)
        return all(p.tokens_final and all(v.entry is not None for v in p.source_chain) for p in request.parents)

    def _try_admit(self, request: Request) -> bool:
        """Admit a request; return False if it must wait for capacity."""
        try:
            self._admit(request)
        except CacheFullError as exc:
            is_permanent = isinstance(exc, RequestTooLargeError)
            if not is_permanent and (
                self._cache_manager.has_pending or any(not running.is_finished for running in self.running)
            ):
                return False
            self._fail(request, exc)
        except ChoreographError as exc:
            self._fail(request, exc)
        return True

    def preempt_readers(self, lost_entry: KVEntry) -> None:
        """Requeue all requests that depend on a lost entry, transitively.

        None of them has computed anything yet, since part of their context was never loaded.
        """
        lost_ids, has_more = {lost_entry.id}, True
        while has_more:
            readers = [c for c in self.running if lost_ids & {s.entry.id for s in c.context}]
            for request in readers:
                lost_ids.add(request.kv.id)
                self._preempt(request)
            has_more = bool(readers)

    def _preempt(self, request: Request) -> None:
        """Undo the admission of a running request."""
        entry = request.kv
        is_partial = entry.computed_layers is not None  # its first tokens did not need the lost layers
        assert is_partial or request.shared_header is not None or not entry.num_computed_tokens, (
            "a request has computed tokens without its context"
        )
        self.running.remove(request)
        self.release_allocation(request)
        if request.is_recompute:
            request.state = RequestState.CANCELLED
            return
        self.requeue(request)

    def release_allocation(self, request: Request) -> None:
        """Release all KV of an admitted request and discard its entry.

        The entry has no computed tokens, or none that remain valid.
        """
        entry = request.kv
        entry.owners -= {request.request_owner, request.message_owner}
        self._cache_manager.discard(entry)
        for kv_slice in (*request.context, *entry.context):
            self._cache_manager.release(kv_slice.entry, request.request_owner)
        request.entry, request.context, request.shared_header = None, (), None

    def requeue(self, request: Request) -> None:
        """Put a request back into the waiting queue, in order of submission."""
        request.state, request.entry = RequestState.WAITING, None
        for parent in request.dependencies:
            parent.num_waiting_dependents += 1
        index = next((i for i, other in enumerate(self.waiting) if other.id > request.id), len(self.waiting))
        self.waiting.insert(index, request)

    def commit(self, batch: Batch) -> None:
        """Mark the batch's tokens as computed."""
        for chunk in batch.chunks:
            chunk.request.kv.num_computed_tokens = chunk.token_end

    def rollback(self) -> None:
        """Unschedule the tokens of a step that was not computed."""
        for request in self.running:
            request.kv.num_scheduled_tokens = request.kv.num_computed_tokens

    def check(self) -> None:
        """Check the invariants of both queues."""
        assert all(request.state is RequestState.WAITING for request in self.waiting)
        assert all(request.state in (RequestState.RUNNING, RequestState.TOKENS_FINAL) for request in self.running)
        for request in self.running:
            assert request.kv.num_scheduled_tokens == request.kv.num_computed_tokens
            assert _num_pending_tokens(request), "a running request has nothing to compute"
            assert all(kv_slice.entry.owners for kv_slice in request.context), "a context entry has no owner"


def _num_pending_tokens(request: Request) -> int:
    """Number of tokens that are not scheduled yet."""
    entry = request.kv
    return len(entry.tokens) - entry.num_scheduled_tokens


def _is_ready(request: Request, allow_loading: bool) -> bool:
    """True if every context token is computed or scheduled in this step.

    With `allow_loading`, tokens still being loaded count too: each layer waits for its copy. The
    source entry of a partial prefill must be complete.
    """
    source = request.kv.source_entry
    if source is not None and not (source.is_complete or (allow_loading and source.location == "loading")):
        return False
    for entry, first, count, *_ in request.context:
        if entry.num_scheduled_tokens < first + count and not (allow_loading and entry.location == "loading"):
            return False
    return True


def _schedule_chunk(batch: Batch, request: Request, num_tokens: int) -> None:
    """Append the request's next `num_tokens` tokens to the batch."""
    entry = request.kv
    q_start, token_start = len(batch.tokens), entry.num_scheduled_tokens
    token_end = token_start + num_tokens
    batch.tokens += entry.tokens[token_start:token_end]
    batch.positions += range(entry.base_position + token_start, entry.base_position + token_end)
    batch.slots += [entry.slot(token) for token in range(token_start, token_end)]
    batch.models += [entry.model] * num_tokens
    batch.chunks.append(ScheduledChunk(request, q_start, token_start, token_end))
    entry.num_scheduled_tokens = token_end
