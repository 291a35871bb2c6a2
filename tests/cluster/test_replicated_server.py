"""Replicas on a local Ray answer as one server does, also where one of them dies."""

import os
import signal
import threading
import time

import httpx
import openai
import psutil
import pytest
from helpers.live_server import make_engine, serving
from ray import serve

PLAN = "\n".join(f"Step {number}: measure the river at mark {number} and write it down." for number in range(8))

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Name a bridge."}], "max_tokens": 8, "seed": 1}


@pytest.fixture(scope="module")
def single(talker_folder):
    """One server without Ray, for the expected answers."""
    with serving(make_engine(talker_folder)) as server:
        yield f"{server.url}/v1"


def loads():
    """Return the state of every replica."""
    handle = serve.get_deployment_handle("engine", "choreograph")
    return handle.broadcast("load").results(timeout_s=60, return_exceptions=True)


def without_ids(answer):
    return {name: value for name, value in answer.items() if name not in ("id", "created", "created_at")}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", CHAT | {"temperature": 1.0}),
        ("/chat/completions", CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2, "temperature": 0.7}),
        ("/chat/completions", CHAT | {"response_format": {"type": "json_object"}, "max_tokens": 24}),
        ("/completions", {"model": "tiny", "prompt": ["One", "Two"], "max_tokens": 4, "temperature": 0}),
        ("/chat/completions", CHAT | {"model": "other"}),
        ("/chat/completions", CHAT | {"temperature": -1}),
        ("/chat/completions", CHAT | {"max_tokens": 100_000}),
        ("/completions", {"model": "tiny", "prompt": "x", "choreography": {"schema": "absent"}}),
    ],
)
def test_answers_and_errors_are_those_of_one_server(ray_cluster, single, path, body):
    results = [httpx.post(base + path, json=body, timeout=60) for base in (f"{ray_cluster.url}/v1", single)]
    assert results[0].status_code == results[1].status_code
    assert without_ids(results[0].json()) == without_ids(results[1].json())


def test_status_routes_see_all_replicas(ray_cluster):
    assert httpx.get(f"{ray_cluster.url}/ready").json() == {"status": "ready"}
    metrics = httpx.get(f"{ray_cluster.url}/metrics").text
    assert "choreograph:num_requests_running" in metrics and "choreograph:computed_tokens_total" in metrics
    models = httpx.get(f"{ray_cluster.url}/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]


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


def read_stream(url, options, result, started):
    """Read an answer into `result`: texts, ids and finish reasons of its chunks."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=240) as client:
        body = CHAT | {"max_tokens": 600, "stream": True, "extra_body": {"ignore_eos": True}} | options
        if not body["stream"]:
            started.set()
            answer = client.chat.completions.create(**body)
            result.append((answer.choices[0].message.content, answer.id, answer.choices[0].finish_reason))
            return
        for chunk in client.chat.completions.create(**body):
            for choice in chunk.choices:
                result.append((choice.delta.content or "", chunk.id, choice.finish_reason))
            if len(result) == 40:
                started.set()


def start_streams(url, options):
    """Read several streams at once; return their results, events and threads."""
    results, events = [[] for _ in options], [threading.Event() for _ in options]
    threads = [
        threading.Thread(target=read_stream, args=(url, *arguments))
        for arguments in zip(options, results, events, strict=True)
    ]
    for thread in threads:
        thread.start()
    return results, events, threads


def test_streams_go_on_without_a_gap_after_kill_minus_9_of_a_replica(ray_cluster, single):
    # few candidates a token: among 49,000 equally likely ones, rounding would choose
    options = [{"temperature": 0}, {"temperature": 0.9, "seed": 7, "extra_body": {"ignore_eos": True, "top_k": 8}}]
    options += [options[1] | {"temperature": 0.8, "seed": 9, "presence_penalty": 0.5}]
    options += [{"temperature": 0, "stream": False}]
    loads()  # the first call connects
    expected, _, threads = start_streams(single, options)
    for thread in threads:
        thread.join(240)
    results, events, threads = start_streams(f"{ray_cluster.url}/v1", options)
    assert all(event.wait(120) for event in events)
    busy = max(loads(), key=lambda load: load.stats.num_running)
    assert busy.stats.num_running
    os.kill(busy.process_id, signal.SIGKILL)
    for thread in threads:
        thread.join(240)
    assert all(len(answer) for answer in expected)
    for result, answer in zip(results, expected, strict=True):
        assert "".join(text for text, _, _ in result) == "".join(text for text, _, _ in answer)
        assert len({chunk_id for _, chunk_id, _ in result}) == 1
        assert [reason for _, _, reason in result if reason] == ["length"]
    assert not psutil.pid_exists(busy.process_id)


def test_requests_are_answered_while_a_replica_is_missing_and_after_it_is_back(ray_cluster, ray_client):
    assert ray_client.chat.completions.create(**CHAT).usage.completion_tokens
    end = time.monotonic() + 120
    while len([load for load in loads() if not isinstance(load, Exception)]) < 2:
        assert time.monotonic() < end
        time.sleep(0.5)
    assert ray_client.chat.completions.create(**CHAT).usage.completion_tokens


def test_a_client_that_disconnects_cancels_its_request_on_the_replica(ray_cluster):
    body = CHAT | {"max_tokens": 4000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{ray_cluster.url}/v1/chat/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
    end = time.monotonic() + 60
    while any(load.stats.num_running for load in loads()):
        assert time.monotonic() < end
        time.sleep(0.2)
