"""Result values of messages; types of modes and finish reasons."""

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
    """Log-probability of one token."""

    token: int  # token id
    logprob: float  # natural logarithm
    top: Mapping[int, float]  # most likely token ids and their log-probabilities
    rank: int | None = None  # of the token, 1 for the likeliest; of tokens of the prompt alone


@dataclass(frozen=True)
class Usage:
    """Token counts of one request, or their sums over several."""

    cached_tokens: int = 0  # tokens of the context that were in the KV cache
    computed_tokens: int = 0  # prefilled tokens: prompt, header and footer
    completion_tokens: int = 0  # generated tokens
    repaired_tokens: int = 0  # of `computed_tokens`, those of the context (`repair`)
    drafted_tokens: int = 0  # drafted by speculative decoding
    accepted_tokens: int = 0  # of these, generated

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.cached_tokens + other.cached_tokens,
            self.computed_tokens + other.computed_tokens,
            self.completion_tokens + other.completion_tokens,
            self.repaired_tokens + other.repaired_tokens,
            self.drafted_tokens + other.drafted_tokens,
            self.accepted_tokens + other.accepted_tokens,
        )


@dataclass(frozen=True)
class Timing:
    """Latencies of one request in seconds.

    The clock starts when the request is submitted and the tokens of all decoded parents are final, so prefills in
    between count as part of the request.
    """

    queue_time: float | None = None  # until the first step of the request
    ttft: float | None = None  # until the first token; None for a prefill
    e2e: float | None = None  # until the last token; for a prefill, until its KV is computed


@dataclass(frozen=True)
class EngineStats:
    """Current state of an engine, and its counters since creation."""

    num_waiting: int  # requests that wait for parents or capacity
    num_running: int  # admitted requests
    num_steps: int  # forward passes so far
    num_batched_tokens: int  # tokens computed so far
    num_drafted_tokens: int  # of these, drafted by speculative decoding
    num_accepted_tokens: int  # of these, generated
    num_pages: int  # device pages
    num_free_pages: int  # device pages of no entry
    num_referenced_pages: int  # device pages of entries that messages or requests reference
    num_referenced_entries: int  # these entries
    num_unreferenced_entries: int  # cached entries that may be evicted
    num_partial_pages: int  # pages of the partial-layer pool
    num_referenced_partial_pages: int  # of these, referenced
    tier_tokens: Mapping[str, int]  # tokens stored in each offload tier, by name
    events: Mapping[str, int]  # number of events so far, by kind
