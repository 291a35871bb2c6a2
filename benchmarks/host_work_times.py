"""Times of the host's work, printed as JSON; `host_work` runs it with one checkout of the package or another.

It imports nothing of `benchmarks`, so that `PYTHONPATH` chooses what is measured.
"""

import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.attention import cpp_backend


def make_engine(tokens: int) -> Engine:
    """Return an engine over the bundled model."""
    return Engine.from_pretrained(dtype="bfloat16", config=EngineConfig(cache=CacheConfig(capacity=tokens)))


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(100, 49000, count).tolist()
    return tokens


def replace_forward(e: Engine, num_rows: int) -> torch.Tensor:
    """Let steps skip the model; return the logits that they take."""
    hf_model: Any = e.core.hf_model
    spec, heads = e.model_info.attention_specs[0], e.model_info.query_heads
    logits = torch.randn(num_rows, e.model_info.vocab_size)

    def forward(tokens, positions, forward_context, logits_indices, **_):
        torch.tensor([*tokens, *positions, *logits_indices])
        metadata = forward_context.metadata
        if not metadata.cache.get(f"native {id(spec)}"):  # what the first layer prepares for all
            query = torch.empty(heads, len(tokens), 1)
            keys, values = forward_context.keys[0], forward_context.values[0]
            call = cpp_backend.AttentionCall(metadata, query, query, query, keys, values, 1.0, spec)
            cpp_backend._cache_c_metadata(call)
        return logits[: len(logits_indices)]

    hf_model.logits = forward
    return logits


def decoding_engine(num_requests: int, num_steps: int) -> tuple[Engine, torch.Tensor]:
    """Return an engine in the middle of decoding, and the logits that its steps take."""
    e = make_engine(65536)
    session = e.session(seed=0)
    for index in range(num_requests):
        session.decode(random_tokens(256, index), sampling=greedy(num_steps + 100))
    for _ in range(8):
        e.step()
    logits = replace_forward(e, num_requests)
    for _ in range(40):
        e.step()
    return e, logits


def step_times(num_requests: int, num_steps: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of steps, and of the search for the largest logits."""
    e, logits = decoding_engine(num_requests, num_steps)
    steps, maxima = [], []
    for _ in range(num_steps):
        began = time.thread_time()
        e.step()
        middle = time.thread_time()
        logits.numpy().argmax(-1)
        steps.append((middle - began) * 1e3)
        maxima.append((time.thread_time() - middle) * 1e3)
    return steps, maxima


def submission_times(num_calls: int) -> list[float]:
    """Return the milliseconds of submitting decodes over four parents, which are released at once."""
    e, times = make_engine(65536), []
    with e.session(seed=0) as session:
        parents = [session.prefill(random_tokens(64, seed)).result() for seed in range(4)]
        for index in range(num_calls + 50):
            began = time.thread_time()
            message = session.decode([index % 1000 + 100, 9], parents, sampling=greedy(20))
            times.append((time.thread_time() - began) * 1e3)
            message.release()
    return times[50:]


if __name__ == "__main__":
    torch.set_num_threads(1)
    num_steps = int(sys.argv[1])
    medians = {f"step, {n} requests": statistics.median(step_times(n, num_steps)[0]) for n in (1, 32)}
    print(json.dumps(medians | {"submission": statistics.median(submission_times(num_steps))}))
