"""The peers: Hugging Face in this process, llama.cpp (its batch API) and vLLM in children of their own.

Two thread pools never spin for the same cores: the parent waits while a child works and the other way round, and all
are asked in turns. vLLM has its own environment, since it pins its own versions of PyTorch and transformers.
"""

import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from choreograph.models.loader import bundled_gguf, convert_gguf

from .common import random_tokens

ROOT = Path(__file__).parents[1]


class HuggingFace:
    """transformers, eager, with its own cache: one sequence or a batch of separate ones."""

    def __init__(self, dtype: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(convert_gguf(bundled_gguf()), dtype=dtype).eval()

    @torch.no_grad()
    def decode(self, context: int, batch: int, steps: int, own: bool = False) -> list[float]:
        """Seconds of each step behind `context` tokens, equal for all requests unless `own`."""
        ids = torch.tensor([random_tokens(context, seed=i * own) for i in range(batch)])
        cache = DynamicCache(config=self.model.config)
        token = self.model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        taken = []
        for _ in range(steps):
            began = time.perf_counter()
            token = self.model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            taken.append(time.perf_counter() - began)
        return taken

    @torch.no_grad()
    def prefill(self, count: int, prompts: int = 1) -> float:
        ids = torch.tensor([random_tokens(count, seed=i) for i in range(prompts)])
        began = time.perf_counter()
        self.model(ids, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - began


class LlamaCpp:
    """llama.cpp on the same GGUF file with the same number of threads."""

    def __init__(self, threads: int) -> None:
        here, there = multiprocessing.get_context("spawn").Pipe()
        self._pipe = here
        self._child = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(there, str(bundled_gguf()), threads), daemon=True
        )
        self._child.start()
        self._pipe.recv()

    def _call(self, command: str, *args: int) -> Any:
        self._pipe.send((command, *args))
        return self._pipe.recv()

    def decode(self, context: int, batch: int, steps: int, own: bool = False) -> list[float]:
        return self._call("decode", context, batch, steps, own)

    def prefill(self, count: int, prompts: int = 1) -> float:
        return self._call("prefill", count, prompts)

    def close(self) -> None:
        self._pipe.send(None)
        self._child.join(10)


def _serve(pipe: Any, path: str, threads: int) -> None:
    native = _Native(path, threads)
    work: dict[str, Callable[..., Any]] = {"decode": native.decode, "prefill": native.prefill}
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        pipe.send(work[asked[0]](*asked[1:]))


class _Native:
    """The C interface directly: no Python wrapper cost inside the timed part."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        self.l = l = llama_cpp  # noqa: E741
        self._quiet = l.llama_log_callback(lambda *_: None)
        l.llama_log_set(self._quiet, ctypes.c_void_p(0))
        l.llama_backend_init()
        self.model = l.llama_model_load_from_file(path.encode(), l.llama_model_default_params())
        p = l.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = 16384, 8192, 512, 32
        p.n_threads = p.n_threads_batch = threads
        p.kv_unified = True
        self.context = l.llama_init_from_model(self.model, p)
        self.memory = l.llama_get_memory(self.context)

    def _run(self, tokens: list[int], positions: list[int], sequences: list[int], logits: list[bool]) -> float:
        batch = self.l.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, expected) in enumerate(
            zip(tokens, positions, sequences, logits, strict=True)
        ):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, expected
            batch.seq_id[i][0] = sequence
        began = time.perf_counter()
        status = self.l.llama_decode(self.context, batch)
        self.l.llama_get_logits(self.context)
        taken = time.perf_counter() - began
        self.l.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode gave {status}")
        return taken

    def prefill(self, count: int, prompts: int = 1) -> float:
        self.l.llama_memory_clear(self.memory, True)
        tokens = [token for i in range(prompts) for token in random_tokens(count, seed=i)]
        sequences = [i for i in range(prompts) for _ in range(count)]
        logits = ([False] * (count - 1) + [True]) * prompts
        return self._run(tokens, list(range(count)) * prompts, sequences, logits)

    def decode(self, context: int, batch: int, steps: int, own: bool) -> list[float]:
        self.prefill(context, batch if own else 1)
        for sequence in range(1, 1 if own else batch):
            self.l.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)
        token, taken = random_tokens(steps, seed=1), []
        for i in range(steps):
            taken.append(self._run([token[i]] * batch, [context + i] * batch, list(range(batch)), [True] * batch))
        return taken


class Generated(NamedTuple):
    """What vLLM answered to several prompts that were sent together."""

    tokens: list[list[int]]  # of every prompt
    times: list[list[float]]  # seconds from the start of the call to each token
    reports: list[dict[str, Any]]  # what a connector said of every prompt


class VLLM:
    """vLLM's CPU build, with prefix caching, on the same weights.

    Args:
        connector: the value of `--kv-transfer-config`; it is imported from this checkout.
        model: a .gguf file; None: the bundled model.
    """

    FOLDER = ROOT / ".venv-vllm"

    def __init__(
        self,
        threads: int,
        dtype: str,
        connector: Mapping[str, Any] | None = None,
        model: str | Path | None = None,
    ) -> None:
        subprocess.run(
            [str(ROOT / ".ci" / "vllm_environment.sh"), "--python", sys.executable, "--venv", str(self.FOLDER)],
            check=True,
        )
        options = {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONSAFEPATH": "1",  # the script's folder has a module `vllm`
        }
        if connector is not None:
            options["PYTHONPATH"] = str(ROOT)
        environment = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")
        }
        self._log = Path("out") / ("vllm.log" if connector is None else "vllm-connector.log")
        self._log.parent.mkdir(exist_ok=True)
        self._pipe, there = multiprocessing.Pipe()
        script = Path(__file__).with_name("peer_vllm.py")
        command = [str(self.FOLDER / "bin" / "python"), str(script), str(there.fileno())]
        command += [str(convert_gguf(Path(model or bundled_gguf()))), dtype, json.dumps(connector)]
        with there, self._log.open("w") as log:
            self._child = subprocess.Popen(
                command, env=environment | options, stdout=log, stderr=log, pass_fds=[there.fileno()]
            )
        self._receive()

    def _call(self, *message: Any) -> Any:
        self._pipe.send(message)
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"vLLM ended: see {self._log}") from None

    def generate(
        self, prompts: Sequence[list[int]], count: int, transfers: Sequence[Mapping[str, Any] | None] = ()
    ) -> Generated:
        """Decode `count` tokens behind every prompt.

        Args:
            transfers: `kv_transfer_params` of every prompt.
        """
        return Generated(*self._call(list(prompts), count, list(transfers) or [None] * len(prompts)))

    def reset(self) -> None:
        """Empty the prefix cache and the connector's store."""
        self._call()

    def decode(self, context: int, batch: int, steps: int, own: bool = False) -> list[float]:
        self.reset()
        prompts = [random_tokens(context, seed=i * own) for i in range(batch)]
        if not own:
            self.generate(prompts[:1], 1)  # so that the others find it in the prefix cache
        times = self.generate(prompts, steps + 1).times
        ends = [max(column) for column in zip(*times, strict=True)]
        return [after - before for before, after in pairwise(ends)]

    def prefill(self, count: int, prompts: int = 1) -> float:
        self.reset()
        generated = self.generate([random_tokens(count, seed=i) for i in range(prompts)], 1)
        return max(column[0] for column in generated.times)

    def close(self) -> None:
        self._pipe.send(None)
        self._child.wait(60)
