"""All pairs of features against the plain engine, in a short form, and what finds a difference."""

import random
from itertools import combinations

import pytest

from benchmarks.torture import pairs
from benchmarks.torture.campaign import Options, Tally
from benchmarks.torture.covering import covering_rows

FACTORS = {"a": [1, 2, 3], "b": [True, False], "c": ["x", "y", "z", "w"], "d": [0, 1]}


def test_every_pair_of_levels_occurs_in_few_rows():
    rows = covering_rows(FACTORS, random.Random(0))
    for first, second in combinations(FACTORS, 2):
        found = {(row[first], row[second]) for row in rows}
        assert found == {(x, y) for x in FACTORS[first] for y in FACTORS[second]}
    assert 12 <= len(rows) <= 16  # 12 pairs of a and c, 48 combinations


def test_cases_of_the_covering_array_give_what_the_plain_engine_gives():
    tally = Tally(Options(0, 11))
    tight = [i for i, row in enumerate(pairs.covering_array(11)) if row["memory"] == "tight" and row["tiers"] != "none"]
    for index in tight[:3]:
        pairs.try_case(tally.options, index, tally)
    assert not tally.lost
    assert tally.inputs == 3 and tally.counts["messages"] > 12
    assert tally.counts["preempted"] + tally.counts["evicted"] > 0


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tokens": [1, 2]}, "tokens"),
        ({"text": "ab"}, "text"),
        ({"reason": "length"}, "reason"),
        ({"logprobs": [-1.0, -2.0002, None]}, "log-probabilities differ"),
        ({"logprobs": [-1.0]}, "1 log-probabilities"),
        ({"logprobs": [-1.0, None, None]}, "log-probabilities differ"),
        ({"logprobs": [-1.0, float("nan"), None]}, "log-probabilities differ"),
    ],
)
def test_differences_are_named(change, what):
    facts = {"tokens": [1, 2, 3], "text": "abc", "reason": "stop", "logprobs": [-1.0, -2.0, None]}
    expected = pairs.Result(**facts)
    assert pairs.compare(expected, pairs.Result(**facts)) == ("", 0)
    assert what in pairs.compare(expected, pairs.Result(**{**facts, **change}))[0]


def test_another_token_is_lost_unless_noise_gives_it_too(monkeypatch):
    monkeypatch.setattr(pairs, "NUM_NOISES", 2)
    original = pairs.run_crowded

    def change_a_token(*arguments):
        results = original(*arguments)
        results[-1].tokens[-1] ^= 1
        return results

    monkeypatch.setattr(pairs, "run_crowded", change_a_token)
    tally = pairs.try_case(Options(0, 11), 0)
    assert len(tally.lost) == 1 and tally.lost[0].startswith("seed 11, index 0: message")
