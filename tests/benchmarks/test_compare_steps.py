"""Closeness of learned to declared steps."""

import math

import pytest

from benchmarks.kvflow_policies import compare_steps


def test_equal_steps_have_no_distance_and_one_order():
    steps = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 0.0}
    assert compare_steps(steps, dict(steps)) == pytest.approx({"distance": 0, "reachable": 1, "tau": 1})


def test_steps_that_differ_are_compared_where_both_are_finite():
    declared = {"a": 1.0, "b": 2.0, "c": math.inf, "d": 4.0}
    learned = {"a": 3.0, "b": 2.0, "c": 5.0}
    assert compare_steps(declared, learned) == pytest.approx({"distance": 1, "reachable": 0.5, "tau": -1})
