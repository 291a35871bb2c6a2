"""A plan as work for programs: what arrays give is what plain loops give, and what goes on with a plan is right."""

import numpy as np
import pytest
from helpers import tile_reference
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph.attention import triton_partition as tiles
from choreograph.attention.metadata import AttentionMetadata, AttentionSpec, KVRead, build_metadata

NAMES = ("work_items", "kv_chunks", "row_params", "rows", "merge_order", "merge_indptr")


@st.composite
def steps(draw) -> tuple[list[int], list[KVRead], list[int]]:
    """Rows of chunks and of single tokens, which share contexts or do not, at several placements."""
    calls = [draw(st.sampled_from([1, 1, 1, 2, 5, 40])) for _ in range(draw(st.integers(1, 9)))]
    contexts = [(10_000 * (1 + i), draw(st.integers(1, 700))) for i in range(draw(st.integers(1, 4)))]
    reads, positions, row = [], [], 0
    for number, count in enumerate(calls):
        at = draw(st.integers(0, 300))
        for lo, length in draw(st.lists(st.sampled_from(contexts), unique=True, max_size=4)):
            shift = draw(st.sampled_from([0, 0, 7, -20]))
            reads.append(KVRead(lo, row, row + count, shift, length, 0, at + shift))
        done = draw(st.integers(0, 200))
        reads.append(KVRead(200_000 + 1000 * number, row, row + count, 0, done + 1, 1, at + 700))
        positions += range(at + 700 + done, at + 700 + done + count)
        row += count
    return list(range(row)), reads, positions


@given(steps(), st.sampled_from([None, 3, 90, 2000]), st.sampled_from([1, 4, 32]), st.sampled_from([1, 8]))
@settings(max_examples=many(120), deadline=None)
def test_arrays_are_those_of_plain_loops(step, window, tile, groups):
    plan = build_metadata(*step)
    for shortest in (64, 128):
        tiles.MIN_SPLIT, before = shortest, tiles.MIN_SPLIT
        try:
            made, want = (
                tiles._compute_partition(plan, window, tile, groups),
                tile_reference.parts(plan, window, tile, groups),
            )
        finally:
            tiles.MIN_SPLIT = before
        for name, part in zip(NAMES, want, strict=True):
            np.testing.assert_array_equal(getattr(made, name), part, err_msg=name)


def test_a_step_without_readers_is_no_work():
    made = tiles._compute_partition(build_metadata([3, 4], [], [0, 0]), None, 16, 8)
    assert [len(part) for part in made.device_arrays] == [0, 0, 0, 0, 0, 3]


def decodes(
    tokens: list[int], contexts: list[list[int]], length: int = 300, reader: int | None = None
) -> AttentionMetadata:
    """Calls of one row each, behind so many tokens of their own, over contexts that some of them share. reader: of all
    that the last call has said to begin with."""
    reads = []
    for row, (token, seen) in enumerate(zip(tokens, contexts, strict=True)):
        reads += [KVRead(10_000 * (1 + c), row, row + 1, 5 * c, length, 0, 0) for c in sorted(set(seen))]
        if reader and row == 0 and len(tokens) > 1:
            reads.append(KVRead(100_000 + 1000 * (len(tokens) - 1), row, row + 1, 0, reader, 0, 900))
        reads.append(KVRead(100_000 + 1000 * row, row, row + 1, 0, token + 1, 1, 900))
    return build_metadata([100_000 + 1000 * r + t for r, t in enumerate(tokens)], reads, [900 + t for t in tokens])


def seen_by(made: tiles.TileMetadata) -> dict[int, list[tuple[int, ...]]]:
    """What every row reads of every slot: (slot, turn, position of its run), however it is cut."""
    seen: dict[int, list[tuple[int, ...]]] = {}
    for first, count, begin, end in made.work_items.tolist():
        for lo, low, high, known in made.kv_chunks[begin:end].tolist():
            for i in range(count):
                shift, limit, position = made.row_params[known + i].tolist()
                seen.setdefault(int(made.rows[first + i, 0]), []).extend(
                    (lo + j, shift, position) for j in range(low, min(high, limit))
                )
    return {row: sorted(some) for row, some in seen.items()}


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=6),
    st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=6, max_size=6),
    st.integers(1, 90),
    st.booleans(),
)
@settings(max_examples=many(30), deadline=None)
def test_what_goes_on_is_what_a_fresh_plan_says(tokens, contexts, steps, read):
    """As many steps as the stripes are kept for, and more."""
    contexts, kind = contexts[: len(tokens)], AttentionSpec(None)
    reader = max(1, tokens[-1]) if read else None
    plan = decodes(tokens, contexts, reader=reader)
    for _ in range(steps):
        tiles.partition(plan, kind, 8, 4)
        plan = plan.next_step()
    fresh = decodes([token + steps for token in tokens], contexts, reader=reader)
    for name in ("slots", "positions", "kv_runs", "reads"):
        np.testing.assert_array_equal(getattr(plan, name), getattr(fresh, name), err_msg=name)
    assert plan.shifts == fresh.shifts
    made, want = (tiles.partition(one, kind, 8, 4) for one in (plan, fresh))
    assert made.age == steps % (tiles.MAX_AGE + 1)
    assert seen_by(made) == seen_by(want)
    assert {tuple(one) for one in made.rows.tolist()} == {tuple(one) for one in want.rows.tolist()}


@pytest.mark.parametrize("window", [None, 50])
def test_work_over_a_window_is_worked_out_anew(window):
    plan = decodes([5, 60], [[0], [0]])
    known = tiles.partition(plan, AttentionSpec(None, sliding_window=window), 8, 4)
    assert (known.next_step() is None) == (window is not None)


def test_rows_that_are_padding_stay_where_they_are():
    plan = AttentionMetadata(
        slots=np.array([9, 0, 0]),
        positions=np.array([4, 0, 0]),
        kv_runs=np.array([[9, 10, 0]], dtype=np.int32),
        reads=np.array([[0, 1, 0, 1, 1, 4]], dtype=np.int32),
        shifts=[0],
        num_padding=2,
    )
    ahead = plan.next_step().next_step()
    assert ahead.slots.tolist() == [11, 0, 0] and ahead.positions.tolist() == [6, 0, 0]
    assert ahead.kv_runs.tolist() == [[9, 12, 0]] and ahead.reads[0, 3] == 3
