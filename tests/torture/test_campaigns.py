"""The frame of all campaigns: time, seeds, results and broken promises."""

import json
import sys

import pytest

from benchmarks import common, results_page, tables
from benchmarks.torture import __main__ as command
from benchmarks.torture.campaign import CAMPAIGNS, Options, Outcome, Tally


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return tmp_path / "torture.json"


def start(monkeypatch, outcomes, *arguments):
    """Run the command with given outcomes of campaigns; return its exit status."""
    monkeypatch.setattr(command, "find_spec", lambda name: name.rpartition(".")[2] in outcomes)
    monkeypatch.setattr(command, "run_apart", lambda name, options: outcomes[name])
    monkeypatch.setattr(sys, "argv", ["torture", *arguments])
    return command.main()


def test_a_campaign_of_no_time_tries_one_input_and_draws_by_seed_and_index():
    options = Options(seconds=0, seed=3)
    assert list(options.rounds()) == [0]
    draws = [options.draws(0).random(), options.draws(1).random(), Options(0, 4).draws(0).random()]
    assert len(set(draws)) == 3
    assert options.draws(0).random() == draws[0]


def test_a_broken_promise_names_seed_and_index():
    tally = Tally(Options(seconds=0, seed=3))
    tally.inputs += 2
    tally.counts["kind"] += 1
    tally.lose(1, "tokens differ")
    assert tally.outcome() == Outcome(2, 0, ("seed 3, index 1: tokens differ",), {"counts": {"kind": 1}})


def test_a_campaign_that_raises_has_lost():
    outcome = command.run_here("no_such_campaign", Options(seconds=0, seed=5))
    assert len(outcome.lost) == 1 and "seed 5" in outcome.lost[0] and "no_such_campaign" in outcome.lost[0]


def test_status_and_lines_tell_what_was_lost(monkeypatch, capsys):
    outcomes = {"pairs": Outcome(7, 0, ()), "faults": Outcome(3, 2, ("seed 0, index 2: hangs",))}
    assert start(monkeypatch, outcomes, "pairs") == 0
    assert start(monkeypatch, outcomes) == 1
    assert "faults: seed 0, index 2: hangs" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        start(monkeypatch, outcomes, "soak")


def test_kept_results_stand_beside_earlier_ones_and_in_the_table(monkeypatch, results):
    start(monkeypatch, {"pairs": Outcome(7000, 0, (), {"strength": 2})}, "--keep", "--seed", "9")
    start(monkeypatch, {"faults": Outcome(3, 2, ("seed 0, index 2: hangs",))}, "--keep")
    runs = json.loads(results.read_text())["runs"]
    assert runs["pairs"]["inputs"] == 7000 and runs["pairs"]["seed"] == 9
    assert runs["pairs"]["details"] == {"strength": 2}
    page = tables.TABLES["torture"]()
    assert f"| `pairs` | {CAMPAIGNS['pairs']} | 7,000 | 0 | 0 |" in page
    assert "| 3 | 2 | **1** |" in page and "- `faults`: seed 0, index 2: hangs" in page
    assert results_page.torture
