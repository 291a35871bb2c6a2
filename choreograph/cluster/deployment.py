"""Ray Serve application of replicas, and the command that runs it."""

import hashlib
import math
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..api.engine import Engine
from ..errors import ConfigError
from ..server.server_config import ServerConfig, take_engine, take_options
from ..utils import connect_to_ray, require
from .cluster_config import ClusterConfig
from .routing import create_policy

APP_NAME = "choreograph"

PRESSURE_LIMIT = 0.8  # share of a cache in use above which a replica is added

ROUTER = "choreograph.cluster.request_router:PolicyRequestRouter"


def build_app(args: Mapping[str, Any]) -> Any:
    """Build the application of a config file of Ray Serve."""
    options = {name.replace("-", "_"): value for name, value in args.items()}
    cluster, open_engine = ClusterConfig(**take_options(ClusterConfig, options)), take_engine(options)
    for name in ("api_keys", "cors_origins"):
        if name in options:
            options[name] = tuple(options[name])
    config = ServerConfig(**take_options(ServerConfig, options))
    if options:
        raise ConfigError(f"{min(options)}: no such option of a replica: remove it")
    return bind_app(open_engine, config, cluster)


def bind_app(open_engine: Callable[[], Engine], config: ServerConfig, cluster: ClusterConfig) -> Any:
    """Return the application that `serve.run` takes.

    Args:
        open_engine: loads a replica's engine in its process; has to be picklable.
    """
    serve: Any = require("ray.serve", "ray")
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    from .gateway import Gateway
    from .replica import EngineReplica

    scaling: dict[str, Any] = {"num_replicas": cluster.replicas}
    if cluster.max_replicas is not None:
        autoscaling = AutoscalingConfig(
            min_replicas=cluster.replicas,
            max_replicas=cluster.max_replicas,
            target_ongoing_requests=cluster.target_requests,
            policy=AutoscalingPolicy(policy_function="choreograph.cluster.deployment:scale"),
        )
        scaling = {"autoscaling_config": autoscaling}
    create_policy(cluster.router)  # an unknown one is refused before anything starts
    router: Any = {"request_router_class": ROUTER, "request_router_kwargs": {"policy": cluster.router}}
    version = model_version(open_engine)
    replicas = serve.deployment(
        EngineReplica,
        name="engine",
        max_ongoing_requests=config.max_requests,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=config.drain_timeout,
        ray_actor_options={
            "num_cpus": cluster.cpus_per_replica,
            "num_gpus": cluster.gpus_per_replica,
        },
        request_router_config=RequestRouterConfig(**router),
        **scaling,
    ).bind(open_engine, config, cluster.threads_per_replica, cluster.transfer, version)
    num_requests = config.max_requests * (cluster.max_replicas or cluster.replicas)
    gateway = serve.deployment(
        serve.ingress(None)(Gateway),
        name="gateway",
        max_ongoing_requests=2 * num_requests + 16,  # above its own limit, which it answers with 429
        graceful_shutdown_timeout_s=config.drain_timeout,
        # where Serve's controller is: the loss of another machine ends no connection
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
    )
    config = replace(config, max_requests=num_requests)
    return gateway.bind(replicas, config, version, has_transfers=cluster.transfer != "never")


def model_version(open_engine: Callable[[], Engine]) -> str:
    """Return a hash of what loads the models, without the engine's configuration.

    While an application is updated, replicas refuse requests of a gateway with another version: its tokenizer may be
    another one.
    """
    cloudpickle: Any = require("ray.cloudpickle", "ray")
    if isinstance(open_engine, partial):
        options = {name: value for name, value in sorted(open_engine.keywords.items()) if name != "config"}
        open_engine = partial(open_engine.func, *open_engine.args, **options)
    return hashlib.sha256(cloudpickle.dumps(open_engine)).hexdigest()[:16]


def scale(context: Any) -> tuple[int, dict[str, Any]]:
    """Autoscaling policy: enough replicas for the requests, and for the caches.

    A replica is added where the mean share of the caches in use exceeds PRESSURE_LIMIT, and none is
    removed while the others could not take what it holds, or while the use of some cache is unknown.
    """
    target, count = context.config.target_ongoing_requests, max(1, context.current_num_replicas)
    needed = math.ceil(context.total_num_requests / target)
    pressures = ((context.aggregated_metrics or {}).get("cache_pressure") or {}).values()
    needed = max(needed, math.ceil(sum(pressures) / PRESSURE_LIMIT))
    if len(pressures) < count:
        needed = max(needed, count)
    minimum, maximum = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    # one replica at a time downwards: the router has to learn where messages are then
    return min(maximum, max(minimum, needed, count - 1)), {}


@dataclass
class RunningCluster:
    """A started application; `stop` ends what was started."""

    url: str
    owns_ray: bool  # a local Ray was started

    def stop(self) -> None:
        ray, serve = require("ray", "ray"), require("ray.serve", "ray")
        if self.owns_ray:
            serve.shutdown()
            ray.shutdown()
        else:
            serve.delete(APP_NAME)


def start(app: Any, *, host: str, port: int, address: str | None = None, **ray_options: Any) -> RunningCluster:
    """Start an application; returns when its replicas are ready.

    Args:
        address: of a running Ray, such as "auto"; None: a local one is started.
        ray_options: of `ray.init`.
    """
    serve = require("ray.serve", "ray")
    owns_ray = connect_to_ray(address, **ray_options)
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(app, name=APP_NAME, route_prefix="/")
    except BaseException:
        RunningCluster("", owns_ray).stop()
        raise
    return RunningCluster(f"http://{host}:{port}", owns_ray)


def run_until_signal(app: Any, **options: Any) -> None:
    """Run an application until SIGINT or SIGTERM."""
    stopped, cluster = threading.Event(), start(app, **options)
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray has set its own handlers, which abort the process
        signal.signal(number, lambda *_: stopped.set())
    print(f"serving on {cluster.url}", flush=True)
    try:
        stopped.wait()
    finally:
        cluster.stop()
