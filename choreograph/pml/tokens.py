"""A chat format as a layout sees it, and what stands for a parameter without an argument."""

import hashlib
from typing import Any

from ..chat import ChatFormat, Turn
from ..errors import ConfigError


class ChatTokens:
    """`layout.Tokens` over one tokenizer and its chat template."""

    def __init__(self, chat: ChatFormat | None, tokenizer: Any) -> None:
        if chat is None:
            raise ConfigError("PML needs a tokenizer: give one to Engine.from_pretrained")
        self._chat = chat
        self.placeholder = placeholder_of(tokenizer)

    def text(self, text: str) -> list[int]:
        return self._chat.plain(text, opening=False)

    def beginning(self) -> list[int]:
        return self._chat.beginning

    def turn(self, role: str, text: str, *, opening: bool, whole: bool) -> tuple[list[int], list[int]]:
        """(header and text, footer); a whole turn is tokenised in one piece, as the template would be."""
        if whole:
            return self._chat.encode(Turn(role, text), opening=opening), []
        return self._chat.open(Turn(role, text), opening=opening)


def placeholder_of(tokenizer: Any) -> int:
    """The token that fills a parameter (section 3.3): the unknown token, or a blank where there is none, or where
    its name says that it means something else too (the end of a text, often)."""
    if tokenizer.unk_token_id is not None and "unk" in str(tokenizer.unk_token).lower():
        return tokenizer.unk_token_id
    blank = tokenizer(" ", add_special_tokens=False)["input_ids"]
    return blank[-1] if blank else tokenizer.eos_token_id


def fingerprint(tokenizer: Any) -> str:
    """Names the tokenizer and its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{content}\0{getattr(tokenizer, 'chat_template', None)}".encode()).hexdigest()[:16]
