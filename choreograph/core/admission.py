"""Admission of waiting requests: features, placement, context and KV entry.

Requests are admitted in order of priority and submission; one that waits for capacity is passed over
by a bounded number of later ones that fit.
"""

from ..config import SchedulerConfig
from ..context.feature import READY, FeatureSet, Outcome, Prefills, Ready, Wait
from ..context.placement import PLACERS, insert_into_prefix_tree, reuse_header
from ..context.residency import ContextLoader
from ..errors import CacheFullError, ChoreographError, LostContextError, RequestFailedError, RequestTooLargeError
from ..events import EventBus
from ..kv_cache.entry import EntryLayers
from ..kv_cache.manager import KVCacheManager
from ..kv_cache.splits import split_path
from ..models.info import ModelInfo
from ..models.model_set import ModelSet
from ..outputs import Usage
from ..request.request import Purpose, Request, RequestState, wrap_error
from .lifecycle import Lifecycle
from .preemption import MAX_PASSED_OVER, Preemptor
from .waiting_queue import Queues

MAX_BLOCKED = 16  # requests that wait for capacity, after which admission ends for this step
MAX_REWRITES = 8  # tries in one step of features to replace the parents of a request


class Admission:
    """Moves requests from the waiting to the running ones."""

    def __init__(
        self,
        queues: Queues,
        lifecycle: Lifecycle,
        preemptor: Preemptor,
        context_loader: ContextLoader,
        cache_manager: KVCacheManager,
        model_set: ModelSet,
        features: FeatureSet,
        config: SchedulerConfig,
        events: EventBus,
    ) -> None:
        self._queues, self._lifecycle, self._preemptor = queues, lifecycle, preemptor
        self._context_loader, self._cache_manager, self._model_set = context_loader, cache_manager, model_set
        self._model_info: ModelInfo = model_set.base.model_info
        self._features, self._config, self._events = features, config, events
        self.blocked_request: Request | None = None  # next in order, if it waits for capacity

    def admit_waiting(self) -> None:
        """Admit the requests that fit, in order.

        Requests that wait for parents are skipped. The first one that waits for capacity may own a
        part of its context; later ones are admitted only if all of theirs is on the device, and at
        most MAX_PASSED_OVER of them before any one that waits.
        """
        queues, blocked = self._queues, list[Request]()
        queues.waiting.start_pass()
        while len(queues.running) < self._config.max_num_seqs:
            request = queues.waiting.next_candidate()
            if request is None:
                break
            queues.current = request
            if self._fails_with_parent(request):
                continue
            if not request.dependencies_ready:
                queues.waiting.park(request)
                continue
            self._admit_rewritten(request, blocked)
            if len(blocked) == MAX_BLOCKED or any(r.scheduling.num_passed_over >= MAX_PASSED_OVER for r in blocked):
                break
        queues.current = None
        self.blocked_request = blocked[0] if blocked else None

    def _fails_with_parent(self, request: Request) -> bool:
        """Fail a request of which a parent has failed; return whether it did."""
        for parent in request.dependencies:
            if parent.state in (RequestState.FAILED, RequestState.CANCELLED):
                kind = LostContextError if isinstance(parent.error, LostContextError) else RequestFailedError
                reason = parent.error or parent.state.value
                self._lifecycle.fail(request, kind(f"parent {parent.id} failed: {reason}"))
                return True
        return False

    def _admit_rewritten(self, request: Request, blocked: list[Request]) -> None:
        """Admit a request after what features compute for it first.

        Appends the one that waits for capacity to `blocked`.
        """
        for _ in range(MAX_REWRITES):
            outcome = self._rewrite(request, may_load=not blocked)
            if not isinstance(outcome, Prefills):
                if isinstance(outcome, Ready):
                    self._admit_in_order(request, blocked)
                elif isinstance(outcome, Wait) and outcome.for_capacity:
                    blocked.append(request)
                return
            for prefill in outcome.requests:
                if prefill.purpose is not Purpose.CONTEXT:  # one of a program: features rewrite it, too
                    self._admit_rewritten(prefill, blocked)
                elif not self._admit_in_order(prefill, blocked):
                    break
            if self._fails_with_parent(request) or not request.dependencies_ready:
                return  # what it depends on is computed again
            if request.state is not RequestState.WAITING:
                return
        error = f"message {request.id}: its features asked for other prefills {MAX_REWRITES} times in one step"
        self._lifecycle.fail(request, RequestFailedError(f"{error}: rewrite must return READY once they are complete"))

    def _admit_in_order(self, request: Request, blocked: list[Request]) -> bool:
        """Try to admit a request; return False if later ones that need it must wait."""
        if not request.dependencies_ready or len(self._queues.running) >= self._config.max_num_seqs:
            return False  # a prefill before it has failed, or takes the last place
        if not self._try_admit(request, is_first=not blocked):
            blocked.append(request)
            return False
        if request.state is RequestState.RUNNING:
            for other in blocked:
                other.scheduling.num_passed_over += 1
        return True

    def _rewrite(self, request: Request, *, may_load: bool) -> Outcome | None:
        """Let features replace parents; return None if the request has failed."""
        if not self._features.rewriting or request.purpose is Purpose.CONTEXT:
            return READY
        dependencies, parents, parent_slices = request.dependencies, request.parents, request.parent_slices
        reencoding = request.reencoding
        error: ChoreographError | None = None
        outcome: Outcome = READY
        try:
            request.resolve_dependencies()
            outcome = self._features.rewrite(request, may_load=may_load)
        except ChoreographError as exc:
            if isinstance(exc, CacheFullError) and not isinstance(exc, RequestTooLargeError):
                outcome = Wait()
            else:
                error = exc
        except Exception as exc:
            error = wrap_error(request, "rewriting its context raised", exc)
        if error is not None:
            # those that it keeps from being released
            request.parents, request.parent_slices, request.reencoding = parents, parent_slices, reencoding
            self._lifecycle.fail(request, error)
            return None
        if isinstance(outcome, Prefills):
            for prefill in outcome.requests:
                self._enqueue(prefill)
        if request.dependencies != dependencies:
            self._lifecycle.hold_dependencies(request.dependencies)
            self._lifecycle.release_dependencies(dependencies)
        return outcome

    def _enqueue(self, prefill: Request) -> None:
        """Queue a new prefill, or a finished one whose keys and values are lost."""
        assert prefill.state in (RequestState.WAITING, RequestState.DONE), "a feature asked for a request that runs"
        if prefill.is_finished:
            self._cache_manager.release(prefill.entry, prefill.message_owner)
            self._preemptor.requeue(prefill)
        else:
            self._lifecycle.hold_dependencies(prefill.dependencies)
            self._queues.waiting.add(prefill)

    def _try_admit(self, request: Request, is_first: bool) -> bool:
        """Admit a request; return False if it must wait for capacity.

        Args:
            is_first: no earlier request waits for capacity.
        """
        try:
            if not is_first and self._cache_manager.num_reclaimable(request.layers is not None) < (
                self._cache_manager.pool.num_pages_for(len(request.prompt) + request.num_generated)
            ):
                return False
            if request.entry is None:
                self._admit(request, may_load=is_first)
            else:
                self._preemptor.resume(request, may_load=is_first)
        except CacheFullError as exc:
            if not is_first:
                self._context_loader.release(request.id)
            may_free = self._cache_manager.has_pending or any(not other.is_finished for other in self._queues.running)
            if (may_free or self._queues.is_probing or not is_first) and not isinstance(exc, RequestTooLargeError):
                return False
            self._lifecycle.fail(request, exc)
        except ChoreographError as exc:
            self._lifecycle.fail(request, exc)
        except Exception as exc:
            self._preemptor.fail_incomplete(request, wrap_error(request, "admitting it raised", exc))
        return True

    def _admit(self, request: Request, may_load: bool) -> None:
        """Place a request, allocate its KV entry and start it, or raise."""
        cache, model_info, decode_state = self._cache_manager, self._model_info, request.decode_state
        request.resolve_dependencies()
        placement = PLACERS[request.mode](request, cache, model_info)
        if request.mode == "prefix":
            split_path(cache, placement.context, len(placement.tokens) + 1)
        # it may not fit together with entries of which it reads a part
        if request.mode == "prefix" and (
            request.scheduling.skips_prefix or not self._context_loader.fits(request, placement)
        ):
            placement, request.scheduling.skips_prefix = PLACERS["naive"](request, cache, model_info), True
        for kv_slice in placement.context:
            error = kv_slice.entry.error
            if error is not None and kv_slice.token_start + kv_slice.num_tokens > kv_slice.entry.num_computed_tokens:
                raise RequestFailedError(f"its context failed: {error}") from error
        num_context_tokens = sum(s.num_tokens for s in placement.context if s.visible_in(0))
        num_context_tokens -= request.count_own_context()
        if placement.cached_entry is not None:
            request.entry = placement.cached_entry
            cache.acquire(request.entry, request.message_owner)
            request.usage = Usage(cached_tokens=num_context_tokens + len(placement.tokens))
            self._events.emit("hit", request=request.id, tokens=len(placement.tokens), where=request.entry.location)
            self._lifecycle.finish(request, RequestState.DONE, "cached")
            return
        is_resumed = request.num_generated > 0
        if decode_state is not None and not is_resumed:
            request.start_generation(model_info.max_positions - placement.position - len(placement.tokens))
        num_prompt_tokens = len(placement.tokens) - request.num_generated
        required_tokens, max_tokens = request.token_limits(num_prompt_tokens, model_info.max_positions)
        num_tokens = len(placement.tokens) + (1 + len(request.footer) if request.is_decode else 0)
        self._context_loader.ensure_resident(
            request.id,
            placement.read_entries,
            max(num_tokens, required_tokens),
            partial=request.layers is not None,
            may_load=may_load,
        )
        hidden_layers = cache.pool.hidden if request.layers is None else ()
        entry = request.entry = cache.allocate_entry(
            placement.tokens,
            placement.position,
            placement.context,
            capacity=num_tokens,
            max_tokens=max_tokens,
            owner=request.request_owner,
            model=request.model,
            layers=EntryLayers(
                request.layers,
                hidden=self._model_set.captured_layers(request.model, hidden_layers),
                hidden_source=placement.hidden_source,
            ),
            runs=request.runs,
        )
        try:
            for read_entry in entry.read_entries:
                cache.acquire(read_entry, request.request_owner)
            self._context_loader.release(request.id)
            request.context = entry.context
            if not is_resumed:
                request.usage = request.admission_usage(num_context_tokens)
            if request.mode == "choreographed":
                cache.acquire(entry, request.message_owner)
            if placement.content_hash is not None:
                self._events.emit("miss", request=request.id, tokens=len(placement.tokens))
                cache.register(entry, placement.content_hash)
            if (
                request.mode == "prefix" and not request.scheduling.skips_prefix
            ):  # else it would keep entries it does not read
                insert_into_prefix_tree(request, cache)
        except BaseException:  # the request stays in the waiting queue
            self._preemptor.release_allocation(request)
            raise
        request.state = RequestState.RUNNING
        self._queues.waiting.discard(request)
        self._queues.waiting.wake(request)
        self._queues.running.append(request)
        self._lifecycle.release_dependencies(request.dependencies)
        for feature in self._features.admitting:
            try:
                feature.admitted(request)
            except Exception as exc:
                error = wrap_error(request, "a feature raised when it was admitted", exc)
                self._preemptor.fail_incomplete(request, error)
                return
        self._events.emit(
            "admitted",
            request=request.id,
            entry=entry.id,
            cached=request.usage.cached_tokens,
            num_tokens=len(entry.tokens),
        )
        if request.mode == "choreographed" and request.layers is None and not request.computes_all_rows:
            reuse_header(cache, request)
