"""Gateway: the server's application over replicas, without weights."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ..agents import StepGraph
from ..api.chat import ChatTemplate
from ..errors import RequestFailedError, SessionClosedError
from ..namespace import Namespace
from ..outputs import EngineStats
from ..server.api_errors import ApiError
from ..server.app import create_service_app
from ..server.engine_thread import ChoiceUpdate, Generation
from ..server.reuse.answer_plan import Plan
from ..server.reuse.message_store import may_reuse_layers
from ..server.running_request import GenerationSpec, RunningRequest, SentAnswer
from ..server.server_config import ServerConfig
from ..server.service import SESSION_HEADERS, InferenceService
from .content_keys import alternative_keys, answer_keys, prompt_keys, scope_of
from .replica import ReplicaCall, ReplicaError, ReplicaInfo, ReplicaUpdate
from .replica_monitor import ReplicaMonitor
from .routing import RouteRequest
from .step_hints import StepHints

MAX_FAILURES = 3  # replicas that may fail one request

RETRY_SECONDS = 0.2  # pause before a request is repeated, times the number of failures

CHECK_SECONDS = 0.5  # between two looks at whether any replica answers, while a request waits for one

DESCRIBED = ""  # in place of the name of the replica that described itself when the gateway started

HINT_SECONDS = 30.0  # until a hint that no replica took is useless


class EngineProxy:
    """Attributes of an engine that a server reads, without the engine."""

    def __init__(self, info: ReplicaInfo) -> None:
        self.model_info, self.tokenizer, self.models = info.model_info, info.tokenizer, info.models
        self.chat = ChatTemplate(info.tokenizer)
        self.core = SimpleNamespace(config=SimpleNamespace(cache=SimpleNamespace(page_size=info.page_size)))
        self.stats: Callable[[], Any] = lambda: info.stats

    def session(self, **options: Any) -> Any:
        """Return what a Prompt Cache closes; schemas are only laid out here."""
        if "mode" in options:
            raise ApiError(501, "sessions need one process: start the server without --replicas", type="server_error")
        return SimpleNamespace(close=lambda: None)


class ReplicaThread:
    """`EngineThread` of a gateway: hands generations to replicas instead of an engine.

    Args:
        replica_timeout: seconds without an answer of any replica after which requests fail.
    """

    def __init__(self, handle: Any, replica_timeout: float) -> None:
        self._handle, self._replica_timeout = handle, replica_timeout
        self.monitor = ReplicaMonitor(handle)
        self._tasks: dict[Generation, asyncio.Task[None]] = {}
        self._learned: list[tuple[str, dict[int, int]]] = []  # answers that the router does not know yet
        self._hints: set[asyncio.Task[None]] = set()
        self.is_running = False

    @property
    def num_generations(self) -> int:
        return len(self._tasks)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.is_running = True
        self.monitor.start()

    async def stop(self) -> None:
        """End all requests."""
        self.is_running = False
        await self.monitor.stop()
        for hint in self._hints:
            hint.cancel()
        for generation in list(self._tasks):
            self._end(generation, SessionClosedError("the server is shutting down: send the request to another one"))

    async def call(self, function: Callable[[], Any]) -> Any:
        result = function()
        return await result if isinstance(result, Awaitable) else result

    def cancel(self, generation: Generation) -> None:
        """End a generation, unless it has ended."""
        self._end(generation, RequestFailedError("the request was cancelled"))

    def _end(self, generation: Generation, exc: Exception) -> None:
        task = self._tasks.pop(generation, None)
        if task is not None:
            task.cancel()
            generation.updates.put_nowait(exc)

    def relay(self, running: "ReplicatedRequest", generation: Generation, call: ReplicaCall) -> None:
        """Run a request on replicas until its answers are complete."""
        if not self.is_running:
            raise SessionClosedError("the server is shutting down: send the request to another one")
        task = self._tasks[generation] = asyncio.create_task(self._run(running, generation, call))
        task.add_done_callback(lambda _: running.end_step([]))  # if no answer was complete

    def send_hint(self, call: ReplicaCall) -> None:
        """Let a replica load the messages of a request that is expected."""
        if self.is_running:
            task = asyncio.create_task(self._send_hint(call))
            self._hints.add(task)
            task.add_done_callback(self._hints.discard)

    async def _send_hint(self, call: ReplicaCall) -> None:
        call.route.learned, self._learned = self._learned, []
        # the request itself is repeated, not its hint
        with suppress(RayError, RayServeException, TimeoutError):
            async with asyncio.timeout(HINT_SECONDS):
                await self._handle.options(method_name="prefetch").remote(call)

    async def _run(self, running: "ReplicatedRequest", generation: Generation, call: ReplicaCall) -> None:
        try:
            await self._repeat(running, generation, call)
        except Exception as exc:
            generation.updates.put_nowait(exc)
        finally:
            self._tasks.pop(generation, None)

    async def _repeat(self, running: "ReplicatedRequest", generation: Generation, call: ReplicaCall) -> None:
        """Try replicas; each continues after the tokens that were sent."""
        answers, route = _SentAnswers(running.num_choices), call.route
        for num_failures in range(MAX_FAILURES + 1):
            route.learned, self._learned = self._learned, []
            attempt = replace(call, spec=replace(call.spec, sent=answers.sent if answers.has_any else ()))
            replica, error = await self._attempt(running, generation, attempt, answers)
            route.learned = []
            if error is None or answers.is_complete:
                return
            if isinstance(error, ReplicaError) and not error.is_retryable:
                raise error.to_exception()
            if replica:
                route.failed.add(replica)
                if not isinstance(error, ReplicaError):
                    self.monitor.note_failure(replica)
            await asyncio.sleep(RETRY_SECONDS * (num_failures + 1))
        if isinstance(error, ReplicaError):
            raise error.to_exception()
        raise ApiError(
            503,
            f"{MAX_FAILURES + 1} replicas failed this request: retry later",
            type="service_unavailable",
            headers={"Retry-After": "5"},
        )

    async def _attempt(
        self, running: "ReplicatedRequest", generation: Generation, call: ReplicaCall, answers: "_SentAnswers"
    ) -> tuple[str, ReplicaError | Exception | None]:
        """Run a request on one replica; return its name and error."""
        replica, stream = "", self._handle.options(method_name="generate", stream=True).remote(call)
        try:
            async for item in self._items(stream):
                if isinstance(item, str):
                    replica = item
                    self.monitor.note_answer(replica)
                elif isinstance(item, ReplicaError):
                    return replica, item
                elif updates := answers.add(item):
                    running.set_counts(item)
                    if answers.is_complete:  # before the last update, which ends the request
                        self._tasks.pop(generation, None)
                        self._learn(call.spec, replica, answers)
                        running.end_step(answers.contents)
                    generation.updates.put_nowait(updates)
            if not answers.is_complete:
                return replica, RequestFailedError("the replica ended the stream early")
        except (RayError, RayServeException) as exc:
            return replica, exc
        except asyncio.CancelledError:
            stream.cancel()
            raise
        return replica, None

    async def _items(self, stream: Any) -> AsyncIterator[Any]:
        """Yield what a replica sends; the first item waits for any replica.

        Raises:
            ApiError: if no replica answers for too long.
        """
        first = asyncio.ensure_future(anext(stream))
        try:
            while not (await asyncio.wait({first}, timeout=CHECK_SECONDS))[0]:
                if self.monitor.silent_seconds >= self._replica_timeout:
                    stream.cancel()
                    raise no_replica()
        finally:
            first.cancel()  # unless it is here
        with suppress(StopAsyncIteration):
            yield first.result()
        async for item in stream:
            yield item

    def _learn(self, spec: GenerationSpec, replica: str, answers: "_SentAnswers") -> None:
        """Note for the router what a replica has generated."""
        for text, token_ids in answers.contents:
            contents = spec.keys_of(text) if spec.reuse == "messages" else ()
            if keys := answer_keys(spec.reuse, scope_of(spec), token_ids, contents):
                self._learned.append((replica, keys))


def no_replica() -> ApiError:
    """Return the error of a request that no replica can run."""
    return ApiError(
        503,
        "no replica answers: they are starting or have failed: retry later",
        type="service_unavailable",
        code="no_replica",
        headers={"Retry-After": "5"},
    )


class _SentAnswers:
    """Tokens and texts that were handed to the client."""

    def __init__(self, count: int) -> None:
        self.sent, self.texts = [SentAnswer() for _ in range(count)], [""] * count

    @property
    def contents(self) -> list[tuple[str, list[int]]]:
        """Text and tokens of every answer."""
        return [(text, list(answer.token_ids)) for text, answer in zip(self.texts, self.sent, strict=True)]

    @property
    def has_any(self) -> bool:
        return any(answer.token_ids or answer.is_complete for answer in self.sent)

    @property
    def is_complete(self) -> bool:
        return all(answer.is_complete for answer in self.sent)

    def add(self, update: ReplicaUpdate) -> list[ChoiceUpdate]:
        """Append an update; return it without answers that were complete before."""
        choices = [choice for choice in update.choices if not self.sent[choice.index].is_complete]
        for choice in choices:
            answer = self.sent[choice.index]
            self.texts[choice.index] += choice.text
            self.sent[choice.index] = SentAnswer(
                [*answer.token_ids, *choice.token_ids],
                answer.num_chars + len(choice.text),
                choice.finish_reason is not None,
            )
        return choices


class ReplicatedRequest(RunningRequest):
    """One request that runs on replicas."""

    _service: "ReplicatedService"
    _has_ended = False
    _session: str | None = None  # named by a header

    def _start(self) -> None:
        service, spec = self._service, self.spec
        names = (self._request.headers.get(name) for name in SESSION_HEADERS[1:])  # after that of the workflow
        self._session = next(filter(None, names), None)
        expected = service.hints.start(spec, service.graph_of(spec), self._session)
        if spec.steps is None:  # a replica sees only some of the workflow's steps
            spec = replace(spec, steps=service.hints.steps(spec, service.graph_of(spec), self._session))
        service.thread.relay(self, self._generation, service.call_of(spec, self._session))
        service.send_hints(expected, self._session)

    def end_step(self, answers: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Note the end of the agent's step.

        Later calls do nothing.

        Args:
            answers: texts and tokens; none if it failed.
        """
        if not self._has_ended:
            self._has_ended = True
            service, spec = self._service, self.spec
            service.send_hints(service.hints.end(spec, service.graph_of(spec), answers, self._session), self._session)

    def set_counts(self, update: ReplicaUpdate) -> None:
        self._plans = [Plan([], update.counts, lambda is_complete: None)]


class ReplicatedService(InferenceService):
    """`InferenceService` whose engine is on replicas."""

    thread: ReplicaThread  # type: ignore[assignment]

    def __init__(self, info: ReplicaInfo, config: ServerConfig, handle: Any, *, has_transfers: bool = False) -> None:
        proxy: Any = EngineProxy(info)
        super().__init__(proxy, config)
        self._has_transfers, self._version = has_transfers, info.version
        self._layer_reuse = info.layer_reuse
        self.thread, self.hints = ReplicaThread(handle, config.replica_timeout), StepHints()
        self.thread.monitor.note_answer(DESCRIBED)

    def check_ready(self) -> None:
        super().check_ready()
        if not self.thread.monitor.is_answering:
            raise no_replica()

    async def stats(self) -> EngineStats:
        """Return the summed state of all replicas that answer within seconds.

        Counters of replicas that ended are included.
        """
        await self.thread.monitor.refresh()
        return self.thread.monitor.reports.total

    def submit(self, request: Request, spec: GenerationSpec) -> RunningRequest:
        self.check_limits(spec)
        return ReplicatedRequest(self, request, spec)

    def graph_of(self, spec: GenerationSpec) -> StepGraph | None:
        """Return the declared step graph of a request's workflow."""
        return self.planner.store.graphs.get((spec.key.tenant, spec.key.workflow))

    def send_hints(self, specs: Iterable[GenerationSpec], session: str | None) -> None:
        """Prefetch what expected requests need: prefixes, and messages where replicas exchange them."""
        for spec in specs:
            if self._has_transfers or spec.reuse == "exact":
                self.thread.send_hint(self.call_of(spec, session))

    def call_of(self, spec: GenerationSpec, session: str | None = None) -> ReplicaCall:
        """Return what any replica needs to run a request.

        Args:
            session: one of several of the workflow; None: the workflow is one session.
        """
        key, scope = spec.key, scope_of(spec)
        keys = prompt_keys(spec.reuse, scope, spec.prompts)
        place = Namespace(client=key.client, workflow=None if session else key.workflow, session=session)
        may_reuse = may_reuse_layers(key, spec.repair, self.max_kl_of(spec))
        senders = [sender for receiver, sender in self._layer_reuse if receiver == key.model and may_reuse]
        is_movable = self._has_transfers and spec.reuse == "messages"
        route = RouteRequest(keys, place, is_movable=is_movable, alternatives=alternative_keys(spec, senders))
        schema = None if spec.schema_prompt is None else self.schemas.sources.get(spec.schema_prompt[:2])
        return ReplicaCall(route, spec, self.graph_of(spec), schema, self._version)


class Gateway:
    """Deployment that is the server's application; its replicas share nothing.

    Args:
        handle: of the deployment of `EngineReplica`.
        version: of the models that it prepares requests for; waits for a replica that has it.
        has_transfers: replicas fetch messages from each other.
    """

    async def __init__(  # type: ignore[misc]
        self, handle: Any, config: ServerConfig, version: str, *, has_transfers: bool = False
    ) -> None:
        while (info := await handle.describe.remote()).version != version:  # during an update
            await asyncio.sleep(RETRY_SECONDS)
        self._service = ReplicatedService(info, config, handle, has_transfers=has_transfers)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_service_app(self._service)
