"""Products with 4-bit weights equal those with dequantized weights, for every shape, dtype and number of rows."""

import copy
from pathlib import Path

import pytest
import torch
from helpers import tiny_models
from helpers.inspect_engine import inspect
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lora import save_adapter
from torch import nn
from torch.nn.functional import linear, silu

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.attention.cpp_backend import cpu_flags
from choreograph.models.kernels import int4_linear
from choreograph.models.kernels.int4_linear import (
    Int4Linear,
    dequantize,
    is_kernel_available,
    linear_dequantized,
    linear_int4,
    load_kernel,
    pack,
    quantize,
    quantize_layers,
)

MIN_TILE_ROWS = 4  # as in int4_linear.cpp
needs_kernel = pytest.mark.skipif(not is_kernel_available(), reason="the processor has no AVX2 instructions")

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


def make_noise(seed: int):
    """Return a function from a shape to random bfloat16 values."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).bfloat16()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The processor's kernel, that of processors without bfloat16 instructions, and one with emulated tiles."""
    folder, emulation = tmp_path_factory.mktemp("native"), Path(__file__).parents[1] / "helpers" / "amx_emulation.h"
    without = ("-U__AVX512BF16__", "-U__AMX_BF16__")
    return {
        "native": load_kernel(),
        "avx2": load_kernel(folder, *without),
        "amx": load_kernel(folder, "-include", str(emulation)),
    }


@needs_kernel
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("name", ["native", "avx2", "amx"])
@settings(max_examples=50, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from([191, 192, 193, 205, 400])),
    has_bias=st.booleans(),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    **SHAPES,
)
def test_products_equal_those_with_dequantized_weights_whatever_the_batch(
    kernels, name, is_gated, rows, width, features, has_bias, scale, seed
):
    noise, options = make_noise(seed), {"is_gated": is_gated, "kernel": kernels[name]}
    features = 64 * (features // 64 + 1) if is_gated else features
    total = features * (1 + is_gated)
    x, packed, bias = scale * noise(1, rows, width), pack(*quantize(noise(total, width))), noise(total)
    out = linear_int4(x, packed, bias if has_bias else None, features, **options)
    expected = linear_dequantized(x.float(), packed, bias.float() if has_bias else None, total)
    tolerance = {"rtol": 2**-7, "atol": 1e-3 * scale * width**0.5}
    if is_gated:  # the kernel rounds both factors
        gate, other = (
            linear_int4(x, packed, bias if has_bias else None, total, kernel=kernels[name]).float().chunk(2, -1)
        )
        torch.testing.assert_close(torch.cat([gate, other], -1), expected, **tolerance)
        expected, tolerance = silu(gate) * other, {"rtol": 2**-8, "atol": 1e-30}
    assert out.shape == (1, rows, features) and out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), expected, **tolerance)
    row, has_tiles = seed % rows, name == "amx" or (name == "native" and "amx_bf16" in cpu_flags())
    # Bits of a row are equal in all batches that vectors multiply, and in all that tiles multiply.
    fewest = MIN_TILE_ROWS if has_tiles and rows >= MIN_TILE_ROWS else 1
    alone = linear_int4(x[:, row].expand(fewest, -1), packed, bias if has_bias else None, features, **options)
    assert all(torch.equal(result, out[0, row]) for result in alone)


@needs_kernel
def test_a_gate_that_is_not_finite_stays_so():
    x, packed = torch.full((1, 32), torch.inf).bfloat16(), pack(*quantize(torch.ones(128, 32)))
    assert not linear_int4(x, packed, None, 64, is_gated=True).isfinite().any()
    assert linear_int4(x * torch.nan, packed, None, 64, is_gated=True).isnan().all()


@needs_kernel
def test_inputs_that_are_not_contiguous():
    x, packed = torch.randn(1, 64, 5).bfloat16().transpose(1, 2), pack(*quantize(torch.randn(70, 64)))
    assert torch.equal(linear_int4(x, packed, None, 70), linear_int4(x.contiguous(), packed, None, 70))


def test_a_gradient_is_that_of_the_dequantized_weight():
    model = nn.Sequential(nn.Linear(64, 70).bfloat16())
    quantize_layers(model, set(model))
    x = torch.randn(5, 64).bfloat16().requires_grad_()
    model(x).sum().backward()
    expected = dequantize(model[0].weight, 70).bfloat16().sum(0).expand(5, 64)
    torch.testing.assert_close(x.grad, expected, rtol=2e-2, atol=2e-2)


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
    layers = list(model.children())
    assert (layers[0].joint_weight is layers[1].joint_weight) is is_shared
    x = torch.randn(4, 32)
    joint = layers[0].joint_weight
    whole = linear_dequantized(x, joint.packed, joint.bias, joint.features)
    parts = whole.split(features if is_shared else features[:1], dim=1)
    assert all(torch.equal(layer(x), part) for layer, part in zip(layers, parts, strict=False))
    for layer, plain in zip(layers, before.children(), strict=True):
        assert isinstance(layer, Int4Linear)
        torch.testing.assert_close(layer(x), plain(x), atol=0.2, rtol=0.1)
    copied = copy.deepcopy(model)
    assert copied.q_proj.joint_weight is None and torch.equal(copied.q_proj(x), model.q_proj(x))


def int4_engine() -> Engine:
    config = EngineConfig(cache=CacheConfig(capacity=1024), quantization="int4")
    return Engine.from_pretrained(tiny_models.build().bfloat16(), config=config)


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
