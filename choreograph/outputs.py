"""Result values of a message, and the literal types of modes and finish reasons."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Mode = Literal["choreographed", "prefix", "naive"]
MODES: tuple[Mode, ...] = ("choreographed", "prefix", "naive")

KVReuse = Literal["recompute", "reuse", "partial"]
KV_REUSE: tuple[KVReuse, ...] = ("recompute", "reuse", "partial")

FinishReason = Literal["stop", "length", "forced", "cached", "encoded", "cancelled"]

BASE_MODEL = "base"  # name of the model the engine was created with


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one generated token."""

    token: int  # token id
    logprob: float  # natural logarithm
    top: Mapping[int, float]  # most likely token ids and their log-probabilities


@dataclass(frozen=True)
class Usage:
    """Token counts of one request."""

    cached_tokens: int = 0  # tokens of the context that were in the KV cache
    computed_tokens: int = 0  # prefilled tokens: prompt, header and footer
    completion_tokens: int = 0  # generated tokens


@dataclass(frozen=True)
class Timing:
    """Latencies of one request in seconds.

    The clock starts when the request is submitted and the tokens of all decoded parents are final, so prefills in
    between count as part of the request.
    """

    queue_time: float | None = None  # until the first step of the request
    ttft: float | None = None  # until the first token; None for a prefill
    e2e: float | None = None  # until the last token; for a prefill, until its KV is computed
