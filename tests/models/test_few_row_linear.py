"""Products of few rows with norm, gating and residual: the kernel, and what graphs are fused to."""

import pytest
import torch
import torch._inductor.config
from helpers import tiny_models
from helpers.graph_stub import boards, engine_with  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from choreograph import SamplingParams
from choreograph.models import cuda_graph, few_row_linear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 20),
    outputs=st.integers(1, 80),
    width=st.sampled_from([16, 128, 160, 320]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    gated=st.booleans(),
    has_bias=st.booleans(),
    has_norm=st.booleans(),
    has_residual=st.booleans(),
)
def test_the_kernel_equals_the_operators(rows, outputs, width, dtype, gated, has_bias, has_norm, has_residual):
    def noise(*size):
        return torch.randn(*size).to(DEVICE, dtype)

    weight = noise(outputs * (2 if gated else 1), width) / width**0.5
    bias, norm = (noise(n) if there else None for n, there in ((len(weight), has_bias), (width, has_norm)))
    residual = noise(1, rows, outputs) if has_residual and not gated else None
    args = (noise(1, rows, width), weight, bias, residual, norm, 1e-5, gated)
    wide = [x.float() if isinstance(x, torch.Tensor) else x for x in args]
    tolerance = 2e-2 if dtype == torch.float16 else 2e-3
    got = few_row_linear.launch(*args)
    torch.testing.assert_close(got.float(), few_row_linear.reference(*wide), atol=tolerance, rtol=tolerance)


def qwen2():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.25, eos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def gemma2():
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None,
    )  # fmt: skip
    return Gemma2ForCausalLM(config).eval()


def answers(engine):
    with engine.session(seed=3) as session:
        root = session.prefill(list(range(20)))
        sampling = SamplingParams(temperature=0, max_tokens=6)
        messages = [session.decode([30 + i], [root], sampling=sampling) for i in range(3)]
        engine.run_until_idle()
        return [message.tokens for message in messages]


@pytest.mark.usefixtures("boards")
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (tiny_models.model, {"few_row_linear": 7, "few_row_gated": 2}),  # of two layers and the head
        (qwen2, {"few_row_linear": 7, "few_row_gated": 2}),
        (gemma2, {"few_row_linear": 9}),  # other norms and another activation
    ],
)
def test_graphs_of_few_rows_are_fused_and_say_the_same(build, expected, monkeypatch):
    counts = {}

    def fuse_and_count(graph):
        few_row_linear.fuse_operators(graph)
        for node in graph.nodes:
            name = str(node.target).removeprefix("choreograph.").removesuffix(".default")
            if name in ("few_row_linear", "few_row_gated", "rms_norm", "silu"):
                counts[name] = counts.get(name, 0) + 1

    monkeypatch.setattr(cuda_graph, "supports_few_rows", lambda _: True)
    monkeypatch.setattr(cuda_graph, "fuse_operators", fuse_and_count)
    with torch._inductor.config.patch(force_disable_caches=True):  # else the pass might not run
        fused = engine_with(build(), use_graphs=True, through_compiler=True)
        assert answers(fused) == answers(engine_with(build(), use_graphs=False))
    assert fused.core.hf_model.compiled.capture_error is None
    assert counts == expected
