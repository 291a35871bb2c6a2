"""Streams of answers from a server with replicas, and the state of its replicas."""

import threading
import time

import openai
from ray import serve

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Name a bridge."}], "max_tokens": 8, "seed": 1}


def loads():
    """Return the state of every replica, or the error of one that does not answer."""
    handle = serve.get_deployment_handle("engine", "choreograph")
    return handle.broadcast("load").results(timeout_s=60, return_exceptions=True)


def running_loads():
    """Return the state of every replica that answers."""
    return [load for load in loads() if not isinstance(load, Exception)]


def wait_for_replicas(count=2, seconds=240):
    """Wait until so many replicas answer; return their states."""
    end = time.monotonic() + seconds
    while len(result := running_loads()) != count:
        assert time.monotonic() < end
        time.sleep(0.5)
    return result


def read_stream(url, options, result, started):
    """Read an answer into `result`: texts, ids and finish reasons of its chunks."""
    body = CHAT | {"max_tokens": 600, "stream": True, "extra_body": {"ignore_eos": True}} | options
    with openai.OpenAI(base_url=url, api_key=body.pop("api_key", "none"), max_retries=0, timeout=240) as client:
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


def read_all(url, options):
    """Read several streams at once to their end; return their results."""
    results, _, threads = start_streams(url, options)
    join(threads)
    return results


def join(threads):
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive()


def assert_unbroken(results, expected):
    """Streams have the expected texts, one id and one end each."""
    assert all(len(answer) for answer in expected)
    for number, (result, answer) in enumerate(zip(results, expected, strict=True)):
        texts = ["".join(text for text, _, _ in chunks) for chunks in (result, answer)]
        common = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
        assert texts[0] == texts[1], f"stream {number} differs from character {common} on: {texts}"
        assert len({chunk_id for _, chunk_id, _ in result}) == 1
        assert [reason for _, _, reason in result if reason] == ["length"]
