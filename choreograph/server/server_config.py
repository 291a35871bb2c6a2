"""Options of the server and its engine."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StrictBool

from ..config import CacheConfig, EngineConfig, NonNegativeInt, PositiveInt, SchedulerConfig, validated
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..api.engine import Engine

ReuseMode = Literal["exact", "messages", "auto"]
ToolParser = Literal["auto", "hermes", "llama3_json"]

NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Seconds = Annotated[float, Field(gt=0)]


@validated()
class ServerConfig:
    """Limits, keys and defaults of one server."""

    # each is a tenant with its own cache; empty: no authentication
    api_keys: Annotated[tuple[str, ...], Field(description="A key that clients may use; each is a tenant.")] = ()
    # of the base model; None: its own name
    served_model_name: Annotated[str | None, Field(description="Name of the model in requests.")] = None
    reuse: Annotated[ReuseMode, Field(description="Reuse of requests that choose none.")] = "exact"
    # None: unlimited
    max_kl: Annotated[
        NonNegativeFloat | None, Field(description="Divergence of requests that give none, in nats a token.")
    ] = None
    # 0 learns nothing
    shadow_calls: Annotated[float, Field(ge=0, le=1, description="Share of calls with such a limit to measure.")] = 0.0
    # None: what the context leaves
    max_tokens: Annotated[PositiveInt | None, Field(description="Length of answers whose request gives none.")] = None
    # The following limits are divided by the number of keys: each tenant has an equal share.
    max_requests: Annotated[PositiveInt, Field(description="Requests at once; more are answered with 429.")] = 256
    max_sessions: Annotated[PositiveInt, Field(description="Open sessions of choreograph.connect.")] = 256
    max_schemas: Annotated[PositiveInt, Field(description="Prompt Cache schemas to keep.")] = 256
    max_workflows: Annotated[PositiveInt, Field(description="Workflows with declared step graphs to keep.")] = 1024
    max_workflow_tokens: Annotated[
        NonNegativeInt, Field(description="Tokens of messages kept for later requests, of all workflows.")
    ] = 1 << 20
    max_stored_responses: Annotated[
        NonNegativeInt, Field(description="Responses of /v1/responses to keep; the oldest are forgotten.")
    ] = 1024
    max_stored_bytes: Annotated[NonNegativeInt, Field(description="Bytes of these responses.")] = 256 << 20
    # Limits of one request.
    max_choices: PositiveInt = 128  # most answers of one request (`n` times prompts)
    max_body_bytes: Annotated[
        PositiveInt, Field(description="Largest body of a request; others are answered with 413.")
    ] = 16 << 20
    # so that streams go on
    max_prefill_tokens: Annotated[
        PositiveInt | None,
        Field(description="Tokens of prompts in a step that also decodes; by default 192 on a CPU, else no limit."),
    ] = None
    request_timeout: Annotated[Seconds, Field(description="Seconds until a request is cancelled.")] = 600.0
    replica_timeout: Annotated[
        Seconds, Field(description="Seconds without an answer of any replica until requests get 503.")
    ] = 30.0
    drain_timeout: Annotated[PositiveInt, Field(description="Seconds for running requests after SIGTERM.")] = 60
    cors_origins: Annotated[tuple[str, ...], Field(description="An origin that browsers may call from; * is all.")] = ()
    otlp_traces_endpoint: Annotated[
        str | None,
        Field(description="Export OpenTelemetry spans there, as http://localhost:4318/v1/traces (extra `otel`)."),
    ] = None
    # "auto": what the chat template writes
    tool_parser: Annotated[ToolParser, Field(description="Form of tool calls.")] = "auto"
    # None: as its chat template says
    thinks: Annotated[StrictBool | None, Field(description="The model reasons in <think> tags.")] = None
    dashboard: Annotated[
        StrictBool, Field(description="Serve a page of the server's state at /dashboard (extra `dashboard`).")
    ] = False

    def __post_init__(self) -> None:
        if any(len(key) < 8 for key in self.api_keys):
            raise ConfigError("api_keys: a key has fewer than 8 characters: use a longer one")


@validated()
class ProxyConfig:
    """Options of the proxy of a vLLM server."""

    upstream: str  # address of the server, as http://127.0.0.1:8000
    api_key: str | None = None  # that the check at start sends; clients send their own
    repair: Annotated[float, Field(ge=0, le=1)] = (
        0.0  # share of reused tokens to compute again, of requests without one
    )
    max_stored_tokens: NonNegativeInt = 1 << 20  # tokens of entries that are remembered, of all tenants
    max_body_bytes: PositiveInt = 64 << 20  # of a request; larger ones are answered with 413

    def __post_init__(self) -> None:
        if not self.upstream.startswith(("http://", "https://")):
            raise ConfigError(f"upstream={self.upstream!r}: use an address like http://127.0.0.1:8000")
        object.__setattr__(self, "upstream", self.upstream.rstrip("/").removesuffix("/v1"))


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Read API keys, one a line, without comments (#)."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path}: holds no API key: write one a line")
    return keys


def take_options(config_class: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of a config class from options, and return them."""
    names = [field.name for field in dataclasses.fields(config_class)]
    return {name: options.pop(name) for name in names if name in options}


def take_engine(options: dict[str, Any]) -> Callable[[], "Engine"]:
    """Remove an engine's options, and return what loads its models."""
    from ..api.engine import DEFAULT_MODEL, Engine

    cache, scheduler = CacheConfig(**take_options(CacheConfig, options)), take_options(SchedulerConfig, options)
    config = EngineConfig(cache=cache, scheduler=SchedulerConfig(**scheduler), **take_options(EngineConfig, options))
    return partial(
        Engine.from_pretrained,
        options.pop("model", DEFAULT_MODEL),
        dtype=options.pop("dtype", "auto"),
        device=options.pop("device", "cpu"),
        config=config,
        adapters=options.pop("adapter", {}),
        models=options.pop("sibling", {}),
        layer_reuse=options.pop("layer_reuse", {}),
    )
