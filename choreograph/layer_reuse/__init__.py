"""Layer-wise reuse of KV cache entries between models of one family (DroidSpeak)."""

from .context_store import ContextStore, context_hash
from .profile import (
    LatencyAwareSelector,
    ParetoPoint,
    PatternScores,
    Profile,
    ServiceTimes,
    enable_profiled_reuse,
)

__all__ = [
    "ContextStore",
    "LatencyAwareSelector",
    "ParetoPoint",
    "PatternScores",
    "Profile",
    "ServiceTimes",
    "context_hash",
    "enable_profiled_reuse",
]
