"""Products with 4-bit weights equal those with dequantized weights, for every shape, dtype and number of rows."""

import copy

import pytest
import torch
from helpers import tiny_models
from helpers.inspect_engine import inspect
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lora import save_adapter
from test_packed_linear import calls_of, needs_kernel, profile
from torch import nn
from torch.nn.functional import linear

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.models.compilation.torch_compile import _TokenMixer
from choreograph.models.kernels import int4_linear
from choreograph.models.kernels.int4_linear import Int4Linear, dequantize, pack, quantize, quantize_layers

SHAPES = {
    "width": st.integers(1, 6).map(lambda groups: 32 * groups),
    "features": st.integers(1, 200),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=40, deadline=None)
@given(**SHAPES)
def test_packed_weights_keep_values_scales_and_minimums(width, features, seed):
    weight = torch.randn(features, width, generator=torch.Generator().manual_seed(seed))
    values, scales, minimums = quantize(weight)
    expected = (scales.float()[..., None] * values + minimums.float()[..., None]).flatten(1)
    assert torch.equal(dequantize(pack(values, scales, minimums), features), expected)
    half_step = scales.float().repeat_interleave(32, 1) / 2
    assert ((expected - weight).abs() <= half_step + 3e-3).all()


@needs_kernel
@settings(max_examples=60, deadline=None)
@given(rows=st.one_of(st.integers(1, 26), st.sampled_from([191, 192, 193, 205, 400])), has_bias=st.booleans(), **SHAPES)
def test_products_equal_those_with_dequantized_weights_whatever_the_batch(rows, width, features, has_bias, seed):
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    x, packed, bias = noise(rows, width), pack(*quantize(noise(features, width))), noise(features) if has_bias else None
    out = torch.ops.choreograph.linear_int4(x, packed, bias, features)
    expected = linear(x.float(), dequantize(packed, features), None if bias is None else bias.float())
    assert out.shape == (rows, features) and out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=1e-3 * width**0.5)
    row = seed % rows
    alone = torch.ops.choreograph.linear_int4(x[row : row + 1], packed, bias, features)
    assert torch.equal(alone[0], out[row])


@pytest.mark.parametrize("value", [0.0, 0.125, -3.0])
def test_groups_of_one_value_are_exact(value):
    weight = torch.full((3, 64), value)
    assert torch.equal(dequantize(pack(*quantize(weight)), 3), weight)


def test_weights_of_a_q4_1_file_keep_their_values():
    """Values of such a file are a scale times 0 to 15, plus a minimum, in float16."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (40, 5, 32), generator=generator)
    values[..., 0], values[..., 1] = 0, 15
    scales, minimums = (
        torch.rand(2, 40, 5, 1, generator=generator).half().float() - torch.tensor([0, 0.5])[:, None, None, None]
    )
    weight = (scales * values + minimums).flatten(1)
    assert torch.allclose(dequantize(pack(*quantize(weight)), 40), weight, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_use_dequantized_weights(dtype):
    layer = nn.Linear(64, 70, dtype=dtype)
    model = nn.Sequential(copy.deepcopy(layer))
    quantize_layers(model, set(model))
    x = torch.randn(2, 3, 64, dtype=dtype)
    expected = linear(x, dequantize(model[0].weight, 70).to(dtype), layer.bias)
    assert torch.equal(model(x), expected)


def test_without_the_kernel_bfloat16_uses_dequantized_weights(monkeypatch):
    monkeypatch.setattr(int4_linear, "is_kernel_available", lambda: False)
    model = nn.Sequential(nn.Linear(64, 70).bfloat16())
    quantize_layers(model, set(model))
    assert model[0].packed_projection.operator is int4_linear.linear_dequantized
    x = torch.randn(5, 64).bfloat16()
    expected = linear(x, dequantize(model[0].weight, 70).bfloat16(), model[0].bias)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(("features", "is_shared"), [((64, 128, 20), True), ((64, 20, 64), False)])
def test_projections_with_one_input_share_a_weight_where_panels_end_with_layers(features, is_shared):
    model = nn.Module()
    for name, count in zip(("q_proj", "k_proj", "v_proj"), features, strict=True):
        model.add_module(name, nn.Linear(32, count))
    before = copy.deepcopy(model)
    quantize_layers(model, set(model.children()))
    projections = [layer.packed_projection for layer in model.children()]
    assert (projections[0].packed is projections[1].packed) is is_shared
    x = torch.randn(4, 32)
    for layer, plain, projection in zip(model.children(), before.children(), projections, strict=True):
        assert isinstance(layer, Int4Linear)
        whole = projection.operator(x, projection.packed, projection.bias, projection.features)
        assert torch.equal(layer(x), whole[:, projection.start : projection.end])
        torch.testing.assert_close(layer(x), plain(x), atol=0.2, rtol=0.1)


def tokens_of(engine: Engine, count: int = 1) -> list[list[int]]:
    with engine.session(seed=0) as session:
        root = session.prefill(list(range(40)))
        greedy = SamplingParams(temperature=0, max_tokens=6)
        messages = [session.decode([i, 3], [root], sampling=greedy) for i in range(count)]
        return [message.output_token_ids for message in messages]


def int4_engine(compile: bool = False) -> Engine:
    config = EngineConfig(cache=CacheConfig(capacity=1024), compile=compile, quantization="int4")
    return Engine.from_pretrained(tiny_models.build().bfloat16(), config=config)


class TokenMixer(_TokenMixer):
    def pad_to(self, size: int) -> "TokenMixer":
        return self


@needs_kernel
def test_compiled_steps_equal_eager_ones_and_call_the_kernel_once_per_group():
    engine = int4_engine(compile=True)
    engine.warm_up()
    before, hf_model = engine.stats().num_steps, inspect(engine).hf_model
    with profile() as profiled:
        tokens_of(engine, 3)
    # the logits, since some of the best tokens are nearly equal in bfloat16
    for size in (1, 20, 40):
        batch = list(range(size)), list(range(size)), TokenMixer(), [0, size - 1][:size]
        with torch.no_grad(), hf_model.attention_hook():
            expected, logits = hf_model.logits(*batch).float(), hf_model.compiled(*batch)
        torch.testing.assert_close(logits, expected, rtol=0, atol=0.02 * float(expected.abs().max()))
    num_groups = len({id(layer.packed_projection.packed) for layer in hf_model.compiled._packed_layers})
    assert calls_of(profiled, "choreograph::linear_int4") == (engine.stats().num_steps - before) * num_groups
    assert len(hf_model.compiled._graphs) == 3


def test_the_bundled_model_takes_less_memory():
    engine = Engine.from_pretrained(
        dtype="bfloat16", config=EngineConfig(cache=CacheConfig(capacity=256), quantization="int4")
    )
    model = inspect(engine).model
    size = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "embed" not in name)
    count = sum(layer.in_features * layer.out_features for layer in model.modules() if isinstance(layer, Int4Linear))
    assert 0.62 < size / count < 0.65  # bytes per weight, with scales, minimums and norms
    with engine.session() as session:
        message = session.decode("The capital of France is", sampling=SamplingParams(temperature=0, max_tokens=4))
        assert message.text.strip()


def test_an_adapter_adds_its_part_to_int4_layers(tmp_path):
    save_adapter(tmp_path, 1)
    plain, adapted = int4_engine(), int4_engine()
    adapted.add_adapter("other", tmp_path)
    options = {"forced_tokens": [5, 6, 7], "sampling": SamplingParams(logprobs=0)}

    def logprobs(engine: Engine, model: str) -> list[float]:
        with engine.session() as session:
            message = session.decode([1, 2, 3], model=model, **options)
            return [one.logprob for one in message.logprobs]

    assert logprobs(adapted, "base") == logprobs(plain, "base") != logprobs(adapted, "other")
