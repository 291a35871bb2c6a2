"""`Message.explain`: what parents saw, and the divergence from prefix mode."""

import numpy as np
import pytest
import torch
from helpers import tiny_models
from helpers.hypothesis_profile import many
from helpers.message_graphs import graphs
from helpers.oracle import Oracle, OracleMessage
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import SamplingParams
from choreograph.errors import MessageReleasedError
from choreograph.features.explain import SMALL_KL, RepairTrial, _recommend

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def parents_of(message):
    return message.explain().parents


def test_a_parent_that_saw_its_context_has_neither_leak_nor_blockage():
    with tiny_models.engine().session() as session:
        question = session.prefill([1, 2, 3])
        answer = session.decode([4], [question], sampling=GREEDY)
        vote = session.decode([5], [question, answer], sampling=GREEDY)
        for parent in parents_of(vote):
            assert (parent.leaked, parent.blocked, parent.shift, parent.repaired) == ((), (), 0, 0)
            assert parent.reused == parent.num_tokens
        assert vote.explain(measure=True).kl < 1e-6


def test_blockage_is_what_precedes_a_parent_and_was_not_seen():
    with tiny_models.engine().session() as session:
        question, first, second = session.prefill([1, 2, 3]), session.prefill([4] * 5), session.prefill([6] * 7)
        vote = session.decode([5], [question, first, second], sampling=GREEDY)
        _, a, b = parents_of(vote)
        assert a.blocked == ((question.id, 3),) and a.shift == 3
        assert b.blocked == ((question.id, 3), (first.id, 5)) and b.shift == 8
        assert a.leaked == b.leaked == ()


def test_leaks_include_what_was_seen_through_others():
    with tiny_models.engine().session() as session:
        secret = session.prefill([1] * 6)
        public = session.prefill([2] * 4, [secret])
        answer = session.decode([3], [public], sampling=GREEDY)
        reader = session.decode([4], [answer], sampling=GREEDY)
        (parent,) = parents_of(reader)
        assert parent.leaked == ((secret.id, 6), (public.id, 4)) and parent.blocked == ()
        assert parent.shift == -answer.position


def test_the_hidden_part_of_a_sliced_parent_is_a_leak():
    with tiny_models.engine().session() as session:
        message = session.prefill(list(range(8)))
        reader = session.decode([9], [message[3:8]], sampling=GREEDY)
        (parent,) = parents_of(reader)
        assert parent.leaked == ((message.id, 3),) and parent.shift == -3 and parent.num_tokens == 5


def test_repaired_tokens_are_told_from_reused_ones():
    with tiny_models.engine().session() as session:
        secret, question = session.prefill([9] * 3), session.prefill([1] * 4)
        solution = session.prefill([2] * 8, [secret])
        half = session.decode([5], [question, solution], sampling=GREEDY, repair=0.5)
        _, parent = parents_of(half)
        assert (parent.reused, parent.repaired, parent.computed) == (4, 4, 0)
        assert parent.leaked == ((secret.id, 3),) and parent.blocked == ((question.id, 4),)
        full = session.decode([5], [question, solution], sampling=GREEDY, repair=1)
        _, parent = parents_of(full)
        assert (parent.reused, parent.repaired, parent.leaked, parent.blocked) == (0, 8, (), ())
        later = session.decode([6], [question, half], sampling=GREEDY)
        _, parent = parents_of(later)  # repaired solution: what it saw is reached through it
        assert [m.message for m in parent.leaked] == [secret.id, solution.id]


def test_an_imported_message_is_its_original():
    engine = tiny_models.engine()
    with engine.session() as session, engine.session() as other:
        question = session.prefill([1, 2, 3])
        answer = session.decode([4], [question], sampling=GREEDY)
        copies = [other.import_message(message) for message in (question, answer)]
        reader = other.decode([5], copies, sampling=GREEDY)
        assert [(p.leaked, p.blocked) for p in parents_of(reader)] == [((), ()), ((), ())]
        (alone,) = parents_of(other.decode([5], copies[1:], sampling=GREEDY))
        assert alone.leaked == ((question.id, 3),)


@pytest.mark.parametrize("mode", ["prefix", "naive"])
def test_other_modes_have_nothing_to_explain(mode):
    with tiny_models.engine().session(mode=mode) as session:
        parents = [session.prefill([1, 2, 3]), session.prefill([4, 5])]
        session.decode([6], parents[:1], sampling=GREEDY).result()
        result = session.decode([7], parents, sampling=GREEDY).explain(measure=True)
        assert result.kl == 0 and not any(p.leaked or p.blocked for p in result.parents)
        assert [p.reused + p.computed for p in result.parents] == [3, 2]
        assert result.parents[0].reused == (3 if mode == "prefix" else 0)


@settings(max_examples=many(12), deadline=None)
@given(nodes=graphs(), backend=st.sampled_from(["native", "sdpa", "reference"]))
def test_the_divergence_equals_the_oracles(nodes, backend):
    """Distributions in the real context and over the concatenated text, both by brute force in float64."""
    engine, oracle = tiny_models.engine(backend=backend), Oracle(tiny_models.model())
    with engine.session() as session:
        messages, computed = [], []
        for node in nodes:
            parents = [messages[index] for index in node.parents]
            args = (node.tokens, parents, node.offsets, node.position)
            if node.generated is None:
                messages.append(session.prefill(*args))
            else:
                messages.append(session.decode(*args, forced_tokens=node.generated, footer=node.footer))
            message = messages[-1]
            contexts = list(zip((computed[index] for index in node.parents), message.offsets, strict=True))
            computed.append(oracle.compute(OracleMessage(message.tokens, message.position, contexts)))
        text = [token for parent in messages[-1].parents for token in parent.tokens]
        whole = oracle.compute(OracleMessage(text + messages[-1].tokens, 0, []))
        result = messages[-1].explain(measure=True)
        engine.check()
    before, after = whole.logprobs[len(text) :], computed[-1].logprobs
    expected = (np.exp(before) * (before - after)).sum(-1)
    if (generated := nodes[-1].generated) is not None:
        first = len(nodes[-1].tokens) - 1
        expected = expected[first : first + len(generated)]
    assert np.allclose(result.divergence, expected, atol=2e-4)


def test_trials_measure_what_a_call_with_that_repair_gives():
    engine = tiny_models.engine()
    with engine.session() as session, engine.session(mode="prefix") as baseline:
        texts = [[1] * 10, [2, 3] * 5, [4, 5, 6, 7] * 3]

        def run(session, **options):
            rows = []
            parents = [session.prefill(text) for text in texts]
            message = session.decode([8, 9], parents, forced_tokens=[1, 2, 3], **options)
            message.on_logprobs(lambda row: rows.append(row.clone()))
            message.wait_encoded()
            return message, torch.stack(rows)

        message, actual = run(session)
        _, expected = run(baseline)
        result = message.explain(measure=True)
        kl = (expected.exp() * (expected - actual)).sum(-1)
        assert torch.allclose(torch.tensor(result.divergence), kl, atol=1e-4)
        assert [trial.share for trial in result.trials] == [0.1, 0.2, 0.4]
        for trial in result.trials:
            _, repaired = run(session, repair=trial.share)
            assert trial.kl == pytest.approx((expected.exp() * (expected - repaired)).sum(-1).mean().item(), abs=1e-4)
    assert engine.stats().num_referenced_entries == 0
    engine.check()


def test_measuring_brings_back_what_left_the_device():
    engine = tiny_models.engine(tokens=64)
    with engine.session() as session:
        parents = [session.prefill([i] * 8) for i in (1, 2)]
        message = session.decode([3], parents, sampling=GREEDY)
        before = message.explain(measure=True).divergence
        session.decode([4] * 50, sampling=GREEDY).wait_encoded()
        assert any(parent.kv_location == "dropped" for parent in parents)
        assert message.explain(measure=True).divergence == pytest.approx(before, abs=1e-5)
        engine.check()


def test_a_released_message_is_explained_but_not_measured():
    with tiny_models.engine().session() as session:
        question = session.prefill([1, 2])
        message = session.decode([3], [question], sampling=GREEDY)
        message.wait_encoded().release()
        assert len(message.explain().parents) == 1
        with pytest.raises(MessageReleasedError):
            message.explain(measure=True)


def test_recommendations_have_figures_only_if_they_were_measured():
    with tiny_models.engine().session() as session:
        question, solution = session.prefill([1] * 9), session.prefill([2] * 9)
        vote = session.decode([3], [question, solution], sampling=GREEDY)
        (sentence,) = vote.explain().recommendations
        start = f"message {vote.id} reads message {solution.id} that did not see message {question.id}: "
        assert sentence == f"{start}repair= computes a share of them again with it; or encode them with it as a parent"
        parents = vote.explain().parents
        names = {vote.id: "vote 1", solution.id: "solution 1", question.id: "question 1"}
        start = "vote 1 reads solution 1 that did not see question 1: "
        trials = (RepairTrial(0.1, 0.12), RepairTrial(0.2, 0.03), RepairTrial(0.4, 0.01))
        (sentence,) = _recommend(vote.id, parents, 0.14, trials, names)
        assert sentence == f"{start}repair=0.2 brings KL from 0.14 to 0.03; or encode them with it as a parent"
        (sentence,) = _recommend(vote.id, parents, 0.14, (RepairTrial(0.4, 0.2),), names)
        assert sentence.startswith(f"{start}repair up to 0.4 leaves KL at 0.14, so use repair=1 or prefix mode")
        (sentence,) = _recommend(vote.id, parents, SMALL_KL / 2, (), names)
        assert sentence.endswith("nothing to do")


def test_a_labelled_message_is_measured_with_repairs():
    engine = tiny_models.engine()
    with engine.session() as session:
        rules = session.prefill([1, 2, 3, 4, 5, 6], labels={"caller"})
        texts = [session.prefill([10 + i, 20 + i, 30 + i, 40 + i]) for i in range(3)]
        message = session.decode([7], [rules, *texts], temperature=0, max_tokens=4)
        assert message.labels == {"caller"}
        assert [trial.share for trial in message.explain(measure=True).trials] == [0.1, 0.2, 0.4]
        engine.check()
