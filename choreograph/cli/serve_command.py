"""`choreograph serve`: the OpenAI-compatible server.

Its options are the described fields of the config classes, and what is neither of server nor engine.
"""

import inspect
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cluster.cluster_config import ClusterConfig
from ..config import CacheConfig, EngineConfig, SchedulerConfig
from ..errors import ConfigError
from ..server.server_config import KEEP_ALIVE_SECONDS, ServerConfig, read_api_keys, take_engine, take_options
from ..utils import importing_torch, parse_yaml, require
from . import common
from .config_options import add_parameters, config_parameters, is_list, read_value

# further tabs of the dashboard by title, see `TabFactory`; `choreograph.__main__` adds the playground
DASHBOARD_TABS: dict[str, Any] = {}

CONFIG_CLASSES = (ServerConfig, EngineConfig, CacheConfig, SchedulerConfig, ClusterConfig)

PRIMITIVE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # variables of oneDNN and of PyTorch
PRIMITIVE_CACHE_CAPACITY = 128  # compiled matrix products


CONFIG_PARAMETERS = config_parameters(CONFIG_CLASSES)


def serve(
    model: Annotated[str | None, typer.Argument(help="A name, a Hub id, a model folder or a .gguf file.")] = None,
    *,
    config: Annotated[Path | None, typer.Option(help="A YAML file of these options; options given here win.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. (default: 127.0.0.1)")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on. (default: 8000)")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file of API keys, one a line.")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option("--adapter", help="A LoRA adapter to serve as a model, as name=folder.")
    ] = None,
    sibling: Annotated[
        list[str] | None, typer.Option("--sibling", help="A model of the same family to serve, as name=folder.")
    ] = None,
    layer_reuse: Annotated[
        list[str] | None,
        typer.Option(
            "--layer-reuse", help="Layers that a model computes of the base's messages, as name=head,start,end."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="The type to compute in. (default: auto)")] = None,
    device: Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda. (default: cpu)")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="A running Ray, as auto. (default: start a local one)")
    ] = None,
    log_level: Annotated[str, typer.Option(help="Level of the log: debug, info, warning, error.")] = "info",
    **config_options: Any,
) -> None:
    """Serve models over HTTP as OpenAI does, with reuse of messages."""
    given = locals() | config_options
    given = {name: given[name] for name in _option_names() if given.get(name) is not None}
    options = (_read_config(config, _option_names()) if config is not None else {}) | given
    for module in ("fastapi", "uvicorn", "prometheus_client", "llguidance"):
        require(module, "serve")
    if options.get("dashboard"):
        require("nicegui", "dashboard")
    with importing_torch():
        from ..server.app import create_app
        from ..server.engine_thread import load_engine

    options = {
        field: options.pop(item.name) for field, item in CONFIG_PARAMETERS.items() if item.name in options
    } | options
    options |= {name: tuple(options[name]) for name in ("api_keys", "cors_origins") if name in options}
    if (file := options.pop("api_key_file", None)) is not None:
        options["api_keys"] = (*options.get("api_keys", ()), *read_api_keys(Path(file)))
    limit_primitive_cache()
    address = {"host": options.pop("host", "127.0.0.1"), "port": options.pop("port", 8000)}
    cluster = take_options(ClusterConfig, options)
    cluster |= {name: options.pop(name) for name in ("ray_address",) if name in options}
    open_engine = _engine_opener(options)
    server_config = ServerConfig(**options)
    if "replicas" in cluster:
        if server_config.dashboard:
            raise ConfigError("dashboard=True: it shows a single engine: leave it out with --replicas")
        _serve_replicas(open_engine, server_config, cluster, address)
        return
    if cluster:
        raise ConfigError(f"{next(iter(cluster))}: give --replicas too")
    uvicorn: Any = require("uvicorn", "serve")
    app = create_app(engine := load_engine(open_engine), server_config, dashboard_tabs=DASHBOARD_TABS)
    app.state.service.on_stop.append(engine.close)  # SIGTERM ends the process before its exit handlers run
    uvicorn.run(
        app,
        **address,
        log_level=log_level,
        timeout_graceful_shutdown=server_config.drain_timeout,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
    )


add_parameters(serve, CONFIG_PARAMETERS)


def limit_primitive_cache() -> None:
    """Limit oneDNN's caches of compiled matrix products.

    oneDNN compiles each product again for every number of rows; it and PyTorch each keep 1024 by default. A
    server's steps have all numbers of rows, so its memory would grow for minutes or hours. Has no effect after
    the first product.
    """
    for name in PRIMITIVE_CACHES:
        os.environ.setdefault(name, str(PRIMITIVE_CACHE_CAPACITY))


def _option_names() -> set[str]:
    return set(inspect.signature(serve).parameters) - {"config", "log_level"}


def _read_config(path: Path, known: set[str]) -> dict[str, Any]:
    """Read options from a YAML file; names may be written with hyphens.

    Checks the types of those that no config class checks.
    """
    try:
        loaded = parse_yaml(path.read_text(encoding="utf-8-sig"), "serve") or {}
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read ({exc.strerror}): check the path") from None
    except ValueError as exc:
        raise ConfigError(f"{path}: is not YAML: {exc}: correct the file") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: holds no options: write name: value")
    options = {str(name).replace("-", "_"): value for name, value in loaded.items()}
    parameters = inspect.signature(serve).parameters
    checked_later = {item.name for item in CONFIG_PARAMETERS.values() if not is_list(item)}
    for name in options:
        if name not in known:
            raise ConfigError(f"{path}: {name}: no such option; known: {sorted(known)}")
    return {
        name: value if name in checked_later else read_value(parameters[name], value, str(path))
        for name, value in options.items()
        if value is not None
    }


def _serve_replicas(open_engine: Any, config: Any, cluster: dict[str, Any], address: dict[str, Any]) -> None:
    """Serve with several engines on Ray."""
    require("ray.serve", "ray")
    from ..cluster import deployment

    ray_address = cluster.pop("ray_address", None)
    app = deployment.bind_app(open_engine, config, deployment.ClusterConfig(**cluster))
    deployment.run_until_signal(app, address=ray_address, **address)


def _engine_opener(options: dict[str, Any]) -> Any:
    """Take the engine's options out of `options`; return what loads the models."""
    options |= {name: common.parse_options(options[name]) for name in ("adapter", "sibling") if name in options}
    if "layer_reuse" in options:
        options["layer_reuse"] = _parse_patterns(options["layer_reuse"])
    for name in ("capacity", "host_capacity", "disk_capacity"):
        if str(options.get(name, "")).isdigit():
            options[name] = int(options[name])
    if options.get("model", common.DEFAULT_MODEL).lower() != common.DEFAULT_MODEL:
        common.check_on_hub(options["model"])
    common.quiet_transformers()
    return take_engine(options)


def _parse_patterns(options: list[str] | None) -> dict[str, list[int]]:
    """Convert name=head,start,end to three integers by name."""
    patterns = {}
    for name, text in common.parse_options(options).items():
        numbers = str(text).split(",")
        if len(numbers) != 3 or not all(number.strip().isdecimal() for number in numbers):
            raise ConfigError(f"layer_reuse: {name}={text}: use three numbers: head,start,end")
        patterns[name] = [int(number) for number in numbers]
    return patterns
