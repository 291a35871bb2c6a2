"""Continuous-batching scheduler: admission, packing of the next batch, preemption.

Requests are admitted in order of priority and submission; one that waits for capacity is passed over
by a bounded number of later ones that fit. Decodes get pages as they grow (`preemption`). A token may attend
to tokens of the same step, since each layer writes its KV before it reads. So one batch can run a chain of prefills,
or the last tokens of a finished message and the header of the next one.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from ..context.placement import PLACERS, insert_into_prefix_tree, reuse_header
from ..errors import CacheFullError, ChoreographError, LostContextError, RequestFailedError, RequestTooLargeError
from ..execution.model_runner import Batch
from ..kv_cache.entry import EntryLayers, KVEntry
from ..kv_cache.splits import split_path
from ..outputs import Usage
from ..request.request import Request, RequestState, has_inputs, wrap_error
from .preemption import MAX_PASSED_OVER, Preemptor
from .waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from .core import EngineCore

BatchKey = tuple[str, frozenset[int] | None]  # weights group, computed layers (None: all)

MAX_BLOCKED = 16  # requests that wait for capacity, after which admission ends for this step
MAX_SKIPPED_STEPS = 8  # steps for which a prompt without waiting readers may be deferred


class Scheduler:
    """Queues of waiting and running requests, packed into batches."""

    def __init__(self, core: "EngineCore") -> None:
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.blocked_request: Request | None = None  # next in order, if it waits for capacity
        self.current_request: Request | None = None  # being admitted or packed: the cause of an exception
        self.is_probing = False  # only a part of the requests is queued: none ends for lack of memory
        self._core, self._cache_manager, self._config = core, core.cache_manager, core.config.scheduler
        self.max_num_prefill_tokens = self._config.max_num_prefill_tokens
        self._last_scheduled_step: dict[BatchKey, int] = {}  # per batch group
        self._step_count = 0
        self.preemptor = Preemptor(core, self)

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
        return (self.blocked_request is not None and self.blocked_request in self.waiting) or bool(
            self.preemptor.stalled
        )

    # -- admission ----------------------------------------------------------------------------------------

    def _admit_waiting(self) -> None:
        """Admit the requests that fit, in order.

        Requests that wait for parents are skipped. The first one that waits for capacity may own a
        part of its context; later ones are admitted only if all of theirs is on the device, and at
        most MAX_PASSED_OVER of them before any one that waits.
        """
        blocked: list[Request] = []
        if self._core.model_set.remote:  # only remote entries can be lost
            self._core.cross_model_reuse.recompute_lost(self.waiting)
        self.waiting.start_pass()
        while len(self.running) < self._config.max_num_seqs:
            request = self.waiting.next_candidate()
            if request is None:
                break
            self.current_request = request
            for parent in request.dependencies:
                if parent.state in (RequestState.FAILED, RequestState.CANCELLED):
                    reason = parent.error or parent.state.value
                    kind = LostContextError if isinstance(parent.error, LostContextError) else RequestFailedError
                    self._core.fail(request, kind(f"parent {parent.id} failed: {reason}"))
                    break
            else:
                if not request.dependencies_ready:
                    self.waiting.park(request)
                    continue
                candidates: list[Request] | None = [request]
                if request.repair is not None:
                    candidates = None if blocked else self._core.repair_planner.expand(request)
                    if candidates is None:  # it scores its context, which is loaded
                        blocked.append(request)
                for candidate in candidates or ():
                    if not candidate.dependencies_ready:
                        break  # a prefill of its repair failed
                    if not self._try_admit(candidate, is_first=not blocked):
                        blocked.append(candidate)
                        break
                    if candidate.state is RequestState.RUNNING:
                        for other in blocked:
                            other.num_passed_over += 1
                if len(blocked) == MAX_BLOCKED or any(other.num_passed_over >= MAX_PASSED_OVER for other in blocked):
                    break
        self.blocked_request = blocked[0] if blocked else None

    def _try_admit(self, request: Request, is_first: bool) -> bool:
        """Admit a request; return False if it must wait for capacity.

        Args:
            is_first: no earlier request waits for capacity.
        """
        try:
            if not is_first and self._cache_manager.num_reclaimable(request.computed_layers is not None) < (
                self._cache_manager.pool.num_pages_for(len(request.prompt) + request.num_generated)
            ):
                return False
            if request.entry is None:
                self._admit(request, may_load=is_first)
            else:
                self.preemptor.resume(request, may_load=is_first)
        except CacheFullError as exc:
            if not is_first:
                self._core.context_loader.release(request.id)
            may_free = self._cache_manager.has_pending or any(not other.is_finished for other in self.running)
            if (may_free or self.is_probing or not is_first) and not isinstance(exc, RequestTooLargeError):
                return False
            self._core.fail(request, exc)
        except ChoreographError as exc:
            self._core.fail(request, exc)
        except Exception as exc:
            self._core.fail_incomplete(request, wrap_error(request, "admitting it raised", exc))
        return True

    def _admit(self, request: Request, may_load: bool) -> None:
        """Place a request, allocate its KV entry and start it, or raise."""
        cache, model_info, decode_state = self._cache_manager, self._core.hf_model.model_info, request.decode_state
        request.resolve_dependencies()
        self._core.cross_model_reuse.resolve(request)
        placement = PLACERS[request.mode](request, cache, model_info)
        if request.mode == "prefix":
            split_path(cache, placement.context, len(placement.tokens) + 1)
        # it may not fit together with entries of which it reads a part
        if request.mode == "prefix" and (
            request.skips_prefix or not self._core.context_loader.fits(request, placement)
        ):
            placement, request.skips_prefix = PLACERS["naive"](request, cache, model_info), True
        for kv_slice in placement.context:
            error = kv_slice.entry.error
            if error is not None and kv_slice.token_start + kv_slice.num_tokens > kv_slice.entry.num_computed_tokens:
                raise RequestFailedError(f"its context failed: {error}") from error
        num_context_tokens = sum(s.num_tokens for s in placement.context if s.visible_in(0))
        if any(parent.is_part_of_answer and parent.usage.computed_tokens for parent in request.parents):
            num_context_tokens -= request.count_own_context()
        if placement.cached_entry is not None:
            request.entry = placement.cached_entry
            cache.acquire(request.entry, request.message_owner)
            request.usage = Usage(cached_tokens=num_context_tokens + len(placement.tokens))
            self._core.events.emit(
                "hit", request=request.id, tokens=len(placement.tokens), where=request.entry.location
            )
            self._core.finish(request, RequestState.DONE, "cached")
            return
        is_resumed = request.num_generated > 0
        if decode_state is not None and not is_resumed:
            request.start_generation(model_info.max_positions - placement.position - len(placement.tokens))
        num_prompt_tokens = len(placement.tokens) - request.num_generated
        required_tokens, max_tokens = request.token_limits(num_prompt_tokens, model_info.max_positions)
        num_tokens = len(placement.tokens) + (1 + len(request.footer) if request.is_decode else 0)
        self._core.context_loader.ensure_resident(
            request.id,
            placement.read_entries,
            max(num_tokens, required_tokens),
            partial=request.computed_layers is not None,
            may_load=may_load,
        )
        hidden_layers = cache.pool.hidden if request.computed_layers is None else ()
        entry = request.entry = cache.allocate_entry(
            placement.tokens,
            placement.position,
            placement.context,
            capacity=num_tokens,
            max_tokens=max_tokens,
            owner=request.request_owner,
            model=request.model,
            layers=EntryLayers(
                request.computed_layers,
                hidden=self._core.model_set.captured_layers(request.model, hidden_layers),
                hidden_source=placement.hidden_source,
            ),
        )
        try:
            for read_entry in entry.read_entries:
                cache.acquire(read_entry, request.request_owner)
            self._core.context_loader.release(request.id)
            request.context = entry.context
            cache.hints.set_agent(entry, request.agent_key)
            if not is_resumed:
                request.usage = request.admission_usage(num_context_tokens)
            if request.mode == "choreographed":
                cache.acquire(entry, request.message_owner)
            if placement.content_hash is not None:
                self._core.events.emit("miss", request=request.id, tokens=len(placement.tokens))
                cache.register(entry, placement.content_hash)
            if request.mode == "prefix" and not request.skips_prefix:  # else it would keep entries it does not read
                insert_into_prefix_tree(request, cache)
        except BaseException:  # the request stays in the waiting queue
            self.preemptor.release_allocation(request)
            raise
        request.state = RequestState.RUNNING
        self.waiting.discard(request)
        self.waiting.wake(request)
        self.running.append(request)
        self._core.release_dependencies(request.dependencies)
        self._core.events.emit(
            "admitted",
            request=request.id,
            entry=entry.id,
            cached=request.usage.cached_tokens,
            num_tokens=len(entry.tokens),
        )
        if request.mode == "choreographed" and request.computed_layers is None and not request.computes_all_rows:
            reuse_header(cache, request)

    def add_recompute(self, entry: KVEntry) -> None:
        """Start recomputing a discarded KV entry in its newly allocated pages."""
        request = Request.for_recompute(self._core.new_id(), entry, self._core.model_set.weights_group(entry.model))
        try:
            for read_entry in entry.read_entries:
                self._cache_manager.acquire(read_entry, request.request_owner)
            self._cache_manager.acquire(entry, request.request_owner)
            self._core.events.emit("recomputing", request=request.id, entry=entry.id, tokens=len(entry.tokens))
        except BaseException:
            self.preemptor.release_allocation(request)
            raise
        self.running.append(request)

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
            num_waiting, self.current_request = len(self.waiting.numbers), None
            if num_waiting:
                self._admit_waiting()
                self.current_request = None
            self._grow_running()
            batch = self._next_batch(launched)
            was_admitted = len(self.waiting.numbers) < num_waiting  # what was found in the cache may make others ready
            if batch is not None or not (was_admitted or self.preemptor.resolve_stall()):
                return batch

    def _grow_running(self) -> None:
        """Allocate pages for decodes without room for their next token and footer."""
        growing = []
        for request in self.running:
            if request.decode_state is not None and request.state is RequestState.RUNNING:
                entry = request.entry
                if len(entry.tokens) + 1 + len(request.footer) > len(entry.pages) * entry.page_size:
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
            has_first_token_pending |= request.decode_state is not None and request.first_token_time is None
        single.sort(key=attrgetter("last_scheduled_step"))
        if not prompts:
            return single
        read_ids: set[int] = set()
        for request in reversed(self.running):
            if request.is_decode or request.entry.id in read_ids:
                read_ids.update(entry.id for entry in request.read_entries)
        urgent = [
            request
            for request in prompts
            if request.is_decode or request.entry.id in read_ids or request.num_skipped_steps >= MAX_SKIPPED_STEPS
        ]
        if has_first_token_pending:
            for request in prompts:
                request.num_skipped_steps += request not in urgent
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
        speculator = self._core.speculator
        drafts = {} if speculator is None else speculator.propose(requests)
        while num_chunks < len(batch.chunks) < len(requests):  # repeat while new chunks make others ready
            num_chunks = len(batch.chunks)
            for request in requests:
                entry, self.current_request = request.entry, request
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
                    request.last_scheduled_step = self._step_count
                    num_rows = num_tokens + len(draft) + (num_queries or 0)
                    token_budget -= num_rows
                    prefill_budget -= 0 if is_decoding else num_rows
        self.current_request = None
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
            assert all(entry.owners for entry in request.read_entries), "a context entry has no owner"


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
