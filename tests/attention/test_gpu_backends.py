"""What GPUs compute with, against the float32 reference: Triton's kernels (interpreted here), and SDPA."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import tiny_models
from helpers.hypothesis_profile import many
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_attend import build, plans, reference_of, special, specials, tensors

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.attention import backend as attend
from choreograph.attention import triton_backend as triton
from choreograph.attention import triton_partition as tiles
from choreograph.attention.backend import create_backend
from choreograph.attention.metadata import AttentionCall, AttentionSpec, HeadShape, KVRead, build_metadata
from choreograph.attention.rope import Rope

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = [
    *(("triton", "float32", shape) for shape in ((4, 2, 16), (3, 1, 32), (7, 7, 20))),
    ("triton", "float16", (4, 2, 16)),
    *(pytest.param("triton", "float16", shape, marks=pytest.mark.slow) for shape in ((3, 1, 32), (7, 7, 20))),
    *(("sdpa", "float32", shape) for shape in ((4, 2, 16), (3, 1, 32), (4, 4, 20))),
]


def on_device(call: AttentionCall) -> AttentionCall:
    names = ("query", "key", "value", "keys", "values", "sinks")
    tensors = {name: getattr(call, name) for name in names}
    return replace(call, **{name: x.to(DEVICE) for name, x in tensors.items() if x is not None})


def attended(name: str, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """By a backend on the device, and by the reference of what it was to write and read."""
    got = create_backend(name, call.keys.shape[2], call.keys.dtype, DEVICE)[0](on_device(call))
    attend.write(torch.from_numpy(call.metadata.slots), call.key, call.value, call.keys, call.values)
    return got, reference_of(call)


@pytest.mark.parametrize(("name", "dtype", "shape"), CASES)
@settings(max_examples=many(5, minimum=3), deadline=None, phases=[Phase.generate])
@given(calls=plans(), interleaved=st.booleans(), part=st.sampled_from([1, 2, None]), asked=specials)
def test_gpu_backends_equal_the_reference(name, dtype, shape, calls, interleaved, part, asked):
    (heads, groups, width), kept = shape, getattr(torch, dtype)
    rotary = part and Rope(tuple(1e4 ** -(np.arange(0, width // part, 2) / width)), interleaved)
    kind, sinks = special(heads, rotary, asked)
    plan = build(calls)
    rows, (keys, values) = tensors(plan, heads, groups, width, kept)
    call = AttentionCall(plan, *rows, keys, values, width**-0.5, kind, sinks)
    got, expected = attended(name, call)
    tolerance = 2e-5 if dtype == "float32" else 5e-3
    torch.testing.assert_close(got.float().cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["triton", "sdpa"])
def test_a_long_run_of_few_rows_is_cut_and_merged(name):
    """Three decodes over one context of 600 slots, one of them at two places at once."""
    reads = [KVRead(0, row, row + 1, shift, 600, 0, shift) for row, shift in ((0, 0), (1, 5), (2, 0))]
    reads.append(KVRead(0, 2, 3, 40, 600, 0, 40))
    plan = build_metadata([632, 633, 634], reads, [600, 605, 640])
    (q, k, v), (keys, values) = tensors(plan, 4, 2, 16, torch.float32)
    kind = AttentionSpec(Rope((1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)))
    got, expected = attended(name, AttentionCall(plan, q, k, v, keys, values, 0.25, kind))
    torch.testing.assert_close(got.cpu(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("shape", [(4, 2, 16), (3, 1, 64)])
def test_whole_tiles_of_a_long_run_need_no_masks(shape, monkeypatch):
    """Eighty rows over a run of 550 slots, of which some see 530 or 1; and over their own tokens."""
    reads = [KVRead(0, row, row + 1, row % 3, 530 if row % 7 else 550, 0, row % 3) for row in range(79)]
    reads += [KVRead(0, 79, 80, 0, 1, 0, 0), KVRead(550, 0, 80, 0, 1, 1, 550)]
    monkeypatch.setattr(tiles, "MIN_SPLIT", 1024)  # else a run is cut before it is long
    heads, groups, width = shape
    for some in (reads, reads[:78] + reads[80:]):  # where one sees a single slot, no tile is whole
        plan = build_metadata(list(range(550, 630)), some, list(range(550, 630)))
        (q, k, v), (keys, values) = tensors(plan, heads, groups, width, torch.float32)
        kind = AttentionSpec(Rope(tuple(1e4 ** -(np.arange(0, 16, 2) / 16))))
        got, expected = attended("triton", AttentionCall(plan, q, k, v, keys, values, 0.25, kind))
        torch.testing.assert_close(got.cpu(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_of_large_tiles_go_through_memory(interleaved, monkeypatch):
    """A hundred and forty rows over a run that every row sees turned otherwise, and over their own tokens."""
    reads = [KVRead(0, row, row + 1, row % 5, 70, 0, row % 5) for row in range(140)] + [KVRead(70, 0, 140, 0, 1, 1, 75)]
    plan = build_metadata(list(range(70, 210)), reads, list(range(75, 215)))
    (q, k, v), (keys, values) = tensors(plan, 2, 1, 20, torch.float16)
    kind = AttentionSpec(
        Rope(tuple(1e4 ** -(np.arange(0, 8) / 8)), interleaved)
    )  # the last four numbers are not turned
    assert triton.launch_config(HeadShape(2, 1, 20), triton.tile_rows(HeadShape(2, 1, 20), 140, 2), 2, kind, False)[
        "Q_VIA_GMEM"
    ]
    keys[70:210], values[70:210] = k.transpose(0, 1), v.transpose(0, 1)
    call = AttentionCall(plan, q, k, v, keys, values, 0.25, kind)
    expected = reference_of(call)
    for room in (1 << 20, 0):
        monkeypatch.setattr(triton, "MAX_ROTATED_Q_BYTES", room)
        got = triton.attend(on_device(call))
        torch.testing.assert_close(got.float().cpu(), expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize(("rows", "groups", "width"), [(1, 1, 16), (7, 2, 20), (70, 3, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_written_into_their_slots(rows, groups, width, dtype):
    """From where a product of several matrices left them: rows lie apart, heads too."""
    noise = torch.Generator().manual_seed(rows)
    made = torch.randn(rows, 3 * groups * width, generator=noise).to(DEVICE, dtype)
    key, value = (made[:, i * groups * width :][:, : groups * width].view(rows, groups, width) for i in (0, 2))
    slots = torch.randperm(100, generator=noise)[:rows].to(DEVICE)
    key, value = key.transpose(0, 1), value.transpose(0, 1)
    arenas = [[torch.zeros(100, groups, width, dtype=dtype, device=DEVICE) for _ in range(2)] for _ in range(2)]
    for write, arena in zip((triton.write, attend.write), arenas, strict=True):
        write(slots, key, value, *arena)
    for got, expected in zip(*arenas, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["triton"])
def test_an_engine_says_the_same_with_them(name):
    greedy = SamplingParams(temperature=0, max_tokens=4)

    def talk(backend: str) -> list[list[int]]:
        config = EngineConfig(backend=backend, cache=CacheConfig(capacity=256, page_size=4, poison_freed_pages=True))
        engine = Engine.from_pretrained(tiny_models.model(), device=DEVICE, config=config)
        with engine.session() as session:
            first, second = session.prefill([5, 9, 17, 3]), session.prefill([44, 21])
            both = [
                session.decode([7], [first, second], sampling=greedy),
                session.decode([7, 8], [second, first], offsets=[20, 3], new_offset=30, sampling=greedy),
            ]
            return [message.output_token_ids for message in both]

    assert talk(name) == talk("reference")
