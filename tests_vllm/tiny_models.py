"""Tiny random models of the families that the connector serves, as folders that vLLM loads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": POSITIONS // 4}
LLAMA3 = ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = ROPE | {"rope_type": "yarn"}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
NO_HEAD_DIM = {name: value for name, value in SHAPE.items() if name != "head_dim"}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama, multi-head": LlamaConfig(**SHAPE | {"num_key_value_heads": 4}),
    "llama, llama3": LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "llama, yarn": LlamaConfig(**SHAPE, rope_parameters=YARN),
    "qwen3": Qwen3Config(**SHAPE | {"head_dim": 64}),
    "phi3": Phi3Config(**NO_HEAD_DIM | {"hidden_size": 128}, rope_parameters=PARTIAL, sliding_window=None),
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
