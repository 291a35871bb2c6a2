"""Errors, keys, tenants, cancellation, limits and the end of a server."""

import threading
import time
from functools import partial

import httpx
import openai
import pytest
from helpers.inspect_engine import inspect
from helpers.live_server import make_engine, serving

ASK = [{"role": "user", "content": "Which river flows through Paris?"}]
LONG = {"model": "tiny", "messages": ASK, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
KEYS = ("first-secret", "second-secret")


@pytest.mark.parametrize(
    ("change", "status", "param", "code"),
    [
        ({"foo": 1}, 400, "foo", "unknown_parameter"),
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"model": None}, 400, "model", "invalid_value"),
        ({"messages": []}, 400, "messages", "invalid_value"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role", "invalid_value"),
        ({"temperature": -1}, 400, "temperature", None),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", None),
        ({"n": 1000}, 400, "n", None),
        ({"max_tokens": 9000}, 400, "messages", "context_length_exceeded"),
        ({"tool_choice": "required"}, 400, "tool_choice", None),
        ({"structured_outputs": {"regex": "("}}, 400, "regex", None),
        ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, 400, "json", None),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format", "invalid_value"),
        ({"choreography": {"reuse": "all"}}, 400, "choreography.reuse", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content",
            "invalid_value",
        ),
    ],
)
def test_invalid_requests_have_the_errors_of_openai(live, change, status, param, code):
    body = {"model": "tiny", "messages": ASK, "max_tokens": 2} | change
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error
    assert error["type"] == "invalid_request_error" and error["message"]


def test_request_ids_are_returned_and_unknown_paths_are_404(live):
    answer = httpx.get(f"{live.url}/v1/nothing", headers={"x-request-id": "abc"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (404, "abc")
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(httpx.get(f"{live.url}/health").headers["x-request-id"]) == 32


def test_status_routes_answer_while_a_step_runs(live, client, monkeypatch):
    has_entered, may_continue = threading.Event(), threading.Event()
    forward = inspect(live.engine).runner.forward

    def slow_forward(batch):
        has_entered.set()
        assert may_continue.wait(60)
        return forward(batch)

    monkeypatch.setattr(inspect(live.engine).runner, "forward", slow_forward)
    ask = partial(client.chat.completions.create, model="tiny", messages=ASK, max_tokens=1)
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert has_entered.wait(60)
        for route in ("health", "ready", "version", "v1/models", "metrics"):
            answer = httpx.get(f"{live.url}/{route}", timeout=20)
            assert answer.status_code == 200
        assert 'num_requests_running{model_name="tiny"} 1.0' in answer.text
    finally:
        may_continue.set()
        thread.join(60)
    live.wait_until_idle()


def test_a_client_that_leaves_a_stream_cancels_its_request(live, client):
    stream = client.chat.completions.create(**LONG, stream=True)
    for _ in range(3):
        next(stream)
    assert live.engine.stats().num_running == 1
    num_generated = live.engine.stats().events["token"]
    stream.close()
    live.wait_until_idle()
    assert live.engine.stats().events["token"] - num_generated < 500
    live.engine.check()


def test_a_client_that_leaves_before_the_answer_cancels_its_request(live):
    body = {name: LONG[name] for name in ("model", "messages", "max_tokens")} | LONG["extra_body"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=0.5)
    num_finished = live.engine.stats().events.get("finished", 0)
    live.wait_until_idle()
    assert live.engine.stats().events.get("finished", 0) == num_finished


@pytest.fixture(scope="module")
def guarded(talker_folder):
    """A server with keys and narrow limits."""
    options = {"api_keys": KEYS, "max_requests": 1, "max_body_bytes": 2000, "cors_origins": ("https://page.example",)}
    with serving(make_engine(talker_folder), **options) as server:
        yield server


def connect(server, key, **options):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, **options)


def test_a_key_is_needed_and_status_routes_need_none(guarded):
    for headers in ({}, {"authorization": "Bearer wrong-secret"}, {"authorization": f"Basic {KEYS[0]}"}):
        answer = httpx.post(f"{guarded.url}/v1/chat/completions", json={}, headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{guarded.url}/v1/models").status_code == 401
    assert httpx.post(f"{guarded.url}/tokenize", json={"prompt": "x"}).status_code == 401
    assert httpx.get(f"{guarded.url}/health").status_code == 200


@pytest.mark.parametrize("reuse", ["exact", "messages", "auto"])
def test_no_tenant_finds_the_cache_of_another(guarded, reuse):
    messages = [{"role": "user", "content": f"A secret of {reuse} that only one tenant has told. " * 3}]
    body = {"choreography": {"reuse": reuse, "workflow": "w"}}

    def cached(key, **extra):
        answer = connect(guarded, key).chat.completions.create(
            model="tiny", messages=messages, max_tokens=2, extra_body=body | extra
        )
        guarded.wait_until_idle()
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached(KEYS[0]) < 30  # the template's own system message may be cached
    assert cached(KEYS[0]) > 30
    assert cached(KEYS[0], cache_salt="other") < 30
    assert cached(KEYS[1]) < 30


def test_no_tenant_reads_the_responses_of_another(guarded):
    first = connect(guarded, KEYS[0]).responses.create(model="tiny", input="Hello", max_output_tokens=2)
    assert connect(guarded, KEYS[0]).responses.retrieve(first.id).id == first.id
    with pytest.raises(openai.NotFoundError):
        connect(guarded, KEYS[1]).responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        connect(guarded, KEYS[1]).responses.create(model="tiny", input="Go on", previous_response_id=first.id)


def test_large_bodies_and_full_queues_are_refused(guarded):
    client = connect(guarded, KEYS[0])
    with pytest.raises(openai.APIStatusError) as too_large:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 3000}])
    assert too_large.value.status_code == 413
    guarded.wait_until_idle()
    stream = client.chat.completions.create(**LONG, stream=True)
    next(stream)
    with pytest.raises(openai.RateLimitError) as full:
        client.chat.completions.create(model="tiny", messages=ASK)
    assert full.value.response.headers["retry-after"] == "1"
    stream.close()
    guarded.wait_until_idle()
    assert client.chat.completions.create(model="tiny", messages=ASK, max_tokens=1).usage.completion_tokens == 1


def test_browsers_may_call_from_the_listed_origins(guarded):
    headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
    answer = httpx.options(f"{guarded.url}/v1/chat/completions", headers=headers)
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    refused = httpx.options(f"{guarded.url}/v1/models", headers=headers | {"origin": "https://other.example"})
    assert "access-control-allow-origin" not in refused.headers


def test_running_requests_end_before_a_server_that_shuts_down(talker_folder):
    with serving(make_engine(talker_folder)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        chunks: list[object] = []
        stream = client.chat.completions.create(**LONG | {"max_tokens": 120}, stream=True)
        next(stream)
        thread = threading.Thread(target=lambda: chunks.extend(stream))
        thread.start()
        server.server.should_exit = True  # as SIGTERM does
        thread.join(60)
        assert chunks[-1].choices[0].finish_reason == "length"
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_a_request_that_takes_too_long_is_cancelled(talker_folder):
    with serving(make_engine(talker_folder), request_timeout=0.3) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        start = time.monotonic()
        with pytest.raises(openai.APIStatusError) as slow:
            client.chat.completions.create(**LONG)
        assert slow.value.status_code == 408 and time.monotonic() - start < 20
        server.wait_until_idle()


def test_without_max_tokens_an_answer_ends_where_the_cache_does(talker_folder):
    with serving(make_engine(talker_folder, tokens=256), max_tokens=None) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(model="tiny", messages=ASK, extra_body={"ignore_eos": True})
        server.wait_until_idle()
        assert answer.choices[0].finish_reason == "length"
        prompt = server.engine.tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)
        with server.engine.session(mode="prefix", client_id="test") as session:
            same = session.decode(prompt, max_tokens=None, ignore_eos=True)
            assert answer.usage.completion_tokens == len(same.output_token_ids) > 150
