"""vLLM's server refuses wrong reuse with the reason. Needs no vLLM."""

import json

import httpx
import pytest

from choreograph.vllm import RequestChecks


async def echo(scope, receive, send):
    """Answer with the body of the request."""
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


async def post(body: bytes) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(RequestChecks(echo)), base_url="http://vllm") as client:
        return await client.post("/v1/completions", content=body)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"spans": [{"entry": "a", "stop": 3}]}, "choreograph.spans.0.at"),
        ({"repair": 1.5}, "choreograph.repair"),
        ({"mode": "fast"}, "choreograph.mode"),
        ({"alignment": [0.9, 0.8]}, "choreograph.alignment: Value error, vLLM's attention has one softmax scale"),
        ({"unknown": 1}, "choreograph.unknown"),
        ({"store": [{"entry": "", "start": 0}]}, "choreograph.store.0.entry"),
        (7, "choreograph"),
    ],
)
async def test_wrong_parameters_are_refused_by_name(params, reason):
    answer = await post(json.dumps({"prompt": [1], "kv_transfer_params": {"choreograph": params}}).encode())
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]


async def test_prompt_logprobs_with_spans_are_refused():
    params = {"choreograph": {"store": [{"entry": "a", "start": 0}]}}
    answer = await post(json.dumps({"prompt": [1], "prompt_logprobs": 1, "kv_transfer_params": params}).encode())
    assert answer.status_code == 400 and "prompt_logprobs" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [1], "kv_transfer_params": {"choreograph": {"mode": "exact"}}}',
        b'{"prompt": "choreograph"}',
        b'["choreograph"]',
        b"choreograph {",
        b"",
    ],
)
async def test_other_requests_pass_unchanged(body):
    answer = await post(body)
    assert answer.status_code == 200 and answer.content == body
