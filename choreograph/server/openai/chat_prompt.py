"""Rendering of chats to token ids, cut at the ends of messages.

A chat is rendered once: the template reports where its messages begin. Cost is linear in the text; a chat that
cannot fit is refused before it is rendered, or before all of it is tokenized.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ...api.chat import ChatTemplate, Turn
from ...errors import ConfigError, InvalidRequestError
from ...models.template_sandbox import ChatRejectedError, RenderedChat, TemplateLimitError
from ..api_errors import context_exceeded
from .chat_turns import ChatTurn, ChatTurnDict, SystemTurns, foldings, parse_arguments, tools_as_text

_TOOL_NAME, _PROBES = "choreograph_probe", ("choreograph probe", "choreograph sample")

_CONTENT_END = "\u2063end\u2063 "  # after a text whose place in the prompt is looked for

# variables of templates that the server sets, and options of transformers' `apply_chat_template`
RESERVED_VARIABLES = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("tokenizer", "conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "raise_exception", "strftime_now"),
    )
)


MAX_SEGMENTS = 64  # of a chat: each is read by all after it, so their cost grows with the square


@dataclass(frozen=True)
class Segment:
    """Tokens of one message, or of several that are not separable."""

    tokens: tuple[int, ...]
    answer_key: str | None = None  # content and tool calls of an assistant message


@dataclass(frozen=True)
class ChatPrompt:
    """Rendered chat, whole and cut at the ends of messages."""

    tokens: list[int]  # of the whole prompt
    segments: list[Segment] = field(default_factory=list)  # without the header
    header: list[int] = field(default_factory=list)  # generation prompt of the answer
    footer: list[int] = field(default_factory=list)  # what the template writes after an answer
    header_text: str = ""  # generation prompt
    offsets: tuple[int | None, ...] = ()  # position of every segment; empty: one after the other
    message_ends: tuple[int, ...] = ()  # messages of the request up to the end of every segment

    def limit_segments(self) -> "ChatPrompt":
        """Return the prompt with at most MAX_SEGMENTS segments or groups.

        The groups stay the same while a chat grows, until their size doubles.
        """
        size = 1
        while -(-len(self.segments) // size) > MAX_SEGMENTS:
            size *= 2
        if size == 1:
            return self
        segments = list[Segment]()
        for start in range(0, len(self.segments), size):
            group = self.segments[start : start + size]
            segments += [_join(group)] if len(group) == size else group
        return replace(self, segments=segments, message_ends=())

    def fit_pages(self, num_pages: int, page_size: int) -> "ChatPrompt":
        """Return the prompt with the first segments joined, if it must be.

        Every segment takes whole pages, so many short messages may need more than their tokens do.

        Args:
            num_pages: for the segments.
        """
        sizes = [len(segment.tokens) for segment in self.segments]
        num_joined, num_joined_tokens, left = 0, 0, sum(-(-size // page_size) for size in sizes)
        while left - (-num_joined_tokens // page_size) > num_pages and num_joined < len(sizes):
            num_joined_tokens += sizes[num_joined]
            left -= -(-sizes[num_joined] // page_size)
            num_joined += 1
        if num_joined < 2:
            return self
        segments = [_join(self.segments[:num_joined]), *self.segments[num_joined:]]
        return replace(self, segments=segments, message_ends=())


def _join(segments: Sequence[Segment]) -> Segment:
    return Segment(tuple(itertools.chain.from_iterable(segment.tokens for segment in segments)))


def answer_key(content: str | None, tool_calls: Sequence[Mapping[str, Any]]) -> str:
    """Return what identifies an assistant message that a client sends back.

    Whitespace around it and the form of its arguments may change on the way.
    """
    functions = [call.get("function") or {} for call in tool_calls]
    calls = [[function.get("name"), parse_arguments(function.get("arguments"))] for function in functions]
    return json.dumps([(content or "").strip(), calls], sort_keys=True)


class ChatRenderer:
    """Prompts of chats, in forms that the template accepts, with tools and cuts between messages."""

    def __init__(self, chat_template: ChatTemplate) -> None:
        self._template = chat_template
        self._tokenizer = chat_template.tokenizer

    @cached_property
    def template_text(self) -> str:
        """Text of the chat template, or of all templates of the tokenizer."""
        template = getattr(self._tokenizer, "chat_template", None) or ""
        return template if isinstance(template, str) else "\n".join(map(str, dict(template).values()))

    @cached_property
    def knows_tools(self) -> bool:
        """True if the template writes tool definitions into the prompt."""
        tool = {"type": "function", "function": {"name": _TOOL_NAME, "description": "x", "parameters": {}}}
        return self._writes([("user", "x")], [_TOOL_NAME], [tool])

    @cached_property
    def _system_turns(self) -> SystemTurns:
        """Places of system turns that the template accepts."""
        first, second = (("system", text) for text in _PROBES)
        question, answer = ("user", "x"), ("assistant", "y")
        return SystemTurns(
            first=self._writes([first, question], _PROBES[:1]),
            alone=self._writes([first], _PROBES[:1]),
            several=self._writes([first, second, question], _PROBES),
            later=self._writes([first, question, answer, second, question], _PROBES)
            and self._writes([question, answer, second, question], _PROBES[1:]),
        )

    def _writes(self, turns: Sequence[tuple[str, str]], texts: Sequence[str], tools: Any = None) -> bool:
        """Return whether the template accepts a chat and writes some texts."""
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            rendered = self._template.render(messages, add_generation_prompt=True, tools=tools).text
        except (ChatRejectedError, TemplateLimitError):
            return False
        return all(text in rendered for text in texts)

    def check_size(self, messages: Sequence[object], max_tokens: int, param: str) -> None:
        """Refuse a chat of more messages than the context has tokens.

        Args:
            param: field that the messages come from, for errors.

        Raises:
            ApiError: if the chat has too many messages.
        """
        if len(messages) > max_tokens:
            raise context_exceeded(max_tokens, param, f"sent {len(messages):,} messages, which have more")

    def tokenize(
        self, text: str, *, opening: bool = False, max_tokens: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """Tokenize text.

        Args:
            opening: add the tokenizer's BOS token.
            max_tokens: refuse a much longer text, without tokenizing all of it. The result may still be longer.
            param: field that the text comes from, for errors.

        Raises:
            ApiError: if the text is too long.
        """
        if max_tokens is not None:
            self.check_length(text, max_tokens, param)
        return self._template.encode_text(text, opening=opening)

    def check_length(self, text: str, max_tokens: int, param: str) -> None:
        """Refuse a text that certainly has too many tokens, without tokenizing all of it."""
        if self._template.is_longer(text, max_tokens):
            raise context_exceeded(max_tokens, param, f"sent a text of {len(text):,} characters, which has more")

    def prompt(
        self,
        turns: Sequence[ChatTurnDict],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        with_segments: bool = False,
        max_tokens: int | None = None,
        param: str = "messages",
    ) -> ChatPrompt:
        """Render a chat to token ids.

        Args:
            variables: further variables of the template.
            continue_final_message: end with the last message's text, without generation prompt.
            with_segments: cut the prompt at the ends of messages.
            max_tokens: refuse a much longer chat, without tokenizing all of it. The result may still be longer.
            param: field that the messages come from, for errors.

        Raises:
            InvalidRequestError: if the template rejects the chat.
            ApiError: if the chat is too long.
        """
        if max_tokens is not None:
            self.check_size(turns, max_tokens, param)
        variables = dict(variables or {})
        special_tokens = getattr(self._tokenizer, "special_tokens_map", {})
        for name in variables:
            if name in RESERVED_VARIABLES or name in special_tokens:
                raise InvalidRequestError(f"chat_template_kwargs: {name!r} is set by the server; leave it out")
        chat: Sequence[ChatTurn] = [_chat_turn(turn, index) for index, turn in enumerate(turns)]
        if not self.knows_tools:
            chat = tools_as_text(chat, tools)
        native_tools = list(tools) if tools and self.knows_tools else None
        options: dict[str, Any] = {"tools": native_tools, "variables": variables}
        if continue_final_message:
            chat, rendered = self._render_open(chat, param, options)
        else:
            options["add_generation_prompt"] = add_generation_prompt
            chat, rendered = self._render(chat, param, options)
        tokens = self.tokenize(rendered.text, max_tokens=max_tokens, param=param)
        if not with_segments:
            return ChatPrompt(tokens)
        texts, keys, ends = _cut(rendered, chat)
        starts = [turn.index for turn in chat] + [len(turns)]
        *segments, header = self._template.encode_texts(texts)
        return ChatPrompt(
            tokens,
            [Segment(tuple(ids), key) for ids, key in zip(segments, keys, strict=True)],
            header,
            self._footer,
            texts[-1],
            message_ends=tuple(starts[end] for end in ends),
        )

    def _render_open(
        self, turns: Sequence[ChatTurn], param: str, options: Mapping[str, Any]
    ) -> tuple[Sequence[ChatTurn], RenderedChat]:
        """Render a chat up to the end of the last message's text."""
        content = turns[-1].fields["content"]
        marked: Sequence[ChatTurn] = [*turns[:-1], turns[-1].with_fields(content=content + _CONTENT_END)]
        marked, rendered = self._render(marked, param, options)
        text, separator, rest = rendered.text.rpartition(_CONTENT_END.rstrip())
        if not separator or content.strip() not in text:
            raise InvalidRequestError(
                "continue_final_message: the chat template changes the last message; leave it out"
            )
        # as transformers: a template that strips the end of the text also strips what precedes it
        text = text if rest.startswith(" ") else text.rstrip()
        return marked, RenderedChat(text, rendered.ends)

    @cached_property
    def _footer(self) -> list[int]:
        """Tokens that the template writes after an answer."""
        try:
            return self._template.open_turn(Turn("assistant", ""), opening=False)[1]
        except ConfigError:  # no place for an answer that others follow
            return []

    def _render(
        self, turns: Sequence[ChatTurn], param: str, options: Mapping[str, Any]
    ) -> tuple[Sequence[ChatTurn], RenderedChat]:
        """Return the first form that the template accepts, and its rendering."""
        for folded in foldings(turns, self._system_turns):
            messages = [turn.fields for turn in folded]
            try:
                return folded, self._template.render(messages, **options)
            except ChatRejectedError as exc:
                reason, index = str(exc), exc.message_index
            except TemplateLimitError as exc:
                raise InvalidRequestError(f"{param}: {exc}: send fewer or shorter messages") from None
        if index is None:
            index = self._first_rejected(messages, options)
        turn = folded[index]
        place = f"{param}[{turn.index}]" if param == "messages" else param
        raise InvalidRequestError(
            f"{place}: the chat template rejects message {turn.index} of the chat, of role {turn.role!r}: {reason}"
        )

    def _first_rejected(self, messages: Sequence[ChatTurnDict], options: Mapping[str, Any]) -> int:
        """Return the index of the first message that the template rejects.

        Renders log2(messages) times.
        """
        first, last = 0, len(messages) - 1
        while first < last:
            middle = (first + last) // 2
            try:
                self._template.render(messages[: middle + 1], **options)
                first = middle + 1
            except (ChatRejectedError, TemplateLimitError):
                last = middle
        return first


def _chat_turn(turn: ChatTurnDict, index: int) -> ChatTurn:
    is_answer = turn["role"] == "assistant"
    return ChatTurn(turn, index, answer_key(turn["content"], turn.get("tool_calls") or ()) if is_answer else None)


def _cut(rendered: RenderedChat, turns: Sequence[ChatTurn]) -> tuple[list[str], list[str | None], list[int]]:
    """Return texts of segments and header; answer keys and turns of segments.

    The last are the numbers of turns up to the end of each segment.
    """
    texts, keys, ends, start, first = list[str](), list[str | None](), list[int](), 0, 0
    for num_turns, end in rendered.ends:
        if start < end < len(rendered.text) and num_turns > first:
            texts.append(rendered.text[start:end])
            keys.append(turns[first].answer_key if num_turns == first + 1 else None)
            ends.append(num_turns)
            start = end
        if start == end:  # turns without text of their own precede the next segment
            first = num_turns
    return [*texts, rendered.text[start:]], keys, ends
