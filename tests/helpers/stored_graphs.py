"""Answers of a small int4 engine whose graphs may come from disk; run as a program, they are those of a new process."""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.models.compilation import graph_cache, torch_compile

NUM_GROUPS = 9  # products of a step, also gated ones: four of each of two layers, and the output layer
ROWS = (2, 3, 17, 32, 1)  # of the steps that follow a prefill of 40 tokens


def engine() -> Engine:
    """Return an engine in which projections with one input share a packed weight."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}
    config = LlamaConfig(
        vocab_size=61, num_attention_heads=4, num_key_value_heads=4, head_dim=16, initializer_range=0.25, **sizes
    )
    options = EngineConfig(cache=CacheConfig(capacity=4096), compile=True, quantization="int4")
    return Engine.from_pretrained(LlamaForCausalLM(config).bfloat16(), config=options)


def run(engine: Engine) -> dict[str, object]:
    """Return how often a step calls the kernel, and log-probabilities, which differ if a bit of the logits does."""
    options = SamplingParams(temperature=0, max_tokens=2, logprobs=0)
    answers, before = [], engine.stats().num_steps
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled,
        engine.session(seed=0) as session,
    ):
        root = session.prefill(list(range(40)))
        for count in ROWS:
            messages = [session.decode([i], [root], sampling=options) for i in range(count)]
            answers += [[part.logprob for part in message.logprobs] for message in messages]
    calls = sum(event.count for event in profiled.key_averages() if event.key.startswith("choreograph::linear_int4"))
    return {"answers": answers, "products": calls / (engine.stats().num_steps - before)}


def main() -> None:
    """Print what an engine computes that must not trace a graph."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a graph is traced")

    graph_cache.user_cache_path = lambda name: Path(sys.argv[1])
    torch_compile.compile_model = fail
    loaded = engine()
    first, second = (
        run(loaded),
        run(loaded),
    )  # a first call runs in a dispatch mode, and counts again
    assert first["answers"] == second["answers"]
    print(json.dumps(second))


if __name__ == "__main__":
    main()
