"""What a model may come as: types, quantised weights, folders without a tokenizer, places."""

import copy

import pytest
import torch
from helpers.model_configs import CONFIGS
from transformers import AutoModelForCausalLM, BloomForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.errors import ConfigError, ModelError

PROMPT = list(range(3, 20))
SMALL = CacheConfig(capacity=512)


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


def greedy(engine: Engine, count: int = 8) -> list[int]:
    with engine.session() as session:
        first = session.prefill(PROMPT[:9])
        return session.decode(
            PROMPT[9:], [first], sampling=SamplingParams(temperature=0, max_tokens=count)
        ).output_token_ids


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])
def test_quantised_weights_are_what_the_quantised_model_computes(name):
    plain = Engine.from_pretrained(build(name), config=EngineConfig(cache=SMALL))
    model = build(name)
    engine = Engine.from_pretrained(model, config=EngineConfig(cache=SMALL, quantization="int4"))
    assert engine.model_info.fingerprint != plain.model_info.fingerprint
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        expected = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, len(PROMPT) :].tolist()
    assert greedy(engine) == expected


@pytest.mark.parametrize("name", ["falcon", "gpt2"])
def test_a_model_that_cannot_be_quantized_is_refused_and_unchanged(name):
    model = build(name)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=r"weights .* supported shape"):
        Engine.from_pretrained(model, config=EngineConfig(cache=SMALL, quantization="int4"))
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())


def test_windows_and_caps_are_a_part_of_what_a_model_is():
    def fingerprint(**options) -> str:
        config = copy.deepcopy(CONFIGS["gemma2"])
        for name, value in options.items():
            setattr(config, name, value)
        torch.manual_seed(0)
        return Engine.from_pretrained(AutoModelForCausalLM.from_config(config)).model_info.fingerprint

    assert len({fingerprint(), fingerprint(sliding_window=9), fingerprint(attn_logit_softcapping=3.0)}) == 3


@pytest.mark.parametrize("name", [n for n in CONFIGS if n.split(",")[0] not in ("falcon", "mpt", "bloom")])
def test_a_stretch_of_layers_is_what_the_whole_model_computes(name):
    engine = Engine.from_pretrained(build(name), models={"twin": build(name)}, config=EngineConfig(cache=SMALL))
    engine.enable_layer_reuse("twin", pattern=[0, 1, engine.model_info.layers])  # computed from the second layer on
    heard = SamplingParams(logprobs=0)
    with engine.session() as session:
        first = session.prefill(PROMPT[:9])
        own = session.decode(PROMPT[9:], [first], forced_tokens=[1, 2, 3], sampling=heard)
        other = session.decode(
            PROMPT[9:], [first], forced_tokens=[1, 2, 3], sampling=heard, model="twin", kv_reuse="partial"
        )
        mine, theirs = ([one.logprob for one in message.logprobs] for message in (own, other))
    assert theirs == pytest.approx(mine, abs=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_measured_does_not_depend_on_the_type(name, dtype):
    exact = Engine.from_pretrained(build(name), config=EngineConfig(cache=SMALL)).model_info
    rough = Engine.from_pretrained(build(name), dtype=dtype, config=EngineConfig(cache=SMALL)).model_info
    assert rough.supports_shift == exact.supports_shift
    for one, other in zip(exact.attention_specs, rough.attention_specs, strict=True):
        assert (one.sliding_window, one.logit_softcap, one.alibi_slopes) == (
            other.sliding_window,
            other.logit_softcap,
            other.alibi_slopes,
        )
        assert (one.rope is None) == (other.rope is None)
        if one.rope is not None:
            assert one.rope.half_dim == other.rope.half_dim
            assert one.rope.interleaved == other.rope.interleaved


def test_a_folder_without_a_tokenizer_works_with_token_ids(tmp_path):
    build("gpt_neox").save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path, dtype="float32", config=EngineConfig(cache=SMALL))
    assert engine.tokenizer is None
    assert greedy(engine) == greedy(Engine.from_pretrained(build("gpt_neox"), config=EngineConfig(cache=SMALL)))


def test_a_device_map_is_transformers_own(tmp_path):
    build("llama").save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path, device_map="cpu", config=EngineConfig(cache=SMALL))
    assert len(greedy(engine)) == 8
    with pytest.raises(ConfigError, match="give one of them"):
        Engine.from_pretrained(tmp_path, device_map="cpu", device="cpu")
    with pytest.raises(ConfigError, match="in memory"):
        Engine.from_pretrained(build("llama"), device_map="auto")
    with pytest.raises(ModelError, match="meta"):
        Engine.from_pretrained(build("llama").to("meta"))


def test_fewer_positions_are_kept_to_and_more_are_refused():
    engine = Engine.from_pretrained(build("llama"), config=EngineConfig(cache=SMALL, max_model_len=32))
    assert engine.model_info.max_positions == 32
    assert len(greedy(engine, 100)) == 32 - len(PROMPT)
    with pytest.raises(ConfigError, match=r"max_model_len=300: .*256"):
        Engine.from_pretrained(build("llama"), config=EngineConfig(max_model_len=300))


def test_steps_on_a_cpu_are_not_compiled():
    with pytest.raises(ConfigError, match="compile=True: steps on a CPU need no compilation: leave it out"):
        Engine.from_pretrained(build("llama"), config=EngineConfig(cache=SMALL, compile=True))


def test_a_bridged_family_is_not_compiled_and_shares_no_encodings():
    assert isinstance(build("bloom"), BloomForCausalLM)
    with pytest.raises(ConfigError, match="not compiled"):
        Engine.from_pretrained(build("bloom"), config=EngineConfig(compile=True))
    engine = Engine.from_pretrained(build("bloom"), models={"other": build("bloom")}, config=EngineConfig(cache=SMALL))
    with pytest.raises(ModelError, match="one by one"):
        engine.enable_layer_reuse("other", pattern=[1, 1, 2])


@pytest.mark.slow
def test_thirty_two_thousand_positions_are_used_to_the_last():
    config = copy.deepcopy(CONFIGS["gemma3_text"])
    config.max_position_embeddings = 32_768
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = Engine.from_pretrained(model, config=EngineConfig(cache=CacheConfig(capacity=33_000)))
    prompt = torch.randint(0, 61, (32_760,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt]), logits_to_keep=1, use_cache=False).logits[0, -1].log_softmax(-1)
    with engine.session() as session:
        first = session.prefill(prompt[:20_000])
        second = session.prefill(prompt[20_000:-1], [first])
        heard = SamplingParams(temperature=0, max_tokens=50, logprobs=61)
        last = session.decode(prompt[-1:], [first, second], sampling=heard)
        result = [last.logprobs[0].top[token] for token in range(61)]
        assert len(last.output_token_ids) == 8
        assert last.finish_reason == "length"
    torch.testing.assert_close(torch.tensor(result), expected, atol=2e-3, rtol=1e-3)
