"""Steps learned from transitions: exact on a cycle, expected values where agents choose, close to what is declared."""

import math
import random

import pytest

from choreograph.agents import Progress, StepGraph, TransitionStats


def observed(*agents: str) -> tuple[TransitionStats, Progress]:
    learned, progress = TransitionStats(), Progress()
    for agent in agents:
        learned.observe(progress.last_started, agent)
        progress.start(agent)
        progress.end(agent)
    return learned, progress


def test_a_cycle_is_learned_exactly_from_one_round_and_a_half():
    learned, progress = observed(*"abcdabc")
    progress.start("d")
    assert learned.steps(progress) == pytest.approx({"a": 1, "b": 2, "c": 3, "d": 0})
    declared = StepGraph.read({"a": "d", "b": "a", "c": "b", "d": "c"})
    assert learned.steps(progress) == pytest.approx(declared.steps(progress))


def test_a_large_cycle_is_computed_once_for_each_start():
    names = [f"agent {i}" for i in range(60)]
    learned, progress = observed(*names, *names)
    assert learned.steps(progress) == pytest.approx({name: i + 1 for i, name in enumerate(names)})
    known = learned.hitting_times()
    learned.steps(progress)
    assert learned.hitting_times() is known
    learned.observe(progress.last_started, names[0])
    assert learned.hitting_times() is not known


def test_what_never_followed_is_never_expected():
    learned, progress = observed(*"abc")
    assert learned.steps(progress) == {"a": math.inf, "b": math.inf, "c": math.inf}
    assert TransitionStats().steps(Progress()) == {}


def test_a_choice_gives_expected_steps():
    """From `end` it takes one step to the router, then with equal chances left or right, then the end, and so on."""
    chance = random.Random(0)
    turns = [name for _ in range(4000) for name in ("router", chance.choice(("left", "right")), "end")]
    learned, progress = observed(*turns)
    steps = learned.steps(progress)
    assert steps["router"] == pytest.approx(1)
    assert steps["end"] == pytest.approx(3)
    assert steps["left"] == pytest.approx(5, rel=0.05)  # 2 + 3 * (mean rounds before: 1)


def test_where_a_branch_may_never_be_reached_the_expectation_is_of_when_it_is():
    learned, progress = observed("start", "x", "stop")
    for agents in (("start", "y", "z", "stop"), ("start", "x", "stop")):
        progress.last_started = None
        for agent in agents:
            learned.observe(progress.last_started, agent)
            progress.start(agent)
            progress.end(agent)
    progress.last_started = "start"
    assert learned.steps(progress)["z"] == pytest.approx(2)
