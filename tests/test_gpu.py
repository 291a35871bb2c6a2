"""On a GPU: every family says what it says on the CPU, with every backend that runs there. Tier `gpu`."""

import pytest
import torch
from families import CONFIGS, VOCABULARY
from transformers import AutoModelForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams

pytestmark = pytest.mark.gpu


def heard(name: str, device: str, backend: str = "auto", host: int | None = None) -> list[list[float]]:
    """Log-probabilities of forced tokens in a graph of moved, reordered messages."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    cache = CacheConfig(tokens=256 if host else 1024, page_size=4, poison=True, host=host)
    engine = Engine.from_pretrained(model, device=device, config=EngineConfig(backend=backend, cache=cache))
    every = {"sampling": SamplingParams(logprobs=VOCABULARY), "forced_tokens": [3, 1, 4, 1, 5]}
    with engine.session(seed=0) as session:
        first = session.prefill(list(range(5, 25)))
        second = session.prefill([9, 9, 8], [first])
        answers = [session.decode([i], [first, second], **every) for i in range(6)]
        if engine.facts.movable:
            answers.append(session.decode([7, 2], [second, answers[0], first], offsets=[60, 3, 80], **every))
        engine.drain()
        engine.check()
        return [[one.top[t] for t in range(VOCABULARY)] for answer in answers for one in answer.logprobs]


@pytest.mark.parametrize("backend", ["triton", "flex", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_says_what_it_says_on_the_cpu(name, backend):
    torch.testing.assert_close(
        torch.tensor(heard(name, "cuda", backend)), torch.tensor(heard(name, "cpu")), atol=2e-3, rtol=1e-3
    )


def test_a_host_tier_below_a_gpu_gives_the_same():
    small = torch.tensor(heard("llama", "cuda", host=2048))
    torch.testing.assert_close(small, torch.tensor(heard("llama", "cpu")), atol=2e-3, rtol=1e-3)
