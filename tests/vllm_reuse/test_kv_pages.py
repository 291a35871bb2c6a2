"""Pages of vLLM's backends are read whatever their layout, and keys are rotated. Needs no vLLM."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from choreograph.vllm.kv_pages import PageReader, Rotary, UnsupportedCacheError, slots_of

BLOCK, HEADS, SIZE = 16, 2, 8


class Layout:
    """A backend whose writer puts key and value of a token where `places` says.

    Args:
        places: place in a block's memory of each (token, head, dimension of the key and then of the value).
    """

    def __init__(self, places: torch.Tensor, step: float | None = None) -> None:
        self._places, self._step = places, step  # step: what a quantized cache can hold

    def do_kv_cache_update(self, layer, keys, values, cache, slots):
        flat = cache.as_strided((len(cache), cache.stride(0)), (cache.stride(0), 1))
        both = torch.cat([keys, values], -1).to(cache.dtype)
        if self._step is not None:
            both = (both / self._step).round() * self._step
        for row, slot in zip(both, slots.tolist(), strict=True):
            flat[slot // BLOCK, self._places[slot % BLOCK]] = row


COUNT = BLOCK * HEADS * 2 * SIZE
ROWS = torch.arange(COUNT).view(BLOCK, HEADS, 2 * SIZE)
LAYOUTS = {
    "rows": ROWS,
    "heads first": torch.arange(COUNT).view(HEADS, BLOCK, 2 * SIZE).transpose(0, 1),
    "keys in columns": torch.arange(COUNT).view(HEADS, 2 * SIZE, BLOCK).permute(2, 0, 1),
    "tiles": torch.randperm(COUNT, generator=torch.Generator().manual_seed(0)).view(BLOCK, HEADS, 2 * SIZE),
}


def make_layer(places: torch.Tensor, step: float | None = None) -> SimpleNamespace:
    return SimpleNamespace(num_kv_heads=HEADS, head_size=SIZE, impl=Layout(places, step))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_written_by_a_backend_are_read(layout, dtype):
    layer, cache = make_layer(LAYOUTS[layout]), torch.zeros(6, HEADS, BLOCK, 2 * SIZE, dtype=dtype)
    reader, blocks = PageReader(layer, cache, BLOCK), [4, 1, 3]
    keys, values = (torch.randn(41, HEADS, SIZE).to(dtype) for _ in range(2))
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots_of(blocks, BLOCK, [(0, 41)]))
    for start, stop in ((0, 41), (5, 20), (15, 17), (32, 41), (40, 41)):
        read = reader.read(cache, reader.locate(blocks, start, stop, cache.device))
        assert torch.equal(read[0], keys[start:stop]) and torch.equal(read[1], values[start:stop])


def test_a_cache_that_rounds_is_refused():
    with pytest.raises(UnsupportedCacheError, match="one by one"):
        PageReader(make_layer(ROWS, step=3.0), torch.zeros(6, HEADS, BLOCK, 2 * SIZE), BLOCK)


@given(st.lists(st.integers(-500, 500), min_size=1, max_size=5), st.booleans(), st.sampled_from([2, 4, 8]))
def test_keys_rotate_by_their_own_shifts(shifts, is_neox, rotary_dim):
    inv_freq = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    rotary = Rotary(inv_freq, is_neox=is_neox)
    keys = torch.randn(len(shifts), HEADS, SIZE)
    result = rotary.rotate(keys, rotary.tables(shifts, keys.device))
    angles = torch.tensor(shifts).double()[:, None, None] * inv_freq.double()
    part = keys[..., :rotary_dim].double()
    halves = part.split(rotary_dim // 2, -1) if is_neox else (part[..., ::2], part[..., 1::2])
    turned = torch.complex(*halves) * torch.polar(torch.ones_like(angles), angles)
    pair = turned.real, turned.imag
    expected = torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)
    torch.testing.assert_close(result[..., :rotary_dim].double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(result[..., rotary_dim:], keys[..., rotary_dim:])


def test_tokens_that_stay_keep_their_bits():
    rotary, keys = Rotary(torch.tensor([1.0, 0.1, 0.01, 0.001]), is_neox=True), torch.randn(3, HEADS, SIZE)
    assert rotary.tables([0, 0, 0], keys.device) is None
    assert torch.equal(rotary.rotate(keys, rotary.tables([0, 5, 0], keys.device))[::2], keys[::2])
