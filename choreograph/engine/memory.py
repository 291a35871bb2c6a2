"""Makes the cache that a model and its options ask for: arena, lower tiers, store. Knows no calls.

Several processes that compute a model together get equal ones.
"""

import gc
from collections.abc import Callable
from dataclasses import replace

from ..config import EngineConfig, budget
from ..events import EventLog
from ..kv.arena import Arena
from ..kv.store import Store
from ..kv.tiers import make_tiers
from ..kv.transfers import InlineMover
from ..models.adapter import Adapter

MUCH = 1 << 26  # bytes of a cache that is worth looking for memory


def make_store(adapter: Adapter, config: EngineConfig, events: EventLog, sleep: Callable[[float], object]) -> Store:
    """Raises ConfigError where processes of one model were given different options."""
    facts, cache, ranks = adapter.facts, config.cache, adapter.ranks
    if ranks is not None:
        folders_apart = replace(config, cache=replace(cache, disk_folder=None))
        ranks.same("options", (folders_apart, facts.layers, facts.max_positions, facts.dtype))
    if cache.tokens is None or budget(cache.tokens, facts.kv_bytes_per_token) * facts.kv_bytes_per_token >= MUCH:
        gc.collect()  # engines that nobody has any more refer to themselves, and their memory is wanted now
    arena = Arena(
        pages=adapter.arena_tokens(cache.tokens) // cache.page_size,
        page_size=cache.page_size,
        layers=[(facts.kv_heads, facts.head_dim)] * facts.layers,
        dtype=facts.dtype,
        device=facts.device,
        poison=cache.poison,
    )
    tiers = make_tiers(arena, cache)
    if ranks is None:
        return Store(arena, eviction=cache.eviction, events=events, tiers=tiers, sleep=sleep)
    mover = InlineMover(facts.device)
    return Store(
        arena, eviction=cache.eviction, events=events, tiers=tiers, mover=mover, clock=ranks.clock, sleep=sleep
    )
