"""Questions that are asked in several contexts: each has its own passage in all of them, and counts once."""

from itertools import groupby

from benchmarks.reuse import VARIANTS, mean_by_question
from benchmarks.reuse_models import in_shared_contexts
from choreograph.layer_reuse.profiler import QAExample


def test_a_question_meets_its_passage_among_others_and_counts_once():
    asked = [QAExample(f"q{i}", f"passage {i}.", f"question {i}?", (str(i),)) for i in range(25)]
    result = in_shared_contexts(asked, passages=10, rounds=3)
    assert len({one.id for one in result}) == len(result) == 75
    for one in result:
        assert f"passage {one.answers[0]}." in one.context
    assert [len(list(group)) for _, group in groupby(result, lambda one: one.context)] == [10, 10, 5] * 3
    records = [{"id": one.id} | dict.fromkeys(VARIANTS, float(number)) for number, one in enumerate(result)]
    once = mean_by_question(records)
    assert len(once) == 25
    of_first = [number for number, one in enumerate(result) if one.answers == result[0].answers]
    assert len(of_first) == 3 and once[0]["own"] == sum(of_first) / 3
