"""Public reports on streams, tool calls, usage and log-probabilities: a stream says what the whole answer says."""

import json

import httpx
import pytest
from helpers.forced_answers import ASK, TOOLS, arguments_of, call, chat, forced, tool

UTC = json.dumps({"zone": "UTC"})
LONG = json.dumps({"zone": "a zone of many words that go on and on"})


def strict(text):
    """Parse JSON; Infinity and NaN are no JSON."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def post(live, path, **body):
    body = {"model": "tiny", "temperature": 0, "max_tokens": 60, **body}
    reply = httpx.post(f"{live.url}/v1/{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return strict(reply.text)


def stream(live, path, **body):
    """Return the chunks of a stream."""
    body = {"model": "tiny", "temperature": 0, "max_tokens": 60, "stream": True, **body}
    reply = httpx.post(f"{live.url}/v1/{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [strict(event) for event in events[:-1]]


CHAT, TEXT = "chat/completions", "completions"
CALLS = {"messages": ASK, "tools": TOOLS}


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_time"}}])
def test_a_call_that_is_cut_is_told_as_cut_in_a_stream_too(live, client, choice):
    text = LONG if choice != "auto" else call(LONG)
    num_tokens = len(live.engine.tokenizer.encode(text))
    seen = set()
    for limit in range(2, num_tokens + 6, 5):
        options = {"tools": TOOLS, "tool_choice": choice, "max_tokens": limit}
        options |= {"text": text} if choice == "auto" else {"extra_body": {"seed": 1}}
        whole, streamed = (chat(client, **options, stream=is_stream) for is_stream in (False, True))
        assert streamed.finish_reason == whole.finish_reason, limit
        assert arguments_of(streamed) == arguments_of(whole)
        if whole.finish_reason == "tool_calls":
            assert [json.loads(arguments) for arguments in arguments_of(whole)]
        seen.add(whole.finish_reason)
    assert "length" in seen


def test_a_named_call_ends_for_the_same_reason_in_a_stream(client):
    options = {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "get_time"}}}
    whole, streamed = (chat(client, stream=is_stream, **options) for is_stream in (False, True))
    assert whole.finish_reason == streamed.finish_reason != "length"
    assert [json.loads(arguments) for arguments in arguments_of(streamed)] == [{}]


@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
def test_id_and_name_of_a_call_are_sent_once_and_its_arguments_add_up(live, usage):
    options = {"stream_options": usage} if usage else {}
    chunks = stream(live, CHAT, **CALLS, **forced(call(UTC) + call(LONG)), max_tokens=300, **options)
    deltas = [d for c in chunks for x in c["choices"] for d in x["delta"].get("tool_calls") or ()]
    for index, arguments in enumerate((UTC, LONG)):
        parts = [delta for delta in deltas if delta["index"] == index]
        for name in ("id", "type"):
            assert [name in part and part[name] is not None for part in parts] == [True, *[False] * (len(parts) - 1)]
        assert [bool(part["function"].get("name")) for part in parts] == [True, *[False] * (len(parts) - 1)]
        assert "".join(part["function"].get("arguments") or "" for part in parts) == arguments
        assert len(parts) == 1  # a call is sent when it is complete, so that a part of one is never taken for it


def test_every_chunk_has_a_finish_reason_and_the_one_that_ends_has_no_text(live):
    for limit, reason in ((300, "stop"), (3, "length")):
        chunks = stream(live, CHAT, messages=ASK, **forced("one two three four"), max_tokens=limit)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert all("finish_reason" in choice for choice in choices)
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [reason]
        assert choices[-1]["finish_reason"] == reason and not choices[-1]["delta"].get("content")


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_usage_is_sent_where_it_is_asked_for_alone(live, path, options):
    body = {"messages": ASK} if path == CHAT else {"prompt": "One"}
    body |= {} if options is None else {"stream_options": options}
    chunks = stream(live, path, **body, max_tokens=3)
    assert all(chunk["choices"] for chunk in chunks) and not any(chunk.get("usage") for chunk in chunks)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("options", [{}, {"n": 3, "seed": 1, "temperature": 1}, {"stop": ["e"]}, {"max_tokens": 1}])
def test_usage_of_a_stream_is_in_one_last_chunk_without_choices(live, path, options):
    body = {"messages": ASK} if path == CHAT else {"prompt": "One"}
    body |= {"max_tokens": 12} | options | {"cache_salt": f"{path} {options}"}
    post(live, path, **body)  # fills the cache, which usage reports
    whole = post(live, path, **body)["usage"]
    *chunks, last = stream(live, path, **body, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"] == whole and whole["completion_tokens"] > 0
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("is_stream", [False, True])
def test_log_probabilities_of_excluded_tokens_are_json(live, is_stream):
    """Tokens that a grammar or top_k excludes have a probability of 0, whose logarithm is no JSON."""
    ask = stream if is_stream else post
    for body in (
        {"structured_outputs": {"choice": ["positive", "negative"]}},
        {"structured_outputs": {"regex": "[ab]{3}"}},
        {"top_k": 1, "temperature": 1},
        {"logit_bias": {"5": -100, "6": 100}, "max_tokens": 4},
    ):
        result = ask(live, CHAT, messages=ASK, logprobs=True, top_logprobs=5, **body)
        assert "logprob" in json.dumps(result)
    for body in ({"echo": True, "top_k": 1, "temperature": 1}, {"echo": True, "min_p": 1.0, "temperature": 1}):
        result = ask(live, TEXT, prompt="correct horse", logprobs=1, max_tokens=4, **body)
        assert "token_logprobs" in json.dumps(result)


def test_log_probabilities_of_a_stream_are_those_of_the_whole(live):
    body = {"messages": ASK, "logprobs": True, "top_logprobs": 2, "max_tokens": 8}
    whole = post(live, CHAT, **body)["choices"][0]["logprobs"]["content"]
    chunks = stream(live, CHAT, **body)
    parts = [part for c in chunks for x in c["choices"] for part in (x.get("logprobs") or {}).get("content") or ()]
    assert [part["token"] for part in parts] == [part["token"] for part in whole]
    assert [part["logprob"] for part in parts] == pytest.approx([part["logprob"] for part in whole], abs=1e-4)
