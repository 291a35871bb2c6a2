"""Fixtures: tiny models, and vLLM engines in this process, each started once."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
# vLLM reads these when it is imported. In one process, a test sees the scheduler's and the worker's connector.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of several processes starve each other
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),  # of servers that tests start
}

import pytest
from offline_engine import OfflineEngine
from tiny_models import CHAT_TEMPLATES, CONFIGS, TinyModel, save, save_chat_model
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The factory of tiny models by the name of a configuration, or of a chat template."""
    made: dict[str, TinyModel] = {}

    def get(name: str = "llama") -> TinyModel:
        if name not in made:
            folder = tmp_path_factory.mktemp("model")
            made[name] = save_chat_model(folder, name) if name in CHAT_TEMPLATES else save(CONFIGS[name], folder)
        return made[name]

    return get


@pytest.fixture(scope="session")
def _alive():
    """The engine that is alive, by its arguments. There is one at a time: a worker's connector is global."""
    engines: dict[str, OfflineEngine] = {}
    yield engines
    _stop(engines)


def _stop(engines: dict[str, OfflineEngine]) -> None:
    while engines:
        engines.popitem()[1].close()


@pytest.fixture
def stop_engines(_alive):
    """No engine is alive; what the test starts in this process is gone after it."""
    _stop(_alive)
    yield
    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="session")
def start_engine(tiny_model, _alive):
    """The factory of engines. The one that is alive is returned again if its arguments are equal, unless `fresh`."""

    def start(name: str = "llama", *, fresh: bool = False, **options) -> OfflineEngine:
        key = repr((name, sorted(options.items())))
        if fresh or key not in _alive:
            _stop(_alive)
            _alive[key] = OfflineEngine(tiny_model(name).folder, **options)
        return _alive[key]

    return start
