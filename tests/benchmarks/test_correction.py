"""What corrected encodings undo, on a tiny model: the ends of the scale are known."""

from dataclasses import replace

import pytest

from benchmarks.correction import Correction, CorrectionExperiment
from benchmarks.distill import PLANS
from choreograph import SamplingParams
from choreograph.lab.evaluation.datasets import Example, make_games
from choreograph.lab.training import collect_traces
from choreograph.lab.workflows import find

SERIAL = replace(PLANS["multi_qa"], condition="serial")  # every question stands where the baseline has it
PAIR = Example("p", "pair", ["What is one plus one?", "What is one plus two?"], {"first": {}, "second": {}})


def drawn(engine, plan, examples, out):
    return collect_traces(
        engine,
        plan.workflow,
        find(plan.workflow),
        examples,
        out,
        sampling=SamplingParams(max_tokens=8),
        options=plan.options,
    )


def measured(engine, plan, examples, out, learned=False):
    result = drawn(engine, plan, examples, out)
    undoing, correction = CorrectionExperiment(engine), Correction()
    if learned:
        undoing.fit(plan, result, correction)
    return undoing.measure(plan, result, correction, [1e-6])


def test_the_baselines_own_encodings_undo_everything(talker, tmp_path):
    result = measured(talker, SERIAL, [PAIR], tmp_path)
    assert result["reused"][0] > 1e-4
    assert result["baseline"][0] == pytest.approx(0, abs=1e-6)
    assert result["one for all"][0] == pytest.approx(0, abs=1e-6)  # one decode sees all there is
    assert result["1e-06"] == pytest.approx(result["reused"])  # nothing was learned


def test_one_encoding_does_not_suit_two_players(talker, tmp_path):
    result = measured(talker, PLANS["prisoners_dilemma"], make_games(1), tmp_path)
    assert result["baseline"][0] == pytest.approx(0, abs=1e-6)
    assert 1e-6 < result["one for all"][0] < result["reused"][0]


def test_the_expected_encoding_is_the_baselines_where_all_planned_the_same(talker, tmp_path):
    plan = PLANS["prisoners_dilemma"]
    mine, *others = drawn(talker, plan, make_games(3), tmp_path)

    def left(*rest):
        return CorrectionExperiment(talker).measure(plan, [mine, *rest], Correction(), (), num_others=len(rest))

    same = left(replace(mine, id="again"))
    assert same["expected"][0] == pytest.approx(0, abs=1e-6)
    assert same["expected, one for all"] == pytest.approx(same["one for all"])
    result = left(*others)
    assert 1e-6 < result["expected"][0] < result["expected, one for all"][0] < result["reused"][0]


def test_a_map_learned_from_the_test_itself_undoes_most_of_it(talker, tmp_path):
    result = measured(talker, SERIAL, [PAIR], tmp_path, learned=True)
    assert result["1e-06"][0] < result["reused"][0] / 2
