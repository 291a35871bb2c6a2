"""Proxy of a vLLM server that runs the connector (`choreograph.vllm`).

Completions of chats and prompts are sent on with the entries that they quote; everything else passes unchanged. The
server renders and tokenizes all prompts, so the proxy needs neither model nor tokenizer.
"""

import asyncio
import json
import logging
import string
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

import httpx
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.types import Receive, Scope, Send

from ...errors import ConfigError
from ...vllm.reuse_params import CONNECTOR_OPTION, VERSION, report_of, store_param, transfer_params
from ..api_errors import ApiError
from ..request_body import MAX_NAME_CHARS, LabelNames, check_headers, check_path, parse_body
from ..server_config import ProxyConfig, ReuseMode
from .upstream_answer import HOP_HEADERS, AnswerRecord, Reply, read_events
from .upstream_prompt import Tokenize, can_reuse, find_cuts, find_turn_tokens, read_prompt
from .upstream_store import EntryStore, PromptPart, PromptPlan, UpstreamTenant, to_spans

CONNECT_TIMEOUT = 10.0  # seconds; answers may take any time

MAX_HOLE_REQUESTS = 8  # that precede one request, where the server cannot compute tokens between two spans

MAX_ATTEMPTS = 2  # with reuse, before a request is sent without

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]

Headers = list[tuple[bytes, bytes]]

_logger = logging.getLogger(__name__)


class ProxyOptions(BaseModel):
    """Field `choreography` of a request, of which the proxy knows a part."""

    model_config = ConfigDict(extra="forbid")

    reuse: ReuseMode = "auto"
    workflow: Annotated[str, Field(max_length=MAX_NAME_CHARS)] = "default"  # requests of one workflow share entries
    repair: Annotated[float, Field(ge=0, le=1)] | None = None  # share of reused tokens to compute again
    labels: LabelNames = []


class PlanRefused(Exception):
    """The server did not use the entries of a plan.

    The client has got nothing yet.
    """


@dataclass
class ProxiedCall:
    """Completion that a client asks for."""

    path: str
    headers: Headers
    body: dict[str, Any]
    options: ProxyOptions
    tenant: UpstreamTenant
    parameters: dict[str, Any]  # of the connector, in every request of the call

    @property
    def num_answers(self) -> int:
        n = self.body.get("n")
        return n if isinstance(n, int) else 1

    @property
    def internal_headers(self) -> Headers:
        """Headers of requests of the proxy's own, whose answers it reads."""
        return [item for item in self.headers if item[0] not in (b"accept-encoding", b"x-request-id")]

    def internal_body(self, prompt: list[int], parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a request of the proxy's own."""
        fields: dict[str, Any] = {
            key: self.body[key] for key in ("model", "cache_salt", "priority") if key in self.body
        }
        options = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        return fields | options | transfer_params({"mode": "spans", **parameters, **self.parameters})


class UpstreamResponse(Response):
    """Response that a coroutine sends; it is cancelled when the client disconnects."""

    def __init__(self, run: Callable[[Reply], Awaitable[None]]) -> None:
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.ensure_future(self._run(Reply(send))), asyncio.ensure_future(watch())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            error, _ = await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(error, Exception):
            raise error


class UpstreamProxy:
    """Requests to one vLLM server, and the entries that it stores.

    Args:
        has_holes: whether the server computes tokens between two spans in one request.
    """

    def __init__(self, config: ProxyConfig, *, has_holes: bool) -> None:
        self.config, self.store = config, EntryStore(config.max_stored_tokens)
        self._has_holes = has_holes
        self._turn_tokens: dict[str, frozenset[int]] = {}  # that begin turns, by model
        self.client = httpx.AsyncClient(
            base_url=config.upstream,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def forward(self, request: Request) -> Response:
        """Answer a request as the server does."""
        content = await self._read_body(request)
        return UpstreamResponse(partial(self._relay, request.method, _target(request), _headers(request), content))

    async def complete(self, request: Request) -> Response:
        """Answer a completion, with reuse if the request allows it."""
        check_headers(request)
        content, target, headers = await self._read_body(request), _target(request), _headers(request)
        body = await asyncio.to_thread(parse_body, content)
        if not isinstance(body, dict) or body.get("kv_transfer_params") is not None:
            return UpstreamResponse(partial(self._relay, "POST", target, headers, content))
        options = _read_options(body.pop("choreography", None), request.headers)
        labels = tuple(sorted(set(options.labels)))
        tenant = UpstreamTenant(
            request.headers.get("authorization", ""),
            str(body.get("cache_salt") or ""),
            str(body.get("model") or ""),
            options.workflow,
            labels,
        )
        repair = self.config.repair if options.repair is None else options.repair
        shared = {"workflow": options.workflow, "labels": list(labels), "repair": repair}
        headers = [item for item in headers if item[0] not in (b"content-type", b"content-encoding")]
        headers.append((b"content-type", b"application/json"))
        call = ProxiedCall(target, headers, body, options, tenant, {key: item for key, item in shared.items() if item})
        is_planned = options.reuse == "auto" and can_reuse(body)
        return UpstreamResponse(partial(self._answer if is_planned else self._answer_plainly, call))

    async def _read_body(self, request: Request) -> bytes:
        chunks, num_bytes, limit = list[bytes](), 0, self.config.max_body_bytes
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > limit:
                raise ApiError(
                    413, f"the body has more than {limit} bytes: send a shorter one", code="request_too_large"
                )
            chunks.append(chunk)
        return b"".join(chunks)

    async def _relay(self, method: str, target: str, headers: Headers, content: bytes, reply: Reply) -> None:
        """Send a request and its answer on, byte by byte."""
        with self._reporting_failures(reply):
            url = self.client.base_url.copy_with(raw_path=self._base_path + target.encode())
            async with self.client.stream(method, url, headers=headers, content=content or None) as answer:
                await reply.relay(answer)

    @property
    def _base_path(self) -> bytes:
        return self.client.base_url.raw_path.rstrip(b"/")

    @contextmanager
    def _reporting_failures(self, reply: Reply) -> Iterator[None]:
        """Turn failures of the server into errors.

        An answer that has started is cut off.
        """
        try:
            yield
        except httpx.HTTPError as exc:
            reason = f"upstream {self.config.upstream}: {exc or type(exc).__name__}"
            _logger.warning(reason)
            if not reply.has_started:
                error = ApiError(502, f"{reason}: check that it runs", type="bad_gateway", code="upstream_failed")
                raise error from None

    async def _answer_plainly(self, call: ProxiedCall, reply: Reply) -> None:
        """Send a request without entries.

        The server finds whole messages if the client asks for that.
        """
        parameters = {"mode": "messages", **call.parameters} if call.options.reuse == "messages" else {"mode": "exact"}
        body = call.body | transfer_params(parameters)
        await self._relay("POST", call.path, call.headers, json.dumps(body).encode(), reply)

    async def _answer(self, call: ProxiedCall, reply: Reply) -> None:
        with self._reporting_failures(reply):
            tokenize = partial(self._tokenize, call)
            tokens = await read_prompt(call.body, tokenize)
            cuts = await self._find_cuts(call, tokens, tokenize) if tokens and "messages" in call.body else []
            for _ in range(MAX_ATTEMPTS if tokens else 0):
                plan = self.store.plan(call.tenant, tokens, cuts)
                try:
                    await self._answer_planned(call, plan, reply)
                    return
                except PlanRefused as exc:
                    missing = await self._find_missing(call, plan) if plan.reused else []
                    level = logging.INFO if missing else logging.WARNING
                    _logger.log(level, "spans were refused, %d entries are missing: %s", len(missing), exc)
                    self.store.drop(call.tenant, missing)
                    if not missing:
                        break
            await self._answer_plainly(call, reply)

    async def _tokenize(self, call: ProxiedCall, body: Mapping[str, Any]) -> list[int]:
        """Return the ids of a prompt; none if the server refuses it."""
        answer = await self.client.post("/tokenize", json=body, headers=call.internal_headers)
        return list(answer.json()["tokens"]) if answer.status_code == 200 else []

    async def _find_cuts(self, call: ProxiedCall, tokens: list[int], tokenize: Tokenize) -> list[int]:
        model = call.tenant.model
        if model not in self._turn_tokens:
            self._turn_tokens[model] = await find_turn_tokens({"model": model} if model else {}, tokenize)
        return find_cuts(tokens, self._turn_tokens[model], len(call.body["messages"]))

    async def _answer_planned(self, call: ProxiedCall, plan: PromptPlan, reply: Reply) -> None:
        """Send a request with the spans and stores of a plan.

        Raises:
            PlanRefused: if the server did not answer with them.
        """
        record = AnswerRecord(
            plan, call.num_answers, call.options.workflow, hides_ids=not call.body.get("return_token_ids")
        )
        try:
            filled = await self._fill_holes(call, plan)
            computed = [part for part in plan.computed if part not in filled]
            spans = [part for part in plan.parts if part not in computed]
            parameters = _placement(spans, computed)
            if call.num_answers == 1:
                parameters["store"][-1]["stop"] = None  # with the answer
            if releases := self.store.take_releases(call.tenant):
                parameters["release"] = releases
            reuse = transfer_params({"mode": "spans", **parameters, **call.parameters})
            body = call.body | {"return_token_ids": True} | reuse
            headers = [item for item in call.headers if item[0] != b"accept-encoding"]
            headers.append((b"accept-encoding", b"identity"))
            async with self.client.stream("POST", call.path, json=body, headers=headers) as answer:
                if answer.status_code == 500:
                    raise PlanRefused((await answer.aread()).decode(errors="replace")[:500])
                if answer.status_code != 200:
                    await reply.relay(answer)
                elif answer.headers.get("content-type", "").startswith("text/event-stream"):
                    await self._stream(call, record, answer, reply)
                else:
                    value = json.loads(await answer.aread())
                    record.observe(value)
                    if record.error is not None:
                        raise PlanRefused(record.error)
                    self.store.add(call.tenant, record.take_entries())
                    content = json.dumps(record.cleaned(value)).encode()
                    await reply.start(answer, num_bytes=len(content))
                    await reply.write(content)
                    await reply.end()
        finally:
            self.store.drop(call.tenant, record.unknown_names())

    async def _stream(self, call: ProxiedCall, record: AnswerRecord, answer: httpx.Response, reply: Reply) -> None:
        """Relay events.

        Those before the first token wait for it, since an error may follow them.
        """
        waiting: list[bytes] = []
        async for event, value in read_events(answer):
            record.observe(value)
            if not reply.has_started and record.error is not None:
                raise PlanRefused(record.error)
            waiting.append(record.cleaned_event(event, value))
            if record.is_generating:
                self.store.add(call.tenant, record.take_entries())  # a client that reads this may ask at once
                if not reply.has_started:
                    await reply.start(answer)
                await reply.write(b"".join(waiting))
                waiting.clear()
        if not reply.has_started:
            await reply.start(answer)
        await reply.write(b"".join(waiting))
        await reply.end()

    async def _fill_holes(self, call: ProxiedCall, plan: PromptPlan) -> list[PromptPart]:
        """Compute the parts between spans by requests of their own, if needed.

        Returns:
            the parts that are stored now.
        """
        filled: list[PromptPart] = []
        for run in [] if self._has_holes else plan.holes()[:MAX_HOLE_REQUESTS]:
            before = [part for part in plan.parts if part.stop <= run[0].start]
            body = call.internal_body(plan.tokens[: run[-1].stop], _placement(before, run))
            answer = await self.client.post("/v1/completions", json=body, headers=call.internal_headers)
            if answer.status_code != 200:
                raise PlanRefused(answer.text[:500])
            filled += run
        return filled

    async def _find_missing(self, call: ProxiedCall, plan: PromptPlan) -> list[str]:
        """Return the entries of the tenant that the server does not have.

        All are asked for: after a restart of the server, the next plan would find others that are gone.
        """
        body = call.internal_body(plan.tokens[:1], {"query": self.store.names(call.tenant)})
        answer = await self.client.post("/v1/completions", json=body, headers=call.internal_headers)
        report = (report_of(answer.json()) if answer.status_code == 200 else None) or {}
        return list(report.get("missing") or ())


def _placement(spans: Iterable[PromptPart], stored: Iterable[PromptPart]) -> dict[str, Any]:
    return {"spans": to_spans(spans), "store": [store_param(part.entry.name, part.start, part.stop) for part in stored]}


def _target(request: Request) -> str:
    """Return path and query as the client wrote them.

    A path that is an address would replace that of the server.
    """
    path, query = request.scope["raw_path"].partition(b"?")[0], request.scope["query_string"]
    check_path(path)
    if not path.startswith(b"/"):
        raise ApiError(400, "The path is an address: send a path that begins with /.", code="invalid_value")
    return quote(path + (b"?" + query if query else b""), safe=string.punctuation)


def _headers(request: Request) -> Headers:
    return [(name, value) for name, value in request.headers.raw if name not in HOP_HEADERS]


def _read_options(value: Any, headers: Mapping[str, str]) -> ProxyOptions:
    """Read the field `choreography`; the headers `x-choreography-...` give what it leaves out."""
    texts = {name: headers.get(f"x-choreography-{name}") for name in ProxyOptions.model_fields}
    options: dict[str, Any] = {name: text for name, text in texts.items() if text}
    if "labels" in options:
        options["labels"] = list(filter(None, map(str.strip, options["labels"].split(","))))
    try:
        return ProxyOptions.model_validate(options | value if isinstance(value, dict) else value or options)
    except ValidationError as exc:
        first = exc.errors()[0]
        name = ".".join(map(str, ("choreography", *first["loc"])))
        reason = "the proxy does not know it: leave it out" if first["type"] == "extra_forbidden" else first["msg"]
        raise ApiError(400, f"{name}: {reason}", param=name, code="invalid_value") from None


def check_upstream(config: ProxyConfig) -> bool:
    """Check that a server runs the connector.

    Returns:
        whether it computes tokens between two spans in one request.

    Raises:
        ConfigError: if it does not.
    """
    where, path = f"upstream {config.upstream}", "/v1/models"
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    try:
        with httpx.Client(base_url=config.upstream, headers=headers, timeout=60) as client:
            model = client.get(path).raise_for_status().json()["data"][0]["id"]
            path = "/tokenize"
            tokens = client.post(path, json={"model": model, "prompt": "a"}).raise_for_status().json()["tokens"]
            path = "/v1/completions"
            query = transfer_params({"mode": "spans", "query": ["probe"]})
            body = {"model": model, "prompt": tokens[-1:], "max_tokens": 1, **query}
            state = report_of(client.post(path, json=body).raise_for_status().json()) or {}
    except httpx.HTTPStatusError as exc:
        status = exc.response.status_code
        fix = "give --api-key" if status in (401, 403) else "give the address of a vLLM server"
        raise ConfigError(f"{where}: {path} is answered with status {status}: {fix}") from None
    except httpx.HTTPError as exc:
        raise ConfigError(f"{where}: does not answer ({exc or type(exc).__name__}): start it first") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"{where}: {path} is not answered as vLLM does: give the address of a vLLM server") from None
    if state.get("version") != VERSION:
        reason = f"its connector has protocol {state['version']}" if "version" in state else "runs no connector"
        raise ConfigError(f"{where}: {reason}, not protocol {VERSION}: start vLLM with {CONNECTOR_OPTION}")
    return bool(state.get("holes"))


def create_proxy_app(config: ProxyConfig, *, has_holes: bool) -> FastAPI:
    """Create the application of a proxy; `check_upstream` returns `has_holes`."""
    proxy = UpstreamProxy(config, has_holes=has_holes)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with proxy.client:
            yield

    async def handle(request: Request, exc: Exception) -> Response:
        error = exc if isinstance(exc, ApiError) else ApiError(500, "internal error", type="server_error")
        return error.response()

    app = FastAPI(title="Choreograph proxy", lifespan=lifespan, openapi_url=None)
    app.state.proxy = proxy
    for kind in (ApiError, Exception):
        app.add_exception_handler(kind, handle)
    for path in ("/v1/chat/completions", "/v1/completions"):
        app.add_route(path, proxy.complete, methods=["POST"])
    app.add_route("/{path:path}", proxy.forward, methods=METHODS)
    return app
