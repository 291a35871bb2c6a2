"""Rendering of chats to token ids, cut at the ends of messages.

Templates that know neither tools nor the role `tool` get them as text, in the form of Hermes and
Qwen: definitions in the system message, calls in <tool_call> and results in <tool_response> tags.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jinja2

from ..engine.text import ChatTemplate, Turn
from ..errors import ConfigError, InvalidRequestError
from ..models.template_sandbox import render_chat

_TOOL_NAME = "choreograph_probe"

_CONTENT_END = "\u2063end\u2063 "  # after a text whose place in the prompt is looked for

TOOL_PROMPT = """# Tools

You may call one or more functions to assist with the user query.
You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

ChatTurnDict = dict[str, Any]  # role, content, tool_calls, name, as templates read them


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


def answer_key(content: str | None, tool_calls: Sequence[Mapping[str, Any]]) -> str:
    """Return what identifies an assistant message that a client sends back.

    Whitespace around it and the form of its arguments may change on the way.
    """
    calls = []
    for call in tool_calls:
        function = call.get("function") or {}
        arguments = function.get("arguments")
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append([function.get("name"), arguments])
    return json.dumps([(content or "").strip(), calls], sort_keys=True)


class ChatRenderer:
    """Chat template of one tokenizer, with tools and cuts between messages."""

    def __init__(self, chat_template: ChatTemplate) -> None:
        self._template = chat_template
        self._tokenizer = chat_template.tokenizer

    @cached_property
    def template_text(self) -> str:
        template = getattr(self._tokenizer, "chat_template", None)
        return template if isinstance(template, str) else json.dumps(template or "")

    @cached_property
    def knows_tools(self) -> bool:
        """True if the template writes tool definitions into the prompt."""
        tool = {"type": "function", "function": {"name": _TOOL_NAME, "description": "x", "parameters": {}}}
        try:
            return _TOOL_NAME in self._render([{"role": "user", "content": "x"}], True, [tool], {})
        except InvalidRequestError:
            return False

    def tokenize(self, text: str, *, opening: bool = False) -> list[int]:
        """Tokenize text; `opening` adds the tokenizer's BOS token."""
        return self._template.encode_text(text, opening=opening)

    def prompt(
        self,
        turns: Sequence[ChatTurnDict],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        with_segments: bool = False,
    ) -> ChatPrompt:
        """Render a chat to token ids.

        Args:
            variables: further variables of the template.
            continue_final_message: end with the last message's text, without generation prompt.
            with_segments: cut the prompt at the ends of messages, which renders it once a message.

        Raises:
            InvalidRequestError: if the template rejects the chat.
        """
        variables = dict(variables or {})
        for name in {"messages", "tokenizer"} & variables.keys():
            raise InvalidRequestError(f"chat_template_kwargs: {name!r} is set by the server; leave it out")
        turns = [
            turn | {"answer_key": answer_key(turn["content"], turn.get("tool_calls") or ())}
            if turn["role"] == "assistant"
            else turn
            for turn in turns
        ]
        if not self.knows_tools:
            turns = _tools_as_text(turns, tools)
        native_tools = list(tools) if tools and self.knows_tools else None
        if continue_final_message:
            text = self._render_open(turns, native_tools, variables)
        else:
            text = self._render(turns, add_generation_prompt, native_tools, variables)
        tokens = self.tokenize(text)
        if not with_segments:
            return ChatPrompt(tokens)
        segments, end = list[Segment](), 0
        for count in range(1, len(turns) + 1):
            try:
                start_text = self._render(turns[:count], False, native_tools, variables)
            except InvalidRequestError:
                continue  # the next cut includes this message
            if end < len(start_text) < len(text) and text.startswith(start_text):
                tokens_of_turn = tuple(self.tokenize(text[end : len(start_text)]))
                segments.append(Segment(tokens_of_turn, turns[count - 1].get("answer_key")))
                end = len(start_text)
        header = text[end:]
        return ChatPrompt(tokens, segments, self.tokenize(header), self._footer, header)

    def _render_open(self, turns: Sequence[ChatTurnDict], tools: Any, variables: Any) -> str:
        """Render a chat up to the end of the last message's text."""
        content = turns[-1]["content"]
        marked = [*turns[:-1], turns[-1] | {"content": content + _CONTENT_END}]
        text, separator, rest = self._render(marked, False, tools, variables).rpartition(_CONTENT_END.rstrip())
        if not separator or content.strip() not in text:
            raise InvalidRequestError(
                "continue_final_message: the chat template changes the last message; leave it out"
            )
        # as transformers: a template that strips the end of the text also strips what precedes it
        return text if rest.startswith(" ") else text.rstrip()

    @cached_property
    def _footer(self) -> list[int]:
        """Tokens that the template writes after an answer."""
        try:
            return self._template.open_turn(Turn("assistant", ""), opening=False)[1]
        except ConfigError:  # no place for an answer that others follow
            return []

    def _render(self, turns: Sequence[ChatTurnDict], add_generation_prompt: bool, tools: Any, variables: Any) -> str:
        if not self._template.has_template:
            bos = self._tokenizer.bos_token if self._template.bos_ids else ""
            lines = "".join(f"{turn['role'].capitalize()}: {turn['content']}\n" for turn in turns)
            return bos + lines + ("Assistant:" if add_generation_prompt else "")
        options = {"add_generation_prompt": add_generation_prompt, "tools": tools, **variables}
        try:
            return render_chat(self._tokenizer, turns, **options)
        except (jinja2.TemplateError, TypeError, ValueError) as exc:
            folded = _fold_system(turns)
            if folded is None:
                raise InvalidRequestError(f"messages: the chat template rejects this chat: {exc}") from None
            return self._render(folded, add_generation_prompt, tools, variables)


def _fold_system(turns: Sequence[ChatTurnDict]) -> list[ChatTurnDict] | None:
    """Return the chat without system message, whose text the user message gets."""
    if len(turns) < 2 or turns[0]["role"] != "system" or turns[1]["role"] != "user":
        return None
    return [turns[1] | {"content": f"{turns[0]['content']}\n\n{turns[1]['content']}"}, *turns[2:]]


def _tools_as_text(turns: Sequence[ChatTurnDict], tools: Sequence[Mapping[str, Any]]) -> list[ChatTurnDict]:
    """Write tools, calls and results as text of ordinary messages."""
    result: list[ChatTurnDict] = []
    for turn in turns:
        content = turn["content"]
        calls = [
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            for call in turn.get("tool_calls") or ()
        ]
        parts = [content] * bool(content) + [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
        if turn["role"] == "tool":
            text = f"<tool_response>\n{content}\n</tool_response>"
            if result and result[-1].get("is_tool_result"):
                result[-1]["content"] += "\n" + text
                continue
            result.append({"role": "user", "content": text, "is_tool_result": True})
        else:
            result.append({**turn, "content": "\n".join(parts)} if calls else dict(turn))
    if tools:
        prompt = TOOL_PROMPT.format(tools="\n".join(json.dumps(tool) for tool in tools))
        if result and result[0]["role"] == "system":
            result[0] = result[0] | {"content": f"{result[0]['content']}\n\n{prompt}"}
        else:
            result.insert(0, {"role": "system", "content": prompt})
    return result
