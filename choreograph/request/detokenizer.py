"""Incremental decoding of generated tokens to text."""

import os
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerFast

CONTEXT_TOKENS = 8  # header tokens decoded with the generated ones, which may depend on them (leading spaces)

MAX_CHARACTER_TOKENS = 4  # bytes of a character, each of which may be a token


class Detokenizer:
    """Incremental decoder of one message.

    The pieces concatenate to `tokenizer.decode(header + tokens)` without the header's part. Text is
    held back while later tokens may change it: incomplete characters, and runs of byte tokens,
    which are decoded as a whole. A token costs the same after any number of others.
    """

    def __init__(
        self,
        tokenizer: Any,
        header: list[int],
        byte_token_ids: frozenset[int],
        *,
        skip_special: bool = True,
        skipped_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._decode_ids, self._byte_token_ids = _decoder(tokenizer), byte_token_ids
        self._skip_special, self._skipped_ids = skip_special, skipped_ids  # the latter have no text: not collected
        start = max(0, len(header) - CONTEXT_TOKENS)
        while start and header[start] in byte_token_ids:
            start -= 1
        self._ids = header[start:]  # last emitted piece, then the tokens not emitted yet
        self._num_emitted = len(self._ids)
        self._emitted_text: str | None = None  # of the first tokens of `_ids`; None: not decoded yet

    @property
    def num_waiting(self) -> int:
        """Tokens whose text is held back, without skipped ones."""
        return len(self._ids) - self._num_emitted

    def step(self, token: int) -> str:
        """Append a token; return the text that later tokens cannot change."""
        if token in self._skipped_ids:
            return ""
        self._ids.append(token)
        return "" if token in self._byte_token_ids else self._emit(is_last=False)

    def flush(self) -> str:
        """Return the text held back; incomplete characters become replacement characters."""
        return self._emit(is_last=True)

    def _emit(self, *, is_last: bool) -> str:
        if self._emitted_text is None:
            self._emitted_text = self._decode(self._ids[: self._num_emitted])
        text = self._decode(self._ids)
        num_final = len(self._ids)  # tokens whose text no later token changes
        if text.endswith("\ufffd") and not is_last:
            num_final -= MAX_CHARACTER_TOKENS
            if num_final < self._num_emitted + MAX_CHARACTER_TOKENS:
                return ""
            whole, text = text, self._decode(self._ids[:num_final])
            if not whole.startswith(text):  # cut inside a character
                return ""
        start = len(self._emitted_text)
        if not text.startswith(self._emitted_text):  # the header ended inside a character
            start = len(os.path.commonprefix([text, self._emitted_text]))  # noqa: RUF071 - character by character
        piece = text[start:]
        if piece:
            self._ids = self._ids[self._num_emitted :]
            self._num_emitted, self._emitted_text = num_final - self._num_emitted, None
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._decode_ids(ids, skip_special_tokens=self._skip_special)


def _decoder(tokenizer: Any) -> Callable[..., str]:
    """Return the `decode` of a tokenizer without transformers' input checks."""
    decode: Callable[..., str] = tokenizer.decode
    if isinstance(tokenizer, PreTrainedTokenizerFast) and not tokenizer.clean_up_tokenization_spaces:
        kind, base = type(tokenizer), PreTrainedTokenizerFast
        if (kind.decode, kind._decode) == (base.decode, base._decode):  # not overridden
            decode = tokenizer.backend_tokenizer.decode
    return decode
