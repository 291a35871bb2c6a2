"""Requests of sessions on vLLM: spans of stored entries, completions, holes, lost entries."""

import asyncio
import itertools
import math
import random
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from .engine.placement import check_positions, parent_lengths, resolve_offsets
from .engine.request import Request, RequestState, wrap_error
from .errors import (
    ChoreographError,
    ConfigError,
    MessageReleasedError,
    RequestFailedError,
    RequestTooLargeError,
    SessionClosedError,
)
from .events import EventBus
from .namespace import Client
from .outputs import BASE_MODEL, Usage
from .vllm_client import Completion, RefusedError, VllmClient, control_body

MAX_TRIES = 4  # of a request whose entries the server lost in the meantime


class Run(NamedTuple):
    """Consecutive context tokens of a prompt: part of a parent, reused or computed."""

    source: Request
    start: int  # of the parent's tokens
    stop: int
    at: int  # of the first one in the prompt
    position: int  # where its keys are placed, in slots of the prompt
    entry: str | None  # None: computed with the message
    is_computed: bool = False  # again, by a repair

    def span(self) -> dict[str, Any]:
        """Return the run as the connector reads it."""
        return {"entry": self.entry, "start": self.start, "stop": self.stop, "at": self.at, "position": self.position}


@dataclass(eq=False)
class Stored:
    """What the connector stores of one message, and the tasks that compute it."""

    task: asyncio.Task[None] | None = None  # computes the message
    completion: asyncio.Task[None] | None = None  # stores all of its tokens
    entry: str | None = None  # of all tokens
    partial: str | None = None  # of the first `num_partial` tokens of a decode
    num_partial: int = 0
    holes: dict[int, str] = field(default_factory=dict)  # entries of computed context, by place in the prompt
    holds_parents: bool = True  # the parents are counted as having a reader
    context: list[tuple[int, int, int, int, bool]] = field(default_factory=list)  # runs, relative to the message

    def names(self) -> list[str]:
        """Return the entries' names."""
        return [name for name in (self.entry, self.partial, *self.holes.values()) if name is not None]

    def forget(self, names: set[str]) -> None:
        """Forget entries that are not stored any more."""
        self.entry = None if self.entry in names else self.entry
        self.partial = None if self.partial in names else self.partial
        self.holes = {at: name for at, name in self.holes.items() if name not in names}


class Plan(NamedTuple):
    """Context of one request."""

    tokens: list[int]  # of all parents, in order
    runs: list[Run]  # the same tokens; empty in prefix mode

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [run.span() for run in self.runs if run.entry is not None]

    @property
    def num_reused(self) -> int:
        return sum(run.stop - run.start for run in self.runs if not run.is_computed)


class ModelNames(NamedTuple):
    """Names of the models that a server has loaded."""

    names: tuple[str, ...]
    remote: tuple[str, ...] = ()

    def weights_key(self, model: str) -> tuple[str, ...]:
        return (model,)

    def weights_group(self, model: str) -> str:
        return model

    def fingerprint(self, model: str) -> str:
        return model


class VllmCore:
    """What sessions use of an engine, computed by a vLLM server.

    Requests are submitted by any thread; their tasks run in the client's. All state is guarded by `lock`.
    """

    num_steps = 0  # the server counts them

    def __init__(self, client: VllmClient, hf_model: Any, base_model: str, models: tuple[str, ...]) -> None:
        self._client, self.hf_model, self._base_model, self.model_set = client, hf_model, base_model, ModelNames(models)
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._num_changes = self._num_seen_changes = 0
        self.events, self.closed = EventBus(), False
        self.yield_hook: Callable[[], bool] | None = None  # set by `run_concurrently`
        self._ids = itertools.count(1)
        self._stored: WeakKeyDictionary[Request, Stored] = WeakKeyDictionary()
        self._active: set[Request] = set()  # submitted and unfinished
        self._released: defaultdict[tuple[str | None, str], list[str]] = defaultdict(list)  # entries, by namespace
        self._computes_holes: bool | None = None  # None: the server was not asked yet

    @property
    def cache_manager(self) -> Any:
        raise ConfigError("this needs the KV cache of an Engine, which a session on vLLM does not have")

    @property
    def scheduler(self) -> Any:
        """Numbers that `run_concurrently` reads."""
        return _Load(sum(request.state is RequestState.RUNNING for request in self._active))

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
                for parent in request.dependencies:
                    parent.num_waiting_dependents += 1
                self._stored[request] = Stored()
                if request.is_text_only:
                    self._finish(request, "encoded")
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
            if wait and self._active:
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

    def is_stored(self, request: Request) -> bool:
        """Return whether the connector holds all tokens of a message."""
        return self._stored[request].entry is not None

    def end_session(self, session_id: int) -> None:
        """Release the entries of a session whose messages were released, if the server answers."""
        self.wait_until_idle(session_id)
        with self.lock:
            released = {key: names for key, names in self._released.items() if names}
            self._released.clear()
        for (salt, model), names in released.items():
            with suppress(RequestFailedError):
                self._client.call(self._client.complete(control_body(_identity(salt, model), release=names)))

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

    def _release_parents(self, request: Request) -> None:
        stored = self._stored[request]
        if stored.holds_parents:
            stored.holds_parents = False
            for parent in request.dependencies:
                parent.num_waiting_dependents -= 1
                self._free_unread(parent)

    def _hold_parents(self, request: Request) -> None:
        stored = self._stored[request]
        if not stored.holds_parents:
            stored.holds_parents = True
            for parent in request.dependencies:
                parent.num_waiting_dependents += 1

    def _discard(self, request: Request, names: list[str]) -> None:
        """Forget entries; a later request of the namespace releases them."""
        self._stored[request].forget(set(names))
        self._released[self._namespace(request)] += names

    def _notify(self) -> None:
        self._num_changes += 1
        self._changed.notify_all()

    def _finish(self, request: Request, reason: Any, usage: Usage | None = None) -> None:
        with self.lock:
            request.finish_time = request.finish_time or time.perf_counter()
            request.finish_reason, request.usage = reason, usage or Usage()
            request.state = RequestState.DONE
            self._notify()

    # -- tasks of the client's thread -----------------------------------------------------------------------

    def _start(self, request: Request) -> None:
        self._stored[request].task = self._client.loop.create_task(self._run(request))

    async def _run(self, request: Request) -> None:
        """Compute one message."""
        error: ChoreographError | None = None
        try:
            if not request.is_finished:  # released meanwhile
                for parent in request.dependencies:
                    await self._wait_for_tokens(request, parent)
                request.resolve_dependencies()
                request.state, request.start_time = RequestState.RUNNING, time.perf_counter()
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

    async def _wait_for_tokens(self, request: Request, parent: Request) -> None:
        task = self._stored[parent].task
        if task is not None and not parent.tokens_final:
            await asyncio.shield(task)
        if parent.error is not None:
            raise RequestFailedError(f"message {request.id}: its parent {parent.id} failed: {parent.error}")

    async def _prefill(self, request: Request) -> None:
        plan, reply = await self._store_all(request)
        if not request.is_finished:
            self._finish(request, "encoded", self._usage(request, plan, reply))

    async def _decode(self, request: Request) -> None:
        state, name = request.decode_state, _new_name()
        assert state is not None
        reason: str | None = None

        def build(plan: Plan) -> dict[str, Any]:
            start, num_header = len(plan.tokens), len(request.prompt)
            limit = self.hf_model.model_info.max_positions  # one slot less: a completion generates a token, too
            request.start_generation(limit - num_header - max(start + 1, request.position or 0))
            holes = [run for run in plan.runs if run.is_computed and run.entry is None]
            stored.holes |= {run.at: _new_name() for run in holes}
            store = [_store(stored.holes[run.at], run.at, run.at + run.stop - run.start) for run in holes]
            return {"store": [_store(name, start, None), *store], **_sampling_body(request)}

        def read(part: Completion) -> bool:
            nonlocal reason
            with self.lock:
                for index, token in enumerate(part.token_ids):
                    if reason is None:
                        state.next_logprob = part.logprobs[index] if part.logprobs else None
                        request.first_token_time = request.first_token_time or time.perf_counter()
                        reason = state.append(token)
                if reason is None and part.finish_reason is not None:
                    state.flush_text()
                    reason = "stop" if part.finish_reason == "stop" else "length"
                self._notify()
            return reason is not None and part.finish_reason is None and bool(part.token_ids)

        stored = self._stored[request]
        try:
            plan, reply = await self._send(request, request.prompt, build, on_part=read)
        except BaseException:
            self._discard(request, [name, *stored.holes.values()])
            raise
        if reason is None:
            raise RequestFailedError(f"message {request.id}: the vLLM server ended the stream too early")
        request.join_footer()
        num_tokens = len([*request.tokens, *request.footer])
        with self.lock:
            if request.mode == "choreographed":
                stored.partial = name
                stored.num_partial = min(len(request.prompt) + len(state.tokens) - 1, num_tokens)
            self._finish(request, reason, self._usage(request, plan, reply))
            if stored.num_partial == num_tokens:
                stored.entry, stored.partial = name, None
                self._complete(request)
            elif request.released:
                self._free_unread(request)

    async def _force(self, request: Request) -> None:
        """Compute forced tokens in one request, and their log-probabilities in one each."""
        state, num_header = request.decode_state, len(request.prompt)
        assert state is not None and state.forced_tokens is not None
        tokens, num_logprobs = [*request.prompt, *state.forced_tokens], state.sampling.logprobs
        with self.lock:
            reasons = [state.append(token) for token in state.forced_tokens]
            request.join_footer()
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
        request.first_token_time = time.perf_counter()
        self._finish(request, reasons[-1], self._usage(request, plan, reply))
        with self.lock:
            self._complete(request)

    async def _store_all(self, request: Request, *, is_last: bool = True) -> tuple[Plan, Completion]:
        """Store all tokens of a message as one entry, reusing what is stored of it.

        Args:
            is_last: no other request of the message follows.
        """
        stored, name = self._stored[request], _new_name()
        tokens = request.tokens if request.tokens_final else [*request.tokens, *request.footer]

        def build(plan: Plan) -> dict[str, Any]:
            start = len(plan.tokens)
            return {"store": [_store(name, start, start + len(tokens))], "max_tokens": 1}

        with self.lock:
            self._hold_parents(request)
        try:
            result = await self._send(request, tokens, build, num_own=stored.num_partial)
        except BaseException:
            with self.lock:
                self._discard(request, [name])
            raise
        with self.lock:
            stored.entry = name
            if is_last:
                self._complete(request)
        return result

    def _complete(self, request: Request) -> None:
        """Drop what only the completion of a message needed."""
        stored = self._stored[request]
        self._discard(request, [name for name in stored.names() if name != stored.entry])
        self._release_parents(request)
        self._free_unread(request)

    def _usage(self, request: Request, plan: Plan, reply: Completion) -> Usage:
        num_prompt, is_choreographed = len(plan.tokens) + len(request.prompt), request.mode == "choreographed"
        repaired = 0 if request.repair is None else len(plan.tokens) - plan.num_reused
        cached = plan.num_reused if repaired else max(plan.num_reused, min(reply.cached_tokens, num_prompt - 1))
        return Usage(
            cached_tokens=cached,
            computed_tokens=num_prompt - cached + (len(request.footer) if is_choreographed else 0),
            completion_tokens=request.num_generated,
            repaired_tokens=repaired,
        )

    # -- requests of the server -----------------------------------------------------------------------------

    async def _send(
        self,
        request: Request,
        tokens: list[int],
        build: Callable[[Plan], dict[str, Any]],
        *,
        num_own: int = 0,
        on_part: Callable[[Completion], bool] | None = None,
    ) -> tuple[Plan, Completion]:
        """Send tokens of a message behind its context; compute lost entries again.

        Args:
            build: returns further fields of the body, and what to store.
            num_own: first tokens that may be reused from the message's own entries.
        """
        for _ in range(MAX_TRIES):
            plan = await self._plan(request)
            start, names = len(plan.tokens), list[str]()
            try:
                plan = await self._compute_holes(request, plan, names)
                spans = plan.spans
                if num_own and (entry := self._entry(request, num_own)) is not None:
                    spans.append({"entry": entry, "start": 0, "stop": num_own, "at": start, "position": start})
                names += [span["entry"] for span in spans]
                fields = build(plan)
                params = {"mode": "spans", "spans": spans, "store": fields.pop("store", [])}
                if request.mode != "choreographed":
                    params = {"mode": "exact"}
                return plan, await self._post(request, [*plan.tokens, *tokens], params, fields, on_part)
            except RefusedError as exc:
                if not exc.may_lack_entries or not names:
                    raise
                missing, _ = await self._client.query(_identity(*self._namespace(request)), names)
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

    async def _post(
        self,
        request: Request,
        prompt: list[int],
        params: dict[str, Any],
        fields: dict[str, Any],
        on_part: Callable[[Completion], bool] | None = None,
    ) -> Completion:
        """Send one request, with the names of entries that were released."""
        namespace = self._namespace(request)
        with self.lock:
            released = self._released.pop(namespace, [])
        if released:
            params = {**params, "release": released}
        body = {**_identity(*namespace), "prompt": prompt, "return_token_ids": True, **fields}
        body["kv_transfer_params"] = {"choreograph": params}
        if request.priority:
            body["priority"] = request.priority
        try:
            return await self._client.complete(body, on_part)
        except BaseException:
            with self.lock:
                self._released[namespace] += released
            raise

    async def _plan(self, request: Request) -> Plan:
        """Place the context of a request, whose parents are final."""
        is_choreographed, info = request.mode == "choreographed", self.hf_model.model_info
        lengths = parent_lengths(request)
        starts = [part[0] if part else 0 for part in request.parent_slices]
        sources = [*zip(request.parents, starts, lengths, strict=True)]
        check_positions(request, lengths, info.max_positions)
        tokens = [token for ids in request.parent_tokens() for token in ids]
        if len(tokens) + len(request.prompt) + 1 > info.max_positions:
            raise RequestTooLargeError(
                f"message {request.id}: {len(tokens) + len(request.prompt)} tokens of context and message, with one "
                f"more to generate, exceed vLLM's --max-model-len {info.max_positions}: raise it, or read less"
            )
        is_free = is_choreographed and request.repair is None  # a repaired context is that of prefix mode
        offsets, new_offset = (request.offsets, request.new_offset) if is_free else ((None,) * len(lengths), None)
        positions, position = resolve_offsets(lengths, offsets, new_offset)
        request.parent_positions, request.position = positions, position
        if not is_choreographed:
            return Plan(tokens, [])
        share = 0.0 if request.repair is None else request.repair.share
        if share < 1:  # all of the context is computed
            for _ in range(MAX_TRIES):
                if all(self._entry(parent, start + length) is not None for parent, start, length in sources):
                    break
                await asyncio.gather(*(self._ensure(parent, start + length) for parent, start, length in sources))
            else:
                raise self._lost(request)
        runs, at, shift = list[Run](), 0, len(tokens) - position
        for (parent, start, length), offset in zip(sources, positions, strict=True):
            num_computed = 0 if not share or self._is_exact(parent, start, runs, at) else math.ceil(share * length)
            entry = self._entry(parent, start + length)
            for first, last, name in ((0, num_computed, None), (num_computed, length, entry)):
                if first < last:
                    place = at + first, offset + shift + first
                    runs.append(Run(parent, start + first, start + last, *place, name, name is None))
            at += length
        self._stored[request].context = [
            (run.source.id, run.start, run.stop, run.position - len(tokens), run.is_computed) for run in runs
        ]
        holes = self._stored[request].holes
        return Plan(tokens, [_filled(run, holes.get(run.at)) if run.entry is None else run for run in runs])

    def _is_exact(self, parent: Request, start: int, runs: list[Run], at: int) -> bool:
        """Return whether a parent was computed behind exactly these runs."""
        before = [(run.source.id, run.start, run.stop, run.at - at, run.is_computed) for run in runs]
        return start == 0 and self._stored[parent].context == before

    async def _compute_holes(self, request: Request, plan: Plan, names: list[str]) -> Plan:
        """Compute each hole by a request, for a server that does not do so.

        Args:
            names: receives the entries that the requests name.
        """
        runs = list(plan.runs)
        last = max((index for index, run in enumerate(runs) if run.entry is not None), default=-1)
        for index, run in enumerate(runs[:last] if not self._computes_holes else []):
            if run.entry is not None:
                continue
            before = Plan(plan.tokens, runs[:index])
            names += [span["entry"] for span in before.spans]
            end, name = run.at + run.stop - run.start, _new_name()
            params = {"mode": "spans", "spans": before.spans, "store": [_store(name, run.at, end)]}
            await self._post(request, plan.tokens[:end], params, {"max_tokens": 1})
            self._stored[request].holes[run.at] = name
            runs[index] = _filled(run, name)
        return Plan(plan.tokens, runs)

    def _entry(self, request: Request, num_tokens: int) -> str | None:
        """Return an entry with the first `num_tokens` tokens of a message."""
        stored = self._stored[request]
        return stored.entry or (stored.partial if num_tokens <= stored.num_partial else None)

    async def _ensure(self, request: Request, num_tokens: int) -> None:
        """Wait until the first tokens of a message are stored."""
        stored = self._stored[request]
        if stored.task is not None and not stored.task.done():
            await asyncio.shield(stored.task)
        if request.error is not None:
            raise RequestFailedError(f"parent {request.id} failed: {request.error}")
        if self._entry(request, num_tokens) is None:
            if stored.completion is None or stored.completion.done():
                stored.completion = self._client.loop.create_task(self._store_again(request))
            await asyncio.shield(stored.completion)

    async def _store_again(self, request: Request) -> None:
        with self.lock:
            self._active.add(request)
        try:
            await self._store_all(request)
        finally:
            with self.lock:
                self._active.discard(request)
                self._notify()

    def _namespace(self, request: Request) -> tuple[str | None, str]:
        """Return the `cache_salt` and the served model."""
        client = request.namespace.client
        salt = None if client == Client() else "/".join((client.tenant, *client.salt))
        return salt, self._base_model if request.model == BASE_MODEL else request.model


class _Load(NamedTuple):
    num_runnable: int  # requests that the server computes


def _filled(run: Run, entry: str | None) -> Run:
    """Return a computed run as an entry of its own, if it is stored."""
    return run if entry is None else run._replace(start=0, stop=run.stop - run.start, entry=entry)


def _identity(salt: str | None, model: str) -> dict[str, Any]:
    return {"model": model} if salt is None else {"model": model, "cache_salt": salt}


def _new_name() -> str:
    return secrets.token_hex(12)


def _store(entry: str, start: int, stop: int | None) -> dict[str, Any]:
    return {"entry": entry, "start": start, "stop": stop}


_SAME_NAMES = (
    "temperature top_p top_k min_p seed ignore_eos skip_special_tokens min_tokens presence_penalty frequency_penalty "
    "repetition_penalty logprobs"
)


def _sampling_body(request: Request) -> dict[str, Any]:
    """Return the sampling parameters of a decode as vLLM names them."""
    state = request.decode_state
    assert state is not None
    sampling = state.sampling
    return {
        **{name: getattr(sampling, name) for name in _SAME_NAMES.split()},
        "max_tokens": state.max_new_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(state.stop_tokens),
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
        "return_tokens_as_token_ids": True,
    }
