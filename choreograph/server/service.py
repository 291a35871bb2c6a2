"""Inference service: from a validated request to updates of its answers."""

import asyncio
import hashlib
import hmac
import logging
import random
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

from fastapi import Request

from ..api.engine import Engine
from ..api.validation import check_tokens
from ..errors import ConfigError, InvalidRequestError
from ..namespace import Client
from ..outputs import BASE_MODEL, EngineStats
from ..utils import call_all
from .api_errors import ApiError, context_exceeded
from .dashboard.request_log import RequestLog
from .engine_thread import EngineThread
from .openai.chat_prompt import ChatPrompt, ChatRenderer
from .openai.protocol import ChoreographyOptions
from .openai.token_text import TokenBytes
from .prometheus import ServerMetrics
from .reuse.message_store import MessageStore, WorkflowKey
from .reuse.reuse_planner import ReusePlanner
from .reuse.schema_store import SchemaStore
from .running_request import GenerationSpec, RunningRequest
from .server_config import ReuseMode, ServerConfig
from .structured.constraints import GrammarCompiler
from .structured.output_parser import CALL_START, THINK_START
from .tracing import Tracing, otlp_provider
from .work_pool import WorkPool

T = TypeVar("T")

_log = logging.getLogger("choreograph")

ANONYMOUS = "anonymous"  # tenant of a server without keys

DEFAULT_WORKFLOW = "default"

# headers in which agents name their session, the most specific first
SESSION_HEADERS = (
    "x-choreography-workflow",
    "x-claude-code-session-id",
    "thread-id",
    "x-session-id",
    "x-dynamo-session-id",
)


def drop_word_cache(tokenizer: Any) -> None:
    """Turn off the tokenizer's cache of words, which takes about a tenth longer.

    The words of byte-pair and unigram models are cached for the whole process: the time to tokenize a text would tell a
    tenant whether another one has sent its words.
    """
    model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if hasattr(model, "_resize_cache"):
        model._clear_cache()
        model._resize_cache(0)
    elif type(model).__name__ in ("BPE", "Unigram"):  # other models have no cache
        _log.warning(
            "the time to tokenize a text tells a tenant whether another one has sent its words: this version of "
            "tokenizers has no switch for its cache of words, use one that has BPE._resize_cache"
        )


class InferenceService:
    """Engine, tenants and limits of one server."""

    def __init__(self, engine: Engine, config: ServerConfig, tracer_provider: Any = None) -> None:
        if engine.chat is None:
            raise ConfigError(f"{engine.model_info.name} has no tokenizer: a server needs one")
        if len(config.api_keys) > 1:
            drop_word_cache(engine.tokenizer)
            engine.chat.caches_texts = False
        self.engine, self.config = engine, config
        self.thread = EngineThread(engine, config.max_prefill_tokens)
        self.pool = WorkPool()
        share = self.share = config.tenant_share
        store = MessageStore(engine, share.max_workflow_tokens, config.shadow_calls, share.max_workflows)
        self.planner = ReusePlanner(engine, store)
        self.schemas = SchemaStore(engine, share.max_schemas)
        self.renderer = ChatRenderer(engine.chat)
        self.model_name = config.served_model_name or engine.model_info.name
        self.metrics = ServerMetrics(self.model_name)
        self.log = RequestLog() if config.dashboard else None
        self.is_draining = False
        self.on_stop: list[Callable[[], object]] = []  # called after the last step
        self._page_size = engine.core.config.cache.page_size
        self._capacity = engine.stats().num_pages * self._page_size  # tokens
        self.max_model_len = min(engine.model_info.max_positions, self._capacity)
        self._tenants = {hashlib.sha256(key.encode()).digest(): f"tenant-{i}" for i, key in enumerate(config.api_keys)}
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()
        if tracer_provider is None and config.otlp_traces_endpoint is not None:
            tracer_provider = otlp_provider(config.otlp_traces_endpoint)
            self.on_stop.append(tracer_provider.shutdown)  # exports what it holds
        self._tracing = None if tracer_provider is None else Tracing(tracer_provider)
        template = self.renderer.template_text
        self.thinks = THINK_START in template if config.thinks is None else config.thinks
        is_llama = CALL_START not in template and ("python_tag" in template or '"parameters"' in template)
        self.tool_form = config.tool_parser
        if config.tool_parser == "auto":
            self.tool_form = "llama3_json" if is_llama and self.renderer.knows_tools else "hermes"

    # -- life cycle -----------------------------------------------------------------------------------------

    def start(self) -> None:
        self.thread.start(asyncio.get_running_loop())

    async def stop(self) -> None:
        """End running requests and the engine's thread."""
        self.is_draining = True
        await self.thread.stop()
        self.planner.store.clear()
        self.schemas.clear()
        self.pool.close()
        for exc in call_all(self.on_stop):
            _log.warning("the server stops: %s: %s", type(exc).__name__, exc)
        if self._compiler is not None:
            self._compiler.close()

    def check_ready(self) -> None:
        """Raise an error unless new requests are accepted."""
        if self.is_draining or not self.thread.is_running:
            raise ApiError(
                503, "the server is shutting down: send the request to another one", type="service_unavailable"
            )

    async def stats(self) -> EngineStats:
        """Return the engine's state; waits for no step."""
        return self.engine.stats()

    async def work(self, tenant: str, request: Request, function: Callable[[], T]) -> T:
        """Run what prepares a request in a worker thread."""
        return await self.pool.run(tenant, len(await request.body()), function)

    # -- who asks for what ----------------------------------------------------------------------------------

    def authenticate(self, request: Request) -> str:
        """Return the tenant of a request.

        Raises:
            ApiError: of status 401, without a valid key.
        """
        return self.tenant(request.headers.get("authorization"))

    def tenant(self, authorization: str | None) -> str:
        """Return the tenant of an Authorization header.

        All keys are compared, each in constant time.
        """
        if not self._tenants:
            return ANONYMOUS
        scheme, _, key = (authorization or "").partition(" ")
        digest, tenant = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest(), None
        for known, name in self._tenants.items():
            if hmac.compare_digest(known, digest):
                tenant = name
        if tenant is None or scheme.lower() != "bearer":
            raise ApiError(
                401,
                "Incorrect API key provided: send a valid one as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return tenant

    @property
    def model_names(self) -> list[str]:
        """Names that requests may use: the base model's, adapters and siblings."""
        return [self.model_name, *(name for name in self.engine.models if name != BASE_MODEL)]

    def resolve_model(self, name: str) -> str:
        """Return the engine's name of a model.

        Raises:
            ApiError: if no model has this name.
        """
        if name not in self.model_names:
            raise ApiError(
                404,
                f"The model '{name}' does not exist: use one of {self.model_names}.",
                param="model",
                code="model_not_found",
            )
        return BASE_MODEL if name == self.model_name else name

    def workflow_key(
        self, request: Request, tenant: str, body: Any, options: ChoreographyOptions | None
    ) -> tuple[WorkflowKey, ReuseMode, str | None]:
        """Return workflow, reuse mode and agent, from body or headers."""
        options, headers = options or ChoreographyOptions(), request.headers
        sessions = (headers.get(name) for name in SESSION_HEADERS)
        workflow = options.workflow or next(filter(None, sessions), None) or body.session_id or DEFAULT_WORKFLOW
        header_options = {"reuse": headers.get("x-choreography-reuse"), "agent": headers.get("x-choreography-agent")}
        if header_options["reuse"] not in (None, "exact", "messages", "auto"):
            raise InvalidRequestError(
                f"x-choreography-reuse: {header_options['reuse']!r}: use 'exact', 'messages' or 'auto'"
            )
        reuse: Any = options.reuse or header_options["reuse"] or self.config.reuse
        self.planner.check(reuse)
        labels = {*options.labels, *filter(None, map(str.strip, headers.get("x-choreography-labels", "").split(",")))}
        agent = options.agent or header_options["agent"]
        if agent is not None:
            labels |= self.planner.store.agent_labels.get((tenant, workflow), {}).get(agent, frozenset())
        clearance = None if options.clearance is None else frozenset(options.clearance)
        if clearance is None and options.on_leak is not None:
            raise InvalidRequestError(
                f"on_leak={options.on_leak!r}: needs a clearance: give the labels that may be read"
            )
        model, on_leak = self.resolve_model(body.model), options.on_leak or "reencode"
        key = WorkflowKey(Client(tenant, body.salt), workflow, model, frozenset(labels), clearance, on_leak)
        if options.offsets is not None and (reuse != "messages" or not hasattr(body, "messages")):
            raise InvalidRequestError(
                "offsets: positions of messages need a chat with reuse='messages'; leave them out"
            )
        return key, reuse, agent

    # -- what the engine gets -------------------------------------------------------------------------------

    def max_tokens(self, requested: int | None, prompts: Sequence[ChatPrompt], param: str) -> int | None:
        """Return the length limit of answers, or None for none.

        Args:
            param: field of the prompts, for errors.

        Raises:
            ApiError: if a prompt leaves less than that of the context.
            InvalidTokensError: if the model has no such tokens.
        """
        for prompt in prompts:
            check_tokens(prompt.tokens, param, self.engine.model_info.vocab_size)
        length = max(len(prompt.tokens) + len(prompt.footer) for prompt in prompts)
        available = self.max_model_len - length
        if available < (requested or 1):
            raise self.too_long(length, requested, param)
        if requested is not None or self.config.max_tokens is None:
            return requested
        # every part of a context ends in a page of its own
        num_parts = max(len(prompt.segments) for prompt in prompts) + 3
        available = max(1, min(available, self._capacity - length - num_parts * self._page_size))
        return min(self.config.max_tokens, available)

    def too_long(self, num_prompt: int, requested: int | None, param: str) -> ApiError:
        """Return the error of a prompt without room for its answer."""
        total, output = num_prompt + (requested or 1), requested or 1
        parts = f"requested {total} tokens ({num_prompt} in the prompt, {output} in the completion)"
        return context_exceeded(self.max_model_len, param, parts)

    def fit_pages(self, prompt: ChatPrompt, num_generated: int) -> ChatPrompt:
        """Return a chat whose messages fit into the cache's pages.

        Args:
            num_generated: tokens of the answer.
        """
        own = len(prompt.header) + len(prompt.footer) + num_generated
        num_pages = self._capacity // self._page_size - -(-own // self._page_size)
        return prompt.fit_pages(max(1, num_pages), self._page_size)

    def compiler(self) -> GrammarCompiler:
        """Return the compiler of grammars, created on first use."""
        with self._compiler_lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self.engine.tokenizer, self.engine.model_info.vocab_size)
            return self._compiler

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Bytes of single tokens."""
        assert self.engine.chat is not None
        return TokenBytes(self.engine.chat)

    def start_span(self, request: Request, operation: str, body: Any) -> None:
        """Start the span of a request, if spans are exported."""
        if self._tracing is not None:
            request.state.span = self._tracing.start(request.headers, operation, body)

    def random_seed(self) -> int:
        return random.getrandbits(62)

    def submit(self, request: Request, spec: GenerationSpec) -> RunningRequest:
        """Start a request.

        Raises:
            InvalidRequestError: if it asks for too many answers, or its options contradict each other.
        """
        self.check_limits(spec)
        return RunningRequest(self, request, spec)

    def max_kl_of(self, spec: GenerationSpec) -> float | None:
        """Return the divergence that a request has to stay within."""
        return self.config.max_kl if spec.max_kl is None else spec.max_kl

    def check_limits(self, spec: GenerationSpec) -> None:
        """Raise an error for a request that cannot be started."""
        num_choices = spec.num_answers * len(spec.prompts)
        if num_choices > self.config.max_choices:
            raise InvalidRequestError(f"n: {num_choices} answers in one request: use at most {self.config.max_choices}")
        if spec.constraint is not None and (length := spec.sampling.min_tokens):
            raise InvalidRequestError(f"min_tokens={length}: a grammar decides where an answer ends; leave it out")
