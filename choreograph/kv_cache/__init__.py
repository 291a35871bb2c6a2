"""KV cache: page pool, entries, prefix matching, eviction and offloading."""
