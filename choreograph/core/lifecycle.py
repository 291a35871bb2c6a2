"""How requests end, and which messages they keep from being released."""

import time
from collections.abc import Iterable
from dataclasses import replace

from ..context.feature import FeatureSet, Rewriting
from ..context.placement import insert_into_prefix_tree, namespace_of
from ..context.residency import ContextLoader
from ..errors import ChoreographError
from ..events import EventBus
from ..execution.model_runner import ModelRunner
from ..kv_cache.hashing import content_hash
from ..kv_cache.manager import KVCacheManager
from ..models.info import ModelInfo
from ..outputs import FinishReason
from ..request.request import Request, RequestState, wrap_error
from .waiting_queue import Queues


class Lifecycle:
    """Ends and releases requests."""

    def __init__(
        self,
        queues: Queues,
        cache_manager: KVCacheManager,
        context_loader: ContextLoader,
        model_runner: ModelRunner,
        features: FeatureSet,
        model_info: ModelInfo,
        events: EventBus,
    ) -> None:
        self._queues, self._cache_manager, self._context_loader = queues, cache_manager, context_loader
        self._model_runner, self._features, self._model_info, self._events = model_runner, features, model_info, events

    def finish_at_limit(self, request: Request) -> None:
        """End a decode because the cache has no page left."""
        assert request.decode_state is not None
        request.decode_state.flush_text()
        self.finish_generation(request, "length", time.perf_counter())

    def finish_generation(self, request: Request, reason: FinishReason, now: float) -> None:
        """Mark a decode's tokens as final.

        The KV of its last tokens is computed by the next step that includes them.
        """
        decode_state, entry = request.decode_state, request.entry
        assert decode_state is not None
        request.times.finished, request.finish_reason = now, reason
        self._events.emit("generated", request=request.id)
        decode_state.join_footer()
        num_footer = len(decode_state.footer) if request.mode == "choreographed" else 0
        request.usage = replace(
            request.usage,
            computed_tokens=request.usage.computed_tokens + num_footer,
            completion_tokens=len(decode_state.tokens),
        )
        request.state = RequestState.TOKENS_FINAL
        self._queues.waiting.wake(request)
        if request.mode == "choreographed":
            if decode_state.drops_stop:
                entry.tokens.pop()
            entry.tokens += decode_state.footer
            entry.num_final_tokens = len(entry.tokens)
            namespace = namespace_of(request, self._model_info)
            key = content_hash(namespace, entry.tokens, entry.base_position, entry.context)
            self._cache_manager.register(entry, key)
            return
        if decode_state.tokens:
            entry.tokens.pop()  # its KV was not computed; a later prompt computes it if needed
        if request.mode == "prefix":
            insert_into_prefix_tree(request, self._cache_manager)
        self.finish(request, RequestState.DONE, reason)

    def finish(self, request: Request, state: RequestState, reason: FinishReason | None) -> None:
        """Move a request to a final state and out of its queue.

        No other method removes a finished request. Frees the unused pages of the KV entry and
        releases every reference except the message's own.
        """
        cache, queues, entry, previous_state = self._cache_manager, self._queues, request.entry, request.state
        for feature in self._features.finishing:
            try:
                feature.finished(request)
            except Exception as exc:  # concerns this request alone
                request.error = request.error or wrap_error(request, "a feature raised at its end", exc)
                state, reason = RequestState.FAILED, None
        request.extensions.pop(Rewriting, None)
        request.state, request.finish_reason = state, reason
        self._context_loader.release(request.id)
        request.times.finished = request.times.finished or time.perf_counter()
        queues.waiting.discard(request)
        queues.waiting.wake(request)
        if request in queues.running:
            queues.running.remove(request)
        if not queues.running:
            self._model_runner.reset()
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
        self._events.emit("finished" if state is RequestState.DONE else state.value, request=request.id)

    def fail(self, request: Request, exc: ChoreographError) -> None:
        """End a request with an error."""
        request.error = exc
        self.finish(request, RequestState.FAILED, None)

    def hold_dependencies(self, dependencies: Iterable[Request]) -> None:
        """Keep the dependencies of a waiting request from being released."""
        for parent in dependencies:
            parent.num_waiting_dependents += 1

    def release_dependencies(self, dependencies: Iterable[Request]) -> None:
        """Undo `hold_dependencies`; the request is admitted or ends.

        A dependency whose release was deferred is released when its count reaches zero.
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
        if request.released:
            return
        request.released = True
        self._events.emit("released", request=request.id)
        if not request.num_waiting_dependents:
            self._release_message(request)

    def _release_message(self, request: Request) -> None:
        if request.state is RequestState.WAITING:
            self.finish(request, RequestState.CANCELLED, "cancelled")
        elif request.state in (RequestState.RUNNING, RequestState.TOKENS_FINAL):
            entry = request.entry
            has_children = self._cache_manager.prefix_tree.has_children(entry)
            is_read = has_children or not entry.owners <= {request.request_owner, request.message_owner}
            if is_read and not entry.is_complete:  # its readers need the tokens it already has
                request.cancel_when_computed = True
                request.finish_reason = request.finish_reason or "cancelled"
            elif request.state is RequestState.TOKENS_FINAL:
                self.finish(request, RequestState.DONE, request.finish_reason)
            else:
                self.finish(request, RequestState.CANCELLED, "cancelled")
        elif request.entry is not None:
            self._cache_manager.release(request.entry, request.message_owner)
