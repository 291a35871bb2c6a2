"""Operators of decoder layers are the model's own modules, for every family, number of tokens and instruction set."""

import copy
import logging
import math
from pathlib import Path

import pytest
import torch
from helpers import tiny_models
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.model_configs import CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import gelu, linear, rms_norm, silu
from transformers import AutoModelForCausalLM

from choreograph import Engine, EngineConfig, SamplingParams
from choreograph.models.hf_model import HFModel
from choreograph.models.operators import layer_stack, library
from choreograph.models.operators.decoder_layer import FAMILIES
from choreograph.models.operators.library import GELU, PLAIN, SILU, LinearOperator, NormOperator
from choreograph.models.operators.model_operators import ModelOperators, TokenMixer, create_operators

COVERED = [name for name, config in CONFIGS.items() if config.get_text_config().model_type in FAMILIES]
DTYPES = (torch.float32, torch.bfloat16)
EMULATED = ("-include", str(Path(__file__).parents[1] / "helpers" / "amx_emulation.h"), "-Wno-psabi")
BUILDS = {
    "8 lanes": ("-DREGISTER=8",),
    "16 lanes": ("-DREGISTER=16", "-U__AVX512BF16__", "-Wno-psabi"),
    "AMX": EMULATED,
}


def random_model(name, dtype=torch.float32):
    """A tiny model whose norms and biases are random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
        parameter.data = parameter.data.to(dtype)
    return model


class Norm(nn.Module):
    """An RMS norm with its eps under the name that Llama gives it."""

    def __init__(self, width, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width).to(dtype))


def expected_linear(x, layers, norm, adds_one, mode):
    """The operator's result in float64, from inputs rounded as it rounds them."""
    if norm is not None:
        unit = rms_norm(x.float(), x.shape[-1:], eps=1e-5)
        weight = norm.weight.float()
        x = (unit * (1 + weight)).to(x.dtype) if adds_one else unit.to(x.dtype) * norm.weight
    parts = [
        linear(x.double(), part.weight.double(), None if part.bias is None else part.bias.double()) for part in layers
    ]
    if mode == PLAIN:
        return torch.cat(parts, -1)
    first, second = torch.cat(parts, -1).chunk(2, -1)
    return (silu(first) if mode == SILU else gelu(first, approximate="tanh")) * second


@st.composite
def products(draw):
    mode = draw(st.sampled_from([PLAIN, PLAIN, SILU, GELU]))
    count = draw(st.integers(1, 3)) if mode == PLAIN else 2
    features = [draw(st.integers(1, 150)) for _ in range(count)]
    if mode != PLAIN:
        features = [features[0]] * 2
        if draw(st.booleans()):
            features = [2 * features[0]]  # a joint projection
    return {
        "features": features,
        "mode": mode,
        "inputs": draw(st.sampled_from([1, 16, 32, 33, 64, 100, 192])),
        "rows": draw(st.sampled_from([1, 2, 5, 6, 13, 40, 64, 65, 97, 130])),
        "has_bias": draw(st.booleans()),
        "norm": draw(st.sampled_from([None, False, True])),
        "has_residual": mode == PLAIN and draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


def check_product(case, dtype, kernels=None):
    torch.manual_seed(case["seed"])
    inputs, scale = case["inputs"], case["inputs"] ** -0.5
    layers = [nn.Linear(inputs, count, bias=case["has_bias"]).to(dtype) for count in case["features"]]
    for layer in layers:
        nn.init.normal_(layer.weight, std=scale)
    x = torch.randn(1, case["rows"], inputs).to(dtype)
    norm = None if case["norm"] is None else Norm(inputs, dtype)
    operator = LinearOperator(layers, norm and NormOperator(norm, 1e-5, case["norm"]), case["mode"])
    if kernels is not None:
        operator._kernels, operator.max_rows = kernels, math.inf
    with torch.no_grad():
        expected = expected_linear(x, layers, norm, case["norm"], case["mode"])
        residual = torch.randn_like(expected).to(dtype) if case["has_residual"] else None
        result = operator(x, residual)
    expected = expected if residual is None else expected + residual.double()
    assert result.dtype == dtype and result.shape == expected.shape
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=many(200), deadline=None)
@given(case=products())
def test_a_linear_operator_is_a_norm_products_and_what_follows(case, dtype):
    check_product(case, dtype)


@pytest.fixture(scope="module", params=BUILDS)
def built(request, tmp_path_factory):
    """The library for another processor than this one."""
    return library.build(tmp_path_factory.mktemp("operators"), "-O1", *BUILDS[request.param])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=many(60), deadline=None)
@given(case=products())
def test_the_operator_is_the_same_for_every_instruction_set(built, case, dtype):
    check_product(case, dtype, library.kernels_of(built, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [96, 160, 2080, 2081])  # the last two: more than are packed at once
def test_a_token_does_not_depend_on_the_others_of_its_step(built, inputs, dtype):
    """On every instruction set, as far as kernels of our own multiply: bit for bit."""
    torch.manual_seed(0)
    layers = [nn.Linear(inputs, features, bias=False).to(dtype) for features in (70, 33)]
    operator = LinearOperator(layers)
    operator._kernels, operator.max_rows = library.kernels_of(built, dtype), math.inf
    x = torch.randn(300, inputs).to(dtype)
    whole = operator(x)
    expected = expected_linear(x, layers, None, False, PLAIN)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(whole.double(), expected, atol=tolerance, rtol=tolerance)
    for rows in (1, 2, 6, 8, 17, 40, 48, 64, 65, 130):
        assert torch.equal(operator(x[:rows]), whole[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", COVERED)
def test_the_operators_of_a_family_are_its_modules(name, dtype, caplog):
    hf_model = HFModel(random_model(name, dtype), max_positions=128)
    operators = create_operators(hf_model)  # compares them
    assert operators is not None and not caplog.records
    tokens, positions = list(range(30)), list(range(3, 33))
    with torch.no_grad(), hf_model.attention_hook():
        expected = hf_model.logits(tokens, positions, TokenMixer(), [0, 17, 29])
        with operators.applied():
            result = hf_model.logits(tokens, positions, TokenMixer(), [0, 17, 29])
    if dtype == torch.float32:
        torch.testing.assert_close(result.log_softmax(-1), expected.log_softmax(-1), atol=1e-5, rtol=1e-5)
    assert not any("forward" in vars(module) for module in hf_model.model.modules())


def logprobs_of_a_conversation(engine):
    """Log-probabilities of a reply to two reordered messages, one of them read from elsewhere."""
    sampling = SamplingParams(temperature=0, max_tokens=5, logprobs=3)
    with engine.session() as session:
        first, second = session.prefill([7, 8, 9] * 5), session.prefill([3, 1, 4] * 7)
        both = session.decode([1, 2], parents=[second, first], sampling=sampling)
        later = session.decode([5], parents=[first], new_offset=40, sampling=sampling)
        return [(answer.output_token_ids, answer.logprobs) for answer in (both, later)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", COVERED)
def test_all_layers_in_one_call_are_the_layers_one_by_one(name, dtype, monkeypatch):
    counts = []
    call = layer_stack.LayerStack.__call__
    monkeypatch.setattr(layer_stack.LayerStack, "__call__", lambda *args, **kw: counts.append(1) or call(*args, **kw))
    results = []
    for max_rows in (256, 0):
        monkeypatch.setattr(layer_stack, "MAX_ROWS", max_rows)
        engine = Engine.from_pretrained(random_model(name, dtype), config=EngineConfig(backend="native"))
        results.append((logprobs_of_a_conversation(engine), bool(counts)))
        counts.clear()
    (stacked, used), (single, unused) = results
    assert used and not unused
    assert stacked == single


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_on_layers_are_called(kind):
    model = random_model("llama")
    engine = Engine.from_pretrained(model)
    expected = logprobs_of_a_conversation(engine)
    calls = []
    getattr(model.model.layers[1], kind)(lambda *args: calls.append(1))
    engine.clear_cache()
    assert logprobs_of_a_conversation(engine) == expected and calls


def test_a_layer_that_computes_something_else_keeps_its_own_path(caplog):
    model = tiny_models.build()

    class Doubled(type(model.model.layers[1].mlp)):
        def forward(self, x):
            return 2 * super().forward(x)

    model.model.layers[1].mlp.__class__ = Doubled
    with caplog.at_level(logging.WARNING, "choreograph"):
        engine = Engine.from_pretrained(model)
    assert inspect(engine).hf_model.operators is None
    assert len(caplog.records) == 1 and "computes something else" in caplog.text


def test_a_layer_with_other_parts_keeps_its_own_path(caplog):
    model = tiny_models.build()
    model.model.layers[0].mlp.gate_norm = nn.LayerNorm(4)
    with caplog.at_level(logging.WARNING, "choreograph"):
        assert create_operators(HFModel(model)) is None
    assert len(caplog.records) == 1 and "gate_norm" in caplog.text


@pytest.mark.parametrize("change", ["forward", "hook", "dtype"])
def test_a_layer_that_is_not_its_class_alone_keeps_its_own_path(change, caplog):
    model = random_model("gemma3_text", torch.bfloat16)
    mlp = model.model.layers[0].mlp
    if change == "forward":
        mlp.forward = mlp.forward
    elif change == "hook":
        mlp.register_forward_hook(lambda module, args, output: None)
    else:
        model.model.layers[0].input_layernorm.float()
    with caplog.at_level(logging.WARNING, "choreograph"):
        assert create_operators(HFModel(model)) is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "change",
    [lambda model: model.double(), lambda model: setattr(model.model.layers[0].mlp, "up_proj", nn.Linear(32, 48))],
)
def test_a_model_that_its_owner_changes_keeps_its_own_path(change, caplog):
    hf_model = HFModel(tiny_models.build())
    operators = create_operators(hf_model)
    change(hf_model.model)
    with caplog.at_level(logging.WARNING, "choreograph"):
        for _ in range(2):
            with operators.applied():
                assert not any("forward" in vars(module) for module in hf_model.model.modules())
    assert len(caplog.records) == 1 and "create the engine again" in caplog.text


def test_the_owners_forward_method_stays():
    hf_model = HFModel(tiny_models.build())
    operators, layer = create_operators(hf_model), hf_model.model.model.layers[0]
    layer.forward = own = layer.forward
    with operators.applied():
        assert layer.forward is own
    assert layer.forward is own


def test_other_backends_leave_all_to_pytorch():
    for backend, has_operators in (("auto", True), ("native", True), ("sdpa", False), ("reference", False)):
        engine = Engine.from_pretrained(tiny_models.build(), config=EngineConfig(backend=backend))
        assert (inspect(engine).hf_model.operators is not None) == has_operators


def test_weights_that_move_are_read_where_they_are():
    model = tiny_models.build()
    other = copy.deepcopy(model)
    engine = Engine.from_pretrained(model)
    greedy = SamplingParams(temperature=0, max_tokens=8)

    def answer(engine):
        with engine.session() as session:
            return session.decode([1, 2, 3], sampling=greedy).output_token_ids

    first = answer(engine)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert answer(engine) == first
    for parameter in (*model.parameters(), *other.parameters()):
        parameter.data = parameter.data.flip(0).contiguous()
    engine.clear_cache()
    assert answer(engine) == answer(Engine.from_pretrained(other, config=EngineConfig(backend="sdpa")))


def test_operators_of_4_bit_layers_are_their_modules():
    torch.manual_seed(0)
    hf_model = HFModel(tiny_models.build(intermediate=64).bfloat16())
    hf_model.quantize("int4")
    assert isinstance(create_operators(hf_model), ModelOperators) or not library.cpp_backend.has_avx2()


@pytest.mark.skipif(not library.cpp_backend.has_avx2(), reason="the kernel of 4-bit weights needs AVX2")
def test_biases_of_4_bit_layers_that_the_owner_changes_are_read():
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS["qwen2"])
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 256, 64
    model = AutoModelForCausalLM.from_config(config).eval().bfloat16()
    hf_model = HFModel(model, max_positions=64)
    hf_model.quantize("int4")
    operators, tokens, positions = create_operators(hf_model), list(range(9)), list(range(9))
    with torch.no_grad(), hf_model.attention_hook():
        seen = []
        for _ in range(2):
            with operators.applied():
                result = hf_model.logits(tokens, positions, TokenMixer(), [8])
            seen.append(hf_model.logits(tokens, positions, TokenMixer(), [8]))
            torch.testing.assert_close(result.float(), seen[-1].float(), atol=0.3, rtol=0)
            for layer in model.model.layers:
                layer.self_attn.k_proj.bias.data = torch.full_like(layer.self_attn.k_proj.bias, 3.0)
    assert (seen[1] - seen[0]).abs().max() > 1
