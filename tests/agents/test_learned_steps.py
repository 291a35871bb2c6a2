"""Steps learned from transitions: exact on a cycle, expected values where agents choose, close to what is declared."""

import math
import random

import numpy as np
import pytest
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph.agents import Progress, StepGraph, TransitionStats
from choreograph.agents.step_graph import compute_hitting_times


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
    assert learned.hitting_times() is known  # the only successor so far
    learned.observe(names[0], names[2])
    assert learned.hitting_times() is not known


def slow_hitting_times(probabilities: np.ndarray) -> np.ndarray:
    """One linear system for each target, over the states from which it is reached."""
    num_states = len(probabilities)
    reachable = np.linalg.matrix_power(np.eye(num_states) + (probabilities > 0), num_states) @ probabilities > 0
    times = np.full((num_states, num_states), math.inf)
    for target in range(num_states):
        sources = np.flatnonzero(reachable[:, target])
        onward = probabilities[np.ix_(sources, sources)]
        onward[:, sources == target] = 0.0  # the chain ends at the target
        identity = np.eye(len(sources))
        reach = np.linalg.solve(identity - onward, probabilities[sources, target])
        times[sources, target] = np.linalg.solve(identity - onward, reach) / reach
    return times


@given(st.lists(st.lists(st.sampled_from([0, 0, 0, 1, 2, 7]), min_size=6, max_size=6), min_size=6, max_size=6))
@settings(max_examples=many(60), deadline=None)
def test_expected_steps_equal_those_of_a_linear_system_for_each_target(counts):
    matrix = np.array(counts, dtype=float)
    matrix /= np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    assert compute_hitting_times(matrix) == pytest.approx(slow_hitting_times(matrix), rel=1e-2)


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
