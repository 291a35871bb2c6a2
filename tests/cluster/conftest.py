"""One Ray of two nodes for all tests of this folder, and an application of two replicas on it."""

import os
import random
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path

import openai
import psutil
import pytest

pytest.importorskip("ray")

import ray
from helpers.live_server import make_engine, serving
from ray import serve
from ray.cluster_utils import Cluster

from choreograph.cluster import deployment
from choreograph.server.server_config import ServerConfig


def free_port() -> int:
    """A port that no other worker of the tests takes: Ray's proxies share a port without an error."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for port in random.sample(range(20_000 + 1000 * worker, 21_000 + 1000 * worker), 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


@pytest.fixture(scope="session")
def ray_nodes():
    """A Ray of two nodes with room for a replica each; all of its processes are ended."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "180"  # on a busy machine
    # Tests kill replicas, some of them before Serve has seen that they run: it would give up after six.
    os.environ["RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT"] = "1000"
    tests = Path(__file__).parents[1]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (tests.parent, tests)))  # of workers, which import `helpers`
    memory = {"object_store_memory": 100 << 20}
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **memory})
    nodes.add_node(num_cpus=1, **memory)
    ray.init(address=nodes.address, log_to_driver=False)
    yield nodes
    children = psutil.Process().children(recursive=True)  # not those of another test process
    started = [process for process in children if process.name().startswith(("ray", "gcs_server"))]
    serve.shutdown()
    ray.shutdown()
    nodes.shutdown()
    assert not psutil.wait_procs(started, timeout=30)[1], "still running"


@pytest.fixture(scope="session")
def ray_app(ray_nodes, talker_folder, math_folder):
    """The tiny model and a sibling, which reuses its layers."""
    return deployment.bind_app(
        partial(make_engine, talker_folder, math=math_folder, pattern=(0, 1, 2)),
        ServerConfig(served_model_name="tiny", max_tokens=24, drain_timeout=240, replica_timeout=240),
        deployment.ClusterConfig(replicas=2, transfer="always"),
    )


@pytest.fixture(scope="session")
def ray_cluster(ray_app):
    """Two replicas of `ray_app`, on a node each."""
    address = {"host": "127.0.0.1", "port": free_port()}
    serve.start(proxy_location="HeadOnly", http_options=address)  # the nodes have one network address
    return deployment.start(ray_app, **address)


@pytest.fixture(scope="session")
def single(talker_folder, math_folder):
    """URL of one server without Ray, for the expected answers."""
    with serving(make_engine(talker_folder, math=math_folder, pattern=(0, 1, 2))) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def ray_client(ray_cluster):
    with openai.OpenAI(base_url=f"{ray_cluster.url}/v1", api_key="none", max_retries=0) as result:
        yield result
