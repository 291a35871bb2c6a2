"""Pages: conserved, owned or free, joined again when freed, poisoned in between."""

import pytest
import torch
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph.errors import CacheFullError
from choreograph.kv_cache.pool import KVPool, PageAllocator, consecutive_runs


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


def test_bytes_per_token_of_a_pool():
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


class ScanningAllocator(PageAllocator):
    """The same choices by a scan of all free runs."""

    def _choose_run(self, count, after, room):
        runs = sorted(self._free_runs.length_at.items())
        for start, _ in runs:
            if after is not None and start == after + 1:
                return start, 0
        longest, length = max(runs, key=lambda run: run[1])
        if room and length > count:
            return longest, 0 if longest == self.first else min(room, (length - count) // 2)
        return next((run for run in runs if run[1] >= count), (longest, length))[0], 0


operations = st.tuples(st.sampled_from(["take", "grow", "free", "extend"]), st.integers(1, 9), st.integers(0, 6))


@settings(max_examples=many(80), deadline=None)
@given(st.integers(0, 40), st.lists(operations, max_size=60))
def test_pages_are_chosen_as_a_scan_of_all_free_runs_chooses_them(count, steps):
    fast, slow, held = PageAllocator(1, count), ScanningAllocator(1, count), []
    for kind, size, other in steps:
        if kind == "extend":
            fast.grow(other)
            slow.grow(other)
        elif kind == "free" and held:
            pages = held.pop(size % len(held))
            fast.release(pages)
            slow.release(pages)
        elif kind in ("take", "grow") and size <= fast.num_free:
            after = held[other % len(held)][-1] if kind == "grow" and held else None
            held.append(fast.allocate(size, after=after, room=other))
            assert slow.allocate(size, after=after, room=other) == held[-1]
        fast.check()
