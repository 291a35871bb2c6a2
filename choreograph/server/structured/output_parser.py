"""Incremental parsing of answers into reasoning, content and tool calls.

Tool calls are read in two forms: <tool_call>{"name": ..., "arguments": {...}}</tool_call> of Hermes
and Qwen, and the bare JSON {"name": ..., "parameters": {...}} of Llama 3. JSON decides where a call ends,
whatever its strings contain. Text that is no call is content.
"""

import json
import re
import uuid
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .json_scanner import WHITESPACE, JsonScanner, is_json_object

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
THINK_START, THINK_END = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"

_CALL_SEPARATORS = "; \n\t\r"  # between calls of Llama 3

DeltaKind = Literal["reasoning", "content", "tool_call"]

ToolForm = Literal["hermes", "llama3_json"]


class FunctionCall(NamedTuple):
    """One call of a tool."""

    id: str  # unique
    name: str
    arguments: str  # JSON object, as the model wrote it


class OutputDelta(NamedTuple):
    """Next piece of an answer."""

    kind: DeltaKind
    text: str = ""  # of reasoning or content: characters of the answer
    start: int = 0  # of the text in the answer
    call: FunctionCall | None = None  # of a tool call, complete


def to_call(scanner: JsonScanner, source: str, names: frozenset[str]) -> FunctionCall | None:
    """Return the call that a complete JSON object describes, or None."""
    members = scanner.members(source)
    name = members.get("name", "")
    name = json.loads(name) if name.startswith('"') else ""
    if name not in names:
        return None
    arguments = members.get("arguments", members.get("parameters", "{}"))
    if arguments.startswith('"'):  # JSON in a string
        arguments = re.sub("[\ud800-\udfff]", _escape, json.loads(arguments)).strip(WHITESPACE)
    if arguments in ("", "null"):
        arguments = "{}"
    return FunctionCall(f"call_{uuid.uuid4().hex[:24]}", name, arguments) if is_json_object(arguments) else None


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


@dataclass(frozen=True)
class ParserOptions:
    """How the answers of a request are parsed."""

    tool_form: str | None = None  # how the model writes calls; None: no tools
    tool_names: frozenset[str] = frozenset()  # functions that may be called
    thinks: bool = False  # <think> tags hold reasoning
    starts_thinking: bool = False  # the prompt has opened the tag already
    single_call: bool = False  # calls after the first are dropped


class OutputParser:
    """Incremental parser of one answer."""

    def __init__(self, options: ParserOptions) -> None:
        self._form, self._names, self._single_call = options.tool_form, options.tool_names, options.single_call
        self._thinks = options.thinks and not options.starts_thinking  # the tag may follow
        self._state: Literal["start", "thinking", "content", "call", "call_end", "separator"] = "start"
        if options.starts_thinking:
            self._state = "thinking"
        elif not self._starts:
            self._state = "content"
        self._pending = ""
        self._offset = 0  # of `_pending` in the answer
        self._scanner = JsonScanner()  # of the call
        self._json_start = 0  # in `_pending`
        self._skips_newlines = False  # at the start of what follows
        self.num_calls = 0

    @property
    def is_transparent(self) -> bool:
        """True if the next text is content, which `feed` returns unchanged."""
        return self._state == "content" and self._form != "hermes" and not self._pending and not self._skips_newlines

    @property
    def may_reason(self) -> bool:
        """True if reasoning may follow."""
        return self._state == "thinking" or (self._state == "start" and self._thinks)

    @property
    def _starts(self) -> list[str]:
        """Texts at the start of an answer that decide what follows."""
        return [THINK_START] * self._thinks + [PYTHON_TAG, "{"] * (self._form == "llama3_json")

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
            self._drop(len(self._pending) - len(self._pending.lstrip("\n")))
            self._skips_newlines = not self._pending
        if not self._pending:
            return False
        match self._state:
            case "start":
                return self._choose_state(is_last)
            case "thinking":
                if not self._emit_until(THINK_END, "reasoning", deltas, is_last):
                    return False
                self._thinks, self._skips_newlines = False, True
                self._state = "start" if self._starts else "content"
                return True
            case "content":
                if self._form != "hermes":
                    self._emit("content", len(self._pending), deltas)
                    return False
                return self._emit_until(CALL_START, "content", deltas, is_last)
            case "call":
                return self._scan_call(deltas, is_last)
            case "call_end":
                return self._skip_call_end(is_last)
            case "separator":
                return self._skip_separators(is_last)

    def _drop(self, length: int) -> None:
        self._pending = self._pending[length:]
        self._offset += length

    def _emit(self, kind: DeltaKind, length: int, deltas: list[OutputDelta]) -> None:
        if length:
            deltas.append(OutputDelta(kind, self._pending[:length], self._offset))
            self._drop(length)

    def _choose_state(self, is_last: bool) -> bool:
        """Decide by its first characters what follows."""
        text, starts = self._pending.lstrip(), self._starts
        start = next((start for start in starts if text.startswith(start)), None)
        if start == "{":
            self._expect_call(len(self._pending) - len(text))
        elif start is not None:
            self._drop(len(self._pending) - len(text) + len(start))
            self._skips_newlines = True
            if start == THINK_START:
                self._state = "thinking"
            else:
                self._expect_call(0)
        elif not is_last and (not text or any(start.startswith(text) for start in starts)):
            return False
        else:
            self._state = "content"
        return True

    def _emit_until(self, tag: str, kind: DeltaKind, deltas: list[OutputDelta], is_last: bool) -> bool:
        """Emit the text before a tag; True if the tag follows.

        A tag of reasoning is dropped. That of a call stays, with the newlines before it, until the call is complete.
        """
        text = self._pending
        end = text.find(tag)
        is_found = end >= 0
        if not is_found:
            num_held = 0 if is_last else next(n for n in range(len(tag) - 1, -1, -1) if text.endswith(tag[:n]))
            end = len(text) - num_held
        num_newlines = 0
        if tag == CALL_START and not (is_last and not is_found):
            num_newlines = end - len(text[:end].rstrip("\n"))
        self._emit(kind, end - num_newlines, deltas)
        if is_found and tag == CALL_START:
            self._expect_call(num_newlines + len(tag))
        elif is_found:
            self._drop(len(tag))
        return is_found

    def _expect_call(self, position: int) -> None:
        """Scan a call whose JSON starts in the pending text."""
        self._state, self._scanner, self._json_start = "call", JsonScanner(), position

    def _scan_call(self, deltas: list[OutputDelta], is_last: bool) -> bool:
        scanner, start = self._scanner, self._json_start
        scanner.feed(self._pending, start + scanner.num_chars)
        if scanner.status == "open" and not is_last:
            return False
        end = start + scanner.num_chars
        call = to_call(scanner, self._pending[start:end], self._names) if scanner.status == "complete" else None
        if call is None:  # tags inside what was scanned open no call: each character is scanned once
            self._state = "content"
            self._emit("content", end, deltas)
            return True
        if not (self._single_call and self.num_calls):
            self.num_calls += 1
            deltas.append(OutputDelta("tool_call", call=call))
        self._drop(end)
        self._state = "call_end" if self._form == "hermes" else "separator"
        return True

    def _skip_call_end(self, is_last: bool) -> bool:
        text = self._pending.lstrip(WHITESPACE)
        if text.startswith(CALL_END):
            self._drop(len(self._pending) - len(text) + len(CALL_END))
        elif CALL_END.startswith(text):  # may go on, or was cut
            if is_last:
                self._drop(len(self._pending))
            return False
        self._state, self._skips_newlines = "content", True
        return True

    def _skip_separators(self, is_last: bool) -> bool:
        text = self._pending.lstrip(_CALL_SEPARATORS)
        if text.startswith("{"):
            self._expect_call(len(self._pending) - len(text))
        elif text:
            self._state = "content"
        elif is_last:
            self._drop(len(self._pending))
        return bool(text)
