"""One input of some kinds of faults, and all of them in the slow tests."""

import random

import pytest

from benchmarks.torture import fault_case, faults
from benchmarks.torture.campaign import Options, Tally
from benchmarks.torture.fault_case import BrokenPromise, Case

SHORT = ("damaged files", "rows of NaN", "memory", "callbacks", "listeners", "interrupts", "killed save", "no memory")


def run_one(kind, folder, seed=0):
    tally = Tally(Options(seconds=0, seed=seed))
    faults.FAULTS[kind](Case(random.Random(f"{kind} {seed}"), tally, folder))
    return tally


@pytest.mark.parametrize("kind", SHORT)
def test_promises_are_kept_under_a_fault(kind, tmp_path):
    assert run_one(kind, tmp_path).counts


@pytest.mark.slow
def test_promises_are_kept_under_all_faults():
    outcome = faults.run(Options(seconds=30, seed=1))
    assert outcome.lost == ()
    assert outcome.faults > 0


def test_other_tokens_and_a_failure_without_a_fault_are_broken_promises(tmp_path):
    case = Case(random.Random(0), Tally(Options(seconds=0, seed=0)), tmp_path)
    graph = case.draw_graph()
    with case.engine() as engine:
        results = fault_case.run_graph(engine, graph)
    assert case.check_graph(graph, results) == set()
    index = next(index for index, result in enumerate(results) if result)
    with pytest.raises(BrokenPromise, match="instead of"):
        case.check_graph(graph, [*results[:index], [*results[index][:-1], -1], *results[index + 1 :]])
    with pytest.raises(BrokenPromise, match="failed with ValueError"):
        case.check_graph(graph, [*results[:-1], ValueError("of another library")])


def test_a_broken_promise_is_lost_with_seed_and_index(monkeypatch):
    def broken(case):
        raise BrokenPromise("tokens differ")

    monkeypatch.setattr(faults, "FAULTS", {"kind": broken})
    outcome = faults.run(Options(seconds=0, seed=4))
    assert outcome.inputs == 1 and outcome.lost[0].startswith("seed 4, index 0: kind: BrokenPromise: tokens differ")
