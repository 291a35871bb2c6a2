"""Questions that are asked in several contexts: each has its own passage in all of them, and counts once."""

import math
import threading
from itertools import groupby

import pytest
from helpers import model_variants, tiny_models
from helpers.pipe import Pipe

from benchmarks.reuse import STREAM_TOKENS, VARIANTS, mean_by_question, memory_ratio, serve_linked
from benchmarks.reuse_memory import allocated_bytes
from benchmarks.reuse_models import in_shared_contexts
from benchmarks.reuse_sender import context
from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.lab.profiling.profiler import QAExample
from choreograph.layer_pattern import LayerPattern
from choreograph.layer_reuse import ContextStore, LatencyAwareSelector, ParetoPoint, ServiceTimes
from choreograph.layer_reuse.remote import RemoteSender, serve


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
    by_formula = memory_ratio(model_variants.engine(), pattern, 3)
    assert by_formula == 3 * 5 / (5 + 0.5 + 2 * 2) > (3 * 64 + 16) * 5 * 256 / shared, "the null page has inputs too"


@pytest.mark.parametrize("limit", [math.inf, 1e-9], ids=["no limit", "a limit that nothing meets"])
def test_a_stream_over_a_link_takes_the_patterns_that_its_selector_chooses(limit):
    """Three contexts of a sender in a thread; the best pattern within the limit, else the cheapest."""
    base = tiny_models.build(vocabulary=50_000, positions=1024, layers=5)
    config, count, pipe = EngineConfig(cache=CacheConfig(capacity=8192)), 3, Pipe()
    sender, reader = (
        Engine.from_pretrained(base, config=config),
        Engine.from_pretrained(tiny_models.finetuned(base), config=config),
    )
    best, cheapest = LayerPattern.from_triplet(0, 2, 4), LayerPattern()
    sender.add_model("reader", base)
    sender.enable_layer_reuse("reader", pattern=best)
    with ContextStore(sender) as store, sender.session() as session:
        for number in range(count + 1):
            store.store_kv(session.prefill(context(STREAM_TOKENS, number)).wait_encoded())
        thread = threading.Thread(target=serve, args=(sender, store, pipe.sender))
        thread.start()
        pipe.allow(None)
        with RemoteSender(reader, pipe.receiver, name="writer") as link:
            points = [ParetoPoint(cheapest, 1.0, 0.0), ParetoPoint(best, 0.0, 0.5)]
            selector = LatencyAwareSelector(points, times=ServiceTimes(1e-6), ttft_slo=limit)
            reader.enable_layer_reuse("base", "writer", selector=selector, patterns=selector.patterns)
            served = serve_linked(reader, link, 1000.0, selector, count)
            computed = serve_linked(reader, link, 1000.0, None, count)
        thread.join()
    assert served["patterns"] == {str(best if limit == math.inf else cheapest): count}
    assert served["recomputed"] == computed["recomputed"] == 0
    assert 0 < served["loading"] <= 1 and computed["loading"] == 0
    assert computed["patterns"] == {}
    reader.check()
