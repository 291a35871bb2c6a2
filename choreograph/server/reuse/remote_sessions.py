"""/v1/choreograph: sessions of the library over HTTP, for `choreograph.connect`."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, cast

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from ...api.call import PROMPT_NAMES
from ...api.chat import EncodedTurn, Turn
from ...api.message import Message
from ...api.session import Session
from ...api.validation import follows_system_turn, require_chat_template
from ...errors import ChoreographError, ConfigError, InvalidRequestError
from ...kv_cache.manager import POLL_SECONDS
from ...messages.handle import MessageSlice
from ...namespace import UNSALTED, Client
from ...outputs import BASE_MODEL, TokenLogprob
from ...request.request import RequestState
from ...sampling_params import SamplingParams
from ..api_errors import ApiError, hide_ids, overloaded, to_api_error
from ..dashboard.request_log import SESSION
from ..engine_thread import Generation
from ..openai.answer_loop import SCORE_BYTES
from ..openai.scored_prompts import MAX_SCORES
from ..request_body import MAX_TOP_LOGPROBS
from ..service import InferenceService
from .agent_tracking import AgentTracker
from .remote_bodies import (
    MAX_CALLS,
    MAX_MESSAGES,
    SCHEMA_FIELDS,
    CallBody,
    CallsBody,
    DeclassifyBody,
    Prompt,
    SessionBody,
    TurnBody,
)
from .schema_store import SchemaPrompt

CALLS_PER_REQUEST = 4  # unfinished calls that a tenant may have for each request of its share
IDLE_SECONDS = 3600.0  # after which a session may be closed


class EncodedCall(NamedTuple):
    """Tokenized prompt and footer of a call.

    The prompt of a schema is resolved.
    """

    prompt: list[int] | list[EncodedTurn] | SchemaPrompt
    footer: list[int] | list[EncodedTurn] | None = None


@dataclass
class OpenSession:
    """Session of a client."""

    session: Session
    tracker: AgentTracker | None  # of the agents
    messages: dict[str, Message] = field(default_factory=dict)  # unreleased ones by id
    warnings: list[str] = field(default_factory=list)  # of the session, not sent yet
    used: float = field(default_factory=time.monotonic)  # seconds, of the last call


class RemoteSessions:
    """Open sessions by tenant and id; used in the engine's thread.

    Ids of sessions and messages are random. Those of the engine are one counter, so a tenant could count the work of
    others by them.
    """

    def __init__(self, service: InferenceService) -> None:
        self._service, self._max_sessions = service, service.share.max_sessions
        self._sessions: dict[tuple[str, str], OpenSession] = {}
        self._unfinished: dict[str, list[Message]] = {}  # calls of each tenant

    def open(self, tenant: str, body: SessionBody) -> str:
        now = time.monotonic()
        for key in [key for key, session in self._sessions.items() if now - session.used > IDLE_SECONDS]:
            self.close(*key)
        if sum(owner == tenant for owner, _ in self._sessions) >= self._max_sessions:
            raise ApiError(
                429,
                f"{self._max_sessions} sessions of this key are open, its share: close one",
                type="rate_limit_error",
                code="too_many_sessions",
            )
        body.check_options(self._service.engine.core.features.session_parsers)
        model = BASE_MODEL if body.model == self._service.model_name else body.model
        session = self._service.engine.session(
            mode=body.mode, seed=body.seed, client_id=Client(tenant, UNSALTED), model=model, **body.options
        )
        tracker = self._service.planner.store.track(tenant, body.workflow or "", session)
        session_id = uuid.uuid4().hex
        opened = self._sessions[tenant, session_id] = OpenSession(session, tracker)
        session.on_warning = opened.warnings.append
        return session_id

    def close(self, tenant: str, session_id: str) -> None:
        self.get(tenant, session_id).session.close()
        del self._sessions[tenant, session_id]

    def close_all(self) -> None:
        for key in list(self._sessions):
            self.close(*key)

    def get(self, tenant: str, session_id: str) -> OpenSession:
        session = self._sessions.get((tenant, session_id))
        if session is None:
            raise ApiError(404, f"session {session_id} is not open: open a new one", code="SessionClosedError")
        session.used = time.monotonic()
        return session

    def messages(self, tenant: str, session_id: str) -> dict[str, Message]:
        """Return a session's messages by id; none if not open."""
        session = self._sessions.get((tenant, session_id))
        return {} if session is None else session.messages

    def message(self, tenant: str, session_id: str, message_id: str) -> Message:
        message = self.get(tenant, session_id).messages.get(message_id)
        if message is None:
            raise _released(f"message {message_id}")
        return message

    def encode(self, tenant: str, session_id: str, body: CallsBody) -> list[EncodedCall]:
        """Tokenize the texts of calls; runs in a worker thread."""
        messages, result = self.messages(tenant, session_id), []
        for call in body.calls:
            if call.prompt_schema is not None and isinstance(call.tokens, str):
                result.append(EncodedCall(self._service.schemas.resolve(tenant, call.prompt_schema, call.tokens)))
                continue
            parents = [message for parent in call.parents if (message := messages.get(parent.id)) is not None]
            prompt = self._encode(call.tokens, call.kind, is_first=not call.parents, parents=parents)
            footer = None if call.footer is None else self._encode(call.footer, "prefill")
            result.append(EncodedCall(prompt, footer))
        return result

    def _encode(
        self, prompt: Prompt, kind: str, *, is_first: bool = False, parents: Sequence[Message] = ()
    ) -> list[int] | list[EncodedTurn]:
        """Tokenize a text or turns as the session would.

        Args:
            is_first: it has no parents.
        """
        service, template = self._service, require_chat_template(self._service.engine.chat)
        if isinstance(prompt, str):
            limit, opening = service.max_model_len, is_first and bool(prompt)
            return service.renderer.tokenize(prompt, opening=opening, max_tokens=limit, param="tokens")
        items = prompt if isinstance(prompt, list) else [prompt]
        if not items or isinstance(items[0], int):
            return cast("list[int]", items)
        turns = [Turn(**turn.model_dump()) for turn in cast("list[TurnBody]", items)]
        service.renderer.check_length("".join(turn.text for turn in turns), service.max_model_len, "tokens")
        return template.encode_turns(
            turns,
            opening=is_first,
            after_system=follows_system_turn(tuple(parents)),
            opens_last=kind == "decode",
        )

    def submit(self, tenant: str, session_id: str, body: CallsBody, encoded: Sequence[EncodedCall]) -> dict[str, Any]:
        """Submit calls of one kind; a refused one submits none.

        Returns the messages, and warnings of the session.

        Args:
            encoded: texts of the calls, from `encode`.
        """
        opened = self.get(tenant, session_id)
        session, messages = opened.session, opened.messages
        if len(messages) + len(body.calls) > MAX_MESSAGES:
            raise ConfigError(
                f"the session would hold {len(messages) + len(body.calls)} messages: release some, {MAX_MESSAGES} fit"
            )
        self._check_queue(tenant, len(body.calls))
        for name in ("kind", "agent"):
            values = list(dict.fromkeys(getattr(call, name) for call in body.calls))
            if len(values) > 1:
                raise InvalidRequestError(f"calls: of several values of {name}, {values}: send each in its own request")
        kind, agent = body.calls[0].kind, body.calls[0].agent
        turn = nullcontext() if agent is None or opened.tracker is None else opened.tracker.agent(agent)
        if any(call.prompt_schema is not None for call in body.calls):
            with turn:
                submitted = [self._generate(tenant, session, body, encoded[0].prompt)]
        else:
            calls = [self._arguments(tenant, session_id, *pair) for pair in zip(body.calls, encoded, strict=True)]
            with turn:
                submitted = session.prefill(calls) if kind == "prefill" else session.decode(calls)
        self._unfinished[tenant] += submitted
        ids = [uuid.uuid4().hex for _ in submitted]
        for message_id, message in zip(ids, submitted, strict=True):
            messages[message_id] = message
            if self._service.log is not None and message._request.state is not RequestState.DONE:
                workflow = f"session {session_id}, {session.mode}"
                self._service.log.start(tenant, workflow, kind, SESSION, [message])
        names = self.message_names(tenant, session_id) if opened.warnings else {}
        warnings, opened.warnings[:] = [hide_ids(text, names) for text in opened.warnings], []
        replies = [
            {"id": message_id, "model": message.model, "role": message.role, "labels": sorted(message.labels)}
            for message_id, message in zip(ids, submitted, strict=True)
        ]
        return {"messages": replies, "warnings": warnings}

    def _generate(self, tenant: str, session: Session, body: CallsBody, prompt: Any) -> Message:
        """Submit a prompt whose modules come from a schema's cache."""
        call = body.calls[0]
        given = call.model_dump(exclude_defaults=True).keys()
        if len(body.calls) > 1 or not given <= SCHEMA_FIELDS or call.kind != "decode":
            others = sorted(given - SCHEMA_FIELDS) or "nothing else"
            raise InvalidRequestError(
                f"schema: {len(body.calls)} calls, a {call.kind} with {others}: submit one decode, without parents or "
                "options of them"
            )
        if call.prompt_schema is None or not isinstance(call.tokens, str):
            kind = type(call.tokens).__name__
            raise InvalidRequestError(f"schema={call.prompt_schema!r}: the prompt is a {kind}: give one PML text")
        cache, sampling = self._service.schemas.cache_of(prompt), self._sampling(call)
        return cache.generate(session, prompt.resolved, sampling=sampling, forced_tokens=call.forced_tokens)

    def _arguments(self, tenant: str, session_id: str, call: CallBody, encoded: EncodedCall) -> dict[str, Any]:
        call.check_options(self._service.engine.core.features.parsers)
        parents: list[Message | MessageSlice] = []
        for parent in call.parents:
            message = self.message(tenant, session_id, parent.id)
            is_slice = parent.start is not None and parent.stop is not None
            parents.append(MessageSlice(message, parent.start or 0, parent.stop or 0) if is_slice else message)
        arguments = {
            **call.options,
            PROMPT_NAMES[call.kind]: encoded.prompt,
            "parents": parents,
            "offsets": call.offsets,
            "new_offset": call.new_offset,
            "priority": call.priority or 0,
        }
        if call.sampling is not None:
            arguments["sampling"] = self._sampling(call)
        own = {"footer": encoded.footer, "forced_tokens": call.forced_tokens}
        return arguments | {name: value for name, value in own.items() if value is not None}

    def release(self, tenant: str, session_id: str, message_id: str) -> None:
        self.message(tenant, session_id, message_id).release()
        del self.messages(tenant, session_id)[message_id]

    def message_names(self, tenant: str, session_id: str) -> dict[int, str]:
        """Return the ids of a session's messages by those of the engine."""
        messages = list(self.messages(tenant, session_id).items())  # a copy: another thread adds some
        return {message.id: message_id for message_id, message in messages}

    async def pieces(self, message: Message) -> AsyncIterator[str]:
        """Yield the text of a decode as it is generated.

        A client that leaves does not end the decode.
        """
        generation = Generation(lambda: [message], lambda is_complete: None)
        self._service.thread.submit(generation)
        is_final = False
        try:
            while not is_final:
                updates = await generation.updates.get()
                if isinstance(updates, Exception):
                    is_final = True
                    raise _released() if message._request.state is RequestState.CANCELLED else updates
                is_final = updates[-1].finish_reason is not None
                yield "".join(update.text for update in updates)
        finally:
            if not is_final:
                self._service.thread.cancel(generation)  # ends the reading alone

    async def wait(self, tenant: str, message: Message) -> bytes:
        """Wait until a message is complete; return its values as JSON."""
        if message.kind == "decode":
            async for _ in self.pieces(message):
                pass
        await _finish([message])
        if message._request.state is RequestState.CANCELLED:
            raise _released()
        num_scores = len(message.prompt_logprobs or ()) + len(message.logprobs or ())
        num_bytes = SCORE_BYTES * num_scores * MAX_TOP_LOGPROBS
        return await self._service.pool.run(tenant, num_bytes, lambda: json.dumps(_values(message)).encode())

    async def finish(self, tenant: str, session_id: str) -> None:
        """Wait until all messages of a session are complete."""
        await _finish(list(self.messages(tenant, session_id).values()))

    def _sampling(self, call: CallBody) -> SamplingParams:
        """Return the sampling of a call, with the limits of other requests."""
        options: dict[str, Any] = dict(call.sampling or {})
        most = {"logprobs": MAX_TOP_LOGPROBS, "prompt_logprobs": max(1, MAX_SCORES // self._service.max_model_len - 1)}
        for name, limit in most.items():
            if isinstance(value := options.get(name), int) and value > limit:
                raise InvalidRequestError(f"sampling.{name}={value}: use at most {limit}")
        if isinstance(bias := options.get("logit_bias"), dict):
            options["logit_bias"] = {int(token) if token.isdecimal() else token: bias[token] for token in bias}
        return SamplingParams(**options)

    def _check_queue(self, tenant: str, num_calls: int) -> None:
        """Raise an error if a tenant has too many unfinished calls."""
        unfinished = self._unfinished.setdefault(tenant, [])
        unfinished[:] = [message for message in unfinished if not _has_ended(message)]
        limit = max(MAX_CALLS, CALLS_PER_REQUEST * self._service.share.max_requests)
        if len(unfinished) + num_calls > limit:
            raise overloaded(limit, "calls")


def _released(name: str = "the message") -> ApiError:
    return ApiError(404, f"{name} was released: keep it until its last use", code="MessageReleasedError")


async def _finish(messages: Sequence[Message]) -> None:
    while not all(map(_has_ended, messages)):
        await asyncio.sleep(POLL_SECONDS)


def _has_ended(message: Message) -> bool:
    """Return whether a message is complete, has failed, or was released before it was complete."""
    return message._request.is_finished or message._is_finished()


def _logprob_rows(items: Sequence[TokenLogprob | None] | None) -> list[list[Any] | None] | None:
    rows = [None if x is None else [x.token, x.logprob, list(x.top.items()), x.rank] for x in items or ()]
    return None if items is None else rows


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
        "logprobs": _logprob_rows(message.logprobs),
        "prompt_logprobs": _logprob_rows(message.prompt_logprobs),
        "position": message.position,
        "offsets": message.offsets,
    }


def add_remote_routes(app: FastAPI, service: InferenceService, tenant_of: Any, errors: dict[int | str, Any]) -> None:
    """Add the routes of remote sessions to the application."""
    sessions = RemoteSessions(service)
    service.on_stop.append(sessions.close_all)
    router = APIRouter(prefix="/v1/choreograph/sessions", responses=errors, route_class=app.router.route_class)
    tenant_dependency = Depends(tenant_of)

    async def run(function: Callable[[], Any], tenant: str, session_id: str = "") -> Any:
        return await named_errors(service.thread.call(function), tenant, session_id)

    async def named_errors(result: Awaitable[Any], tenant: str, session_id: str) -> Any:
        """Return a result; errors have their class name as `code`."""
        try:
            return await result
        except ChoreographError as exc:
            raise _named_error(exc, sessions.message_names(tenant, session_id)) from None

    @router.post("")
    async def open_session(body: SessionBody, tenant: str = tenant_dependency) -> dict[str, Any]:
        """Open a session."""
        session_id = await run(lambda: sessions.open(tenant, body), tenant)
        return {"id": session_id, "options": list(service.engine.core.features.parsers)}

    @router.delete("/{session_id}")
    async def close_session(session_id: str, tenant: str = tenant_dependency) -> dict[str, Any]:
        """Close a session, which releases its messages."""
        await run(lambda: sessions.close(tenant, session_id), tenant, session_id)
        return {"id": session_id}

    @router.post("/{session_id}/calls")
    async def submit_calls(
        session_id: str, body: CallsBody, request: Request, tenant: str = tenant_dependency
    ) -> dict[str, Any]:
        """Submit calls without waiting for them."""
        await run(lambda: sessions.get(tenant, session_id), tenant, session_id)
        encode = service.work(tenant, request, lambda: sessions.encode(tenant, session_id, body))
        encoded = await named_errors(encode, tenant, session_id)
        reply: dict[str, Any] = await run(
            lambda: sessions.submit(tenant, session_id, body, encoded), tenant, session_id
        )
        return reply

    @router.get("/{session_id}/messages/{message_id}")
    async def read_message(session_id: str, message_id: str, tenant: str = tenant_dependency) -> Response:
        """Wait until a message is complete and return its values."""
        message = await run(lambda: sessions.message(tenant, session_id, message_id), tenant, session_id)
        values = await named_errors(sessions.wait(tenant, message), tenant, session_id)
        return Response(values, media_type="application/json")

    @router.get("/{session_id}/messages/{message_id}/text", response_class=StreamingResponse)
    async def stream_text(session_id: str, message_id: str, tenant: str = tenant_dependency) -> StreamingResponse:
        """Stream the text of a decode.

        A line is a JSON string, or an object that has an error.
        """
        message = await run(lambda: sessions.message(tenant, session_id, message_id), tenant, session_id)
        if message.kind != "decode":
            raise ApiError(
                400, f"message {message_id} is a prefill: read its values instead", code="InvalidRequestError"
            )

        async def lines() -> AsyncIterator[str]:
            try:
                async for piece in sessions.pieces(message):
                    if piece:
                        yield f"{json.dumps(piece)}\n"
            except ChoreographError as exc:
                error = _named_error(exc, sessions.message_names(tenant, session_id))
                yield f"{json.dumps(error.body)}\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    @router.delete("/{session_id}/messages/{message_id}")
    async def release_message(session_id: str, message_id: str, tenant: str = tenant_dependency) -> dict[str, Any]:
        """Release a message; an unfinished one is cancelled."""
        await run(lambda: sessions.release(tenant, session_id, message_id), tenant, session_id)
        return {"id": message_id}

    @router.post("/{session_id}/messages/{message_id}/declassify")
    async def declassify_message(
        session_id: str, message_id: str, body: DeclassifyBody, tenant: str = tenant_dependency
    ) -> dict[str, Any]:
        """Remove labels from a message, for its later readers."""

        def declassify() -> Message:
            return sessions.message(tenant, session_id, message_id).declassify(*body.labels)

        message = await run(declassify, tenant, session_id)
        return {"labels": sorted(message.labels)}

    @router.get("/{session_id}/usage")
    async def read_usage(session_id: str, tenant: str = tenant_dependency) -> dict[str, Any]:
        """Return the summed token counts of a session, whose messages it completes."""
        await run(lambda: sessions.get(tenant, session_id), tenant, session_id)
        await sessions.finish(tenant, session_id)  # reading the usage would run the engine until then
        usage = await run(lambda: sessions.get(tenant, session_id).session.usage, tenant, session_id)
        return asdict(usage)

    app.include_router(router)


def _named_error(exc: ChoreographError, names: Mapping[int, str]) -> ApiError:
    error = to_api_error(exc, names)
    error.body["error"]["code"] = type(exc).__name__
    return error
