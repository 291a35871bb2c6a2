"""Bytes that a cache allocates for several models on one context, with and without layer reuse."""

from typing import Any

from choreograph import CacheConfig, Engine, EngineConfig, LayerPattern

from .common import random_tokens


def allocated_bytes(
    model: Any, pattern: LayerPattern, num_models: int, num_tokens: int, *, reuse: bool, default_capacity: bool = False
) -> tuple[int, int]:
    """Allocate a cache that is as large as a context of every model needs, and compute the context in it.

    The models have the same weights, since what is allocated depends on shapes alone: they share what they compute.

    Args:
        default_capacity: the partial-layer pool has as many pages as the cache, as if nothing was given.

    Returns:
        The bytes of all tensors of the cache, and those of the layer inputs among them.
    """
    capacity = num_tokens if reuse else num_tokens * num_models
    engine = Engine.from_pretrained(model, config=EngineConfig(cache=CacheConfig(capacity=capacity)))
    if reuse and num_models > 1:
        engine.add_model("reader", model)
        room = None if default_capacity else num_tokens * (num_models - 1)
        engine.enable_layer_reuse("reader", pattern=pattern, capacity=room)
    pool = engine.core.cache_manager.pool
    with engine.session() as session:
        text = session.prefill([token % engine.model_info.vocab_size for token in random_tokens(num_tokens)])
        text.wait_encoded()
        if reuse and pattern.layers and num_models > 1:
            variant = session.partial_prefill(text, pattern, model="reader").wait_encoded()
            assert variant.computed_layers == tuple(sorted(pattern.layers)), "computed in all layers"
    num_input_bytes = sum(tensor.nbytes for tensor in pool.hidden.values())
    return num_input_bytes + sum(tensor.nbytes for tensor in (*pool.keys, *pool.values)), num_input_bytes
