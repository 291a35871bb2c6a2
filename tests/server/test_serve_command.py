"""`choreograph serve`: options from the command line and a file, keys, and the end by SIGTERM."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from typing import Any, get_args

import httpx
import pytest
import typer
import uvicorn
from helpers.command_line import app
from helpers.inspect_engine import inspect
from typer.testing import CliRunner

from choreograph.cli import serve_command
from choreograph.errors import ConfigError
from choreograph.server.server_config import ServerConfig, read_api_keys


@pytest.fixture
def started(monkeypatch):
    """Runs the command up to the start of uvicorn; returns its application and options."""
    result: dict[str, Any] = {}

    def run(application, **options):
        result.update(options, app=application)

    monkeypatch.setattr(uvicorn, "run", run)

    def start(*arguments):
        outcome = CliRunner().invoke(app, ["serve", *map(str, arguments)], catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output
        return result

    return start


OWN_OPTIONS = {
    "model", "config", "host", "port", "api_key_file", "adapter", "sibling", "layer_reuse", "dtype", "device",
    "ray_address", "log_level",
}  # fmt: skip

# fields that only the library, or a config file of Ray, sets
NO_OPTIONS = {
    "cache", "scheduler", "backend", "compile_sizes", "page_size", "disk_dir", "poison_freed_pages",
    "max_num_batched_tokens", "max_num_prefill_tokens", "max_num_seqs", "skip_loading", "max_choices",
    "cpus_per_replica", "gpus_per_replica", "threads_per_replica", "target_requests",
}  # fmt: skip


def test_the_options_are_the_fields_of_the_config_classes_and_few_of_their_own():
    fields = [field.name for kind in serve_command.CONFIG_CLASSES for field in dataclasses.fields(kind)]
    assert len(fields) == len(set(fields))
    singular = {"api_keys": "api_key", "cors_origins": "cors_origin"}
    options = {singular.get(name, name) for name in fields if name not in NO_OPTIONS} | OWN_OPTIONS
    command = typer.main.get_command(app).commands["serve"]
    assert {parameter.name for parameter in command.params} == options
    _, limit = get_args(serve_command.CONFIG_PARAMETERS["max_requests"].annotation)
    assert limit.min == 1 and str(ServerConfig().max_requests) in limit.help
    kind, policy = get_args(serve_command.CONFIG_PARAMETERS["eviction"].annotation)
    assert kind == str | None and "workflow, lru, lfu, fifo" in policy.help


def test_options_of_the_command_line_win_over_those_of_the_file(started, talker_folder, tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text("# of two teams\nkey-of-team-one\n\nkey-of-team-two\n")
    config = tmp_path / "serve.yaml"
    config.write_text(
        f"model: {talker_folder}\nport: 9001\nreuse: auto\nmax-tokens: 5\ncapacity: 512\napi-key-file: {keys}\n"
        "otlp-traces-endpoint: http://127.0.0.1:9/v1/traces\nquantization: int4\n"
    )
    result = started(
        "--config", config, "--port", 9002, "--api-key", "key-of-the-owner", "--dtype", "float32", "--draft-tokens", 3
    )
    service = result["app"].state.service
    assert (result["host"], result["port"], result["timeout_graceful_shutdown"]) == ("127.0.0.1", 9002, 60)
    assert (service.config.reuse, service.config.max_tokens, service.max_model_len) == ("auto", 5, 512)
    assert inspect(service.engine).speculator is not None
    assert service.engine.model_info.fingerprint.endswith("-int4")
    assert service.config.otlp_traces_endpoint == "http://127.0.0.1:9/v1/traces"
    service.on_stop[0]()  # ends the exporter's thread
    assert service.config.api_keys == ("key-of-the-owner", "key-of-team-one", "key-of-team-two")


def test_a_sibling_reuses_layers_of_the_base(started, talker_folder, math_folder):
    options = [
        "--sibling",
        f"math={math_folder}",
        "--layer-reuse",
        "math=0,1,2",
        "--dtype",
        "float32",
        "--capacity",
        512,
    ]
    service = started(talker_folder, *options)["app"].state.service
    assert service.engine.models == ("base", "math")
    assert inspect(service.engine).layer_reuse_pairs == (("math", "base"),)
    for wrong in ("0,1", "0,1,x", "5"):
        with pytest.raises(ConfigError, match="use three numbers: head,start,end"):
            serve_command.serve(talker_folder, layer_reuse=[f"math={wrong}"])


def test_the_cache_of_compiled_products_is_limited_unless_the_user_chooses(started, talker_folder, monkeypatch):
    for name in serve_command.PRIMITIVE_CACHES:
        monkeypatch.setenv(name, "7")
    serve_command.limit_primitive_cache()
    assert [os.environ[name] for name in serve_command.PRIMITIVE_CACHES] == ["7", "7"]
    for name in serve_command.PRIMITIVE_CACHES:
        monkeypatch.delenv(name)
    started(talker_folder, "--capacity", 512, "--dtype", "float32")
    assert [os.environ[name] for name in serve_command.PRIMITIVE_CACHES] == ["128", "128"]


def test_replicas_are_served_on_ray_with_the_same_options(monkeypatch, talker_folder):
    deployment = pytest.importorskip("choreograph.cluster.deployment")
    result: dict[str, Any] = {}
    monkeypatch.setattr(deployment, "bind_app", lambda *arguments: arguments)
    monkeypatch.setattr(deployment, "run_until_signal", lambda app, **options: result.update(options, app=app))
    options = ["--replicas", "2", "--max-replicas", "3", "--router", "session", "--port", "9003", "--reuse", "auto"]
    outcome = CliRunner().invoke(app, ["serve", talker_folder, *options], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    open_engine, config, cluster = result["app"]
    assert open_engine.args == (talker_folder,) and config.reuse == "auto"
    assert (cluster.replicas, cluster.max_replicas, cluster.router) == (2, 3, "session")
    assert (result["port"], result["address"]) == (9003, None)
    with pytest.raises(ConfigError, match="give --replicas too"):
        serve_command.serve(talker_folder, router="session")
    with pytest.raises(ConfigError, match="leave it out with --replicas"):
        serve_command.serve(talker_folder, replicas=2, dashboard=True)


def test_unknown_options_and_short_keys_are_refused(tmp_path):
    config = tmp_path / "serve.yaml"
    config.write_text("reuse: auto\nprot: 1\n")
    with pytest.raises(ConfigError, match="prot: no such option"):
        serve_command.serve(config=config)
    empty = tmp_path / "keys"
    empty.write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no API key"):
        read_api_keys(empty)
    with pytest.raises(ConfigError, match="fewer than 8 characters"):
        ServerConfig(api_keys=("short",))


@pytest.mark.slow
def test_sigterm_ends_the_server_after_its_requests_and_leaves_no_files(talker_folder, tmp_path):
    command = [sys.executable, "-m", "choreograph", "serve", talker_folder, "--port", "8977", "--dtype", "float32"]
    command += ["--served-model-name", "tiny", "--capacity", "512", "--disk-capacity", "4096"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        end = time.monotonic() + 120
        while True:
            try:
                httpx.get("http://127.0.0.1:8977/ready").raise_for_status()
                break
            except httpx.HTTPError:
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.2)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "stream": True}
        body |= {"ignore_eos": True}
        url = "http://127.0.0.1:8977/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=120) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]"
        assert list(tmp_path.glob("choreograph-*"))
        assert process.wait(60) in (0, -signal.SIGTERM)
        assert not list(tmp_path.glob("choreograph-*"))
    finally:
        process.kill()
        process.stderr.close()
