"""Sampling parameters of a request, checked when they are made."""

import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from .errors import SamplingError

GREEDY_TEMPERATURE = 1e-5  # vLLM's limit: colder distributions overflow


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens; the names, ranges and defaults are vLLM's, but for `max_tokens` (256).

    temperature 0 is greedy (and below 1e-5). top_k 0 or -1 and top_p 1 keep every token. `stop` strings end
    a message and are cut from its text; `stop_token_ids` end it too. `logprobs=k` reports the chosen token's
    log-probability and the k likeliest ones, from the model's own distribution.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int = 256
    min_tokens: int = 0
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        for name, kind in (("stop", tuple), ("stop_token_ids", tuple), ("logit_bias", dict)):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(() if value is None else value))
            except (TypeError, ValueError):
                raise SamplingError(f"{name}={value!r}: use a {kind.__name__} or None") from None
        object.__setattr__(self, "stop_token_ids", tuple(map(_to_builtin_number, self.stop_token_ids)))
        object.__setattr__(
            self, "logit_bias", {_to_builtin_number(t): _to_builtin_number(b) for t, b in self.logit_bias.items()}
        )
        for option in fields(self):
            object.__setattr__(self, option.name, _to_builtin_number(getattr(self, option.name)))
        for name, ok, hint in self._rules():
            value = getattr(self, name)
            if not ok(value):
                raise SamplingError(f"{name}={value!r}: {hint}")

    def _rules(self):  # a table
        return (
            ("temperature", lambda v: _is_number(v) and 0 <= v < float("inf"), "use 0 (greedy) or a finite number"),
            ("top_p", lambda v: _is_number(v) and 0 < v <= 1, "use a number in (0, 1]"),
            ("top_k", lambda v: _is_int(v, -1) and v < 1 << 63, "use 0 or -1 for all tokens, or a positive number"),
            ("min_p", lambda v: _is_number(v) and 0 <= v <= 1, "use a number in [0, 1]"),
            ("seed", lambda v: v is None or _is_int(v), "use a whole number or None"),
            ("stop", lambda v: all(isinstance(s, str) and s for s in v), "use non-empty strings"),
            ("stop_token_ids", lambda v: all(_is_int(t, 0) for t in v), "use token ids"),
            ("ignore_eos", lambda v: isinstance(v, bool), "use True or False"),
            ("max_tokens", lambda v: _is_int(v, 1), "use 1 or more"),
            (
                "min_tokens",
                lambda v: _is_int(v, 0) and v <= self.max_tokens,
                f"use 0 to max_tokens={self.max_tokens}",
            ),
            ("logprobs", lambda v: v is None or _is_int(v, 0), "use None or 0 and more"),
            ("presence_penalty", lambda v: _is_number(v) and -2 <= v <= 2, "use a number in [-2, 2]"),
            ("frequency_penalty", lambda v: _is_number(v) and -2 <= v <= 2, "use a number in [-2, 2]"),
            ("repetition_penalty", lambda v: _is_number(v) and 0 < v < float("inf"), "use a positive number"),
            (
                "logit_bias",
                lambda v: all(_is_int(t, 0) and _is_number(b) and -100 <= b <= 100 for t, b in v.items()),
                "map token ids to numbers in [-100, 100]",
            ),
        )

    @classmethod
    def from_dict(cls, options: Mapping[str, object]) -> "SamplingParams":
        """Options by name, as a file or a request holds them; an unknown name is an error."""
        known = {f.name for f in fields(cls)}
        for name in options:
            if name not in known:
                raise SamplingError(f"{name}={options[name]!r}: no such option; known: {sorted(known)}")
        return cls(**options)  # type: ignore[arg-type]

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


def as_int(value: object) -> int | None:
    """The number, whatever type says it (NumPy's, a tensor of one); None for what is none, True and False among it."""
    try:
        return operator.index(None if isinstance(value, bool) else value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _to_builtin_number(value: Any) -> Any:
    """Numbers of other libraries as Python's own."""
    if isinstance(value, Real) and not isinstance(value, (int, float)):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def _is_int(value: object, min_value: float = float("-inf")) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= min_value  # type: ignore[operator]


def _is_number(value: object) -> bool:
    """Whether it is a number that a float can hold: whole ones may be too large, or it is not one (NaN)."""
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) <= sys.float_info.max  # type: ignore[operator]
