"""Continuous-batching scheduler: packing of the next batch.

Requests are admitted (`admission`) and decodes get pages as they grow (`preemption`) first. A token may attend
to tokens of the same step, since each layer writes its KV before it reads. So one batch can run a chain of prefills,
or the last tokens of a finished message and the header of the next one.
"""

from collections.abc import Sequence
from operator import attrgetter

from ..config import SchedulerConfig
from ..execution.batch import Batch
from ..execution.drafts import Speculator
from ..kv_cache.manager import KVCacheManager
from ..request.request import Request, RequestState, has_inputs
from .admission import Admission
from .preemption import Preemptor
from .waiting_queue import Queues, WaitingQueue

BatchKey = tuple[str, frozenset[int] | None]  # weights group, computed layers (None: all)

MAX_SKIPPED_STEPS = 8  # steps for which a prompt without waiting readers may be deferred


class Scheduler:
    """Queues of waiting and running requests, packed into batches."""

    def __init__(
        self,
        queues: Queues,
        admission: Admission,
        preemptor: Preemptor,
        cache_manager: KVCacheManager,
        speculator: Speculator | None,
        config: SchedulerConfig,
    ) -> None:
        self.queues, self.admission, self.preemptor = queues, admission, preemptor
        self._cache_manager, self._speculator, self._config = cache_manager, speculator, config
        self.max_num_prefill_tokens = config.max_num_prefill_tokens
        self._last_scheduled_step: dict[BatchKey, int] = {}  # per batch group
        self._step_count = 0

    @property
    def waiting(self) -> WaitingQueue:
        """Requests that wait for parents or capacity."""
        return self.queues.waiting

    @property
    def running(self) -> list[Request]:
        """Admitted requests."""
        return self.queues.running

    @property
    def max_num_batched_tokens(self) -> int:
        """Token budget of a batch."""
        return self._config.max_num_batched_tokens

    @property
    def num_unfinished(self) -> int:
        """Number of waiting and running requests."""
        return len(self.waiting) + len(self.running)

    @property
    def num_runnable(self) -> int:
        """Number of requests that run or wait only for capacity."""
        return len(self.running) + sum(request.dependencies_ready for request in self.waiting)

    @property
    def has_runnable(self) -> bool:
        """True if a running request could compute in a step now."""
        allow_loading, stalled = not self._config.skip_loading, self.preemptor.stalled
        return any(
            request.num_pending_tokens and request not in stalled and _is_ready(request, allow_loading)
            for request in self.running
        )

    @property
    def blocked_on_memory(self) -> bool:
        """True if the next request or a running decode waits for capacity."""
        blocked = self.admission.blocked_request
        return (blocked is not None and blocked in self.waiting) or bool(self.preemptor.stalled)

    # -- packing ------------------------------------------------------------------------------------------

    def schedule(self, launched: Sequence[Request] = ()) -> Batch | None:
        """Admit waiting requests and build the next batch.

        Marks the batch's tokens as scheduled. Returns None if no request can run.

        Status-aware (KVFlow §3.2): requests whose context is being loaded are skipped in favor of
        ready requests. If none is ready, or without `skip_loading`, they run at once and each layer
        waits for its load.

        Args:
            launched: requests, of one weights group, whose next token is already being computed. If
                there are any, the batch consists of them alone.
        """
        self._step_count += 1
        while True:
            num_waiting, self.queues.current = len(self.waiting.numbers), None
            if num_waiting:
                if self.preemptor.stalled:
                    self._grow_stalled()
                self.admission.admit_waiting()
            self._grow_running()
            batch = self._next_batch(launched)
            was_admitted = len(self.waiting.numbers) < num_waiting  # what was found in the cache may make others ready
            if batch is not None or not (was_admitted or self.preemptor.resolve_stall()):
                return batch

    def _grow_stalled(self) -> None:
        """Allocate pages for decodes without one that come before the request that waits for capacity.

        Pages that were freed for such a decode would be taken by that request, whose entry is then evicted for the
        decode again, and so on.
        """
        first = self.admission.blocked_request
        self.preemptor.grow([r for r in self.preemptor.stalled if first is None or r.order < first.order])

    def _grow_running(self) -> None:
        """Allocate pages for decodes without room for their next token and footer."""
        growing = []
        for request in self.running:
            if request.decode_state is not None and request.state is RequestState.RUNNING:
                entry = request.entry
                if len(entry.tokens) + 1 + len(request.decode_state.footer) > len(entry.pages) * entry.page_size:
                    growing.append(request)
        if growing or self.preemptor.stalled:
            self.preemptor.grow(growing)

    def _next_batch(self, launched: Sequence[Request]) -> Batch | None:
        if launched:
            launched = [r for r in launched if r.state is RequestState.RUNNING and r not in self.preemptor.stalled]
        if launched:  # their context is fully loaded
            return self.pack(list(launched), allow_loading=True)
        groups = self._group_by_model(self._priority_order())
        allow_loading = not self._config.skip_loading
        for requests in groups:
            if batch := self.pack(requests, allow_loading):
                return batch
        if not allow_loading and self._cache_manager.offload_manager.jobs:
            for requests in groups:
                if batch := self.pack(requests, allow_loading=True):
                    return batch
        return None

    def _priority_order(self) -> list[Request]:
        """Order requests: single tokens by longest wait, then prompts by arrival.

        While a decode waits for its first token, a prompt that no running decode attends to is
        deferred, for at most MAX_SKIPPED_STEPS steps: its cost is the same later, and it delays no
        other request then.
        """
        single: list[Request] = []
        prompts: list[Request] = []
        has_first_token_pending, stalled = False, self.preemptor.stalled
        for request in self.running:
            num_pending = len(request.entry.tokens) - request.entry.num_scheduled_tokens
            if num_pending and request not in stalled:
                (single if num_pending == 1 else prompts).append(request)
            has_first_token_pending |= request.decode_state is not None and request.times.first_token is None
        single.sort(key=attrgetter("scheduling.last_step"))
        if not prompts:
            return single
        read_ids: set[int] = set()
        for request in reversed(self.running):
            if request.is_decode or request.entry.id in read_ids:
                read_ids.update(entry.id for entry in request.read_entries)
        urgent = [
            request
            for request in prompts
            if request.is_decode
            or request.entry.id in read_ids
            or request.scheduling.num_skipped_steps >= MAX_SKIPPED_STEPS
        ]
        if has_first_token_pending:
            for request in prompts:
                request.scheduling.num_skipped_steps += request not in urgent
            prompts = urgent
        return [*single, *(prompts or urgent)]

    def _group_by_model(self, requests: list[Request]) -> list[list[Request]]:
        """Group requests that can share a batch: same weights, same computed layers.

        The least recently scheduled group comes first.
        """
        groups: dict[BatchKey, list[Request]] = {}
        for request in requests:
            groups.setdefault((request.weights_group, request.entry.layers.computed), []).append(request)
        if len(groups) <= 1:
            return [requests] if requests else []
        return [groups[key] for key in sorted(groups, key=lambda key: self._last_scheduled_step.get(key, 0))]

    def pack(self, requests: list[Request], allow_loading: bool = False) -> Batch | None:
        """Pack requests in order into a batch, up to the token budget.

        Returns None if no request is ready.
        """
        batch, token_budget, num_chunks = Batch(), self._config.max_num_batched_tokens, -1
        prefill_budget = token_budget
        if self.max_num_prefill_tokens is not None and any(
            _is_decoding(request) and _is_ready(request, allow_loading) for request in requests
        ):
            prefill_budget = self.max_num_prefill_tokens
        speculator = self._speculator
        drafts = {} if speculator is None else speculator.propose(requests)
        while num_chunks < len(batch.chunks) < len(requests):  # repeat while new chunks make others ready
            num_chunks = len(batch.chunks)
            for request in requests:
                entry, self.queues.current = request.entry, request
                num_pending = len(entry.tokens) - entry.num_scheduled_tokens
                is_decoding = _is_decoding(request)
                limit = token_budget if is_decoding else min(token_budget, prefill_budget)
                if not num_pending or limit <= 0 or entry.num_scheduled_tokens > entry.num_computed_tokens:
                    continue
                if _is_ready(request, allow_loading) and (not batch.chunks or has_inputs(request)):
                    num_tokens, num_queries = min(num_pending, limit), None
                    if request.decode_state is not None and request.decode_state.prompt_scorer is not None:
                        scorer = request.decode_state.prompt_scorer
                        num_queries, num_tokens = scorer.plan_rows(request, batch, limit)
                        if not num_queries and not num_tokens:
                            continue
                    draft = drafts.get(request.id, ())
                    batch.add_chunk(request, num_tokens, draft, num_queries)
                    request.scheduling.last_step = self._step_count
                    num_rows = num_tokens + len(draft) + (num_queries or 0)
                    token_budget -= num_rows
                    prefill_budget -= 0 if is_decoding else num_rows
        self.queues.current = None
        if not batch.chunks:
            return None
        self._last_scheduled_step[requests[0].weights_group, batch.computed_layers] = self._step_count
        offload_manager = self._cache_manager.offload_manager
        if offload_manager.jobs:
            batch.layer_waiters = offload_manager.layer_waiters(batch.context_slices)
            batch.wait_for_inputs = offload_manager.wait_for_inputs
        return batch

    def commit(self, batch: Batch) -> None:
        """Mark the batch's tokens as computed."""
        for chunk in batch.chunks:
            chunk.request.entry.num_computed_tokens = chunk.token_end

    def rollback(self) -> None:
        """Unschedule the tokens of a step that was not computed."""
        for request in self.running:
            request.entry.num_scheduled_tokens = request.entry.num_computed_tokens

    def check(self) -> None:
        """Check the invariants of both queues."""
        assert all(request.state is RequestState.WAITING for request in self.waiting)
        assert all(request.state in (RequestState.RUNNING, RequestState.TOKENS_FINAL) for request in self.running)
        self.waiting.check()
        for request in self.running:
            assert request.entry.num_scheduled_tokens == request.entry.num_computed_tokens
            assert request.num_pending_tokens, "a running request has nothing to compute"
            owner = request.request_owner
            assert all(owner in entry.owners for entry in request.read_entries), "a context entry may be evicted"


def _is_decoding(request: Request) -> bool:
    """True if the request generates, and goes on by one token."""
    return request.state is RequestState.RUNNING and request.num_generated > 0 and request.num_pending_tokens == 1


def _is_ready(request: Request, allow_loading: bool) -> bool:
    """True if every context token is computed or scheduled in this step.

    With `allow_loading`, tokens still being loaded count too: each layer waits for its copy. Of the
    source entry of a partial prefill, the inputs alone are needed. An entry whose first tokens are
    still read from another one has readers only after the step that copies them.
    """
    source = request.entry.layers.hidden_source
    if source is not None and not source.is_complete:
        if source.location != "loading" or not (allow_loading or has_inputs(request)):
            return False
    for entry, first, count, *_ in request.context:
        if entry.num_scheduled_tokens < first + count and not (allow_loading and entry.location == "loading"):
            return False
        if entry.shared_header is not None:
            return False
    return True
