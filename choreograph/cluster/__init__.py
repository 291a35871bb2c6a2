"""Replicas of the server on Ray, routed by messages (extra `ray`)."""

from collections.abc import Mapping
from typing import Any


def build_app(args: Mapping[str, Any]) -> Any:
    """Build the Ray Serve application of a config file.

    Args:
        args: options of `choreograph serve` with underscores, except those of the address, and `replicas`,
            `max_replicas`, `cpus_per_replica`, `gpus_per_replica`, `threads_per_replica`, `router`.
    """
    from .deployment import build_app as build

    return build(args)


__all__ = ["build_app"]
