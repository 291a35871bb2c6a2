"""Tiny random models and engines for tests that the embedded model is too slow for."""

import copy
from collections.abc import Iterable
from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig, SchedulerConfig
from choreograph.context.feature import ContextFeature

VOCABULARY, POSITIONS = 61, 256


def build(
    *,
    seed: int = 1,
    vocabulary: int = VOCABULARY,
    positions: int = POSITIONS,
    stop: int | None = None,
    layers: int = 2,
    intermediate: int = 48,
) -> LlamaForCausalLM:
    """A random Llama in float32; `stop` ends a message."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=positions,
        initializer_range=0.25,
        eos_token_id=stop,
        bos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).float().eval()


@cache
def model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The one that most tests use."""
    return build().to(dtype)


def engine(
    *,
    tokens: int = 2048,
    step: int = 1024,
    calls: int = 256,
    page: int = 4,
    backend: str = "auto",
    aware: bool = True,
    features: Iterable[ContextFeature] = (),
    **cache,
) -> Engine:
    """An engine over the tiny model that poisons every freed page. cache: further options of CacheConfig."""
    return Engine.from_pretrained(
        model(),
        config=EngineConfig(
            backend=backend,
            cache=CacheConfig(capacity=tokens, page_size=page, poison_freed_pages=True, **cache),
            scheduler=SchedulerConfig(max_num_batched_tokens=step, max_num_seqs=calls, skip_loading=aware),
        ),
        features=features,
    )


def finetuned(model: LlamaForCausalLM, seed: int = 7) -> LlamaForCausalLM:
    """A copy with noise on its weights: far enough from the model for every layer to be told apart."""
    result, noise = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return result
