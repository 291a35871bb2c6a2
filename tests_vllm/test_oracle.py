"""vLLM with the connector equals brute force in float64 on random graphs of requests, in every family."""

import pytest
from helpers.hypothesis_profile import many
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offline_engine import Request, logprobs_of
from reuse_graphs import Call, expected_rows, graphs, largest_difference, run_graph, texts
from tiny_models import CONFIGS

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
