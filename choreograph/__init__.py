"""Multi-step LLM workflows that never encode the same message twice.

>>> from choreograph import Engine, SamplingParams
>>> engine = Engine.from_pretrained()
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api.call import CallOptions, DecodeOptions, SessionOptions
    from .api.chat import Turn
    from .api.engine import Engine
    from .api.message import Message
    from .api.session import Session
    from .config import CacheConfig, EngineConfig, SchedulerConfig
    from .context.feature import ContextFeature
    from .errors import ChoreographError
    from .features.budget import Budget
    from .features.explain import Explanation
    from .features.repair.options import Repair
    from .layer_pattern import LayerPattern
    from .messages.kv_export import KVSnapshot
    from .outputs import Timing, TokenLogprob, Usage
    from .remote.remote_session import connect
    from .sampling_params import SamplingParams

from .version import __version__ as __version__

__all__ = [
    "Budget",
    "CacheConfig",
    "CallOptions",
    "ChoreographError",
    "ContextFeature",
    "DecodeOptions",
    "Engine",
    "EngineConfig",
    "Explanation",
    "KVSnapshot",
    "LayerPattern",
    "Message",
    "Repair",
    "SamplingParams",
    "SchedulerConfig",
    "Session",
    "SessionOptions",
    "Timing",
    "TokenLogprob",
    "Turn",
    "Usage",
    "connect",
]

# Names are imported on first use: `import choreograph` takes milliseconds, torch is imported with the engine.
_MODULES = {
    "Budget": "features.budget",
    "CacheConfig": "config",
    "CallOptions": "api.call",
    "ChoreographError": "errors",
    "ContextFeature": "context.feature",
    "DecodeOptions": "api.call",
    "Engine": "api.engine",
    "EngineConfig": "config",
    "Explanation": "features.explain",
    "KVSnapshot": "messages.kv_export",
    "LayerPattern": "layer_pattern",
    "Message": "api.message",
    "Repair": "features.repair.options",
    "SamplingParams": "sampling_params",
    "SchedulerConfig": "config",
    "Session": "api.session",
    "SessionOptions": "api.call",
    "Timing": "outputs",
    "TokenLogprob": "outputs",
    "Turn": "api.chat",
    "Usage": "outputs",
    "connect": "remote.remote_session",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
