"""Options of an application of replicas, its config file form, and its autoscaling policy."""

import os
import signal
import subprocess
import sys
import uuid
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
import yaml
from pydantic import ValidationError

pytest.importorskip("ray")

from ray.serve.schema import ServeDeploySchema

from choreograph import Engine, EngineConfig
from choreograph.cluster import build_app, deployment
from choreograph.cluster.replica_monitor import sum_stats
from choreograph.errors import ConfigError
from choreograph.outputs import EngineStats


def scaled(requests, pressures, current=2, low=1, high=8):
    context = SimpleNamespace(
        config=SimpleNamespace(target_ongoing_requests=4),
        current_num_replicas=current,
        total_num_requests=requests,
        aggregated_metrics={"cache_pressure": {f"r{number}": value for number, value in enumerate(pressures)}},
        capacity_adjusted_min_replicas=low,
        capacity_adjusted_max_replicas=high,
    )
    return deployment.scale(context)[0]


def test_replicas_follow_requests_and_caches_within_their_limits():
    assert scaled(13, [0.1, 0.1]) == 4  # 4 requests each
    assert scaled(1, [0.9, 0.9]) == 3  # 1.8 caches in use, 0.8 of each
    assert scaled(100, []) == 8
    assert scaled(0, [0.0] * 4, current=4) == 3  # one at a time
    assert scaled(0, [], current=1) == 1


def test_no_replica_is_removed_while_the_use_of_a_cache_is_unknown():
    assert scaled(0, [0.1, 0.1], current=3) == scaled(0, [], current=3) == 3
    assert scaled(0, [0.1] * 3, current=3) == 2
    assert scaled(0, [0.9, 0.9], current=3) == 3  # the third one starts: no fourth one for it


def test_a_config_file_of_ray_takes_the_options_of_the_server():
    app = build_app({"model": "m", "replicas": 3, "reuse": "auto", "capacity": 512, "api_keys": ["key-of-a-team"]})
    replicas = app._bound_deployment.init_args[0]._bound_deployment
    open_engine, config, threads, transfer, _ = replicas.init_args
    assert open_engine.args == ("m",) and open_engine.keywords["config"].cache.capacity == 512
    assert (config.reuse, config.api_keys, threads, replicas.num_replicas) == ("auto", ("key-of-a-team",), 1, 3)
    assert transfer == "auto"
    with pytest.raises(ConfigError, match="prot: no such option"):
        build_app({"prot": 1})


def test_the_documented_config_file_is_one_of_ray_serve():
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    loaded = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    (application,) = ServeDeploySchema.model_validate(loaded).applications
    assert application.import_path == "choreograph.cluster:build_app"
    assert build_app(application.args)._bound_deployment.name == "gateway"


def test_versions_of_an_application_differ_by_their_models_alone():
    versions = [
        deployment.model_version(partial(Engine.from_pretrained, model, config=EngineConfig(compile=compile)))
        for model, compile in (("a", False), ("a", True), ("b", False))
    ]
    assert versions[0] == versions[1] != versions[2]


def test_impossible_numbers_and_unknown_routers_are_refused():
    with pytest.raises(ConfigError, match="max_replicas=1"):
        deployment.ClusterConfig(replicas=2, max_replicas=1)
    with pytest.raises((ConfigError, ValidationError)):
        deployment.ClusterConfig(replicas=0)
    with pytest.raises(ConfigError, match="router='random'"):
        build_app({"router": "random"})


def test_states_of_replicas_are_summed():
    counts = dict.fromkeys(EngineStats.__dataclass_fields__, 1) | {"tier_tokens": {"host": 5}}
    total = sum_stats([EngineStats(**counts | {"events": events}) for events in ({"evicted": 2}, {"imported": 1})])
    assert (total.num_pages, total.tier_tokens, total.events) == (2, {"host": 10}, {"evicted": 2, "imported": 1})


@pytest.mark.slow
def test_the_command_serves_with_replicas_and_leaves_nothing_running(talker_folder):
    mark = uuid.uuid4().hex  # its processes inherit it; other tests have processes of Ray at the same time
    command = [sys.executable, "-m", "choreograph", "serve", talker_folder, "--replicas", "2", "--port", "8979"]
    command += ["--dtype", "float32", "--served-model-name", "tiny"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"CHOREOGRAPH_TEST": mark})
    try:
        assert any(b"serving on http://127.0.0.1:8979" in line for line in process.stdout)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        answer = httpx.post("http://127.0.0.1:8979/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"]
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    left = psutil.process_iter(["pid", "cmdline", "environ"])
    assert not [p.info["cmdline"] for p in left if (p.info["environ"] or {}).get("CHOREOGRAPH_TEST") == mark]
