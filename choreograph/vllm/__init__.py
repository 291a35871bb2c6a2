"""Message reuse inside vLLM: a connector for `vllm serve`, without patches.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "ChoreographConnector",
    "kv_connector_module_path": "choreograph.vllm", "kv_role": "kv_both"}'

Runs in vLLM's processes and environment and imports nothing of the engine.
"""

from typing import Any

__all__ = ["ChoreographConnector"]


def __getattr__(name: str) -> Any:
    if name != "ChoreographConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .connector import ChoreographConnector

    return ChoreographConnector
