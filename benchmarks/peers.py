"""The peers: Hugging Face in this process, llama.cpp (its batch API) in a child of its own. Bench-only.

llama.cpp lives in another process so that two thread pools never spin for the same cores; the parent waits while
the child works and the other way round, and both are asked in turns.
"""

import ctypes
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from choreograph.models.loader import bundled_gguf, convert_gguf

from .common import random_tokens


class HuggingFace:
    """transformers, eager, with its own cache: one sequence or a batch of separate ones."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(convert_gguf(bundled_gguf()), dtype=dtype).eval()

    @torch.no_grad()
    def decode(self, context: int, batch: int, steps: int) -> list[float]:
        """Seconds of each step behind `context` tokens."""
        ids = torch.tensor([random_tokens(context)] * batch)
        cache = DynamicCache(config=self.model.config)
        token = self.model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        taken = []
        for _ in range(steps):
            began = time.perf_counter()
            token = self.model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            taken.append(time.perf_counter() - began)
        return taken

    @torch.no_grad()
    def prefill(self, count: int) -> float:
        ids = torch.tensor([random_tokens(count)])
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

    def decode(self, context: int, batch: int, steps: int) -> list[float]:
        return self._call("decode", context, batch, steps)

    def prefill(self, count: int) -> float:
        return self._call("prefill", count)

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
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = 8192, 2048, 512, 8
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

    def prefill(self, count: int) -> float:
        self.l.llama_memory_clear(self.memory, True)
        return self._run(random_tokens(count), list(range(count)), [0] * count, [False] * (count - 1) + [True])

    def decode(self, context: int, batch: int, steps: int) -> list[float]:
        self.prefill(context)
        for sequence in range(1, batch):
            self.l.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)
        token, taken = random_tokens(steps, seed=1), []
        for i in range(steps):
            taken.append(self._run([token[i]] * batch, [context + i] * batch, list(range(batch)), [True] * batch))
        return taken
