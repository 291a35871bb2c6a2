"""Scores of single outputs, and of records that failed or say nothing."""

import pytest

from choreograph.errors import DataError
from choreograph.lab.evaluation.datasets import Example
from choreograph.lab.evaluation.metrics import (
    concept_coverage,
    contains_answer,
    f1,
    is_correct,
    math_equal,
    normalize_text,
    score,
)


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("\\frac{1}{2}", "0.5", True),
        ("\\frac{1}{2}", "\\dfrac12", True),
        ("25000", "25,000", True),
        ("(1,2)", "(1, 2)", True),
        ("x = 5", "5", True),
        ("\\{1,2,3\\}", "\\{3,2,1\\}", True),
        ("2\\sqrt{3}", "\\sqrt{12}", True),
        ("12", "12 dollars", True),
        ("\\text{even}", "\\text{even}", True),
        ("\\frac12", "\\frac{1}{2}.", True),
        ("36", "36 square feet", True),
        ("12", "13", False),
        ("2", "2 million", False),
        ("3", "3 and a half", False),
        ("5", "5 x", False),
        ("3", "3 fourths", False),
        ("30", "30 degrees C", True),
        ("(1,2)", "(2,1)", False),
        ("12", "nothing of the kind", False),
        ("3", "9^{9^{9^{9^9}}}", False),
        ("3", "\\frac{1", False),
    ],
)
def test_equal_in_mathematics(gold, answer, same):
    assert math_equal(gold, answer) is same


def test_aliases_are_whole_words_in_any_dress():
    assert normalize_text("The  Cat's, “pyjamas”!") == "cats pyjamas"
    assert contains_answer("It was founded in 1977.", ["1977"])
    assert not contains_answer("It was founded in 19770.", ["1977"])
    assert contains_answer("the beatles!", ["The Rolling Stones", "Beatles"])
    assert not contains_answer("anything", ["", "the"])
    assert contains_answer("It is 5,000 feet in the U.S.", ["5000"])
    assert contains_answer("in the US", ["U.S."])
    assert contains_answer("It is 1.5 million.", ["1.5 million"]) and not contains_answer(
        "It is 15 million.", ["1.5 million"]
    )
    assert contains_answer("The answer is (A).", ["A"]) and not contains_answer("a dog", ["A"])
    assert contains_answer("It is vitamin A.", ["Vitamin A"]) and not contains_answer("vitamin C", ["Vitamin A"])
    assert contains_answer("Zoe\u0308 of «Paris»,France… for 5€", ["Zo\u00eb"]) and contains_answer(
        "«Paris»,France…", ["Paris", "x"]
    )
    assert f1("the red house", ["red house", "x"]) == 1
    assert f1("a big red house", ["red house"]) == pytest.approx(0.8)
    assert f1("", ["red"]) == f1("red", []) == 0


def test_a_yes_or_no_is_the_first_that_is_said():
    assert is_correct("Yes, no doubt about it.", ["yes"]) and not is_correct("Yes, no doubt about it.", ["No"])
    assert is_correct("No.", ["no", "No"]) and not is_correct("Perhaps.", ["no"])
    assert is_correct("It is the no man's land.", ["no man's land"]) and not is_correct("yes", [])


def test_concepts_count_in_any_inflection():
    story = "The dogs were running; she hurried by, and a wolf's cub cried."
    assert concept_coverage(story, ["dog", "run", "hurry", "cub"]) == 1
    assert concept_coverage(story, ["cat", "dog"]) == 0.5
    assert concept_coverage("Ice creams fell on my T-shirt.", ["ice cream", "t-shirt", "cream ice"]) == pytest.approx(
        2 / 3
    )
    irregular = (
        "The children ate, ran and swam; two mice, cutting leaves, had gone. She left and felt frisbees on shelves."
    )
    concepts = ["child", "eat", "run", "swim", "mouse", "cut", "leaf", "go", "leave", "feel", "frisbee", "shelf"]
    assert concept_coverage(irregular, concepts) == 1
    assert concept_coverage("The child eats.", ["children", "ate"]) == 1
    assert concept_coverage("", ["cat"]) == concept_coverage("cat", []) == 0


def record(said="", **findings):
    return {"answer": said, "findings": findings, "unparseable": {}}


def played(alice, bob, guess):
    texts = {"Alice decides": [alice], "Bob decides": [bob], "Bob predicts": [guess]}
    return {**record(), "texts": texts}


def test_each_kind_of_task_has_its_record():
    math = Example("1", "math", "", {"answer": "5"})
    assert score(math, record("so \\boxed{5}")) == {"right": 1, "unread": 0, "failed": 0}
    assert score(math, record("\\boxed{5}", answer=None)) == {"right": 0, "unread": 1, "failed": 0}
    cut = {**record("36 - 8 = 28"), "finish": "length"}
    assert score(math, cut)["unread"] == 1, "a number on the way is no answer"
    assert score(math, record("no idea")) == {"right": 0, "unread": 1, "failed": 0}
    assert score(math, {"error": "CacheFullError: ..."}) == {"failed": 1}
    assert score(math, record("", answer=5))["right"] == 1, "a note may be a number"
    pair = Example("2", "pair", [], {"first": {"answers": ["Rome"]}, "second": {"answers": ["Bern", "Berne"]}})
    assert score(pair, record("In Berne.")) == {"first": 0, "second": 1, "both": 0, "either": 1, "failed": 0}
    both = Example("2", "pair", [], {"first": {"answers": ["yes"]}, "second": {"answers": ["no"]}})
    assert score(both, record("- Yes.\n- No, it is not."))["both"] == 1, "a word for each"
    assert score(both, record("- Yes.\n- No, there is no such law."))["both"] == 1, "the first of a line"
    assert score(both, record("Yes."))["both"] == 0 and score(both, record("No. Yes."))["either"] == 0
    concepts = Example("3", "concepts", [], {"concepts": ["sea", "run", "dog"]})
    got = score(concepts, record("A dog runs.", groups=[["sea"], ["run", "dog"]]))
    assert (got["story 1"], got["story 2"]) == (0, 1)
    game = Example("4", "game", "Alice")
    got = score(game, played("defect", " defect.", "cooperate"))
    assert (got["Bob cooperates"], got["predicts right"], got["exploits"], got["defends"]) == (0, 0, 1, 0)
    got = score(game, played("", "no", "maybe"))
    assert (got["unread"], got["predicts right"]) == (1, 0)
    assert score(Example("5", "text", ""), record("three words here"))["words"] == 3


def test_a_game_of_another_workflow_is_refused_with_its_stages():
    with pytest.raises(DataError, match=r"'Bob predicts'.*workflow has no \['Bob decides', 'Bob predicts'\]"):
        score(Example("4", "game", "Alice"), {**record(), "texts": {"Alice decides": ["defect"]}})
