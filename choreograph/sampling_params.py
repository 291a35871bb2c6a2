"""Sampling parameters of a request, validated when created."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from numbers import Real
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool

from .config import Int, NonNegativeInt, validated
from .errors import SamplingError

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
    stop: Annotated[Sequence[NonEmptyString], BeforeValidator(_to_tuple)] = ()  # end a message; not in its text
    stop_token_ids: Annotated[Sequence[NonNegativeInt], BeforeValidator(_to_tuple)] = ()  # end a message
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
        BeforeValidator(lambda value: {} if value is None else value),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise SamplingError("max_tokens=0: nothing would be generated: use 1 or more, or set prompt_logprobs")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingError(f"min_tokens={self.min_tokens}: use 0 to max_tokens={self.max_tokens}")

    @cached_property
    def greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @classmethod
    def from_dict(cls, options: Mapping[str, object]) -> "SamplingParams":
        """Create parameters from a mapping of option names to values.

        Raises:
            SamplingError: if an option is unknown or out of range.
        """
        return cls(**options)  # type: ignore[arg-type]
