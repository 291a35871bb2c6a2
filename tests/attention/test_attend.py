"""Backends against the float32 reference: every type, head size, grouping, rotary variant and page boundary."""

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph.attention import cpp_backend as native
from choreograph.attention import reference
from choreograph.attention.backend import ForwardContext, create_backend
from choreograph.attention.metadata import AttentionCall, AttentionMetadata, AttentionSpec, KVRead, build_metadata
from choreograph.attention.rope import Rope, rotate

CPU = torch.device("cpu")
SLOTS = 760


@st.composite
def plans(draw) -> list[tuple[int, list[tuple[int, int, int]], int]]:
    """Calls as (new rows, [(first slot, length, shift)], tokens before the new ones)."""
    calls = []
    for _ in range(draw(st.integers(1, 5))):
        context = draw(
            st.lists(st.tuples(st.integers(0, 300), st.integers(1, 150), st.integers(-200, 200)), max_size=4)
        )
        calls.append((draw(st.sampled_from([1, 1, 1, 2, 7, 33])), context, draw(st.integers(0, 20))))
    return calls


def build(calls) -> AttentionMetadata:
    reads, slots, positions, row, own = [], [], [], 0, 460
    for rows, context, before in calls:
        seen = set()
        for lo, length, shift in context:
            if lo not in seen:
                reads.append(KVRead(lo, row, row + rows, shift, length, 0, lo + shift))
            seen.add(lo)
        reads.append(KVRead(own, row, row + rows, 0, before + 1, 1, 0))
        slots += range(own + before, own + before + rows)
        positions += range(before, before + rows)
        row, own = row + rows, own + before + rows
    plan = build_metadata(slots, reads, positions)
    plan.check()
    return plan


def scatter(num_rows: int, ranges: list[tuple[int, int, int, int]]) -> AttentionMetadata:
    """Rows scattered over a context of ranges (length, gap behind it, rows before those that read it, shift)."""
    slot, row, reads = 0, 0, [KVRead(380, 0, num_rows, 0, 1, 1, 0)]
    for length, gap, step, shift in ranges:
        row = min(row + step, num_rows - 1)
        reads.append(KVRead(slot, row, num_rows, shift, length, 0, slot + shift))
        slot += length + gap
    plan = build_metadata(list(range(380, 380 + num_rows)), reads, list(range(num_rows)))
    plan.check()
    return plan


short_ranges = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 6), st.integers(0, 30), st.sampled_from([0, 5, 5, -9])), max_size=10
)


def tensors(plan: AttentionMetadata, heads: int, groups: int, width: int, dtype: torch.dtype):
    noise = torch.Generator().manual_seed(plan.num_tokens)

    def draw(*shape):
        return torch.randn(*shape, generator=noise).to(dtype)

    kept = draw(SLOTS, groups, width), draw(SLOTS, groups, width)
    rows = [draw(plan.num_tokens, n, width).transpose(0, 1) for n in (heads, groups, groups)]
    return rows, kept


def reference_of(call: AttentionCall) -> torch.Tensor:
    """What the reference gives in float32 of what the cache holds now."""
    inputs = {name: getattr(call, name).float() for name in ("query", "key", "value", "keys", "values")}
    return reference.attend(replace(call, **inputs))


windows, softcaps = st.sampled_from([None, None, 1, 7, 90, 1000]), st.sampled_from([None, None, 1.5, 30.0])
specials = st.tuples(windows, softcaps, st.booleans(), st.booleans())


def special(heads: int, rotary: Rope | None, asked) -> tuple[AttentionSpec, torch.Tensor | None]:
    """A layer's attention. asked: window, softcap, whether there are slopes, and sinks."""
    window, softcap, sloping, sinking = asked
    slopes = tuple(0.02 * (i + 1) for i in range(heads)) if sloping else None
    return AttentionSpec(rotary, window, softcap, slopes), torch.linspace(-2, 3, heads) if sinking else None


SHAPES = [
    (9, 3, 64),
    (4, 4, 16),
    (2, 1, 256),
    *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((8, 1, 32), (4, 2, 80), (6, 2, 128))),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups", "width"), SHAPES)
@pytest.mark.parametrize("backend", ["native", "sdpa"])
@settings(max_examples=many(12), deadline=None)
@given(calls=plans(), interleaved=st.booleans(), part=st.sampled_from([1, 2, None]), asked=specials)
def test_backends_equal_the_reference(backend, heads, groups, width, dtype, calls, interleaved, part, asked):
    rotary = part and Rope(tuple(1e4 ** -(np.arange(0, width // part, 2) / width)), interleaved)
    kind, sinks = special(heads, rotary, asked)
    plan = build(calls)
    (q, k, v), (keys, values) = tensors(plan, heads, groups, width, dtype)
    work = create_backend(backend, width, dtype, CPU)[0]
    call = AttentionCall(plan, q, k, v, keys, values, width**-0.5, kind, sinks)
    got, expected = work(call), reference_of(call)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


# Plain C++ in place of instructions that a processor may lack.
EMULATED_DOTS = ("-DREGISTER=16", "-DEMULATED_DOTS", "-U__AVX512BF16__", "-U__AMX_BF16__")
EMULATED_AMX = ("-include", str(Path(__file__).parents[1] / "helpers" / "amx_emulation.h"))


@pytest.mark.parametrize(
    ("dtype", "width", "flags"),
    [
        (torch.float32, 80, ("-DREGISTER=8",)),
        (torch.bfloat16, 64, EMULATED_AMX),
        pytest.param(torch.bfloat16, 80, ("-DREGISTER=8",), marks=pytest.mark.slow),
        pytest.param(torch.float32, 80, ("-DREGISTER=16",), marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 80, ("-DREGISTER=16", "-U__AVX512BF16__"), marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 64, EMULATED_DOTS, marks=pytest.mark.slow),
        *(
            pytest.param(torch.bfloat16, width, flags, marks=pytest.mark.slow)
            for width in (16, 80)
            for flags in (EMULATED_DOTS, EMULATED_AMX)
        ),
    ],
)
def test_the_kernel_is_the_same_for_every_instruction_set(dtype, width, flags, tmp_path):
    """A processor builds one of them. A head of 80 leaves a rest of one register."""
    built = native.build(width, dtype, tmp_path, *flags)
    work = native.CppBackend(ctypes.CDLL(str(built)), width, dtype)
    plan = build(
        [(1, [(0, 130, 3), (200, 17, -9)], 5), (33, [(300, 64, 0), (40, 150, 11)], 2), (67, [(300, 64, 5)], 0)]
    )
    scattered = scatter(200, [(15, 2, 5, 3), (40, 4, 9, 3), (7, 1, 12, 3), (80, 3, 30, 0), (1, 4, 9, 0)])
    rotary = Rope(tuple(1e4 ** -(np.arange(0, width, 2) / width)), True)
    plain, special_kind = (None, None, False, False), (90, 30.0, True, True)
    for call_plan, asked, growth in (
        *((plan, plain, 0), (plan, special_kind, 0), (scattered, plain, 0)),
        *((plan, plain, 1), (plan, plain, -1)),  # maxima grow, slowly or at once
    ):
        (q, k, v), (keys, values) = tensors(call_plan, 4, 2, width, dtype)
        keys *= (torch.arange(SLOTS) % 200 / 60 * growth if growth else torch.ones(SLOTS))[:, None, None].to(dtype)
        kind, sinks = special(4, rotary, asked)
        call = AttentionCall(call_plan, q, k, v, keys, values, width**-0.5, kind, sinks)
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(work(call).float(), reference_of(call), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups", "width"), SHAPES)
@settings(max_examples=many(12), deadline=None)
@given(num_rows=st.integers(90, 250), ranges=short_ranges, asked=specials)
def test_short_ranges_that_many_rows_read_are_joined_without_a_difference(
    heads, groups, width, dtype, num_rows, ranges, asked
):
    spec, sinks = special(heads, Rope(tuple(1e4 ** -(np.arange(0, width, 2) / width))), asked)
    plan = scatter(num_rows, ranges)
    (query, key, value), kept = tensors(plan, heads, groups, width, dtype)
    call = AttentionCall(plan, query, key, value, *kept, width**-0.5, spec, sinks)
    result, tolerance = create_backend("native", width, dtype, CPU)[0](call), 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result.float(), reference_of(call), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", ["native", "sdpa"])
@pytest.mark.parametrize("window", [1, 16, 100, 512])
@settings(max_examples=many(30), deadline=None)
@given(at=st.lists(st.integers(0, 1300), min_size=2, max_size=9), lo=st.integers(0, 40), length=st.integers(1, 590))
def test_decodes_at_any_places_share_a_run_through_a_window(backend, window, at, lo, length):
    """Rows of several calls that read one run alike are one reader, however far apart they stand."""
    rows = len(at)
    reads = [KVRead(lo, i, i + 1, 0, length, 0, 7) for i in range(rows)]
    plan = build_metadata([632 + i for i in range(min(rows, 8))] + [0] * max(0, rows - 8), reads, at)
    (q, k, v), (keys, values) = tensors(plan, 4, 2, 16, torch.float32)
    kind = AttentionSpec(None, window)
    call = AttentionCall(plan, q, k, v, keys, values, 0.25, kind)
    got = create_backend(backend, 16, torch.float32, CPU)[0](call)
    torch.testing.assert_close(got, reference_of(call), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", ["native", "sdpa", "reference"])
def test_rows_are_written_before_they_are_read_and_nothing_else_is_touched(backend):
    kind = AttentionSpec(Rope((1.0, 0.1, 0.01, 0.001, 1e-4, 1e-5, 1e-6, 1e-7)))
    plan = build([(3, [(10, 20, 5)], 2), (1, [(462, 3, -9)], 0)])
    (q, k, v), (keys, values) = tensors(plan, 2, 1, 16, torch.float32)
    before = keys.clone(), values.clone()
    create_backend(backend, 16, torch.float32, CPU)[0](AttentionCall(plan, q, k, v, keys, values, 0.25, kind))
    slots = torch.from_numpy(plan.slots)
    assert torch.equal(keys[slots], k.transpose(0, 1))
    assert torch.equal(values[slots], v.transpose(0, 1))
    others = torch.ones(SLOTS, dtype=torch.bool).index_fill_(0, slots, False)
    for kept, old in zip((keys, values), before, strict=True):
        assert torch.equal(kept[others], old[others])


@pytest.mark.parametrize("backend", ["native", "sdpa", "reference"])
def test_slots_that_no_reader_sees_may_hold_nan(backend):
    plan = build([(5, [(0, 31, 3), (100, 64, 0), (200, 65, -1)], 7)])
    (q, k, v), (keys, values) = tensors(plan, 4, 2, 16, torch.float32)
    seen = torch.zeros(SLOTS, dtype=torch.bool)
    for lo, hi, _ in plan.kv_runs:
        seen[lo:hi] = True
    keys[~seen], values[~seen] = float("nan"), float("nan")
    call = AttentionCall(plan, q, k, v, keys, values, 0.25, AttentionSpec(Rope((1.0,) * 8)))
    assert create_backend(backend, 16, torch.float32, CPU)[0](call).isfinite().all()


@pytest.mark.parametrize("backend", ["native", "sdpa", "reference"])
def test_padding_rows_give_zeros_and_write_the_bin(backend):
    plan = build([(2, [(20, 9, 0)], 0)])
    work = create_backend(backend, 16, torch.float32, CPU)[0]
    step = ForwardContext(
        plan, [torch.zeros(SLOTS, 1, 16)], [torch.zeros(SLOTS, 1, 16)], [AttentionSpec(Rope((1.0,) * 8))], work
    )
    padded = step.pad_to(4)
    q, k, v = torch.randn(1, 2, 4, 16), torch.randn(1, 1, 4, 16), torch.randn(1, 1, 4, 16)
    wide = padded.attend(0, q, k, v, 0.25)
    narrow = step.attend(0, q[:, :, :2], k[:, :, :2], v[:, :, :2], 0.25)
    torch.testing.assert_close(wide[:, :2], narrow)
    assert not wide[:, 2:].any()
    assert step.pad_to(2) is step


@settings(max_examples=many(50), deadline=None)
@given(home=st.integers(0, 8000), shift=st.integers(-8000, 8000), interleaved=st.booleans())
def test_a_shift_equals_fresh_rotation(home, shift, interleaved):
    """Rotating by home and then by the shift is rotating by home + shift, thousands of positions away."""
    rotary = Rope(tuple(1e5 ** -(np.arange(0, 64, 2) / 64)), interleaved)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(home), dtype=torch.float64)

    def at(position: int) -> torch.Tensor:
        angles = torch.tensor(rotary.inv_freq, dtype=torch.float64) * position
        return rotate(x, angles.cos(), angles.sin(), interleaved)

    cos, sin = (torch.from_numpy(t[0]).double() for t in rotary.cos_sin([shift]))
    torch.testing.assert_close(rotate(at(home), cos, sin, interleaved), at(home + shift), atol=1e-6, rtol=0)


def test_the_kernel_says_what_it_does_not_cover():
    assert "head size 10" in native.unsupported_reason(10, torch.float32, CPU)
    assert "float16" in native.unsupported_reason(64, torch.float16, CPU)
    assert "cuda" in native.unsupported_reason(64, torch.float32, torch.device("cuda"))
    with pytest.raises(native.BackendUnavailableError, match="head size 10"):
        create_backend("native", 10, torch.float32, CPU)
    backend, reason = create_backend("auto", 10, torch.float32, CPU)
    assert backend.name == "sdpa"
    assert "head size 10" in reason


def test_without_a_compiler_auto_uses_the_flash_kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "user_cache_path", lambda _: tmp_path)
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    native.load_kernel.cache_clear()
    try:
        backend, reason = create_backend("auto", 32, torch.float32, CPU)
    finally:
        native.load_kernel.cache_clear()
    assert backend.name == "sdpa"
    assert "compiler" in reason


def test_readers_of_one_run_share_it():
    """Eight rows over one context are one segment with one reader: the context is read once."""
    reads = [KVRead(0, i, i + 1, 4, 100, 0, 4) for i in range(8)]
    plan = build_metadata(list(range(200, 208)), reads, list(range(8)))
    assert plan.kv_runs.tolist() == [[0, 100, 0]]
    assert plan.reads.tolist() == [[0, 8, 1, 100, 0, 4]]
    assert plan.shifts == [0, 4]


def test_one_run_at_two_placements_for_one_row_stands_twice():
    plan = build_metadata([200], [KVRead(0, 0, 1, 4, 100, 0, 4), KVRead(0, 0, 1, 9, 100, 0, 9)], [0])
    plan.check()
    assert len(plan.kv_runs) == 2
