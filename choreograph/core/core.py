"""Engine core: admission of requests, the step loop, and how requests end."""

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..attention.autotune import create_tuned_backend
from ..attention.cpp_backend import BackendUnavailableError
from ..config import EngineConfig
from ..context.placement import copy_headers, insert_into_prefix_tree, namespace_of
from ..context.residency import ContextLoader
from ..errors import (
    CacheFullError,
    ChoreographError,
    MessageReleasedError,
    ModelError,
    RequestFailedError,
    SessionClosedError,
)
from ..events import EventBus
from ..execution.drafts import Speculator
from ..execution.model_runner import Batch, ModelRunner
from ..features.cross_model import CrossModelReuse
from ..features.repair.planner import RepairPlanner
from ..kv_cache.hashing import content_hash
from ..kv_cache.manager import KVCacheManager
from ..kv_cache.prefetch import Prefetcher
from ..kv_cache.transfer import TransferError
from ..models.hf_model import HFModel
from ..models.model_set import ModelSet
from ..outputs import FinishReason
from ..request.request import Request, RequestState, wrap_error
from ..utils import DeferSigintLock
from .fault_isolation import find_unschedulable
from .scheduler import Scheduler

if TYPE_CHECKING:
    from torch import Tensor


class EngineCore:
    """Scheduler, KV cache and models that run requests to completion.

    `choreograph.Engine` adds sessions and chat templates.
    """

    def __init__(
        self,
        hf_model: HFModel,
        config: EngineConfig,
        cache_manager: KVCacheManager,
        events: EventBus,
        lock: DeferSigintLock,
    ) -> None:
        self.hf_model = hf_model
        self.model_set = ModelSet(hf_model)
        self.config, self.cache_manager, self.events, self.lock = config, cache_manager, events, lock
        model_info = hf_model.model_info
        try:
            self.backend, self.backend_fallback_reason = create_tuned_backend(
                config.backend, model_info.head_shape, model_info.dtype, model_info.device
            )
        except BackendUnavailableError as reason:
            raise ChoreographError(f"backend={config.backend!r}: {reason}; use backend='auto'") from None
        self.model_runner = ModelRunner(self.model_set, self.cache_manager.pool, self.backend)
        self.new_id = itertools.count(1).__next__
        self.speculator = Speculator(config.draft_tokens, config.scheduler) if config.draft_tokens else None
        self.scheduler = Scheduler(self)
        self.context_loader = ContextLoader(self.cache_manager, self.scheduler, model_info.max_positions)
        self.cross_model_reuse = CrossModelReuse(self.cache_manager, self.model_set, self.scheduler, self.events)
        self.repair_planner = RepairPlanner(self)
        self.prefetcher = Prefetcher(cache_manager, events)
        self.num_steps = 0
        self.num_batched_tokens = 0
        self.closed = False
        self.wall_clock = True  # False in simulations on a virtual clock
        self.yield_hook: Callable[[], bool] | None = None  # set by `run_concurrently`
        self._pending_logprobs: deque[tuple[Request, Tensor]] = deque()  # not given to their callbacks yet

    # -- submission ---------------------------------------------------------------------------------------

    def add_requests(self, requests: Sequence[Request], seeds: random.Random) -> None:
        """Queue validated requests, all or none, without computing anything.

        The caller dispatches the events after it has registered the requests, as after `release`.

        Args:
            seeds: source of the seeds of decodes that set none; a refused request consumes no seed.

        Raises:
            SessionClosedError: if the engine is closed.
            MessageReleasedError: if a parent was released.
            CacheFullError: if a request does not fit even in an empty cache.
        """
        with self.lock:
            if self.closed:
                raise SessionClosedError("the engine is closed: make a new one")
            for request in requests:
                for parent in request.parents:
                    if parent.released:
                        raise MessageReleasedError(f"parent {parent.id} was released: keep it until its last use")
                self._check_fits(request)
            for request in requests:
                if request.decode_state is not None:
                    own_seed = request.decode_state.sampling.seed
                    seed = seeds.getrandbits(63) if own_seed is None else int(own_seed)
                    request.decode_state.generator.manual_seed(seed % (1 << 63))
                for parent in request.dependencies:
                    parent.num_waiting_dependents += 1
                    if parent.priority > request.priority and not parent.is_finished:
                        self._raise_priority(parent, request.priority)
                if request.decode_state is None and request.is_text_only:
                    self.finish(request, RequestState.DONE, "encoded")  # nothing to compute
                else:
                    request.sequence = self.new_id()
                    self.scheduler.waiting.add(request)
                self.events.emit("submitted", request=request.id)

    def _raise_priority(self, request: Request, priority: int) -> None:
        """Raise the priority of a request and its unfinished ancestors."""
        requests = [request]
        for ancestor in requests:  # grows during iteration
            if ancestor.priority > priority and not ancestor.is_finished:
                ancestor.priority = priority
                requests += ancestor.dependencies
                if ancestor in self.scheduler.waiting:
                    self.scheduler.waiting.add(ancestor)  # in its new place

    def _check_fits(self, request: Request) -> None:
        if request.computed_layers is not None or (request.decode_state is None and request.is_text_only):
            return
        pool, max_positions = self.cache_manager.pool, self.hf_model.model_info.max_positions
        num_tokens, _ = request.token_limits(len(request.prompt), max_positions)
        if num_tokens > pool.pages * pool.page_size:
            raise CacheFullError(
                f"needs room for {num_tokens} tokens; the whole cache holds {pool.pages * pool.page_size}: "
                "shorten the call (max_tokens counts) or raise CacheConfig.capacity"
            )

    # -- the step -----------------------------------------------------------------------------------------

    def step(self, *, wait: bool = True) -> bool:
        """Compute one step; return False if nothing could run.

        An exception of the model, the backend, the sampler or the scheduler fails only the requests that cause it.
        A step that is interrupted leaves requests and cache unchanged.
        """
        with self.lock:
            try:
                batch = self._next_batch(wait)
                if batch is not None:
                    self._run_batch(batch)
                if self.prefetcher.missing:
                    self.prefetch()
            except TransferError:  # the lost KV is recomputed; the step is retried
                self.scheduler.rollback()
                return True
            except BaseException:
                self.scheduler.rollback()
                raise
        self.events.dispatch()
        return batch is not None

    def _run_batch(self, batch: Batch) -> None:
        """Compute a batch and process its outputs.

        If computing it raises, its requests are computed separately.
        """
        try:
            tokens = self._compute(batch)
        except (TransferError, ModelError):  # not caused by a request: a failed load, a model in training
            raise
        except Exception as exc:
            if self.hf_model.tp_group is not None:
                raise  # the other ranks would not compute the parts
            self.scheduler.rollback()
            self.model_runner.reset()
            self._isolate_failure([chunk.request for chunk in batch.chunks], exc)
            return
        self.scheduler.commit(batch)
        self._process_outputs(batch, tokens)

    def _isolate_failure(self, requests: list[Request], exc: Exception) -> None:
        """Find and fail the requests of a batch that raised `exc`.

        Computes the batch in halves, recursively; fails the requests that raise alone.
        """
        if len(requests) == 1:
            self.fail_incomplete(requests[0], wrap_error(requests[0], "computing it raised", exc))
            return
        middle = len(requests) // 2
        for half in (requests[:middle], requests[middle:]):
            try:
                batch = self.scheduler.pack([request for request in half if request in self.scheduler.running])
            except Exception:  # the next step finds the cause
                self.scheduler.rollback()
                continue
            if batch is not None:
                self._run_batch(batch)

    def _next_batch(self, wait: bool) -> Batch | None:
        """Schedule the next batch.

        With `wait`, block while only a transfer or an expiring pin can free capacity.
        """
        while True:
            if self.cache_manager.offload_manager.jobs or self.cache_manager.pins.expiry:
                self.poll_transfers()
            batch = self._schedule()
            if batch is not None or not (
                wait and self.scheduler.num_unfinished and self.cache_manager.wait_for_space()
            ):
                return batch

    def _schedule(self) -> Batch | None:
        """Schedule the next batch, without the requests with which that raises."""
        scheduler = self.scheduler
        launched = self.model_runner.launched_requests() if self.model_runner.overlaps else []
        while True:
            try:
                return scheduler.schedule(launched)
            except TransferError:
                raise
            except Exception as exc:
                if self.hf_model.tp_group is not None:
                    raise  # the other ranks would schedule other batches
                scheduler.rollback()
                self.model_runner.reset()
                cause = scheduler.current_request
                found = find_unschedulable(scheduler) if cause is None else (cause, exc)
                launched = []
                if found is None or found[0].is_finished:
                    return scheduler.schedule()  # raises what no request causes
                self.fail_incomplete(found[0], wrap_error(found[0], "scheduling it raised", found[1]))

    def prefetch(self) -> None:
        """Load what agents need next, unless a request waits for capacity."""
        if self.prefetcher.is_pending and not self.scheduler.blocked_on_memory:
            self.prefetcher.run()

    def poll_transfers(self) -> None:
        """Process completed transfers; requests whose context failed to load wait again."""
        for lost_entry in self.cache_manager.poll_transfers():
            self.scheduler.preemptor.preempt_readers(lost_entry)

    def _compute(self, batch: Batch) -> list[int | None]:
        """Run the model on a batch and sample its next tokens.

        Returns one token per request of `batch.sampled`; None where the logits are NaN.
        """
        for chunk in batch.chunks:
            if chunk.request.start_time is None:
                chunk.request.start_time = time.perf_counter()
        logits = self.model_runner.forward(batch)
        if batch.shared_headers:
            copy_headers(self.cache_manager, batch.shared_headers)
        self.num_steps += 1
        self.num_batched_tokens += len(batch.tokens)
        layers = None if batch.computed_layers is None else len(batch.computed_layers)
        self.events.emit("step", tokens=len(batch.tokens), requests=len(batch.chunks), layers=layers)
        if logits is None or not batch.sampled:
            return []
        launch_next = self.model_runner.overlaps and self.speculator is None and not self.scheduler.has_runnable
        tokens = self.model_runner.sample(logits, batch, launch_next=launch_next)
        if len(tokens) != len(batch.sampled):
            raise RequestFailedError(f"the model gave {len(tokens)} rows of logits for {len(batch.sampled)} requests")
        return tokens

    def _process_outputs(self, batch: Batch, tokens: list[int | None]) -> None:
        """Append the sampled tokens and finish the requests that are complete.

        An error while appending a token, or in a log-probability callback, fails only that request.
        """
        now = time.perf_counter()
        accepted = zip(batch.sampled, tokens, strict=True)
        for request, token in accepted if self.speculator is None else self.speculator.verify(batch, accepted):
            try:
                self._append_token(request, token, now)
            except Exception as exc:
                self.fail(request, wrap_error(request, "appending its next token raised", exc))
        for request, *_ in batch.chunks:
            entry = request.entry
            if entry is None or len(entry.tokens) > entry.num_computed_tokens or request.is_finished:
                continue
            if request.cancel_when_computed and request.state is RequestState.RUNNING and request.is_decode:
                self.finish(request, RequestState.CANCELLED, "cancelled")
            elif request.state is RequestState.TOKENS_FINAL or not request.is_decode:
                self.finish(request, RequestState.DONE, request.finish_reason or "encoded")
        while self._pending_logprobs:
            request, logprobs = self._pending_logprobs.popleft()
            if request.state in (RequestState.FAILED, RequestState.CANCELLED):
                continue
            assert request.decode_state is not None and request.decode_state.on_logprobs is not None
            try:
                request.decode_state.on_logprobs(logprobs)
            except Exception as exc:
                self.fail(request, wrap_error(request, "its log-probability callback raised", exc))

    def _append_token(self, request: Request, token: int | None, now: float) -> None:
        if token is None:
            self.fail(request, RequestFailedError(f"message {request.id}: the model gave NaN instead of logits"))
            return
        decode_state, entry = request.decode_state, request.entry
        assert decode_state is not None
        if request.first_token_time is None:
            request.first_token_time = now
        if decode_state.on_logprobs is not None and decode_state.pending_logprobs is not None:
            self._pending_logprobs.append((request, decode_state.pending_logprobs))
        if decode_state.max_new_tokens == 0:  # the prompt was to be computed, and nothing generated
            self._finish_generation(request, "length", now)
            return
        reason = decode_state.append(token)
        entry.tokens.append(token)
        self.events.emit("token", request=request.id, token=token)
        if reason is not None:
            self._finish_generation(request, reason, now)

    # -- the end of a request -----------------------------------------------------------------------------

    def finish_at_limit(self, request: Request, now: float) -> None:
        """End a decode because the cache has no page left."""
        assert request.decode_state is not None
        request.decode_state.flush_text()
        self._finish_generation(request, "length", now)

    def _finish_generation(self, request: Request, reason: FinishReason, now: float) -> None:
        """Mark a decode's tokens as final.

        The KV of its last tokens is computed by the next step that includes them.
        """
        decode_state, entry = request.decode_state, request.entry
        assert decode_state is not None
        request.finish_time, request.finish_reason = now, reason
        self.events.emit("generated", request=request.id)
        request.join_footer()
        num_footer = len(request.footer) if request.mode == "choreographed" else 0
        request.usage = replace(
            request.usage,
            computed_tokens=request.usage.computed_tokens + num_footer,
            completion_tokens=len(decode_state.tokens),
        )
        request.state = RequestState.TOKENS_FINAL
        self.scheduler.waiting.wake(request)
        if request.mode == "choreographed":
            if request.drops_stop:
                entry.tokens.pop()
            entry.tokens += request.footer
            entry.num_final_tokens = len(entry.tokens)
            namespace = namespace_of(request, self.hf_model.model_info)
            key = content_hash(namespace, entry.tokens, entry.base_position, entry.context)
            self.cache_manager.register(entry, key)
            return
        if decode_state.tokens:
            entry.tokens.pop()  # its KV was not computed; a later prompt computes it if needed
        if request.mode == "prefix":
            insert_into_prefix_tree(request, self.cache_manager)
        self.finish(request, RequestState.DONE, reason)

    def finish(self, request: Request, state: RequestState, reason: FinishReason | None) -> None:
        """Move a request to a final state and out of its queue.

        No other method removes a finished request. Frees the unused pages of the KV entry and
        releases every reference except the message's own.
        """
        cache, entry, previous_state = self.cache_manager, request.entry, request.state
        request.state, request.finish_reason = state, reason
        self.context_loader.release(request.id)
        request.finish_time = request.finish_time or time.perf_counter()
        self.scheduler.waiting.discard(request)
        self.scheduler.waiting.wake(request)
        if request in self.scheduler.running:
            self.scheduler.running.remove(request)
        if not self.scheduler.running:
            self.model_runner.reset()
        if previous_state is RequestState.WAITING:
            self.release_dependencies(request.dependencies)
        for read_entry in request.read_entries:
            cache.release(read_entry, request.request_owner)
        request.context = ()
        if request.decode_state is not None:
            request.decode_state.release_sampling()
        if entry is not None:
            if previous_state is not RequestState.WAITING:
                if entry.is_complete:
                    cache.free_unused_pages(entry)
                cache.release(entry, request.request_owner)
            elif request.num_generated:  # preempted
                for kv_slice in entry.context:
                    cache.release(kv_slice.entry, request.message_owner)
            is_unused = request.released and not request.num_waiting_dependents
            if is_unused or state in (RequestState.FAILED, RequestState.CANCELLED):
                cache.release(entry, request.message_owner)
        self.events.emit("finished" if state is RequestState.DONE else state.value, request=request.id)

    def fail(self, request: Request, exc: ChoreographError) -> None:
        """End a request with an error."""
        request.error = exc
        self.finish(request, RequestState.FAILED, None)

    def fail_incomplete(self, request: Request, exc: ChoreographError) -> None:
        """End a request with an error; its readers wait again or fail."""
        entry = request.entry
        self.fail(request, exc)
        if entry is not None and not entry.is_complete:
            self.scheduler.preemptor.preempt_readers(entry)
            self.cache_manager.fail(entry, exc)

    def release_dependencies(self, dependencies: Iterable[Request]) -> None:
        """Decrement `num_waiting_dependents` of the dependencies of a request.

        Called when the request is admitted or ends. A dependency whose release was deferred is
        released when its count reaches zero.
        """
        for parent in dependencies:
            parent.num_waiting_dependents -= 1
            if parent.released and not parent.num_waiting_dependents:
                self._release_message(parent)

    def release(self, request: Request) -> None:
        """Release a message.

        An unfinished one is cancelled. A KV entry is dropped once no request in flight attends to
        it.
        """
        with self.lock:
            if request.released:
                return
            request.released = True
            self.events.emit("released", request=request.id)
            if not request.num_waiting_dependents:
                self._release_message(request)

    def _release_message(self, request: Request) -> None:
        if request.state is RequestState.WAITING:
            self.finish(request, RequestState.CANCELLED, "cancelled")
        elif request.state in (RequestState.RUNNING, RequestState.TOKENS_FINAL):
            entry = request.entry
            has_children = self.cache_manager.prefix_tree.has_children(entry)
            is_read = has_children or not entry.owners <= {request.request_owner, request.message_owner}
            if is_read and not entry.is_complete:  # its readers need the tokens it already has
                request.cancel_when_computed = True
                request.finish_reason = request.finish_reason or "cancelled"
            elif request.state is RequestState.TOKENS_FINAL:
                self.finish(request, RequestState.DONE, request.finish_reason)
            else:
                self.finish(request, RequestState.CANCELLED, "cancelled")
        elif request.entry is not None:
            self.cache_manager.release(request.entry, request.message_owner)

    # -- driving ------------------------------------------------------------------------------------------

    def run_until(self, request: Request, condition: Callable[[], bool]) -> None:
        """Step, or yield to other programs, until `condition()` is true.

        Raises:
            RequestFailedError: if the request failed, or no request that can run would make the
                condition true.
            MessageReleasedError: if the message was released first.
        """
        while not condition():
            if request.error is not None:
                raise request.error
            if request.state is RequestState.CANCELLED:
                raise MessageReleasedError(
                    f"message {request.id} was released before it was complete: read it first, inside its session"
                )
            advance = self.yield_hook or self.step  # read once: another thread may reset it
            if not advance() and not condition() and request.state not in (RequestState.FAILED, RequestState.CANCELLED):
                raise RequestFailedError(f"message {request.id} cannot run: nothing can be computed any more")
        if request.error is not None:
            raise request.error

    def check(self) -> None:
        """Check the invariants of the KV cache and the scheduler's queues."""
        with self.lock:
            self.cache_manager.check()
            self.scheduler.check()
