"""One tenant that tries to see the work of another: tests of channels, and a few trials against a server."""

import random

import pytest

from benchmarks.torture import tenants
from benchmarks.torture.campaign import Options, Tally


def observations(shift, count=400):
    """Return times of two cases, the second of which are longer by a shift."""
    draws = random.Random(0)
    coins = [draws.random() < 0.5 for _ in range(count)]
    return [(coin, draws.gauss(10, 1) + shift * coin) for coin in coins]


def test_a_channel_that_differs_is_lost_and_one_that_does_not_is_chance():
    tally = Tally(Options(0, 3))
    same = [(coin, "reply") for coin, _ in observations(0)]
    text = [(coin, "found" if coin else "missing") for coin, _ in observations(0)]
    seen = {
        "schema: time": observations(0.6),
        "schema: replies": same,
        "response: replies": text,
        "workflow: time": observations(0),
        "load: time": observations(5),
    }
    tenants.judge(tally, seen)
    assert len(tally.lost) == 2
    assert {line.split(" differs")[0] for line in tally.lost} == {"seed 3: schema: time", "seed 3: response: replies"}
    channels = tally.details["channels"]
    assert channels["schema: replies"]["p"] == 1 and channels["response: replies"]["accuracy"] == 1
    assert channels["load: time"]["corrected p"] is None and channels["load: time"]["accuracy"] > 0.99


def test_p_values_are_corrected_in_order():
    assert tenants.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})


def test_a_trial_of_every_attack_sees_nothing_of_the_other_tenant(monkeypatch):
    """A few trials prove nothing: they show that every attack runs and every channel is read."""
    monkeypatch.setattr(tenants, "WARM_UP", 0)
    outcome = tenants.run(Options(seconds=0, seed=1), tenants.CONTENT)
    assert not outcome.lost
    assert outcome.inputs == len(tenants.CONTENT)
    assert {name.partition(":")[0] for name in outcome.details["channels"]} == set(tenants.CONTENT)
