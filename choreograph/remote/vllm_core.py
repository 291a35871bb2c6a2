"""`VllmCore`: requests of sessions on vLLM, as tasks of a thread."""

import asyncio
import itertools
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from ..context.feature import FeatureSet
from ..errors import ChoreographError, ConfigError, MessageReleasedError, RequestFailedError, SessionClosedError
from ..events import EventBus
from ..namespace import Client
from ..outputs import BASE_MODEL, FinishReason, Usage
from ..request.request import Request, RequestState, wrap_error
from ..vllm.reuse_params import new_name, store_param, transfer_params
from .vllm_client import Completion, ServerRefusedError, VllmClient, control_body, identity
from .vllm_entries import (
    ContextPlan,
    MessageEntries,
    filled,
    plan_context,
    sampling_body,
    usage_of,
)

MAX_TRIES = 4  # of a request whose entries the server lost in the meantime

Fields = dict[str, Any]  # of the body of a request


class VllmCore:
    """What sessions use of an engine, computed by a vLLM server.

    Requests are submitted by any thread; their tasks run in the client's. All state is guarded by `lock`.

    Args:
        hf_model: tokenizer, `eos_token_ids` and `model_info` of the model.
        model_set: names of the models, as `ModelSet`.
        base_model: name under which the server has the base model.
    """

    num_steps = 0  # the server counts them

    def __init__(
        self, client: VllmClient, hf_model: Any, model_set: Any, base_model: str, features: FeatureSet
    ) -> None:
        self._client, self.hf_model, self.model_set, self._base_model = client, hf_model, model_set, base_model
        self.features = features
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._num_changes = self._num_seen_changes = 0
        self.events, self.closed = EventBus(), False
        self.yield_hook: Callable[[], bool] | None = None  # set by `run_concurrently`
        self._ids = itertools.count(1)
        self._stored: WeakKeyDictionary[Request, MessageEntries] = WeakKeyDictionary()
        self._active: set[Request] = set()  # submitted and unfinished
        self._released: defaultdict[tuple[str | None, str], list[str]] = defaultdict(list)  # entries, by namespace
        self._computes_holes: bool | None = None  # None: the server was not asked yet
        features.attach(self)

    @property
    def cache_manager(self) -> Any:
        raise ConfigError("this needs the KV cache of an Engine, which a session on vLLM does not have")

    @property
    def scheduler(self) -> Any:
        """Numbers that `run_concurrently` reads."""
        with self.lock:
            return SimpleNamespace(num_runnable=sum(r.state is RequestState.RUNNING for r in self._active))

    def new_id(self) -> int:
        return next(self._ids)

    def check_connector(self) -> None:
        """Raise ConfigError if the server does not run the connector."""
        if self._computes_holes is None:
            _, self._computes_holes = self._client.call(self._client.query({"model": self._base_model}, []))

    # -- called by sessions and messages --------------------------------------------------------------------

    def add_requests(self, requests: Sequence[Request], seeds: random.Random) -> None:
        """Submit validated requests, all or none, as `EngineCore.add_requests`."""
        with self.lock:
            if self.closed:
                raise SessionClosedError("the engine is closed: connect again")
            for parent in (parent for request in requests for parent in request.parents):
                if parent.released:
                    raise MessageReleasedError(f"parent {parent.id} was released: keep it until its last use")
            for request in requests:
                state = request.decode_state
                if state is not None:
                    seed = seeds.getrandbits(63) if state.sampling.seed is None else int(state.sampling.seed)
                    state.sampling = state.sampling.with_seed(seed % (1 << 63))
                self._stored[request] = MessageEntries()
                self._hold_parents(request)
                if request.is_text_only:
                    self._finish(request, "encoded", Usage())
                    self._release_parents(request)
                else:
                    self._active.add(request)
                    self._client.loop.call_soon_threadsafe(self._start, request)

    def run_until(self, request: Request, condition: Callable[[], bool]) -> None:
        """Wait, or yield to other programs, until `condition()` is true.

        Raises:
            ChoreographError: the error of the request.
            MessageReleasedError: if the message was released first.
        """
        while True:
            with self.lock:
                if request.error is not None:
                    raise request.error
                if condition():
                    return
                if request.state is RequestState.CANCELLED:
                    raise MessageReleasedError(
                        f"message {request.id} was released before it was complete: read it first, inside its session"
                    )
                if self.yield_hook is None:
                    self._changed.wait()
                    continue
            self.yield_hook()

    def step(self, *, wait: bool = True) -> bool:
        """Wait for news of any request; return False if none is active."""
        with self.lock:
            if wait and self._active:  # at most a moment: another thread may have taken the news
                self._changed.wait_for(lambda: self._num_changes != self._num_seen_changes, timeout=0.1)
            is_new, self._num_seen_changes = self._num_changes != self._num_seen_changes, self._num_changes
            return is_new or bool(self._active)

    def wait_until_idle(self, session_id: int | None = None) -> None:
        """Wait until no request is active, or none of one session."""
        with self.lock:
            self._changed.wait_for(lambda: not any(session_id in (None, r.session_id) for r in self._active))

    def release(self, request: Request) -> None:
        """Release a message; an unfinished one that no other reads is cancelled."""
        with self.lock:
            if not request.released:
                request.released = True
                self._free_unread(request)

    def end_session(self, session_id: int) -> None:
        """Release the entries of a session's released messages on the server."""
        self.wait_until_idle(session_id)
        with self.lock:
            released = {key: names for key, names in self._released.items() if names}
            self._released.clear()
        for (salt, model), names in released.items():
            with suppress(RequestFailedError):
                self._client.call(self._client.complete(control_body(identity(salt, model), release=names)))

    def close(self) -> None:
        """Cancel all requests and disconnect."""
        self.closed = True
        self._client.close()

    # -- counting readers -----------------------------------------------------------------------------------

    def _free_unread(self, request: Request) -> None:
        """Drop the entries of a released message that no request reads."""
        if not request.released or request.num_waiting_dependents:
            return
        stored = self._stored[request]
        if not request.is_finished:
            is_sent = request.state is RequestState.RUNNING and not request.is_decode
            request.state, request.finish_reason = RequestState.CANCELLED, "cancelled"
            self._notify()
            if is_sent:  # it runs to its end: it could store its entry after the release of the name
                return
            if stored.task is not None:
                self._client.loop.call_soon_threadsafe(stored.task.cancel)
        self._discard(request, stored.names())
        self._release_parents(request)

    def _hold_parents(self, request: Request) -> None:
        """Keep the entries of the parents, also of released ones."""
        stored = self._stored[request]
        if not stored.holds_parents:
            stored.holds_parents = True
            for parent in request.dependencies:
                parent.num_waiting_dependents += 1

    def _release_parents(self, request: Request) -> None:
        stored = self._stored[request]
        if stored.holds_parents:
            stored.holds_parents = False
            for parent in request.dependencies:
                parent.num_waiting_dependents -= 1
                self._free_unread(parent)

    def _discard(self, request: Request, names: list[str]) -> None:
        """Forget entries; the next request of the namespace releases them."""
        self._stored[request].forget(set(names))
        self._released[self._namespace(request)] += names

    def _complete(self, request: Request) -> None:
        """Drop what only the computation of a message needed."""
        stored = self._stored[request]
        self._discard(request, [name for name in stored.names() if name != stored.entry])
        self._release_parents(request)
        self._free_unread(request)

    def _notify(self) -> None:
        self._num_changes += 1
        self._changed.notify_all()

    def _finish(self, request: Request, reason: FinishReason, usage: Usage) -> None:
        with self.lock:
            if not request.is_finished:
                request.times.finished, request.finish_reason, request.usage = time.perf_counter(), reason, usage
                request.state = RequestState.DONE
                self._notify()

    # -- tasks of the client's thread -----------------------------------------------------------------------

    def _start(self, request: Request) -> None:
        self._stored[request].task = self._client.loop.create_task(self._run(request))

    async def _run(self, request: Request) -> None:
        """Compute one message."""
        error: ChoreographError | None = None
        try:
            if not request.is_finished:  # not released meanwhile
                for parent in request.dependencies:
                    if not parent.tokens_final:
                        await self._wait_for(parent)
                request.resolve_dependencies()
                request.state, request.times.started = RequestState.RUNNING, time.perf_counter()
                state = request.decode_state
                is_forced = state is not None and state.forced_tokens is not None
                await (self._prefill if state is None else self._force if is_forced else self._decode)(request)
        except asyncio.CancelledError:
            error = None if request.is_finished else SessionClosedError("the engine was closed before the end")
        except ChoreographError as exc:
            error = exc
        except Exception as exc:
            error = wrap_error(request, "computing it on vLLM raised", exc)
        with self.lock:
            if error is not None:
                request.error, request.state = error, RequestState.FAILED
            if error is not None or request.mode != "choreographed":
                self._release_parents(request)
            self._active.discard(request)
            self._notify()

    async def _wait_for(self, parent: Request) -> None:
        """Wait until the task of a message ends; raise if it failed."""
        task = self._stored[parent].task
        if task is not None and not task.done():
            await asyncio.shield(task)
        if parent.error is not None:
            raise RequestFailedError(f"parent {parent.id} failed: {parent.error}")

    async def _prefill(self, request: Request) -> None:
        plan, reply = await self._store_all(request)
        self._finish(request, "encoded", usage_of(request, plan, reply.cached_tokens))

    async def _decode(self, request: Request) -> None:
        """Generate a message.

        Its last token and the footer have no keys and values yet: they are computed when another message reads it.
        """
        state, stored, name = request.decode_state, self._stored[request], new_name()
        assert state is not None
        reason: FinishReason | None = None

        def build(plan: ContextPlan) -> Fields:
            start, limit = len(plan.tokens), self.hf_model.model_info.max_positions
            # one slot less: a completion generates a token, too
            request.start_generation(limit - len(request.prompt) - max(start + 1, request.position or 0))
            stored.holes |= {run.at: new_name() for run in plan.holes}
            holes = [store_param(stored.holes[run.at], run.at, run.end) for run in plan.holes]
            return {"store": [store_param(name, start, None), *holes], **sampling_body(request)}

        def read(part: Completion) -> bool:
            nonlocal reason
            with self.lock:
                for index, token in enumerate(part.token_ids):
                    if reason is None:
                        state.next_logprob = part.logprobs[index] if part.logprobs else None
                        request.times.first_token = request.times.first_token or time.perf_counter()
                        reason = state.append(token)
                if reason is None and part.finish_reason is not None:
                    state.flush_text()
                    reason = "stop" if part.finish_reason == "stop" else "length"
                self._notify()
            return reason is not None and part.finish_reason is None and bool(part.token_ids)

        try:
            plan, reply = await self._send(request, request.prompt, build, on_part=read)
        except BaseException:
            with self.lock:
                self._discard(request, [name, *stored.holes.values()])
            raise
        if reason is None:
            raise RequestFailedError(f"message {request.id}: the vLLM server ended the stream too early")
        with self.lock:
            state.join_footer()
            num_tokens = len(request.tokens) + len(request.footer)
            if request.mode == "choreographed":
                stored.num_partial = min(len(request.prompt) + len(state.tokens) - 1, num_tokens)
                is_whole = stored.num_partial == num_tokens
                stored.entry, stored.partial = (name, None) if is_whole else (None, name)
            self._finish(request, reason, usage_of(request, plan, reply.cached_tokens))
            if stored.entry is not None:
                self._complete(request)
            self._free_unread(request)

    async def _force(self, request: Request) -> None:
        """Compute forced tokens in one request, and their log-probabilities in one each."""
        state, num_header = request.decode_state, len(request.prompt)
        assert state is not None and state.forced_tokens is not None
        tokens, num_logprobs = [*request.prompt, *state.forced_tokens], state.sampling.logprobs
        with self.lock:
            reasons = [state.append(token) for token in state.forced_tokens]
            state.join_footer()
        if request.mode == "choreographed":
            plan, reply = await self._store_all(request, is_last=False)
        else:
            plan, reply = await self._plan(request), Completion()
        if num_logprobs is not None:
            fields = {"max_tokens": 1, "temperature": 0, "logprobs": num_logprobs, "return_tokens_as_token_ids": True}

            async def score(end: int) -> Completion:
                forced = {**fields, "allowed_token_ids": [tokens[end]]}
                return (await self._send(request, tokens[:end], lambda plan: forced.copy(), num_own=end - 1))[1]

            parts = await asyncio.gather(*map(score, range(num_header, len(tokens))))
            state.logprobs = [item for part in parts for item in part.logprobs]
        request.times.first_token = time.perf_counter()
        self._finish(request, reasons[-1] or "forced", usage_of(request, plan, reply.cached_tokens))
        with self.lock:
            self._complete(request)

    async def _store_all(self, request: Request, *, is_last: bool = True) -> tuple[ContextPlan, Completion]:
        """Store all tokens of a message; drop its other entries if `is_last`."""
        stored, name = self._stored[request], new_name()
        tokens = request.tokens if request.tokens_final else [*request.tokens, *request.footer]

        def build(plan: ContextPlan) -> Fields:
            start = len(plan.tokens)
            return {"store": [store_param(name, start, start + len(tokens))], "max_tokens": 1}

        with self.lock:
            self._hold_parents(request)
        try:
            result = await self._send(request, tokens, build, num_own=stored.num_partial)
        except BaseException:
            with self.lock:
                self._discard(request, [name])
                self._release_parents(request)
            raise
        with self.lock:
            stored.entry = name
            if is_last:
                self._complete(request)
        return result

    async def _store_again(self, request: Request) -> None:
        """Store a message whose last tokens, or all, are not stored."""
        with self.lock:
            self._active.add(request)
        try:
            await self._store_all(request)
        finally:
            with self.lock:
                self._active.discard(request)
                self._notify()

    async def _ensure(self, request: Request, num_tokens: int) -> None:
        """Wait until the first tokens of a message are stored."""
        await self._wait_for(request)
        stored = self._stored[request]
        if stored.entry_of(num_tokens) is None:
            if stored.completion is None or stored.completion.done():
                stored.completion = self._client.loop.create_task(self._store_again(request))
            await asyncio.shield(stored.completion)

    # -- requests of the server -----------------------------------------------------------------------------

    async def _send(
        self,
        request: Request,
        tokens: list[int],
        build: Callable[[ContextPlan], Fields],
        *,
        num_own: int = 0,
        on_part: Callable[[Completion], bool] | None = None,
    ) -> tuple[ContextPlan, Completion]:
        """Send tokens of a message behind its context; compute lost entries again.

        Args:
            build: returns further fields of the body, and what to `store`.
            num_own: first tokens that may be reused from the message's own entries.
        """
        for _ in range(MAX_TRIES):
            plan = await self._plan(request)
            start, names = len(plan.tokens), list[str]()
            try:
                plan = await self._compute_holes(request, plan, names)
                spans = plan.spans
                if num_own and (entry := self._stored[request].entry_of(num_own)) is not None:
                    spans.append({"entry": entry, "start": 0, "stop": num_own, "at": start, "position": start})
                names += [span["entry"] for span in spans]
                fields = build(plan)
                params = {"mode": "spans", "spans": spans, "store": fields.pop("store", [])}
                if request.mode != "choreographed":
                    params = {"mode": "exact"}
                return plan, await self._post(request, [*plan.tokens, *tokens], params, fields, on_part)
            except ServerRefusedError as exc:
                if not exc.may_lack_entries or not names:
                    raise
                missing, _ = await self._client.query(identity(*self._namespace(request)), names)
                if not missing:
                    raise
                with self.lock:
                    for stored in self._stored.values():
                        stored.forget(missing)
        raise self._lost(request)

    def _lost(self, request: Request) -> RequestFailedError:
        return RequestFailedError(
            f"message {request.id}: the connector lost its parents {MAX_TRIES} times before they were read: raise the "
            "capacity of its store, or release messages earlier"
        )

    async def _plan(self, request: Request) -> ContextPlan:
        """Place the context of a request; wait until it is stored."""
        for _ in range(MAX_TRIES):
            plan = plan_context(request, self._stored, self.hf_model.model_info.max_positions)
            if not plan.lacking:
                return plan
            await asyncio.gather(*(self._ensure(parent, num_tokens) for parent, num_tokens in plan.lacking))
        raise self._lost(request)

    async def _compute_holes(self, request: Request, plan: ContextPlan, names: list[str]) -> ContextPlan:
        """Compute holes by requests if the server cannot; append entries to `names`."""
        runs = list(plan.runs)
        for index in [] if self._computes_holes else plan.inner_holes:
            run, spans, name = runs[index], ContextPlan(plan.tokens, runs[:index]).spans, new_name()
            names += [span["entry"] for span in spans]
            params = {"mode": "spans", "spans": spans, "store": [store_param(name, run.at, run.end)]}
            await self._post(request, plan.tokens[: run.end], params, {"max_tokens": 1})
            self._stored[request].holes[run.at] = name
            runs[index] = filled(run, name)
        return ContextPlan(plan.tokens, runs)

    async def _post(
        self,
        request: Request,
        prompt: list[int],
        params: Fields,
        fields: Fields,
        on_part: Callable[[Completion], bool] | None = None,
    ) -> Completion:
        """Send one request, with the names of entries that were released."""
        namespace = self._namespace(request)
        with self.lock:
            released = self._released.pop(namespace, [])
        body = {**identity(*namespace), "prompt": prompt, "return_token_ids": True, **fields}
        body |= transfer_params({**params, **({"release": released} if released else {})})
        if request.priority:
            body["priority"] = request.priority
        try:
            return await self._client.complete(body, on_part)
        except BaseException:
            with self.lock:
                self._released[namespace] += released
            raise

    def _namespace(self, request: Request) -> tuple[str | None, str]:
        """Return the `cache_salt` and the served model."""
        client = request.namespace.client
        salt = None if client == Client() else "/".join((client.tenant, *client.salt))
        return salt, self._base_model if request.model == BASE_MODEL else request.model
