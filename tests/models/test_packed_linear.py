"""Packed bfloat16 products equal products in float32, for every shape, and compiled steps that use them eager ones."""

import copy
import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_models
from helpers.inspect_engine import inspect
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import linear, silu
from torch.utils._python_dispatch import TorchDispatchMode

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.attention.cpp_backend import BackendUnavailableError, compile_library
from choreograph.models.compilation import graph_passes, torch_compile
from choreograph.models.kernels import int4_linear, packed_linear
from choreograph.models.kernels.packed_linear import (
    CPP_20,
    call_packed,
    kernel_of,
    load_kernel,
    pack,
    pack_model,
    packed_for_tracing,
)

try:
    load_kernel()
    int4_linear.is_kernel_available()
    AVAILABLE = True
except BackendUnavailableError:
    AVAILABLE = False

needs_kernel = pytest.mark.skipif(not AVAILABLE, reason="the processor has no AVX2 instructions")


def make_noise(seed: int):
    """Return a function from a shape to random bfloat16 values."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).bfloat16()


@needs_kernel
@settings(max_examples=60, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 14), st.sampled_from([191, 192, 193, 400])),
    width=st.integers(1, 90).map(lambda half: 2 * half),
    features=st.integers(1, 200),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_packed_products_equal_float32_products(rows, width, features, has_bias, seed):
    noise = make_noise(seed)
    x, weight, bias = noise(1, rows, width), noise(features, width), noise(features) if has_bias else None
    out = torch.ops.choreograph.linear(x, pack(weight), bias, features)
    expected = linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert out.shape == (1, rows, features) and out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=1e-3 * width**0.5)


@pytest.fixture(scope="module")
def avx2_kernels(tmp_path_factory):
    """Kernels without AVX-512 bfloat16 instructions, by name."""
    folder, result = tmp_path_factory.mktemp("native"), {}
    for source, name in (("packed_linear.cpp", "linear"), ("int4_linear.cpp", "linear_int4")):
        path = Path(packed_linear.__file__).with_name(source)
        sources = [path, path.with_name("packed_panels.h")]
        library = compile_library(path.stem, sources, (CPP_20, "-U__AVX512BF16__"), folder)
        result[name] = kernel_of(ctypes.CDLL(str(library)), name)
    return result


@needs_kernel
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("is_int4", [False, True])
@settings(max_examples=30, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from([191, 192, 193, 400])),
    groups=st.integers(1, 3),
    features=st.integers(1, 200),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_products_without_dot_products_equal_float32_products(
    avx2_kernels, is_int4, is_gated, rows, groups, features, has_bias, seed
):
    noise = make_noise(seed)
    width, features = 32 * groups, 64 * (features // 64 + 1) if is_gated else features
    total = features * (1 + is_gated)
    x, weight, bias = noise(rows, width), noise(total, width), noise(total) if has_bias else None
    name, packed, reference = "linear", pack(weight), weight.float()
    if is_int4:
        name, packed = "linear_int4", int4_linear.pack(*int4_linear.quantize(weight))
        reference = int4_linear.dequantize(packed, total)
    out = call_packed(avx2_kernels[name], is_gated, x, packed, bias, features)
    expected = linear(x.float(), reference, None if bias is None else bias.float())
    if is_gated:
        gate, other = expected.chunk(2, -1)
        expected = silu(gate) * other
    tolerance = {"rtol": 2**-5, "atol": 2e-2 * width**0.5} if is_gated else {"rtol": 2**-7, "atol": 1e-3 * width**0.5}
    torch.testing.assert_close(out.float(), expected, **tolerance)
    # a row does not depend on the others
    alone = call_packed(avx2_kernels[name], is_gated, x[-1:], packed, bias, features)
    assert torch.equal(alone, out[-1:])


@needs_kernel
@settings(max_examples=60, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from([191, 192, 193, 400])),
    groups=st.integers(1, 3),
    panels=st.integers(1, 5),
    has_bias=st.booleans(),
    is_int4=st.booleans(),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_gated_products_equal_silu_of_one_half_times_the_other(rows, groups, panels, has_bias, is_int4, scale, seed):
    noise = make_noise(seed)
    width, features, own = 32 * groups, 64 * panels, torch.ops.choreograph
    x, weight, bias = scale * noise(1, rows, width), noise(2 * features, width), noise(2 * features)
    name, packed = "linear", pack(weight)
    if is_int4:
        name, packed = "linear_int4", int4_linear.pack(*int4_linear.quantize(weight))
    given_bias = bias if has_bias else None
    gate, other = getattr(own, name)(x, packed, given_bias, 2 * features).float().chunk(2, -1)
    out = getattr(own, f"{name}_gated")(x, packed, given_bias, features)
    assert out.shape == (1, rows, features) and out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), silu(gate) * other, rtol=2**-8, atol=1e-30)


@needs_kernel
def test_a_gate_that_is_not_finite_stays_so():
    x, weight = torch.full((1, 32), torch.inf).bfloat16(), torch.ones(128, 32).bfloat16()
    out = torch.ops.choreograph.linear_gated(x, pack(weight), None, 64)
    assert out.isinf().all()
    assert torch.ops.choreograph.linear_gated(x * torch.nan, pack(weight), None, 64).isnan().all()


@needs_kernel
def test_inputs_that_are_not_contiguous():
    x, weight = torch.randn(1, 40, 5).bfloat16().transpose(1, 2), torch.randn(70, 40).bfloat16()
    out = torch.ops.choreograph.linear(x, pack(weight), None, 70)
    torch.testing.assert_close(out.float(), linear(x.float(), weight.float()), rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(70, 64).bfloat16(),
        torch.randn(64, 128).bfloat16().T,
        torch.randn(64 * 64 + 1).bfloat16()[1:].view(64, 64),
    ],
    ids=["padded", "transposed", "odd offset"],
)
def test_panels_hold_pairs_of_input_features_of_any_view(weight):
    packed = pack(weight)
    rows = packed.transpose(1, 2).reshape(-1, weight.shape[1])
    assert torch.equal(rows[: len(weight)], weight) and not rows[len(weight) :].any()


def test_packing_pads_the_last_panel_with_zeros():
    weight = torch.arange(70 * 4).view(70, 4).bfloat16()
    packed = pack(weight)
    assert packed.shape == (2, 2, 64, 2)
    assert torch.equal(packed[1, 1, 3], weight[67, 2:]) and not packed[1, :, 6:].any()


@needs_kernel
def test_projections_with_one_input_share_a_packed_weight():
    model = tiny_models.build().bfloat16()
    before, ids = copy.deepcopy(model), torch.arange(9)[None]
    layers = pack_model(model)
    attention = model.model.layers[0].self_attn
    parts = [attention.q_proj.packed_projection, attention.k_proj.packed_projection]
    assert parts[0].packed is parts[1].packed and parts[0].end == parts[1].start == attention.q_proj.out_features
    assert model.state_dict().keys() == before.state_dict().keys()
    with packed_for_tracing(layers):
        torch.testing.assert_close(model(ids).logits, before(ids).logits, rtol=0.05, atol=0.05)
    assert not any("forward" in vars(layer) for layer in layers)
    assert copy.deepcopy(model).model.layers[0].mlp.up_proj.packed_projection is None


def test_layers_that_the_kernel_cannot_compute_are_left_out():
    assert pack_model(tiny_models.model()) == []  # float32
    odd = nn.Sequential(nn.Linear(7, 20), nn.Linear(64, 20)).bfloat16()
    assert pack_model(odd) == [odd[1]]
    few = nn.Sequential(nn.Linear(7, 640), nn.Linear(64, 8)).bfloat16()  # less than half of the weights
    assert pack_model(few) == []


def compiled_engine(intermediate: int = 48) -> Engine:
    config = EngineConfig(cache=CacheConfig(capacity=1024), compile=True, compile_sizes=(4,))
    return Engine.from_pretrained(tiny_models.build(intermediate=intermediate).bfloat16(), config=config)


def tokens_of(engine: Engine) -> list[int]:
    with engine.session(seed=0) as session:
        message = session.decode(list(range(3)), sampling=SamplingParams(temperature=0, max_tokens=6))
        return list(message.tokens)


def profile() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def calls_of(profiled: torch.profiler.profile, name: str) -> int:
    return sum(event.count for event in profiled.key_averages() if event.key == name)


def calls_per_step(engine: Engine, *names: str) -> list[float]:
    """Calls of operators in a step, after a run that compiles."""
    tokens_of(engine)
    before = engine.stats().num_steps
    with profile() as profiled:
        tokens_of(engine)
    return [calls_of(profiled, f"choreograph::{name}") / (engine.stats().num_steps - before) for name in names]


@needs_kernel
def test_a_compiled_step_calls_the_kernel_once_per_group():
    """Two layers of four groups, and the output layer."""
    assert calls_per_step(compiled_engine(), "linear") == [9]


class ProductRows(TorchDispatchMode):
    """Rows of each product over a packed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "choreograph":
            self.rows.append(args[0].shape[1])
        return func(*args, **(kwargs or {}))


@needs_kernel
@pytest.mark.parametrize("reads_all", [False, True])
def test_what_follows_the_attention_is_computed_for_selected_tokens_alone(reads_all):
    weights = [pack(torch.randn(64, 64).bfloat16()) for _ in range(3)]

    def last_layer(attended, residual, rows, first, second, third):
        hidden = residual + torch.ops.choreograph.linear(attended, first, None, 64)
        wide = torch.ops.prims.convert_element_type(hidden, torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        normed = torch.ops.prims.convert_element_type(normed, torch.bfloat16)
        hidden = hidden + torch.ops.choreograph.linear(normed, second, None, 64)
        logits = torch.ops.choreograph.linear(hidden[:, rows], third, None, 64)
        return (logits, hidden.sum()) if reads_all else (logits,)

    inputs = [torch.randn(1, 9, 64).bfloat16(), torch.randn(1, 9, 64).bfloat16(), torch.tensor([7, 2]), *weights]
    graph = make_fx(last_layer, tracing_mode="symbolic")(*inputs)
    expected = graph(*inputs)
    graph_passes.select_rows_early(graph.graph)
    graph.graph.lint()
    graph.recompile()
    with ProductRows() as products:
        results = graph(*inputs)
    assert products.rows == ([9, 9, 2] if reads_all else [2, 2, 2])
    assert all(torch.equal(result, value) for result, value in zip(results, expected, strict=True))


@needs_kernel
def test_a_compiled_step_gates_in_the_product():
    assert calls_per_step(compiled_engine(intermediate=128), "linear", "linear_gated", "silu") == [7, 2, 0]


@needs_kernel
@pytest.mark.parametrize(("source", "name"), [("packed_linear.cpp", "linear"), ("int4_linear.cpp", "linear_int4")])
def test_without_pytorchs_headers_the_kernel_is_called_from_python(monkeypatch, source, name):
    registered = {}
    monkeypatch.setattr(packed_linear, "_operator_flags", lambda: ("-include", "missing.h"))
    monkeypatch.setattr(
        packed_linear,
        "operator_library",
        SimpleNamespace(impl=lambda name, run, device: registered.update({name: run})),
    )
    packed_linear.load_operator(source, name)
    x, weight, bias = torch.randn(1, 3, 64).bfloat16(), torch.randn(70, 64).bfloat16(), torch.randn(70).bfloat16()
    packed = pack(weight) if name == "linear" else int4_linear.pack(*int4_linear.quantize(weight))
    expected = getattr(torch.ops.choreograph, name)(x, packed, bias, 70)
    assert torch.equal(registered[name](x, packed, bias, 70), expected)
    assert f"{name}_gated" in registered


def test_without_the_kernel_graphs_are_frozen(monkeypatch):
    def unavailable() -> None:
        raise BackendUnavailableError("no compiler")

    monkeypatch.setattr(torch_compile, "load_kernel", unavailable)
    engine = compiled_engine()
    assert inspect(engine).compiled._packed_layers == []
    assert len(tokens_of(engine)) == 9


@needs_kernel
def test_after_a_warm_up_no_step_of_any_size_traces_a_graph(monkeypatch):
    config = EngineConfig(cache=CacheConfig(capacity=1024), compile=True)
    engine = Engine.from_pretrained(tiny_models.build().bfloat16(), config=config)
    engine.warm_up()

    def fail(*_, **__):
        raise AssertionError("a graph is traced")

    monkeypatch.setattr(torch_compile, "compile_model", fail)
    with engine.session(seed=0) as session:
        root = session.prefill(list(range(40)))
        greedy = SamplingParams(temperature=0, max_tokens=3)
        for count in (1, 2, 5, 17):
            branches = [session.decode([30 + i], [root], sampling=greedy) for i in range(count)]
            assert all(len(branch.tokens) == 4 for branch in branches)
    engine.check()


@needs_kernel
def test_a_graph_that_is_traced_by_two_tokens_without_logits_serves_others(monkeypatch):
    monkeypatch.setattr(torch_compile, "cpu_flags", lambda: "")  # as without AMX: one graph for all steps of few tokens
    config = EngineConfig(cache=CacheConfig(capacity=1024), compile=True)
    engine = Engine.from_pretrained(tiny_models.build(seed=5).bfloat16(), config=config)
    with engine.session(seed=0) as session:
        first = session.prefill([1, 2])
        engine.run_until_idle()
        assert first.done
        branches = [session.decode([30 + i], [first], max_tokens=2) for i in range(17)]
        assert all(len(branch.tokens) == 3 for branch in branches)
    assert set(inspect(engine).compiled._graphs) <= {1, "few"}


@needs_kernel
def test_with_amx_only_small_steps_use_the_kernel(monkeypatch):
    monkeypatch.setattr(torch_compile, "cpu_flags", lambda: "avx512_bf16 amx_bf16")
    compiled = inspect(compiled_engine()).compiled
    assert [compiled._is_packed(size) for size in (1, 8, 16, None)] == [True, True, False, False]


@needs_kernel
def test_a_compiled_step_computes_the_rotary_tables_once():
    assert calls_per_step(compiled_engine(), "cos", "sin") == [1, 1]
