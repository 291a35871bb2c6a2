"""Chat turns rendered with a model's own template, and incremental detokenization.

Turns are cut so that joined turns equal what the template renders. A turn that opens a conversation
includes the template's prefix (the BOS token, a default system prompt); later turns never do. If
the template renders the last answer differently from earlier ones, a complete turn is rendered as
an earlier one, and a turn to be generated as the last.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from ..errors import ConfigError, InvalidTokensError
from ..models.template_sandbox import ChatRejectedError, RenderedChat, TemplateLimitError, render_messages

ROLES = ("system", "user", "assistant", "tool")

_MARKER = "\u2063mark\u2063"

_SAMPLE_TEXT = "x"  # placeholder for any text

MAX_CACHED_CHARS, CACHE_SIZE = 200, 1024  # headers up to this length are cached; number of entries

TIME_FUNCTION = "strftime_now"  # templates that call it depend on the date and are not cached


# texts are measured in slices of so many characters, without the tokens that a cut may add, if they are longer than
# so many characters a token
SLICE_CHARS, CUT_TOKENS, MAX_CHARS_PER_TOKEN = 16_384, 64, 8


@dataclass(frozen=True)
class Turn:
    """One chat turn."""

    role: str  # one of ROLES
    text: str
    opening: bool = True  # False: omit the prefix, though the turn has no parents

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InvalidTokensError(f"text={self.text!r}: a turn holds a string")


@dataclass(frozen=True)
class EncodedTurn(Turn):
    """Turn that was tokenized before."""

    token_ids: tuple[int, ...] = ()  # of the complete turn, or of the header
    footer_ids: tuple[int, ...] = ()  # of a turn to be generated


_SAMPLE_USER_TURN = Turn("user", _SAMPLE_TEXT)


def turns_of(prompt: object) -> tuple[Turn, ...]:
    """Return the chat turns of a prompt; () if it is text or token ids.

    Raises:
        InvalidTokensError: if a list of turns has something else in it.
    """
    if isinstance(prompt, Turn):
        return (prompt,)
    if not isinstance(prompt, (list, tuple)) or not prompt or not isinstance(prompt[0], Turn):
        return ()
    for item in prompt:
        if not isinstance(item, Turn):
            raise InvalidTokensError(f"{item!r:.60} after a chat turn: a list of turns has turns alone")
    return tuple(prompt)


class SpecialTokens(NamedTuple):
    """Special tokens of a tokenizer."""

    by_text: dict[str, int]
    ids: frozenset[int]


class ChatTurns:
    """Constructors of chat turns.

    A turn without parents opens a conversation: it includes the template's prefix, the BOS token
    and often a default system prompt. opening=False omits the prefix.
    """

    def system(self, text: str, *, opening: bool = True) -> Turn:
        return Turn("system", text, opening)

    def user(self, text: str, *, opening: bool = True) -> Turn:
        return Turn("user", text, opening)

    def assistant(self, text: str = "", *, opening: bool = True) -> Turn:
        return Turn("assistant", text, opening)


class ChatTemplate:
    """Chat template of one tokenizer, applied turn by turn."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.caches_texts = True  # False: the time to tokenize a turn reveals no earlier one
        self._cache: dict[Any, Any] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Render a conversation, see `render_messages`; without a template, as lines `Role: text`."""
        if self.has_template:
            return render_messages(
                self.tokenizer, messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
            )
        lines = [f"{message['role'].capitalize()}: {message['content']}\n" for message in messages]
        ends = accumulate(map(len, lines), initial=len(self._bos))
        return RenderedChat(
            self._bos + "".join(lines) + ("Assistant:" if add_generation_prompt else ""), tuple(enumerate(ends))
        )

    @property
    def _bos(self) -> str:
        """Text before a conversation without a template."""
        return (getattr(self.tokenizer, "bos_token", None) or "") if self.bos_ids else ""

    def encode(self, turn: Turn, *, opening: bool, after_system: bool = False) -> list[int]:
        """Tokenize a complete turn: header, text and footer.

        Args:
            opening: the turn opens a conversation.
            after_system: it follows a system turn, which some templates put into the user turn.
        """
        if isinstance(turn, EncodedTurn):
            return list(turn.token_ids)
        return self._tokenize(self._checked_turn(turn, opening, after_system=after_system))

    def open_turn(self, turn: Turn, *, opening: bool, after_system: bool = False) -> tuple[list[int], list[int]]:
        """Return (header, footer) token ids for decoding a turn.

        The header includes the turn's text so far; the footer ends the turn. The header of an answer is
        empty if the template has none.
        """
        if isinstance(turn, EncodedTurn):
            return list(turn.token_ids), list(turn.footer_ids)
        rendered = self._checked_turn(Turn(turn.role, _MARKER), opening, is_last=True, after_system=after_system)
        header, _, footer = rendered.partition(_MARKER)
        # the footer of a turn that others follow, unless the template also writes its header differently then
        earlier = self._checked_turn(Turn(turn.role, _MARKER), opening, after_system=after_system).partition(_MARKER)
        if earlier[0] == header:
            footer = earlier[2]
        if not turn.text and not self.has_template:
            header = header.rstrip(" ")  # the space belongs to the first generated word
        elif not turn.text and turn.role == "assistant":
            if self._generation_prompt:
                start = self._conversation_prefix if opening else self._folded_turn_end if after_system else ""
                header = start + self._generation_prompt
        is_cached = self.caches_texts or not turn.text
        return self._tokenize(header + turn.text, cached=is_cached), self._tokenize(footer, cached=True)

    def encode_turns(
        self, turns: Sequence[Turn], *, opening: bool, after_system: bool = False, opens_last: bool = False
    ) -> list[EncodedTurn]:
        """Tokenize turns that follow each other.

        Args:
            opening: the first turn opens a conversation, unless it says otherwise.
            after_system: the first turn follows a system turn.
            opens_last: the last turn is to be generated: tokenize its header, and its footer.
        """
        encoded: list[EncodedTurn] = []
        for number, turn in enumerate(turns, 1):
            is_open, opening = opens_last and number == len(turns), opening and turn.opening
            footer: list[int] = []
            if is_open:
                ids, footer = self.open_turn(turn, opening=opening, after_system=after_system)
            else:
                ids = self.encode(turn, opening=opening, after_system=after_system)
            encoded.append(EncodedTurn(turn.role, turn.text, turn.opening, tuple(ids), tuple(footer)))
            opening, after_system = False, turn.role == "system"
        return encoded

    def encode_text(self, text: str, *, opening: bool) -> list[int]:
        """Tokenize text without roles, with BOS if it opens a conversation."""
        ids = self._tokenize(text)
        return [*self.bos_ids, *ids] if opening else ids

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Tokenize texts without roles, each by itself, at once."""
        for text in texts:
            _check_characters(text)
        return [list(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []

    def is_longer(self, text: str, max_tokens: int) -> bool:
        """Return whether a text certainly has more tokens than that.

        It is tokenized in slices until the answer is known. Tokens that a cut may have added are not counted: the
        count is a lower bound. False for every text that is not long either.
        """
        if len(text) <= MAX_CHARS_PER_TOKEN * max_tokens:
            return False
        num_tokens = 0
        for start in range(0, len(text), SLICE_CHARS):
            num_tokens += max(0, len(self._tokenize(text[start : start + SLICE_CHARS])) - CUT_TOKENS)
            if num_tokens > max_tokens:
                return True
        return False

    def _tokenize(self, text: str, *, cached: bool = False) -> list[int]:
        _check_characters(text)
        if not text:
            return []
        if not cached or len(text) > MAX_CACHED_CHARS:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return list(self._memoize((text, self._tokenizer_state), lambda: self._tokenize(text)))

    @property
    def _tokenizer_state(self) -> tuple[object, ...]:
        """Mutable settings of the tokenizer, part of every cache key."""
        t = self.tokenizer
        names = ("bos_token", "eos_token", "split_special_tokens")
        size = len(t) if hasattr(t, "__len__") else 0
        return (size, str(getattr(t, "chat_template", None)), *(str(getattr(t, name, None)) for name in names))

    def _memoize(self, key: object, compute: Callable[[], Any]) -> Any:
        if (cached := self._cache.get(key, self)) is not self:
            return cached
        if len(self._cache) >= CACHE_SIZE:
            self._cache.clear()
        result = self._cache[key] = compute()
        return result

    @property
    def has_template(self) -> bool:
        """True if the tokenizer has a chat template.

        Without a template, a turn is a line that no stop token ends.
        """
        return bool(getattr(self.tokenizer, "chat_template", None))

    @cached_property
    def bos_ids(self) -> list[int]:
        """Token ids the tokenizer puts before any text."""
        with_prefix, without = self.tokenizer("a")["input_ids"], self._tokenize("a")
        starts = range(len(with_prefix) - len(without) + 1)
        return next(
            (with_prefix[:start] for start in starts if with_prefix[start : start + len(without)] == without), []
        )

    @cached_property
    def byte_token_ids(self) -> frozenset[int]:
        """Token ids of single bytes (sentencepiece byte fallback)."""
        return frozenset(i for token, i in self.tokenizer.get_vocab().items() if _BYTE_TOKEN.fullmatch(token))

    @property
    def special_tokens(self) -> "SpecialTokens":
        """Special tokens that decoding skips."""
        tokens: SpecialTokens = self._memoize(("special tokens", self._tokenizer_state), self._index_special_tokens)
        return tokens

    def _index_special_tokens(self) -> "SpecialTokens":
        tokenizer = self.tokenizer  # it builds its whole vocabulary for each look-up
        ids = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special]
        texts = zip(tokenizer.convert_ids_to_tokens(ids), ids, strict=True)
        skipped = {text: token for text, token in texts if not tokenizer.decode([token], skip_special_tokens=True)}
        return SpecialTokens(skipped, frozenset(skipped.values()))

    def _checked_turn(self, turn: Turn, opening: bool, is_last: bool = False, after_system: bool = False) -> str:
        rendered = self._render_turn(turn, opening, is_last, after_system)
        if turn.text.strip() not in rendered and _MARKER not in self._render_turn(
            Turn(turn.role, _MARKER), opening, is_last, after_system
        ):
            raise ConfigError(f"the chat template drops a lone turn of role {turn.role!r}: put its text elsewhere")
        return rendered

    def _render_turn(self, turn: Turn, opening: bool, is_last: bool, after_system: bool) -> str:
        if turn.role not in ROLES:
            raise ConfigError(f"role={turn.role!r}: use one of {ROLES}")
        if not self.has_template:
            text = self.render([{"role": turn.role, "content": turn.text}]).text
            return text if opening else text.removeprefix(self._bos)
        if turn.role == "system" and self._folds_system_turn:
            if after_system:
                return f"{turn.text}\n\n"
            user = Turn("user", f"{turn.text}\n\n{_MARKER}")
            folded = self._render_folded(turn.text, _MARKER) if opening else self._turn_suffix(user, is_last)
            return folded.partition(_MARKER)[0]
        if after_system and self._folds_system_turn:
            return self._render_after_folded(turn, is_last)
        if opening:
            rendered = self._render([turn])
            if turn.role == "assistant" and not is_last:
                rendered = self._turn_before_user("", [turn]) or rendered
            return rendered if rendered is not None else self._conversation_prefix + self._turn_suffix(turn, is_last)
        return self._turn_suffix(turn, is_last)

    def _render_after_folded(self, turn: Turn, is_last: bool) -> str:
        """Render a turn after a system turn that opened a user turn."""
        if turn.role != "user":
            return self._folded_turn_end + self._turn_suffix(turn, is_last)
        system_turn = self._render_folded(_SAMPLE_TEXT, _MARKER).partition(_MARKER)[0]
        rendered = self._render_folded(_SAMPLE_TEXT, turn.text)
        if rendered.startswith(system_turn):
            return rendered.removeprefix(system_turn)
        return turn.text.strip() + self._folded_turn_end  # the template strips all of a blank text

    def _turn_suffix(self, turn: Turn, is_last: bool) -> str:
        """Return what the template appends for a turn after other turns.

        Args:
            is_last: no turn follows.
        """
        conversation = [_SAMPLE_USER_TURN, Turn("assistant", _SAMPLE_TEXT)]
        for before in (
            ([_SAMPLE_USER_TURN], conversation) if turn.role == "assistant" else (conversation, [_SAMPLE_USER_TURN])
        ):
            start, both = self._render(before), self._render([*before, turn])
            if start is not None and both is not None and both.startswith(start):
                inner = None if is_last or turn.role != "assistant" else self._turn_before_user(start, [*before, turn])
                return both[len(start) :] if inner is None else inner
        raise ConfigError(
            f"the chat template has no place for a turn of role {turn.role!r}: use another role, or token ids"
        )

    def _turn_before_user(self, prefix: str, turns: list[Turn]) -> str | None:
        """Return the rendering after `prefix` if a user turn follows.

        None if it cannot be determined.
        """
        rendered = self._render([*turns, _SAMPLE_USER_TURN])
        if rendered is None or not rendered.startswith(prefix) or not rendered.endswith(self._later_user_turn):
            return None
        return rendered[len(prefix) : len(rendered) - len(self._later_user_turn)]

    @cached_property
    def _later_user_turn(self) -> str:
        """Rendering of a user turn that follows other turns."""
        return self._turn_suffix(_SAMPLE_USER_TURN, is_last=True)

    @cached_property
    def _folds_system_turn(self) -> bool:
        """True if the template has no separate system turn.

        It renders a system turn inside the next user turn, or rejects it.
        """
        system_turn = Turn("system", _MARKER)
        alone, both = self._render([system_turn]), self._render([system_turn, _SAMPLE_USER_TURN])
        if alone is not None and _MARKER in alone and (both is None or both.startswith(alone)):
            return False
        return self._render([_SAMPLE_USER_TURN]) is not None

    def _render_folded(self, system_text: str, user_text: str) -> str:
        """Render a conversation of a system and a user turn.

        A template without system turns gets the system text as the first lines of the user turn.
        """
        rendered = self._render([Turn("system", system_text), Turn("user", user_text)])
        if rendered is None or system_text.strip() not in rendered:
            rendered = self._render([Turn("user", f"{system_text}\n\n{user_text}")])
        if rendered is None:
            raise ConfigError("the chat template has no place for a turn of role 'user': use token ids")
        return rendered

    @property
    def _folded_turn_end(self) -> str:
        """End of the user turn that a system turn opened, or ""."""
        return self._render_folded(_SAMPLE_TEXT, _MARKER).partition(_MARKER)[2] if self._folds_system_turn else ""

    @cached_property
    def _generation_prompt(self) -> str:
        """Generation prompt after a user turn; "" if there is none."""
        start, prompted = (
            self._render([_SAMPLE_USER_TURN]),
            self._render([_SAMPLE_USER_TURN], add_generation_prompt=True),
        )
        return prompted[len(start) :] if start and prompted and prompted.startswith(start) else ""

    @cached_property
    def _trailing_eos(self) -> str:
        """EOS added after conversations but not after turns (Phi-3)."""
        end = str(getattr(self.tokenizer, "eos_token", None) or "")
        one, two = (
            self._render_with_eos([_SAMPLE_USER_TURN]),
            self._render_with_eos([_SAMPLE_USER_TURN, Turn("assistant", _SAMPLE_TEXT)]),
        )
        if not end or not one or not two or two.startswith(one) or not (one.endswith(end) and two.endswith(end)):
            return ""
        return end if two.startswith(one.removesuffix(end)) else ""

    @cached_property
    def _conversation_prefix(self) -> str:
        """Rendering before the first turn, whatever its role."""
        rendered, later = self._render([_SAMPLE_USER_TURN]), self._later_user_turn
        return rendered[: -len(later)] if rendered and rendered.endswith(later) else ""

    def _render(self, turns: list[Turn], *, add_generation_prompt: bool = False) -> str | None:
        """Render turns that may continue; None if the template rejects them."""
        rendered = self._render_with_eos(turns, add_generation_prompt)
        return rendered if rendered is None or add_generation_prompt else rendered.removesuffix(self._trailing_eos)

    def _render_with_eos(self, turns: list[Turn], add_generation_prompt: bool = False) -> str | None:
        has_user_text = any(turn.text not in (_SAMPLE_TEXT, _MARKER) for turn in turns)
        if has_user_text or TIME_FUNCTION in str(self.tokenizer.chat_template):
            return self._apply_template(turns, add_generation_prompt)
        text: str | None = self._memoize(
            (*turns, add_generation_prompt, self._tokenizer_state),
            lambda: self._apply_template(turns, add_generation_prompt),
        )
        return text

    def _apply_template(self, turns: list[Turn], add_generation_prompt: bool) -> str | None:
        messages = [{"role": t.role, "content": t.text} for t in turns]
        try:
            return self.render(messages, add_generation_prompt=add_generation_prompt).text
        except TemplateLimitError as exc:
            raise ConfigError(f"{exc}: use another template") from None
        except ChatRejectedError:
            return None


_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # a byte of a character without a token (sentencepiece byte fallback)


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidTokensError(
            f"text {text[:60]!r}: {exc.reason} at {exc.start}: replace what is no character"
        ) from None
