"""What a command line reads and writes, and how it says what went wrong. Knows no commands."""

import io
import sys

from .errors import ConfigError


def prepare() -> None:
    """Before anything is computed: characters that standard output cannot write are replaced, and a closed standard
    input is an empty one. Raises ConfigError where standard output is closed: nobody would see what comes."""
    if sys.stdin is None:
        sys.stdin = io.StringIO()
    if sys.stdout is None:
        raise ConfigError("standard output is closed: send it somewhere, to /dev/null if nobody is to see it")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def line_of(problem: Exception) -> str:
    """What is wrong, in one line that names the file."""
    file, said = getattr(problem, "filename", None), str(problem)
    if file is not None:
        said = f"{file}: {getattr(problem, 'strerror', said)}"
    elif isinstance(problem, UnicodeDecodeError):
        said = f"not UTF-8: {said}"
    return " ".join(said.splitlines())
