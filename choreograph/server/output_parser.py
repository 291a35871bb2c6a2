"""Incremental parsing of answers into reasoning, content and tool calls.

Tool calls are read in two forms: <tool_call>{"name": ..., "arguments": {...}}</tool_call> of Hermes
and Qwen, and the bare JSON {"name": ..., "parameters": {...}} of Llama 3. Text that does not parse as a
call is content.
"""

import json
import uuid
from typing import Any, Literal, NamedTuple

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
THINK_START, THINK_END = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"

DeltaKind = Literal["reasoning", "content", "tool_call"]


class FunctionCall(NamedTuple):
    """One call of a tool."""

    id: str  # unique
    name: str
    arguments: str  # JSON object


class OutputDelta(NamedTuple):
    """Next piece of an answer."""

    kind: DeltaKind
    text: str = ""  # of reasoning or content
    call: FunctionCall | None = None  # of a tool call, complete


def parse_call(text: str, names: frozenset[str]) -> FunctionCall | None:
    """Return the tool call that a JSON text describes, or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _call_of(value, names)


def _call_of(value: Any, names: frozenset[str]) -> FunctionCall | None:
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict):
        return None
    return FunctionCall(f"call_{uuid.uuid4().hex[:24]}", value["name"], json.dumps(arguments, ensure_ascii=False))


class OutputParser:
    """Incremental parser of one answer.

    Args:
        tool_form: how the model writes calls; None: no tools.
        tool_names: functions that may be called.
        thinks: <think> tags hold reasoning.
        starts_thinking: the prompt has opened the tag already.
        single_call: calls after the first are dropped.
    """

    def __init__(
        self,
        tool_form: str | None = None,
        tool_names: frozenset[str] = frozenset(),
        *,
        thinks: bool = False,
        starts_thinking: bool = False,
        single_call: bool = False,
    ) -> None:
        self._form, self._names, self._thinks, self._single_call = tool_form, tool_names, thinks, single_call
        self._state: Literal["start", "thinking", "content", "call", "json"] = "start"
        self._pending = ""
        self._skips_newlines = False  # at the start of what follows
        self._newlines = ""  # before the last tag
        self.num_calls = 0
        if starts_thinking:
            self._state = "thinking"

    @property
    def is_transparent(self) -> bool:
        """True if the next text is content, which `feed` returns unchanged."""
        return self._state == "content" and self._form != "hermes" and not self._pending and not self._skips_newlines

    def feed(self, text: str) -> list[OutputDelta]:
        """Parse the next text, except what may start a tag."""
        self._pending += text
        return self._parse(is_last=False)

    def finish(self) -> list[OutputDelta]:
        """Parse what was held back."""
        return self._parse(is_last=True)

    def _parse(self, *, is_last: bool) -> list[OutputDelta]:
        deltas: list[OutputDelta] = []
        while self._advance(deltas, is_last):
            pass
        return deltas

    def _advance(self, deltas: list[OutputDelta], is_last: bool) -> bool:
        """Parse up to the next state; False if text is missing."""
        if self._skips_newlines:
            self._pending = self._pending.lstrip("\n")
            self._skips_newlines = not self._pending
        if self._state == "start":
            return self._choose_state(is_last)
        if self._state == "thinking":
            if self._emit_until(THINK_END, "reasoning", deltas, is_last):
                self._state, self._skips_newlines, self._thinks = "start", True, False
                return True
            return False
        if self._state == "content":
            if self._form != "hermes":
                return self._emit_until(None, "content", deltas, is_last)
            if self._emit_until(CALL_START, "content", deltas, is_last):
                self._state = "call"
                return True
            return False
        if self._state == "call":
            body, end, rest = self._pending.partition(CALL_END)
            if not end and not is_last:
                return False
            self._emit_call(body, f"{self._newlines}{CALL_START}{body}{end}", deltas)
            self._pending, self._state = rest, "content"
            return bool(rest)
        return self._parse_json(deltas, is_last)

    def _choose_state(self, is_last: bool) -> bool:
        """Decide by its first characters what follows."""
        text = self._pending.lstrip()
        starts = [THINK_START] * self._thinks + [PYTHON_TAG] * (self._form == "llama3_json")
        for start in starts:
            if text.startswith(start):
                self._pending, self._skips_newlines = text[len(start) :], True
                self._state = "thinking" if start == THINK_START else "json"
                return True
        if not is_last and (not text or any(start.startswith(text) for start in starts)):
            return False
        self._state = "json" if self._form == "llama3_json" and text.startswith("{") else "content"
        return bool(self._pending)

    def _emit_until(self, tag: str | None, kind: DeltaKind, deltas: list[OutputDelta], is_last: bool) -> bool:
        """Emit the text before a tag; True if the tag follows."""
        text, found, rest = self._pending.partition(tag) if tag else (self._pending, "", "")
        if not found and tag and not is_last:
            num_held = next((n for n in range(min(len(tag), len(text)), 0, -1) if text.endswith(tag[:n])), 0)
            kept = text[: len(text) - num_held]
            kept = kept.rstrip("\n") if tag == CALL_START else kept
            text, rest = kept, text[len(kept) :]
        if found == CALL_START:
            self._newlines = text[len(text.rstrip("\n")) :]
            text = text.rstrip("\n")
        if text:
            deltas.append(OutputDelta(kind, text))
        self._pending = rest
        return bool(found)

    def _emit_call(self, body: str, source: str, deltas: list[OutputDelta]) -> None:
        call = parse_call(body, self._names)
        if call is None:
            deltas.append(OutputDelta("content", source))
        else:
            self._skips_newlines = True
            self._emit_calls([call], deltas)

    def _emit_calls(self, calls: list[FunctionCall], deltas: list[OutputDelta]) -> None:
        if self._single_call:
            calls = calls[: 1 - self.num_calls]
        self.num_calls += len(calls)
        deltas += [OutputDelta("tool_call", call=call) for call in calls]

    def _parse_json(self, deltas: list[OutputDelta], is_last: bool) -> bool:
        """Parse calls of Llama 3: JSON objects separated by semicolons, nothing else."""
        if not is_last:
            return False
        text, calls = self._pending.strip(), list[FunctionCall]()
        decoder, position = json.JSONDecoder(), 0
        try:
            while position < len(text):
                value, position = decoder.raw_decode(text, position)
                call = _call_of(value, self._names)
                if call is None:
                    raise ValueError("not a call")
                calls.append(call)
                while position < len(text) and text[position] in "; \n":
                    position += 1
        except (ValueError, RecursionError):
            calls = []
        if calls:
            self._emit_calls(calls, deltas)
        elif self._pending:
            deltas.append(OutputDelta("content", self._pending))
        self._pending = ""
        return False
