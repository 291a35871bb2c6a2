"""What a decode has generated so far and when it must stop. Owns its random generator; knows no cache."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..types import FinishReason, SamplingParams, TokenLogprob

DRAWN = 16  # random numbers at once


class Detokenizer(Protocol):
    """Turns tokens into text one by one; a piece may be empty until a character is whole."""

    def step(self, token: int) -> str: ...

    def rest(self) -> str:
        """What is left when no token follows: the replacement for a character that never became whole."""
        ...


@dataclass
class Generation:
    """tokens: generated so far, the stop token included. forced: tokens to take instead of choosing."""

    sampling: SamplingParams
    prompt: list[int]
    stop_tokens: frozenset[int]
    random: torch.Generator
    forced: list[int] | None = None
    limit: int = 0
    detokenizer: Detokenizer | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    next_logprob: TokenLogprob | None = None
    watch: Callable[[torch.Tensor], None] | None = None  # hears the float32 log-probabilities behind every token
    next_row: torch.Tensor | None = None
    host_chooses: bool = False  # the last token was one that a device could not choose
    _points: list[float] = field(default_factory=list)  # drawn and not used yet, the next one last

    def __post_init__(self) -> None:
        self.limit = len(self.forced) if self.forced is not None else self.sampling.max_tokens

    @property
    def next_forced(self) -> int | None:
        return None if self.forced is None else self.forced[len(self.tokens)]

    @property
    def stop_allowed(self) -> bool:
        """Whether the next token may end the message."""
        return len(self.tokens) >= self.sampling.min_tokens

    def point(self) -> float:
        """The uniform number that chooses the next token: the same, however often the step is tried."""
        if not self._points:  # a few at once: they are those that would come one by one
            self._points = torch.rand(DRAWN, generator=self.random, dtype=torch.float64).tolist()[::-1]
        return self._points[-1]

    def accept(self, token: int) -> FinishReason | None:
        """Takes the next token; says why the message ends with it, or None."""
        allowed = self.stop_allowed
        self.tokens.append(token)
        if self.next_logprob is not None:
            self.logprobs.append(self.next_logprob)
        self.next_logprob = self.next_row = None
        del self._points[-1:]
        last = len(self.tokens) >= self.limit
        stop = token in self.stop_tokens and (last if self.forced is not None else allowed)
        text = self.text
        if self.detokenizer is not None and not stop:
            text += self.detokenizer.step(token)
        end = self._stop_string(text) if (last or self.forced is None) and allowed else None
        cut = end is not None
        self.text = text[:end]  # at once: other threads read it, and what a stop string takes back must not be seen
        if not (stop or cut or last):
            return None
        if self.detokenizer is not None and not cut:
            self.text += self.detokenizer.rest()
        if stop or (cut and self.forced is None):
            return "stop"
        return "length" if self.forced is None else "forced"

    def _stop_string(self, text: str) -> int | None:
        """Where one begins in the text so far with a new piece. Only what ends in the piece counts: what ended before
        fell under `min_tokens`."""
        settled = len(self.text)
        found = (text.find(s, max(0, settled - len(s) + 1)) for s in self.sampling.stop)
        return min((at for at in found if at >= 0), default=None)

    @property
    def settled_text(self) -> str:
        """The part of the text that no stop string can still take back."""
        longest = max((len(s) for s in self.sampling.stop), default=1)
        return self.text[: len(self.text) - longest + 1] if longest > 1 else self.text


def footer_after(footer: list[int], generated: list[int], stops: frozenset[int]) -> list[int]:
    """The footer without what the model already wrote: a stop token that the footer starts with."""
    if footer and generated and generated[-1] == footer[0] and footer[0] in stops:
        return footer[1:]
    return footer
