"""Fixtures: tiny models, and vLLM engines in this process, each started once."""

import gc
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
from tiny_models import CONFIGS, TinyModel, save

gc.freeze()  # engines collect garbage when they start and stop: what was imported need not be searched


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The factory of tiny models by the name of a configuration."""
    made: dict[str, TinyModel] = {}

    def get(name: str = "llama") -> TinyModel:
        if name not in made:
            made[name] = save(CONFIGS[name], tmp_path_factory.mktemp("model"))
        return made[name]

    return get


@pytest.fixture(scope="session")
def engines(tiny_model):
    """The factory of engines; equal arguments give the same engine."""
    started: dict[tuple, OfflineEngine] = {}

    def get(name: str = "llama", **options) -> OfflineEngine:
        key = (name, *sorted((option, repr(value)) for option, value in options.items()))
        if key not in started:
            started[key] = OfflineEngine(tiny_model(name).folder, **options)
        return started[key]

    yield get
    for engine in started.values():
        engine.close()
