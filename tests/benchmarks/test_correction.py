"""What corrected encodings undo, on a tiny model: the ends of the scale are known."""

from dataclasses import replace

import pytest

from benchmarks.correction import Correction, Undoing
from benchmarks.distill import PLANS
from choreograph import SamplingParams
from choreograph.choreographies import find
from choreograph.distill import collect
from choreograph.evaluation.data import Example, games

SERIAL = replace(PLANS["multi_qa"], condition="serial")  # every question stands where the baseline has it
PAIR = Example("p", "pair", ["What is one plus one?", "What is one plus two?"], {"first": {}, "second": {}})


def drawn(engine, plan, examples, out):
    return collect(
        engine,
        plan.workflow,
        find(plan.workflow),
        examples,
        out,
        sampling=SamplingParams(max_tokens=8),
        options=plan.options,
    )


def measured(engine, plan, examples, out, learned=False):
    found = drawn(engine, plan, examples, out)
    undoing, correction = Undoing(engine), Correction()
    if learned:
        undoing.learn(plan, found, correction)
    return undoing.measure(plan, found, correction, [1e-6])


def test_the_baselines_own_encodings_undo_everything(talker, tmp_path):
    found = measured(talker, SERIAL, [PAIR], tmp_path)
    assert found["reused"][0] > 1e-4
    assert found["baseline"][0] == pytest.approx(0, abs=1e-6)
    assert found["one for all"][0] == pytest.approx(0, abs=1e-6)  # one decode sees all there is
    assert found["1e-06"] == pytest.approx(found["reused"])  # nothing was learned


def test_one_encoding_does_not_suit_two_players(talker, tmp_path):
    found = measured(talker, PLANS["prisoners_dilemma"], games(1), tmp_path)
    assert found["baseline"][0] == pytest.approx(0, abs=1e-6)
    assert 1e-6 < found["one for all"][0] < found["reused"][0]


def test_the_expected_encoding_is_the_baselines_where_all_planned_the_same(talker, tmp_path):
    plan = PLANS["prisoners_dilemma"]
    mine, *others = drawn(talker, plan, games(3), tmp_path)

    def left(*rest):
        return Undoing(talker).measure(plan, [mine, *rest], Correction(), (), others=len(rest))

    same = left(replace(mine, id="again"))
    assert same["expected"][0] == pytest.approx(0, abs=1e-6)
    assert same["expected, one for all"] == pytest.approx(same["one for all"])
    found = left(*others)
    assert 1e-6 < found["expected"][0] < found["expected, one for all"][0] < found["reused"][0]


def test_a_map_learned_from_the_test_itself_undoes_most_of_it(talker, tmp_path):
    found = measured(talker, SERIAL, [PAIR], tmp_path, learned=True)
    assert found["1e-06"][0] < found["reused"][0] / 2
