"""One local Ray for all tests of this folder, and an application of two replicas on it."""

import os
import socket
from functools import partial
from pathlib import Path

import openai
import psutil
import pytest

pytest.importorskip("ray")

from helpers.live_server import make_engine

from choreograph.cluster import deployment
from choreograph.server.server_config import ServerConfig


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def ray_cluster(talker_folder):
    """Two replicas of the tiny model; ended with everything that was started."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    tests = Path(__file__).parents[1]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (tests.parent, tests)))  # of workers, which import `helpers`
    app = deployment.bind_app(
        partial(make_engine, talker_folder),
        ServerConfig(served_model_name="tiny", max_tokens=24),
        deployment.ClusterConfig(replicas=2, transfer="always"),
    )
    cluster = deployment.start(
        app, host="127.0.0.1", port=free_port(), num_cpus=3, object_store_memory=100 << 20, log_to_driver=False
    )
    yield cluster
    started = psutil.Process().children(recursive=True)  # not those of another test process
    cluster.stop()
    names = [process.name() for process in psutil.wait_procs(started, timeout=30)[1] if process.is_running()]
    assert not [name for name in names if name.startswith(("ray", "gcs_server"))], "still running"


@pytest.fixture
def ray_client(ray_cluster):
    with openai.OpenAI(base_url=f"{ray_cluster.url}/v1", api_key="none", max_retries=0) as result:
        yield result
