"""Models of one tiny family: a base, one that was trained on (noise on its weights), and a copy of the base."""

from functools import cache

from choreograph import CacheConfig, Engine, EngineConfig, SchedulerConfig
from helpers import tiny_models

LAYERS = 5


@cache
def base():
    return tiny_models.build(layers=LAYERS)


@cache
def finetuned(seed: int = 7):
    """Far enough from the base for every layer to be told apart."""
    return tiny_models.finetuned(tiny_models.build(layers=LAYERS), seed)


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
