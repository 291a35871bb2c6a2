"""Reuse under what vLLM's scheduler does: chunks, preemption, other blocks, adapters, parallel samples, aborts."""

import random
import uuid

import pytest
from helpers.hypothesis_profile import many
from hypothesis import HealthCheck, given, settings
from offline_engine import BLOCK, Request, count_preemptions, is_refused, logprobs_of, missing_of, report_of, tokens_of
from reuse_graphs import Call, View, expected_rows, graphs, largest_difference, run_graph
from tiny_models import random_tokens, save_adapter
from vllm.lora.request import LoRARequest

TOLERANCE = 2e-4
ENGINES = {
    "chunked prefill": {"max_num_batched_tokens": 32},
    "no prefix cache": {"enable_prefix_caching": False},
    "no prefix cache, chunked prefill": {"enable_prefix_caching": False, "max_num_batched_tokens": 32},
    "the asynchronous scheduler": {"scheduler_cls": "vllm.v1.core.sched.async_scheduler.AsyncScheduler"},
    "large blocks": {"block_size": 4 * BLOCK},
    "a small cache": {"num_gpu_blocks_override": 24, "max_model_len": 20 * BLOCK},
}


@pytest.mark.parametrize("name", ENGINES)
@settings(max_examples=many(12), deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(calls=graphs(holes=True))
def test_random_graphs_equal_brute_force(name, calls, start_engine, tiny_model):
    found = run_graph(start_engine(**ENGINES[name]), calls)
    assert largest_difference(found, expected_rows(tiny_model().model, calls)) < TOLERANCE


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 32}, {"enable_prefix_caching": False}], ids=repr)
def test_preempted_requests_load_their_spans_again(options, start_engine, tiny_model, monkeypatch):
    """More requests than fit, each with an answer, in a cache of a dozen blocks."""
    engine = start_engine(num_gpu_blocks_override=14, max_model_len=8 * BLOCK, **options)
    preempted = count_preemptions(engine, monkeypatch)
    first, second = random_tokens(1, 60), random_tokens(2, 40)
    for name, text in (("first", first), ("second", second)):
        engine.run(Request(text, {"store": [{"entry": name, "start": 0, "stop": len(text)}]}))
    calls, requests = [Call([], first), Call([], second)], []
    for i in range(6):
        hole = random_tokens(20 + i, i)  # between the views; the first request has none
        call = Call([View(1, 0, 40, 10 * i), tuple(hole), View(0, 5, 60)], random_tokens(10 + i, 8), num_generated=50)
        spans = [
            {"entry": "second", "start": 0, "stop": 40, "at": 0, "position": 10 * i},
            {"entry": "first", "start": 5, "stop": 60, "at": 40 + i},
        ]
        requests.append(Request(second + hole + first[5:] + call.tokens, {"spans": spans}, max_tokens=50))
        calls.append(call)
    outputs = engine.run(*requests)
    assert preempted
    for call, output in zip(calls[2:], outputs, strict=True):
        call.answer = tokens_of(output)
    found = [
        {len(request.tokens) - 1 + i: row for i, row in enumerate(logprobs_of(output))}
        for request, output in zip(requests, outputs, strict=True)
    ]
    assert largest_difference(found, expected_rows(tiny_model().model, calls)[2:]) < TOLERANCE
    engine.check_idle()


def test_entries_belong_to_the_adapter_that_computed_them(start_engine, tiny_model, tmp_path_factory):
    engine = start_engine(enable_lora=True, max_lora_rank=8, max_loras=2)
    adapters = {None: tiny_model().model}
    for number in (1, 2):
        folder = tmp_path_factory.mktemp("adapter")
        merged = save_adapter(tiny_model(), folder, seed=number)
        adapters[LoRARequest(f"adapter-{number}", number, str(folder))] = merged
    text, header = random_tokens(5, 50), random_tokens(6, 7)
    calls = [Call([], text), Call([View(0, 10, 50, 3)], header)]
    store = {"store": [{"entry": "text", "start": 0, "stop": 50}]}
    spans = {"spans": [{"entry": "text", "start": 10, "stop": 50, "at": 0, "position": 3}]}
    stored = []
    for adapter in adapters:
        assert missing_of(engine.run(Request([0], {"query": ["text"]}, lora=adapter))) == ["text"]
        assert is_refused(engine.run(Request(text[10:] + header, spans, lora=adapter)))
        engine.run(Request(text, store, lora=adapter))
        stored.append(adapter)
        for other in stored:  # not in one batch, where vLLM's kernels for CPUs give the base model an adapter
            (output,) = engine.run(Request(text[10:] + header, spans, lora=other))
            expected = expected_rows(adapters[other], calls)[1:]
            assert largest_difference([{46: logprobs_of(output)[0]}], expected) < TOLERANCE


def test_parallel_samples_read_the_same_spans(start_engine, tiny_model):
    engine, text, header = start_engine(), random_tokens(7, 70), random_tokens(8, 9)
    engine.run(Request(text, {"store": [{"entry": "parallel", "start": 0, "stop": 70}]}))
    reuse = {"spans": [{"entry": "parallel", "start": 0, "stop": 70, "at": 0, "position": 30}]}
    options = (("n", 3), ("temperature", 1.0), ("seed", 5))
    (output,) = engine.run(Request(text + header, reuse, max_tokens=6, options=options))
    answers = [tokens_of(output, choice) for choice in range(3)]
    assert len({tuple(answer) for answer in answers}) == 3
    for choice, answer in enumerate(answers):
        calls = [Call([], text), Call([View(0, 0, 70, 30)], header, answer=answer)]
        found = {78 + i: row for i, row in enumerate(logprobs_of(output, choice))}
        assert largest_difference([found], expected_rows(tiny_model().model, calls)[1:]) < TOLERANCE
    engine.check_idle()


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 32}], ids=repr)
@pytest.mark.parametrize("seed", range(3))
def test_aborts_lose_neither_pages_nor_entries(seed, options, start_engine, tiny_model):
    """Requests that read and store are aborted before, between and after any of their steps."""
    engine, rng = start_engine(**options), random.Random(seed)
    text = random_tokens(40, 70)
    name = f"abort-{seed}-{options}"
    engine.run(Request(text, {"store": [{"entry": name, "start": 0, "stop": 70}]}))
    ids = []
    for i in range(12):
        header = random_tokens(50 + i, 40)
        reuse = {
            "spans": [{"entry": name, "start": 0, "stop": 70, "at": 0, "position": 9 * i}],
            "store": [
                {"entry": f"{name}-{i}-header", "start": 70, "stop": 110},
                {"entry": f"{name}-{i}", "start": 70, "stop": None},
            ],
        }
        ids.append(engine.add(Request(text + header, reuse, max_tokens=rng.randint(1, 12)), uuid.uuid4().hex))
    while engine.llm.llm_engine.has_unfinished_requests():
        for _ in range(rng.randint(0, 3)):
            engine.llm.llm_engine.step()
            engine.check()
        if ids:
            engine.llm.llm_engine.abort_request([ids.pop(rng.randrange(len(ids)))])
            engine.check()
    engine.check_idle()
    calls = [Call([], text), Call([View(0, 0, 70, 4)], [1, 2])]
    reuse = {"spans": [{"entry": name, "start": 0, "stop": 70, "at": 0, "position": 4}]}
    (output,) = engine.run(Request([*text, 1, 2], reuse))
    assert report_of(output)["reused_tokens"] == 70
    assert largest_difference([{71: logprobs_of(output)[0]}], expected_rows(tiny_model().model, calls)[1:]) < TOLERANCE
