"""Seconds of load on a tiny model: nothing is lost, nothing is left."""

import pytest

from benchmarks.load import fitted_slope, measure


@pytest.mark.parametrize("seconds", [5, pytest.param(10, marks=pytest.mark.slow)])
def test_no_request_is_lost_and_nothing_is_left_under_load(talker_folder, seconds):
    result = measure(talker_folder, seconds=seconds, clients=16, dtype="float32", max_tokens=24)
    counts = result["counts"]
    assert not result["errors"] and counts.get("lost", 0) == 0
    assert counts["completed"] > 0 and counts["aborted"] > 0
    assert counts["sent"] == counts["completed"] + counts["aborted"]
    assert result["is_idle"] and result["left"] == {"running": 0, "waiting": 0, "referenced": 0}


def test_a_fitted_slope_has_its_interval():
    line = [(second, 100 + 0.5 * second) for second in range(60)]
    assert fitted_slope(line) == pytest.approx((30, 0), abs=1e-6)
    slope, width = fitted_slope([(second, value + (-1) ** second) for second, value in line])
    assert abs(slope - 30) < width
