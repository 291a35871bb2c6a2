"""Faults of whole processes: killed while they write, ended by SIGTERM, two at one folder, without memory.

The processes are forked, so that each starts in milliseconds.
"""

import gc
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from choreograph import SamplingParams
from choreograph.errors import CacheFileError, ConfigError
from choreograph.prompt_cache import PromptCache

from .fault_case import Case, expect, open_engine, quiet_engine
from .soak_programs import SCHEMA
from .tiny_family import tokenizer

PROMPT = '<prompt schema="trip"><alps/><city/>Where to?</prompt>'
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
END_SECONDS = 60.0  # until a process that was asked to end is late
NUM_REQUESTS = 4


def _fork(function: Callable[[int], None]) -> tuple[int, int]:
    """Run a function in a forked process; return its id and the pipe that it writes to."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    try:
        os.close(reading)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        function(writing)
        status = 0
    except BaseException as exc:
        with suppress(OSError):
            os.write(2, f"{type(exc).__name__}: {exc}\n".encode())
    finally:
        os._exit(status)


def _wait(pid: int, seconds: float = END_SECONDS) -> int:
    """Return the exit status of a process; kill it if it is late."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"a process does not end within {seconds:g} s")


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _killed_writer(case: Case) -> None:
    """A process is killed while it moves KV to the folder that another one uses as well."""
    options: dict[str, Any] = {"disk_capacity": 8192, "disk_dir": case.folder}
    quiet_engine()
    with case.engine(**options) as engine:

        def write(pipe: int) -> None:
            own = open_engine(**options)
            os.write(pipe, b"x")
            while True:
                case.run_programs(own, "revisits")

        pid, pipe = _fork(write)
        try:
            os.read(pipe, 1)
            case.run_programs(engine, "revisits")
            time.sleep(case.rng.random() * 0.5)
        finally:
            _kill(pid)
            os.close(pipe)
        case.run_programs(engine, "revisits")
    with case.engine(**options) as engine:
        case.run_programs(engine, "revisits")
    left = os.listdir(case.folder)
    expect(not left, f"files {left} of a killed process are left")
    case.inject("processes killed at the disk tier")


def _killed_save(case: Case) -> None:
    """A process is killed while it saves a prompt cache again and again."""
    file = case.folder / "trip.cache"

    def save(pipe: int) -> None:
        engine = open_engine(capacity=4096)
        with PromptCache(engine, SCHEMA) as modules:
            modules.warmup()
            while True:
                modules.save(file)
                os.write(pipe, b"x")

    pid, pipe = _fork(save)
    is_saved = False
    try:
        for _ in range(case.rng.randrange(4)):
            is_saved |= bool(os.read(pipe, 1))
        time.sleep(case.rng.random() * 0.02)
    finally:
        _kill(pid)
        is_saved |= bool(os.read(pipe, 1))
        os.close(pipe)
    with (
        case.engine(capacity=4096) as engine,
        PromptCache(engine, SCHEMA) as modules,
        engine.session(seed=1) as session,
    ):
        try:
            modules.load(file)
        except CacheFileError as exc:
            expect(not file.exists() and not is_saved, f"what was saved cannot be loaded: {exc}")
        answer = modules.generate(session, PROMPT, sampling=GREEDY).output_token_ids
        expect(answer == _expected_answer(), f"{answer} after a save that was killed")
    case.inject("processes killed while they save")


def _expected_answer() -> list[int]:
    engine = quiet_engine()
    with PromptCache(engine, SCHEMA) as modules, engine.session(seed=1) as session:
        result = modules.generate(session, PROMPT, sampling=GREEDY).output_token_ids
    engine.run_until_idle()
    engine.clear_cache()
    return list(result)


def _terminated_server(case: Case) -> None:
    """A server gets SIGTERM while it answers: what it has accepted it answers in full, and the rest it refuses."""

    def serve(pipe: int) -> None:
        import uvicorn

        from choreograph.server.app import create_app
        from choreograph.server.server_config import ServerConfig

        engine = open_engine(disk_capacity=4096, disk_dir=case.folder)
        app = create_app(engine, ServerConfig(served_model_name="tiny"))
        app.state.service.on_stop.append(engine.close)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=30))

        def tell() -> None:
            while not server.started:
                time.sleep(0.005)
            os.write(pipe, json.dumps(server.servers[0].sockets[0].getsockname()[1]).encode() + b"\n")

        threading.Thread(target=tell, daemon=True).start()
        server.run()

    texts = ["".join(case.rng.choices("abcdefgh ", k=case.rng.randint(1, 40))) for _ in range(NUM_REQUESTS)]
    expected = [_expected_text(text) for text in texts]
    pid, pipe = _fork(serve)
    answers: list[Any] = [None] * NUM_REQUESTS
    try:
        with os.fdopen(pipe, "rb") as lines:
            url = f"http://127.0.0.1:{json.loads(lines.readline() or b'0')}/v1/completions"

        client = httpx.Client(timeout=END_SECONDS)

        def ask(index: int) -> None:
            answers[index] = _ask(client, url, texts[index], is_stream=index % 2 == 1)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(NUM_REQUESTS)]
        for thread in threads:
            thread.start()
        time.sleep(case.rng.random() * 0.4)
        os.kill(pid, signal.SIGTERM)
        for thread in threads:
            thread.join(END_SECONDS)
    except BaseException:
        _kill(pid)
        raise
    client.close()
    status = _wait(pid)
    expect(status in (0, -signal.SIGTERM), f"the server ended with {status}")
    for answer, text in zip(answers, expected, strict=True):
        expect(answer in ("refused", text), f"{answer!r} instead of {text!r} or a refusal")
    left = os.listdir(case.folder)
    expect(not left, f"files {left} are left")
    case.tally.counts["requests"] += NUM_REQUESTS
    case.tally.counts["refused at the end"] += answers.count("refused")
    case.inject("servers that get SIGTERM")


def _ask(client: httpx.Client, url: str, text: str, *, is_stream: bool) -> str:
    """Return the text of an answer, "refused", or what was wrong."""
    body = {
        "model": "tiny",
        "prompt": text,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "stream": is_stream,
    }
    try:
        reply = client.post(url, json=body)
    except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
        return "refused"  # before a byte of the answer: httpx reads whole ones
    if reply.status_code == 503:
        return "refused"
    if reply.is_error:
        return f"status {reply.status_code}: {reply.text[:200]}"
    if not is_stream:
        return str(reply.json()["choices"][0]["text"])
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    if lines[-1:] != ["[DONE]"]:
        return f"a stream that ends with {lines[-1:]}"
    return "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])


def _expected_text(text: str) -> str:
    engine = quiet_engine()
    with engine.session(mode="prefix") as session:
        sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        result = session.decode(tokenizer()(text)["input_ids"], sampling=sampling, footer=[]).text
    engine.run_until_idle()
    engine.clear_cache()
    return str(result)


def _no_memory(case: Case) -> None:
    """The address space has no room for the tiers of a new engine."""
    size = case.rng.choice(("host_capacity", "capacity"))

    def open_without_memory(pipe: int) -> None:
        gc.collect()  # memory that is freed later would make room
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        options: dict[str, Any] = {size: "8GiB"}  # more than an allocator may hold free
        try:
            open_engine(**options)
        except ConfigError as exc:
            os.write(pipe, str(exc).encode())
        except BaseException as exc:
            os.write(pipe, f"{type(exc).__name__}: {exc}".encode())

    pid, pipe = _fork(open_without_memory)
    with os.fdopen(pipe, "rb") as answer:
        text = answer.read().decode()
    status = _wait(pid)
    expect(text.startswith(f"{size}="), f"an engine without memory for {size}: {text or 'no error'}, status {status}")
    case.inject("engines without memory")


PROCESS_FAULTS = {
    "killed writer": _killed_writer,
    "killed save": _killed_save,
    "terminated server": _terminated_server,
    "no memory": _no_memory,
}
