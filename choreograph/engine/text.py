"""Tokens to text, one by one. Knows tokenizers only."""

from typing import Any

from tokenizers.decoders import DecodeStream

from .generation import Detokenizer


class _FastStream:
    """The incremental decoder of the tokenizers library: text comes out when a character is whole."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._open: list[int] = []  # tokens of a character that is not whole yet

    def step(self, token: int) -> str:
        piece = self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        self._open = [] if piece else [*self._open, token]
        return piece

    def rest(self) -> str:
        return self._tokenizer.decode(self._open, skip_special_tokens=True)


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

    def rest(self) -> str:
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return text[len(self._sent) :] if text.startswith(self._sent) else ""


def make_detokenizer(tokenizer: Any) -> Detokenizer | None:
    """A fresh stream for one message; None without a tokenizer."""
    if tokenizer is None:
        return None
    return _FastStream(tokenizer) if getattr(tokenizer, "is_fast", False) else _SlowStream(tokenizer)
