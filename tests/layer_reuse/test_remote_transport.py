"""The order of what is transferred, and several contexts, links, models and processes at a time."""

import threading
from contextlib import contextmanager

import pytest
import torch
from helpers import model_variants, tiny_models
from helpers.inspect_engine import inspect
from helpers.model_variants import LAYERS
from helpers.pipe import Pipe
from helpers.remote_worker import CONTEXT
from peft import LoraConfig, get_peft_model

from choreograph import CacheConfig, Engine, EngineConfig, LayerPattern, SamplingParams
from choreograph.errors import ConfigError
from choreograph.kv_cache.container import CHECKSUM_BYTES
from choreograph.layer_reuse import ContextStore
from choreograph.layer_reuse.remote import RemoteSender, serve
from choreograph.layer_reuse.transport import send_details

GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
PATTERN = [1, 2, 4]
CONTEXTS = [CONTEXT, CONTEXT[::-1], CONTEXT[3:]]
INFO_FRAMES, REPLY_FRAMES = 2, 2
TOKEN_BYTES = {"inputs": 32 * 4, "keys": 2 * 16 * 4}  # of one layer


def values(message):
    return [one.logprob for one in message.logprobs]


def receiver(**models):
    config = EngineConfig(cache=CacheConfig(capacity=512, page_size=4, poison_freed_pages=True))
    return Engine.from_pretrained(model_variants.finetuned(), config=config, models=models)


@contextmanager
def linked(engine, *, name="writer", model="base", frames=None, position=None, pattern=PATTERN):
    """A sender in a thread of its own with all contexts; yields the link and its pipe."""
    sender, pipe = model_variants.engine(), Pipe()
    sender.enable_layer_reuse("math", model, pattern=pattern)
    with ContextStore(sender) as store, sender.session(model=model) as session:
        for context in CONTEXTS:
            store.store_hidden(session.prefill(context, new_offset=position))
        thread = threading.Thread(target=serve, args=(sender, store, pipe.sender), kwargs={"model": model})
        thread.start()
        pipe.allow(frames)
        try:
            with RemoteSender(engine, pipe.receiver, name=name) as link:
                yield link, pipe
                pipe.allow(None)
        finally:
            pipe.allow(None)
            send_details(pipe.receiver)()  # the end once more
            thread.join()
    sender.check()


def local(context, pattern=PATTERN):
    """What the receiver says if the sender is in its own engine."""
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", pattern=pattern)
    with engine.session() as session:
        text = session.prefill(context)
        return values(session.decode([7], [text], model="math", kv_reuse="partial", sampling=GREEDY))


def test_a_receiver_computes_from_hidden_states_before_any_key_has_arrived():
    engine = receiver()
    with linked(engine, frames=INFO_FRAMES + REPLY_FRAMES + 1) as (link, pipe), engine.session() as session:
        engine.enable_layer_reuse("base", "writer", pattern=PATTERN)
        seen = link.partial_prefill(session, CONTEXT)
        entry = inspect(seen.result()).entry
        assert entry.is_complete and seen.computed_layers == (0, 2, 3)
        assert (
            pipe.sent[-1] == len(CONTEXT) * TOKEN_BYTES["inputs"] + CHECKSUM_BYTES
            and inspect(seen).source_entry.location == "loading"
        )
        pipe.allow(None)
        assert values(session.decode([7], [seen], sampling=GREEDY)) == pytest.approx(local(CONTEXT), abs=1e-5)
        layer_bytes = 2 * len(CONTEXT) * TOKEN_BYTES["keys"] + CHECKSUM_BYTES
        assert pipe.sent[-2:] == [layer_bytes] * 2, "keys and values of layers 1 and 4"
        assert engine.events.counts["recomputed"] == 0
        assert link.bytes_received == sum(pipe.sent[-3:]) - 3 * CHECKSUM_BYTES and link.seconds_receiving > 0
    engine.check()


def test_several_contexts_are_requested_before_one_has_arrived():
    engine = receiver()
    with linked(engine, frames=INFO_FRAMES) as (link, pipe), engine.session() as session:
        engine.enable_layer_reuse("base", "writer", pattern=PATTERN)
        seen = [link.partial_prefill(session, context) for context in CONTEXTS]
        said = [session.decode([7], [one], sampling=GREEDY) for one in seen]
        talk = session.decode([1], sampling=SamplingParams(max_tokens=3, ignore_eos=True)).result()
        assert talk.tokens, "others are served meanwhile"
        assert [inspect(one).source_entry.location for one in seen] == ["loading"] * 3
        assert len(pipe.sent) == INFO_FRAMES
        pipe.allow(None)
        for one, context in zip(said, CONTEXTS, strict=True):
            assert values(one) == pytest.approx(local(context), abs=1e-5)
        assert engine.events.counts["recomputed"] == 0 and engine.events.counts["loaded"] == 3
    engine.check()


def test_a_context_that_is_released_while_it_arrives_does_not_disturb_the_next():
    engine = receiver()
    with linked(engine, frames=INFO_FRAMES + REPLY_FRAMES + 2) as (link, pipe), engine.session() as session:
        engine.enable_layer_reuse("base", "writer", pattern=PATTERN)
        first, second = (link.partial_prefill(session, context) for context in CONTEXTS[:2])
        first.result()
        first.release()
        pipe.allow(None)
        assert values(session.decode([7], [second], sampling=GREEDY)) == pytest.approx(local(CONTEXTS[1]), abs=1e-5)
        assert link.failure_reason is None and engine.events.counts["recomputed"] == 0
    engine.clear_cache()
    engine.check()
    assert not engine.stats().num_unreferenced_entries


def test_keys_from_another_position_are_moved():
    engine = receiver()
    with linked(engine, position=23) as (link, _), engine.session() as session:
        engine.enable_layer_reuse("base", "writer", pattern=PATTERN)
        seen = link.partial_prefill(session, CONTEXT)
        assert values(session.decode([7], [seen], sampling=GREEDY)) == pytest.approx(local(CONTEXT), abs=1e-5)
        assert engine.events.counts["recomputed"] == 0
    engine.check()


def test_the_receiver_is_any_model_and_two_links_load_at_once():
    """Two senders, and two receivers: a model and an adapter of one engine."""
    engine = Engine.from_pretrained(
        model_variants.base(),
        config=EngineConfig(cache=CacheConfig(capacity=512, page_size=4, poison_freed_pages=True)),
        models={"math": model_variants.finetuned()},
    )
    with (
        linked(engine, name="writer", frames=INFO_FRAMES) as (slow, gate),
        linked(engine, name="twin", model="twin") as (quick, _),
        engine.session() as session,
    ):
        for name in ("writer", "twin"):
            engine.enable_layer_reuse("math", name, pattern=PATTERN)
        waiting = slow.partial_prefill(session, CONTEXTS[1], model="math")
        arrived = quick.partial_prefill(session, CONTEXT, model="math")
        said = session.decode([7], [arrived], model="math", sampling=GREEDY)
        assert values(said) == pytest.approx(local(CONTEXT), abs=1e-5)
        assert waiting.model == "math" and inspect(waiting).source_entry.location == "loading"
        gate.allow(None)
        said = session.decode([7], [waiting], model="math", sampling=GREEDY)
        assert values(said) == pytest.approx(local(CONTEXTS[1]), abs=1e-5)
        assert engine.events.counts["recomputed"] == 0
        with pytest.raises(ConfigError, match="'base' has no layer reuse with 'writer'"):
            slow.partial_prefill(session, CONTEXT)
    engine.check()


def test_an_adapter_receives_as_its_merged_weights_do(tmp_path):
    config = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(3)
    peft_model = get_peft_model(tiny_models.build(layers=LAYERS), config)
    peft_model.save_pretrained(str(tmp_path))
    result = []
    for engine, model in (
        (Engine.from_pretrained(tiny_models.build(layers=LAYERS), adapters={"tuned": str(tmp_path)}), "tuned"),
        (Engine.from_pretrained(peft_model.merge_and_unload()), "base"),
    ):
        with linked(engine) as (link, _), engine.session() as session:
            engine.enable_layer_reuse(model, "writer", pattern=PATTERN)
            seen = link.partial_prefill(session, CONTEXT, model=model)
            result.append(values(session.decode([7], [seen], model=model, sampling=GREEDY)))
            assert seen.computed_layers == (0, 2, 3) and engine.events.counts["recomputed"] == 0
    assert result[0] == pytest.approx(result[1], abs=1e-4)


def test_a_selector_chooses_behind_a_link_when_the_prefill_is_admitted():
    engine, loads = receiver(), []
    patterns = {"careful": LayerPattern.from_triplet(1, 2, 4), "none": LayerPattern()}
    patterns["whole"] = LayerPattern.from_triplet(0, 0, LAYERS)
    order = iter(["careful", "none", "whole"])

    def choose(load):
        loads.append(load)
        return patterns[next(order)]

    with linked(engine) as (link, _), engine.session() as session:
        engine.enable_layer_reuse("base", "writer", selector=choose, patterns=patterns.values())
        seen = [link.partial_prefill(session, context) for context in CONTEXTS]
        assert not loads
        said = [session.decode([7], [one], sampling=GREEDY) for one in seen]
        for one, context, pattern in zip(said, CONTEXTS, patterns.values(), strict=True):
            assert values(one) == pytest.approx(local(context, pattern), abs=1e-5)
        assert [one.computed_layers for one in seen] == [(0, 2, 3), (), None]
        told = [event.data for event in engine.events.recent if event.kind == "layers_reused"]
        assert [one["pattern"] for one in told] == ["0-1,2-4", "none", "0-5"] and told[0]["sender"] == "writer"
        assert engine.events.counts["recomputed"] == 0 and engine.events.counts["loaded"] == 2
    sizes = [load.transfer for load in loads]
    assert sizes[0].kv_bytes == len(CONTEXT) * 2 * TOKEN_BYTES["keys"]
    assert sizes[0].hidden_bytes == len(CONTEXT) * TOKEN_BYTES["inputs"]
    assert sizes[0].queued_bytes == 0 and sizes[1].queued_bytes <= 2 * sizes[0].kv_bytes + sizes[0].hidden_bytes
    engine.check()


def test_an_equal_context_is_fetched_once():
    engine = receiver()
    with linked(engine) as (link, _), engine.session() as session:
        engine.enable_layer_reuse("base", "writer", pattern=PATTERN)
        for _ in range(2):
            seen = link.partial_prefill(session, CONTEXT)
            assert values(session.decode([7], [seen], sampling=GREEDY)) == pytest.approx(local(CONTEXT), abs=1e-5)
        assert engine.events.counts["loaded"] == 1
    engine.check()
