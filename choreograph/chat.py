"""Chat turns from a model's own template, cut so that turns joined give what the template renders.

Owns the cutting; knows tokenizers, not messages. A turn that opens a conversation carries what the template
puts in front of it (the beginning-of-sequence token, a default system prompt); later turns never do. Where the last
answer is written otherwise than those before it, a whole turn is one of those before, and one that is still to be said
is the last.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2

from .errors import BadTokens, ConfigError

ROLES = ("system", "user", "assistant", "tool")
_MARK = "\u2063mark\u2063"
_PLACE = "x"  # stands for any text
SHORT, KEPT = 200, 1024  # characters of a header whose tokens are kept, since it is said again and again; how many
TIMED = "strftime_now"  # what a template with it gives is of its day


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


_USER = Turn("user", _PLACE)


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
        self._kept: dict[Any, Any] = {}

    def encode(self, turn: Turn, *, opening: bool) -> list[int]:
        """The whole turn: header, text, footer."""
        return self._ids(self._whole(turn, opening))

    def open(self, turn: Turn, *, opening: bool) -> tuple[list[int], list[int]]:
        """(header with the text so far, footer): what a decode starts with, and what ends its turn."""
        whole = self._whole(Turn(turn.role, _MARK), opening, last=True)
        header, _, footer = whole.partition(_MARK)
        if not turn.text and not self.has_template:
            header = header.rstrip(" ")  # the space belongs to the first word, which is still to be said
        elif not turn.text and turn.role == "assistant":
            if self._prompt:
                header = (self._front if opening else "") + self._prompt
            if not header:
                raise ConfigError("the chat template puts nothing in front of an answer: give the turn its first words")
        return self._ids(header + turn.text, keep=True), self._ids(footer, keep=True)

    def plain(self, text: str, *, opening: bool) -> list[int]:
        """Text without roles; the beginning-of-sequence token in front only where it opens a conversation."""
        ids = self._ids(text)
        return [*self.beginning, *ids] if opening else ids

    def _ids(self, text: str, *, keep: bool = False) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            raise BadTokens(
                f"text {text[:60]!r}: {problem.reason} at {problem.start}: replace what is no character"
            ) from None
        if not text:
            return []
        if not keep or len(text) > SHORT:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return list(self._once((text, self._state), lambda: self._ids(text)))

    @property
    def _state(self) -> tuple[object, ...]:
        """What may change about a tokenizer: of other states nothing that is kept is used."""
        t = self._tokenizer
        names = ("bos_token", "eos_token", "split_special_tokens")
        size = len(t) if hasattr(t, "__len__") else 0
        return (size, str(getattr(t, "chat_template", None)), *(str(getattr(t, name, None)) for name in names))

    def _once(self, key: object, make: Callable[[], Any]) -> Any:
        if (known := self._kept.get(key, self)) is not self:
            return known
        if len(self._kept) >= KEPT:
            self._kept.clear()
        found = self._kept[key] = make()
        return found

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

    def _whole(self, turn: Turn, opening: bool, last: bool = False) -> str:
        whole = self._cut(turn, opening, last)
        if turn.text.strip() not in whole and _MARK not in self._cut(Turn(turn.role, _MARK), opening, last):
            raise ConfigError(f"the chat template drops a lone turn of role {turn.role!r}: put its text elsewhere")
        return whole

    def _cut(self, turn: Turn, opening: bool, last: bool) -> str:
        if turn.role not in ROLES:
            raise ConfigError(f"role={turn.role!r}: use one of {ROLES}")
        if not self.has_template:
            return self._without_template(turn, opening)
        if turn.role == "system" and not self._has_system:
            raise ConfigError("the chat template has no place for a turn of role 'system'")
        if opening:
            rendered = self._render([turn])
            return rendered if rendered is not None else self._front + self._after(turn, last)
        return self._after(turn, last)

    def _after(self, turn: Turn, last: bool) -> str:
        """What the template adds for a turn behind a conversation in which it may stand. last: nothing follows it."""
        talk = [_USER, Turn("assistant", _PLACE)]
        for before in ([_USER], talk) if turn.role == "assistant" else (talk, [_USER]):
            start, both = self._render(before), self._render([*before, turn])
            if start is not None and both is not None and both.startswith(start):
                inner = None if last or turn.role != "assistant" else self._followed(start, [*before, turn])
                return both[len(start) :] if inner is None else inner
        raise ConfigError(f"the chat template has no place for a turn of role {turn.role!r}")

    def _followed(self, start: str, turns: list[Turn]) -> str | None:
        """Of turns that go on behind `start`, what the template writes where a user's turn follows; None where that
        cannot be told."""
        whole = self._render([*turns, _USER])
        if whole is None or not whole.startswith(start) or not whole.endswith(self._user):
            return None
        return whole[len(start) : len(whole) - len(self._user)]

    @cached_property
    def _user(self) -> str:
        """A user's turn behind others."""
        return self._after(_USER, last=True)

    @cached_property
    def _has_system(self) -> bool:
        """A template that takes no system turn in front of a user's may take one elsewhere, unawares."""
        return any(self._render([Turn("system", _PLACE), *more]) is not None for more in ([], [_USER]))

    @cached_property
    def _prompt(self) -> str:
        """What the template asks for an answer with, behind a user's turn; "" where it does not."""
        start, asked = self._render([_USER]), self._render([_USER], prompt=True)
        return asked[len(start) :] if start and asked and asked.startswith(start) else ""

    @cached_property
    def _closing(self) -> str:
        """The end token, where the template writes it behind a whole conversation and not behind its turns (Phi-3)."""
        end = str(getattr(self._tokenizer, "eos_token", None) or "")
        one, two = self._rendered([_USER]), self._rendered([_USER, Turn("assistant", _PLACE)])
        if not end or not one or not two or two.startswith(one) or not (one.endswith(end) and two.endswith(end)):
            return ""
        return end if two.startswith(one.removesuffix(end)) else ""

    @cached_property
    def _front(self) -> str:
        """What the template puts in front of the first turn, whoever speaks."""
        rendered, later = self._render([_USER]), self._user
        return rendered[: -len(later)] if rendered and rendered.endswith(later) else ""

    def _render(self, turns: list[Turn], *, prompt: bool = False) -> str | None:
        """The template's text of turns that may go on, or None where it refuses such a conversation."""
        rendered = self._rendered(turns, prompt)
        return rendered if rendered is None or prompt else rendered.removesuffix(self._closing)

    def _rendered(self, turns: list[Turn], prompt: bool = False) -> str | None:
        told = any(turn.text not in (_PLACE, _MARK) for turn in turns)
        if told or TIMED in str(self._tokenizer.chat_template):
            return self._by_template(turns, prompt)
        text: str | None = self._once((*turns, prompt, self._state), lambda: self._by_template(turns, prompt))
        return text

    def _by_template(self, turns: list[Turn], prompt: bool) -> str | None:
        messages = [{"role": t.role, "content": t.text} for t in turns]
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            return text
        except (jinja2.TemplateError, TypeError):  # what a template raises, or does not expect
            return None

    def _without_template(self, turn: Turn, opening: bool) -> str:
        front = getattr(self._tokenizer, "bos_token", None) or "" if opening and self.beginning else ""
        return f"{front}{turn.role.capitalize()}: {turn.text}\n"
