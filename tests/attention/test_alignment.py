"""Aligned attention: the reference against its definition, and every backend against the reference."""

import ctypes
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.hypothesis_profile import many
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_attend import CPU, EMULATED_AMX, EMULATED_DOTS, reference_of, special, specials, tensors

from choreograph.attention import cpp_backend, reference
from choreograph.attention.backend import create_backend
from choreograph.attention.metadata import (
    Alignment,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    KVRead,
    build_metadata,
)
from choreograph.attention.rope import Rope

alignments = st.one_of(
    st.none(), st.builds(Alignment, st.sampled_from([0.5, 0.8, 1.0, 1.3]), st.sampled_from([0.1, 0.7, 1.0, 4.0]))
)
slices = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 150), st.integers(-200, 200), st.booleans()), max_size=4
)
calls_of_a_batch = st.lists(
    st.tuples(st.sampled_from([1, 1, 1, 2, 7, 33]), slices, st.integers(0, 20), alignments), min_size=1, max_size=5
)


def build(calls) -> AttentionMetadata:
    """Batch of calls (new tokens, [(first slot, length, shift, is reused)], tokens before, alignment)."""
    reads, slots, positions, row, own = [], [], [], 0, 460
    for rows, context, before, alignment in calls:
        seen = set()
        for first, length, shift, is_reused in context:
            if first not in seen:
                used = alignment if is_reused else None
                reads.append(KVRead(first, row, row + rows, shift, length, 0, first + shift, used))
            seen.add(first)
        reads.append(KVRead(own, row, row + rows, 0, before + 1, 1, 0))
        slots += range(own + before, own + before + rows)
        positions += range(before, before + rows)
        row, own = row + rows, own + before + rows
    metadata = build_metadata(slots, reads, positions)
    metadata.check()
    if (aligned := metadata.with_aligned_rows()) is not None:
        aligned.metadata.check()
    return metadata


def make_call(metadata: AttentionMetadata, shape, dtype: torch.dtype, interleaved: bool, asked) -> AttentionCall:
    heads, groups, width = shape
    spec, sinks = special(heads, Rope(tuple(1e4 ** -(np.arange(0, width, 2) / width)), interleaved), asked)
    rows, kept = tensors(metadata, heads, groups, width, dtype)
    return AttentionCall(metadata, *rows, *kept, width**-0.5, spec, sinks)


@settings(max_examples=many(40), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=5),
    alignment=st.builds(Alignment, st.floats(0.3, 2), st.floats(0.05, 5)),
    sinking=st.booleans(),
)
def test_the_reference_weighs_aligned_keys_as_one(lengths, alignment, sinking):
    """One query, in float64: the logit of all aligned keys is T logsumexp(s / T) + log(S)."""
    reads, slot, is_aligned = [], 0, []
    for length, is_reused in lengths:
        reads.append(KVRead(slot, 0, 1, 0, length, 0, slot, alignment if is_reused else None))
        slot, is_aligned = slot + length, is_aligned + [is_reused] * length
    metadata = build_metadata([slot], reads, [slot])
    noise = torch.Generator().manual_seed(slot)
    query, keys, values = (torch.randn(n, 1, 16, generator=noise) for n in (1, slot + 1, slot + 1))
    sinks = torch.tensor([0.7]) if sinking else None
    call = AttentionCall(metadata, query, query, query, keys, values, 0.25, AttentionSpec(), sinks)
    result = reference.attend(call)[0, 0].double()
    scores = (keys[:slot, 0].double() @ query[0, 0].double()) * 0.25
    temperature, mask = alignment.temperature, torch.tensor(is_aligned)
    logits = [scores[~mask].logsumexp(0), torch.tensor(0.7).double()]
    parts = [scores[~mask].softmax(0) @ values[:slot, 0].double()[~mask], torch.zeros(16).double()]
    if mask.any():
        inside = scores[mask] / temperature
        logits.append(temperature * inside.logsumexp(0) + math.log(alignment.scale))
        parts.append(inside.softmax(0) @ values[:slot, 0].double()[mask])
    if not sinking:
        logits[1] = torch.tensor(-math.inf).double()
    expected = (torch.stack(logits).softmax(0)[:, None] * torch.stack(parts)).sum(0)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 16), (4, 2, 80)])
@pytest.mark.parametrize("backend", ["native", "sdpa"])
@settings(max_examples=many(20), deadline=None)
@given(calls=calls_of_a_batch, interleaved=st.booleans(), asked=specials)
def test_backends_align_like_the_reference(backend, shape, dtype, calls, interleaved, asked):
    call = make_call(build(calls), shape, dtype, interleaved, asked)
    result = create_backend(backend, shape[2], dtype, CPU)[0](call)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result.float(), reference_of(call), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@settings(max_examples=many(6, minimum=4), deadline=None, phases=[Phase.generate])
@given(calls=calls_of_a_batch, interleaved=st.booleans(), asked=specials)
def test_triton_aligns_like_the_reference(dtype, calls, interleaved, asked):
    call = make_call(build(calls), (4, 2, 16), dtype, interleaved, asked)
    result = create_backend("triton", 16, dtype, CPU)[0](call)
    tolerance = 5e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(result.float(), reference_of(call), atol=tolerance, rtol=tolerance)


LONG = [
    (1, [(0, 130, 3, True), (200, 17, -9, False)], 5, Alignment(0.8, 0.5)),
    (33, [(300, 64, 0, True), (40, 150, 11, True)], 2, Alignment(0.9, 2.0)),
    (67, [(300, 64, 5, False)], 0, None),
]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("-DREGISTER=8",), EMULATED_DOTS, EMULATED_AMX])
def test_the_kernel_aligns_with_every_instruction_set(flags, tmp_path):
    built = cpp_backend.build(64, torch.bfloat16, tmp_path, *flags)
    backend = cpp_backend.CppBackend(ctypes.CDLL(str(built)), 64, torch.bfloat16)
    call = make_call(build(LONG), (4, 2, 64), torch.bfloat16, False, (None, None, False, False))
    torch.testing.assert_close(backend(call).float(), reference_of(call), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("backend", ["native", "sdpa", pytest.param("triton", marks=pytest.mark.slow)])
def test_an_alignment_of_ones_changes_nothing(backend):
    neutral = [(*call[:3], call[3] and Alignment(1.0, 1.0)) for call in LONG]
    plain = [(*call[:3], None) for call in LONG]
    results = [
        create_backend(backend, 16, torch.float32, CPU)[0](
            make_call(build(calls), (4, 2, 16), torch.float32, False, (None, None, False, False))
        )
        for calls in (neutral, plain)
    ]
    torch.testing.assert_close(*results, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", ["native", "sdpa", "triton"])
def test_a_constant_added_to_all_products_changes_nothing(backend):
    """Models whose keys have a large bias, such as Qwen 2, have products far from zero."""
    metadata = build([(1, [(0, 40, 0, True), (100, 30, 0, False)], 3, Alignment(0.7, 0.5))])
    rows, (keys, values) = tensors(metadata, 2, 1, 16, torch.float32)
    query, key, value = rows
    query, key, keys = query.clone(), key.clone(), keys.clone()
    query[..., 0], keys[..., 0] = 1, 0
    call = AttentionCall(metadata, query, key, value, keys, values, 0.25, AttentionSpec())
    work = create_backend(backend, 16, torch.float32, CPU)[0]
    results = []
    for bias in (0.0, 40.0):
        biased_keys, biased_key = keys.clone(), key.clone()
        biased_keys[..., 0], biased_key[..., 0] = bias, bias
        results.append(work(replace(call, keys=biased_keys, key=biased_key)))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_padding", [0, 1])
def test_a_decode_stays_aligned_in_the_next_step(num_padding):
    decodes = [(1, [(0, 130, 3, True), (200, 17, -9, False)], 5, Alignment(0.8, 0.5)), (1, [], 3, None)]
    metadata = build(decodes)
    metadata.with_aligned_rows()
    metadata = metadata.next_step().pad_to(2 + num_padding)
    rows, (keys, values) = tensors(metadata, 4, 2, 16, torch.float32)
    call = AttentionCall(metadata, *rows, keys, values, 0.25, AttentionSpec())
    result = create_backend("native", 16, torch.float32, CPU)[0](call)
    torch.testing.assert_close(result, reference_of(call), atol=2e-5, rtol=2e-5)
    plain = build([(*decode[:3], None) for decode in decodes]).next_step().pad_to(2 + num_padding)
    assert (result[0] - reference_of(replace(call, metadata=plain))[0]).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=many(6), deadline=None)
@given(
    num_rows=st.integers(90, 250),
    ranges=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 6), st.sampled_from([0, 5, 5, -9]), st.booleans()), max_size=10
    ),
    asked=specials,
)
def test_a_prefill_over_short_ranges_aligns_like_the_reference(dtype, num_rows, ranges, asked):
    """The kernel joins adjacent ranges that are read alike; aligned ones are read by rows of their own."""
    slot, reads = 0, [KVRead(500, 0, num_rows, 0, 1, 1, 0)]
    for length, gap, shift, is_reused in ranges:
        alignment = Alignment(0.8, 0.6) if is_reused else None
        reads.append(KVRead(slot, 0, num_rows, shift, length, 0, slot + shift, alignment))
        slot += length + gap
    metadata = build_metadata(list(range(500, 500 + num_rows)), reads, list(range(num_rows)))
    call = make_call(metadata, (6, 2, 64), dtype, False, asked)
    result = create_backend("native", 64, dtype, CPU)[0](call)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result.float(), reference_of(call), atol=tolerance, rtol=tolerance)
