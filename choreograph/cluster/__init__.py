"""Replicas of the server on Ray, routed by messages (extra `ray`)."""

from collections.abc import Mapping
from typing import Any


def build_app(args: Mapping[str, Any]) -> Any:
    """Build the Ray Serve application of a config file.

    Args:
        args: `model`, `dtype`, `device`, `adapter`, `sibling`, `layer_reuse`, and fields of `ServerConfig`,
            `EngineConfig`, `CacheConfig`, `SchedulerConfig` and `ClusterConfig`.
    """
    from .deployment import build_app as build

    return build(args)


__all__ = ["build_app"]
