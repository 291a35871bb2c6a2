"""Shared fixtures: a tiny random Llama, engines over it, and the embedded model, loaded once."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig

STOP = 2


def make_llama(*, seed: int = 0, vocabulary: int = 97, positions: int = 512) -> LlamaForCausalLM:
    """A random Llama in float32; token 2 ends a message."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=positions,
        initializer_range=0.2,
        eos_token_id=STOP,
    )
    return LlamaForCausalLM(config).float().eval()


@pytest.fixture(scope="session")
def tiny_model():
    """The factory of tiny models."""
    return make_llama


@pytest.fixture(scope="session")
def _tiny():
    return make_llama()


@pytest.fixture
def tiny_engine(_tiny):
    """The factory of engines over one tiny model; freed pages are poisoned."""

    def make(*, tokens: int = 2048, model: LlamaForCausalLM | None = None) -> Engine:
        config = EngineConfig(cache=CacheConfig(tokens=tokens, poison=True))
        return Engine.from_pretrained(model or _tiny, config=config)

    return make


@pytest.fixture(scope="session")
def embedded():
    """One engine over the embedded model, in float32 so that results do not depend on the batch."""
    config = EngineConfig(cache=CacheConfig(tokens=4096, poison=True))
    return Engine.from_pretrained(config=config, dtype="float32", device="cpu")
