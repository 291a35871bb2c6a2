"""Engines whose cache is in int8: close to the same engine without, alike in every tier, never mixed with others."""

import math
import threading

import pytest
import torch
from helpers import model_variants, tiny_models
from helpers.char_tokenizer import tokenizer
from helpers.hypothesis_profile import many
from helpers.message_graphs import graphs
from helpers.pipe import Pipe
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig, KVSnapshot, SamplingParams
from choreograph.attention.int8_rows import decode, encode
from choreograph.errors import CacheFileError, ConfigError, InvalidRequestError, ModelError
from choreograph.layer_reuse import ContextStore
from choreograph.layer_reuse.remote import RemoteSender, serve
from choreograph.layer_reuse.transport import send_details
from choreograph.models import hf_model
from choreograph.prompt_cache import PromptCache, module, schema

INT8 = {"kv_cache_dtype": "int8"}
CLOSE = 0.3  # of log-probabilities of tiny random models, whose attention amplifies rounding; wrong keys are off by 1 or more
SCORED = SamplingParams(temperature=0, logprobs=0)
TEXT = [5, 9, 2, 40, 33, 17, 8, 21, 3, 55, 12, 60, 7, 7, 28]


def logprobs(message) -> list[float]:
    return [token.logprob for token in message.logprobs]


def run(engine, nodes, mode="choreographed") -> list[float]:
    """Log-probabilities of tokens that are forced after each message of a graph."""
    with engine.session(mode=mode) as session:
        messages = []
        for node in nodes:
            args = (node.tokens, [messages[i] for i in node.parents], node.offsets, node.position)
            if node.generated is None:
                messages.append(session.prefill(*args))
            else:
                messages.append(session.decode(*args, forced_tokens=node.generated, footer=node.footer))
            if len(messages) % 2:
                messages[len(messages) // 2].result()
                engine.check()
        readers = [session.decode([1], [message], forced_tokens=[4, 9], sampling=SCORED) for message in messages]
        result = [value for reader in readers for value in logprobs(reader)]
        engine.check()
    return result


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@settings(max_examples=many(8, minimum=3), deadline=None)
@given(nodes=graphs(), mode=st.sampled_from(["choreographed", "choreographed", "prefix"]))
def test_log_probabilities_are_close_to_those_of_the_models_dtype(backend, nodes, mode):
    expected = run(tiny_models.engine(page=2), nodes, mode)
    assert run(tiny_models.engine(page=2, backend=backend, **INT8), nodes, mode) == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize(
    "lower", [{}, {"host_capacity": 4096}, {"disk_capacity": 4096}, {"host_capacity": 24}], ids=str
)
@settings(max_examples=many(6, minimum=3), deadline=None)
@given(nodes=graphs(max_nodes=6))
def test_short_memory_changes_nothing_but_rounding(lower, nodes):
    """What is recomputed may be rounded to another step."""
    expected = run(tiny_models.engine(page=2, **INT8), nodes)
    result = run(tiny_models.engine(tokens=160, page=2, **INT8, **lower), nodes)
    assert result == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize("lower", [{"host_capacity": 64}, {"disk_capacity": 64}], ids=str)
def test_rows_come_back_from_lower_tiers_as_they_were(lower):
    engine = tiny_models.engine(tokens=32, **INT8, **lower)
    with engine.session() as session:
        message = session.prefill(TEXT)
        before = message.export_kv()
        session.prefill(list(range(30))).result()
        assert message.kv_location in lower or message.kv_location + "_capacity" in lower
        after = message.export_kv()
        assert after.checksum == before.checksum and before.layers[0][0].dtype == torch.int8
        assert engine.events.counts["loaded"] == 1 and not engine.events.counts["recomputing"]
        engine.check()


def test_the_cache_holds_more_tokens_of_fewer_bytes():
    plain, small = (tiny_models.engine(tokens="64KiB", **options) for options in ({}, INT8))
    per_token = [engine.core.cache_manager.pool.bytes_per_token for engine in (plain, small)]
    assert per_token == [2 * 2 * 2 * 16 * 4, 2 * 2 * 2 * (16 + 4)]  # tensors, layers, heads, a row
    assert [engine.stats().num_pages for engine in (plain, small)] == [65536 // (4 * size) for size in per_token]


def test_a_head_size_that_leaves_scales_unaligned_is_refused():
    config = LlamaConfig(
        vocab_size=61, hidden_size=12, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, head_dim=6
    )
    model = LlamaForCausalLM(config).eval()
    with pytest.raises(ConfigError, match="kv_cache_dtype='int8': the head size 6 is no multiple of 4; use 'auto'"):
        Engine.from_pretrained(model, config=EngineConfig(cache=CacheConfig(capacity=64, **INT8)))
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8'"):
        CacheConfig(kv_cache_dtype="fp8")


@pytest.mark.parametrize(("ours", "theirs"), [({}, INT8), (INT8, {})], ids=["int8 into float32", "float32 into int8"])
def test_a_snapshot_of_the_other_kind_is_refused_and_one_of_the_same_kind_is_not(ours, theirs, tmp_path):
    file = tmp_path / "copy.safetensors"
    with tiny_models.engine(**theirs).session() as session:
        session.prefill(TEXT).export_kv().save(file)
    engine = tiny_models.engine(**ours)
    with engine.session() as session:
        with pytest.raises(InvalidRequestError, match=r"the copy is in .*, the cache in torch\..*kv_cache_dtype"):
            session.import_kv(TEXT, KVSnapshot.load(file))
        assert not engine.stats().num_referenced_entries
        engine.check()
    with tiny_models.engine(**theirs).session() as session:
        message = session.import_kv(TEXT, KVSnapshot.load(file))
        assert message.usage.cached_tokens == len(TEXT)
        assert math.isfinite(logprobs(session.decode([1], [message], forced_tokens=[2], sampling=SCORED))[0])


def prompt_engine(**cache) -> Engine:
    config = EngineConfig(cache=CacheConfig(capacity=1024, page_size=4, poison_freed_pages=True, **cache))
    characters = tokenizer()
    return Engine.from_pretrained(tiny_models.build(vocabulary=len(characters)), tokenizer=characters, config=config)


def test_a_prompt_cache_of_the_other_kind_is_refused(tmp_path):
    story = schema("story", module("a", "Once upon a time. "), module("b", "There was a fox. "))
    file = tmp_path / "cache.safetensors"
    with PromptCache(prompt_engine(**INT8), story) as cache:
        cache.save(file)
    with PromptCache(prompt_engine(**INT8), story) as cache:
        assert cache.load(file) == 35
        cache.check()
    with (
        PromptCache(prompt_engine(), story) as cache,
        pytest.raises(CacheFileError, match="dtype int8, this is float32"),
    ):
        cache.load(file)


def test_layers_are_reused_from_hidden_states_in_the_models_dtype():
    said = []
    for options in ({}, INT8):
        engine = model_variants.engine(tokens=128, host_capacity=512, **options)
        engine.enable_layer_reuse("math", pattern=[1, 2, 4])
        with engine.session() as session, ContextStore(engine) as store:
            message = session.prefill(TEXT)
            name = store.store_kv(message)
            session.prefill([3] * 120).result()  # evicts it, with its hidden states
            assert message.kv_location == "host"
            reader = session.decode(
                [7], [message], model="math", kv_reuse="partial", forced_tokens=TEXT, sampling=SCORED
            )
            said.append(logprobs(reader))
            hidden, (keys, values) = store.fetch_hidden(name, "base", 2), store.fetch_kv(name, "base", 1)
            assert hidden.dtype == keys.dtype == values.dtype == torch.float32
            assert hidden.shape == (len(TEXT), 32) and keys.shape == values.shape == (len(TEXT), 2, 16)
            assert store.num_bytes()["base"] == len(TEXT) * (engine.core.cache_manager.pool.bytes_per_token)
        engine.check()
    assert said[0] != said[1] and said[1] == pytest.approx(said[0], abs=CLOSE)


@pytest.mark.parametrize("ours", [INT8, {}], ids=["both in int8", "one in int8"])
def test_a_link_moves_int8_keys_and_refuses_a_sender_of_the_other_kind(ours):
    config = EngineConfig(cache=CacheConfig(capacity=512, page_size=4, poison_freed_pages=True, **ours))
    engine = Engine.from_pretrained(model_variants.finetuned(), config=config)
    sender, pipe = model_variants.engine(**INT8), Pipe()
    sender.enable_layer_reuse("math", pattern=[1, 2, 4])
    with ContextStore(sender) as store, sender.session() as session:
        store.store_hidden(session.prefill(TEXT, new_offset=23))
        thread = threading.Thread(target=serve, args=(sender, store, pipe.sender))
        thread.start()
        pipe.allow(None)
        try:
            if not ours:
                with pytest.raises(ModelError, match=r"kv_cache_dtype: torch\.float32 and torch\.int8"):
                    RemoteSender(engine, pipe.receiver, name="writer")
                return
            with RemoteSender(engine, pipe.receiver, name="writer") as link, engine.session() as receiver:
                engine.enable_layer_reuse("base", "writer", pattern=[1, 2, 4])
                seen = link.partial_prefill(receiver, TEXT)
                said = logprobs(receiver.decode([7], [seen], forced_tokens=TEXT, sampling=SCORED))
                own = session.decode(
                    [7], [session.prefill(TEXT)], model="math", kv_reuse="partial", forced_tokens=TEXT, sampling=SCORED
                )
                assert said == pytest.approx(logprobs(own), abs=CLOSE)
                assert not engine.events.counts["recomputed"] and engine.events.counts["loaded"] == 1
                engine.check()
        finally:
            send_details(pipe.receiver)()  # the end once more
            thread.join()


@pytest.mark.parametrize("repair", [{"repair": 1.0}, {"repair": 0.3}, {"max_kl": 0.1}], ids=str)
def test_repair_and_explanations_read_decoded_keys(repair):
    figures = []
    for options in ({}, INT8):
        engine = tiny_models.engine(**options)
        with engine.session(**{k: v for k, v in repair.items() if k == "max_kl"}) as session:
            parents = [session.prefill(TEXT), session.prefill(TEXT[::-1])]
            call = {k: v for k, v in repair.items() if k == "repair"}
            message = session.decode([7], parents, forced_tokens=TEXT, sampling=SCORED, **call)
            figures.append([*logprobs(message), *message.explain(measure=True).divergence])
            engine.check()
    assert figures[1] == pytest.approx(figures[0], abs=CLOSE)


def test_rows_of_a_snapshot_decode_to_keys_and_values():
    exported = []
    for options in ({}, INT8):
        with tiny_models.engine(**options).session() as session:
            exported.append(session.prefill(TEXT).export_kv().layers[0])
    for plain, rows in zip(*exported, strict=True):
        assert torch.equal(rows, encode(plain)), "keys and values of the first layer do not depend on the cache"
        assert torch.allclose(decode(rows), plain, atol=float(plain.abs().max()) / 254)


def test_the_default_capacity_counts_the_bytes_of_the_cache(monkeypatch):
    model = tiny_models.build()
    monkeypatch.setattr(hf_model, "free_memory", lambda device: 1 << 20)
    sizes = [
        Engine.from_pretrained(model, config=EngineConfig(cache=CacheConfig(kv_cache_dtype=dtype))).stats().num_pages
        for dtype in ("auto", "int8")
    ]
    assert sizes[0] < sizes[1]
