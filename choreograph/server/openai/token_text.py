"""Text of single tokens: their bytes, and their places in an answer."""

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from ...api.chat import ChatTemplate
from ...outputs import TokenLogprob
from ...request.detokenizer import Detokenizer

MIN_LOGPROB = -9999.0  # JSON has no infinity

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte of a character without a token

_SPACE = "\u2581"  # as SentencePiece writes it


@lru_cache(maxsize=1)
def _byte_alphabet() -> Mapping[str, int]:
    """Return the byte of every character of a byte-level vocabulary (GPT-2)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenBytes:
    """Bytes of the tokens of one tokenizer.

    A token may be a part of a character, whose text alone would be a replacement character.
    """

    def __init__(self, chat_template: ChatTemplate) -> None:
        self.tokenizer, self._chat_template = chat_template.tokenizer, chat_template
        self._cache: dict[int, bytes] = {}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that decoding may leave out."""
        return self._chat_template.special_tokens.ids

    def load(self) -> None:
        """Read the vocabulary, which takes long, once."""
        _ = self.special_ids, self._added, self._decoders, self._chat_template.byte_token_ids

    def detokenizer(self, header: Sequence[int], *, skip_special: bool) -> Detokenizer:
        """Return a decoder of an answer, as the engine uses it."""
        byte_token_ids, skipped_ids = (
            self._chat_template.byte_token_ids,
            self.special_ids if skip_special else frozenset[int](),
        )
        return Detokenizer(
            self.tokenizer, list(header), byte_token_ids, skip_special=skip_special, skipped_ids=skipped_ids
        )

    @cached_property
    def _added(self) -> Mapping[int, str]:
        return {i: str(token) for i, token in self.tokenizer.added_tokens_decoder.items()}

    @cached_property
    def _decoders(self) -> str:
        """Serialized decoder of a fast tokenizer."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        return "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()), ensure_ascii=False)

    def of(self, token: int) -> bytes:
        """Return the bytes of a token, a leading space included."""
        result = self._cache.get(token)
        if result is None:
            result = self._cache[token] = self._compute(token)
        return result

    def _compute(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode("utf-8", "replace")
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return b""
        if '"ByteLevel"' in self._decoders:
            alphabet = _byte_alphabet()
            return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in piece)
        if '"ByteFallback"' in self._decoders and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if _SPACE in self._decoders:
            return piece.replace(_SPACE, " ").encode("utf-8", "replace")
        text: str = self.tokenizer.decode([token])
        return text.encode("utf-8", "replace")


def label(data: bytes) -> str:
    """Return the text of a token; parts of characters as bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass(slots=True)
class PlacedToken:
    """Token of an answer, with its place in the text."""

    id: int
    data: bytes  # what it contributed to the text
    start: int  # first character
    end: int  # after the last one
    logprob: TokenLogprob | None  # if requested


class TokenPlacer:
    """Places of tokens in the text of one answer.

    Texts join to what the engine's `Detokenizer` returns for the same tokens.

    Args:
        header: tokens before the answer.
    """

    def __init__(self, token_bytes: TokenBytes, header: Sequence[int], *, skip_special: bool) -> None:
        self._token_bytes = token_bytes
        self._skipped_ids = token_bytes.special_ids if skip_special else frozenset[int]()
        self._detokenizer = token_bytes.detokenizer(header, skip_special=skip_special)
        self._waiting: list[tuple[int, TokenLogprob | None]] = []  # tokens whose text is not complete
        self._num_chars = 0

    def add(self, token: int, logprob: TokenLogprob | None = None) -> list[PlacedToken]:
        """Append a token; return the tokens whose text is known now."""
        self._waiting.append((token, logprob))
        piece = self._detokenizer.step(token)
        return self._place(piece, self._detokenizer.num_waiting) if piece else []

    def finish(self) -> list[PlacedToken]:
        """Return the tokens that waited for the rest of a character."""
        return self._place(self._detokenizer.flush(), 0) if self._waiting else []

    def _place(self, piece: str, num_held: int) -> list[PlacedToken]:
        """Place the tokens of a piece of text.

        Args:
            num_held: last tokens whose text is held back.
        """
        count = len(self._waiting)
        while num_held:
            count -= 1
            num_held -= self._waiting[count][0] not in self._skipped_ids
        placed, self._waiting = self._waiting[:count], self._waiting[count:]
        result: list[PlacedToken] = []
        decoder, position = codecs.getincrementaldecoder("utf-8")("replace"), self._num_chars
        for (token, logprob), data in zip(placed, self._split(piece, [token for token, _ in placed]), strict=True):
            start = position
            position += len(decoder.decode(data))
            end = position + bool(decoder.getstate()[0])  # a part of the next character
            result.append(PlacedToken(token, data, start, end, logprob))
        self._num_chars += len(piece)
        return result

    def _split(self, piece: str, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes of a piece of text by token."""
        parts = [b"" if token in self._skipped_ids else self._token_bytes.of(token) for token in tokens]
        joined = b"".join(parts)
        if _matches(joined, piece):
            return parts
        if joined.startswith(b" ") and _matches(joined[1:], piece):  # of the first token of a text
            first = next(i for i, part in enumerate(parts) if part)
            return [*parts[:first], parts[first][1:], *parts[first + 1 :]]
        return [b""] * (len(parts) - 1) + [piece.encode("utf-8", "replace")]


def _matches(data: bytes, text: str) -> bool:
    return data.decode("utf-8", "replace") == text


def logprob_entry(token: PlacedToken, token_bytes: TokenBytes, num_top: int) -> dict[str, Any]:
    """Return the log-probability of a token in the form of chats."""
    assert token.logprob is not None
    top = sorted(token.logprob.top.items(), key=lambda pair: -pair[1])[:num_top]
    alternatives = [_entry(_alternative(token, i, token_bytes), value) for i, value in top]
    return {**_entry(token.data, token.logprob.logprob), "top_logprobs": alternatives}


def _entry(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": label(data), "logprob": max(logprob, MIN_LOGPROB), "bytes": list(data)}


def _alternative(token: PlacedToken, other: int, token_bytes: TokenBytes) -> bytes:
    """Return what another token would have contributed in place of a token."""
    data, own = token_bytes.of(other), token_bytes.of(token.id)
    if other == token.id:
        return token.data
    return data.removeprefix(b" ") if own == b" " + token.data else data


def completion_logprobs(
    tokens: Sequence[PlacedToken], token_bytes: TokenBytes, num_top: int, start: int = 0
) -> dict[str, Any]:
    """Return log-probabilities in the form of completions.

    Args:
        num_top: alternatives of every token; the token itself is always listed.
        start: of the answer in the text that offsets count from.
    """
    result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        assert token.logprob is not None
        logprob = max(token.logprob.logprob, MIN_LOGPROB)
        result["tokens"].append(label(token.data))
        result["token_logprobs"].append(logprob)
        alternatives = {label(token.data): logprob}
        top = sorted(token.logprob.top.items(), key=lambda pair: -pair[1])[:num_top]
        for other, value in top:
            if other != token.id:
                text = label(_alternative(token, other, token_bytes))
                # several tokens may have one text: each is listed
                text = f"token_id:{other}" if text in alternatives else text
                alternatives[text] = max(value, MIN_LOGPROB)
        result["top_logprobs"].append(alternatives)
        result["text_offset"].append(start + token.start)
    return result
