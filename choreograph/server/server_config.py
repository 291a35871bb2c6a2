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

# Idle connections stay open for so long: longer than clients keep them, which use them again until then.
KEEP_ALIVE_SECONDS = 75
ReuseMode = Literal["exact", "messages", "auto"]
ToolParser = Literal["auto", "hermes", "llama3_json"]

NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Seconds = Annotated[float, Field(gt=0)]


# limits of all tenants together
SHARED_LIMITS = (
    "max_requests", "max_sessions", "max_schemas", "max_workflows", "max_workflow_tokens", "max_stored_responses",
    "max_stored_bytes",
)  # fmt: skip


@validated()
class ServerConfig:
    """Limits, keys and defaults of one server."""

    api_keys: tuple[str, ...] = ()
    """A key that clients may use; each is a tenant with a cache of its own. Without keys, all may."""
    served_model_name: str | None = None
    """Name of the base model in requests; by default its own."""
    reuse: ReuseMode = "exact"
    """Reuse of requests that choose none."""
    max_kl: NonNegativeFloat | None = None
    """Divergence of requests that give none, in nats a token; by default unlimited."""
    shadow_calls: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of calls with such a limit to measure; 0 learns nothing."""
    max_tokens: PositiveInt | None = None
    """Length of answers whose request gives none; by default what the context leaves."""
    # The following limits are divided by the number of keys: each tenant has an equal share.
    max_requests: PositiveInt = 256
    """Requests at once; more are answered with 429."""
    max_sessions: PositiveInt = 256
    """Open sessions of choreograph.connect."""
    max_schemas: PositiveInt = 256
    """Prompt Cache schemas to keep."""
    max_workflows: PositiveInt = 1024
    """Workflows with declared step graphs to keep."""
    max_workflow_tokens: NonNegativeInt = 1 << 20
    """Tokens of messages kept for later requests, of all workflows."""
    max_stored_responses: NonNegativeInt = 1024
    """Responses of /v1/responses to keep; the oldest are forgotten."""
    max_stored_bytes: NonNegativeInt = 256 << 20
    """Bytes of these responses."""
    # Limits of one request.
    max_choices: PositiveInt = 128  # most answers of one request (`n` times prompts)
    max_body_bytes: PositiveInt = 16 << 20
    """Largest body of a request; others are answered with 413."""
    max_prefill_tokens: PositiveInt | None = None
    """Tokens of prompts in a step that also decodes; by default 192 on a CPU, else no limit."""
    request_timeout: Seconds = 600.0
    """Seconds until a request is cancelled."""
    replica_timeout: Seconds = 30.0
    """Seconds without an answer of any replica until requests get 503."""
    drain_timeout: PositiveInt = 60
    """Seconds for running requests after SIGTERM."""
    cors_origins: tuple[str, ...] = ()
    """An origin that browsers may call from; * is all."""
    otlp_traces_endpoint: str | None = None
    """Export OpenTelemetry spans there, as http://localhost:4318/v1/traces (extra `otel`)."""
    tool_parser: ToolParser = "auto"
    """Form of tool calls; auto is what the chat template writes."""
    thinks: StrictBool | None = None
    """The model reasons in <think> tags; by default as its chat template says."""
    dashboard: StrictBool = False
    """Serve a page of the server's state at /dashboard (extra `dashboard`)."""

    def __post_init__(self) -> None:
        if any(len(key) < 8 for key in self.api_keys):
            raise ConfigError("api_keys: a key has fewer than 8 characters: use a longer one")

    @property
    def tenant_share(self) -> "ServerConfig":
        """Limits of one tenant: an equal share for each key."""
        limits = {name: getattr(self, name) for name in SHARED_LIMITS}
        count = max(1, len(self.api_keys))
        return dataclasses.replace(self, **{name: limit and max(1, limit // count) for name, limit in limits.items()})


@validated()
class ProxyConfig:
    """Options of the proxy of a vLLM server."""

    upstream: str
    """Address of a vLLM server that runs the connector, as http://127.0.0.1:8000."""
    api_key: str | None = None
    """A key of the vLLM server, for the check at start; clients send their own."""
    repair: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of reused tokens to compute again, of requests without one."""
    max_stored_tokens: NonNegativeInt = 1 << 20
    """Tokens of entries to remember, of all tenants; the server should hold as many."""
    max_body_bytes: PositiveInt = 64 << 20
    """Largest body of a request; others are answered with 413."""

    def __post_init__(self) -> None:
        if not self.upstream.startswith(("http://", "https://")):
            raise ConfigError(f"upstream={self.upstream!r}: use an address like http://127.0.0.1:8000")
        object.__setattr__(self, "upstream", self.upstream.rstrip("/").removesuffix("/v1"))


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Read API keys, one a line, without comments (#)."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read ({exc.strerror}): check the path") from None
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: is not UTF-8 ({exc.reason}): write one key a line") from None
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
