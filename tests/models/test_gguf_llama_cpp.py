"""GGUF files give llama.cpp's token ids and log-probabilities, for every variant that the tests can write.

K-quants and IQ4 cannot be written by the `gguf` package: llama.cpp itself quantizes these files.

Not compared, since llama.cpp differs from the original models there: it does not compose characters before it splits
text (qwen2), and takes token 11 for the first and last token of a byte-level vocabulary that names none. It reads the
betas of YaRN from its options instead of the file (the test gives both), and does not apply the windows of phi3 and of
mistral. Its factors for long and short texts depend on the length of its context.
"""

import copy
import ctypes
import unicodedata

import numpy as np
import pytest
import torch
from helpers import gguf_files
from helpers.gguf_vocabularies import ORIGINALS, SAMPLES, TEXT, original, sentencepiece_vocabulary, vocabulary
from helpers.model_configs import CONFIGS, LLAMA3, WIDE
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Starcoder2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from choreograph.models.loader import load

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: pip install choreograph[bench]")

pytestmark = pytest.mark.slow

TEXTS = (
    TEXT,
    "The cat's 12 dogs",
    "10 20  30   40 hats!\n\n123",
    "see x=1;\n\tTwo words  here and über",
    "12345678 WE'LL",
)
EXACT = 5e-3  # float32 in both; llama.cpp sums in another order, and takes exponentials from a table
ROUNDED = 0.1  # llama.cpp rounds the activations to the type that is multiplied with the weights, 8 bits for blocks
TOLERANCES = {  # of log-probabilities, by type of the weights
    "F32": EXACT,
    "F16": 0.02,
    "BF16": 0.1,
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), ROUNDED),
    **dict.fromkeys(("Q2_K", "Q3_K_S", "Q4_K_S", "Q5_K_S", "Q6_K", "IQ4_NL", "IQ4_XS"), ROUNDED),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("choreograph.models.gguf.gguf_file.user_cache_path", lambda name: tmp_path / "cache")


def build(config, keys):
    config = copy.deepcopy(config)
    config.vocab_size = len(keys["ggml.tokens"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def open_in_llama_cpp(path, options):
    file_values = {f"yarn_{name}": -1.0 for name in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")}
    return llama_cpp.Llama(
        str(path), n_ctx=256, n_threads=1, logits_all=True, type_k=0, type_v=0, verbose=False, **file_values | options
    )


def assert_equal_to_llama_cpp(path, tolerance=EXACT, **options):
    """Compare the token ids of texts, their five most likely next tokens at every position, and ends of a message."""
    loaded, reference = load(path, dtype=torch.float32), open_in_llama_cpp(path, options)
    try:
        for text in TEXTS:
            ids = reference.tokenize(text.encode(), add_bos=True, special=True)
            assert loaded.tokenizer(text)["input_ids"] == ids, text
            reference.reset()
            reference.eval(ids)
            expected = torch.tensor(reference.scores[: len(ids)]).log_softmax(-1)
            with torch.inference_mode():
                actual = loaded.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            top = expected.topk(5).indices
            difference = (actual.gather(1, top) - expected.gather(1, top)).abs().max().item()
            assert difference < tolerance, (text, difference)
        vocab = llama_cpp.llama_model_get_vocab(reference.model)
        ends = [token for token in range(len(expected[0])) if llama_cpp.llama_vocab_is_eog(vocab, token)]
        assert sorted(loaded.eos_token_ids) == ends
    finally:
        reference.close()


@pytest.fixture(scope="module")
def words():
    """Metadata of a byte-level vocabulary."""
    return vocabulary(original("llama-bpe"), "llama-bpe", **{"ggml.bos_token_id": 1})


SMALL = LlamaConfig(**WIDE)
LARGE = LlamaConfig(**WIDE | {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.05})


def write(path, keys, config=SMALL, **options):
    return gguf_files.write(build(config, keys), path / "m.gguf", vocabulary=keys, **options)


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
ROPE = {
    "none": {"rope.scaling.type": "none"},
    "linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    "linear, old key": {"rope.scale_linear": 4.0},
    "yarn": YARN,
    "yarn, betas": {**YARN, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
    "base": {"rope.freq_base": 777.0},
}


@pytest.mark.parametrize("name", ROPE)
def test_scaled_rotary_embeddings(tmp_path, words, name):
    options = {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0} if name == "yarn, betas" else {}
    assert_equal_to_llama_cpp(write(tmp_path, words, metadata=ROPE[name]), **options)


@pytest.mark.parametrize("linear", [False, True])
def test_factors_of_the_frequencies(tmp_path, words, linear):
    config = LlamaConfig(**WIDE, rope_parameters=LLAMA3)
    plain = 1e4 ** (-torch.arange(0, 16, 2) / 16)
    factors = (plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]).numpy().astype(np.float32)
    metadata = ROPE["linear"] if linear else {}
    assert_equal_to_llama_cpp(write(tmp_path, words, tensors={"rope_freqs.weight": factors}, metadata=metadata))


@pytest.mark.parametrize("tied", [False, True])
def test_tied_and_untied_output_layers(tmp_path, words, tied):
    config = LlamaConfig(**WIDE | {"tie_word_embeddings": tied})
    assert_equal_to_llama_cpp(write(tmp_path, words, config))


def test_parts(tmp_path, words):
    write(tmp_path, words, tensors_per_part=8)
    assert_equal_to_llama_cpp(tmp_path / "m-00001-of-00003.gguf")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantizations_that_the_gguf_package_writes(tmp_path, words, kind):
    assert_equal_to_llama_cpp(write(tmp_path, words, LARGE, quantization=kind), TOLERANCES[kind])


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K_S", "Q4_K_S", "Q5_K_S", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_quantizations_that_only_llama_cpp_writes(tmp_path, words, kind):
    source, target = write(tmp_path, words, LARGE), tmp_path / "quantized.gguf"
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.pure, options.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), True, 1
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options)) == 0
    assert_equal_to_llama_cpp(target, TOLERANCES[kind])


@pytest.mark.parametrize("adds_bos", [None, False, True])
@pytest.mark.parametrize("name", ORIGINALS)
def test_pre_tokenizers(tmp_path, name, adds_bos):
    flag = {} if adds_bos is None else {"ggml.add_bos_token": adds_bos}
    keys = vocabulary(original(name), name, **{"ggml.bos_token_id": 1}, **flag)
    path = write(tmp_path, keys)
    loaded, reference = load(path, dtype=torch.float32), open_in_llama_cpp(path, {})
    for text in (*TEXTS, *SAMPLES, "a<|end|> b<｜end▁of▁turn｜>12"):
        text = unicodedata.normalize("NFC", text)
        expected = reference.tokenize(text.encode(), add_bos=True, special=True)
        assert loaded.tokenizer(text)["input_ids"] == expected, text
    reference.close()


@pytest.mark.parametrize("adds_bos", [None, False])
@pytest.mark.parametrize("has_prefix", [None, False, True])
def test_sentencepiece(tmp_path, has_prefix, adds_bos):
    flags = {"ggml.add_space_prefix": has_prefix, "ggml.add_bos_token": adds_bos}
    keys = sentencepiece_vocabulary(**{key: value for key, value in flags.items() if value is not None})
    assert_equal_to_llama_cpp(write(tmp_path, keys))


def test_ends_of_a_message(tmp_path):
    keys = vocabulary(original("gpt-2"), "gpt-2", **{"ggml.eot_token_id": 1, "ggml.eom_token_id": 7})
    assert_equal_to_llama_cpp(write(tmp_path, keys))


FAMILIES = {
    **{name: CONFIGS[name] for name in ("llama", "qwen3", "qwen3_moe", "phi3", "gemma2", "gemma3_text")},
    **{name: CONFIGS[name] for name in ("gpt2", "bloom", "falcon")},
    "llama, biases": LlamaConfig(**WIDE, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**WIDE),
    "starcoder2": Starcoder2Config(**WIDE, sliding_window=None),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_architectures(tmp_path, words, name):
    config = copy.deepcopy(FAMILIES[name])
    metadata = {"attention.sliding_window_pattern": [True, True, False]} if name == "gemma3_text" else {}
    if getattr(config, "head_dim", None) == 16:
        metadata["attention.value_length"] = 16
    if "query_pre_attn_scalar" in config.to_dict():
        config.query_pre_attn_scalar = config.head_dim
    if config.model_type == "phi3":
        config.sliding_window = None
    if config.model_type == "qwen3_moe":
        config.norm_topk_prob = True
    assert_equal_to_llama_cpp(write(tmp_path, words, config, metadata=metadata))
