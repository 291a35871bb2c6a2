"""Marks of results that are older than the code that they measure."""

from benchmarks.ages import CHANGES, age_note, changes_since
from benchmarks.common import RESULTS
from benchmarks.tables import format_row

OF_SPEED = [change for change in CHANGES if "speed" in change.benchmarks]
CHANGE = OF_SPEED[-1]
BEFORE = {"date": "2026-11-28", "commit": "7d620ce"}
BETWEEN, AFTER = ({"date": change.date, "commit": change.commit} for change in (OF_SPEED[0], CHANGE))


def test_a_result_is_marked_until_it_is_measured_after_the_change():
    assert changes_since("speed", BEFORE) == OF_SPEED and changes_since("speed", AFTER) == []
    assert age_note("speed", [BETWEEN, AFTER]) == f"measured before {CHANGE.title} ({CHANGE.commit})"
    assert age_note("speed", [AFTER]) == ""
    assert age_note("memory", [BEFORE]) == ""


def test_a_change_of_speed_does_not_mark_what_is_not_timed():
    old = {"date": "2026-11-23", "commit": "f16ae6e"}
    timed, other = (changes_since("reuse", old, part) for part in ("latency", "quality"))
    assert CHANGE in timed and CHANGE not in other


def test_changes_name_benchmarks_that_have_results():
    names = {name for change in CHANGES for name in change.benchmarks}
    assert not {name for name in names if not (RESULTS / f"{name}.json").exists()}


def test_few_samples_and_widths_of_nothing_have_no_interval():
    assert format_row({"value": 0.5, "low": 0.1, "high": 0.9, "n": 2}, places=1) == "0.5"
    assert format_row({"value": 2.0, "low": 2.0, "high": 2.0}, places=2) == "2.00"
    assert format_row({"value": 0.5, "low": 0.1, "high": 0.9, "n": 3}, places=1) == "0.5 (0.1, 0.9)"
