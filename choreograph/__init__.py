"""Multi-step LLM workflows that never encode the same message twice.

>>> from choreograph import Engine, SamplingParams
>>> engine = Engine.from_pretrained()
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import CacheConfig, EngineConfig, SchedulerConfig
    from .engine.budget import Budget
    from .engine.cross_model import LayerPattern
    from .engine.engine import Engine
    from .engine.explain import Explanation
    from .engine.message import Message
    from .engine.repair.strategy import Repair
    from .engine.session import Session
    from .engine.text import Turn
    from .errors import ChoreographError
    from .outputs import Timing, TokenLogprob, Usage
    from .remote_session import connect
    from .sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "CacheConfig",
    "ChoreographError",
    "Engine",
    "EngineConfig",
    "Explanation",
    "LayerPattern",
    "Message",
    "Repair",
    "SamplingParams",
    "SchedulerConfig",
    "Session",
    "Timing",
    "TokenLogprob",
    "Turn",
    "Usage",
    "connect",
]

# Names are imported on first use: `import choreograph` takes milliseconds, torch is imported with the engine.
_MODULES = {
    "Budget": "engine.budget",
    "CacheConfig": "config",
    "ChoreographError": "errors",
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "Explanation": "engine.explain",
    "LayerPattern": "engine.cross_model",
    "Message": "engine.message",
    "Repair": "engine.repair.strategy",
    "SamplingParams": "sampling_params",
    "SchedulerConfig": "config",
    "Session": "engine.session",
    "Timing": "outputs",
    "TokenLogprob": "outputs",
    "Turn": "engine.text",
    "Usage": "outputs",
    "connect": "remote_session",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
