"""One pass over a trace gives what the engine gives step by step, and gradients of all that a call saw."""

import pytest
import torch
from helpers import tiny_models
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.message_graphs import graphs
from helpers.model_configs import CONFIGS
from helpers.trace_builders import WITH_LOGPROBS, run_graph
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from choreograph import Engine, Repair
from choreograph.attention.metadata import Alignment
from choreograph.lab.replay.packed_forward import forward, forward_no_grad, pack
from choreograph.lab.replay.traced_calls import as_full_prompts, trace_calls
from choreograph.lab.training.losses import log_likelihood
from choreograph.lab.workflows import StageCall


def heard(steps):
    return [one.logprob for step in steps for one in step.message.logprobs or ()]


def in_one_pass(adapter, calls, alignment=None):
    packed = pack(calls, alignment)
    packed.check()
    return log_likelihood(forward_no_grad(adapter, packed), packed.targets).tolist()


@pytest.fixture(scope="module")
def engine():
    return tiny_models.engine()


@given(nodes=graphs())
@settings(max_examples=many(60), deadline=None)
def test_one_pass_is_the_engine_step_by_step(engine, nodes):
    with engine.session() as session:
        steps = run_graph(session, nodes)
        calls = trace_calls(steps)
        assert in_one_pass(inspect(engine).hf_model, calls) == pytest.approx(heard(steps), abs=1e-4)


@given(nodes=graphs(), alignment=st.sampled_from([Alignment(0.8, 0.5), Alignment(1.2, 2.0)]))
@settings(max_examples=many(40), deadline=None)
def test_one_pass_aligns_like_the_engine(engine, nodes, alignment):
    with engine.session(repair=Repair(0, "align", alignment)) as session:
        steps = run_graph(session, nodes)
        calls = trace_calls(steps)
        assert in_one_pass(inspect(engine).hf_model, calls, alignment) == pytest.approx(heard(steps), abs=2e-4)


@given(nodes=graphs())
@settings(max_examples=many(60), deadline=None)
def test_the_decodes_behind_their_prompts_are_prefix_mode(engine, nodes):
    with engine.session(mode="prefix") as session:
        steps = run_graph(session, nodes)
        prompts = as_full_prompts(trace_calls(steps))
        said = [call.generated for call in prompts]
        assert said == [step.message.output_token_ids for step in steps if step.message.kind == "decode"]
        assert in_one_pass(inspect(engine).hf_model, prompts) == pytest.approx(heard(steps), abs=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_in_one_pass(name):
    torch.manual_seed(0)
    engine = Engine.from_pretrained(AutoModelForCausalLM.from_config(CONFIGS[name]).eval())
    with engine.session() as session:
        a = session.prefill([1, 2, 3, 4])
        b = session.decode([5, 6], [a], forced_tokens=[7, 8, 9], sampling=WITH_LOGPROBS)
        places = {"offsets": [30, 3], "new_offset": 50} if engine.model_info.supports_shift else {"offsets": [5, 0]}
        c = session.decode([9], [b[1:4], a], **places, forced_tokens=[1, 2], sampling=WITH_LOGPROBS)
        steps = [StageCall("", m) for m in (a, b, c)]
        assert in_one_pass(inspect(engine).hf_model, trace_calls(steps)) == pytest.approx(heard(steps), abs=1e-4)


def test_equal_prefills_are_one_call(engine):
    with engine.session() as session:
        a = session.prefill([1, 2, 3])
        here = session.prefill([4, 5], [a])
        there = session.prefill([4, 5], [a], offsets=[7], new_offset=10)  # the same work elsewhere
        other = session.prefill([4, 5], [a], offsets=[8], new_offset=10)
        last = session.decode([6], [here, there, other], forced_tokens=[7, 8], sampling=WITH_LOGPROBS)
        steps = [StageCall("", m) for m in (a, here, there, other, last)]
        calls = trace_calls(steps)
        assert len(calls) == 4
        assert [seen.call for seen in calls[-1].parents] == [1, 1, 2]
        assert in_one_pass(inspect(engine).hf_model, calls) == pytest.approx(heard(steps), abs=1e-4)


def test_prompts_share_their_longest_beginning(engine):
    with engine.session(mode="prefix") as session:
        a = session.prefill(list(range(20)))
        both = [session.decode([30 + i], [a], forced_tokens=[1, 2, 3], sampling=WITH_LOGPROBS) for i in range(2)]
        last = session.decode([40], [a, *both], forced_tokens=[5], sampling=WITH_LOGPROBS)
        steps = [StageCall("", m) for m in (a, *both, last)]
        prompts = as_full_prompts(trace_calls(steps))
    assert [len(call.prompt) for call in prompts] == [21, 1, 5]
    assert [tuple(seen) for seen in prompts[2].parents] == [(0, 0, 24, 0)]


def loss_of(adapter, calls):
    packed = pack(calls)
    with adapter.attention_hook():
        return -log_likelihood(forward(adapter, packed), packed.targets).sum()


def test_gradients_of_a_chain_are_those_of_plain_training():
    """Each call behind all that came before is one causal text, which transformers can differentiate itself."""
    model = tiny_models.build(seed=4)
    engine = Engine.from_pretrained(model)
    with engine.session() as session:
        a = session.prefill([1, 2, 3, 4])
        b = session.decode([5, 6], [a], forced_tokens=[7, 8, 9])
        c = session.decode([10], [a, b], forced_tokens=[11, 12])
        calls = trace_calls([StageCall("", m) for m in (a, b, c)])
    ids = torch.tensor([[*range(1, 13)]])
    logprobs = model(ids).logits[0].log_softmax(-1)
    plain = -sum(logprobs[at - 2, at] for at in (7, 8, 9, 11, 12))  # token n stands at n - 1, and follows n - 2
    ours = loss_of(inspect(engine).hf_model, calls)
    assert ours.item() == pytest.approx(plain.item(), abs=1e-4)
    expected = torch.autograd.grad(plain, list(model.parameters()))
    for mine, theirs in zip(torch.autograd.grad(ours, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@given(seed=st.integers(0, 1000))
@example(seed=561)  # a steep third derivative: the step has to be small
@settings(max_examples=many(8), deadline=None)
def test_gradients_reach_what_was_seen_elsewhere(seed):
    """Finite differences of the engine's own log-probabilities, along a random direction of all weights."""
    model = tiny_models.build(seed=seed)
    engine = Engine.from_pretrained(model)

    def listen():
        with engine.session() as session:
            a, b = session.prefill([1, 2, 3, 4]), session.prefill([20, 21, 22])
            said = session.decode([5, 6], [a], forced_tokens=[7, 8, 9], sampling=WITH_LOGPROBS)
            last = session.decode(
                [10], [b, said, a], offsets=[40, 3, 3], new_offset=9, forced_tokens=[11, 12], sampling=WITH_LOGPROBS
            )
            steps = [StageCall("", m) for m in (a, b, said, last)]
            return -sum(heard(steps)), trace_calls(steps)

    _, calls = listen()
    weights = list(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    direction = [torch.randn(p.shape, generator=generator) * 3e-4 for p in weights]
    slope = sum(
        float((g * d).sum())
        for g, d in zip(torch.autograd.grad(loss_of(inspect(engine).hf_model, calls), weights), direction, strict=True)
    )
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, d in zip(weights, direction, strict=True):
                p.add_(sign * d)
        engine.clear_cache()
        ends.append(listen()[0])
        with torch.no_grad():
            for p, d in zip(weights, direction, strict=True):
                p.sub_(sign * d)
    assert (ends[0] - ends[1]) / 2 == pytest.approx(slope, rel=0.03, abs=5e-5)


def test_gradients_pass_through_aligned_attention():
    """Finite differences of the loss along a random direction of all weights."""
    model = tiny_models.build(seed=7)
    engine = Engine.from_pretrained(model)
    with engine.session() as session:
        a, b = session.prefill([1, 2, 3, 4]), session.prefill([20, 21, 22])
        c = session.decode([10], [a, b], forced_tokens=[11, 12])
        calls = trace_calls([StageCall("", m) for m in (a, b, c)])
    adapter, weights = inspect(engine).hf_model, list(model.parameters())
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(w.shape, generator=generator) * 1e-3 for w in weights]

    def loss():
        packed = pack(calls, Alignment(0.7, 0.5))
        with adapter.attention_hook():
            return -log_likelihood(forward(adapter, packed), packed.targets).sum()

    slope = sum((g * d).sum() for g, d in zip(torch.autograd.grad(loss(), weights), direction, strict=True)).item()
    sides = []
    for sign in (1, -2):
        with torch.no_grad():
            for weight, step in zip(weights, direction, strict=True):
                weight += sign * step
            sides.append(loss().item())
    assert slope == pytest.approx((sides[0] - sides[1]) / 2, rel=2e-2)
