"""On a GPU: every family says what it says on the CPU, with every backend that runs there. Tier `gpu`."""

import warnings
from dataclasses import replace

import pytest
import torch
from helpers.inspect_engine import inspect
from helpers.model_configs import CONFIGS, VOCABULARY
from transformers import AutoModelForCausalLM

from benchmarks.gpu.kernels import cases, decodes
from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.attention import reference
from choreograph.attention import triton_backend as triton
from choreograph.attention.metadata import AttentionCall, AttentionMetadata, AttentionSpec, HeadShape
from choreograph.attention.rope import Rope
from choreograph.execution.sampler import sample
from choreograph.request.decode_state import DecodeState

pytestmark = pytest.mark.gpu


def heard(
    name: str,
    device: str,
    backend: str = "auto",
    host: int | None = None,
    compile: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[list[float]]:
    """Log-probabilities of forced tokens in a graph of moved, reordered messages."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype).eval()
    cache = CacheConfig(capacity=256 if host else 1024, page_size=4, poison_freed_pages=True, host_capacity=host)
    config = EngineConfig(backend=backend, cache=cache, compile=compile, compile_sizes=(2, 8, 16) if compile else None)
    engine = Engine.from_pretrained(model, device=device, config=config)
    every = {"sampling": SamplingParams(logprobs=VOCABULARY), "forced_tokens": [3, 1, 4, 1, 5]}
    with engine.session(seed=0) as session:
        first = session.prefill(list(range(5, 25)))
        second = session.prefill([9, 9, 8], [first])
        answers = [session.decode([i], [first, second], **every) for i in range(6)]
        if engine.model_info.supports_shift:
            answers.append(session.decode([7, 2], [second, answers[0], first], offsets=[60, 3, 80], **every))
        engine.run_until_idle()
        engine.check()
        assert not compile or inspect(engine).compiled.capture_error is None
        return [[one.top[t] for t in range(VOCABULARY)] for answer in answers for one in answer.logprobs]


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_says_what_it_says_on_the_cpu(name, backend):
    torch.testing.assert_close(
        torch.tensor(heard(name, "cuda", backend)), torch.tensor(heard(name, "cpu")), atol=2e-3, rtol=1e-3
    )


def attended(plan: AttentionMetadata, heads: HeadShape, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Over noise in bfloat16: by the kernels, and by the reference in float32."""
    kind = AttentionSpec(Rope(tuple(5e5 ** (-2 * i / heads.head_dim) for i in range(heads.head_dim // 2))))
    slots = int(max(plan.slots.max(), plan.kv_runs[:, 1].max())) + 1
    noise = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=noise).to(device, torch.bfloat16)

    query = draw(heads.num_q_heads, plan.num_tokens, heads.head_dim)
    keys, values = (draw(slots, heads.num_kv_heads, heads.head_dim) for _ in range(2))
    key, value = (draw(heads.num_kv_heads, plan.num_tokens, heads.head_dim) for _ in range(2))
    call = AttentionCall(plan, query, key, value, keys, values, heads.head_dim**-0.5, kind)
    in_float32 = replace(call, query=query.float(), keys=keys.float(), values=values.float())
    return triton.attend(call).float(), reference.attend(in_float32)


@pytest.mark.parametrize("case", ["decode of 1", "decode of 8", "decode of 8, shared", "prefill", "moved"])
def test_the_kernels_in_the_shape_of_llama_8b(case):
    plan = decodes(1, 2048, shift=3) if case == "moved" else cases(2048)[case].metadata
    torch.testing.assert_close(*attended(plan, HeadShape(32, 8, 128), "cuda"), atol=2e-2, rtol=2e-2)


def test_a_host_tier_below_a_gpu_gives_the_same():
    small = torch.tensor(heard("llama", "cuda", host=2048))
    torch.testing.assert_close(small, torch.tensor(heard("llama", "cpu")), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "qwen2, window", "gemma2", "granite"])
def test_cuda_graphs_give_the_tokens_of_eager_steps(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not recorded")
        graphed = heard(name, "cuda", "triton", compile=True)
    torch.testing.assert_close(torch.tensor(graphed), torch.tensor(heard(name, "cpu")), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "qwen2, window", "gemma2", "granite"])
def test_graphs_of_few_rows_say_the_same_in_bfloat16(name):
    eager, graphed = (heard(name, "cuda", "triton", compile=c, dtype=torch.bfloat16) for c in (False, True))
    torch.testing.assert_close(torch.tensor(graphed), torch.tensor(eager), atol=6e-2, rtol=2e-2)


def test_tokens_are_drawn_alike_on_both_devices():
    logits = 4 * torch.randn(64, 5000, generator=torch.Generator().manual_seed(0))
    ways = [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05, "temperature": 0.7}, {"temperature": 0}, {"top_k": 2000}]

    def drawn(device: str) -> list[int | None]:
        made = [SamplingParams(**ways[i % len(ways)]) for i in range(64)]
        return sample(
            logits.to(device),
            [DecodeState(one, [], frozenset(), torch.Generator().manual_seed(i)) for i, one in enumerate(made)],
        ).read()

    here, there = drawn("cpu"), drawn("cuda")
    assert sum(a != b for a, b in zip(here, there, strict=True)) <= 1  # rounding may cross an edge


def test_steps_of_graphs_allocate_nothing_that_stays():
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    engine = Engine.from_pretrained(model, device="cuda", config=EngineConfig(compile=True, compile_sizes=(8,)))
    engine.warm_up()
    with engine.session(seed=0) as session:
        root = session.prefill(list(range(5, 25)))
        for i in range(6):
            session.decode([i], [root], sampling=SamplingParams(max_tokens=40, ignore_eos=True))
        for _ in range(5):
            engine.step()
        before = torch.cuda.memory_allocated()
        for _ in range(20):
            engine.step()
        assert torch.cuda.memory_allocated() - before < 1 << 20
