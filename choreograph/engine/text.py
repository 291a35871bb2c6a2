"""Tokens to text, one by one. Knows tokenizers only."""

from typing import Any

from tokenizers.decoders import DecodeStream

from .generation import Detokenizer


class _FastStream:
    """The incremental decoder of the tokenizers library: text comes out when a character is whole."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def step(self, token: int) -> str:
        return self._stream.step(self._backend, token) or ""


class _SlowStream:
    """For tokenizers without a backend: decodes everything each time and hands out what is new."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._sent = ""

    def step(self, token: int) -> str:
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if text.endswith("\ufffd") or not text.startswith(self._sent):
            return ""
        piece, self._sent = text[len(self._sent) :], text
        return piece


def make_detokenizer(tokenizer: Any) -> Detokenizer | None:
    """A fresh stream for one message; None without a tokenizer."""
    if tokenizer is None:
        return None
    return _FastStream(tokenizer) if getattr(tokenizer, "is_fast", False) else _SlowStream(tokenizer)
