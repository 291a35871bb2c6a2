"""Keys and values in int8: the error of an encoded row, and every backend against the reference that decodes."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attend import CPU, EMULATED_AMX, EMULATED_DOTS, SLOTS, build, plans, special, specials, tensors

from choreograph.attention import cpp_backend, int8_rows, reference
from choreograph.attention.backend import Backend, create_backend
from choreograph.attention.metadata import AttentionCall, AttentionSpec
from choreograph.attention.rope import Rope

DEVICES = {"triton": torch.device("cuda" if torch.cuda.is_available() else "cpu")}
numbers = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


@settings(max_examples=many(200), deadline=None)
@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(numbers, min_size=4 * n, max_size=4 * n), min_size=1)))
def test_an_encoded_row_is_at_most_half_a_step_off(rows):
    x = torch.tensor(rows)
    encoded = int8_rows.encode(x)
    assert encoded.dtype == torch.int8 and encoded.shape == (len(x), x.shape[1] + int8_rows.SCALE_BYTES)
    steps = x.double().abs().amax(-1, keepdim=True).clamp(min=int8_rows.MIN_MAGNITUDE) / 127
    error = (int8_rows.decode(encoded).double() - x.double()).abs()
    assert (error <= steps * (0.5 + 1e-4)).all()  # quotient, scale and product are rounded to float32


def test_rows_of_the_largest_number_keep_it_and_zeros_stay_zeros():
    x = torch.tensor([[127.0, -127.0, 3.0, 0.0], [0.0] * 4, [-0.5, 2.5, 1.5, 127.0]])
    assert torch.equal(int8_rows.decode(int8_rows.encode(x))[:2], x[:2])
    assert int8_rows.encode(x)[2, :3].tolist() == [0, 2, 2], "half is rounded to even"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_makes_its_row_nan(number):
    decoded = int8_rows.decode(int8_rows.encode(torch.tensor([[1.0, number, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]])))
    assert decoded[0].isnan().all() and decoded[1].isfinite().all()


def encoded_call(plan, heads: int, groups: int, width: int, dtype: torch.dtype, spec: AttentionSpec, sinks):
    (q, k, v), kept = tensors(plan, heads, groups, width, dtype)
    return AttentionCall(plan, q, k, v, *map(int8_rows.encode, kept), width**-0.5, spec, sinks)


def attend(backend: str | Backend, call: AttentionCall) -> torch.Tensor:
    """Attend by a backend that stores int8, and check what it writes."""
    device = DEVICES.get(backend, CPU) if isinstance(backend, str) else CPU
    before = call.keys.clone(), call.values.clone()
    moved = {
        name: None if (x := getattr(call, name)) is None else x.to(device)
        for name in ("query", "key", "value", "keys", "values", "sinks")
    }
    on_device = AttentionCall(metadata=call.metadata, scale=call.scale, spec=call.spec, **moved)
    if isinstance(backend, str):
        backend, _ = create_backend(backend, call.query.shape[2], call.query.dtype, device, torch.int8)
    result = backend(on_device)
    slots = torch.from_numpy(call.metadata.slots)
    others = torch.ones(SLOTS, dtype=torch.bool).index_fill_(0, slots, False)
    for kept, old, new in zip((on_device.keys, on_device.values), before, (call.key, call.value), strict=True):
        assert torch.equal(kept.cpu()[others], old[others])
        assert torch.equal(kept.cpu()[slots], int8_rows.encode(new.transpose(0, 1)))
    call.keys.copy_(on_device.keys)
    call.values.copy_(on_device.values)
    return result.float().cpu()


CASES = [
    *(("native", dtype, (9, 3, 64)) for dtype in ("float32", "bfloat16")),
    *(
        pytest.param("native", dtype, shape, marks=pytest.mark.slow)
        for dtype in ("float32", "bfloat16")
        for shape in ((8, 1, 32), (4, 2, 80))
    ),
    *(("sdpa", dtype, shape) for dtype in ("float32", "bfloat16") for shape in ((9, 3, 64), (4, 2, 80), (8, 1, 20))),
    *(("triton", "float32", shape) for shape in ((4, 2, 16), (7, 7, 20))),
    *(pytest.param("triton", "float16", shape, marks=pytest.mark.slow) for shape in ((4, 2, 16), (7, 7, 20))),
]


@pytest.mark.parametrize(("backend", "dtype", "shape"), CASES)
@settings(max_examples=many(8, minimum=3), deadline=None)
@given(calls=plans(), interleaved=st.booleans(), part=st.sampled_from([1, 2, None]), asked=specials)
def test_backends_over_int8_equal_the_reference(backend, dtype, shape, calls, interleaved, part, asked):
    (heads, groups, width), dtype = shape, getattr(torch, dtype)
    rotary = part and Rope(tuple(1e4 ** -(np.arange(0, width // part // 2 * 2, 2) / width)), interleaved)
    spec, sinks = special(heads, rotary, asked)
    call = encoded_call(build(calls), heads, groups, width, dtype, spec, sinks)
    result = attend(backend, call)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result, reference.attend(call).float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", ["native", "triton", "sdpa", "reference"])
def test_rows_are_encoded_before_they_are_read_and_nothing_else_is_touched(backend):
    plan = build([(3, [(10, 20, 5)], 2), (1, [(462, 3, -9)], 0)])
    attend(backend, encoded_call(plan, 2, 1, 16, torch.float32, AttentionSpec(Rope((1.0,) * 8)), None))


@pytest.mark.parametrize("backend", ["native", "triton", "sdpa", "reference"])
def test_freed_memory_gives_nan_only_where_it_is_read(backend):
    plan = build([(5, [(0, 31, 3), (100, 64, 0), (200, 65, -1)], 7)])
    for is_read in (False, True):
        call = encoded_call(plan, 4, 2, 16, torch.float32, AttentionSpec(Rope((1.0,) * 8)), None)
        seen = torch.zeros(SLOTS, dtype=torch.bool)
        for start, end, _ in plan.kv_runs:
            seen[start:end] = True
        call.keys[~seen], call.values[~seen] = -1, -1
        call.values[100 if is_read else SLOTS - 1] = -1
        assert attend(backend, call).isfinite().all() == (not is_read)


@pytest.mark.parametrize(
    ("dtype", "flags"),
    [
        (torch.bfloat16, EMULATED_AMX),
        *(
            pytest.param(dtype, flags, marks=pytest.mark.slow)
            for dtype, flags in (
                (torch.float32, ("-DREGISTER=8",)),
                (torch.float32, ("-DREGISTER=16",)),
                (torch.bfloat16, ("-DREGISTER=16", "-U__AVX512BF16__")),
                (torch.bfloat16, EMULATED_DOTS),
            )
        ),
    ],
)
def test_the_kernel_over_int8_is_the_same_for_every_instruction_set(dtype, flags, tmp_path):
    built = cpp_backend.build(80, dtype, tmp_path, *flags, kv_dtype=torch.int8)
    kernel = cpp_backend.CppBackend(ctypes.CDLL(str(built)), 80, dtype, torch.int8)
    plan = build(
        [(1, [(0, 130, 3), (200, 17, -9)], 5), (33, [(300, 64, 0), (40, 150, 11)], 2), (67, [(300, 64, 5)], 0)]
    )
    rope = Rope(tuple(1e4 ** -(np.arange(0, 80, 2) / 80)), True)
    for asked in ((90, 30.0, True, True), (None, None, False, False)):
        call = encoded_call(plan, 4, 2, 80, dtype, *special(4, rope, asked))
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(attend(kernel, call), reference.attend(call).float(), atol=tolerance, rtol=tolerance)
    call.values[120] = -1  # freed memory, which the first row reads
    assert not attend(kernel, call)[0].isfinite().any()


def test_the_kernel_encodes_as_torch_does():
    """Magnitudes of all orders, halves of steps, and rows with numbers that are not finite."""
    noise = torch.Generator().manual_seed(3)
    rows = torch.randn(64, 2, 32, generator=noise) * 10.0 ** torch.randint(-33, 30, (64, 2, 1), generator=noise)
    rows[:8] = torch.arange(-16, 16) / 2 * 127 / 8
    rows[8], rows[9, 0, 5], rows[10, 1, 7] = 0.0, float("nan"), float("-inf")
    call = encoded_call(build([(64, [], 0)]), 2, 2, 32, torch.float32, AttentionSpec(), None)
    key = rows.transpose(0, 1).contiguous()
    kernel = create_backend("native", 32, torch.float32, CPU, torch.int8)[0]
    kernel(replace(call, key=key, value=key))
    written = call.keys[torch.from_numpy(call.metadata.slots)]
    finite = rows.isfinite().all(-1)
    assert torch.equal(written[finite], int8_rows.encode(rows)[finite])
    assert int8_rows.decode(written[~finite]).isnan().all()
