"""/v1/choreograph: sessions of the library over HTTP, for `choreograph.connect`."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from ..agents import Workflow
from ..engine.labels import OnLeak
from ..engine.message import Message, MessageSlice
from ..engine.request import RequestState
from ..engine.session import Session
from ..engine.text import Turn
from ..errors import ChoreographError
from ..kv_cache.manager import POLL_SECONDS
from ..outputs import BASE_MODEL, KVReuse, Mode
from ..sampling_params import SamplingParams
from .api_errors import ApiError, overloaded, to_api_error
from .engine_thread import Generation
from .request_log import SESSION
from .service import InferenceService

MAX_CALLS, MAX_MESSAGES, MAX_SESSIONS = 256, 4096, 256  # of one request, one session, all tenants
IDLE_SECONDS = 3600.0  # after which a session may be closed

Share = Annotated[float, Field(ge=0, le=1)]


class _StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class GuardBody(_StrictBody):
    """Labels and clearance of a session or call; None: the default."""

    labels: list[str] | None = None
    clearance: list[str] | None = None
    on_leak: OnLeak | None = None

    @property
    def guard(self) -> dict[str, Any]:
        return {"labels": self.labels, "clearance": self.clearance, "on_leak": self.on_leak}


class SessionBody(GuardBody):
    """Options of `Engine.session`."""

    mode: Mode = "choreographed"
    seed: int | None = None
    model: str = BASE_MODEL
    repair: Share | None = None
    max_kl: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    workflow: Annotated[str, Field(max_length=256)] | None = None  # whose step graph the session's agents follow


class TurnBody(_StrictBody):
    """Chat turn."""

    role: str
    text: str
    opening: bool = True


class ParentBody(_StrictBody):
    """Message, or a part of it."""

    id: int
    start: int | None = None
    stop: int | None = None


Prompt = str | list[int] | TurnBody

SCHEMA_FIELDS = {
    "kind",
    "tokens",
    "prompt_schema",
    "agent",
    "sampling",
    "forced_tokens",
}  # a call with a schema has no other


class CallBody(GuardBody):
    """One `prefill` or `decode`."""

    kind: Literal["prefill", "decode"]
    tokens: Prompt
    parents: list[ParentBody] = Field(default_factory=list, max_length=MAX_MESSAGES)
    offsets: list[int | None] | None = None
    new_offset: int | None = None
    model: str | None = None
    kv_reuse: KVReuse = "recompute"
    repair: Share | None = None
    agent: Annotated[str, Field(max_length=256)] | None = None  # whose turn the calls of one request are
    prompt_schema: str | None = Field(None, alias="schema")  # `tokens` are PML and import modules of this schema
    sampling: dict[str, JsonValue] | None = None
    footer: Prompt | None = None
    forced_tokens: list[int] | None = None


class DeclassifyBody(_StrictBody):
    """Labels to remove from a message."""

    labels: list[str]


class CallsBody(_StrictBody):
    """Calls that are submitted together, all or none."""

    calls: list[CallBody] = Field(min_length=1, max_length=MAX_CALLS)


class RemoteSessions:
    """Open sessions by tenant and id; used in the engine's thread."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._sessions: dict[tuple[str, int], Session] = {}
        self._used: dict[tuple[str, int], float] = {}  # time.monotonic() of the last call
        self._messages: dict[tuple[str, int], dict[int, Message]] = {}  # unreleased ones by id
        self._trackers: dict[tuple[str, int], Workflow | None] = {}  # of the agents

    def open(self, tenant: str, body: SessionBody) -> int:
        now = time.monotonic()
        for key in [key for key, used in self._used.items() if now - used > IDLE_SECONDS]:
            self.close(*key)
        if len(self._sessions) >= MAX_SESSIONS:
            raise overloaded(MAX_SESSIONS)
        model = BASE_MODEL if body.model == self._service.model_name else body.model
        options = {"repair": body.repair, "max_kl": body.max_kl, **body.guard}
        session = self._service.engine.session(
            mode=body.mode, seed=body.seed, client_id=f"{tenant}\0", model=model, **options
        )
        self._sessions[tenant, session.id], self._messages[tenant, session.id] = session, {}
        tracker = self._service.planner.store.track(tenant, body.workflow or "", session)
        self._trackers[tenant, session.id] = tracker
        self._used[tenant, session.id] = now
        return session.id

    def close(self, tenant: str, session_id: int) -> None:
        self.get(tenant, session_id).close()
        for table in (self._sessions, self._used, self._messages, self._trackers):
            del table[tenant, session_id]

    def close_all(self) -> None:
        for key in list(self._sessions):
            self.close(*key)

    def get(self, tenant: str, session_id: int) -> Session:
        session = self._sessions.get((tenant, session_id))
        if session is None:
            raise ApiError(404, f"session {session_id} is not open: open a new one", code="SessionClosedError")
        self._used[tenant, session_id] = time.monotonic()
        return session

    def message(self, tenant: str, session_id: int, message_id: int) -> Message:
        self.get(tenant, session_id)
        message = self._messages[tenant, session_id].get(message_id)
        if message is None:
            raise ApiError(404, f"message {message_id} was released", code="MessageReleasedError")
        return message

    def submit(self, tenant: str, session_id: int, body: CallsBody) -> list[dict[str, Any]]:
        """Submit calls of one kind; a refused one submits none."""
        session, messages = self.get(tenant, session_id), self._messages[tenant, session_id]
        if len(messages) + len(body.calls) > MAX_MESSAGES:
            raise ApiError(400, f"a session holds at most {MAX_MESSAGES} messages: release some", code="ConfigError")
        kind = body.calls[0].kind
        if any(call.kind != kind for call in body.calls):
            raise ApiError(400, "calls: use calls of one kind", code="InvalidRequestError")
        agent, tracker = body.calls[0].agent, self._trackers[tenant, session_id]
        if any(call.agent != agent for call in body.calls):
            raise ApiError(400, "agent: use calls of one agent", code="InvalidRequestError")
        turn = nullcontext() if agent is None or tracker is None else tracker.agent(agent)
        if any(call.prompt_schema is not None for call in body.calls):
            with turn:
                submitted = [self._generate(tenant, session, body)]
        else:
            calls = [self._arguments(tenant, session_id, call) for call in body.calls]
            with turn:
                submitted = session.prefill(calls) if kind == "prefill" else session.decode(calls)
        for message in submitted:
            messages[message.id] = message
            if self._service.log is not None and message._request.state is not RequestState.DONE:
                workflow = f"session {session_id}, {session.mode}"
                self._service.log.start(tenant, workflow, kind, SESSION, [message])
        return [
            {"id": message.id, "model": message.model, "role": message.role, "labels": sorted(message.labels)}
            for message in submitted
        ]

    def _generate(self, tenant: str, session: Session, body: CallsBody) -> Message:
        """Submit a prompt whose modules come from a schema's cache."""
        call = body.calls[0]
        given = call.model_dump(exclude_defaults=True).keys()
        if len(body.calls) > 1 or not given <= SCHEMA_FIELDS or call.kind != "decode":
            raise ApiError(
                400, "schema: submit one decode, without parents or options of them", code="InvalidRequestError"
            )
        if call.prompt_schema is None or not isinstance(call.tokens, str):
            raise ApiError(400, "schema: the prompt is one PML text", code="InvalidRequestError")
        cache = self._service.schemas.get(tenant, call.prompt_schema)
        return cache.generate(session, call.tokens, sampling=_sampling(call), forced_tokens=call.forced_tokens)

    def _arguments(self, tenant: str, session_id: int, call: CallBody) -> dict[str, Any]:
        parents: list[Message | MessageSlice] = []
        for parent in call.parents:
            message = self.message(tenant, session_id, parent.id)
            is_slice = parent.start is not None and parent.stop is not None
            parents.append(MessageSlice(message, parent.start or 0, parent.stop or 0) if is_slice else message)
        arguments: dict[str, Any] = {"parents": parents, "offsets": call.offsets, "new_offset": call.new_offset}
        arguments |= {"model": call.model, "kv_reuse": call.kv_reuse, "repair": call.repair, **call.guard}
        if call.kind == "prefill":
            return {"tokens": _prompt_of(call.tokens), **arguments}
        arguments |= {"sampling": _sampling(call), "forced_tokens": call.forced_tokens}
        footer = None if call.footer is None else _prompt_of(call.footer)
        return {"header": _prompt_of(call.tokens), "footer": footer, **arguments}

    def release(self, tenant: str, session_id: int, message_id: int) -> None:
        self.message(tenant, session_id, message_id).release()
        del self._messages[tenant, session_id][message_id]

    async def pieces(self, message: Message) -> AsyncIterator[str]:
        """Yield the text of a decode as it is generated.

        A client that leaves does not end the decode.
        """
        generation = Generation(lambda: [message], lambda is_complete: None)
        self._service.thread.submit(generation)
        is_final = False
        while not is_final:
            updates = await generation.updates.get()
            if isinstance(updates, Exception):
                raise updates
            is_final = updates[-1].finish_reason is not None
            yield "".join(update.text for update in updates)

    async def wait(self, message: Message) -> dict[str, Any]:
        """Wait until a message is complete; return its values."""
        thread = self._service.thread
        if message.kind == "decode":
            async for _ in self.pieces(message):
                pass
        while not message._is_finished() and message.error is None:
            await asyncio.sleep(POLL_SECONDS)
        return await thread.call(lambda: _values(message))


def _sampling(call: CallBody) -> SamplingParams:
    options: dict[str, Any] = dict(call.sampling or {})
    if isinstance(bias := options.get("logit_bias"), dict):
        options["logit_bias"] = {int(token) if token.isdecimal() else token: bias[token] for token in bias}
    return SamplingParams(**options)


def _prompt_of(prompt: Prompt) -> str | list[int] | Turn:
    return Turn(**prompt.model_dump()) if isinstance(prompt, TurnBody) else prompt


def _values(message: Message) -> dict[str, Any]:
    """Return everything that can be read of a complete message."""
    message.result()
    return {
        "tokens": message.tokens,
        "output_token_ids": message.output_token_ids,
        "text": message.text,
        "finish_reason": message.finish_reason,
        "usage": asdict(message.usage),
        "timing": asdict(message.timing),
        "logprobs": None
        if message.logprobs is None
        else [[p.token, p.logprob, list(p.top.items())] for p in message.logprobs],
        "position": message.position,
        "offsets": message.offsets,
    }


def add_remote_routes(app: FastAPI, service: InferenceService, tenant_of: Any, errors: dict[int | str, Any]) -> None:
    """Add the routes of remote sessions to the application."""
    sessions = RemoteSessions(service)
    service.on_stop.append(sessions.close_all)
    router = APIRouter(prefix="/v1/choreograph/sessions", responses=errors, route_class=app.router.route_class)
    tenant_dependency = Depends(tenant_of)

    async def run(function: Callable[[], Any]) -> Any:
        return await _named_errors(service.thread.call(function))

    @router.post("")
    async def open_session(body: SessionBody, tenant: str = tenant_dependency) -> dict[str, Any]:
        """Open a session."""
        return {"id": await run(lambda: sessions.open(tenant, body))}

    @router.delete("/{session_id}")
    async def close_session(session_id: int, tenant: str = tenant_dependency) -> dict[str, Any]:
        """Close a session, which releases its messages."""
        await run(lambda: sessions.close(tenant, session_id))
        return {"id": session_id}

    @router.post("/{session_id}/calls")
    async def submit_calls(session_id: int, body: CallsBody, tenant: str = tenant_dependency) -> dict[str, Any]:
        """Submit calls without waiting for them."""
        return {"messages": await run(lambda: sessions.submit(tenant, session_id, body))}

    @router.get("/{session_id}/messages/{message_id}")
    async def read_message(session_id: int, message_id: int, tenant: str = tenant_dependency) -> dict[str, Any]:
        """Wait until a message is complete and return its values."""
        message = await run(lambda: sessions.message(tenant, session_id, message_id))
        result: dict[str, Any] = await _named_errors(sessions.wait(message))
        return result

    @router.get("/{session_id}/messages/{message_id}/text", response_class=StreamingResponse)
    async def stream_text(session_id: int, message_id: int, tenant: str = tenant_dependency) -> StreamingResponse:
        """Stream the text of a decode.

        A line is a JSON string, or an object that has an error.
        """
        message = await run(lambda: sessions.message(tenant, session_id, message_id))
        if message.kind != "decode":
            raise ApiError(
                400, f"message {message_id} is a prefill: only a decode generates", code="InvalidRequestError"
            )

        async def lines() -> AsyncIterator[str]:
            try:
                async for piece in sessions.pieces(message):
                    if piece:
                        yield f"{json.dumps(piece)}\n"
            except ChoreographError as exc:
                yield f"{json.dumps(_named_error(exc).body)}\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    @router.delete("/{session_id}/messages/{message_id}")
    async def release_message(session_id: int, message_id: int, tenant: str = tenant_dependency) -> dict[str, Any]:
        """Release a message; an unfinished one is cancelled."""
        await run(lambda: sessions.release(tenant, session_id, message_id))
        return {"id": message_id}

    @router.post("/{session_id}/messages/{message_id}/declassify")
    async def declassify_message(
        session_id: int, message_id: int, body: DeclassifyBody, tenant: str = tenant_dependency
    ) -> dict[str, Any]:
        """Remove labels from a message, for its later readers."""
        message = await run(lambda: sessions.message(tenant, session_id, message_id).declassify(*body.labels))
        return {"labels": sorted(message.labels)}

    @router.get("/{session_id}/usage")
    async def read_usage(session_id: int, tenant: str = tenant_dependency) -> dict[str, Any]:
        """Return the summed token counts of a session, whose messages it completes."""
        usage = await run(lambda: sessions.get(tenant, session_id).usage)
        return asdict(usage)

    app.include_router(router)


async def _named_errors(result: Awaitable[Any]) -> Any:
    """Return a result; errors have their class name as `code`."""
    try:
        return await result
    except ChoreographError as exc:
        raise _named_error(exc) from None


def _named_error(exc: ChoreographError) -> ApiError:
    error = to_api_error(exc)
    error.body["error"]["code"] = type(exc).__name__
    return error
