"""Chat turns from a model's own template, cut so that turns joined give what the template renders.

Owns the cutting; knows tokenizers, not messages. A turn that opens a conversation carries what the template
puts in front of it (the beginning-of-sequence token, a default system prompt); later turns never do.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2

from .errors import BadTokens, ConfigError

ROLES = ("system", "user", "assistant", "tool")
_MARK = "\u2063mark\u2063"


@dataclass(frozen=True)
class Turn:
    """One turn of a chat: who speaks, and the text. opening: whether it may open a conversation; False for one that is
    read behind others, though it is encoded without parents."""

    role: str
    text: str
    opening: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise BadTokens(f"text={self.text!r}: a turn holds a string")


class Turns:
    """How turns are written where a chat is held. A turn without parents opens a conversation: it carries what the
    template puts in front of one, the begin token and often a default system prompt. opening=False leaves that out."""

    def system(self, text: str, *, opening: bool = True) -> Turn:
        return Turn("system", text, opening)

    def user(self, text: str, *, opening: bool = True) -> Turn:
        return Turn("user", text, opening)

    def assistant(self, text: str = "", *, opening: bool = True) -> Turn:
        return Turn("assistant", text, opening)


class ChatFormat:
    """Turns into tokens, for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, turn: Turn, *, opening: bool) -> list[int]:
        """The whole turn: header, text, footer."""
        return self._ids(self._whole(turn, opening))

    def open(self, turn: Turn, *, opening: bool) -> tuple[list[int], list[int]]:
        """(header with the text so far, footer): what a decode starts with, and what ends its turn."""
        whole = self._whole(Turn(turn.role, _MARK), opening)
        header, _, footer = whole.partition(_MARK)
        if not turn.text and not self.has_template:
            header = header.rstrip(" ")  # the space belongs to the first word, which is still to be said
        return self._ids(header + turn.text), self._ids(footer)

    def plain(self, text: str, *, opening: bool) -> list[int]:
        """Text without roles; the beginning-of-sequence token in front only where it opens a conversation."""
        ids = self._ids(text)
        return [*self.beginning, *ids] if opening else ids

    def _ids(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            raise BadTokens(
                f"text {text[:60]!r}: {problem.reason} at {problem.start}: replace what is no character"
            ) from None
        return self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    @property
    def has_template(self) -> bool:
        """Without one, turns are plain lines, which no token ends."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    @cached_property
    def beginning(self) -> list[int]:
        """What the tokenizer puts in front of any text."""
        with_it, without = self._tokenizer("a")["input_ids"], self._ids("a")
        places = range(len(with_it) - len(without) + 1)
        return next((with_it[:at] for at in places if with_it[at : at + len(without)] == without), [])

    def _whole(self, turn: Turn, opening: bool) -> str:
        whole = self._cut(turn, opening)
        if turn.text.strip() not in whole and _MARK not in self._cut(Turn(turn.role, _MARK), opening):
            raise ConfigError(f"the chat template drops a lone turn of role {turn.role!r}: put its text elsewhere")
        return whole

    def _cut(self, turn: Turn, opening: bool) -> str:
        if turn.role not in ROLES:
            raise ConfigError(f"role={turn.role!r}: use one of {ROLES}")
        if not self.has_template:
            return self._without_template(turn, opening)
        if opening:
            rendered = self._render([turn])
            return rendered if rendered is not None else self._front + self._after(turn)
        return self._after(turn)

    def _after(self, turn: Turn) -> str:
        """What the template adds for a turn behind a conversation in which it may stand."""
        talk = [Turn("user", "x"), Turn("assistant", "x")]
        for before in ([talk[0]], talk) if turn.role == "assistant" else (talk, [talk[0]]):
            start, both = self._render(before), self._render([*before, turn])
            if start is not None and both is not None and both.startswith(start):
                return both[len(start) :]
        raise ConfigError(f"the chat template has no place for a turn of role {turn.role!r}")

    @cached_property
    def _front(self) -> str:
        """What the template puts in front of the first turn, whoever speaks."""
        user = Turn("user", "x")
        rendered, later = self._render([user]), self._after(user)
        return rendered[: -len(later)] if rendered and rendered.endswith(later) else ""

    def _render(self, turns: list[Turn]) -> str | None:
        """The template's text, or None where it refuses such a conversation."""
        messages = [{"role": t.role, "content": t.text} for t in turns]
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False)
        except (jinja2.TemplateError, TypeError):  # what a template raises, or does not expect
            return None

    def _without_template(self, turn: Turn, opening: bool) -> str:
        front = getattr(self._tokenizer, "bos_token", None) or "" if opening and self.beginning else ""
        return f"{front}{turn.role.capitalize()}: {turn.text}\n"
