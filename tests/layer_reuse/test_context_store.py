"""Contexts by content, layer and model: the paper's five functions."""

import pytest
import torch
from helpers import model_variants
from helpers.inspect_engine import inspect
from helpers.model_configs import CONFIGS
from helpers.model_variants import LAYERS
from transformers import AutoModelForCausalLM

from choreograph import Engine, SamplingParams
from choreograph.errors import InvalidRequestError
from choreograph.layer_pattern import LayerPattern
from choreograph.layer_reuse import ContextStore, context_hash

GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
CONTEXT = [5, 9, 17, 3, 44, 21, 8]


@pytest.fixture
def engine():
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", pattern=[1, 2, 4])
    return engine


def test_a_name_says_what_was_read_and_where_not_by_whom(engine):
    with engine.session() as one, engine.session(model="math") as other:
        first, second = (s.prefill(CONTEXT) for s in (one, other))
        assert context_hash(first) == context_hash(second) == context_hash(one.prefill(CONTEXT, new_offset=9))
        assert context_hash(one.prefill(CONTEXT[1:])) != context_hash(first)
        below = [context_hash(s.prefill([7], [m])) for s, m in ((one, first), (other, second))]
        assert below[0] == below[1] != context_hash(one.prefill([7]))
        assert below[0] != context_hash(one.prefill([7], [first], offsets=[2], new_offset=7))
        assert below[0] != context_hash(one.prefill([7], [first[0:6]], offsets=[1]))


def test_where_encodings_cannot_move_a_name_says_where_they_stand():
    torch.manual_seed(0)
    engine = Engine.from_pretrained(AutoModelForCausalLM.from_config(CONFIGS["gpt2"]).eval())
    with engine.session() as session, ContextStore(engine) as store:
        here, there = (session.prefill(CONTEXT, new_offset=at) for at in (0, 20))
        names = [store.store_kv(text) for text in (here, there)]
        assert names[0] != names[1] and names[0] == context_hash(session.prefill(CONTEXT))
        assert not torch.equal(*(store.fetch_kv(name, "base", 1)[0] for name in names))


def test_a_stored_context_outlives_its_session(engine):
    with ContextStore(engine) as store:
        with engine.session() as session:
            context = session.prefill(CONTEXT, new_offset=3)
            name = store.store_kv(context)
            assert store.store_hidden(context) == (2,) and store.store_kv(context) == name
            expected = [
                inspect(engine).pool.export_layer(layer, inspect(context).entry.slots) for layer in range(LAYERS)
            ]
            inputs = inspect(engine).pool.hidden[2][inspect(context).entry.slots]
        for layer, pair in enumerate(expected):
            assert all(map(torch.equal, store.fetch_kv(name, "base", layer), pair))
        assert torch.equal(store.fetch_hidden(name, "base", 2), inputs)
        made = store.partial_prefill(LayerPattern.from_triplet(1, 2, 4), name, model="math", sender="base")
        with engine.session() as session:
            text = session.prefill(CONTEXT, new_offset=3)
            one = session.decode(
                [7], [session.partial_prefill(text, [1, 2, 4], model="math")], model="math", sampling=GREEDY
            )
            other = session.decode([7], [session.import_message(made)], model="math", sampling=GREEDY)
            assert one.tokens == other.tokens
        per_layer = 2 * 2 * 16 * 4 * len(CONTEXT)
        assert store.num_bytes() == {"base": LAYERS * per_layer + 32 * 4 * len(CONTEXT), "math": 3 * per_layer}
        assert store.models(name) == ("base",)
        store.remove(name)
        assert store.models(name) == ()
    engine.clear_cache()
    engine.check()


def test_a_missing_context_is_named(engine):
    with ContextStore(engine) as store, engine.session() as session:
        name = store.store_kv(session.prefill(CONTEXT))
        with pytest.raises(InvalidRequestError, match=r"not computed by 'math', but by \('base',\)"):
            store.fetch_kv(name, "math", 0)
        with pytest.raises(InvalidRequestError, match=r"inputs of layers \[2\]"):
            store.fetch_hidden(name, "base", 1)
        for layer in (-1, LAYERS, True, "0"):
            with pytest.raises(InvalidRequestError, match="layers 0 to 4"):
                store.fetch_kv(name, "base", layer)
    engine = model_variants.engine()
    with (
        ContextStore(engine) as store,
        engine.session() as session,
        pytest.raises(InvalidRequestError, match=r"engine\.enable_layer_reuse"),
    ):
        store.store_hidden(session.prefill(CONTEXT))


def test_only_whole_encodings_are_stored(engine):
    with ContextStore(engine) as store, engine.session() as session:
        text = session.prefill(CONTEXT)
        version = session.partial_prefill(text, [1, 2, 4], model="math")
        with pytest.raises(InvalidRequestError, match="some layers only"):
            store.store_kv(version)
        assert context_hash(version) == context_hash(text)


@pytest.mark.parametrize("mode", ["prefix", "naive"])
def test_what_is_a_text_in_its_mode_is_not_stored(engine, mode):
    """Its parents are no part of what a store would keep."""
    with ContextStore(engine) as store, engine.session(mode=mode) as session:
        text = session.prefill(CONTEXT)
        for message in (text, session.prefill([7], [text]), session.decode([7], [text], sampling=GREEDY)):
            for keep in (store.store_kv, store.store_hidden):
                with pytest.raises(InvalidRequestError, match=f"in {mode} mode"):
                    keep(message)
        assert not store.num_bytes()


def test_a_models_place_is_for_what_it_encoded_alone(engine):
    with ContextStore(engine) as store, engine.session(model="math") as session:
        text = session.prefill(CONTEXT, model="base")
        for share in ("reuse", "partial"):
            message = session.prefill([7], [text], kv_reuse=share)
            for deep in (message, session.prefill([8], [message])):
                for keep in (store.store_kv, store.store_hidden):
                    with pytest.raises(
                        InvalidRequestError, match=r"attends to KV that 'math' did not compute.*kv_reuse='recompute'"
                    ):
                        keep(deep)
        own = session.prefill([7], [text])
        name = store.store_kv(own)
        assert own.kv_location == "device" and name == context_hash(message)
        pairs = zip(store.fetch_kv(name, "math", 3), own.export_kv().layers[3], strict=True)
        assert all(torch.equal(kept, made) for kept, made in pairs)


def test_a_stored_context_is_encoded(engine):
    with ContextStore(engine) as store, engine.session() as session:
        said = session.decode([7], [session.prefill(CONTEXT)], sampling=GREEDY)
        name = store.store_kv(said)
        assert inspect(said).entry.is_complete and inspect(store.context(name, "base")).entry.is_complete


def test_a_long_talk_has_a_name(engine):
    with engine.session() as session:
        turns = []
        for number in range(40):
            turns.append(session.prefill([number], turns))
        assert len(context_hash(turns[-1])) == 64
