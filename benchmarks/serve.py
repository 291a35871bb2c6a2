"""The server: its overhead against the engine in process, and a debate over HTTP in `exact` and `auto`.

make bench NAME=serve
make bench NAME=serve ARGS="--peer vllm=http://127.0.0.1:8100 --peer llama.cpp=http://127.0.0.1:8200"

Peers are OpenAI-compatible servers of the same model that already run, with the same number of threads. A debate has
three debaters and two rounds; every prompt of the second round, and the judge's, quotes what was said before.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from .common import Row, engine, greedy, interleaved, median_row, random_tokens, ratio_row, save

STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64, 64
SPEECH_TOKENS, DEBATERS = 160, 3
QUESTION = "Question {}: should a small town build a second bridge over its river, and who should pay for it?"


class Turn(NamedTuple):
    """One answer of a debate."""

    text: str
    ttft: float  # seconds
    quotes: bool  # the prompt quotes other answers
    computed: int  # prompt tokens that the server computed; -1: it does not say


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """A server of the bundled model in a process of its own; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "choreograph", "serve", "--port", str(port), "--log-level", "warning", *arguments]
    process = subprocess.Popen([*command, "--compile", "--dtype", "bfloat16", "--capacity", "16384"])
    try:
        url = f"http://127.0.0.1:{port}"
        while True:
            try:
                httpx.get(f"{url}/ready").raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None, "the server has ended"
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


async def stream(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> tuple[str, float, dict[str, Any]]:
    """(text, seconds to the first text, usage) of a streamed request."""
    start, first, pieces, usage = time.perf_counter(), None, [], {}
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
                if piece:
                    first = first or time.perf_counter() - start
                    pieces.append(piece)
    return "".join(pieces), first or time.perf_counter() - start, usage


async def debate(url: str, model: str, number: int, extra: Mapping[str, Any]) -> list[Turn]:
    """The answers of one debate; `extra` is added to every body."""
    question, turns = QUESTION.format(number), list[Turn]()
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def ask(system: str, user: str, *, quotes: bool = True) -> str:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
            body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": SPEECH_TOKENS, **extra}
            text, ttft, usage = await stream(client, "/v1/chat/completions", body)
            turns.append(Turn(text, ttft, quotes, usage.get("choreography", {}).get("computed_tokens", -1)))
            return text

        roles = [f"You are debater {one}. Argue in a few sentences." for one in range(1, DEBATERS + 1)]
        speeches = [await ask(role, question, quotes=False) for role in roles]
        quoted = [f"Debater {one} said:\n{speech}" for one, speech in enumerate(speeches, 1)]
        speeches = [
            await ask(r, "\n\n".join([question, *(q for q in quoted if q is not own)]))
            for r, own in zip(roles, quoted, strict=True)
        ]
        quoted += [f"Debater {one} then said:\n{speech}" for one, speech in enumerate(speeches, 1)]
        await ask("You judge debates. Name the winner.", "\n\n".join([question, *quoted]))
    return turns


def throughput_rows(url: str, model: str, rounds: int) -> list[Row]:
    """Tokens per second of the server and of the engine in process, at STREAMS streams."""
    local, seeds = engine(), iter(range(1 << 30))

    def tokens_per_second(run: Callable[[list[list[int]]], object]) -> float:
        seed = next(seeds) * STREAMS
        prompts = [random_tokens(PROMPT_TOKENS, seed + one) for one in range(STREAMS)]
        start = time.perf_counter()
        run(prompts)
        return STREAMS * OUTPUT_TOKENS / (time.perf_counter() - start)

    def in_process(prompts: list[list[int]]) -> None:
        with local.session(mode="prefix") as session:
            for message in [session.decode(prompt, sampling=greedy(OUTPUT_TOKENS)) for prompt in prompts]:
                message.result()

    async def over_http(prompts: list[list[int]]) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            body = {"model": model, "temperature": 0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
            await asyncio.gather(*(stream(client, "/v1/completions", {**body, "prompt": p}) for p in prompts))

    def served(prompts: list[list[int]]) -> None:
        asyncio.run(over_http(prompts))

    sides = (lambda: tokens_per_second(served), lambda: tokens_per_second(in_process))
    interleaved(1, *sides)  # warm
    server, process = interleaved(rounds, *sides)
    what = f"{STREAMS} streams"
    return [
        median_row(f"server, {what}", server, "tokens/s"),
        median_row(f"engine in process, {what}", process, "tokens/s"),
        ratio_row(f"server against engine in process, {what}", server, process, required=0.95),
    ]


def debate_rows(sides: Mapping[str, tuple[str, str, Mapping[str, Any]]], rounds: int) -> list[Row]:
    """Time to first token of quoting turns and time of whole debates, by side."""
    ttfts: dict[str, list[float]] = {name: [] for name in sides}
    totals: dict[str, list[float]] = {name: [] for name in sides}
    computed: dict[str, list[float]] = {name: [] for name in sides}
    equal: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        answers: dict[str, list[str]] = {}
        for name, (url, model, extra) in sides.items():
            start = time.perf_counter()
            turns = asyncio.run(debate(url, model, number, extra))
            seconds, answers[name] = time.perf_counter() - start, [turn.text for turn in turns]
            if number == 0:  # warm
                continue
            totals[name].append(seconds)
            ttfts[name].append(statistics.mean(turn.ttft for turn in turns if turn.quotes))
            computed[name].append(sum(turn.computed for turn in turns if turn.quotes))
            equal[name].append(statistics.mean(a == b for a, b in zip(answers[name], answers["exact"], strict=True)))
    rows = []
    for name in sides:
        rows.append(median_row(f"{name}: time to first token where prompts quote", ttfts[name], "s", better="lower"))
        rows.append(median_row(f"{name}: debate", totals[name], "s", better="lower"))
        if min(computed[name]) >= 0:
            rows.append(
                median_row(
                    f"{name}: prompt tokens computed where prompts quote", computed[name], "tokens", better="lower"
                )
            )
        rows.append(median_row(f"{name}: answers equal to exact", equal[name], "share"))
    for name in sides:
        if name != "auto":
            rows.append(ratio_row(f"time to first token, {name} over auto", ttfts[name], ttfts["auto"], target=3))
            rows.append(ratio_row(f"debate, {name} over auto", totals[name], totals["auto"], target=1))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer", action="append", default=[], help="name=address of another server")
    arguments = parser.parse_args()
    with serving() as url:
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        sides: dict[str, tuple[str, str, Mapping[str, Any]]] = {
            reuse: (url, model, {"choreography": {"reuse": reuse, "workflow": "debate"}}) for reuse in ("exact", "auto")
        }
        for peer in arguments.peer:
            name, _, address = peer.partition("=")
            sides[name] = address, httpx.get(f"{address}/v1/models").json()["data"][0]["id"], {}
        rows = debate_rows(sides, arguments.rounds) + throughput_rows(url, model, arguments.rounds)
    save("serve", rows, peers=arguments.peer)


if __name__ == "__main__":
    main()
