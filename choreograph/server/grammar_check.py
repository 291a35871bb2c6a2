"""Grammars compiled once in another process, before this one compiles them.

llguidance is native code: a chain of a few thousand rules or references overflows its stack, which ends the process.
A grammar that ends the checking process, or takes too long in it, is refused. The process imports nothing else, so it
starts in tens of milliseconds.

Run as a module, this is that process: it reads a grammar a line as JSON, and answers each with its error or "".
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..utils import require

SECONDS = 1.0  # of one check

PARSER_LIMITS = {"verbose_errors": False, "step_max_items": 10_000}  # a mask takes at most a tenth of a second

STACK_BYTES = 64 << 20  # of threads that compile grammars; pages that are not used take no memory

_COMMAND = (sys.executable, "-m", "choreograph.server.grammar_check")


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
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # one grammar at a time

    def validate(self, grammar: str) -> str:
        """Return what is wrong with a grammar; "" if it compiles.

        Args:
            grammar: as `LLMatcher.grammar_from_...` returns it.
        """
        with self._lock:
            process = self._running_process()
            assert process.stdin is not None and process.stdout is not None
            timer = threading.Timer(self._seconds, process.kill)
            timer.start()
            try:
                process.stdin.write(json.dumps(grammar).encode() + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:
                answer = b""
            finally:
                timer.cancel()
            if answer.endswith(b"\n"):
                error: str = json.loads(answer)
                return error
            is_late = process.wait() == -9
            self._close_process()
        if is_late:
            return f"takes longer than {self._seconds:g} s to compile: use a smaller one"
        return "nests too deeply to compile: use fewer rules or references that lead from one to the next"

    def _running_process(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._close_process()
            self._process = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        return self._process

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
    for line in sys.stdin.buffer:
        error = llguidance.LLMatcher.validate_grammar(json.loads(line), limits=limits)
        sys.stdout.buffer.write(json.dumps(error).encode() + b"\n")
        sys.stdout.buffer.flush()


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
