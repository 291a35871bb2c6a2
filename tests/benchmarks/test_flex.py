"""FlexAttention, which our kernels are compared with, against the float32 reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention.test_attend import build, plans, reference_of, special, specials, tensors
from helpers.hypothesis_profile import many
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from benchmarks.gpu import flex
from choreograph.attention.backend import FunctionBackend
from choreograph.attention.metadata import AttentionCall, AttentionSpec, KVRead, build_metadata
from choreograph.attention.rope import Rope

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(call: AttentionCall) -> None:
    names = ("query", "key", "value", "keys", "values", *(("sinks",) if call.sinks is not None else ()))
    moved = replace(call, **{name: getattr(call, name).to(DEVICE) for name in names})
    got = FunctionBackend("flex", flex.attend)(moved)
    written = torch.from_numpy(call.metadata.slots)
    call.keys[written], call.values[written] = call.key.transpose(0, 1), call.value.transpose(0, 1)
    torch.testing.assert_close(got.cpu(), reference_of(call), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("shape", [(4, 2, 16), (3, 1, 32), (4, 4, 20)])
@settings(max_examples=many(5, minimum=3), deadline=None, phases=[Phase.generate])
@given(calls=plans(), interleaved=st.booleans(), part=st.sampled_from([1, 2, None]), asked=specials)
def test_flex_attention_equals_the_reference(shape, calls, interleaved, part, asked):
    heads, groups, width = shape
    rotary = part and Rope(tuple(1e4 ** -(np.arange(0, width // part, 2) / width)), interleaved)
    kind, sinks = special(heads, rotary, asked)
    plan = build(calls)
    rows, arenas = tensors(plan, heads, groups, width, torch.float32)
    check(AttentionCall(plan, *rows, *arenas, width**-0.5, kind, sinks))


def test_one_range_at_two_places_is_merged():
    reads = [KVRead(0, row, row + 1, shift, 600, 0, shift) for row, shift in ((0, 0), (1, 5), (2, 0))]
    reads.append(KVRead(0, 2, 3, 40, 600, 0, 40))
    plan = build_metadata([632, 633, 634], reads, [600, 605, 640])
    rows, arenas = tensors(plan, 4, 2, 16, torch.float32)
    kind = AttentionSpec(Rope((1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)))
    check(AttentionCall(plan, *rows, *arenas, 0.25, kind))
