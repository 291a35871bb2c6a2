"""vLLM with the connector equals brute force in float64 on random graphs of requests, in every family."""

import copy
import itertools

import numpy as np
import pytest
import torch
from helpers.hypothesis_profile import many
from helpers.oracle_families import Graph, row_logprobs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offline_engine import Request, logprobs_of
from reuse_graphs import Call, OraclePrompt, View, expected_rows, graphs, largest_difference, repaired, run_graph, texts
from tiny_models import CONFIGS, random_tokens

TOLERANCE = 2e-4  # of a log-probability, in float32
few = settings(max_examples=many(16), deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.mark.parametrize("name", CONFIGS)
@few
@given(text=texts, num_tokens=st.integers(1, 9))
def test_plain_vllm_equals_brute_force(name, text, num_tokens, start_engine, tiny_model):
    (output,) = start_engine(name, connector=False).run(Request(text, max_tokens=num_tokens))
    call = Call([], text, num_tokens, answer=list(output.outputs[0].token_ids))
    (expected,) = expected_rows(tiny_model(name).model, [call])
    found = {len(text) - 1 + i: row for i, row in enumerate(logprobs_of(output))}
    assert largest_difference([found], [expected]) < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
@few
@given(calls=graphs())
def test_random_graphs_equal_brute_force(name, calls, start_engine, tiny_model):
    found = run_graph(start_engine(name), calls)
    assert largest_difference(found, expected_rows(tiny_model(name).model, calls)) < TOLERANCE


@few
@given(calls=graphs(holes=True))
def test_tokens_between_spans_are_computed_in_their_context(calls, start_engine, tiny_model):
    found = run_graph(start_engine(), calls)
    assert largest_difference(found, expected_rows(tiny_model().model, calls)) < TOLERANCE


@few
@given(calls=graphs(holes=True), share=st.sampled_from([0.1, 0.34, 1.0]))
def test_repaired_tokens_are_computed_in_their_context(calls, share, start_engine, tiny_model):
    """A view that continues its prompt exactly needs no repair, and has none; the values are the same."""
    found = run_graph(start_engine(), calls, repair=share)
    assert largest_difference(found, expected_rows(tiny_model().model, repaired(calls, share))) < TOLERANCE


@pytest.mark.parametrize(("start", "stop"), [(0, 96), (20, 90), (37, 96)])
def test_an_entry_may_hold_reused_tokens(start, stop, start_engine, tiny_model):
    """A whole prompt, or a part of it, moves as one; the tokens that it reused stay those of their entries."""
    engine, graph, prompts = start_engine(), Graph(), []
    texts, header = [random_tokens(60, 50), random_tokens(61, 37)], random_tokens(62, 9)
    for name, text in zip(("one", "two"), texts, strict=True):
        prompts.append(OraclePrompt(graph))
        prompts[-1].compute(text)
        engine.run(Request(text, {"store": [{"entry": name, "start": 0, "stop": len(text)}]}))
    both, reader = OraclePrompt(graph), OraclePrompt(graph)
    both.view(prompts[1].rows(0, 37))
    both.view(prompts[0].rows(0, 50))
    both.compute(header)
    tokens = texts[1] + texts[0] + header
    spans = [{"entry": "two", "start": 0, "stop": 37, "at": 0}, {"entry": "one", "start": 0, "stop": 50, "at": 37}]
    engine.run(Request(tokens, {"spans": spans, "store": [{"entry": "both", "start": start, "stop": stop}]}))
    reader.view(both.rows(start, stop), 15)
    reader.compute([3, 1])
    spans = [{"entry": "both", "start": 0, "stop": stop - start, "at": 0, "position": 15}]
    (output,) = engine.run(Request([*tokens[start:stop], 3, 1], {"spans": spans}))
    expected = row_logprobs(tiny_model().model, graph)[reader.computed[stop - start + 1]]
    assert np.abs(logprobs_of(output)[0] - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_in_bfloat16_reuse_adds_no_more_error_than_another_implementation(name, start_engine, tiny_model):
    """The error of reuse, against float64, is less than twice what plain vLLM and plain Hugging Face differ by."""
    engine, model = start_engine(name, dtype="bfloat16"), copy.deepcopy(tiny_model(name).model).bfloat16()
    texts = [random_tokens(seed, length) for seed, length in enumerate((50, 33, 64))]
    headers = [random_tokens(seed, 12) for seed in range(10, 16)]
    orders = list(itertools.permutations(range(3)))
    reading = [Call([], text) for text in texts] + [
        Call([View(i, 2, len(texts[i]), 60 * at - 30) for at, i in enumerate(order)], header)
        for order, header in zip(orders, headers, strict=True)
    ]
    plain = [
        Call([], [token for i in order for token in texts[i]] + header)
        for order, header in zip(orders, headers, strict=True)
    ]
    reuse = root_mean_square(run_graph(engine, reading)[3:], expected_rows(model, reading)[3:])
    with torch.no_grad():
        rows = [model(torch.tensor([call.tokens])).logits[0].double().log_softmax(-1).numpy() for call in plain]
    implementations = root_mean_square(run_graph(engine, plain), [dict(enumerate(row)) for row in rows])
    assert reuse < 2 * implementations


def root_mean_square(found: list[dict[int, np.ndarray]], expected: list[dict[int, np.ndarray]]) -> float:
    pairs = [(rows[slot], truth[slot]) for rows, truth in zip(found, expected, strict=True) for slot in rows]
    return float(np.sqrt(np.mean([(row - truth) ** 2 for row, truth in pairs])))
