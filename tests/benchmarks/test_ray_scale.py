"""Simulated replicas: arithmetic of one request, balance, overload and failures."""

import pytest

from benchmarks.ray_scale import BY_TEAM, H100, SIZES, TRANSFERS, Simulation, create_simulation, simulate
from benchmarks.ray_workloads import WORKLOADS
from choreograph.cluster.routing import create_policy


def test_a_workflow_on_one_idle_replica_takes_the_time_of_its_prefills():
    simulation = Simulation(lambda: create_policy("message"), 1, "supervisor", rate=1.0)
    results = simulation.run(1)
    # 400 + 3 * 800 tokens, then eight workers one after the other: their tasks, and the plan is cached; then nothing
    first = [2800 / H100.prefill, *(400 * worker / H100.prefill for worker in range(1, 9)), 0]
    assert sorted(simulation.ttft) == pytest.approx(sorted(first))
    assert results["computed tokens"] == 2800 + 8 * 400
    assert results["requests answered"] == 10 and results["moved tokens"] == 0


def test_requests_that_run_are_their_rate_times_their_time():
    results = simulate(TRANSFERS, 4, "debate", rate=4.0, seconds=60)
    assert results["requests running"] == pytest.approx(
        9 * SIZES.answer * H100.step, rel=0.15
    )  # of one workflow a second


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_message_routing_with_transfers_is_balanced_and_loses_no_request_of_replicas_that_fail(workload):
    results = simulate(TRANSFERS, 8, workload, rate=2.0, seconds=60)
    calls = {"debate": 9, "supervisor": 10, "retrieval": 4}[workload]
    assert results["requests answered"] == calls * 120
    assert results["requests that were repeated"] > 0
    assert results["imbalance"] <= 0.1


def test_more_workflows_than_replicas_can_run_wait_and_are_answered():
    simulation = Simulation(lambda: create_policy("message"), 2, "debate", rate=6.0, transfer=True)
    results = simulation.run(120)
    assert results["requests answered"] == 9 * 120
    assert results["most requests waiting at once"] > 0
    assert results["time to first token p99"] > 1
    assert max(simulation.queues.values()) == 0 and H100.max_concurrent * 2 < 6 * 9 * SIZES.answer * H100.step


def test_gateways_that_see_a_part_of_a_workflow_find_fewer_of_its_messages():
    options = {"rate": 4.0, "seconds": 30, "gateways": 8}
    sticky, spread = (simulate(TRANSFERS, 16, "debate", is_sticky=flag, **options) for flag in (True, False))
    assert sticky["hit rate"] > spread["hit rate"] + 0.1
    assert sticky["requests answered"] == spread["requests answered"] == 9 * 120


def test_results_are_the_same_in_every_run():
    assert simulate(TRANSFERS, 4, "retrieval", 1.0, 20) == simulate(TRANSFERS, 4, "retrieval", 1.0, 20)


def test_so_many_workflows_run_at_once_as_are_asked_for():
    simulation = create_simulation("message", 2, "debate", 1.0)
    results = simulation.run(12, concurrency=4)
    assert results["requests answered"] == 9 * 12 and simulation.later == type(simulation.later)()
    assert results["requests running"] * 2 == pytest.approx(4 * 3, rel=0.02)  # the agents of a round run at once


def test_a_session_for_a_whole_team_computes_each_document_once_and_leaves_a_replica_idle():
    results = {router: simulate(router, 2, "retrieval", 0.5, 48) for router in ("session", BY_TEAM, TRANSFERS)}
    assert results[BY_TEAM]["imbalance"] == pytest.approx(1)
    assert results[BY_TEAM]["computed tokens"] <= results[TRANSFERS]["computed tokens"]
    assert results[TRANSFERS]["computed tokens"] < results["session"]["computed tokens"]
