"""Turns of a chat in the forms that chat templates accept.

Templates that know neither tools nor the role `tool` get them as text, in the form of Hermes and
Qwen: definitions in the system message, calls in <tool_call> and results in <tool_response> tags.
Templates that accept few orders of roles get turns that are joined: see `foldings`.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..request_body import walk

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

MAX_ARGUMENT_DEPTH = 64  # of nested values in the arguments of a call; deeper ones stay text

ChatTurnDict = dict[str, Any]  # role, content, tool_calls, name, as templates read them


@dataclass(frozen=True)
class ChatTurn:
    """Turn of a chat, made of one or several messages."""

    fields: ChatTurnDict
    index: int  # of its first message in the request
    answer_key: str | None = None  # of an assistant message, unless it is joined with others

    @property
    def role(self) -> str:
        return str(self.fields["role"])

    def with_fields(self, **fields: Any) -> "ChatTurn":
        return replace(self, fields=self.fields | fields)


@dataclass(frozen=True)
class SystemTurns:
    """Places of system turns whose text a template writes."""

    first: bool  # before other turns
    alone: bool  # without other turns
    several: bool  # one after the other at the start
    later: bool  # between other turns

    def accept(self, turns: Sequence[ChatTurn]) -> bool:
        """Return whether the template writes all system turns of a chat."""
        roles = [turn.role for turn in turns]
        num_leading = next((index for index, role in enumerate(roles) if role != "system"), len(roles))
        if num_leading and not (self.accept_first(turns) and (self.several or num_leading == 1)):
            return False
        return self.later or "system" not in roles[num_leading:]

    def accept_first(self, turns: Sequence[ChatTurn]) -> bool:
        """Return whether the template writes one system turn before the others."""
        return self.first if any(turn.role != "system" for turn in turns) else self.alone


def foldings(turns: Sequence[ChatTurn], places: SystemTurns) -> Iterator[Sequence[ChatTurn]]:
    """Yield a chat as it is, then in forms for stricter templates.

    Leading system turns become one; if the template has no place for it, a user turn. Later ones become user turns.
    Turns of the same role are joined where roles must alternate.
    """
    if places.accept(turns):
        yield turns
    for keeps_system in (True, False) if places.accept_first(turns) else (False,):
        folded = _fold_system(turns, keeps_system)
        yield folded
        yield [_join(run) for run in _runs(folded, ("user", "assistant"))]


def _fold_system(turns: Sequence[ChatTurn], keeps_system: bool) -> list[ChatTurn]:
    first, *others = _runs(turns, ("system",))
    head = [_join(first)] if first[0].role == "system" else first
    rest = [turn.with_fields(role="user") if turn.role == "system" else turn for run in others for turn in run]
    if head[0].role == "system" and not keeps_system:
        head = [head[0].with_fields(role="user")]
        if rest and rest[0].role == "user":
            head, rest = [_join([*head, rest[0]])], rest[1:]
    return head + rest


def _runs(turns: Sequence[ChatTurn], roles: Collection[str]) -> list[list[ChatTurn]]:
    """Return a chat in runs of turns of one of these roles.

    Every other turn is a run of its own.
    """
    result: list[list[ChatTurn]] = []
    for turn in turns:
        if result and turn.role in roles and turn.role == result[-1][0].role:
            result[-1].append(turn)
        else:
            result.append([turn])
    return result


def _join(turns: Sequence[ChatTurn]) -> ChatTurn:
    """Return one turn with the texts and the calls of several."""
    if len(turns) == 1:
        return turns[0]
    texts = [turn.fields["content"] for turn in turns if turn.fields["content"]]
    calls = [call for turn in turns for call in turn.fields.get("tool_calls") or ()]
    fields = turns[0].fields | {"content": "\n\n".join(texts)} | ({"tool_calls": calls} if calls else {})
    return ChatTurn(fields, turns[0].index)


def tools_as_text(turns: Sequence[ChatTurn], tools: Sequence[Mapping[str, Any]]) -> list[ChatTurn]:
    """Write tools, calls and results as text of ordinary messages."""
    result: list[ChatTurn] = []
    for run in _runs(turns, ("tool",)):
        if run[0].role == "tool":
            results = [f"<tool_response>\n{turn.fields['content']}\n</tool_response>" for turn in run]
            result.append(ChatTurn({"role": "user", "content": "\n".join(results)}, run[0].index))
        else:
            result.append(_with_calls_as_text(run[0]))
    if tools:
        prompt = TOOL_PROMPT.format(tools="\n".join(map(to_json, tools)))
        if result and result[0].role == "system":
            result[0] = result[0].with_fields(content=f"{result[0].fields['content']}\n\n{prompt}")
        else:
            result.insert(0, ChatTurn({"role": "system", "content": prompt}, 0))
    return result


def _with_calls_as_text(turn: ChatTurn) -> ChatTurn:
    functions = [call["function"] for call in turn.fields.get("tool_calls") or ()]
    if not functions:
        return turn
    calls = [to_json({"name": function["name"], "arguments": function["arguments"]}) for function in functions]
    content = turn.fields["content"]
    parts = [content] * bool(content) + [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return turn.with_fields(content="\n".join(parts))


def to_json(value: Any) -> str:
    """Return JSON as models write it: characters are not escaped."""
    return json.dumps(value, ensure_ascii=False)


def parse_arguments(arguments: Any) -> Any:
    """Return the arguments of a call, as an object if possible.

    Clients send no arguments in several forms. What is not JSON, or nested too deeply for templates, stays text.
    """
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments, parse_constant=_refuse_number, parse_float=_finite_float)
        if "\\u" in arguments:  # the escape of an unpaired surrogate is no text that a template can write
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return arguments if any(depth >= MAX_ARGUMENT_DEPTH for depth, _ in walk(value)) else value


def _refuse_number(text: str) -> float:
    raise ValueError(text)  # NaN and Infinity


def _finite_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)
