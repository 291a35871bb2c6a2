"""Sampling parameters of a request, validated when created."""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import field
from functools import cached_property
from numbers import Real
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool

from .config import Int, NonNegativeInt, validated
from .errors import SamplingError
from .stop_strings import StopAutomaton, stop_automaton

MAX_STOP_STRINGS, MAX_STOP_CHARS = 256, 2048  # number and total length of the stop strings of a request

MAX_TOKEN_IDS = 4096  # entries of `stop_token_ids` and of `logit_bias`

GREEDY_TEMPERATURE = 1e-5  # vLLM's limit: colder distributions overflow


def _to_float(value: object) -> float:
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("use a finite number")
    return number


def _to_tuple(value: Any) -> Any:
    """Convert None, one string or an iterable to a tuple."""
    if isinstance(value, (str, bytes)):
        return (value,)
    try:
        return () if value is None else tuple(value)
    except TypeError:
        raise ValueError("use a list or None") from None


def _to_stop_strings(value: Any) -> Any:
    strings = _to_tuple(value)
    if len(strings) > MAX_STOP_STRINGS:
        raise SamplingError(f"stop: {len(strings):,} strings: use at most {MAX_STOP_STRINGS}")
    num_chars = sum(len(string) for string in strings if isinstance(string, str))
    if num_chars > MAX_STOP_CHARS:
        raise SamplingError(f"stop: {num_chars:,} characters in total: use at most {MAX_STOP_CHARS:,}")
    return strings


def _to_token_ids(value: Any) -> Any:
    ids = _to_tuple(value)
    if len(ids) > MAX_TOKEN_IDS:
        raise SamplingError(f"stop_token_ids: {len(ids):,} token ids: use at most {MAX_TOKEN_IDS:,}")
    return ids


def _to_bias(value: Any) -> Any:
    if isinstance(value, Mapping) and len(value) > MAX_TOKEN_IDS:
        raise SamplingError(f"logit_bias: {len(value):,} token ids: use at most {MAX_TOKEN_IDS:,}")
    return {} if value is None else value


Number = Annotated[float, BeforeValidator(_to_float)]
NonEmptyString = Annotated[str, Field(min_length=1, strict=True)]


@validated(SamplingError)
class SamplingParams:
    """Sampling parameters of one decode.

    Names, ranges and defaults are vLLM's, except for `max_tokens` (256).
    """

    temperature: Annotated[Number, Field(ge=0)] = 1.0  # 0 (and below 1e-5) is greedy
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0  # probability mass of the tokens kept; 1 keeps all
    top_k: Annotated[Int, Field(ge=-1, lt=1 << 63)] = 0  # number of tokens kept; 0 and -1 keep all
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0  # minimum probability, relative to the likeliest token
    seed: Int | None = None  # None: drawn from the session's seed
    stop: Annotated[Sequence[NonEmptyString], BeforeValidator(_to_stop_strings)] = ()  # end a message; not in its text
    stop_token_ids: Annotated[Sequence[NonNegativeInt], BeforeValidator(_to_token_ids)] = ()  # end a message
    ignore_eos: StrictBool = False  # continue after the end-of-sequence token
    skip_special_tokens: StrictBool = True  # leave them out of the text
    # tokens to generate at most; None: until the model's context or the cache ends; 0: with `prompt_logprobs` alone
    max_tokens: NonNegativeInt | None = 256
    min_tokens: NonNegativeInt = 0  # tokens before a message may end
    # number of most likely tokens to report, from the model's own distribution; None: no log-probabilities
    logprobs: NonNegativeInt | None = None
    # likewise for every token of the prompt: context and header
    prompt_logprobs: NonNegativeInt | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0)] = 1.0  # also counts the prompt
    # added to the logits of token ids
    logit_bias: Annotated[
        dict[NonNegativeInt, Annotated[Number, Field(ge=-100, le=100)]],
        BeforeValidator(_to_bias),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise SamplingError("max_tokens=0: nothing would be generated: use 1 or more, or set prompt_logprobs")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingError(f"min_tokens={self.min_tokens}: use 0 to max_tokens={self.max_tokens}")
        _ = self.stop_automaton  # built by the caller, not in the engine's thread

    @cached_property
    def greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @cached_property
    def stop_automaton(self) -> StopAutomaton | None:
        """Search for the stop strings; None without any."""
        return stop_automaton(self.stop) if self.stop else None

    def with_seed(self, seed: int) -> "SamplingParams":
        """Return a copy with another seed; nothing is validated again."""
        result = copy(self)
        result.__dict__["seed"] = seed
        return result

    def without_prompt_logprobs(self) -> "SamplingParams":
        """Return a copy that does not score the prompt; likewise."""
        result = copy(self)
        result.__dict__["prompt_logprobs"] = None
        return result

    @classmethod
    def from_dict(cls, options: Mapping[str, object]) -> "SamplingParams":
        """Create parameters from a mapping of option names to values.

        Raises:
            SamplingError: if an option is unknown or out of range.
        """
        return cls(**options)  # type: ignore[arg-type]
