"""Tiny random models of the families that the connector serves, as folders that vLLM loads."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers import char_tokenizer
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedConfig, Qwen3Config

VOCABULARY, POSITIONS = 128, 2048
# Large weights, so that a token's context changes what follows by much more than rounding does.
SHAPE = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.25,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4  # of keys and values in float32: layers, heads, dimensions
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": POSITIONS // 4}
LLAMA3 = ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = ROPE | {"rope_type": "yarn"}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
NO_HEAD_DIM = {name: value for name, value in SHAPE.items() if name != "head_dim"}
WIDE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.18}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama, multi-head": LlamaConfig(**SHAPE | {"num_key_value_heads": 4}),
    "llama, llama3": LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "llama, yarn": LlamaConfig(**SHAPE, rope_parameters=YARN),
    "qwen3": Qwen3Config(**SHAPE | {"head_dim": 64}),
    "phi3": Phi3Config(**NO_HEAD_DIM | WIDE, rope_parameters=PARTIAL, sliding_window=None),
}


@dataclass(frozen=True)
class TinyModel:
    """A model, and the folder where vLLM finds it."""

    model: Any
    folder: Path


def save(config: PreTrainedConfig, folder: Path, seed: int = 0) -> TinyModel:
    """Make a random model in float32, and save it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return TinyModel(model, folder)


# Turns that open with a special token, and turns that only end with one. The tokens are single characters.
CHAT_TEMPLATES = {
    "starts": "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "ends": "{% for m in messages %}{{ m.role + ': ' + m.content + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
}


def save_chat_model(folder: Path, template: str) -> TinyModel:
    """Save a Llama with a tokenizer of single characters and one of the chat templates."""
    chat = copy.deepcopy(char_tokenizer.tokenizer())
    chat.chat_template = CHAT_TEMPLATES[template]
    chat.save_pretrained(folder)
    return save(CONFIGS["llama"], folder)


def random_tokens(seed: int, length: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def save_adapter(tiny: TinyModel, folder: Path, seed: int, rank: int = 4) -> Any:
    """Make a random LoRA adapter on queries and values, save it as PEFT does, and return the merged model."""
    merged, generator, weights = copy.deepcopy(tiny.model), torch.Generator().manual_seed(seed), {}
    for name, module in merged.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            lora_a = torch.randn(rank, module.in_features, generator=generator) * 0.25
            lora_b = torch.randn(module.out_features, rank, generator=generator) * 0.25
            weights[f"base_model.model.{name}.lora_A.weight"] = lora_a
            weights[f"base_model.model.{name}.lora_B.weight"] = lora_b
            module.weight.data += lora_b @ lora_a  # alpha is the rank
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return merged
