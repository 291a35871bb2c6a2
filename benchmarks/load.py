"""The server under load: clients that ask for minutes, in streams or not, with workflows and tenants, and often leave.

make bench NAME=load                          # 64 clients for 300 seconds on the bundled model
make bench NAME=load ARGS="--seconds 60 --clients 32"

Every answer has to be whole. At the end, nothing may run, all pages and counts have to be consistent, and the memory of the
server's process must not grow: its slope is fitted to samples after the first third. Exits with 1 otherwise.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from .common import Row, save

KEYS = ("key-of-the-first-team", "key-of-the-second-team")  # two tenants
WORKFLOWS = 4  # of each tenant
ABORTED = 0.15  # share of requests that the client leaves
TOPICS = ("a bridge", "the ferry", "an old mill", "the harbour", "a school", "the market")
CAPACITY, STORED_TOKENS = 16384, 32768  # tokens of the cache; of stored messages, reached early


def serve() -> None:
    """Serve in this process until its input ends; then check everything. Runs in a child."""
    import threading

    import uvicorn

    from choreograph import CacheConfig, Engine, EngineConfig
    from choreograph.cli.serve_command import limit_primitive_cache
    from choreograph.server.app import create_app
    from choreograph.server.engine_thread import load_engine
    from choreograph.server.server_config import ServerConfig

    limit_primitive_cache()
    model, dtype, more = sys.argv[1:]
    config = EngineConfig(cache=CacheConfig(capacity=CAPACITY))
    engine = load_engine(lambda: Engine.from_pretrained(model, config=config, dtype=dtype, device="cpu"))
    options = {"api_keys": KEYS, "served_model_name": "model", "max_workflow_tokens": STORED_TOKENS, **json.loads(more)}
    app = create_app(engine, ServerConfig(**options))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.05)
    print(json.dumps({"port": server.servers[0].sockets[0].getsockname()[1]}), flush=True)
    sys.stdin.read()
    store = app.state.service.planner.store
    store.check()
    server.should_exit = True
    thread.join(60)
    engine.check()
    stats = engine.stats()
    left = {"running": stats.num_running, "waiting": stats.num_waiting, "referenced": stats.num_referenced_entries}
    print(json.dumps(left), flush=True)


@contextmanager
def server(model: str, *, dtype: str = "auto", **config: Any) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server in a process of its own; yields its address and process. config: of `ServerConfig`."""
    options = [model, dtype, json.dumps(config)]
    command = [sys.executable, "-c", "from benchmarks.load import serve; serve()", *options]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}", process
    finally:
        process.kill()
        process.wait()


class Load:
    """Clients and what became of their requests."""

    def __init__(self, url: str, seconds: float, seed: int, max_tokens: int) -> None:
        self._url, self._end, self._max_tokens = url, time.monotonic() + seconds, max_tokens
        self._rng = random.Random(seed)
        self._quotes: dict[tuple[str, str], list[str]] = {}  # answers of every tenant's workflow
        self.counts: Counter[str] = Counter()
        self.num_tokens = 0
        self.errors: list[str] = []

    async def run(self, num_clients: int) -> None:
        """Run all clients until the time is over."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as client:
            await asyncio.gather(*(self._client(client, number) for number in range(num_clients)))

    async def _client(self, client: httpx.AsyncClient, number: int) -> None:
        while time.monotonic() < self._end:
            key, workflow = KEYS[number % 2], f"workflow-{self._rng.randrange(WORKFLOWS)}"
            body = self._body(key, workflow)
            ask = self._stream if body["stream"] else self._whole
            is_aborted = self._rng.random() < ABORTED
            self.counts["sent"] += 1
            try:
                await ask(client, {"authorization": f"Bearer {key}"}, body, (key, workflow), is_aborted)
            except Exception as exc:
                self.counts["lost"] += 1
                self.errors.append(f"{type(exc).__name__}: {exc}")

    def _body(self, key: str, workflow: str) -> dict[str, Any]:
        rng, quotes = self._rng, self._quotes.get((key, workflow), [])
        topic = f"What does the town owe to {rng.choice(TOPICS)}? Case {rng.randrange(8)}."
        quoted = [f"Somebody said:\n{text}" for text in rng.sample(quotes, min(len(quotes), rng.randrange(3)))]
        messages = [{"role": "system", "content": f"You are speaker {rng.randrange(3)} of a debate."}]
        messages.append({"role": "user", "content": "\n\n".join([topic, *quoted])})
        body = {"model": "model", "messages": messages, "max_tokens": rng.randint(4, self._max_tokens)}
        body |= {"stream": rng.random() < 0.5, "ignore_eos": True, "n": rng.choice((1, 1, 1, 2))}
        body["choreography"] = {"reuse": rng.choice(("exact", "messages", "auto")), "workflow": workflow}
        return body

    def _count(
        self, place: tuple[str, str], body: Mapping[str, Any], texts: list[str], usage: Mapping[str, Any]
    ) -> None:
        expected = body["max_tokens"] * body["n"]
        if usage["completion_tokens"] != expected or len(texts) != body["n"]:
            raise ValueError(f"{usage['completion_tokens']} tokens instead of {expected}")
        self.counts["completed"] += 1
        self.num_tokens += expected
        self._quotes.setdefault(place, []).extend(text.replace("\0", "") for text in texts)  # which servers refuse
        del self._quotes[place][:-8]

    async def _whole(
        self, client: httpx.AsyncClient, headers: dict[str, str], body: dict[str, Any], place: Any, is_aborted: bool
    ) -> None:
        request = client.post("/v1/chat/completions", json=body, headers=headers)
        if is_aborted:
            with suppress(TimeoutError):
                await asyncio.wait_for(request, self._rng.random())
            self.counts["aborted"] += 1
            return
        answer = (await request).raise_for_status().json()
        self._count(place, body, [choice["message"]["content"] for choice in answer["choices"]], answer["usage"])

    async def _stream(
        self, client: httpx.AsyncClient, headers: dict[str, str], body: dict[str, Any], place: Any, is_aborted: bool
    ) -> None:
        texts, usage, left = [""] * body["n"], None, self._rng.randrange(body["max_tokens"])
        body = {**body, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if is_aborted and (left := left - 1) < 0:
                    self.counts["aborted"] += 1
                    return
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                usage = event["usage"] or usage
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content") or ""
        if is_aborted:
            self.counts["aborted"] += 1
        elif usage is None:
            raise ValueError("the stream ended early")
        else:
            self._count(place, body, texts, usage)


async def _sample_memory(process: psutil.Process, samples: list[tuple[float, float]]) -> None:
    start = time.monotonic()
    while True:
        samples.append((time.monotonic() - start, process.memory_info().rss / 2**20))
        await asyncio.sleep(0.5)


def fitted_slope(samples: list[tuple[float, float]]) -> tuple[float, float]:
    """Slope of samples (seconds, MiB) in MiB a minute, and half the width of its 95% interval."""
    x, y = np.asarray(samples).T
    if len(x) < 3:
        return 0.0, 0.0
    slope, intercept = np.polyfit(x, y, 1)
    error = np.sqrt(((y - slope * x - intercept) ** 2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum())
    return 60 * slope, 60 * 1.96 * error


def measure(
    model: str,
    *,
    seconds: float,
    clients: int,
    dtype: str = "auto",
    max_tokens: int = 48,
    seed: int = 0,
) -> dict[str, Any]:
    """Run the load; return counts, errors, the memory's slope and what was left in the server."""
    samples: list[tuple[float, float]] = []
    with server(model, dtype=dtype) as (url, process):

        async def run() -> Load:
            load = Load(url, seconds, seed, max_tokens)
            sampler = asyncio.create_task(_sample_memory(psutil.Process(process.pid), samples))
            await load.run(clients)
            sampler.cancel()
            return load

        load = asyncio.run(run())
        end = time.monotonic() + 60
        is_idle = False
        while not is_idle and time.monotonic() < end:  # aborted requests end within a step
            lines = httpx.get(f"{url}/metrics").text.splitlines()
            values = [line.rpartition(" ")[2] for line in lines if line.startswith("choreograph:num_requests_")]
            is_idle = len(values) == 2 and not any(map(float, values))
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, "a check of the server failed"
    steady = [sample for sample in samples if sample[0] > seconds / 3]
    slope, width = fitted_slope(steady)
    return {
        "counts": dict(load.counts),
        "errors": load.errors[:20],
        "tokens": load.num_tokens,
        "is_idle": is_idle,
        "left": json.loads(output.splitlines()[-1]),
        "slope": slope,
        "slope_width": width,
        "memory": samples,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=64)
    arguments = parser.parse_args()
    result = measure(arguments.model, seconds=arguments.seconds, clients=arguments.clients)
    counts, slope, width = result["counts"], result["slope"], result["slope_width"]
    what = f"{arguments.clients} clients, {arguments.seconds:g} s"

    def exact(measure: str, value: float, unit: str, **facts: Any) -> Row:
        return Row(f"{measure}, {what}", value, unit, value, value, **facts)

    rows = [
        exact("whole answers", counts.get("completed", 0), "requests"),
        exact("requests that the client left", counts.get("aborted", 0), "requests"),
        exact("lost requests", counts.get("lost", 0), "requests", better="lower", required=0),
        exact("references left in the cache", result["left"]["referenced"], "entries", better="lower", required=0),
        exact("generated tokens", result["tokens"] / arguments.seconds, "tokens/s"),
        Row(f"slope of memory, {what}", slope, "MiB/min", slope - width, slope + width, better="lower", target=1),
    ]
    save("load", rows, memory=result["memory"], errors=result["errors"])
    is_clean = not counts.get("lost") and result["is_idle"] and not any(result["left"].values())
    return int(not is_clean)


if __name__ == "__main__":
    sys.exit(main())
