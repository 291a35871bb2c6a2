"""Continuation of answers in another engine, after the sent tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from ..request.decode_state import TokenMask


@dataclass(frozen=True)
class SentAnswer:
    """What a client has received of one answer."""

    token_ids: Sequence[int] = ()  # in order
    num_chars: int = 0  # of their text
    is_complete: bool = False


class ForcedPrefix:
    """`TokenMask` that allows the sent tokens first, then what `mask` allows.

    A forced token takes its number of the random generator, and penalties and stop strings see it,
    as if it had been sampled: the tokens after it are those that the first engine would have sampled.
    """

    def __init__(self, tokens: Sequence[int], vocab_size: int, mask: TokenMask | None = None) -> None:
        self._tokens, self._vocab_size, self._mask = tokens, vocab_size, mask
        self._position = 0

    def allowed(self) -> Bool[Tensor, " V"]:
        if self._position < len(self._tokens):
            result = torch.zeros(self._vocab_size, dtype=torch.bool)
            result[self._tokens[self._position]] = True
            return result
        return torch.ones(self._vocab_size, dtype=torch.bool) if self._mask is None else self._mask.allowed()

    def advance(self, token: int) -> None:
        self._position += 1
        if self._mask is not None:
            self._mask.advance(token)
