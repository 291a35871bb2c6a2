"""Grammars compiled once in another process, before this one compiles them.

llguidance is native code: a chain of a few thousand rules or references overflows its stack, which ends the process.
A grammar that ends the checking process, or takes too long in it, is refused. The process imports nothing else, so it
starts in tens of milliseconds.

Run as a module, this is that process. It reads a line of JSON with the tokenizer, or null, and answers "ready"; then a
grammar a line, and answers each with its error or "".
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ...utils import require

SECONDS = 1.0  # of one check

START_SECONDS = 60.0  # of the process, which may wait for a busy machine

PARSER_LIMITS = {"verbose_errors": False, "step_max_items": 5000}  # a mask takes a tenth of a second at most

STACK_BYTES = 64 << 20  # of threads that compile grammars; pages that are not used take no memory

_COMMAND = (sys.executable, "-m", "choreograph.server.structured.grammar_check")


@contextmanager
def large_stacks(num_bytes: int = STACK_BYTES) -> Iterator[None]:
    """Start threads inside the block with stacks for compiling grammars."""
    previous = threading.stack_size(num_bytes)
    try:
        yield
    finally:
        threading.stack_size(previous)


class GrammarChecker:
    """Process that checks grammars.

    It is started on first use, and again after it ended.

    Args:
        tokenizer: keyword arguments of `llguidance.LLTokenizer`: the first mask is computed too. None: grammars are
            compiled alone.
    """

    def __init__(self, seconds: float = SECONDS, tokenizer: Mapping[str, Any] | None = None) -> None:
        self._seconds, self._tokenizer = seconds, tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False  # it has read the tokenizer
        self._was_asked = False  # it ran when the last grammar was written
        self._lock = threading.Lock()  # one grammar at a time

    def validate(self, grammar: str) -> str:
        """Return what is wrong with a grammar; "" if it compiles.

        Args:
            grammar: as `LLMatcher.grammar_from_...` returns it.
        """
        with self._lock:
            process = self._running_process()
            answer = self._ask(process, grammar, self._seconds)
            if answer is None and not self._was_asked:  # it ended before: a timer may have been late
                process = self._running_process()
                answer = self._ask(process, grammar, self._seconds)
            if answer is not None:
                return answer
            is_late = process.wait() == -signal.SIGKILL
            self._running_process()  # the next grammar does not wait for its start
        if is_late:
            return f"takes longer than {self._seconds:g} s to compile: use a smaller one"
        return "nests too deeply to compile: use fewer rules or references that lead from one to the next"

    def _running_process(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._close_process()
            self._process = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            self._is_ready = False
        return self._process

    def _ask(self, process: "subprocess.Popen[bytes]", grammar: str, seconds: float) -> str | None:
        """Return the answer of the process, or None if it ended."""
        self._was_asked = False
        try:
            if not self._is_ready:
                self._is_ready = self._exchange(process, self._tokenizer, START_SECONDS) != b""
            self._was_asked = process.poll() is None
            line = self._exchange(process, grammar, seconds)
        except OSError:
            return None
        return str(json.loads(line)) if line.endswith(b"\n") else None

    def _exchange(self, process: "subprocess.Popen[bytes]", value: object, seconds: float) -> bytes:
        """Write a value and read a line, or end the process."""
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            self._write(process, value)
            return process.stdout.readline()
        finally:
            timer.cancel()

    @staticmethod
    def _write(process: "subprocess.Popen[bytes]", value: object) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(value).encode() + b"\n")
        process.stdin.flush()

    def _close_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not written yet
                    pipe.close()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._close_process()


CHECKER = GrammarChecker()  # of this process; its own process ends with this one's pipe


def _check_lines() -> None:
    llguidance = require("llguidance", "serve")
    limits = llguidance.LLParserLimits(**PARSER_LIMITS)
    options = json.loads(sys.stdin.buffer.readline() or "null")
    tokenizer = None if options is None else llguidance.LLTokenizer(**options)

    def answer(text: str) -> None:
        sys.stdout.buffer.write(json.dumps(text).encode() + b"\n")
        sys.stdout.buffer.flush()

    answer("ready")
    for line in sys.stdin.buffer:
        grammar = json.loads(line)
        error = llguidance.LLMatcher.validate_grammar(grammar, limits=limits)
        if not error and tokenizer is not None:
            matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
            matcher.compute_bitmask()
            error = matcher.get_error() if matcher.is_error() else ""
        answer(error)


def main() -> None:
    """Check the grammars of the standard input.

    The thread has half of the stack of those that compile them.
    """
    with large_stacks(STACK_BYTES // 2):
        thread = threading.Thread(target=_check_lines)
        thread.start()
    thread.join()


if __name__ == "__main__":
    main()
