"""Splits: nothing that training saw is in the test, and the same seed gives the same splits."""

import json

import pytest

from choreograph.errors import ConfigError, DataError
from choreograph.lab.evaluation.datasets import Example, make_games, make_pairs
from choreograph.lab.evaluation.splits import (
    check_disjoint,
    connected,
    examples_for,
    shared_units,
    split_examples,
    split_off,
    training_examples,
    units_of,
)
from choreograph.lab.workflows import find

QUESTIONS = [Example(f"q{i}", "qa", f"Question {i}?", {"answers": [str(i)]}) for i in range(1000)]


def test_a_thousand_questions_are_split_as_in_the_paper():
    splits = split_examples(QUESTIONS)
    assert {name: len(split) for name, split in splits.items()} == {"train": 400, "validation": 100, "test": 500}
    assert sorted(e.id for split in splits.values() for e in split) == sorted(e.id for e in QUESTIONS)
    assert splits == split_examples(QUESTIONS) != split_examples(QUESTIONS, seed=1)
    check_disjoint({name: units_of(split) for name, split in splits.items()})


@pytest.mark.parametrize(
    ("n", "sizes"), [(1, (0, 0, 1)), (2, (1, 0, 1)), (3, (1, 1, 1)), (4, (2, 1, 1)), (10, (4, 1, 5)), (20, (8, 2, 10))]
)
def test_few_questions_are_split_too(n, sizes):
    assert tuple(map(len, split_examples(QUESTIONS[:n]).values())) == sizes


def test_pairs_that_share_questions_stay_together():
    """A ring of pairs is one group, as every question is in two pairs; disjoint rings are groups of their own."""
    ring = make_pairs(QUESTIONS[:20])
    assert [len(group) for group in connected(ring, shared_units)] == [20]
    with pytest.raises(DataError, match="20 examples that are connected by shared questions"):
        split_off(ring, 0.1, 0, shared_units)
    rings = [pair for start in range(0, 50, 5) for pair in make_pairs(QUESTIONS[start : start + 5])]
    learn, check = split_off(rings, 0.2, 0, shared_units)
    assert (len(learn), len(check)) == (40, 10) and not units_of(learn) & units_of(check)
    splits = split_examples(rings)
    assert {name: len(split) for name, split in splits.items()} == {"train": 20, "validation": 5, "test": 25}


def test_splits_that_share_examples_are_refused():
    with pytest.raises(DataError, match="training and test share 2 questions or games"):
        check_disjoint({"training": {"a", "b", "c"}, "validation": {"d"}, "test": {"b", "c"}})


def test_what_examples_share_is_the_question_the_concepts_or_the_game():
    asked = Example("a", "qa", "One text.\n\nQuestion: Who  wrote it?", {"answers": ["x"]})
    assert shared_units(asked) == shared_units(Example("b", "qa", "Another.\n\nQuestion: who wrote it?", {}))
    assert shared_units(asked) <= shared_units(Example("c", "pair", [asked.task, "Where?"], {}))
    words = [Example(str(i), "concepts", order, {}) for i, order in enumerate((["Dog", "sea"], ["sea", "dog"]))]
    assert shared_units(words[0]) == shared_units(words[1])
    first, second = make_games(3)[::2]
    assert first.task == second.task and not shared_units(first) & shared_units(second)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"id": e.id, "question": e.task, "answers": e.reference["answers"]} for e in QUESTIONS[:100]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_pairs_are_made_within_a_split(file):
    workflow = find("multi_qa")
    learn, check = training_examples(workflow, file, limit=None, seed=0, split="train")
    test = examples_for(workflow, file, limit=None, seed=0, split="test")
    assert (len(learn), len(check), len(test)) == (40, 10, 50)
    check_disjoint({"train": units_of(learn), "validation": units_of(check), "test": units_of(test)})
    learn, check = training_examples(workflow, file, limit=12, seed=0, split="train")
    assert (len(learn), len(check)) == (12, 3), "a fourth for validation"
    learn, check = training_examples(workflow, file, limit=None, seed=0, split="all")
    assert (len(learn), len(check)) == (80, 20) and not units_of(learn) & units_of(check)
    assert len(examples_for(workflow, file, limit=None, seed=0, split="all")) == 100


def test_games_of_two_splits_have_no_id_and_so_no_seed_in_common():
    workflow = find("prisoners_dilemma")
    for source, sizes in (("games", (400, 100, 500)), ("games:40", (40, 10, 40))):
        learn, check = training_examples(workflow, source, limit=None, seed=None, split="train")
        test = examples_for(workflow, source, limit=None, seed=None, split="test")
        assert (len(learn), len(check), len(test)) == sizes
        assert len({e.id for e in [*learn, *check, *test]}) == sum(sizes)
        assert {e.task for e in learn} == {"Alice", "Bob"}
    assert examples_for(workflow, "games:3", limit=None, seed=None, split="all") == make_games(3)


def test_a_split_that_is_empty_or_unknown_is_named(file, tmp_path):
    workflow = find("single_call")
    with pytest.raises(ConfigError, match="split='dev': use one of"):
        examples_for(workflow, file, limit=None, seed=None, split="dev")
    one = tmp_path / "one.jsonl"
    one.write_text('{"question": "q", "answers": ["a"]}\n')
    with pytest.raises(DataError, match="no examples in the split 'train'"):
        examples_for(workflow, str(one), limit=None, seed=None, split="train")
    with pytest.raises(DataError, match="split 'test': 1 examples: pairs need two or more"):
        examples_for(find("multi_qa"), str(one), limit=None, seed=None, split="test")
    for bad in ("games:0", "games:x"):
        with pytest.raises(DataError, match="use games:N"):
            examples_for(workflow, bad, limit=None, seed=None, split="test")
