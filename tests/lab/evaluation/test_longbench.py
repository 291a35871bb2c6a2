"""LongBench's own record format, and its metrics with the numbers of the official script."""

import json

import pytest

from benchmarks.prompt_cache_quality import documents_of, split_passages
from choreograph.errors import DataError
from choreograph.lab.evaluation.datasets import load, parse_example
from choreograph.lab.evaluation.longbench import METRICS, PROMPTS, best_score
from choreograph.lab.evaluation.metrics import SCORERS, score

PASSAGES = "Passage 1:\nBern\nBern is old.\nPassage 2:\nRome\nSee Passage 7: it is older.\n"


def official_record(dataset, **fields):
    record = {"input": "Which is older?", "context": PASSAGES, "answers": ["Rome"], "length": 12, "dataset": dataset}
    return {**record, "language": "en", "all_classes": None, "_id": "ab12", **fields}


@pytest.mark.parametrize(
    ("task", "prediction", "answers", "expected"),
    [
        ("hotpotqa", "The cat's tail, long.", ["a cats tail"], 0.8),
        ("qasper", "Unanswerable", ["yes", "unanswerable"], 1),
        ("narrativeqa", "U.S. army", ["the US Army"], 1),
        ("musique", "twenty-one", ["twenty one"], 0),
        ("triviaqa", "\nRome\nQuestion: next", ["Rome"], 1),
        ("2wikimqa", "Rome\nQuestion: next", ["Rome"], 0.5),
        ("gov_report", "the cat sat on the mat. it slept", ["the cat lay on a mat. it slept well"], 0.7499999950781251),
        ("multi_news", "", ["a summary"], 0),
        ("qmsum", "...", ["a summary"], 0),
        ("samsum", "Ann eats.\nBob eats.", ["Bob eats."], 0.4999999950000001),
        ("passage_count", "There are 13 paragraphs; 3 unique", ["3"], 0.5),
        ("passage_count", "3, that is 3", ["3"], 1),
        ("passage_count", "three", ["3"], 0),
        ("passage_retrieval_en", "Paragraph 7, not 17 or 8", ["Paragraph 7"], 1 / 3),
        ("lcc", "# a comment\n    return x + 1", ["    return x+1"], 0.93),
        ("repobench-p", "\n\nreturn x", ["return x"], 1),
        ("repobench-p", "```python", ["return x"], 0),
    ],
)
def test_metrics_give_the_numbers_of_the_official_script(task, prediction, answers, expected):
    assert best_score(task, prediction, answers) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("Type: human\nQuestion: a city", "human", 1),
        ("location or human", "human", 0.5),
        ("human individual", "human individual", 1),
        ("human individual, state or human group", "human group", 1 / 3),
        ("someone", "human", 0),
    ],
)
def test_classes_that_are_part_of_the_answer_do_not_count(prediction, answer, expected):
    classes = ["human", "human individual", "human group", "location", "state"]
    assert best_score("trec", prediction, [answer], classes) == pytest.approx(expected)


def test_every_english_task_has_a_prompt_and_a_scorer():
    assert PROMPTS.keys() == METRICS.keys() == {
        kind.removeprefix("longbench/") for kind in SCORERS if kind.startswith("longbench/")
    }  # fmt: skip
    assert len(PROMPTS) == 16


def test_passages_become_documents_that_are_the_context_together():
    passages = split_passages(PASSAGES)
    assert passages == ["Passage 1:\nBern\nBern is old.\n", "Passage 2:\nRome\nSee Passage 7: it is older.\n"]
    assert documents_of(official_record("hotpotqa")) == passages
    assert split_passages("Paragraph 1: a\n\nParagraph 2: b") == ["Paragraph 1: a\n\n", "Paragraph 2: b"]
    for whole in ("A text.\nPassage 1:\nb", "Passage 2:\na", "A story."):
        assert split_passages(whole) == [whole]


def test_an_official_record_is_read_and_scored_by_its_task(tmp_path):
    file = tmp_path / "hotpotqa_e.jsonl"
    file.write_text(json.dumps(official_record("hotpotqa_e")))
    (example,) = load(str(file))
    assert (example.id, example.kind, example.reference) == ("ab12", "longbench/hotpotqa", {"answers": ["Rome"]})
    assert example.task.startswith(PASSAGES) and example.task.endswith("Question: Which is older?")
    record = {"answer": "It is Rome", "findings": {}, "unparseable": {}}
    assert score(example, record) == {"F1": pytest.approx(0.5), "failed": 0}
    few_shot = official_record("trec", answers=["city"], all_classes=["city", "human"], input="Question: Bern?\nType:")
    example = parse_example(few_shot, 0)
    assert example.task.endswith("Type:") and score(example, {**record, "answer": "city"})["accuracy"] == 1


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (official_record("dureader"), "dataset='dureader': the English tasks"),
        (official_record("hotpotqa", answers=[]), "lacks"),
        (official_record("trec"), "lacks"),
        (official_record("qasper", context=["a"]), "context="),
    ],
)
def test_a_record_without_a_metric_or_a_text_is_refused(record, said):
    with pytest.raises(DataError, match=said):
        parse_example(record, 0)
