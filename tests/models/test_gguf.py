"""GGUF files: what is loaded computes the logits of the model that was written, or the file is refused."""

import copy
import logging
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from helpers import gguf_files
from helpers.gguf_vocabularies import ORIGINALS, SAMPLES, TEXT, original, vocabulary
from helpers.model_configs import CONFIGS, LLAMA3, LONG, SHAPE, WIDE, rope
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Starcoder2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from choreograph import Engine, SamplingParams
from choreograph.errors import ModelError
from choreograph.models.gguf import gguf_file
from choreograph.models.gguf.gguf_file import convert_gguf
from choreograph.models.loader import bundled_gguf, load

PROMPT = torch.randint(0, 61, (1, 120), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("choreograph.models.gguf.gguf_file.user_cache_path", lambda name: tmp_path / "cache")


def build(config, **options):
    config = copy.deepcopy(config)
    for name, value in options.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # norms and biases that are not one and zero
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


@torch.inference_mode()
def assert_equal_logits(path, model):
    folder = convert_gguf(path)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(loaded(PROMPT).logits, model(PROMPT).logits, atol=1e-4, rtol=1e-4)
    return loaded


def llama(**parameters):
    return build(LlamaConfig(**SHAPE, rope_parameters=parameters or None))


SCALED = {
    "linear": (rope("linear", factor=4.0), {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "linear, no type": (rope("linear", factor=4.0), {"rope.scaling.factor": 4.0}),
    "linear, old key": (rope("linear", factor=4.0), {"rope.scale_linear": 4.0}),
    "none": (rope("default"), {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "yarn": (
        rope("yarn", factor=4.0, original_max_position_embeddings=64),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.finetuned": True,
        },
    ),
    "yarn, betas": (
        rope("yarn", factor=8.0, original_max_position_embeddings=32, beta_fast=16.0, beta_slow=2.0),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.attn_factor": 1.0,
        },
    ),
    "yarn, the context is the original": (
        rope("yarn", factor=2.0, original_max_position_embeddings=256),
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0},
    ),
    "base": ({"rope_type": "default", "rope_theta": 777.0}, {}),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_rotary_embeddings_are_those_of_the_model(tmp_path, name):
    parameters, metadata = SCALED[name]
    model = llama(**parameters)
    assert_equal_logits(gguf_files.write(model, tmp_path / "m.gguf", metadata=metadata), model)


def llama3_factors() -> np.ndarray:
    config = LlamaConfig(**SHAPE, rope_parameters=LLAMA3)
    plain = 1e4 ** (-torch.arange(0, 16, 2) / 16)
    return (plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]).numpy()


def test_frequency_factors_of_llama_3_are_applied(tmp_path):
    model = llama(**LLAMA3)
    path = gguf_files.write(model, tmp_path / "m.gguf", tensors={"rope_freqs.weight": llama3_factors()})
    assert_equal_logits(path, model)
    assert load(path, dtype=torch.float32).model_info.max_positions == 256


@pytest.mark.parametrize("scaled", [LLAMA3, *(SCALED[name][0] for name in ("linear", "yarn"))])
def test_the_engine_computes_what_the_written_model_does(tmp_path, scaled):
    """Over messages of their own, at the last positions of the context."""
    model = llama(**scaled)
    metadata = next((keys for parameters, keys in SCALED.values() if parameters == scaled), {})
    tensors = {"rope_freqs.weight": llama3_factors()} if scaled is LLAMA3 else {}
    path = gguf_files.write(model, tmp_path / "m.gguf", metadata=metadata, tensors=tensors)
    tokens = PROMPT[0].tolist()
    with torch.inference_mode():
        expected = model(PROMPT).logits[0, -1].log_softmax(-1)
    with Engine.from_pretrained(path, dtype="float32").session() as session:
        first = session.prefill(tokens[:50])
        sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=61)
        top = session.decode(tokens[50:], [first], sampling=sampling).logprobs[0].top
    torch.testing.assert_close(torch.tensor([top[token] for token in range(61)]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("positions", [64, 256])
def test_long_and_short_factors_of_phi_3_are_applied(tmp_path, positions):
    model = build(CONFIGS["phi3, longrope"], max_position_embeddings=256)
    factors = {f"rope_factors_{length}.weight": np.array(LONG[f"{length}_factor"]) for length in ("long", "short")}
    metadata = {
        "rope.scaling.attn_factor": float(model.model.rotary_emb.attention_scaling),
        "rope.scaling.original_context_length": 64,
    }
    loaded = assert_equal_logits(
        gguf_files.write(model, tmp_path / "m.gguf", metadata=metadata, tensors=factors), model
    )
    with torch.inference_mode():
        torch.testing.assert_close(loaded(PROMPT[:, :40]).logits, model(PROMPT[:, :40]).logits, atol=1e-4, rtol=1e-4)


REFUSED = {
    "rope.scaling.type": "superlong",
    "rope.scaling.alpha": 100.0,
    "rope.scaling.attn_factor": 1.2,
    "rope.scaling.yarn_ext_factor": 0.5,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [4, 2, 2, 0],
    "rope.freq_base_swa": 99.0,
    "attention.value_length": 8,
    "attention.scale": 0.1,
    "attention.causal": False,
    "attention.clamp_kqv": 6.0,
    "attention.max_alibi_bias": 8.0,
    "attn_logit_softcapping": 30.0,
    "final_logit_softcapping": 30.0,
    "logit_scale": 0.5,
    "residual_scale": 0.5,
    "embedding_scale": 12.0,
    "expert_count": 8,
    "tensor_data_layout": "another",
    "attention.sliding_window_pattern": 2,
}


@pytest.mark.parametrize("key", REFUSED)
def test_keys_that_cannot_be_applied_are_refused_by_name(tmp_path, key):
    path = gguf_files.write(llama(), tmp_path / "m.gguf", metadata={key: REFUSED[key]})
    with pytest.raises(ModelError, match=rf"llama\.{key}=") as info:
        load(path)
    assert "\n" not in str(info.value)


def test_values_that_change_nothing_are_accepted(tmp_path):
    neutral = {"logit_scale": 1.0, "attention.causal": True, "expert_count": 0, "attention.scale": 0.25}
    model = llama()
    assert_equal_logits(gguf_files.write(model, tmp_path / "m.gguf", metadata=neutral), model)


def test_unknown_keys_of_the_architecture_are_warned_of(tmp_path, caplog):
    path = gguf_files.write(llama(), tmp_path / "m.gguf", metadata={"attention.future_gate": 3})
    with caplog.at_level(logging.WARNING, "choreograph"):
        load(path)
    assert "llama.attention.future_gate=3" in caplog.text


def test_an_unknown_tensor_is_refused_by_name(tmp_path):
    extra = {"blk.0.attn_future.weight": np.ones((4, 4))}
    path = gguf_files.write(llama(), tmp_path / "m.gguf", tensors=extra)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_future\.weight"):
        load(path)


def test_a_missing_tensor_is_named(tmp_path):
    model = llama()
    longer = gguf_files.write(model, tmp_path / "m.gguf", metadata={"block_count": 3})
    with pytest.raises(ModelError, match=r"lack model\.layers\.2\.input_layernorm\.weight, .* and 6 more"):
        load(longer)
    shorter = gguf_files.write(model, tmp_path / "n.gguf", metadata={"block_count": 1})
    with pytest.raises(ModelError, match=r"knows nothing of the weights blk\.1\.attn_k\.weight, .* and 6 more"):
        load(shorter)
    wider = gguf_files.write(model, tmp_path / "o.gguf", metadata={"feed_forward_length": 64})
    with pytest.raises(ModelError, match=r"other shapes than its metadata say: model\.layers\.0\.mlp"):
        load(wider)


@pytest.mark.parametrize("architecture", ["mamba", "mpt"])
def test_other_architectures_and_kinds_are_refused(tmp_path, architecture):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"architecture '{architecture}' is not served"):
        load(path)


FAMILIES = {
    **{name: CONFIGS[name] for name in ("llama", "mistral, window", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2")},
    **{name: CONFIGS[name] for name in ("gemma3_text", "gpt2", "bloom", "falcon")},
    "llama, biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "starcoder2": Starcoder2Config(**WIDE, sliding_window=None),
}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_architecture_computes_the_logits_of_the_model(tmp_path, name, tied):
    config = copy.deepcopy(FAMILIES[name])
    if config.model_type == "qwen3_moe":
        config.norm_topk_prob = True
    if "query_pre_attn_scalar" in config.to_dict():
        config.query_pre_attn_scalar = config.head_dim
    if name.startswith("gemma") and not tied:
        pytest.skip("its files have no output layer")
    model = build(config, tie_word_embeddings=tied)
    metadata = {}
    if name == "gemma3_text":
        metadata = {"attention.sliding_window_pattern": [True, True, False]}
    assert_equal_logits(gguf_files.write(model, tmp_path / "m.gguf", metadata=metadata), model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_quantization_is_dequantized(tmp_path, kind):
    model = build(LlamaConfig(**SHAPE | {"intermediate_size": 64}))
    assert_equal_logits(gguf_files.write(model, tmp_path / "m.gguf", quantization=kind), model)


SCALES = {"Q2_K": (80, 84), "Q3_K": (108, 110), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210), "IQ4_NL": (0, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCALES)
def test_blocks_that_only_llama_cpp_writes_are_dequantized(tmp_path, kind):
    """Random blocks, with scales that are numbers, in place of the embeddings."""
    number = gguf.GGMLQuantizationType[kind]
    size, width = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(0).integers(0, 256, (61, width * 256 // size), dtype=np.uint8)
    start, end = SCALES[kind]
    for block in np.split(blocks, 256 // size, axis=1):
        block[:, start:end] = np.full((61, (end - start) // 2), 0.01, np.float16).view(np.uint8)
    model = build(LlamaConfig(**SHAPE | {"hidden_size": 256, "tie_word_embeddings": False}))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.from_numpy(gguf.dequantize(blocks, number)))
    path = gguf_files.write(model, tmp_path / "m.gguf", blocks={"token_embd.weight": (blocks, number)})
    assert_equal_logits(path, model)


def test_heads_without_a_key_are_all_key_value_heads(tmp_path):
    model = build(LlamaConfig(**SHAPE | {"num_key_value_heads": 4}))
    path = gguf_files.write(model, tmp_path / "m.gguf", without=("attention.head_count_kv", "rope.freq_base"))
    assert_equal_logits(path, model)


# -- parts ------------------------------------------------------------------------------------------------------------


def test_parts_beside_a_file_are_loaded_whichever_is_named(tmp_path):
    model = llama()
    gguf_files.write(model, tmp_path / "m.gguf", tensors_per_part=8)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert [part.name for part in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts:
        assert_equal_logits(part, model)
    parts[1].rename(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf is missing"):
        load(parts[0])
    parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelError, match="one of 3 parts"):
        load(tmp_path / "renamed.gguf")


# -- tokenizers -------------------------------------------------------------------------------------------------------


def with_vocabulary(path, keys) -> Path:
    model = build(LlamaConfig(**SHAPE | {"vocab_size": len(keys["ggml.tokens"])}))
    return gguf_files.write(model, path / "m.gguf", vocabulary=keys)


@pytest.mark.parametrize("name", ORIGINALS)
def test_text_is_split_as_by_the_original_tokenizer(tmp_path, name):
    expected = original(name)
    folder = convert_gguf(with_vocabulary(tmp_path, vocabulary(expected, name)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in (*SAMPLES, "a<|end|> b<｜end▁of▁turn｜>12"):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected.encode(text).ids, text
        assert tokenizer.decode(expected.encode(text).ids) == expected.decode(expected.encode(text).ids, False)
    assert len(tokenizer) == expected.get_vocab_size()


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", None, False), ("gpt-2", True, True)],
)
def test_text_starts_with_bos_where_the_file_or_its_family_says_so(tmp_path, pre, flag, expected):
    further = {"ggml.bos_token_id": 1} | ({} if flag is None else {"ggml.add_bos_token": flag})
    tokenizer = load(with_vocabulary(tmp_path, vocabulary(original(pre), pre, **further))).tokenizer
    assert (tokenizer("The cat")["input_ids"][0] == 1) == expected
    assert tokenizer.bos_token_id == 1


def test_text_is_split_as_the_file_says_whatever_the_architecture(tmp_path):
    expected = original("llama-bpe")
    keys = vocabulary(expected, "llama-bpe", **{"ggml.add_bos_token": False})
    model = build(Qwen2Config(**WIDE | {"vocab_size": expected.get_vocab_size()}))
    tokenizer = load(gguf_files.write(model, tmp_path / "m.gguf", vocabulary=keys)).tokenizer
    assert tokenizer("1234 (and 4567)")["input_ids"] == expected.encode("1234 (and 4567)").ids


@pytest.mark.parametrize(("pre", "words"), [("future-bpe", "'future-bpe' is not known"), (None, "None is not known")])
def test_an_unknown_pre_tokenizer_is_warned_of(tmp_path, caplog, pre, words):
    convert_gguf(with_vocabulary(tmp_path, vocabulary(original("gpt-2"), pre)))
    assert words in caplog.text


def test_the_bundled_model_splits_every_digit():
    tokenizer = AutoTokenizer.from_pretrained(convert_gguf(bundled_gguf()))
    pieces = [tokenizer.decode([token]) for token in tokenizer("\n\n123 10  20")["input_ids"]]
    assert pieces == ["\n\n", "1", "2", "3", " ", "1", "0", "  ", "2", "0"]


def test_another_kind_of_tokenizer_is_refused(tmp_path):
    keys = vocabulary(original("gpt-2"), "gpt-2") | {"ggml.model": "rwkv"}
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.model='rwkv'"):
        load(with_vocabulary(tmp_path, keys))


@pytest.mark.parametrize("adds_bos", [None, True, False])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_files_give_the_pieces_of_sentencepiece(tmp_path, has_prefix, adds_bos):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text("\n".join([TEXT.replace("\n", " "), *(f"word{i} is {i}" for i in range(80))]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "spm"),
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        add_dummy_prefix=has_prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    expected = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    size = expected.get_piece_size()
    kinds = [
        2 if expected.is_unknown(i) else 3 if expected.is_control(i) else 6 if expected.is_byte(i) else 1
        for i in range(size)
    ]
    keys = {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": [expected.id_to_piece(i) for i in range(size)],
        "ggml.scores": [expected.get_score(i) for i in range(size)],
        "ggml.token_type": kinds,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.add_space_prefix": has_prefix,
        **({} if adds_bos is None else {"ggml.add_bos_token": adds_bos}),
    }
    tokenizer = load(with_vocabulary(tmp_path, keys)).tokenizer
    for text in ("The cat", " The  cat", "word7 is 77", "日本 é", "a  b", TEXT):
        ids = expected.encode(text)
        assert tokenizer(text)["input_ids"] == ([1] if adds_bos is not False else []) + ids, text
        assert tokenizer.decode(ids) == expected.decode(ids)


# -- ends of a message ------------------------------------------------------------------------------------------------


def test_ends_of_turn_and_message_end_an_answer(tmp_path):
    keys = vocabulary(original("gpt-2"), "gpt-2", **{"ggml.eot_token_id": 1, "ggml.eom_token_id": 7})
    assert load(with_vocabulary(tmp_path, keys)).eos_token_ids == (0, 1, 7)


def test_a_file_without_a_tokenizer_is_served_with_token_ids(tmp_path):
    loaded = load(gguf_files.write(llama(), tmp_path / "m.gguf"))
    assert loaded.tokenizer is None and loaded.eos_token_ids == ()
    assert loaded.model_info.vocab_size == 61


def test_a_file_is_hashed_again_only_if_it_changed(tmp_path, monkeypatch):
    path = gguf_files.write(llama(), tmp_path / "m.gguf")
    folder = convert_gguf(path)
    hashed = []
    digest = gguf_file.hashlib.file_digest
    monkeypatch.setattr(gguf_file.hashlib, "file_digest", lambda *args: hashed.append(args) or digest(*args))
    assert (convert_gguf(path), hashed) == (folder, [])
    path.touch()
    assert convert_gguf(path) == folder and len(hashed) == 1
    assert convert_gguf(path) == folder and len(hashed) == 1
    (folder / "files.json").write_text("{")
    assert convert_gguf(path) == folder and len(hashed) == 2
    gguf_files.write(build(LlamaConfig(**SHAPE | {"intermediate_size": 32})), path)
    assert convert_gguf(path) != folder
