"""Chats, completions and responses give one answer alike, whole or streamed, however its text arrives."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph.outputs import TokenLogprob
from choreograph.sampling_params import SamplingParams
from choreograph.server.engine_thread import ChoiceUpdate
from choreograph.server.openai.answer_loop import AnswerLoop, AnswerOptions
from choreograph.server.openai.chat_completions import ChatEncoder
from choreograph.server.openai.chat_prompt import ChatPrompt
from choreograph.server.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest
from choreograph.server.openai.responses_api import ResponseEncoder
from choreograph.server.openai.text_completions import CompletionEncoder
from choreograph.server.openai.token_text import TokenBytes

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1e400, "b": "</tool_call>"}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1.0}}'
PARTS = [
    "<think>",
    "</think>",
    CALL,
    LLAMA,
    "<tool_call>",
    "</tool_call>",
    "\n",
    "; ",
    "<",
    "a b",
    "é",
    "😀",
    " STOP",
    "{",
]
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def service(talker):
    return SimpleNamespace(engine=talker, token_bytes=TokenBytes(talker.chat), pool=None)


class FakeRequest:
    """A request whose answers are given: what `RunningRequest` is to the routes."""

    def __init__(self, updates, sampling):
        self.spec = SimpleNamespace(
            prompts=[ChatPrompt([5, 6])], num_answers=1, reuse="exact", sampling=sampling, sent=()
        )
        self.num_choices, self.finish_reasons, self._updates = 1, [None], updates

    def name_response(self, response_id, model):
        pass

    def usage(self):
        number = sum(len(update.token_ids) for update in self._updates)
        counts = {"prompt_tokens": 2, "completion_tokens": number, "total_tokens": number + 2}
        return counts | {"prompt_tokens_details": {}, "choreography": {}}

    async def updates(self):
        for update in self._updates:
            yield [update]


def updates_of(service, text, cuts, sampling, finish_reason):
    """Updates of an engine that generates a text, and ends it before the first stop string."""
    tokens = service.engine.tokenizer.encode(text, add_special_tokens=False)
    detokenizer = service.token_bytes.detokenizer([5, 6], skip_special=True)
    pieces = [detokenizer.step(token) for token in tokens]
    total, kept = "", []
    for token, piece in zip(tokens, pieces, strict=True):
        total += piece
        kept.append((token, len(total)))
        if any(stop in total for stop in sampling.stop):
            break
    else:
        total += detokenizer.flush()
    end = min((total.index(stop) for stop in sampling.stop if stop in total), default=len(total))
    held = max(map(len, sampling.stop), default=1) - 1
    reason = "stop" if end < len(total) else finish_reason
    groups, sent, position = [], 0, 0
    for cut in [*sorted({min(cut, len(kept)) for cut in cuts} - {0}), len(kept)]:
        group, is_last = kept[position:cut], cut == len(kept)
        position = cut
        if not group and not is_last:
            continue
        until = end if is_last else max(sent, min(end, group[-1][1] - held))
        logprobs = [TokenLogprob(token, -1.0, {token: -1.0, 9: -2.0}) for token, _ in group]
        logprobs = logprobs if sampling.logprobs is not None else []
        ids = [token for token, _ in group]
        groups.append(ChoiceUpdate(0, total[sent:until], ids, logprobs, reason if is_last else None))
        sent = until
        if is_last:
            break
    return groups, total[:end], reason


def read_events(events):
    async def read():
        return "".join([event async for event in events])

    lines = asyncio.run(read()).split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def whole(loop, encoder):
    return asyncio.run(loop.whole(encoder))


def streamed(loop, encoder):
    return read_events(loop.events(encoder))


def fold_chat(events):
    message = {"content": "", "reasoning_content": "", "tool_calls": [], "logprobs": [], "token_ids": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            message["tool_calls"] += [call["function"] for call in delta.get("tool_calls", ())]
            message["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            message["token_ids"] += choice.get("token_ids", [])
            message["finish_reason"] = choice["finish_reason"]
    return message


def whole_chat(body):
    (choice,) = body["choices"]
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": [call["function"] for call in message.get("tool_calls", ())],
        "logprobs": (choice["logprobs"] or {"content": []})["content"],
        "token_ids": choice["token_ids"],
        "finish_reason": choice["finish_reason"],
    }


def message_of(response):
    """A response as the message that a chat has."""
    parts = [(item["type"], part) for item in response["output"] for part in item.get("content", ())]
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    return {
        "content": "".join(part["text"] for kind, part in parts if kind == "message"),
        "reasoning_content": "".join(part["text"] for kind, part in parts if kind == "reasoning"),
        "tool_calls": [{"name": item["name"], "arguments": item["arguments"]} for item in calls],
        "logprobs": [entry for kind, part in parts if kind == "message" for entry in part["logprobs"]],
    }


@settings(max_examples=many(150), deadline=None)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=8),
    cuts=st.lists(st.integers(1, 60), max_size=8),
    options=st.builds(
        AnswerOptions,
        st.sampled_from([None, "hermes", "llama3_json"]),
        st.just(frozenset({"add"})),
        st.booleans(),
        single_call=st.booleans(),
    ),
    stop=st.sampled_from([(), ("STOP",), ("b", "TOP S")]),
    has_logprobs=st.booleans(),
    finish_reason=st.sampled_from(["stop", "length"]),
)
def test_all_routes_agree_whole_or_streamed(service, parts, cuts, options, stop, has_logprobs, finish_reason):
    sampling = SamplingParams(stop=stop, logprobs=1 if has_logprobs else None)
    updates, text, reason = updates_of(service, "".join(parts), cuts, sampling, finish_reason)
    single, *_ = updates_of(service, "".join(parts), [], sampling, finish_reason)
    common = {"model": "tiny", "return_token_ids": True}
    body = ChatCompletionRequest(messages=MESSAGES, logprobs=has_logprobs, top_logprobs=int(has_logprobs), **common)

    options = replace(options, returns_ids=True)

    def loop(items):
        return AnswerLoop(service, FakeRequest(items, sampling), options)

    def chat(get, items):
        chat_loop = loop(items)
        return get(chat_loop, ChatEncoder(chat_loop, body))

    expected = whole_chat(chat(whole, single))
    assert whole_chat(chat(whole, updates)) == expected
    assert fold_chat(chat(streamed, updates)) == expected
    assert expected["finish_reason"] == ("tool_calls" if expected["tool_calls"] and reason == "stop" else reason)

    request = ResponsesRequest(model="tiny", input="x", top_logprobs=int(has_logprobs))
    loops = [loop(updates), loop(updates)]
    first = whole(loops[0], ResponseEncoder(loops[0], request, []))
    second = streamed(loops[1], ResponseEncoder(loops[1], request, []))[-1]["response"]
    for response in (first, second):
        assert message_of(response).items() <= expected.items()
        assert response["status"] == ("incomplete" if reason == "length" else "completed")
        assert response["usage"]["output_tokens_details"] == first["usage"]["output_tokens_details"]

    completion = CompletionRequest(prompt="x", logprobs=1 if has_logprobs else None, **common)
    options = AnswerOptions(returns_ids=True)
    loops = [loop(updates), loop(updates)]
    (choice,) = whole(loops[0], CompletionEncoder(loops[0], completion))["choices"]
    chunks = [chunk["choices"][0] for chunk in streamed(loops[1], CompletionEncoder(loops[1], completion))]
    assert choice["text"] == "".join(chunk["text"] for chunk in chunks) == text
    assert choice["token_ids"] == [token for chunk in chunks for token in chunk["token_ids"]] == expected["token_ids"]
    if has_logprobs:
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert choice["logprobs"][name] == [item for chunk in chunks for item in chunk["logprobs"][name]]
        assert len(choice["logprobs"]["tokens"]) == len(expected["token_ids"])


@settings(max_examples=many(100), deadline=None)
@given(text=st.text(st.sampled_from('a <>{}"\n é😀日'), max_size=30), cuts=st.lists(st.integers(1, 40), max_size=5))
def test_bytes_of_log_probabilities_join_to_the_content(service, text, cuts):
    sampling = SamplingParams(logprobs=0)
    updates, total, _ = updates_of(service, text, cuts, sampling, "stop")
    body = ChatCompletionRequest(model="tiny", messages=MESSAGES, logprobs=True)
    for options in (AnswerOptions(), AnswerOptions("hermes", frozenset({"add"}))):
        loop = AnswerLoop(service, FakeRequest(updates, sampling), options)
        (choice,) = whole(loop, ChatEncoder(loop, body))["choices"]
        entries = choice["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries) == choice["message"]["content"].encode()
        assert choice["message"]["content"] == total == text
