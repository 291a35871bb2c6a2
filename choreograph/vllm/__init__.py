"""Message reuse inside vLLM: a connector for `vllm serve`, without patches.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "ChoreographConnector",
    "kv_connector_module_path": "choreograph.vllm", "kv_role": "kv_both"}'

Runs in vLLM's processes and environment and imports nothing of the engine.
"""

from importlib import import_module
from typing import Any

_MODULES = {"ChoreographConnector": "connector", "RequestChecks": "request_checks"}

__all__ = ["ChoreographConnector", "RequestChecks"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
