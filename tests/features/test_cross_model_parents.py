"""A message's parents are those that it was given, also where its model sees versions of them."""

import pytest
from helpers import model_variants, tiny_models
from helpers.inspect_engine import inspect

from choreograph import Engine, SamplingParams
from choreograph.lab.workflows import WorkflowRun, find
from choreograph.lab.workflows.run import StageCall, parallel_groups
from choreograph.layer_reuse import context_hash
from choreograph.viz import message_bars

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def engine():
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", pattern=[1, 2, 4])
    return engine


@pytest.mark.parametrize("share", ["recompute", "partial", "reuse"])
def test_parents_stay_what_was_given(engine, share):
    with engine.session() as session:
        text, other = session.prefill([1, 2, 3]), session.prefill([4, 5])
        said = session.decode([7], [text, other[0:1]], model="math", kv_reuse=share, sampling=GREEDY)
        assert said.parents[0] is text and said.parents[1].message is other and said.offsets == (0, 3)
        names = zip(inspect(said).parents, (text, other), strict=True)
        assert all((call is inspect(given).request) == (share == "reuse") for call, given in names)
        steps = [StageCall("talk", text), StageCall("talk", other), StageCall("talk", said)]
        assert [bar.number for bar in message_bars(steps)[-1]] == [1, 2, 3]
        own = session.prefill(said.tokens, [text, other[0:1]])
        assert context_hash(own) == context_hash(said)
    engine.check()


def test_a_model_that_was_seen_through_a_version_sees_its_own_again(engine):
    with engine.session() as session:
        text = session.prefill([1, 2, 3])
        between = session.prefill([4, 5], [text], model="math")
        last = session.decode([7], [text, between], sampling=GREEDY)
        version = inspect(last).parents[1]
        assert version.parents == (inspect(text).request,), "the base has encoded what it sees there"
        expected = session.decode([7], [text, session.prefill([4, 5], [text])], sampling=GREEDY)
        assert last.tokens == expected.tokens


def test_steps_that_see_each_other_are_not_side_by_side(engine):
    with engine.session() as session:
        first = session.decode([6], sampling=GREEDY)
        second = session.decode([7], [first], model="math", sampling=GREEDY)
        beside = session.decode([8], model="math", sampling=GREEDY)
        groups = parallel_groups([StageCall("talk", m) for m in (first, second, beside)])
        assert [[step.message for step in group] for group in groups] == [[first], [second, beside]]


@pytest.mark.parametrize("leak", ["system", "plan", "none"])
def test_words_are_retold_where_another_model_reads(talker, leak):
    vocabulary = talker.model_info.vocab_size
    models = {
        "reader": tiny_models.build(seed=9, vocabulary=vocabulary, positions=talker.model_info.max_positions, stop=2)
    }
    engine = Engine.from_pretrained(inspect(talker).model, tokenizer=talker.tokenizer, models=models)
    with engine.session(seed=0) as session:
        p = WorkflowRun(session, sampling=GREEDY, model="reader", adapter_stages=("Bob says",))
        find("prisoners_dilemma")(p, leak=leak).result()
        retold = [message for stage, message in p.calls if stage == "retold"]
        said = [message for stage, message in p.calls if stage == "Alice says"]
        assert [m.position for m in retold] == [m.position for m in said]
    engine.check()
