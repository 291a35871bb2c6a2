"""Contexts by content, layer and model: the paper's five functions."""

import pytest
import relatives
import torch
from families import CONFIGS
from relatives import LAYERS
from transformers import AutoModelForCausalLM

from choreograph import Engine, SamplingParams
from choreograph.errors import CallError
from choreograph.pattern import Pattern
from choreograph.reuse import ContextStore, content_name

GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
CONTEXT = [5, 9, 17, 3, 44, 21, 8]


@pytest.fixture
def engine():
    engine = relatives.engine()
    engine.share("math", pattern=[1, 2, 4])
    return engine


def test_a_name_says_what_was_read_and_where_not_by_whom(engine):
    with engine.session() as one, engine.session(model="math") as other:
        first, second = (s.prefill(CONTEXT) for s in (one, other))
        assert content_name(first) == content_name(second) == content_name(one.prefill(CONTEXT, new_offset=9))
        assert content_name(one.prefill(CONTEXT[1:])) != content_name(first)
        below = [content_name(s.prefill([7], [m])) for s, m in ((one, first), (other, second))]
        assert below[0] == below[1] != content_name(one.prefill([7]))
        assert below[0] != content_name(one.prefill([7], [first], offsets=[2], new_offset=7))
        assert below[0] != content_name(one.prefill([7], [first.part(0, 6)], offsets=[1]))


def test_where_encodings_cannot_move_a_name_says_where_they_stand():
    torch.manual_seed(0)
    engine = Engine.from_pretrained(AutoModelForCausalLM.from_config(CONFIGS["gpt2"]).eval())
    with engine.session() as session, ContextStore(engine) as store:
        here, there = (session.prefill(CONTEXT, new_offset=at) for at in (0, 20))
        names = [store.store_kv(text) for text in (here, there)]
        assert names[0] != names[1] and names[0] == content_name(session.prefill(CONTEXT))
        assert not torch.equal(*(store.fetch_kv(name, "base", 1)[0] for name in names))


def test_what_was_stored_outlives_its_session(engine):
    with ContextStore(engine) as store:
        with engine.session() as session:
            context = session.prefill(CONTEXT, new_offset=3)
            name = store.store_kv(context)
            assert store.store_e(context) == (2,) and store.store_kv(context) == name
            wanted = [engine.runner.store.arena.read_layer(layer, context._call.work.slots) for layer in range(LAYERS)]
            inputs = engine.runner.store.arena.inputs[2][context._call.work.slots]
        for layer, pair in enumerate(wanted):
            assert all(map(torch.equal, store.fetch_kv(name, "base", layer), pair))
        assert torch.equal(store.fetch_e(name, "base", 2), inputs)
        made = store.partial_prefill(Pattern.of(1, 2, 4), name, model="math", sender="base")
        with engine.session() as session:
            text = session.prefill(CONTEXT, new_offset=3)
            one = session.decode(
                [7], [session.partial_prefill(text, [1, 2, 4], model="math")], model="math", sampling=GREEDY
            )
            other = session.decode([7], [session.borrow(made)], model="math", sampling=GREEDY)
            assert one.tokens == other.tokens
        per_layer = 2 * 2 * 16 * 4 * len(CONTEXT)
        assert store.bytes() == {"base": LAYERS * per_layer + 32 * 4 * len(CONTEXT), "math": 3 * per_layer}
        assert store.models(name) == ("base",)
        store.forget(name)
        assert store.models(name) == ()
    engine.clear_cache()
    engine.check()


def test_what_is_not_there_is_said(engine):
    with ContextStore(engine) as store, engine.session() as session:
        name = store.store_kv(session.prefill(CONTEXT))
        with pytest.raises(CallError, match="'math' has not encoded it; \\('base',\\) has"):
            store.fetch_kv(name, "math", 0)
        with pytest.raises(CallError, match=r"inputs of layers \[2\]"):
            store.fetch_e(name, "base", 1)
        for layer in (-1, LAYERS, True, "0"):
            with pytest.raises(CallError, match="layers 0 to 4"):
                store.fetch_kv(name, "base", layer)
    engine = relatives.engine()
    with ContextStore(engine) as store, engine.session() as session, pytest.raises(CallError, match=r"engine\.share"):
        store.store_e(session.prefill(CONTEXT))


def test_only_whole_encodings_are_stored(engine):
    with ContextStore(engine) as store, engine.session() as session:
        text = session.prefill(CONTEXT)
        version = session.partial_prefill(text, [1, 2, 4], model="math")
        with pytest.raises(CallError, match="some layers only"):
            store.store_kv(version)
        assert content_name(version) == content_name(text)


@pytest.mark.parametrize("mode", ["prefix", "naive"])
def test_what_is_a_text_in_its_mode_is_not_stored(engine, mode):
    """Its parents are no part of what a store would keep."""
    with ContextStore(engine) as store, engine.session(mode=mode) as session:
        text = session.prefill(CONTEXT)
        for message in (text, session.prefill([7], [text]), session.decode([7], [text], sampling=GREEDY)):
            for keep in (store.store_kv, store.store_e):
                with pytest.raises(CallError, match=f"in {mode} mode"):
                    keep(message)
        assert not store.bytes()


def test_a_models_place_is_for_what_it_encoded_alone(engine):
    with ContextStore(engine) as store, engine.session(model="math") as session:
        text = session.prefill(CONTEXT, model="base")
        for share in ("reuse", "partial"):
            message = session.prefill([7], [text], share=share)
            for deep in (message, session.prefill([8], [message])):
                for keep in (store.store_kv, store.store_e):
                    with pytest.raises(CallError, match=r"sees what 'math' did not compute.*share='recompute'"):
                        keep(deep)
        own = session.prefill([7], [text])
        name = store.store_kv(own)
        assert own.where == "device" and name == content_name(message)
        pairs = zip(store.fetch_kv(name, "math", 3), own.copy_out().layers[3], strict=True)
        assert all(torch.equal(kept, made) for kept, made in pairs)


def test_what_is_stored_is_encoded(engine):
    with ContextStore(engine) as store, engine.session() as session:
        said = session.decode([7], [session.prefill(CONTEXT)], sampling=GREEDY)
        name = store.store_kv(said)
        assert said._call.work.whole and store.context(name, "base")._call.work.whole


def test_a_long_talk_has_a_name(engine):
    with engine.session() as session:
        turns = []
        for number in range(40):
            turns.append(session.prefill([number], turns))
        assert len(content_name(turns[-1])) == 64
