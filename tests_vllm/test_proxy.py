"""The proxy in front of a vLLM server: quotes are reused, and what is not reused stays exact."""

import json

import httpx
import pytest
from helpers.live_proxy import serving_proxy
from vllm_server import MODEL, VllmServer

from choreograph.server.proxy.upstream_store import SOURCES

LEFT, RIGHT = (
    "The old mill on the river has ground corn for the town.",
    "A ferry crosses twice a day, and once in winter.",
)
SYSTEM = {"role": "system", "content": "You compare what people say."}
EXACT = {"kv_transfer_params": {"choreograph": {"mode": "exact"}}}


@pytest.fixture(scope="module")
def server(tiny_model):
    result = VllmServer(tiny_model("starts").folder)
    result.start()
    yield result
    result.stop()


@pytest.fixture
def ask(server):
    """Return the answer of the proxy to messages, and its tokens by source."""
    with serving_proxy(server.url) as (url, proxy):

        def post(*messages, **body):
            options = {"model": MODEL, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            reply = httpx.post(f"{url}/v1/chat/completions", json=options | {"messages": messages} | body, timeout=120)
            assert reply.is_success, reply.text
            answer = reply.json()
            return answer["choices"][0]["message"], answer["usage"].get("choreography")

        post.url, post.store = url, proxy.store
        yield post


def user(text):
    return {"role": "user", "content": text}


def exact(server, *messages):
    reply = server.post("/v1/chat/completions", messages=messages, max_tokens=12, ignore_eos=True, **EXACT)
    return reply.json()["choices"][0]["message"]


def test_quotes_are_reused_and_a_full_repair_is_exact(server, ask):
    chat = [user(f"Ann said: {RIGHT} Bob said: {LEFT} So?")]
    expected = exact(server, *chat)
    first, sources = ask(SYSTEM, user(LEFT), user(RIGHT))
    assert first == exact(server, SYSTEM, user(LEFT), user(RIGHT)) and not sources["quoted_tokens"]
    _, sources = ask(*chat)
    assert sources["quoted_tokens"] >= len(LEFT) + len(RIGHT) and sources["computed_tokens"] < 50
    assert ask(*chat, choreography={"repair": 1})[0] == expected == exact(server, *chat)


def test_a_chat_that_continues_is_exact_and_its_stream_is_the_servers(server, ask):
    chat = [SYSTEM, user(LEFT)]
    for text in (RIGHT, "How long is the way along the bank?", "Who painted that chapel?"):
        answer, sources = ask(*chat)
        assert answer == exact(server, *chat)
        chat += [answer, user(text)]
    assert sources["prefix_tokens"] > len(LEFT + RIGHT) and not sources["quoted_tokens"] + sources["message_tokens"]

    def stream(url, **options):
        """Return the text, the reasons and the fields of a stream; vLLM joins tokens that wait to be sent."""
        body = {"model": MODEL, "messages": chat[:-1], "max_tokens": 8, "temperature": 0, "stream": True} | options
        content = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).content.decode()
        *events, last = [line.removeprefix("data: ") for line in content.split("\n\n") if line]
        assert last == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        fields = {key for event in events for key in json.loads(event)} | {key for choice in choices for key in choice}
        return text, [choice["finish_reason"] for choice in choices if choice["finish_reason"]], fields

    assert stream(ask.url) == stream(server.url, **EXACT)


def test_entries_that_are_gone_are_computed_again(server, ask):
    chats = [[SYSTEM, user(f"{n}: {LEFT}"), user(RIGHT)] for n in range(3)]
    answers = [ask(*chat)[0] for chat in chats]
    names = [name for tenant in ask.store._tenants.values() for name in tenant.entries]
    server.complete([0], {"mode": "exact", "workflow": "default", "release": names})
    reply = server.complete([0], {"workflow": "default", "query": names})
    assert len(reply["kv_transfer_params"]["choreograph"]["missing"]) == len(names)
    again, sources = ask(*chats[0])
    assert again == answers[0] and sources["computed_tokens"] == sum(sources[f"{s}_tokens"] for s in SOURCES)
    assert ask(*chats[0])[1]["computed_tokens"] < 20


def test_requests_that_fail_are_answered_as_by_the_server(server, ask):
    for body in (
        {"messages": []},
        {"max_tokens": 1 << 20},
        {"temperature": -1},
        {"model": "unknown"},
        {"logit_bias": 5},
    ):
        options = {"model": MODEL, "messages": [user(LEFT)]} | body
        replies = [httpx.post(f"{url}/v1/chat/completions", json=options) for url in (ask.url, server.url)]
        assert replies[0].status_code == replies[1].status_code >= 400
        assert replies[0].json() == replies[1].json()
