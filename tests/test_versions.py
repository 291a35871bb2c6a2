"""A message's parents are those that it was given, also where its model sees versions of them."""

import pytest
import relatives
import tiny

from choreograph import Engine, SamplingParams
from choreograph.choreographies import Performance, find
from choreograph.choreographies.performance import Step
from choreograph.measure import side_by_side
from choreograph.reuse import content_name
from choreograph.viz import graph

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def engine():
    engine = relatives.engine()
    engine.share("math", pattern=[1, 2, 4])
    return engine


@pytest.mark.parametrize("share", ["recompute", "partial", "reuse"])
def test_parents_stay_what_was_given(engine, share):
    with engine.session() as session:
        text, other = session.prefill([1, 2, 3]), session.prefill([4, 5])
        said = session.decode([7], [text, other.part(0, 1)], model="math", share=share, sampling=GREEDY)
        assert said.parents[0] is text and said.parents[1].message is other and said.offsets == (0, 3)
        names = zip(said._call.parents, (text, other), strict=True)
        assert all((call is given._call) == (share == "reuse") for call, given in names)
        steps = [Step("talk", text), Step("talk", other), Step("talk", said)]
        assert [bar.number for bar in graph.rows(steps)[-1].seen] == [1, 2]
        own = session.prefill(said.tokens, [text, other.part(0, 1)])
        assert content_name(own) == content_name(said)
    engine.check()


def test_a_model_that_was_seen_through_a_version_sees_its_own_again(engine):
    with engine.session() as session:
        text = session.prefill([1, 2, 3])
        between = session.prefill([4, 5], [text], model="math")
        last = session.decode([7], [text, between], sampling=GREEDY)
        version = last._call.parents[1]
        assert version.parents == (text._call,), "the base has encoded what it sees there"
        expected = session.decode([7], [text, session.prefill([4, 5], [text])], sampling=GREEDY)
        assert last.tokens == expected.tokens


def test_steps_that_see_each_other_are_not_side_by_side(engine):
    with engine.session() as session:
        first = session.decode([6], sampling=GREEDY)
        second = session.decode([7], [first], model="math", sampling=GREEDY)
        beside = session.decode([8], model="math", sampling=GREEDY)
        groups = side_by_side([Step("talk", m) for m in (first, second, beside)])
        assert [[step.message for step in group] for group in groups] == [[first], [second, beside]]


@pytest.mark.parametrize("leak", ["system", "plan", "none"])
def test_words_are_retold_where_another_model_reads(talker, leak):
    vocabulary = talker.facts.vocab_size
    models = {"reader": tiny.build(seed=9, vocabulary=vocabulary, positions=talker.facts.max_positions, stop=2)}
    engine = Engine.from_pretrained(talker.runner.adapter.model, tokenizer=talker.tokenizer, models=models)
    with engine.session(seed=0) as session:
        p = Performance(session, sampling=GREEDY, model="reader", readers=("Bob says",))
        find("prisoners_dilemma")(p, leak=leak).result()
        retold = [message for stage, message in p.steps if stage == "retold"]
        said = [message for stage, message in p.steps if stage == "Alice says"]
        assert [m.start for m in retold] == [m.start for m in said]
    engine.check()
