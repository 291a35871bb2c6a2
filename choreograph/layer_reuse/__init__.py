"""Encodings across models of one family (DroidSpeak): stored by content, profiled, chosen under load."""

from .context_store import ContextStore, context_hash
from .profile import ParetoPoint, PatternScores, Profile
from .selector import LatencyAwareSelector, enable_profiled_reuse

__all__ = [
    "ContextStore",
    "LatencyAwareSelector",
    "ParetoPoint",
    "PatternScores",
    "Profile",
    "context_hash",
    "enable_profiled_reuse",
]
