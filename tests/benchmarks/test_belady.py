"""Belady's optimum against trying everything."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.belady import belady_hits


@given(st.lists(st.integers(0, 4), max_size=10), st.integers(1, 3))
def test_no_other_choice_finds_more(uses, room):
    @cache
    def best(at: int, there: frozenset) -> int:
        if at == len(uses):
            return 0
        one = uses[at]
        others = there - {one}
        left = [others] if len(others) < room else [others - {gone} for gone in others]
        return (one in there) + max(best(at + 1, kept | {one}) for kept in left)

    assert belady_hits(uses, room) == best(0, frozenset())


def test_a_cycle_that_is_too_long_by_one_still_finds_most():
    assert (
        belady_hits("abcd" * 10, 3) == 24
    )  # of the later ones, one in three is lost; least recently used would lose all
    with pytest.raises(ValueError, match="room=0"):
        belady_hits("a", 0)
