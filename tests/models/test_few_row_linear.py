"""Products of few rows with norm, gating and residual: the kernel, and what graphs are fused to."""

import pytest
import torch
import torch._inductor.config
from helpers import tiny_models
from helpers.graph_stub import boards, engine_with  # noqa: F401
from helpers.hypothesis_profile import only_thorough
from helpers.inspect_engine import inspect
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from choreograph import SamplingParams
from choreograph.models.compilation import cuda_graph
from choreograph.models.kernels import few_row_linear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 20),
    outputs=st.integers(1, 150),
    width=st.sampled_from([16, 128, 160]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    gated=st.booleans(),
    has_bias=st.booleans(),
    is_normed=st.booleans(),
    has_residual=st.booleans(),
    is_scaled=st.booleans(),
)
def test_the_kernel_equals_the_operators(
    rows, outputs, width, dtype, gated, has_bias, is_normed, has_residual, is_scaled
):
    def noise(*size):
        return torch.randn(*size).to(DEVICE, dtype)

    weight, input = noise(outputs * (2 if gated else 1), width) / width**0.5, noise(1, rows, width)
    bias = noise(len(weight)) if has_bias else None
    residual = noise(1, rows, outputs) if has_residual else None
    squares = torch.rand(3, rows, device=DEVICE) * width if is_normed else None
    norm_weight = noise(outputs) if is_scaled else None
    args = (input, weight, bias, residual, squares, 1e-5)
    wide = [x.float() if isinstance(x, torch.Tensor) else x for x in args]
    tolerance = 2e-2 if dtype == torch.float16 else 2e-3
    got = few_row_linear.launch(*args, gated=gated, norm_weight=norm_weight)
    wide_weight = norm_weight.float() if norm_weight is not None else None
    expected = few_row_linear.reference(*wide, gated=gated, norm_weight=wide_weight)
    for a, b in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(a.float(), b, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got[2].sum(0), expected[2].sum(0), atol=1e-2, rtol=2 * tolerance)


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
        # of two layers and the head; the first norm reads embeddings
        (tiny_models.model, {"few_row_linear": 3, "few_row_gated": 2, "few_row_residual": 4, "rms_norm": 1}),
        pytest.param(
            qwen2,
            {"few_row_linear": 3, "few_row_gated": 2, "few_row_residual": 4, "rms_norm": 1},
            marks=(pytest.mark.slow, only_thorough),
        ),
        # other norms and another activation
        pytest.param(gemma2, {"few_row_linear": 9}, marks=(pytest.mark.slow, only_thorough)),
    ],
)
def test_graphs_of_few_rows_are_fused_and_say_the_same(build, expected, monkeypatch):
    counts = {}

    def fuse_and_count(graph):
        few_row_linear.fuse_operators(graph)
        for node in graph.nodes:
            name = str(node.target).removeprefix("choreograph.").removesuffix(".default")
            if name in ("few_row_linear", "few_row_gated", "few_row_residual", "rms_norm", "silu"):
                counts[name] = counts.get(name, 0) + 1

    monkeypatch.setattr(cuda_graph, "supports_few_rows", lambda _: True)
    monkeypatch.setattr(cuda_graph, "fuse_operators", fuse_and_count)
    with torch._inductor.config.patch(force_disable_caches=True):  # else the pass might not run
        fused = engine_with(build(), use_graphs=True, through_compiler=True)
        assert answers(fused) == answers(engine_with(build(), use_graphs=False))
    assert inspect(fused).compiled.capture_error is None
    assert counts == expected
