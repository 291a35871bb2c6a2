"""Engine core: request submission, the step loop, and how requests end."""

import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..attention.autotune import create_tuned_backend
from ..attention.cpp_backend import BackendUnavailableError
from ..config import EngineConfig
from ..errors import CacheFullError, ChoreographError, MessageReleasedError, RequestFailedError, SessionClosedError
from ..events import EventBus
from ..kv_cache.entry import KVEntry
from ..kv_cache.hashing import content_hash
from ..kv_cache.prefix_tree import copy_headers, reuse_header
from ..kv_cache.transfer import TransferError
from ..models.hf_model import HFModel
from ..models.model_set import ModelSet
from ..outputs import FinishReason, Usage
from ..utils import DeferSigintLock
from .cache_setup import create_kv_cache_manager
from .cross_model import CrossModelReuse
from .finish import LogprobCallbacks, RequestFinisher, wrap_error
from .model_runner import ModelRunner
from .placement import PLACERS, Placement, cache_salt, insert_into_prefix_tree
from .request import Request, RequestState, strip_duplicate_stop
from .residency import ContextLoader
from .scheduler import Batch, Scheduler

if TYPE_CHECKING:
    from torch import Tensor


class EngineCore:
    """Runs requests from submission to completion.

    `choreograph.Engine` adds sessions and chat templates.
    """

    def __init__(self, hf_model: HFModel, config: EngineConfig) -> None:
        self.hf_model = hf_model
        self.model_set = ModelSet(hf_model)
        self.config = config
        self.events = EventBus()
        model_info = hf_model.model_info
        try:
            self.backend, self.backend_fallback_reason = create_tuned_backend(
                config.backend, model_info.head_shape, model_info.dtype, model_info.device
            )
        except BackendUnavailableError as reason:
            raise ChoreographError(f"backend={config.backend!r}: {reason}; use backend='auto'") from None
        self.lock = DeferSigintLock()
        sleep = threading.Condition(self.lock).wait  # type: ignore[arg-type] # releases the lock
        self.cache_manager = create_kv_cache_manager(hf_model, config, self.events, sleep)
        self.model_runner = ModelRunner(self.model_set, self.cache_manager.pool, self.backend)
        self.context_loader = ContextLoader(self.cache_manager, self._recompute, lambda: bool(self.scheduler.running))
        self.scheduler = Scheduler(
            self.cache_manager,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
            skip_loading=config.scheduler.skip_loading,
            admit=self._admit,
            fail=lambda request, exc: self.finisher.fail(request, exc),
            weights_group=self.model_set.weights_group,
            recover_lost=lambda requests: self.cross_model_reuse.recompute_lost(requests),
        )
        self.cross_model_reuse = CrossModelReuse(self.cache_manager, self.model_set, self.scheduler, self.events)
        self.finisher = RequestFinisher(
            self.cache_manager, self.scheduler, self.context_loader, self.events, self.model_runner.reset
        )
        self.logprob_callbacks = LogprobCallbacks(self.finisher.fail)
        self.num_steps = 0
        self.num_batched_tokens = 0
        self.closed = False
        self.wall_clock = True  # False in simulations on a virtual clock
        self.yield_hook: Callable[[], bool] | None = None  # set by `run_concurrently`
        self.new_id = itertools.count(1).__next__

    # -- submission ---------------------------------------------------------------------------------------

    def add_requests(self, *requests: Request, on_accepted: Callable[[], None] = lambda: None) -> None:
        """Queue validated requests, all or none, without computing anything.

        The caller dispatches the events once it has registered the requests; so with `release`.

        Args:
            on_accepted: called when the requests can no longer be refused, before any other thread
                can submit.

        Raises:
            SessionClosedError: if the engine is closed.
            MessageReleasedError: if a parent was released.
            CacheFullError: if a request does not fit even in an empty cache.
        """
        with self.lock:
            if self.closed:
                raise SessionClosedError("the engine is closed: make a new one")
            for request in requests:
                released_parent = next((p for p in request.parents if p.released), None)
                if released_parent is not None:
                    raise MessageReleasedError(f"parent {released_parent.id} was released: keep it until its last use")
                self._check_fits(request)
            on_accepted()
            for request in requests:
                self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        for parent in request.dependencies:
            parent.num_waiting_dependents += 1
        if request.mode != "choreographed" and not request.is_decode:
            self.finisher.finish(request, RequestState.DONE, "encoded")  # text only: nothing to compute
        else:
            self.scheduler.waiting.append(request)
        self.events.emit("submitted", call=request.id)

    def _check_fits(self, request: Request) -> None:
        if request.mode != "choreographed" and not request.is_decode:
            return
        pages, num_tokens = self.cache_manager.pool.pages, self._max_tokens(request, len(request.prompt))
        if request.computed_layers is None and self.cache_manager.pool.num_pages_for(num_tokens) > pages:
            page_size = self.cache_manager.pool.page_size
            raise CacheFullError(
                f"needs room for {num_tokens} tokens; the whole cache holds {pages * page_size}: "
                "shorten the call (max_tokens counts) or raise CacheConfig.capacity"
            )

    def _max_tokens(self, request: Request, num_prompt_tokens: int) -> int:
        """Return the maximum length in tokens of the request's KV entry."""
        if request.decode_state is None:
            return num_prompt_tokens
        max_generated = self.hf_model.model_info.max_positions - num_prompt_tokens - len(request.footer)
        return num_prompt_tokens + max(1, min(request.decode_state.max_new_tokens, max_generated)) + len(request.footer)

    def _admit(self, request: Request) -> None:
        """Place a request and allocate its KV entry, or raise.

        Called by the scheduler, in order of submission.
        """
        model_info = self.hf_model.model_info
        request.resolve_dependencies()
        self.cross_model_reuse.resolve(request)
        placement = PLACERS[request.mode](request, self.cache_manager, model_info)
        num_context_tokens = sum(s.num_tokens for s in placement.context if s.visible_in(0))
        if placement.cached_entry is not None:
            request.entry = placement.cached_entry
            self.cache_manager.acquire(placement.cached_entry, request.message_owner)
            request.usage = Usage(cached_tokens=num_context_tokens + len(placement.tokens))
            self.events.emit(
                "hit", call=request.id, tokens=len(placement.tokens), where=placement.cached_entry.location
            )
            self.finisher.finish(request, RequestState.DONE, "cached")
            return
        if request.decode_state is not None:
            # the only sampling option that depends on context tokens
            if request.decode_state.sampling.repetition_penalty != 1.0:
                request.decode_state.prompt = [t for tokens in request.parent_tokens() for t in tokens] + request.prompt
            max_generated = model_info.max_positions - placement.position - len(placement.tokens) - len(request.footer)
            if request.decode_state.forced_tokens is None:
                request.decode_state.max_new_tokens = max(1, min(request.decode_state.max_new_tokens, max_generated))
        capacity = self._max_tokens(request, len(placement.tokens))
        self.context_loader.ensure_resident(
            request.id, placement.context, capacity, partial=request.computed_layers is not None
        )
        request.entry = self.cache_manager.allocate_entry(
            placement.tokens,
            placement.position,
            placement.context,
            capacity=capacity,
            owner=request.request_owner,
            model=request.model,
            computed_layers=request.computed_layers,
        )
        try:
            self._attach_kv(request, placement, num_context_tokens)
        except BaseException:  # the request stays in the waiting queue
            self.scheduler.release_allocation(request)
            raise
        self._start(request)
        if request.mode == "choreographed" and request.is_decode:
            reuse_header(self.cache_manager, request)

    def _recompute(self, entry: KVEntry) -> None:
        """Start recomputing a discarded KV entry in its newly allocated pages."""
        request = Request.for_recompute(self.new_id(), entry)
        for kv_slice in entry.context:
            self.cache_manager.acquire(kv_slice.entry, request.request_owner)
        self.cache_manager.acquire(entry, request.request_owner)
        self.scheduler.running.append(request)
        self.events.emit("rebuilding", call=request.id, encoding=entry.id, tokens=len(entry.tokens))

    def _attach_kv(self, request: Request, placement: Placement, num_context_tokens: int) -> None:
        """Acquire the request's context and make its KV entry available for lookup."""
        entry = request.kv
        entry.cached_hidden_layers = self.model_set.captured_layers(
            request.model, self.cache_manager.pool.hidden if request.computed_layers is None else ()
        )
        for kv_slice in placement.context:
            self.cache_manager.acquire(kv_slice.entry, request.request_owner)
        self.context_loader.release(request.id)
        request.context, entry.agent_key = entry.context, request.agent_key
        request.usage = Usage(cached_tokens=num_context_tokens, computed_tokens=len(entry.tokens))
        if request.mode == "choreographed":
            self.cache_manager.acquire(entry, request.message_owner)
        if placement.content_hash is not None:
            self.events.emit("miss", call=request.id, tokens=len(placement.tokens))
            self.cache_manager.register(entry, placement.content_hash)
        if request.mode == "prefix":
            insert_into_prefix_tree(request, self.cache_manager)

    def _start(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        self.scheduler.waiting.remove(request)
        self.scheduler.running.append(request)
        self.finisher._release_dependencies(request)
        num_tokens = len(request.kv.tokens)
        self.events.emit(
            "admitted", call=request.id, encoding=request.kv.id, cached=request.usage.cached_tokens, encode=num_tokens
        )

    # -- the step -----------------------------------------------------------------------------------------

    def step(self, *, wait: bool = True) -> bool:
        """Compute one step; return False if nothing could run.

        A step that raises leaves requests and cache unchanged.
        """
        with self.lock:
            try:
                batch = self._next_batch(wait)
                samples = batch.sampled_rows if batch else []
                logits = self._compute(batch, [row for _, row in samples]) if batch else None
                requests = [request for request, _ in samples]
                tokens = (
                    self.model_runner.sample(logits, requests, launch_next=not self.scheduler.has_runnable)
                    if logits is not None and requests
                    else []
                )
            except TransferError:  # the lost KV is recomputed; the step is retried
                self.scheduler.rollback()
                return True
            except BaseException:
                self.scheduler.rollback()
                raise
            if batch is not None:
                self.scheduler.commit(batch)
                copy_headers(self.cache_manager, [take.request for take in batch.chunks])
                self._process_outputs(batch, requests, tokens)
                self.logprob_callbacks.dispatch()
        self.events.dispatch()
        return batch is not None

    def _next_batch(self, wait: bool) -> Batch | None:
        """Schedule the next batch.

        With `wait`, block on transfers and pins while only they can free capacity.
        """
        while True:
            self.poll_transfers()
            batch = self.scheduler.schedule(self.model_runner.launched_requests())
            if batch is not None or not (
                wait and self.scheduler.num_unfinished and self.cache_manager.wait_for_space()
            ):
                return batch

    def poll_transfers(self) -> None:
        """Process completed transfers; requests whose context failed to load wait again."""
        for lost_entry in self.cache_manager.poll_transfers():
            self.scheduler.preempt_readers(lost_entry)

    def _compute(self, batch: Batch, rows: list[int]) -> "Tensor | None":
        for take in batch.chunks:
            take.request.start_time = take.request.start_time or time.perf_counter()
        logits = self.model_runner(batch, rows)
        self.num_steps += 1
        self.num_batched_tokens += len(batch.tokens)
        self.events.emit("step", rows=len(batch.tokens), calls=len(batch.chunks))
        return logits

    def _process_outputs(self, batch: Batch, requests: list[Request], tokens: list[int | None]) -> None:
        """Append the sampled tokens and finish the requests that are complete.

        An error while appending a token fails only that request.
        """
        now = time.perf_counter()
        for request, token in zip(requests, tokens, strict=True):
            try:
                self._append_token(request, token, now)
            except Exception as exc:
                self.finisher.fail(request, wrap_error(request, "its next token could not be taken,", exc))
        for request in (take.request for take in batch.chunks):
            if request.is_finished or request.entry is None or not request.entry.is_complete:
                continue
            if request.cancel_when_computed and request.state is RequestState.RUNNING and request.is_decode:
                self.finisher.finish(request, RequestState.CANCELLED, "cancelled")
            elif request.state is RequestState.TOKENS_FINAL or not request.is_decode:
                self.finisher.finish(request, RequestState.DONE, request.finish_reason or "encoded")

    def _append_token(self, request: Request, token: int | None, now: float) -> None:
        if token is None:
            self.finisher.fail(
                request, RequestFailedError(f"message {request.id}: the model gave NaN instead of logits")
            )
            return
        decode_state, entry = request.decode_state, request.entry
        assert decode_state is not None and entry is not None
        request.first_token_time = request.first_token_time or now
        self.logprob_callbacks.enqueue(request)
        reason = decode_state.append(token)
        entry.tokens.append(token)
        self.events.emit("token", call=request.id, token=token)
        if reason is not None:
            self._finish_generation(request, reason, now)

    def _finish_generation(self, request: Request, reason: FinishReason, now: float) -> None:
        """Mark a decode's tokens as final.

        The KV of its last tokens is computed by the next step that includes them.
        """
        decode_state, entry = request.decode_state, request.entry
        assert decode_state is not None and entry is not None
        request.finish_time, request.finish_reason = now, reason
        self.events.emit("known", call=request.id)
        request.footer = strip_duplicate_stop(request.footer, decode_state.tokens, decode_state.stop_tokens)
        num_footer_tokens = len(request.footer) if request.mode == "choreographed" else 0
        request.usage = Usage(
            cached_tokens=request.usage.cached_tokens,
            computed_tokens=request.usage.computed_tokens + num_footer_tokens,
            completion_tokens=len(decode_state.tokens),
        )
        request.state = RequestState.TOKENS_FINAL
        if request.mode == "choreographed":
            entry.tokens += request.footer
            entry.num_final_tokens = len(entry.tokens)
            salt = cache_salt(request, self.hf_model.model_info)
            self.cache_manager.register(entry, content_hash(salt, entry.tokens, entry.base_position, entry.context))
            return
        entry.tokens.pop()  # its KV was not computed; a later prompt computes it if needed
        if request.mode == "prefix":
            insert_into_prefix_tree(request, self.cache_manager)
        self.finisher.finish(request, RequestState.DONE, reason)

    def release(self, request: Request) -> None:
        """Release a message.

        KV that requests in flight attend to stays until they end.
        """
        with self.lock:
            self.finisher.release(request)

    # -- driving ------------------------------------------------------------------------------------------

    def run_until(self, request: Request, condition: Callable[[], bool]) -> None:
        """Step, or yield to other programs, until `condition()` is true.

        Raises:
            RequestFailedError: if the request failed, or nothing that can run would fulfill the
                condition.
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

    def run_until_idle(self) -> None:
        """Step until no request can run."""
        while self.step():
            pass

    def check(self) -> None:
        """Check the invariants of the KV cache and the scheduler's queues."""
        with self.lock:
            self.cache_manager.check()
            self.scheduler.check()
