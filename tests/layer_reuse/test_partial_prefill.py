"""Partial prefill: equal to the oracle on random graphs and patterns, exact at its end points."""

import threading

import pytest
import torch
from helpers import model_variants
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.message_graphs import default_placements, graphs, positions
from helpers.model_configs import CONFIGS
from helpers.model_variants import LAYERS
from helpers.oracle import Oracle, OracleMessage
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.errors import (
    ConfigError,
    InvalidPositionError,
    InvalidRequestError,
    LostContextError,
    ModelError,
    RequestFailedError,
)
from choreograph.features.layer_variants import prefill_layers, restrict_layers
from choreograph.kv_cache.entry import EntryLayers
from choreograph.kv_cache.tiers import TransferOps
from choreograph.layer_pattern import LayerPattern
from choreograph.messages.kv_export import copy_kv
from choreograph.request.request import RequestState

HEARD = SamplingParams(logprobs=0)
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
CONTEXT = [5, 9, 17, 3, 44, 21, 8]
patterns = st.sets(st.integers(0, LAYERS - 1), min_size=1, max_size=LAYERS - 1).map(LayerPattern.from_layers)


def values(message):
    return [one.logprob for one in message.logprobs]


def talk(session, nodes, model):
    """Every node as the model computes it."""
    messages = []
    for node in nodes:
        place = {"parents": [messages[p] for p in node.parents], "offsets": node.offsets, "new_offset": node.position}
        if node.generated is None:
            messages.append(session.prefill(node.tokens, **place, model=model))
        else:
            forced = {"forced_tokens": node.generated, "footer": node.footer}
            messages.append(session.decode(node.tokens, **place, **forced, model=model))
    return messages


@settings(max_examples=many(25), deadline=None)
@given(graphs(max_nodes=5), patterns, st.sampled_from([3, 1024]), st.data())
def test_a_partial_prefill_equals_the_oracle(nodes, pattern, step, data):
    parents = data.draw(st.lists(st.sampled_from(range(len(nodes))), unique=True, min_size=1))
    engine = model_variants.engine(step=step)
    engine.enable_layer_reuse("math", pattern=pattern)
    with engine.session() as session:
        messages = talk(session, nodes, "base")
        said = session.decode(
            [7, 8],
            [messages[p] for p in parents],
            model="math",
            kv_reuse="partial",
            forced_tokens=[1, 2, 3],
            sampling=HEARD,
        )
        engine.run_until_idle()
        engine.check()
        result = values(said)

    sender, receiver, sent, made = Oracle(model_variants.base()), Oracle(model_variants.finetuned()), [], []
    for node, (offsets, start) in zip(nodes, default_placements(nodes), strict=True):
        for known in (sent, made):
            seen = [(known[p], o) for p, o in zip(node.parents, offsets, strict=True)]
            known.append(OracleMessage(node.all_tokens, start, seen))
        sender.compute(sent[-1])
        receiver.compute_layers(made[-1], sent[-1], pattern.layers)
    at, seen = 0, []
    for p in parents:
        seen.append((made[p], at))
        at += len(made[p].tokens)
    expected = receiver.compute(OracleMessage([7, 8, 1, 2, 3], at, seen)).logprobs
    assert result == pytest.approx([expected[1 + i, t] for i, t in enumerate([1, 2, 3])], abs=1e-4)


@settings(max_examples=many(20), deadline=None)
@given(graphs(max_nodes=4), patterns, st.sampled_from([3, 1024]), st.data())
def test_in_another_context_it_equals_the_oracle(nodes, pattern, step, data):
    """Messages are read in another order than the sender read them, and at other positions."""
    order = data.draw(st.permutations(range(len(nodes))))
    starts = [data.draw(positions) for _ in order]
    engine = model_variants.engine(step=step)
    engine.enable_layer_reuse("math", pattern=pattern)
    with engine.session() as session, engine.session(model="math") as own:
        messages, read = talk(session, nodes, "base"), []
        for number, start in zip(order, starts, strict=True):
            read.append(prefill_layers(own, messages[number], read, None, start))
        result = values(own.decode([7, 8], read, forced_tokens=[1, 2, 3], sampling=HEARD))
        engine.run_until_idle()
        engine.check()

    sender, receiver, sent, made, at = Oracle(model_variants.base()), Oracle(model_variants.finetuned()), [], [], 0
    for node, (offsets, start) in zip(nodes, default_placements(nodes), strict=True):
        seen = [(sent[p], o) for p, o in zip(node.parents, offsets, strict=True)]
        sent.append(sender.compute(OracleMessage(node.all_tokens, start, seen)))
    seen = []
    for number, start in zip(order, starts, strict=True):
        made.append(OracleMessage(sent[number].tokens, at if start is None else start, list(seen)))
        receiver.compute_layers(made[-1], sent[number], pattern.layers)
        seen.append((made[-1], at))
        at += len(sent[number].tokens)
    expected = receiver.compute(OracleMessage([7, 8, 1, 2, 3], at, seen)).logprobs
    assert result == pytest.approx([expected[1 + i, t] for i, t in enumerate([1, 2, 3])], abs=1e-4)


@pytest.mark.parametrize("fails_at", ["inputs", "layers"])
def test_a_source_that_does_not_arrive_ends_in_computing_all_layers(fails_at):
    engine = model_variants.engine(step=3)
    engine.enable_layer_reuse("math", pattern=(1, 2, 3))
    fails = threading.Event()

    def fail(*_):
        fails.wait(0.2 if fails_at == "inputs" else 60)  # the step waits for inputs
        raise ConnectionError("it did not arrive")

    with engine.session() as session, engine.session(model="math") as own:
        sent = session.prefill(CONTEXT).wait_encoded()
        snapshot = copy_kv(inspect(engine).core, inspect(sent).request, with_inputs=True)

        def load(pool, entry):
            entry.layers = EntryLayers(hidden=frozenset(snapshot.inputs))
            for layer, states in snapshot.inputs.items():
                pool.hidden[layer][entry.slots] = states
            return TransferOps(fail, fail if fails_at == "inputs" else lambda: None, inputs_first=True)

        received = session.import_encoded(CONTEXT, snapshot, load)
        made, equal = (prefill_layers(own, received, [], None, None) for _ in range(2))
        inspect(engine).step(wait=False)
        assert made.computed_layers == (0, 2) and inspect(made).state is RequestState.RUNNING
        assert inspect(made).entry.num_computed_tokens == (0 if fails_at == "inputs" else 3)
        fails.set()
        inspect(engine).offload_manager.wait()  # else the variant may be complete before the load fails
        tokens = own.decode([7, 8], [made], sampling=GREEDY).tokens
        assert made.computed_layers is None
        assert tokens == own.decode([7, 8], [own.prefill(CONTEXT)], sampling=GREEDY).tokens
        with pytest.raises(LostContextError):  # it was found in the cache, as it was before
            own.decode([7, 8], [equal], sampling=GREEDY).result()
        engine.run_until_idle()
        engine.check()
        assert not inspect(engine).num_unfinished


@pytest.mark.parametrize("shares_entry", [False, True])
def test_a_failed_source_is_not_reused(shares_entry, monkeypatch):
    engine = model_variants.engine(step=3)
    engine.enable_layer_reuse("math", pattern=(1, 2, 3))

    def fail(*_, **__):
        raise RuntimeError("the kernel failed")

    with engine.session() as session, engine.session(model="math") as own:
        sent = [session.prefill(CONTEXT) for _ in range(1 + shares_entry)][-1]
        made = prefill_layers(own, sent, [], None, None)
        with monkeypatch.context() as patch:
            patch.setattr(inspect(engine).runner, "forward", fail)
            engine.step()
        if shares_entry:  # `sent` was found in the cache; all layers of `made` are computed
            assert inspect(sent).entry.error is not None
            assert own.decode([7, 8], [made], sampling=GREEDY).tokens == (
                own.decode([7, 8], [own.prefill(CONTEXT)], sampling=GREEDY).tokens
            )
            assert made.computed_layers is None
        else:
            with pytest.raises(RequestFailedError, match="the kernel failed"):
                made.wait_encoded()
        engine.run_until_idle()
        engine.check()
        assert not inspect(engine).num_unfinished


def test_in_another_context_it_has_positions_labels_and_leaks():
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", pattern=(1, 2, 3))
    with engine.session() as session, engine.session(model="math") as own:
        secret = session.prefill([30, 31, 32], labels={"secret"})
        sent = session.prefill(CONTEXT, [secret])
        with pytest.raises(InvalidPositionError, match="past the model's last one"):
            prefill_layers(own, sent, [], None, engine.model_info.max_positions - 2)
        made = prefill_layers(own, sent, [], None, 2)
        answer = own.decode([7], [made], sampling=GREEDY)
        assert made.labels == answer.labels == {"secret"}
        (parent,) = answer.explain().parents
        assert parent.leaked == ((secret.id, 3),) and (parent.reused, parent.shift) == (len(CONTEXT), -2)


@settings(max_examples=many(20), deadline=None)
@given(graphs(max_nodes=4), patterns)
def test_from_itself_every_pattern_gives_what_it_computes_itself(nodes, pattern):
    engine = model_variants.engine()
    engine.enable_layer_reuse("twin", "base", pattern=pattern)
    with engine.session() as session:
        shared = talk(session, nodes, "base")
        said = session.decode([7], shared, model="twin", kv_reuse="partial", sampling=GREEDY)
        expected = session.decode([7], talk(session, nodes, "twin"), model="twin", sampling=GREEDY)
        assert said.tokens == expected.tokens and values(said) == pytest.approx(values(expected), abs=1e-5)
    engine.check()


def test_all_layers_is_its_own_prefill_and_none_is_the_senders():
    engine = model_variants.engine()
    with engine.session() as session:
        text = session.prefill(CONTEXT)
        own = session.decode([7], [session.prefill(CONTEXT, model="math")], model="math", sampling=GREEDY)
        reused = session.decode([7], [text], model="math", kv_reuse="reuse", sampling=GREEDY)
        assert values(own) != pytest.approx(values(reused), abs=1e-3)
        for pattern, expected in (([LAYERS] * 3, own), ([0, 0, 0], reused), ([0, 0, LAYERS], own)):
            engine.enable_layer_reuse("math", pattern=pattern)
            with engine.session() as other:
                seen = [other.prefill(CONTEXT)]
                said = other.decode([7], seen, model="math", kv_reuse="partial", sampling=GREEDY)
                assert values(said) == pytest.approx(values(expected), abs=1e-5)
    engine.check()


def test_only_layers_that_are_computed_take_room():
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", pattern=[1, 3, 4])
    store = inspect(engine).cache_manager
    with engine.session() as session:
        text = session.prefill(CONTEXT).wait_encoded()
        before = store.pool.free_pages
        said = session.decode([7], [text], model="math", kv_reuse="partial", sampling=GREEDY)
        said.result()
        assert before - store.pool.free_pages == 2, "the decode alone"
        assert store.stats["num_referenced_partial_pages"] == 2
        assert store.pool.partial_layers == {0, 3}
        partial_bytes = sum(2 * store.pool.keys[layer][0].nbytes for layer in store.pool.partial_layers) * LAYERS
        assert partial_bytes == 2 * (store.pool.bytes_per_token - 4 * 32), "one E cache"
    engine.clear_cache()
    assert store.pool.num_free(partial=True) == store.pool.num_pages(partial=True)
    engine.check()


def test_a_pair_has_to_be_known():
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", pattern=[1, 3, 4])
    with engine.session() as session:
        text = session.prefill(CONTEXT, model="twin")
        with pytest.raises(ConfigError, match="has no layer reuse with 'twin'"):
            session.decode([7], [text], model="math", kv_reuse="partial")
        with pytest.raises(ConfigError, match="kv_reuse='some'"):
            session.decode([7], [text], model="math", kv_reuse="some")
    for wrong in (
        {"pattern": [1, 2]},
        {"pattern": [3, 2, 4]},
        {"pattern": [0, 4, 6]},
        {},
        {"pattern": [0, 1, 2], "capacity": 0},
    ):
        with pytest.raises(ConfigError):
            engine.enable_layer_reuse("math", **wrong)
    with pytest.raises(ConfigError, match="nobody"):
        engine.enable_layer_reuse("nobody", pattern=[0, 1, 2])
    with pytest.raises(ConfigError, match="selector=3: use a function"):
        engine.enable_layer_reuse("math", selector=3, patterns=[[0, 1, 2]])


def test_room_that_memory_does_not_have_is_refused_and_changes_nothing():
    engine = model_variants.engine()
    with pytest.raises(ConfigError, match="not enough memory"):
        engine.enable_layer_reuse("math", pattern=[1, 3, 4], capacity=1 << 40)
    arena = inspect(engine).pool
    assert not (arena.num_pages(partial=True) or arena.partial_layers or arena.hidden)
    engine.enable_layer_reuse("math", pattern=[1, 3, 4], capacity=64)
    assert arena.num_pages(partial=True) == 16
    with engine.session() as session:
        text = session.prefill(CONTEXT)
        with pytest.raises(InvalidRequestError, match="is a slice"):
            session.partial_prefill(text[0:3], [1, 3, 4], model="math")
        said = session.decode([7], [text[0:3]], model="math", kv_reuse="partial", sampling=GREEDY)
        assert said.tokens and text.variants["math", "partial"].computed_layers == (0, 3)
    engine.check()


def test_a_family_that_cannot_share_is_refused_and_nothing_changes():
    torch.manual_seed(0)
    falcon = [AutoModelForCausalLM.from_config(CONFIGS["falcon"]).eval() for _ in range(2)]
    config = EngineConfig(cache=CacheConfig(capacity=64, page_size=4))
    engine = Engine.from_pretrained(falcon[0], config=config, models={"other": falcon[1]})
    with pytest.raises(ModelError, match="cannot take part in layer reuse"):
        engine.enable_layer_reuse("other", pattern=[0, 1, 2])
    arena = inspect(engine).pool
    assert not (
        arena.num_pages(partial=True) or arena.partial_layers or arena.hidden or inspect(engine).layer_reuse_pairs
    )


def test_its_own_inputs_give_its_own_keys():
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", pattern=[1, 2, 4])
    store = inspect(engine).cache_manager
    with engine.session() as session:
        text, own = session.prefill(CONTEXT), session.prefill(CONTEXT, model="math")
        sent, wanted = inspect(text.wait_encoded()).entry, inspect(own.wait_encoded()).entry
        store.pool.hidden[2][sent.slots] = store.pool.hidden[2][wanted.slots]
        session.decode([7], [text], model="math", kv_reuse="partial", sampling=GREEDY).result()
        made = inspect(text.variants["math", "partial"]).entry
        for layer in (0, 2, 3):
            result, expected = (store.pool.export_layer(layer, e.slots) for e in (made, wanted))
            for one, other in zip(result, expected, strict=True):
                assert torch.allclose(one, other, atol=1e-5)


def answers(engine, contexts, *, release=False):
    """What "math" says of contexts that "base" encoded, one after the other, twice."""
    with engine.session() as session:
        texts = [session.prefill(context) for context in contexts]
        heads = [session.prefill([3, 4], [text], model="math", kv_reuse="partial") for text in texts]
        said = []
        for _ in range(2):
            for text, head in zip(texts, heads, strict=True):
                both = session.decode([7], [text, head], model="math", kv_reuse="partial", sampling=GREEDY)
                if release and len(said) >= len(texts):
                    text.release()
                said.append(values(both))
                engine.check()
        return said


@pytest.mark.parametrize(
    ("room", "band", "release"),
    [
        ({"tokens": 64}, 24, False),
        ({"tokens": 64, "host_capacity": 512}, 24, False),
        ({"tokens": 64, "disk_capacity": 512}, 16, True),
        ({"tokens": 2048}, 16, True),
    ],
)
def test_short_memory_changes_nothing(room, band, release):
    contexts = [[(7 * i + 3 * k) % 60 for k in range(9 + i)] for i in range(5)]
    roomy, tight = model_variants.engine(), model_variants.engine(**room)
    for engine, tokens in ((roomy, None), (tight, band)):
        engine.enable_layer_reuse("math", pattern=[1, 2, 4], capacity=tokens)
    assert [pytest.approx(one, abs=1e-5) for one in answers(roomy, contexts)] == answers(
        tight, contexts, release=release
    )
    events = [event.kind for event in tight.events.recent]
    assert "recomputing" in events or "evicted" in events
    tight.clear_cache()
    tight.check()
    assert inspect(tight).pool.num_free(partial=True) == inspect(tight).pool.num_pages(partial=True)


def test_a_message_without_cached_hidden_states_is_computed_in_all_layers():
    engine = model_variants.engine()
    with engine.session() as session:
        text = session.prefill(CONTEXT).wait_encoded()
        engine.enable_layer_reuse("math", pattern=[1, 3, 4])
        said = session.decode([7], [text], model="math", kv_reuse="partial", sampling=GREEDY)
        expected = session.decode([7], [session.prefill(CONTEXT, model="math")], model="math", sampling=GREEDY)
        assert values(said) == pytest.approx(values(expected), abs=1e-5)
    assert [event.data["why"] for event in engine.events.recent if event.kind == "recomputed"]


def test_a_choice_is_made_for_every_message_and_told():
    engine, loads = model_variants.engine(), []
    careful, quick = LayerPattern.from_triplet(0, 1, 4), LayerPattern.from_triplet(0, 3, 4)

    def choose(load):
        loads.append(load)
        return quick if load.tokens > 12 else careful

    engine.enable_layer_reuse("math", selector=choose, patterns=[careful, quick])
    with engine.session() as session:
        for context in (CONTEXT, CONTEXT[::-1], CONTEXT[2:]):
            text = session.prefill(context)
            session.decode([7], [text], model="math", kv_reuse="partial", sampling=GREEDY)
        assert not loads, "nothing is admitted yet"
        engine.run_until_idle()
    told = [event.data["pattern"] for event in engine.events.recent if event.kind == "layers_reused"]
    assert told == ["1-4", "3-4", "3-4"] and [load.waiting for load in loads] == [7, 4, 1]
    first = loads[0]
    assert first.tokens == first.message_tokens == 7 and first.message_pairs == first.pairs == 7 * 8 / 2
    assert [load.steps for load in loads] == [1, 2, 3], "those of one model and pattern share a batch"
    engine.check()


@settings(max_examples=many(20), deadline=None)
@given(st.integers(1, LAYERS - 1), st.integers(1, LAYERS))
def test_a_version_seen_in_fewer_layers_is_the_partial_prefill_of_those(first, end):
    """A stretch that ends earlier computes the same: what the profile relies on."""
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", pattern=[0, 1, LAYERS])
    engine.enable_layer_reuse(
        "math", selector=lambda load: LayerPattern(), patterns=[LayerPattern.from_layers({i}) for i in range(LAYERS)]
    )
    whole = LayerPattern.from_triplet(0, first, LAYERS)
    part = LayerPattern.from_triplet(0, first, max(end, first + 1))
    with engine.session() as session:
        text = session.prefill([3, 4], [session.prefill(CONTEXT)])
        narrow = restrict_layers(session, text, session.partial_prefill(text, whole, model="math"), part)
        said = [
            session.decode([7], [seen], model="math", sampling=GREEDY)
            for seen in (narrow, session.partial_prefill(text, part, model="math"))
        ]
        if whole == part:
            assert values(said[0]) == values(said[1])
        engine.run_until_idle()
        engine.check()
        assert values(said[0]) == pytest.approx(values(said[1]), abs=1e-5)


@pytest.mark.parametrize("pattern", [LayerPattern.from_triplet(0, 0, LAYERS), LayerPattern.from_triplet(1, 2, 4)])
def test_what_is_taken_as_it_is_stays_so_behind_what_is_computed(pattern):
    """A pair that computes nothing, below one that does."""
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", "twin", pattern=[0, 0, 0])
    engine.enable_layer_reuse("math", "base", pattern=pattern)
    with engine.session() as session:
        deep = session.prefill(CONTEXT, model="twin")
        text = session.prefill([1, 2], [deep], kv_reuse="reuse")
        said = session.decode(
            [7], [text], model="math", kv_reuse="partial", forced_tokens=[1, 2, 3], sampling=HEARD
        ).result()
        assert len(session.messages) == 4, "one version"
        result = values(said)
    sender, receiver = Oracle(model_variants.base()), Oracle(model_variants.finetuned())
    below = [(sender.compute(OracleMessage(CONTEXT, 0, [])), 0)]
    sent = sender.compute(OracleMessage([1, 2], len(CONTEXT), below))
    made = receiver.compute_layers(OracleMessage([1, 2], len(CONTEXT), below), sent, pattern.layers)
    expected = receiver.compute(OracleMessage([7, 1, 2, 3], 2, [(made, 0)])).logprobs
    assert result == pytest.approx([expected[i, t] for i, t in enumerate([1, 2, 3])], abs=1e-4)
    engine.check()


def test_inputs_count_only_where_their_model_keeps_them():
    """A step of a model that is nobody's sender yet leaves nothing to begin from."""
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", "base", pattern=[0, 2, 4])
    with engine.session() as session:
        text = session.prefill(CONTEXT, model="twin").wait_encoded()
        engine.enable_layer_reuse("math", "twin", pattern=[0, 2, 4])
        said = session.decode([7], [text], model="math", kv_reuse="partial", sampling=GREEDY)
        expected = session.decode([7], [session.prefill(CONTEXT, model="math")], model="math", sampling=GREEDY)
        assert values(said) == pytest.approx(values(expected), abs=1e-5)
    assert engine.events.counts["recomputed"] == 1


def test_what_was_made_with_sight_of_a_model_keeps_it():
    engine = model_variants.engine(tokens=64)
    with engine.session() as session:
        text = session.prefill(CONTEXT, model="twin")
        reply = session.decode([7], [text], model="math", kv_reuse="reuse", sampling=GREEDY)
        expected = values(session.decode([1], [reply], model="math", sampling=GREEDY))
        text.release()
        with pytest.raises(ConfigError, match="in use"):
            engine.remove_model("twin")
        session.prefill(list(range(52))).wait_encoded()  # pushes everything out
        again = session.decode([1], [reply], model="math", sampling=GREEDY)
        assert values(again) == pytest.approx(expected, abs=1e-5)
        assert engine.events.counts["recomputing"] >= 2, "the reply, and what it saw"
    engine.remove_model("twin")
    with pytest.raises(ConfigError, match="twin"), engine.session(model="twin"):
        pass


def test_a_queued_version_counts_as_work():
    engine, loads = model_variants.engine(), []
    engine.enable_layer_reuse("math", selector=lambda load: loads.append(load) or [0, 1, 4], patterns=[[0, 1, 4]])
    with engine.session() as session:
        texts = [session.prefill([i, *CONTEXT]).wait_encoded() for i in range(3)]
        for text in texts:
            session.decode([7], [text], model="math", kv_reuse="partial", sampling=GREEDY)
        engine.run_until_idle()
    one = 8 * 3 / LAYERS + 1  # a version in three layers, and the decode behind it in all
    assert [load.tokens for load in loads] == pytest.approx([0, one, 2 * one])
    assert {load.message_tokens for load in loads} == {8} and {load.transfer for load in loads} == {None}
    pairs = 8 * 9 / 2 * 3 / LAYERS + 9
    assert [load.pairs for load in loads] == pytest.approx([0, pairs, 2 * pairs])
    assert all(0 <= load.waited < 60 for load in loads)
    engine.check()


def test_running_decodes_are_counted_and_waiting_since_submission():
    """The choice is made when there is capacity for the prefill, not when it is submitted."""
    engine, loads = model_variants.engine(calls=3), []
    engine.enable_layer_reuse("math", selector=lambda load: loads.append(load) or [0, 1, 4], patterns=[[0, 1, 4]])
    with engine.session() as session:
        text = session.prefill(CONTEXT).wait_encoded()
        talks = [session.decode([i], sampling=SamplingParams(max_tokens=5, ignore_eos=True)) for i in range(3)]
        for _ in range(3):
            engine.step()
        said = session.decode([7], [text], model="math", kv_reuse="partial", sampling=GREEDY)
        engine.step()
        assert not loads, "three requests run"
        talks[0].release()
        said.result()
    (load,) = loads
    assert load.decodes == load.running == 2 and load.tokens == 2 and load.steps == 0
    engine.check()


def test_a_selector_that_raises_fails_its_request_alone():
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", selector=lambda load: 1 / 0, patterns=[[0, 1, 4]])
    with engine.session() as session:
        text = session.prefill(CONTEXT)
        said = session.decode([7], [text], model="math", kv_reuse="partial", sampling=GREEDY)
        with pytest.raises(RequestFailedError, match="ZeroDivisionError"):
            said.result()
        assert session.decode([7], [text], sampling=GREEDY).tokens
    engine.check()


def test_a_selector_may_reuse_all_layers():
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", selector=lambda load: LayerPattern(), patterns=[[0, 0, 0]])
    with engine.session() as session:
        text = session.prefill(CONTEXT)
        deep = session.prefill([1, 2], [text])
        partial, reused = (
            session.decode([7], [text, deep], model="math", kv_reuse=how, sampling=GREEDY)
            for how in ("partial", "reuse")
        )
        assert values(partial) == pytest.approx(values(reused), abs=1e-6)
        assert text.variants["math", "partial"].computed_layers == ()
    engine.clear_cache()
    engine.check()


def test_a_pair_is_looked_for_as_deep_as_versions_go():
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", "base", pattern=[1, 2, 4])
    with engine.session() as session:
        deep = session.prefill(CONTEXT, model="twin")
        text = session.prefill([1, 2], [deep], kv_reuse="reuse")
        with pytest.raises(ConfigError, match="has no layer reuse with 'twin'"):
            session.decode([7], [text], model="math", kv_reuse="partial")
        assert not text.variants and not deep.variants


def test_a_message_beyond_the_partial_pool_is_computed_in_all_layers():
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", pattern=[1, 2, 4], capacity=8)
    with engine.session() as session:
        first = session.prefill(CONTEXT)
        second = session.prefill(CONTEXT[:3], [first])
        third = session.prefill(CONTEXT * 2)
        said = session.decode([7], [first, second, third], model="math", kv_reuse="partial", sampling=GREEDY)
        assert said.result() and [m.variants["math", "partial"].computed_layers for m in (second, third)] == [
            None,
            None,
        ]
        assert first.variants["math", "partial"].computed_layers == (0, 2, 3)
    assert engine.events.counts["recomputed"] == 2
    engine.check()
