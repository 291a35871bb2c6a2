"""Events of plain text have the bytes of those that are serialized one by one."""

import asyncio
import json
import re

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from choreograph.server.engine_thread import ChoiceUpdate, UpdateQueue
from choreograph.server.openai.event_stream import TextEvents, sse
from choreograph.server.structured.output_parser import OutputParser


@given(st.text(st.characters()), st.integers(0, 3))  # surrogates included
def test_an_event_has_the_bytes_of_its_whole_json(text, index):
    def event(index, text):
        return sse({"id": "x", "choices": [{"index": index, "text": text, "logprobs": None}], "usage": None})

    events = TextEvents(event)
    assert events.event(index, "") == event(index, "") and events.event(index, text) == event(index, text)


BODIES = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Name a río."}], "n": 3}),
    "usage": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "stream_options": {"include_usage": True}},
    ),
    "prompts": ("/v1/completions", {"prompt": ["One", "Two"], "echo": True, "n": 2}),
    "stop": ("/v1/completions", {"prompt": "Three", "stop": ["not there"], "stream_options": {"include_usage": True}}),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_stream_has_the_bytes_of_one_without_shortcuts(live, monkeypatch, name):
    path, body = BODIES[name]
    body = {"model": "tiny", "max_tokens": 16, "seed": 5, "stream": True, "cache_salt": name, **body}

    def stream():
        text = httpx.post(f"{live.url}{path}", json=body).raise_for_status().text
        return re.sub(r'"id": "[^"]*"|"created": \d+', "", text)

    stream()  # fills the cache, which `usage` reports
    fast = stream()
    monkeypatch.setattr(OutputParser, "is_transparent", False)
    monkeypatch.setattr(TextEvents, "event", lambda self, index, text: self._event(index, text))
    assert fast == stream() and fast.count("data: {") > 3 and fast.endswith("data: [DONE]\n\n")


def test_updates_that_wait_are_read_at_once_and_an_error_after_them():
    updates, error = [ChoiceUpdate(0, text, [], []) for text in "abc"], ValueError("late")

    async def read():
        queue = UpdateQueue()
        reader = asyncio.create_task(queue.get())
        await asyncio.sleep(0)  # it waits
        for update in updates[:2]:
            queue.put_nowait([update])
        first = await reader
        queue.put_nowait([updates[2]])
        queue.put_nowait(error)
        return first, await queue.get(), await queue.get()

    assert asyncio.run(read()) == (updates[:2], updates[2:], error)


def test_an_error_in_a_stream_is_its_last_event(live, monkeypatch):
    body = {"model": "tiny", "prompt": "One", "max_tokens": 4, "stream": True}

    def fail(self, index, text):  # of every event but the first
        raise RuntimeError("broken")

    monkeypatch.setattr(TextEvents, "event", fail)
    events = httpx.post(f"{live.url}/v1/completions", json=body).raise_for_status().text.split("\n\n")
    assert events[0].startswith("data: ") and events[1].startswith("event: error\ndata: ") and events[2:] == [""]
    assert json.loads(events[1].splitlines()[1][6:])["error"]["message"] == "internal error"
