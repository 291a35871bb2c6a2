"""Create the KV cache of an engine: pool, tiers and transfer executor."""

import gc
from collections.abc import Callable
from dataclasses import replace

from ..config import EngineConfig, parse_capacity
from ..events import EventBus
from ..kv_cache.manager import KVCacheManager
from ..kv_cache.pool import KVPool
from ..kv_cache.tiers import make_tiers
from ..kv_cache.transfer import SyncExecutor
from ..models.hf_model import HFModel

GC_THRESHOLD_BYTES = 1 << 26  # collect garbage before allocating a cache of this size


def create_kv_cache_manager(
    hf_model: HFModel, config: EngineConfig, events: EventBus, sleep: Callable[[float], object]
) -> KVCacheManager:
    """Create the KV cache manager of an engine.

    Raises:
        ConfigError: if the ranks of one model have different options.
    """
    model_info, cache, tp_group = hf_model.model_info, config.cache, hf_model.tp_group
    if tp_group is not None:
        shared_config = replace(config, cache=replace(cache, disk_dir=None))
        tp_group.ensure_equal("options", (shared_config, model_info.layers, model_info.max_positions, model_info.dtype))
    if (
        cache.capacity is None
        or parse_capacity(cache.capacity, model_info.kv_bytes_per_token) * model_info.kv_bytes_per_token
        >= GC_THRESHOLD_BYTES
    ):
        gc.collect()  # unreferenced engines contain reference cycles; free their memory now
    pool = KVPool(
        pages=hf_model.default_cache_tokens(cache.capacity) // cache.page_size,
        page_size=cache.page_size,
        layers=[(model_info.kv_heads, model_info.head_dim)] * model_info.layers,
        dtype=model_info.dtype,
        device=model_info.device,
        poison_freed_pages=cache.poison_freed_pages,
    )
    tiers = make_tiers(pool, cache)
    if tp_group is None:
        return KVCacheManager(pool, eviction=cache.eviction, events=events, tiers=tiers, sleep=sleep)
    mover = SyncExecutor(model_info.device)
    return KVCacheManager(
        pool,
        eviction=cache.eviction,
        events=events,
        tiers=tiers,
        executor=mover,
        clock=tp_group.shared_clock,
        sleep=sleep,
    )
