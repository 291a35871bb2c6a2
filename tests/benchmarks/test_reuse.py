"""Questions that are asked in several contexts: each has its own passage in all of them, and counts once."""

from itertools import groupby

from benchmarks.reuse import WAYS, of_questions
from benchmarks.reuse_models import in_company
from choreograph.reuse.profiling import Asked


def test_a_question_meets_its_passage_among_others_and_counts_once():
    asked = [Asked(f"q{i}", f"passage {i}.", f"question {i}?", (str(i),)) for i in range(25)]
    found = in_company(asked, passages=10, rounds=3)
    assert len({one.id for one in found}) == len(found) == 75
    for one in found:
        assert f"passage {one.answers[0]}." in one.context
    assert [len(list(group)) for _, group in groupby(found, lambda one: one.context)] == [10, 10, 5] * 3
    records = [{"id": one.id} | dict.fromkeys(WAYS, float(number)) for number, one in enumerate(found)]
    once = of_questions(records)
    assert len(once) == 25
    of_first = [number for number, one in enumerate(found) if one.answers == found[0].answers]
    assert len(of_first) == 3 and once[0]["own"] == sum(of_first) / 3
