"""Models of one tiny family: a base, one that was trained on (noise on its weights), and a copy of the base."""

from functools import cache

import torch

from choreograph import CacheConfig, Engine, EngineConfig, SchedulerConfig
from helpers import tiny_models

LAYERS = 5


@cache
def base():
    return tiny_models.build(layers=LAYERS)


@cache
def finetuned(seed: int = 7):
    """Far enough from the base for every layer to be told apart."""
    model, noise = tiny_models.build(layers=LAYERS), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return model


def engine(
    *, tokens: int = 2048, step: int = 1024, page: int = 4, calls: int = 256, backend: str = "auto", **cache
) -> Engine:
    """An engine over the base, "math" and "twin", a copy of the base; freed pages are poisoned."""
    config = EngineConfig(
        backend=backend,
        cache=CacheConfig(capacity=tokens, page_size=page, poison_freed_pages=True, **cache),
        scheduler=SchedulerConfig(max_num_batched_tokens=step, max_num_seqs=calls),
    )
    return Engine.from_pretrained(
        base(), config=config, models={"math": finetuned(), "twin": tiny_models.build(layers=LAYERS)}
    )
