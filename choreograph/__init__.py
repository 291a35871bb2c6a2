"""Multi-step LLM workflows that never encode the same message twice.

>>> from choreograph import Engine, SamplingParams
>>> engine = Engine.from_pretrained()
"""

from .chat import Turn
from .config import CacheConfig, EngineConfig, SchedulerConfig
from .core import Engine
from .errors import ChoreographError
from .message import Message
from .pattern import Pattern
from .session import Session
from .types import SamplingParams, Timing, TokenLogprob, Usage

__version__ = "0.1.0"
__all__ = [
    "CacheConfig",
    "ChoreographError",
    "Engine",
    "EngineConfig",
    "Message",
    "Pattern",
    "SamplingParams",
    "SchedulerConfig",
    "Session",
    "Timing",
    "TokenLogprob",
    "Turn",
    "Usage",
]
