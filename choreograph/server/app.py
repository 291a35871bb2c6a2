"""FastAPI application: routes, authentication, limits and errors."""

import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, JsonValue
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.engine import Engine
from ..api.validation import check_tokens
from ..errors import ChoreographError
from ..version import __version__
from .api_errors import CLIENT_CLOSED_REQUEST, ApiError, overloaded, to_api_error
from .dashboard.dashboard_page import TabFactory, add_dashboard
from .openai import chat_completions as chats
from .openai import text_completions
from .openai.answer_loop import AnswerEncoder, AnswerLoop, AnswerOptions
from .openai.chat_messages import as_turn
from .openai.event_stream import stream_events
from .openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    SchemaRequest,
    TokenizeRequest,
    continues_last,
    tool_dicts,
)
from .openai.responses_api import ResponseEncoder, ResponseStore, to_chat
from .request_body import MAX_NAME_CHARS, check_path, checked_route
from .reuse.agent_tracking import read_declaration
from .reuse.remote_sessions import add_remote_routes
from .running_request import GenerationSpec
from .server_config import ServerConfig
from .service import InferenceService

MAX_REQUEST_ID_CHARS = 128

CHECKED_PATHS = ("/v1/", "/tokenize", "/detokenize")  # the dashboard has its own

SESSION_PATHS = "/v1/choreograph/sessions/"

GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


WorkflowName = Annotated[str, Path(max_length=MAX_NAME_CHARS)]


class ErrorDetail(BaseModel):
    """What was wrong with a request."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """Body of every answer that is not a success."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "Invalid, unauthorized, unknown, too large or too many"},
    "5XX": {"model": ErrorResponse, "description": "Failed, or shutting down"},
}


class AsciiJSONResponse(JSONResponse):
    """JSON that any text can be written to, unpaired surrogates included."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


class RequestSlots:
    """Requests of each tenant that are being answered.

    Used in the event loop.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit  # of one tenant
        self._used: Counter[object] = Counter()

    @contextmanager
    def hold(self, key: object) -> Iterator[None]:
        """Hold a slot of a tenant inside the block.

        Raises:
            ApiError: of status 429, if the tenant holds as many as it may.
        """
        if self._used[key] >= self._limit:
            raise overloaded(self._limit)
        self._used[key] += 1
        try:
            yield
        finally:
            self._used[key] -= 1
            if not self._used[key]:
                del self._used[key]


class RequestGuard:
    """ASGI middleware: request ids, valid paths, and limits.

    Bodies are limited in size, and requests of a tenant in number.
    """

    def __init__(self, app: ASGIApp, service: InferenceService) -> None:
        self._app, self._service = app, service
        self._max_body_bytes = service.config.max_body_bytes
        self._slots = RequestSlots(service.share.max_requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")[:MAX_REQUEST_ID_CHARS] or uuid.uuid4().hex.encode()
        num_bytes = 0

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, self._too_large())
            return message

        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            response = ApiError(413, self._too_large(), code="request_too_large").response()
            await response(scope, receive, send_with_id)
            return
        try:
            check_path(scope.get("raw_path") or b"")
            with self._slot(scope, headers):
                await self._app(scope, receive_limited, send_with_id)
        except ApiError as exc:  # the routes' own errors never come here
            self._service.metrics.observe_error(exc.status)
            await exc.response()(scope, receive, send_with_id)

    def _slot(self, scope: Scope, headers: Mapping[bytes, bytes]) -> AbstractContextManager[None]:
        """Return the slot that a request holds until it is answered.

        Generations have slots of their own: other requests are answered while they run.
        """
        has_body = scope["method"] in ("POST", "PUT") and scope["path"].startswith(CHECKED_PATHS)
        if not has_body and not scope["path"].startswith(SESSION_PATHS):  # whose GETs wait for messages
            return nullcontext()
        tenant = self._service.tenant(headers.get(b"authorization", b"").decode("latin-1"))
        return self._slots.hold((tenant, has_body, scope["path"] in GENERATION_PATHS))

    def _too_large(self) -> str:
        return f"the body has more than {self._max_body_bytes} bytes: send a shorter one"


def create_app(
    engine: Engine,
    config: ServerConfig | None = None,
    *,
    tracer_provider: Any = None,
    dashboard_tabs: Mapping[str, TabFactory] | None = None,
) -> FastAPI:
    """Create the application that serves an engine.

    Args:
        tracer_provider: OpenTelemetry's; None: by `ServerConfig.otlp_traces_endpoint`.
        dashboard_tabs: further tabs of the dashboard by title.
    """
    return create_service_app(InferenceService(engine, config or ServerConfig(), tracer_provider), dashboard_tabs)


def create_service_app(service: InferenceService, dashboard_tabs: Mapping[str, TabFactory] | None = None) -> FastAPI:
    """Create the application of a service."""
    config = service.config

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with nullcontext() if dashboard is None else dashboard.running():
            service.start()
            yield
            await service.stop()

    app = FastAPI(
        title="Choreograph",
        version=__version__,
        description="OpenAI-compatible inference with reuse of messages.",
        lifespan=lifespan,
        default_response_class=AsciiJSONResponse,
        docs_url=None,  # the pages load scripts from another server
        redoc_url=None,
    )
    app.state.service = service
    app.router.route_class = checked_route(service.authenticate, service.pool.run, service.max_model_len)
    app.add_middleware(RequestGuard, service=service)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    _add_error_handlers(app, service)
    _add_status_routes(app, service)
    _add_inference_routes(app, service)
    dashboard = None
    if config.dashboard:
        dashboard = add_dashboard(app, service, dashboard_tabs or {})
    return app


def _add_error_handlers(app: FastAPI, service: InferenceService) -> None:
    async def handle(request: Request, exc: Exception) -> Response:
        error = to_api_error(exc)
        if isinstance(exc, HTTPException):
            error = ApiError(exc.status_code, str(exc.detail), headers=exc.headers)
        if (span := getattr(request.state, "span", None)) is not None:
            span.end(exc)
        if error.status != CLIENT_CLOSED_REQUEST:  # counted as aborted
            service.metrics.observe_error(error.status)
        return AsciiJSONResponse(error.body, error.status, error.headers)

    for kind in (ApiError, ChoreographError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)


def _add_status_routes(app: FastAPI, service: InferenceService) -> None:
    @app.get("/health", responses=ERRORS)
    async def health() -> dict[str, str]:
        """Say whether the engine's thread runs."""
        if not service.thread.is_running:
            raise ApiError(503, "the engine has stopped: start the server again", type="service_unavailable")
        return {"status": "ok"}

    @app.get("/ready", responses=ERRORS)
    async def ready() -> dict[str, str]:
        """Say whether new requests are accepted."""
        service.check_ready()
        return {"status": "ready"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of the package."""
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        stats = await service.stats() if service.thread.is_running else None
        store = service.planner.store
        service.metrics.num_workflows, service.metrics.num_stored_tokens = store.num_workflows, store.num_tokens
        return Response(service.metrics.render(stats), media_type="text/plain; version=0.0.4; charset=utf-8")

    for endpoint in (health, ready, version, metrics):  # load balancers ask by HEAD
        app.add_api_route(f"/{endpoint.__name__}", endpoint, methods=["HEAD"], include_in_schema=False)


def _add_inference_routes(app: FastAPI, service: InferenceService) -> None:
    bearer = HTTPBearer(auto_error=False)

    async def authenticate(
        request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)] = None
    ) -> str:
        return service.authenticate(request)

    tenant_of = Depends(authenticate)
    store = ResponseStore(service.share.max_stored_responses, service.share.max_stored_bytes)
    models = {"object": "list", "data": [_model_entry(service, name) for name in service.model_names]}

    @app.get("/v1/models", responses=ERRORS)
    async def list_models(tenant: str = tenant_of) -> dict[str, Any]:
        """List the models: the base model, adapters and siblings."""
        return models

    @app.get("/v1/models/{model:path}", responses=ERRORS)  # names of the Hub have a slash
    async def get_model(model: str, tenant: str = tenant_of) -> dict[str, Any]:
        """Describe one model."""
        service.resolve_model(model)
        return _model_entry(service, model)

    async def answer(
        request: Request,
        body: ChatCompletionRequest | CompletionRequest | ResponsesRequest,
        spec: GenerationSpec,
        options: AnswerOptions,
        create_encoder: Callable[[AnswerLoop], AnswerEncoder],
    ) -> Response:
        loop = AnswerLoop(service, service.submit(request, spec), options)
        encoder = create_encoder(loop)
        loop.running.name_response(encoder.id, body.model)
        if body.stream:
            return await stream_events(loop.events(encoder))
        return AsciiJSONResponse(await loop.whole(encoder))

    @app.post("/v1/chat/completions", responses=ERRORS)
    async def chat_completions(body: ChatCompletionRequest, request: Request, tenant: str = tenant_of) -> Response:
        """Answer a chat."""
        service.start_span(request, "chat", body)
        prepare = partial(chats.prepare, service, body, request, tenant)
        spec, options = await service.work(tenant, request, prepare)
        return await answer(request, body, spec, options, lambda loop: chats.ChatEncoder(loop, body))

    @app.post("/v1/completions", responses=ERRORS)
    async def completions(body: CompletionRequest, request: Request, tenant: str = tenant_of) -> Response:
        """Continue prompts."""
        service.start_span(request, "text_completion", body)
        prepare = partial(text_completions.prepare, service, body, request, tenant)
        spec, options = await service.work(tenant, request, prepare)
        return await answer(request, body, spec, options, lambda loop: text_completions.CompletionEncoder(loop, body))

    @app.post("/v1/responses", responses=ERRORS)
    async def responses(body: ResponsesRequest, request: Request, tenant: str = tenant_of) -> Response:
        """Answer items, optionally after an earlier response."""
        service.start_span(request, "chat", body)
        previous = None
        if body.previous_response_id is not None:
            previous = store.get(tenant, body.previous_response_id, "previous_response_id")

        def prepare() -> tuple[GenerationSpec, AnswerOptions, list[dict[str, Any]]]:
            chat, messages = to_chat(body, previous)
            return *chats.prepare(service, chat, request, tenant, param="input"), messages

        spec, options, messages = await service.work(tenant, request, prepare)
        keep = None if body.store is False else partial(store.add, tenant)
        num_bytes = len(await request.body())

        def create_encoder(loop: AnswerLoop) -> AnswerEncoder:
            return ResponseEncoder(loop, body, messages, keep, num_bytes)

        return await answer(request, body, spec, options, create_encoder)

    @app.get("/v1/responses/{response_id}", responses=ERRORS)
    async def get_response(response_id: str, tenant: str = tenant_of) -> dict[str, Any]:
        """Return a stored response."""
        return store.get(tenant, response_id).response

    @app.delete("/v1/responses/{response_id}", responses=ERRORS)
    async def delete_response(response_id: str, tenant: str = tenant_of) -> dict[str, Any]:
        """Forget a stored response."""
        store.remove(tenant, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    add_remote_routes(app, service, authenticate, ERRORS)

    @app.put("/v1/workflows/{workflow}", responses=ERRORS)
    async def put_workflow(
        workflow: WorkflowName, body: dict[str, JsonValue], request: Request, tenant: str = tenant_of
    ) -> dict[str, Any]:
        """Declare the step graph and labels of a workflow's agents."""
        graph, labels = await service.work(tenant, request, partial(read_declaration, body))
        await service.thread.call(lambda: service.planner.store.declare(tenant, workflow, graph, labels))
        return {"id": workflow, "agents": list(graph.agents)}

    @app.delete("/v1/workflows/{workflow}", responses=ERRORS)
    async def delete_workflow(workflow: WorkflowName, tenant: str = tenant_of) -> dict[str, Any]:
        """Forget the step graph of a workflow, to learn it again."""
        await service.thread.call(lambda: service.planner.store.set_graph(tenant, workflow, None))
        return {"id": workflow, "deleted": True}

    @app.put("/v1/schemas/{name}", responses=ERRORS)
    async def put_schema(name: str, body: SchemaRequest, request: Request, tenant: str = tenant_of) -> dict[str, Any]:
        """Create or replace a Prompt Cache schema."""
        layout = await service.work(tenant, request, lambda: service.schemas.prepare(name, body.pml))
        cache = await service.thread.call(lambda: service.schemas.put(tenant, name, body.pml, layout))
        return {"id": name, "modules": ["/".join(path) for path in cache.layout.modules]}

    @app.get("/v1/schemas", responses=ERRORS)
    async def list_schemas(tenant: str = tenant_of) -> dict[str, Any]:
        """List the schemas of a tenant."""
        return {"object": "list", "data": [{"id": name} for name in service.schemas.names(tenant)]}

    @app.delete("/v1/schemas/{name}", responses=ERRORS)
    async def delete_schema(name: str, tenant: str = tenant_of) -> dict[str, Any]:
        """Release a schema's modules."""
        service.schemas.get(tenant, name)
        await service.thread.call(lambda: service.schemas.remove(tenant, name))
        return {"id": name, "deleted": True}

    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(body: TokenizeRequest, request: Request, tenant: str = tenant_of) -> dict[str, Any]:
        """Return the token ids of a prompt or a chat."""
        service.resolve_model(body.model or service.model_name)
        return await service.work(tenant, request, partial(_tokenize, service, body))

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeRequest, request: Request, tenant: str = tenant_of) -> dict[str, str]:
        """Return the text of token ids."""
        service.resolve_model(body.model or service.model_name)

        def decode() -> str:
            check_tokens(body.tokens, "tokens", len(service.engine.tokenizer))
            text: str = service.engine.tokenizer.decode(body.tokens)
            return text

        return {"prompt": await service.work(tenant, request, decode)}


def _tokenize(service: InferenceService, body: TokenizeRequest) -> dict[str, Any]:
    if body.messages:
        service.renderer.check_size(body.messages, service.max_model_len, "messages")
        tokens = service.renderer.prompt(
            [as_turn(message) for message in body.messages],
            tool_dicts(body.tools),
            body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=continues_last(body),
            max_tokens=service.max_model_len,
        ).tokens
    else:
        tokens = service.renderer.tokenize(
            body.prompt or "", opening=body.add_special_tokens, max_tokens=service.max_model_len
        )
    result = {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        result["token_strs"] = service.engine.tokenizer.convert_ids_to_tokens(tokens)
    return result


def _model_entry(service: InferenceService, name: str) -> dict[str, Any]:
    is_base = name == service.model_name
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "choreograph",
        "root": service.engine.model_info.name if is_base else name,
        "parent": None if is_base else service.model_name,
        "max_model_len": service.max_model_len,
    }
