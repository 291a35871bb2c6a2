"""Every row of the table of families: a tiny random model of it behaves like Hugging Face, chained and moved."""

import pytest
import torch
from families import CONFIGS, SHAPE
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.errors import ModelError
from choreograph.models.families import FAMILIES


def test_every_family_is_proved_here():
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_chain_generation_and_moved_placement(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    ids = torch.randint(0, 61, (1, 30), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        wanted = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
    config = EngineConfig(cache=CacheConfig(tokens=1024, poison=True))
    engine, tokens = Engine.from_pretrained(model, config=config), ids[0].tolist()
    greedy = SamplingParams(temperature=0, max_tokens=20)
    with engine.session() as session:
        first = session.prefill(tokens[:10])
        second = session.prefill(tokens[10:29], [first])
        answer = session.decode(tokens[29:], [first, second], sampling=greedy)
        assert answer.generated == wanted[0, 30:].tolist()
        # everything moved by the same distance is the same conversation
        moved = session.decode(tokens[29:], [first, second], offsets=[70, 80], new_offset=99, sampling=greedy)
        assert moved.generated == answer.generated


def test_other_architectures_and_windows_are_refused_with_the_reason():
    with pytest.raises(ModelError, match="'gpt2' is not proved"):
        Engine.from_pretrained(
            AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9))
        )
    windowed = MistralConfig(**SHAPE, sliding_window=16)
    with pytest.raises(ModelError, match="sliding-window"):
        Engine.from_pretrained(AutoModelForCausalLM.from_config(windowed))
    dynamic = LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ModelError, match="dynamic"):
        Engine.from_pretrained(AutoModelForCausalLM.from_config(dynamic))
