"""Requests that are made to stop a server, sent to a running one next to eight ordinary streams.

make bench NAME=hostile                       # every request on the bundled model
make bench NAME=hostile ARGS="--only chat --dtype float32"

Streams belong to one tenant, hostile requests to another. For each: seconds until it is answered (at most 2), the longest
time to answer /health meanwhile (at most 100 ms), the longest gap between two tokens of a stream against the longest one
of a quiet time (at most 2x), and the memory that the server's processes keep (at most 50 MB). Exits with 1 otherwise.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import psutil

from .common import Row, save
from .load import CAPACITY, KEYS, server

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NUM_STREAMS = 8
QUIET_SECONDS = 20.0
SETTLE_SECONDS = 6.0  # for memory to be returned

MAX_MEMORY = 50.0  # MB
FIGURES = (  # what is measured of every attack, its unit and limit
    ("answered after", "s", 2.0),
    ("longest /health", "ms", 100.0),
    ("longest gap over quiet", "x", 2.0),
    ("memory kept", "MB", MAX_MEMORY),
)


@dataclass(frozen=True)
class Attack:
    """One kind of hostile request."""

    name: str
    path: str
    body: bytes
    method: str = "POST"
    statuses: tuple[int, ...] = (400,)  # right answers


def _chat(content: Any = "Hi", **options: Any) -> dict[str, Any]:
    return {"model": "model", "messages": [{"role": "user", "content": content}], "max_tokens": 4, **options}


def _attack(name: str, body: Any, path: str = CHAT, **options: Any) -> Attack:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Attack(name, path, data, **options)


def _chain(count: int) -> str:
    rules = "".join(f'a{i}: a{i + 1} a{i + 1} | "x"\n' for i in range(count))
    return f'start: a0\n{rules}a{count}: "y"'


def _references(count: int) -> dict[str, Any]:
    links = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
        for i in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "string"}}}


def attacks(number: int = 0) -> Iterator[Attack]:
    """Yield all hostile requests. number: of the round, so that no cache has the prompt of a valid one."""
    ok = (200, 400)
    for count in (400, 1600, 2000, 100_000):
        for reuse in ("exact", "messages"):
            messages = [{"role": "user", "content": "abcdefghij"[number % 10]}] * count
            body = _chat() | {"messages": messages, "choreography": {"reuse": reuse}}
            yield _attack(
                f"chat of {count} one-letter messages, {reuse}", body, statuses=ok if count < 3000 else (400,)
            )
    for count in (100, 1000, 2000, 10_000):
        stop = [f"stop {i}" for i in range(count)]
        yield _attack(f"{count} stop strings", _chat(stop=stop), statuses=ok)
    yield _attack("1.5 million words", _chat("word " * 1_500_000))
    yield _attack("3 MB of one letter", _chat("a" * 3_000_000))
    yield _attack("3 MB of blanks", _chat(" " * 3_000_000))
    yield _attack("3 MB of joined emoji", _chat("\U0001f468\u200d\U0001f469\u200d" * 100_000))
    yield _attack("3 MB of words to /v1/completions", {"model": "model", "prompt": "word " * 600_000}, COMPLETIONS)
    yield _attack("3 MB of words to /v1/responses", {"model": "model", "input": "word " * 600_000}, RESPONSES)
    yield _attack("3 MB of words to /tokenize", {"prompt": "word " * 600_000}, "/tokenize")
    yield _attack("unpaired surrogate in a regex", _chat(structured_outputs={"regex": "\ud83d"}))
    yield _attack("JSON nested 100,000 deep", b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    yield _attack("eight million numbers", b'{"model": "model", "prompt": [' + b"1," * 7_900_000 + b"1]}", COMPLETIONS)
    yield _attack("16 MB of empty objects", b'{"model": "model", "messages": [' + b"{}," * 5_300_000 + b"{}]}")
    for name, path in (("prompt", COMPLETIONS), ("stop", CHAT), ("input", RESPONSES), ("tools", CHAT)):
        wrong = [["x"], *[None] * 1_000_000]
        yield _attack(f"a million wrong items of {name}", _chat() | {name: wrong}, path)
        yield _attack(f"8,000 wrong items of {name}", _chat() | {name: wrong[:8000]}, path)
    yield _attack("900,000 token ids", {"model": "model", "prompt": [5] * 900_000}, COMPLETIONS)
    yield _attack("300,000 members", _chat(metadata={f"k{i}": {"a": 1} for i in range(60_000)}))
    yield _attack("60,000 invalid messages", _chat() | {"messages": [{"role": "king"}] * 60_000})
    yield _attack("200,000 unknown fields", _chat(**{f"field{i}": 1 for i in range(200_000)}))
    yield _attack("escapes alone, 15 MB", b'{"model": "' + b"\\\\" * 7_500_000 + b'"}')
    yield _attack("a chain of 12,000 grammar rules", _chat(structured_outputs={"grammar": _chain(12_000)}))
    yield _attack("a chain of 60,000 grammar rules", _chat(structured_outputs={"grammar": _chain(60_000)}))
    yield _attack("2,500 nested references", _chat(structured_outputs={"json": _references(2500)}), statuses=ok)
    yield _attack("20,000 choices", _chat(structured_outputs={"choice": [f"c{i}" for i in range(20_000)]}))
    yield _attack(
        "an ambiguous grammar", _chat(structured_outputs={"grammar": _chain(2000)}, max_tokens=8), statuses=ok
    )
    yield _attack("a regex of 250,000 characters", _chat(structured_outputs={"regex": "(a|b)?" * 41_000}), statuses=ok)
    tool = {"type": "function", "function": {"name": "f", "parameters": _references(100)}}
    tools = [tool | {"function": tool["function"] | {"name": f"f{i}"}} for i in range(100)]
    yield _attack("100 tools with 100 references each", _chat(tools=tools, tool_choice="required"), statuses=ok)
    yield _attack(
        "template variables of 4 MB",
        _chat(chat_template_kwargs={f"v{i}": "x" * 4000 for i in range(1000)}),
        statuses=ok,
    )
    yield _attack("50,000 biased tokens", _chat(logit_bias={str(i): 1 for i in range(48_000)}), statuses=ok)
    yield _attack(
        "128 prompts of 60,000 characters", {"model": "model", "prompt": ["word " * 12_000] * 128}, COMPLETIONS
    )
    items = [{"type": "function_call_output", "call_id": f"{i}", "output": "x"} for i in range(20_000)]
    yield _attack("20,000 items of a response", {"model": "model", "input": items}, RESPONSES)
    modules = "".join(f'<module name="m{i}">{"word " * 20}</module>' for i in range(20_000))
    pml = f'<schema name="big">{modules}</schema>'
    yield _attack("a schema of 20,000 modules", {"pml": pml}, "/v1/schemas/big", method="PUT")
    pml = '<schema name="deep">' + '<module name="m">' * 50_000
    yield _attack("a schema nested 50,000 deep", {"pml": pml}, "/v1/schemas/deep", method="PUT")
    agents = {f"a{i}": [f"a{j}" for j in range(max(0, i - 20), i)] for i in range(2000)}
    yield _attack("a step graph of 2,000 agents", agents, "/v1/workflows/big", method="PUT", statuses=ok)


@dataclass
class Watch:
    """Streams and health of a server, as a client sees them."""

    client: httpx.AsyncClient
    gaps: list[tuple[float, float]] = field(default_factory=list)  # (start, end) between two texts of a stream
    health: list[tuple[float, float]] = field(default_factory=list)  # (start, end) of each /health

    async def stream(self, number: int) -> None:
        """Read one ordinary stream after another."""
        body = {"model": "model", "stream": True, "max_tokens": 200, "ignore_eos": True, "temperature": 0.7, "seed": 1}
        body["messages"] = [{"role": "user", "content": f"Tell a long story about ship number {number}."}]
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        while True:
            last = None
            async with self.client.stream("POST", CHAT, json=body, headers=headers) as reply:
                reply.raise_for_status()
                async for line in reply.aiter_lines():
                    if '"content"' in line:
                        now = time.monotonic()
                        if last is not None:
                            self.gaps.append((last, now))
                        last = now

    async def ask_health(self) -> None:
        while True:
            start = time.monotonic()
            (await self.client.get("/health")).raise_for_status()
            self.health.append((start, time.monotonic()))
            await asyncio.sleep(0.01)

    def longest_gap(self, start: float, end: float) -> float:
        """Longest gap of a time, seconds."""
        return _longest(self.gaps, start, end)

    def longest_health(self, start: float, end: float) -> float:
        return _longest(self.health, start, end)

    @asynccontextmanager
    async def running(self) -> Any:
        tasks = [asyncio.create_task(self.stream(number)) for number in range(NUM_STREAMS)]
        tasks.append(asyncio.create_task(self.ask_health()))
        try:
            yield
            for task in tasks:
                if task.done():
                    task.result()  # an ordinary request failed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _longest(spans: Sequence[tuple[float, float]], start: float, end: float) -> float:
    return max((b - a for a, b in spans if b > start and a < end), default=0.0)


def _memory(process: psutil.Process) -> float:
    """Resident memory of a server and its processes, MB."""
    processes = [process, *process.children(recursive=True)]
    return sum(item.memory_info().rss for item in processes) / 1e6


async def _warm_up(client: httpx.AsyncClient) -> None:
    """Use what is created on first use: the compiler of grammars, buffers of large steps, and all pages of the cache."""
    headers = {"authorization": f"Bearer {KEYS[1]}"}
    for number in range(CAPACITY // 2500):
        prompt = f"{number} " * 1250  # two tokens each
        body = {"model": "model", "prompt": prompt, "max_tokens": 1}
        (await client.post(COMPLETIONS, json=body, headers=headers)).raise_for_status()
    for reuse in ("exact", "messages", "auto"):
        body = _chat("word " * 3000, structured_outputs={"regex": "[a-z]+"}, choreography={"reuse": reuse})
        (await client.post(CHAT, json=body, headers=headers)).raise_for_status()


async def _send(
    attack: Attack, client: httpx.AsyncClient, watch: Watch, process: psutil.Process
) -> tuple[int, tuple[float, ...]]:
    """Send an attack; return its status and `FIGURES`, of the gap its seconds."""
    before, start = _memory(process), time.monotonic()
    headers = {"authorization": f"Bearer {KEYS[1]}", "content-type": "application/json"}
    reply = await client.request(attack.method, attack.path, content=attack.body, headers=headers)
    answered = time.monotonic()
    await asyncio.sleep(1)
    end = time.monotonic()
    kept = _memory(process) - before
    while kept > MAX_MEMORY and time.monotonic() < end + SETTLE_SECONDS:
        await asyncio.sleep(0.2)
        kept = min(kept, _memory(process) - before)
    health, gap = 1e3 * watch.longest_health(start, end), watch.longest_gap(start, end)
    return reply.status_code, (answered - start, health, gap, kept)


async def measure(url: str, process: psutil.Process, chosen: Sequence[Sequence[Attack]]) -> tuple[list[Row], list[str]]:
    """Send the attacks one after the other; return rows and what was wrong.

    chosen: each attack, once for every round.
    """
    rows: list[Row] = []
    wrong: list[str] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        watch = Watch(client)
        async with watch.running():
            await _warm_up(client)
            await asyncio.sleep(5)
            start = time.monotonic()
            await asyncio.sleep(QUIET_SECONDS)
            quiet = watch.longest_gap(start, time.monotonic())
            usual = float(np.median([b - a for a, b in watch.gaps if a > start]))
            rows.append(
                Row("gap between tokens, quiet: median", 1e3 * usual, "ms", 1e3 * usual, 1e3 * usual, better="lower")
            )
            rows.append(
                Row("gap between tokens, quiet: longest", 1e3 * quiet, "ms", 1e3 * quiet, 1e3 * quiet, better="lower")
            )
            for attack, *others in chosen:
                results = [await _send(item, client, watch, process) for item in (attack, *others)]
                for status, _ in results:
                    if status not in attack.statuses:
                        wrong.append(f"{attack.name}: status {status}")
                for place, (what, unit, limit) in enumerate(FIGURES):
                    values = sorted(figures[place] for _, figures in results)
                    values = [value / quiet for value in values] if unit == "x" else values
                    value, measure = float(np.median(values)), f"{attack.name}: {what}"
                    rows.append(Row(measure, value, unit, values[0], values[-1], better="lower", required=limit))
                    if value > limit:
                        wrong.append(f"{measure} {value:.3g} {unit}, must be at most {limit:g}")
                figures = (f"{row.value:.3g} {row.unit}" for row in rows[-len(FIGURES) :])
                print(f"{attack.name}: {sorted({status for status, _ in results})}", *figures, sep="; ", flush=True)
    return rows, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--only", help="requests whose name contains this text")
    parser.add_argument("--rounds", type=int, default=3, help="of each request; rows have medians, least and most")
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    repeated = zip(*(attacks(number) for number in range(arguments.rounds)), strict=True)
    chosen = [rounds for rounds in repeated if not arguments.only or arguments.only in rounds[0].name]
    with server(arguments.model, dtype=arguments.dtype) as (url, process):
        rows, wrong = asyncio.run(measure(url, psutil.Process(process.pid), chosen))
        process.communicate(timeout=120)
        if process.returncode:
            wrong.append("a check of the server failed at its end")
    save("hostile", rows, arguments.model, wrong=wrong, settings={"dtype": arguments.dtype})
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
