"""A config file of Ray Serve updates a running application; then two teams use it."""

import random
import threading
import time

import httpx
import pytest
import yaml
from helpers.replica_streams import CHAT, assert_unbroken, join, read_all, running_loads, start_streams
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

pytestmark = pytest.mark.slow

GREEDY = CHAT | {"temperature": 0}

TEAMS = ("key-of-the-first-team", "key-of-the-second-team")

CONFIG = """
applications:
  - name: choreograph
    route_prefix: /
    import_path: choreograph.cluster:build_app
    args:
      model: {model}
      dtype: float32
      replicas: 2
      capacity: 4096
      served_model_name: tiny
      max_tokens: 24
      transfer: never
      api_keys: {keys}
"""


@pytest.fixture(scope="module", autouse=True)
def restored(ray_app, ray_cluster):
    """Later files of this process find the application that they started."""
    yield
    serve.delete("choreograph")
    serve.run(ray_app, name="choreograph", route_prefix="/")


def deploy(config):
    """Do what `serve deploy` makes the dashboard do; return when the replicas are those of the file."""
    old = {load.name for load in running_loads()}
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(yaml.safe_load(config)))
    end = time.monotonic() + 900
    while True:
        state, names = serve.status().applications["choreograph"], {load.name for load in running_loads()}
        assert state.status not in ("DEPLOY_FAILED", "UNHEALTHY"), state.message
        if state.status == "RUNNING" and len(names) == 2 and not names & old:
            return
        assert time.monotonic() < end, state
        time.sleep(1)


def test_no_request_fails_while_a_config_file_replaces_gateway_and_replicas(ray_cluster, single, talker_folder):
    headers, long = {"Authorization": f"Bearer {TEAMS[0]}"}, [{"temperature": 0, "api_key": TEAMS[0]}]
    expected = httpx.post(f"{single}/chat/completions", json=GREEDY, timeout=60).json()["choices"]
    texts, is_updated = read_all(single, long), threading.Event()
    answers, errors = [], []

    def ask():
        while not is_updated.is_set():
            try:
                answer = httpx.post(f"{ray_cluster.url}/v1/chat/completions", json=GREEDY, headers=headers, timeout=900)
                answers.append((answer.status_code, answer.json().get("choices")))
            except httpx.HTTPError as exc:
                errors.append(exc)
            time.sleep(0.3)  # leaves the processor to the replicas that start

    clients = [threading.Thread(target=ask) for _ in range(3)]
    for client in clients:
        client.start()
    results, (started,), threads = start_streams(f"{ray_cluster.url}/v1", long)
    assert started.wait(120)
    try:
        deploy(CONFIG.format(model=talker_folder, keys=list(TEAMS)))
        num_answers = len(answers)
        while len(answers) < num_answers + 6 and not errors:
            time.sleep(0.2)
    finally:
        is_updated.set()
        join([*clients, *threads])
    assert not errors
    assert [answer for answer in answers if answer != (200, expected)] == []
    assert_unbroken(results, texts)
    assert httpx.post(f"{ray_cluster.url}/v1/chat/completions", json=GREEDY).status_code == 401


def send(url, team, text, reuse):
    """Send a message; return the replica that computed it, its computed tokens and those reported as reused."""
    before = {load.name: load.stats.num_batched_tokens for load in running_loads()}
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}
    body |= {"choreography": {"reuse": reuse, "workflow": "shared"}}
    headers = {"Authorization": f"Bearer {TEAMS[team]}"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=900).json()
    counts = {load.name: load.stats.num_batched_tokens - before[load.name] for load in running_loads()}
    replica = max(counts, key=counts.__getitem__)
    return replica, counts[replica], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("reuse", ["exact", "messages", "auto"])
def test_two_teams_on_one_replica_save_each_other_no_work(ray_cluster, reuse):
    """What a replica computes does not depend on what another team has sent: neither times nor counts tell it."""
    rng, words = (
        random.Random(reuse),
        ["river", "bridge", "stone", "water", "tower", "garden", "market", "window", "street", "morning"],
    )
    for _ in range(10):
        text = " ".join(rng.choices(words, k=240))
        replica, computed, _ = send(ray_cluster.url, 0, text, reuse)
        send(ray_cluster.url, 0, " ".join(rng.choices(words, k=480)), reuse)  # the other replica has had more then
        other, computed_again, reused = send(ray_cluster.url, 1, text, reuse)
        own, computed_last, reused_last = send(ray_cluster.url, 0, text, reuse)
        assert computed > 240 and computed_again > 240 and reused < 60  # the start of the chat template
        if replica == other == own:
            assert computed_last < 60 and reused_last > 240
            return
    raise AssertionError("the teams were never on one replica")
