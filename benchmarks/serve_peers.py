"""Servers that `benchmarks.serve` compares, each in a process of its own: ours, vLLM's and llama.cpp's."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from choreograph.models.loader import bundled_gguf, convert_gguf

from .peer_engines import VLLM

START_SECONDS = 900  # until a server answers: vLLM imports and compiles for minutes
LOG_LINES = 15  # shown of a server that fails
LOGS = Path("out")


class Server:
    """An OpenAI server in processes of its own; its output goes to `out/serve-<name>.log`."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.name, self.url, self.model = name, f"http://127.0.0.1:{port}", ""
        variables = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS",)}
        LOGS.mkdir(exist_ok=True)
        self._log = LOGS / f"serve-{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(port)],
                env=variables | dict(environment or {}),
                stdout=log,
                stderr=log,
                start_new_session=True,  # a process group, which holds the workers too
            )

    def wait(self) -> None:
        """Wait until the server answers."""
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                reply = httpx.get(f"{self.url}/v1/models", timeout=60).raise_for_status()
                self.model = reply.json()["data"][0]["id"]
                return
            except httpx.HTTPError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{self.name} does not answer: {self.log_tail()}") from None
                time.sleep(0.5)

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join([str(self._log), *self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the server run in this block."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        """Stop the server's processes until `running`: idle threads of some servers spin."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._signal(signal.SIGKILL)  # workers that outlive it
        self._process.wait()


def start_ours(threads: int) -> Server:
    options = ["--log-level", "warning", "--dtype", "bfloat16", "--capacity", "16384"]
    return Server("choreograph", [sys.executable, "-m", "choreograph", "serve", *options])


def start_vllm(threads: int) -> Server:
    """vLLM's CPU build with prefix caching, in the environment that `benchmarks.peers` creates."""
    if not (VLLM.FOLDER / ".ready").exists():
        raise RuntimeError("vLLM is not installed: run benchmarks.peers once, which does")
    command = [str(VLLM.FOLDER / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(convert_gguf(bundled_gguf())), "--dtype", "bfloat16", "--max-model-len", "8192"]
    command += ["--max-num-seqs", "64", "--enable-prompt-tokens-details", "--host", "127.0.0.1"]
    environment = {
        "PYTHONPATH": "",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Server("vLLM", command, environment)


def start_llama_cpp(threads: int) -> Server:
    """llama.cpp on the file that the bundled model is converted from; reuses the prefix of its last prompt."""
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(bundled_gguf()), "--host", "127.0.0.1"]
    command += ["--n_ctx", "8192", "--n_threads", str(threads), "--n_threads_batch", str(threads)]
    return Server("llama.cpp", [*command, "--interrupt_requests", "False"])


PEERS = {"vLLM": start_vllm, "llama.cpp": start_llama_cpp}
