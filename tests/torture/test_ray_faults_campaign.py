"""Sessions that move when a replica comes or goes, and in the slow tests all faults of a server on Ray."""

import random

import pytest

pytest.importorskip("ray")

from helpers.hypothesis_profile import only_thorough

from benchmarks.torture import ray_faults
from benchmarks.torture.campaign import Options
from benchmarks.torture.fault_case import BrokenPromise


@pytest.mark.parametrize("policy", ["session", "message"])
def test_only_the_sessions_of_one_replica_move_when_it_comes_or_goes(policy):
    assert ray_faults.check_moves(policy, 7, random.Random(0)) < 1.5


def test_a_policy_that_moves_other_sessions_breaks_the_promise():
    with pytest.raises(BrokenPromise, match="a session moved from"):
        ray_faults.check_moves("round-robin", 4, random.Random(0))


@pytest.mark.slow
@only_thorough
def test_promises_are_kept_while_replicas_gateway_and_nodes_fail():
    outcome = ray_faults.run(Options(seconds=300, seed=1))
    assert outcome.lost == ()
    assert outcome.faults >= len(ray_faults.FAULTS)
