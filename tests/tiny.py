"""Tiny random models and engines for tests that the embedded model is too slow for."""

from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig, SchedulerConfig

VOCABULARY, POSITIONS = 61, 256


@cache
def model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        initializer_range=0.25,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def engine(*, tokens: int = 2048, step: int = 1024, calls: int = 256, page: int = 4, backend: str = "auto") -> Engine:
    """An engine over the tiny model that poisons every freed page."""
    return Engine.from_pretrained(
        model(),
        config=EngineConfig(
            backend=backend,
            cache=CacheConfig(tokens=tokens, page_size=page, poison=True),
            scheduler=SchedulerConfig(max_step_tokens=step, max_calls=calls),
        ),
    )
