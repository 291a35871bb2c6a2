"""Pages: conserved, owned or free, joined again when freed, poisoned in between."""

import pytest
import torch
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph.errors import CacheFullError
from choreograph.kv_cache.pool import KVPool, consecutive_runs


def make(pages: int = 12, poison: bool = True) -> KVPool:
    return KVPool(
        pages=pages,
        page_size=2,
        layers=[(1, 4), (2, 8)],
        dtype=torch.float32,
        device=torch.device("cpu"),
        poison_freed_pages=poison,
    )


@settings(max_examples=many(80), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "free"]), st.integers(0, 7)), max_size=40))
def test_any_sequence_of_operations_keeps_every_page(steps):
    arena, held = make(), []
    for kind, size in steps:
        if kind == "take":
            if size > arena.free_pages:
                with pytest.raises(CacheFullError, match=f"needs {size} pages"):
                    arena.allocate(size)
            else:
                held.append(arena.allocate(size))
        elif held:
            arena.release(held.pop(size % len(held)))
        arena.check()
    for pages in held:
        arena.release(pages)
    arena.check()
    assert arena.free_pages == 12
    assert len(consecutive_runs(arena.allocate(12))) == 1, "free runs joined again"


def test_a_long_run_is_preferred_to_pieces():
    arena = make()
    parts = [arena.allocate(3) for _ in range(4)]
    arena.release(parts[0])
    arena.release(parts[2])
    arena.release(parts[3])
    assert arena.allocate(5) == [7, 8, 9, 10, 11]
    assert sorted(arena.allocate(4)) == [1, 2, 3, 12]


def test_freed_pages_are_poisoned_and_the_bin_is_never_given_out():
    arena = make()
    pages = arena.allocate(12)
    assert 0 not in pages
    for tensor in (*arena.keys, *arena.values):
        tensor.zero_()
    arena.release(pages[:1])
    assert arena.keys[1][2:4].isnan().all()
    assert not arena.keys[1][4:].isnan().any()


def test_bytes_per_token():
    assert make().bytes_per_token == 2 * 4 * (1 * 4 + 2 * 8)


def test_a_band_lies_behind_the_pages_of_its_layers_and_keeps_what_is_there():
    arena = make(pages=4)
    pages = arena.allocate(2)
    slots = [page * 2 + i for page in pages for i in range(2)]
    for tensors in (arena.keys, arena.values):
        for tensor in tensors:
            tensor[slots] = 1.0
    arena.grow_partial_pool([1], 3)
    band = arena.allocate(2, partial=True)
    arena.keys[1][band[0] * 2] = 2.0
    arena.grow_partial_pool([0, 1], 5)
    assert (arena.num_pages(partial=True), arena.num_free(partial=True), arena.free_pages) == (5, 3, 2)
    assert [len(k) for k in arena.keys] == [20, 20]
    assert all((tensor[slots] == 1.0).all() for tensor in (*arena.keys, *arena.values))
    assert (arena.keys[1][band[0] * 2] == 2.0).all()
    arena.check()
    arena.release([*pages, *band])
    assert all(tensor.isnan().all() for tensor in (*arena.keys, *arena.values))
    arena.check()
