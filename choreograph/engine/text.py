"""Tokens to text, one by one. Knows tokenizers only."""

from typing import Any

from tokenizers.decoders import DecodeStream

from .generation import Detokenizer


class _FastStream:
    """The incremental decoder of the tokenizers library: text comes out when a character is whole.

    Where tokens stand for bytes, a run of them that turns out not to be UTF-8 is decoded as replacement characters,
    those included that came out as text before. What came out stays; the rest of the run is replaced.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._open: list[int] = []  # tokens whose text has not come out

    def step(self, token: int) -> str:
        try:
            return self._take(token)
        except Exception:  # the library has no other class: "Invalid prefix encountered"
            return self._anew()

    def _take(self, token: int) -> str:
        self._open.append(token)
        piece = self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        if piece:
            self._open = []
        return piece

    def _anew(self) -> str:
        """What a new stream, which goes on from here, makes of the tokens whose text has not come out."""
        tokens, self._open = self._open, []
        self._stream = DecodeStream(skip_special_tokens=True)
        try:
            return "".join([self._take(token) for token in tokens])
        except Exception:
            self._stream, self._open = DecodeStream(skip_special_tokens=True), []
            return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def rest(self) -> str:
        return self._tokenizer.decode(self._open, skip_special_tokens=True)


class _SlowStream:
    """For tokenizers without a backend: decodes everything each time and hands out what is new."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._open: list[int] = []  # those of them whose text has not come out
        self._sent = ""

    def step(self, token: int) -> str:
        self._tokens.append(token)
        self._open.append(token)
        text = self._decode()
        return "" if text.endswith("\ufffd") else self._take(text)

    def rest(self) -> str:
        return self._take(self._decode())

    def _take(self, text: str) -> str:
        """What is new. Where later tokens change what has come out, that stays, and decoding begins anew behind it."""
        if not text.startswith(self._sent):
            self._tokens, self._sent = list(self._open), ""
            text = self._decode()
        piece, self._sent = text[len(self._sent) :], text
        if piece:
            self._open = []
        return piece

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return text


def make_detokenizer(tokenizer: Any) -> Detokenizer | None:
    """A fresh stream for one message; None without a tokenizer."""
    if tokenizer is None:
        return None
    return _FastStream(tokenizer) if getattr(tokenizer, "is_fast", False) else _SlowStream(tokenizer)
