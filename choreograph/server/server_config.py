"""Options of the server."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StrictBool

from ..config import NonNegativeInt, PositiveInt, validated
from ..errors import ConfigError

ReuseMode = Literal["exact", "messages", "auto"]
ToolParser = Literal["auto", "hermes", "llama3_json"]

NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Seconds = Annotated[float, Field(gt=0)]


@validated()
class ServerConfig:
    """Limits, keys and defaults of one server."""

    api_keys: tuple[str, ...] = ()  # each is a tenant with its own cache; empty: no authentication
    served_model_name: str | None = None  # of the base model; None: its own name
    reuse: ReuseMode = "exact"  # of requests that do not choose
    max_kl: NonNegativeFloat | None = None  # divergence of requests that give none, nats a token; None: unlimited
    shadow_calls: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of calls with a limit to measure; 0 learns nothing
    max_tokens: PositiveInt | None = None  # of requests that give none; None: what the context leaves
    # The following limits are divided by the number of keys: each tenant has an equal share.
    max_requests: PositiveInt = 256  # running and waiting; more are answered with 429
    max_sessions: PositiveInt = 256  # open sessions of `choreograph.connect`
    max_schemas: PositiveInt = 256  # of Prompt Cache
    max_workflows: PositiveInt = 1024  # with declared step graphs
    max_workflow_tokens: NonNegativeInt = 1 << 20  # tokens of messages kept for later requests, of all workflows
    max_stored_responses: NonNegativeInt = 1024  # of /v1/responses with `store`; the oldest are forgotten
    max_stored_bytes: NonNegativeInt = 256 << 20  # of these responses
    # Limits of one request.
    max_choices: PositiveInt = 128  # most answers of one request (`n` times prompts)
    max_body_bytes: PositiveInt = 16 << 20  # of a request; larger ones are answered with 413
    # tokens of prompts in a step that also decodes, so that streams go on; None: 192 on a CPU, else no other limit
    max_prefill_tokens: PositiveInt | None = None
    request_timeout: Seconds = 600.0  # seconds until a request is cancelled
    replica_timeout: Seconds = 30.0  # seconds without an answer of any replica after which requests get 503
    drain_timeout: PositiveInt = 60  # seconds for running requests after SIGTERM
    cors_origins: tuple[str, ...] = ()  # that browsers may call from; ("*",): all
    otlp_traces_endpoint: str | None = None  # that takes OpenTelemetry spans over HTTP (extra `otel`); None: no spans
    tool_parser: ToolParser = "auto"  # form of tool calls; "auto": what the chat template writes
    thinks: StrictBool | None = None  # the model writes its reasoning in <think> tags; None: as its template says
    dashboard: StrictBool = False  # serve a page of the server's state at /dashboard (extra `dashboard`)

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
