"""What cannot be done right is refused: by the engine when it starts, by the request when it comes."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offline_engine import BLOCK, NUM_BLOCKS, OfflineEngine, Request, is_refused, logprobs_of, missing_of, report_of
from tiny_models import SHAPE, random_tokens
from transformers import BloomConfig, DeepseekV2Config, Gemma2Config, GPT2Config, MistralConfig, OPTConfig
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs

from choreograph.vllm import ChoreographConnector
from examples import examples

BARE = {"vocab_size": 128, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ROTATED_PART = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 512}
UNSUPPORTED = {
    "learned positions": (GPT2Config(**BARE, n_embd=64, n_head=2, n_layer=2, n_positions=256), "GPT2LMHeadModel"),
    "learned positions, OPT": (
        OPTConfig(
            **BARE | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0},
            hidden_size=64,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            word_embed_proj_dim=64,
            max_position_embeddings=256,
        ),
        "OPTForCausalLM",
    ),
    "ALiBi": (BloomConfig(**BARE, hidden_size=64, n_head=2, n_layer=2), "BloomForCausalLM"),
    "sliding windows": (MistralConfig(**SHAPE, sliding_window=64), "MistralForCausalLM"),
    "some sliding windows": (Gemma2Config(**SHAPE, sliding_window=64, query_pre_attn_scalar=32), "Gemma2ForCausalLM"),
    "multi-head latent attention": (
        DeepseekV2Config(
            **BARE,
            **ROTATED_PART,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            q_lora_rank=None,
            first_k_dense_replace=2,
            max_position_embeddings=256,
        ),
        "DeepseekV2ForCausalLM",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_models_whose_keys_cannot_be_moved_are_refused(name, tmp_path, stop_engines):
    config, architecture = UNSUPPORTED[name]
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    dtype = "bfloat16"  # with AMX, vLLM's latent attention takes no float32
    with pytest.raises(ValueError, match="ChoreographConnector: "):
        OfflineEngine(tmp_path, load_format="dummy", max_model_len=256, dtype=dtype)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"connector_options": {"mode": "some"}}, "mode='some'"),
        ({"connector_options": {"store_gb": 1}}, "store_gb"),
    ],
    ids=repr,
)
def test_options_that_cannot_work_are_refused(options, reason, tiny_model, stop_engines):
    with pytest.raises(ValueError, match=reason):
        OfflineEngine(tiny_model().folder, **options)


def make_connector(tiny_model, start_engine, **options) -> ChoreographConnector:
    caches = start_engine().scheduler.kv_cache_config
    transfer = KVTransferConfig(
        kv_connector="ChoreographConnector", kv_connector_module_path="choreograph.vllm", kv_role="kv_both"
    )
    arguments = EngineArgs(str(tiny_model().folder), kv_transfer_config=transfer, **options)
    return ChoreographConnector(arguments.create_engine_config(), KVConnectorRole.WORKER, caches)


def test_pipeline_parallelism_is_refused(tiny_model, start_engine):
    with pytest.raises(ValueError, match="pipeline_parallel_size=2"):
        make_connector(tiny_model, start_engine, pipeline_parallel_size=2)


def test_versions_without_tests_are_refused(tiny_model, start_engine, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.27.1")
    with pytest.raises(ValueError, match=r"vLLM 0\.27\.1 is not among the versions tested"):
        make_connector(tiny_model, start_engine)


@pytest.mark.parametrize(
    ("shape", "advice"),
    [((2, NUM_BLOCKS, BLOCK), "attention backend"), ((2 * NUM_BLOCKS, BLOCK // 2), f"--block-size {BLOCK // 2}")],
    ids=["keys apart from values", "blocks divided"],
)
def test_pages_that_are_not_blocks_are_refused(shape, advice, tiny_model, start_engine):
    connector = make_connector(tiny_model, start_engine)
    with pytest.raises(ValueError, match=advice):
        connector.register_kv_caches({"layer": torch.zeros(shape)})


TEXT = random_tokens(3, 40)
STORED = {"entry": "stored", "start": 0, "stop": 40}


def span(**fields) -> dict:
    return STORED | {"at": 0} | fields


@pytest.mark.parametrize(
    "reuse",
    [
        {"spans": [span(entry="unknown")]},
        {"spans": [span(stop=41)]},
        {"spans": [span(start=1)]},  # other tokens
        {"spans": [span(start=5, stop=5)]},
        {"spans": [span(start=-1)]},
        {"spans": [span(at=-1)]},
        {"spans": [span(at=20)]},  # leaves the prompt
        {"spans": [span(), span(at=10)]},  # overlap
        {"spans": [span(start=20, at=20), span(stop=20)]},  # not in order
        {"spans": [span(position="first")]},
        {"spans": [span(position=2**63)]},
        {"spans": [span(position=-(2**63))]},
        {"spans": [span(), "more"]},
        {"spans": span()},
        {"spans": [span(place=4)]},
        {"span": [span()]},
        {"mode": "auto"},
        {"store": [{"entry": "", "start": 0, "stop": 3}]},
        {"store": [{"entry": "new", "start": 9, "stop": 3}]},
        {"store": [{"entry": "new", "start": 3, "stop": 3}]},
        {"store": [{"entry": 5, "start": 0, "stop": 3}]},
        {"repair": 1.5, "spans": [span()]},
        {"repair": -0.1, "spans": [span()]},
        {"labels": "secret", "spans": [span()]},
        {"steps": {"stored": -1}},
        {"release": "stored"},
    ],
    ids=repr,
)
def test_requests_that_cannot_be_served_end_with_an_error(reuse, start_engine):
    engine = start_engine()
    engine.run(Request(TEXT, {"store": [STORED]}))
    num_tokens = engine.num_stored_tokens
    assert is_refused(engine.run(Request([*TEXT, 1, 2], reuse)))
    engine.check_idle()
    assert engine.num_stored_tokens == num_tokens
    assert missing_of(engine.run(Request([0], {"query": ["stored", "new"]}))) == ["new"]


def test_a_span_never_covers_the_last_token(start_engine):
    engine = start_engine()
    engine.run(Request(TEXT, {"store": [STORED]}))
    assert is_refused(engine.run(Request(TEXT, {"spans": [span()]})))
    (output,) = engine.run(Request(TEXT, {"spans": [span(stop=39)]}))
    assert report_of(output)["reused_tokens"] == 39


def test_prompt_logprobs_with_spans_are_refused(start_engine):
    """vLLM reads no connector then; such a request without spans is served."""
    engine, options = start_engine(), (("prompt_logprobs", 1),)
    engine.run(Request(TEXT, {"store": [STORED]}))
    assert is_refused(engine.run(Request([*TEXT, 1, 2], {"spans": [span()]}, options=options)))
    (output,) = engine.run(Request([*TEXT, 1, 2], options=options))
    assert len(output.prompt_logprobs) == 42 and len(logprobs_of(output)) == 1


def test_refused_requests_do_not_disturb_others_of_their_batch(start_engine):
    engine = start_engine()
    engine.run(Request(TEXT, {"store": [STORED]}))
    good = Request([*TEXT, 1, 2], {"spans": [span(position=7)]}, max_tokens=5)
    bad = Request([*TEXT, 1, 2], {"spans": [span(entry="unknown")]}, max_tokens=5)
    (alone,) = engine.run(good)
    outputs = engine.run(bad, good, bad, good, bad)
    for i, output in enumerate(outputs):
        if i % 2:
            assert abs(logprobs_of(output) - logprobs_of(alone)).max() < 2e-4
        else:
            assert is_refused([output])
    engine.check_idle()


def test_a_store_of_tokens_that_do_not_come_stores_nothing(start_engine):
    engine = start_engine()
    store = [{"entry": "far", "start": 0, "stop": 400}, {"entry": "farther", "start": 300, "stop": None}]
    (output,) = engine.run(Request(TEXT, {"store": store}, max_tokens=3))
    assert report_of(output)["stored"] == []
    engine.check_idle()
    assert missing_of(engine.run(Request([0], {"query": ["far", "farther"]}))) == ["far", "farther"]


GOOD = {
    "mode": "spans",
    "spans": [span(stop=20), span(start=20, at=20, position=50)],
    "store": [{"entry": "fuzz", "start": 3, "stop": 41}, {"entry": "fuzz-2", "start": 40, "stop": None}],
    "release": ["other"],
    "query": ["other"],
    "workflow": "w",
    "steps": {"stored": 2},
    "labels": [],
    "repair": 0.5,
}
values = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-(2**63), -1, 0, 1, 39, 40, 41, 2**31, 2**53, 2**63, 2**64 - 1, 0.5, 1e300, "", "stored"]),
    st.just([]),
    st.just({}),
    st.just(float("nan")),
    st.just([[]]),
)


def places(value, path=()):
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


@examples(200)
@given(changes=st.lists(st.tuples(st.sampled_from([*places(GOOD)][1:]), values), min_size=1, max_size=2))
def test_no_value_of_any_field_stops_the_engine(changes, start_engine):
    engine, reuse = start_engine(), copy.deepcopy(GOOD)
    engine.run(Request(TEXT, {"store": [STORED]}))
    for path, value in changes:
        target = reuse
        for key in path[:-1]:
            target = target[key] if isinstance(target, (dict, list)) and key in places_of(target) else {}
        if isinstance(target, (dict, list)) and path[-1] in places_of(target):
            target[path[-1]] = value
    (output,) = engine.run(Request([*TEXT, 1, 2], reuse, max_tokens=2))
    assert output.finished
    engine.run(Request([0], {"release": ["fuzz", "fuzz-2"]}))
    engine.check_idle()


def places_of(value):
    return value if isinstance(value, dict) else range(len(value))
