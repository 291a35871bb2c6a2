"""Engine core: admission of requests, the step loop, and how requests end."""

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from ..attention.autotune import create_tuned_backend
from ..attention.cpp_backend import BackendUnavailableError
from ..config import EngineConfig
from ..context.feature import FeatureSet
from ..context.placement import copy_headers
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
from ..execution.batch import Batch
from ..execution.drafts import Speculator
from ..execution.model_runner import ModelRunner
from ..kv_cache.entry import KVEntry
from ..kv_cache.manager import KVCacheManager
from ..kv_cache.prefetch import Prefetcher
from ..kv_cache.transfer import TransferError
from ..models.hf_model import HFModel
from ..models.model_set import ModelSet
from ..request.request import Request, RequestState, wrap_error
from ..utils import DeferSigintLock
from .admission import Admission
from .fault_isolation import find_unschedulable
from .lifecycle import Lifecycle
from .preemption import Preemptor
from .scheduler import Scheduler
from .waiting_queue import Queues


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
        features: FeatureSet,
    ) -> None:
        self.hf_model = hf_model
        self.model_set = ModelSet(hf_model)
        self.config, self.cache_manager, self.events, self.lock = config, cache_manager, events, lock
        model_info = hf_model.model_info
        try:
            self.backend, self.backend_fallback_reason = create_tuned_backend(
                *(config.backend, model_info.head_shape, model_info.dtype, model_info.device),
                cache_manager.pool.keys[0].dtype,
            )
        except BackendUnavailableError as reason:
            raise ChoreographError(f"backend={config.backend!r}: {reason}; use backend='auto'") from None
        self.model_runner = ModelRunner(self.model_set, cache_manager.pool, self.backend)
        self.new_id = itertools.count(1).__next__
        self.speculator = Speculator(config.draft_tokens, config.scheduler) if config.draft_tokens else None
        self.features, self.queues = features, Queues()
        self.context_loader = ContextLoader(
            cache_manager, model_info.max_positions, lambda: not self.queues.running, self._start_recompute
        )
        self.lifecycle = Lifecycle(
            self.queues, cache_manager, self.context_loader, self.model_runner, features, model_info, events
        )
        self.preemptor = Preemptor(
            self.queues,
            self.lifecycle,
            cache_manager,
            self.context_loader,
            self.model_runner,
            model_info.max_positions,
            events,
        )
        admission = Admission(
            self.queues,
            self.lifecycle,
            self.preemptor,
            self.context_loader,
            cache_manager,
            self.model_set,
            features,
            config.scheduler,
            events,
        )
        self.scheduler = Scheduler(
            self.queues, admission, self.preemptor, cache_manager, self.speculator, config.scheduler
        )
        self.prefetcher = Prefetcher(cache_manager, events)
        self.num_steps = 0
        self.num_batched_tokens = 0
        self.closed = False
        self.wall_clock = True  # False in simulations on a virtual clock
        self.yield_hook: Callable[[], bool] | None = None  # set by `run_concurrently`
        self._pending_logprobs: deque[tuple[Request, Tensor]] = deque()  # not given to their callbacks yet
        features.attach(self)

    def _start_recompute(self, entry: KVEntry) -> None:
        """Compute a discarded KV entry again in its newly allocated pages."""
        request = Request.for_recompute(self.new_id(), entry, self.model_set.weights_group(entry.model))
        try:
            for read_entry in entry.read_entries:
                self.cache_manager.acquire(read_entry, request.request_owner)
            self.cache_manager.acquire(entry, request.request_owner)
            self.events.emit("recomputing", request=request.id, entry=entry.id, tokens=len(entry.tokens))
        except BaseException:
            self.preemptor.release_allocation(request)
            raise
        self.queues.running.append(request)

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
                if request.is_text_only:
                    self.lifecycle.finish(request, RequestState.DONE, "encoded")  # nothing to compute
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
        if request.layers is not None or request.is_text_only:
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
            self.preemptor.fail_incomplete(requests[0], wrap_error(requests[0], "computing it raised", exc))
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
                cause = self.queues.current
                found = find_unschedulable(scheduler) if cause is None else (cause, exc)
                launched = []
                if found is None or found[0].is_finished:
                    return scheduler.schedule()  # raises what no request causes
                self.preemptor.fail_incomplete(found[0], wrap_error(found[0], "scheduling it raised", found[1]))

    def prefetch(self) -> None:
        """Load what agents need next, unless a request waits for capacity."""
        if self.prefetcher.is_pending and not self.scheduler.blocked_on_memory:
            self.prefetcher.run()

    def poll_transfers(self) -> None:
        """Process completed transfers; requests whose context failed to load wait again."""
        for lost_entry in self.cache_manager.poll_transfers():
            self.preemptor.preempt_readers(lost_entry)

    def _compute(self, batch: Batch) -> list[int | None]:
        """Run the model on a batch and sample its next tokens.

        Returns one token per request of `batch.sampled`; None where the logits are NaN.
        """
        for chunk in batch.chunks:
            if chunk.request.times.started is None:
                chunk.request.times.started = time.perf_counter()
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
                self.lifecycle.fail(request, wrap_error(request, "appending its next token raised", exc))
        for request, *_ in batch.chunks:
            entry = request.entry
            if entry is None or len(entry.tokens) > entry.num_computed_tokens or request.is_finished:
                continue
            if request.cancel_when_computed and request.state is RequestState.RUNNING and request.is_decode:
                self.lifecycle.finish(request, RequestState.CANCELLED, "cancelled")
            elif request.state is RequestState.TOKENS_FINAL or not request.is_decode:
                self.lifecycle.finish(request, RequestState.DONE, request.finish_reason or "encoded")
        while self._pending_logprobs:
            request, logprobs = self._pending_logprobs.popleft()
            if request.state in (RequestState.FAILED, RequestState.CANCELLED):
                continue
            assert request.decode_state is not None and request.decode_state.on_logprobs is not None
            try:
                request.decode_state.on_logprobs(logprobs)
            except Exception as exc:
                self.lifecycle.fail(request, wrap_error(request, "its log-probability callback raised", exc))

    def _append_token(self, request: Request, token: int | None, now: float) -> None:
        if token is None:
            self.lifecycle.fail(
                request, RequestFailedError(f"message {request.id}: the model gave NaN instead of logits")
            )
            return
        decode_state, entry = request.decode_state, request.entry
        assert decode_state is not None
        if request.times.first_token is None:
            request.times.first_token = now
        if decode_state.on_logprobs is not None and decode_state.pending_logprobs is not None:
            self._pending_logprobs.append((request, decode_state.pending_logprobs))
        if decode_state.max_new_tokens == 0:  # the prompt was to be computed, and nothing generated
            self.lifecycle.finish_generation(request, "length", now)
            return
        reason = decode_state.append(token)
        entry.tokens.append(token)
        self.events.emit("token", request=request.id, token=token)
        if reason is not None:
            self.lifecycle.finish_generation(request, reason, now)

    def release(self, request: Request) -> None:
        """Release a message; see `Lifecycle.release`."""
        with self.lock:
            self.lifecycle.release(request)

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
