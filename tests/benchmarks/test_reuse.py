"""Questions that are asked in several contexts: each has its own passage in all of them, and counts once."""

from itertools import groupby

from helpers import model_variants

from benchmarks.reuse import VARIANTS, mean_by_question
from benchmarks.reuse_memory import allocated_bytes
from benchmarks.reuse_models import in_shared_contexts
from choreograph.lab.profiling.profiler import QAExample
from choreograph.layer_pattern import LayerPattern


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


def test_memory_is_what_the_tensors_of_caches_take():
    """Five layers of 256 bytes a token; one E cache of 128 bytes, of every slot; the null page of sixteen slots."""
    model, pattern, slots = model_variants.base(), LayerPattern.from_triplet(0, 2, 4), 64 + 16
    assert allocated_bytes(model, pattern, 3, 64, reuse=False) == ((3 * 64 + 16) * 5 * 256, 0)
    shared = slots * (5 * 256 + 128) + 2 * 64 * 2 * 256
    assert allocated_bytes(model, pattern, 3, 64, reuse=True) == (shared, slots * 128)
    by_default, _ = allocated_bytes(model, pattern, 2, 64, reuse=True, default_capacity=True)
    assert by_default == shared - 64 * 2 * 256, "room for one more context of its own size"
