"""vLLM's OpenAI-compatible server with the connector, in a process of its own."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

CONNECTOR = {
    "kv_connector": "ChoreographConnector",
    "kv_connector_module_path": "choreograph.vllm",
    "kv_role": "kv_both",
}
MODEL = "tiny"
START_SECONDS = 240  # on a busy machine


class VllmServer:
    """A server on a port that stays the same when it is started again.

    Args:
        options: arguments of `vllm serve`.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.log = folder.with_name(f"{folder.name}-{self._port}.log")
        self._arguments = [
            *("--model", str(folder), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self._port)),
            *("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", "256"),
            *("--max-logprobs", "-1", "--max-num-seqs", "16", "--kv-transfer-config", json.dumps(CONNECTOR)),
            *("--middleware", "choreograph.vllm.RequestChecks", *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self._arguments]
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        end = time.monotonic() + START_SECONDS
        while True:
            assert self._process.poll() is None and time.monotonic() < end, self.log.read_text()[-5000:]
            try:
                if httpx.get(f"{self.url}/health", timeout=5).is_success:
                    return
            except httpx.HTTPError:
                time.sleep(0.2)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
            self._process = None

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json={"model": MODEL, "temperature": 0} | body, timeout=120)

    def complete(self, tokens: list[int], reuse: dict[str, Any] | None = None, **body: Any) -> dict[str, Any]:
        """Return the answer of `/v1/completions` to a prompt of tokens; raises httpx.HTTPStatusError."""
        if reuse is not None:
            body["kv_transfer_params"] = {"choreograph": reuse}
        options = {"max_tokens": 1, "logprobs": 128, "return_tokens_as_token_ids": True, "ignore_eos": True}
        reply = self.post("/v1/completions", prompt=tokens, **options | body)
        reply.raise_for_status()
        return reply.json()

    def metric(self, name: str) -> float:
        """Return the sum of a metric of the server."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Wait until no request is left and no page is held."""
        end = time.monotonic() + seconds
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while values := [self.metric(name) for name in names]:
            if not any(values):
                return
            assert time.monotonic() < end, values
            time.sleep(0.2)
