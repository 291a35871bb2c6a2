"""`choreograph serve`: the OpenAI-compatible server."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ..utils import importing_torch, require
from . import common

KeyOption = Annotated[list[str] | None, typer.Option("--api-key", help="A key that clients may use; each is a tenant.")]
KeyFileOption = Annotated[Path | None, typer.Option(help="A file of API keys, one a line.")]
ConfigOption = Annotated[Path | None, typer.Option(help="A YAML file of these options; options given here win.")]
ReuseOption = Annotated[str | None, typer.Option(help="Reuse of requests that choose none: exact, messages, auto.")]
AdaptersOption = Annotated[
    list[str] | None, typer.Option("--adapter", help="A LoRA adapter to serve as a model, as name=folder.")
]
SiblingsOption = Annotated[
    list[str] | None, typer.Option("--sibling", help="A model of the same family to serve, as name=folder.")
]
LayerReuseOption = Annotated[
    list[str] | None,
    typer.Option("--layer-reuse", help="Layers that a model computes of the base's messages, as name=head,start,end."),
]

# further tabs of the dashboard by title, see `TabFactory`; `choreograph.__main__` adds the playground
DASHBOARD_TABS: dict[str, Any] = {}

DEFAULTS: dict[str, Any] = {
    "model": common.DEFAULT_MODEL,
    "host": "127.0.0.1",
    "port": 8000,
    "dtype": "auto",
    "device": "cpu",
    "compile": False,
    "draft_tokens": 0,
}

PRIMITIVE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # variables of oneDNN and of PyTorch
PRIMITIVE_CACHE_CAPACITY = 128  # compiled matrix products

CLUSTER_OPTIONS = ("replicas", "max_replicas", "router", "transfer", "ray_address")

ENGINE_OPTIONS = ("capacity", "host_capacity", "disk_capacity", "eviction")  # of CacheConfig


def serve(
    model: Annotated[str | None, typer.Argument(help="A name, a Hub id, a model folder or a .gguf file.")] = None,
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.  [default: 8000]")] = None,
    api_key: KeyOption = None,
    api_key_file: KeyFileOption = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name of the model in requests.")] = None,
    adapter: AdaptersOption = None,
    sibling: SiblingsOption = None,
    layer_reuse: LayerReuseOption = None,
    reuse: ReuseOption = None,
    max_kl: Annotated[
        float | None, typer.Option(min=0, help="Divergence of requests that give none, in nats a token.")
    ] = None,
    shadow_calls: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of calls with such a limit to measure.  [default: 0]")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="The type to compute in.  [default: auto]")] = None,
    device: Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda.  [default: cpu]")] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile", help="Compile steps before the first request; takes minutes.")
    ] = None,
    quantization: Annotated[str | None, typer.Option(help="Weights in int4, or in int8 (extra `int8`).")] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens to draft a step from text that a decode reads.  [default: 0]")
    ] = None,
    capacity: Annotated[str | None, typer.Option(help="KV cache: tokens, or a size like 4GiB.")] = None,
    host_capacity: Annotated[str | None, typer.Option(help="Host tier: tokens, or a size.")] = None,
    disk_capacity: Annotated[str | None, typer.Option(help="Disk tier: tokens, or a size.")] = None,
    eviction: Annotated[str | None, typer.Option(help="Eviction policy: lru, lfu, fifo, workflow.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Positions to use at most.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Length of answers whose request gives none.")] = None,
    max_requests: Annotated[
        int | None, typer.Option(min=1, help="Requests at once; more are answered with 429.")
    ] = None,
    max_sessions: Annotated[int | None, typer.Option(min=1, help="Open sessions of choreograph.connect.")] = None,
    max_schemas: Annotated[int | None, typer.Option(min=1, help="Prompt Cache schemas to keep.")] = None,
    max_workflows: Annotated[int | None, typer.Option(min=1, help="Workflows with step graphs to keep.")] = None,
    max_stored_responses: Annotated[int | None, typer.Option(min=0, help="Responses to keep.")] = None,
    max_stored_bytes: Annotated[int | None, typer.Option(min=0, help="Bytes of these responses.")] = None,
    max_body_bytes: Annotated[int | None, typer.Option(min=1, help="Largest body of a request.")] = None,
    max_workflow_tokens: Annotated[int | None, typer.Option(min=0, help="Tokens of stored messages to keep.")] = None,
    max_prefill_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompts in a step that also decodes.  [default: 192 on a CPU]")
    ] = None,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds until a request is cancelled.")] = None,
    drain_timeout: Annotated[int | None, typer.Option(help="Seconds for running requests after SIGTERM.")] = None,
    replica_timeout: Annotated[
        float | None, typer.Option(help="Seconds without an answer of any replica until requests get 503.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="An origin that browsers may call from; * is all.")
    ] = None,
    tool_parser: Annotated[str | None, typer.Option(help="Form of tool calls: auto, hermes, llama3_json.")] = None,
    dashboard: Annotated[
        bool | None, typer.Option(help="Serve a page of the server's state at /dashboard (extra `dashboard`).")
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(help="Export OpenTelemetry spans there, as http://localhost:4318/v1/traces.")
    ] = None,
    thinks: Annotated[bool | None, typer.Option(help="The model reasons in <think> tags.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Serve with this many engines on Ray.")] = None,
    max_replicas: Annotated[int | None, typer.Option(min=1, help="Add replicas under load, up to this many.")] = None,
    router: Annotated[
        str | None, typer.Option(help="Routing to replicas: message, prefix, power-of-two, round-robin, session.")
    ] = None,
    transfer: Annotated[
        str | None, typer.Option(help="Messages from other replicas: auto (if faster than computing), always, never.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="A running Ray, as auto.  [default: start a local one]")
    ] = None,
    log_level: Annotated[str, typer.Option(help="Level of the log: debug, info, warning, error.")] = "info",
) -> None:
    """Serve models over HTTP as OpenAI does, with reuse of messages."""
    given = {
        name: value for name, value in locals().items() if value is not None and name not in ("config", "log_level")
    }
    options = DEFAULTS | (_read_config(config, _option_names()) if config is not None else {}) | given
    for module in ("fastapi", "uvicorn", "prometheus_client", "llguidance"):
        require(module, "serve")
    if options.get("dashboard"):
        require("nicegui", "dashboard")
    with importing_torch():
        from ..server.app import create_app
        from ..server.engine_thread import load_engine
        from ..server.server_config import ServerConfig

    keys = tuple(options.pop("api_key", None) or ())
    if (file := options.pop("api_key_file", None)) is not None:
        keys += _read_keys(Path(file))
    limit_primitive_cache()
    address = {name: options.pop(name) for name in ("host", "port")}
    cluster = {name: options.pop(name) for name in CLUSTER_OPTIONS if name in options}
    open_engine = _engine_opener(options)
    options["cors_origins"] = tuple(options.pop("cors_origin", None) or ())
    server_config = ServerConfig(api_keys=keys, **options)
    if "replicas" in cluster:
        if server_config.dashboard:
            raise ConfigError("dashboard=True: it shows a single engine: leave it out with --replicas")
        _serve_replicas(open_engine, server_config, cluster, address)
        return
    if cluster:
        raise ConfigError(f"{next(iter(cluster))}: give --replicas too")
    uvicorn: Any = require("uvicorn", "serve")
    uvicorn.run(
        create_app(load_engine(open_engine), server_config, dashboard_tabs=DASHBOARD_TABS),
        **address,
        log_level=log_level,
        timeout_graceful_shutdown=server_config.drain_timeout,
        server_header=False,
    )


def limit_primitive_cache() -> None:
    """Limit oneDNN's caches of compiled matrix products.

    oneDNN compiles each product again for every number of rows; it and PyTorch each keep 1024 by default. A
    server's steps have all numbers of rows, so its memory would grow for minutes or hours. Has no effect after
    the first product.
    """
    for name in PRIMITIVE_CACHES:
        os.environ.setdefault(name, str(PRIMITIVE_CACHE_CAPACITY))


def _option_names() -> set[str]:
    import inspect

    return set(inspect.signature(serve).parameters) - {"config", "log_level"}


def _read_config(path: Path, known: set[str]) -> dict[str, Any]:
    """Read options from a YAML file; names may be written with hyphens."""
    yaml: Any = require("yaml", "serve")
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}: is not YAML: {exc}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: holds no options: write name: value")
    options = {str(name).replace("-", "_"): value for name, value in loaded.items()}
    for name in options:
        if name not in known:
            raise ConfigError(f"{path}: {name}: no such option; known: {sorted(known)}")
    return options


def _read_keys(path: Path) -> tuple[str, ...]:
    from ..server.server_config import read_api_keys

    return read_api_keys(path)


def _serve_replicas(open_engine: Any, config: Any, cluster: dict[str, Any], address: dict[str, Any]) -> None:
    """Serve with several engines on Ray."""
    require("ray.serve", "ray")
    from ..cluster import deployment

    ray_address = cluster.pop("ray_address", None)
    app = deployment.bind_app(open_engine, config, deployment.ClusterConfig(**cluster))
    deployment.run_until_signal(app, address=ray_address, **address)


def _engine_opener(options: dict[str, Any]) -> Any:
    """Take the engine's options out of `options`; return what loads the models."""
    models: dict[str, Any] = {
        "adapters": common.parse_options(options.pop("adapter", None)),
        "models": common.parse_options(options.pop("sibling", None)),
        "layer_reuse": _parse_patterns(options.pop("layer_reuse", None)),
    }
    cache = {name: options.pop(name) for name in ENGINE_OPTIONS if name in options}
    for name in ("capacity", "host_capacity", "disk_capacity"):
        if str(cache.get(name, "")).isdigit():
            cache[name] = int(cache[name])
    model, dtype, device, compile = (options.pop(name) for name in ("model", "dtype", "device", "compile"))
    if model.lower() != common.DEFAULT_MODEL:
        common.check_on_hub(model)
    from ..api.engine import Engine
    from ..config import CacheConfig, EngineConfig

    common.quiet_transformers()
    config = EngineConfig(
        cache=CacheConfig(**cache),
        compile=compile,
        quantization=options.pop("quantization", None),
        draft_tokens=options.pop("draft_tokens"),
        max_model_len=options.pop("max_model_len", None),
    )
    return partial(Engine.from_pretrained, model, dtype=dtype, device=device, config=config, **models)


def _parse_patterns(options: list[str] | None) -> dict[str, list[int]]:
    """Convert name=head,start,end to three integers by name."""
    patterns = {}
    for name, text in common.parse_options(options).items():
        numbers = str(text).split(",")
        if len(numbers) != 3 or not all(number.strip().isdecimal() for number in numbers):
            raise ConfigError(f"layer_reuse: {name}={text}: use three numbers: head,start,end")
        patterns[name] = [int(number) for number in numbers]
    return patterns
