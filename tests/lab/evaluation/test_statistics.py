"""Intervals against exact values, against each other, and against what they promise."""

from functools import cache

import numpy as np
import pytest
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from choreograph.lab.evaluation import statistics
from choreograph.lab.evaluation.statistics import difference, matched_pairs, mean, ratio


def test_shares_get_clopper_pearson():
    result = mean([1] * 7 + [0] * 13)
    exact = stats.binomtest(7, 20).proportion_ci(method="exact")
    assert (result.value, result.n) == (0.35, 20)
    assert (result.low, result.high) == pytest.approx((exact.low, exact.high))


@settings(max_examples=many(60), deadline=None)
@given(gained=st.integers(0, 30), lost=st.integers(0, 30), same=st.integers(0, 60))
def test_matched_pairs_agree_with_the_exact_test(gained, lost, same):
    n = gained + lost + same
    if not n:
        return
    result = matched_pairs(gained, lost, n)
    exact = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert result.p == pytest.approx(exact)
    assert result.low <= result.value <= result.high
    assert result.low >= -1 and result.high <= 1
    if abs(exact - 0.05) > 0.002:
        assert (result.low > 0 or result.high < 0) == (exact < 0.05), "the interval holds zero exactly when p says so"


@settings(max_examples=many(20), deadline=None)
@given(gained=st.integers(0, 20), lost=st.integers(0, 20))
def test_matched_pairs_are_symmetric(gained, lost):
    one, other = matched_pairs(gained, lost, 50), matched_pairs(lost, gained, 50)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=1e-9)


def test_the_interval_of_a_difference_covers_the_truth():
    """Of 100 samples of 40 pairs with a true difference of -0.15, at least 93% of the intervals hold it."""
    draw, hits, seen = np.random.default_rng(0), 0, cache(matched_pairs)  # many samples are alike
    for _ in range(100):
        kinds = draw.choice(4, size=40, p=[0.4, 0.3, 0.075, 0.225])
        result = seen(int((kinds == 2).sum()), int((kinds == 3).sum()), 40)
        hits += result.low <= -0.15 <= result.high
    assert hits >= 93


def test_pairs_make_a_difference_sure_where_samples_do_not():
    before = np.linspace(0, 10, 40)
    after = before + 0.1 + 0.01 * np.sin(np.arange(40))
    result = difference(after, before)
    assert 0.09 < result.low < result.value < result.high < 0.11
    assert mean(after).low < mean(before).high


def test_ratios_are_of_sums_and_repeat_themselves():
    above, below = [3.0, 4, 5, 8, 3], [1.0, 2, 2, 5, 1]
    result = ratio(above, below)
    assert result.value == pytest.approx(23 / 11)
    assert result == ratio(above, below)
    assert result.low < result.value < result.high
    same = ratio([2.0, 4], [1.0, 2])
    assert same.low == same.high == 2


def test_ratios_of_pairs_resample_their_questions():
    draw = np.random.default_rng(3)
    questions, below = draw.normal(size=60), draw.uniform(1, 2, size=60)
    above = list(2 * below + questions + np.roll(questions, -1))
    alone, shared = ratio(above, list(below)), ratio(above, list(below), ring(60))
    assert shared.value == pytest.approx(alone.value)
    assert shared.low < alone.low < alone.high < shared.high


def test_equal_values_and_single_ones_have_no_width():
    assert mean([0.3, 0.3]).low == mean([0.3, 0.3]).high == 0.3
    assert ratio([2.0], [4.0]).high == 0.5
    with pytest.raises(ValueError, match="0 values"):
        mean([])
    with pytest.raises(ValueError, match="as many"):
        difference([1, 0], [1])


def ring(n):
    """The questions of n pairs, each of which stands in two of them."""
    return [(f"q{i}", f"q{(i + 1) % n}") for i in range(n)]


@pytest.mark.parametrize(("noise", "effect"), [(1.0, 0.0), (0.3, 1.0), (0.0, 1.0)])
def test_intervals_of_pairs_cover_the_truth_whatever_their_questions_share(noise, effect, monkeypatch):
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 600)
    draw, hits, naive = np.random.default_rng(2), 0, 0
    for _ in range(150):
        questions = draw.normal(size=60) * effect
        values = questions + np.roll(questions, -1) + draw.normal(size=60) * noise
        result = mean(list(values), ring(60))
        hits += result.low <= 0 <= result.high
        alone = 1.96 * values.std() / 60**0.5
        naive += abs(values.mean()) <= alone
    assert hits >= 0.87 * 150
    assert naive < hits - 10 or not effect, "as if pairs were independent, the intervals are too narrow"


def test_shares_of_pairs_count_their_questions():
    values = [1.0] * 30 + [0.0] * 30
    alone, shared = mean(values), mean(values, ring(60))
    assert shared.value == alone.value == 0.5 and shared.n == 60
    assert shared.low < alone.low < alone.high < shared.high == pytest.approx(1 - shared.low)
    assert mean(values, [(f"q{i}",) for i in range(60)]) == alone, "nothing is shared"
    none, at_all = mean([0.0] * 60, ring(60)), mean([0.0] * 30)
    assert (none.low, none.high) == (at_all.low, at_all.high), "30 of the 60 pairs have no question in common"
    with pytest.raises(ValueError, match="units of 2 rows for 3 values"):
        mean([0, 1, 0.5], [("a",), ("b",)])


def test_a_difference_between_pairs_resamples_questions():
    """Two pairs of one question are lost together: that is one observation and not two."""
    before, after = [1.0] * 40, [1.0] * 40
    for pair in (0, 1, 10, 11, 20, 21):
        after[pair] = 0.0
    alone, shared = difference(after, before), difference(after, before, ring(40))
    assert alone.value == shared.value == -0.15
    assert alone.p < 0.05 < shared.p and shared.low < alone.low < alone.high < 0 < shared.high
    halves = [value / 2 for value in after]
    assert difference(halves, before, ring(40)).low < difference(halves, before).low, "the bootstrap draws questions"
    same = difference(before, before, ring(40))
    assert same.low < 0 < same.high and same.p == 1 and same.n == 40
