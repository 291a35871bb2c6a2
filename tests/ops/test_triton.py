"""The Triton kernels, through the interpreter where there is no GPU, against the float32 reference."""

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_attend import SLOTS, build, plans, special, specials, tensors

from choreograph.ops import reference
from choreograph.ops import triton as kernels
from choreograph.ops.rope import Rotary

SHAPES = [(4, 2, 16), (3, 1, 32), (7, 7, 20), (8, 1, 64)]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "groups", "width"), SHAPES)
@settings(max_examples=4, deadline=None, phases=[Phase.generate])
@given(calls=plans(), interleaved=st.booleans(), part=st.sampled_from([1, 2, None]), asked=specials)
def test_kernels_equal_the_reference(heads, groups, width, dtype, calls, interleaved, part, asked):
    rotary = part and Rotary(tuple(1e4 ** -(np.arange(0, width // part, 2) / width)), interleaved)
    kind, sinks = special(heads, rotary, asked)
    plan = build(calls)
    (q, _, _), (keys, values) = tensors(plan, heads, groups, width, dtype)
    sent = [x.to(DEVICE) for x in (q, keys, values)]
    got = kernels.attend(plan, *sent, width**-0.5, kind, sinks if sinks is None else sinks.to(DEVICE))
    wanted = reference.attend(plan, q.float(), keys.float(), values.float(), width**-0.5, kind, sinks)
    tolerance = 2e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(got.float().cpu(), wanted, atol=tolerance, rtol=tolerance)
    assert keys.shape[0] == SLOTS
