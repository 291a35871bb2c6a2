"""Incremental check of one JSON object, which finds where it ends."""

import json
import re
from typing import Literal

WHITESPACE = " \t\n\r"

_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE_RUN = re.compile(rf"[{WHITESPACE}]*")

_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}

_DIGITS = "0123456789"

# RFC 8259: state of a number and the next character's class ("0", "1" for other digits) to the next state
_NUMBERS = {
    "minus": {"0": "zero", "1": "integer"},
    "zero": {".": "point", "e": "exponent"},
    "integer": {"0": "integer", "1": "integer", ".": "point", "e": "exponent"},
    "point": {"0": "fraction", "1": "fraction"},
    "fraction": {"0": "fraction", "1": "fraction", "e": "exponent"},
    "exponent": {"+": "sign", "-": "sign", "0": "power", "1": "power"},
    "sign": {"0": "power", "1": "power"},
    "power": {"0": "power", "1": "power"},
}
_COMPLETE_NUMBERS = ("zero", "integer", "fraction", "power")

State = Literal[
    "start", "first_key", "key", "colon", "first_item", "value", "after", "string", "escape", "hex", "number", "literal"
]


class JsonScanner:
    """Scanner of one JSON object whose text arrives in pieces.

    The grammar is that of RFC 8259: no NaN, no control characters in strings. Nesting needs no recursion.
    """

    def __init__(self) -> None:
        self.status: Literal["open", "complete", "broken"] = "open"
        self.num_chars = 0  # scanned and valid
        self._members: list[tuple[int, int, int, int]] = []  # [start, end) of the key and the value of each
        self._state: State = "start"
        self._stack: list[str] = []  # brackets that are open
        self._is_key = False  # the string is a key
        self._number, self._rest = "", ""  # state of the number; rest of the literal or digits of an escape
        self._key_start, self._key, self._start = 0, (0, 0), 0  # of the member: its key, and the start of its value

    def feed(self, text: str, position: int = 0) -> None:
        """Scan `text` from a position.

        Stops at the end of the object and before the first invalid character.
        """
        base = self.num_chars - position
        while self.status == "open" and position < len(text):
            if self._state == "string":
                run = _STRING_RUN.match(text, position)
                position = run.end() if run is not None else position
                if position == len(text):
                    break
            elif self._state in ("start", "first_key", "key", "colon", "first_item", "value", "after"):
                run = _SPACE_RUN.match(text, position)
                position = run.end() if run is not None else position
                if position == len(text):
                    break
            if not self._step(text[position], base + position):
                continue  # the same character again, after the end of a number
            position += self.status != "broken"
        self.num_chars = base + position

    def members(self, source: str) -> dict[str, str]:
        """Return the values of a complete object by key, as text.

        Args:
            source: text of the object.
        """
        return {json.loads(source[start:end]): source[first:last] for start, end, first, last in self._members}

    def _step(self, char: str, offset: int) -> bool:
        """Read one character; False to read it again."""
        state = self._state
        if state == "string":
            if char == '"':
                self._end_string(offset + 1)
            elif char == "\\":
                self._state = "escape"
            else:
                self.status = "broken"
        elif state == "escape":
            self._rest, self._state = "", "hex" if char == "u" else "string"
            if char not in '"\\/bfnrtu':
                self.status = "broken"
        elif state == "hex":
            self._rest += char
            if char not in "0123456789abcdefABCDEF":
                self.status = "broken"
            elif len(self._rest) == 4:
                self._state = "string"
        elif state == "literal":
            if char != self._rest[0]:
                self.status = "broken"
            else:
                self._rest = self._rest[1:]
                if not self._rest:
                    self._end_value(offset + 1)
        elif state == "number":
            kind = "0" if char == "0" else "1" if char in _DIGITS else "e" if char in "eE" else char
            following = _NUMBERS[self._number].get(kind)
            if following is not None:
                self._number = following
            elif self._number in _COMPLETE_NUMBERS:
                self._end_value(offset)
                return False
            else:
                self.status = "broken"
        else:
            self._read_structure(char, offset)
        return True

    def _read_structure(self, char: str, offset: int) -> None:
        """Read a bracket, a separator or the start of a value."""
        state = self._state
        if state == "start" and char == "{":
            self._open(char)
        elif (state == "first_key" and char == "}") or (state == "first_item" and char == "]"):
            self._close(offset + 1)
        elif state in ("first_key", "key") and char == '"':
            self._state, self._is_key = "string", True
            if len(self._stack) == 1:
                self._key_start = offset
        elif state == "colon" and char == ":":
            self._state = "value"
        elif state == "after" and char == ",":
            self._state = "key" if self._stack[-1] == "{" else "value"
        elif state == "after" and char == {"{": "}", "[": "]"}[self._stack[-1]]:
            self._close(offset + 1)
        elif state in ("first_item", "value"):
            self._open_value(char, offset)
        else:
            self.status = "broken"

    def _open_value(self, char: str, offset: int) -> None:
        if len(self._stack) == 1:
            self._start = offset
        if char in "{[":
            self._open(char)
        elif char == '"':
            self._state, self._is_key = "string", False
        elif char in _LITERALS:
            self._state, self._rest = "literal", _LITERALS[char]
        elif char == "-" or char in _DIGITS:
            self._state, self._number = "number", {"-": "minus", "0": "zero"}.get(char, "integer")
        else:
            self.status = "broken"

    def _open(self, bracket: str) -> None:
        self._stack.append(bracket)
        self._state = "first_key" if bracket == "{" else "first_item"

    def _close(self, end: int) -> None:
        self._stack.pop()
        if self._stack:
            self._end_value(end)
        else:
            self.status = "complete"

    def _end_string(self, end: int) -> None:
        if not self._is_key:
            self._end_value(end)
            return
        self._state = "colon"
        if len(self._stack) == 1:
            self._key = self._key_start, end

    def _end_value(self, end: int) -> None:
        self._state = "after"
        if len(self._stack) == 1:
            self._members.append((*self._key, self._start, end))


def is_json_object(text: str) -> bool:
    """Return whether a text is one JSON object, with whitespace around it."""
    scanner = JsonScanner()
    scanner.feed(text)
    return scanner.status == "complete" and not text[scanner.num_chars :].strip(WHITESPACE)
