"""Sampling state and generated output of one decode."""

import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from jaxtyping import Bool

from ..outputs import FinishReason, TokenLogprob
from ..sampling_params import SamplingParams
from ..stop_strings import ROOT
from .detokenizer import Detokenizer
from .penalties import Penalties

UNIFORM_BATCH = 16  # random numbers drawn at once


class PromptScores(Protocol):
    """Scores of the tokens before a decode's first one; see `PromptScorer`."""

    scores: list[TokenLogprob | None]

    @property
    def is_complete(self) -> bool: ...
    def drop(self) -> None: ...
    def plan_rows(self, request: Any, batch: Any, token_budget: int) -> tuple[int, int]: ...
    def add_rows(self, request: Any, batch: Any, num_queries: int) -> None: ...
    def record(self, targets: list[int], logits: torch.Tensor) -> None: ...


class TokenMask(Protocol):
    """Restriction of the next token of one decode, for structured outputs."""

    def allowed(self) -> Bool[torch.Tensor, " V"]:
        """Return the tokens that may come next, on the host."""

    def advance(self, token: int) -> None:
        """Append a token; may start computing the next mask meanwhile."""


@dataclass
class DecodeState:
    """Sampling state and generated output of one decode."""

    sampling: SamplingParams
    # header tokens; context tokens before them if the repetition penalty needs them
    prompt: list[int]
    stop_tokens: frozenset[int]  # token ids that end the message
    generator: torch.Generator
    forced_tokens: list[int] | None = None  # taken in order instead of sampling
    is_chat_turn: bool = False  # the footer is the template's: it replaces a generated stop token
    max_new_tokens: int = 0  # tokens
    is_unlimited: bool = False  # the message may use the whole cache (`max_tokens=None`)
    footer: list[int] = field(default_factory=list)  # tokens appended after the generated ones
    drops_stop: bool = False  # the last generated token is not part of the message: the footer ends it
    detokenizer: Detokenizer | None = None
    prompt_scorer: PromptScores | None = None  # of `SamplingParams.prompt_logprobs`
    tokens: list[int] = field(default_factory=list)  # generated so far, the stop token included
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""  # generated text, truncated at a stop string
    next_logprob: TokenLogprob | None = None  # of the token about to be appended
    # receives float32 (V,) for every token
    on_logprobs: Callable[[torch.Tensor], None] | None = None
    pending_logprobs: torch.Tensor | None = None  # (V,) float32, not delivered yet
    token_mask: TokenMask | None = None  # tokens that may be sampled next; None: all
    penalties: Penalties = field(default_factory=Penalties)
    num_drafted: int = 0  # last ones of `tokens`, which may be rejected
    stop_state: int = ROOT  # of the stop strings' automaton, after the text
    num_stable_chars: int = 0  # of the text, without stop strings: no later text changes them
    needs_host_sampling: bool = False  # the last token could not be sampled on the device
    _uniforms: list[float] = field(default_factory=list)  # drawn but unused, the next one last

    def __post_init__(self) -> None:
        self.is_unlimited = self.sampling.max_tokens is None and self.forced_tokens is None
        limit = sys.maxsize if self.sampling.max_tokens is None else self.sampling.max_tokens
        self.max_new_tokens = len(self.forced_tokens) if self.forced_tokens is not None else limit

    def release_sampling(self) -> None:
        """Drop what only the sampling of further tokens needs."""
        self.prompt, self.penalties = [], Penalties()

    @property
    def stop_allowed(self) -> bool:
        """True if the message may end with the next token (`min_tokens`)."""
        return len(self.tokens) >= self.sampling.min_tokens

    def next_uniform(self) -> float:
        """Return the uniform number in [0, 1) for the next token.

        Idempotent: `append` consumes the number, so a step can be retried.
        """
        if not self._uniforms:  # drawn in a batch: the same sequence as one by one
            self._uniforms = torch.rand(UNIFORM_BATCH, generator=self.generator, dtype=torch.float64).tolist()[::-1]
        return self._uniforms[-1]

    def after(self, tokens: list[int]) -> "DecodeState":
        """Return a state to sample the token after `tokens` from."""
        while len(self._uniforms) <= len(tokens) and not self.sampling.greedy:  # the same sequence as one by one
            drawn = torch.rand(UNIFORM_BATCH, generator=self.generator, dtype=torch.float64)
            self._uniforms = drawn.tolist()[::-1] + self._uniforms
        state = copy(self)
        state.num_drafted = len(tokens)
        state.tokens, state._uniforms = self.tokens + tokens, self._uniforms[: -len(tokens)]
        return state

    def append(self, token: int) -> FinishReason | None:
        """Append the next token.

        Returns the finish reason if it ends the message, else None.
        """
        stop_allowed = self.stop_allowed
        self.tokens.append(token)
        if self.token_mask is not None:
            self.token_mask.advance(token)
        if self.next_logprob is not None:
            self.logprobs.append(self.next_logprob)
        self.next_logprob = self.pending_logprobs = None
        del self._uniforms[-1:]
        is_last = len(self.tokens) >= self.max_new_tokens
        stop = token in self.stop_tokens and (is_last if self.forced_tokens is not None else stop_allowed)
        piece = self.detokenizer.step(token) if self.detokenizer is not None and not stop else ""
        has_stop_string = self._append_text(piece, stop_allowed and (is_last or self.forced_tokens is None))
        if not (stop or has_stop_string or is_last):
            return None
        if not has_stop_string:
            self.flush_text()
        if stop or (has_stop_string and self.forced_tokens is None):
            return "stop"
        return "length" if self.forced_tokens is None else "forced"

    def join_footer(self) -> None:
        """Remove a stop token that the footer starts with or replaces.

        The footer of a chat turn replaces any stop token: the turn ends as its template writes it.
        """
        last = self.tokens[-1] if self.tokens else None
        if last not in self.stop_tokens:
            return
        if self.footer and self.footer[0] == last:
            self.footer = self.footer[1:]
        else:
            self.drops_stop = self.is_chat_turn

    def flush_text(self) -> None:
        """Append text that waited for the rest of a character."""
        if self.detokenizer is not None:
            self.text += self.detokenizer.flush()

    def _append_text(self, piece: str, can_stop: bool) -> bool:
        """Append text up to a stop string; return whether one ends it.

        Only a stop string that ends in the piece counts: `min_tokens` excluded earlier ones.
        """
        automaton, text = self.sampling.stop_automaton, self.text + piece
        end: int | None = None
        if automaton is not None:
            self.stop_state, start = automaton.read(self.stop_state, piece)
            end = len(self.text) + start if can_stop and start is not None else None
        self.text = text[:end]  # assigned once: other threads must not read text that a stop string removes
        if automaton is not None and end is None:
            self.num_stable_chars = len(text) - automaton.num_held(self.stop_state)
        return end is not None

    @property
    def stable_text(self) -> str:
        """Text that no stop string can truncate anymore."""
        return self.text[: self.num_stable_chars] if self.sampling.stop else self.text
