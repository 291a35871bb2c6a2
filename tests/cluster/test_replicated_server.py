"""Replicas on a local Ray answer as one server does, also where one of them dies."""

import os
import signal
import time

import httpx
import psutil
import pytest
from helpers.replica_streams import CHAT, assert_unbroken, join, loads, read_all, start_streams, wait_for_replicas

PLAN = "\n".join(f"Step {number}: measure the river at mark {number} and write it down." for number in range(8))


def comparable(answer):
    """Drop ids and times, what happened to be cached on a replica, and what rounding differs with it."""
    if isinstance(answer, list):
        return [comparable(item) for item in answer]
    if not isinstance(answer, dict):
        return answer
    dropped = ("id", "created", "created_at", "prompt_tokens_details", "choreography")
    result = {name: comparable(value) for name, value in answer.items() if name not in dropped}
    if "logprob" in result:
        result["logprob"] = pytest.approx(result["logprob"], abs=1e-4)
    return result


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", CHAT | {"temperature": 1.0}),
        ("/chat/completions", CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2, "temperature": 0.7}),
        ("/chat/completions", CHAT | {"response_format": {"type": "json_object"}, "max_tokens": 24}),
        ("/completions", {"model": "tiny", "prompt": ["One", "Two"], "max_tokens": 4, "temperature": 0}),
        ("/completions", {"model": "tiny", "prompt": "One two", "max_tokens": 0, "prompt_logprobs": 1, "n": 2}),
        ("/chat/completions", CHAT | {"max_tokens": 2, "temperature": 0, "prompt_logprobs": 0}),
        ("/chat/completions", CHAT | {"model": "other"}),
        ("/chat/completions", CHAT | {"temperature": -1}),
        ("/chat/completions", CHAT | {"max_tokens": 100_000}),
        ("/completions", {"model": "tiny", "prompt": "x", "choreography": {"schema": "absent"}}),
    ],
)
def test_answers_and_errors_are_those_of_one_server(ray_cluster, single, path, body):
    results = [httpx.post(base + path, json=body, timeout=60) for base in (f"{ray_cluster.url}/v1", single)]
    assert results[0].status_code == results[1].status_code
    assert comparable(results[0].json()) == comparable(results[1].json())


def test_status_routes_see_all_replicas(ray_cluster):
    assert httpx.get(f"{ray_cluster.url}/ready").json() == {"status": "ready"}
    metrics = httpx.get(f"{ray_cluster.url}/metrics").text
    assert "choreograph:num_requests_running" in metrics and "choreograph:computed_tokens_total" in metrics
    models = httpx.get(f"{ray_cluster.url}/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny", "math"]


def test_responses_are_stored_and_continued(ray_client):
    first = ray_client.responses.create(model="tiny", input="Hello", max_output_tokens=16)
    again = ray_client.responses.create(model="tiny", input="More", previous_response_id=first.id, max_output_tokens=16)
    assert again.usage.input_tokens > first.usage.input_tokens
    assert ray_client.responses.retrieve(first.id).output_text == first.output_text


def test_declared_graphs_and_schemas_reach_the_replica_that_runs_a_request(ray_cluster):
    url = f"{ray_cluster.url}/v1"
    graph = httpx.put(f"{url}/workflows/debate", json={"a": None, "b": "a"})
    assert graph.json()["agents"] == ["a", "b"]
    schema = '<schema name="trip"><module name="plan">Plan three days in the mountains.</module></schema>'
    assert httpx.put(f"{url}/schemas/trip", json={"pml": schema}).status_code == 200
    body = {"model": "tiny", "prompt": '<prompt schema="trip"><plan/> Day one:</prompt>', "max_tokens": 4}
    body |= {"choreography": {"schema": "trip", "workflow": "debate"}}
    answers = [httpx.post(f"{url}/completions", json=body, timeout=60).json() for _ in range(2)]
    assert answers[1]["usage"]["choreography"]["message_tokens"] > 0
    assert httpx.delete(f"{url}/schemas/trip").status_code == 200
    assert httpx.post(f"{url}/completions", json=body).status_code == 404


def test_messages_in_another_order_are_not_computed_again_on_any_replica(ray_client):
    num_reused = []
    for number in range(6):
        texts = [f"Report {number} of worker {worker}. {PLAN}" for worker in ("one", "two")]
        options = {"reuse": "messages", "workflow": f"order-{number}"}
        for order in (texts, texts[::-1]):
            answer = ray_client.chat.completions.create(
                model="tiny",
                messages=[{"role": "system", "content": "Read."}]
                + [{"role": "user", "content": text} for text in order],
                max_tokens=2,
                extra_body={"choreography": options},
            )
        counts = answer.usage.choreography
        num_reused.append(counts["message_tokens"] + counts["prefix_tokens"] + counts["remote_tokens"])
    assert min(num_reused) > 200


def test_a_sibling_reuses_layers_of_messages_that_the_base_has_read(ray_client):
    texts = [f"Notes of {name} for both models. {PLAN}" for name in ("one", "two")]
    for model, order in (("tiny", texts), ("math", texts[::-1])):
        answer = ray_client.chat.completions.create(
            model=model,
            messages=[{"role": "system", "content": "Read."}] + [{"role": "user", "content": text} for text in order],
            max_tokens=2,
            extra_body={"choreography": {"reuse": "messages", "workflow": "family"}},
        )
    counts = answer.usage.choreography
    assert counts["other_model_tokens"] + counts["remote_tokens"] > 200


def test_streams_go_on_without_a_gap_after_kill_minus_9_of_a_replica(ray_cluster, single):
    # few candidates a token: among 49,000 equally likely ones, rounding would choose
    options = [{"temperature": 0}, {"temperature": 0.9, "seed": 7, "extra_body": {"ignore_eos": True, "top_k": 8}}]
    options += [options[1] | {"temperature": 0.8, "seed": 9, "presence_penalty": 0.5}]
    options += [{"temperature": 0, "stream": False}]
    loads()  # the first call connects
    expected = read_all(single, options)
    results, events, threads = start_streams(f"{ray_cluster.url}/v1", options)
    assert all(event.wait(120) for event in events)
    busy = max(loads(), key=lambda load: load.stats.num_running)
    assert busy.stats.num_running
    os.kill(busy.process_id, signal.SIGKILL)
    join(threads)
    assert_unbroken(results, expected)
    assert not psutil.pid_exists(busy.process_id)


def test_requests_are_answered_while_a_replica_is_missing_and_after_it_is_back(ray_cluster, ray_client):
    assert ray_client.chat.completions.create(**CHAT).usage.completion_tokens
    wait_for_replicas()
    assert ray_client.chat.completions.create(**CHAT).usage.completion_tokens


def test_a_client_that_disconnects_cancels_its_request_on_the_replica(ray_cluster):
    body = CHAT | {"max_tokens": 4000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{ray_cluster.url}/v1/chat/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
    end = time.monotonic() + 60
    while any(load.stats.num_running for load in loads()):
        assert time.monotonic() < end
        time.sleep(0.2)


def counters_of(url):
    """Return all counters of a server, by name and labels."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs if "_total" in name or "_count{" in name or "_bucket{" in name}


def wait_for_ready(url, status, seconds=240):
    end = time.monotonic() + seconds
    while httpx.get(f"{url}/ready", timeout=60).status_code != status:
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_without_a_living_replica_the_server_is_not_ready_and_counters_never_fall(ray_cluster, ray_client):
    for number in range(4):
        chat = [{"role": "user", "content": f"Count the boats at pier {number}."}]
        ray_client.chat.completions.create(model="tiny", messages=chat, max_tokens=8, temperature=0)
    states = wait_for_replicas()
    before = counters_of(ray_cluster.url)
    name = 'choreograph:computed_tokens_total{model_name="tiny"}'
    assert before[name] >= sum(state.stats.num_batched_tokens for state in states) > 0
    for state in states:
        os.kill(state.process_id, signal.SIGKILL)
    wait_for_ready(ray_cluster.url, 503)
    assert httpx.get(f"{ray_cluster.url}/health").status_code == 200
    during = counters_of(ray_cluster.url)
    assert all(during[name] >= value for name, value in before.items())
    wait_for_ready(ray_cluster.url, 200)
    wait_for_replicas()
    after = counters_of(ray_cluster.url)
    assert all(after[name] >= value for name, value in during.items())
    chat = [{"role": "user", "content": "Count the boats at pier 9."}]
    ray_client.chat.completions.create(model="tiny", messages=chat, max_tokens=8, temperature=0)
    assert counters_of(ray_cluster.url)[name] > after[name]


@pytest.mark.slow
def test_a_replica_that_hangs_hides_no_other(ray_cluster):
    states = wait_for_replicas()
    before = counters_of(ray_cluster.url)
    os.kill(states[0].process_id, signal.SIGSTOP)
    try:
        assert httpx.get(f"{ray_cluster.url}/ready", timeout=60).status_code == 200
        during = counters_of(ray_cluster.url)
        assert all(during[name] >= value for name, value in before.items())
    finally:
        os.kill(states[0].process_id, signal.SIGCONT)
    wait_for_replicas()
    after = counters_of(ray_cluster.url)
    assert all(after[name] >= value for name, value in during.items())
