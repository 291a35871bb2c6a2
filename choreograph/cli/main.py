"""Standard streams and the error handling of all commands."""

import io
import sys
from collections.abc import Callable

from ..console import make_console, print_text
from ..errors import ChoreographError, ConfigError


def setup_stdio() -> None:
    """Make standard streams safe for any text, and a closed input empty.

    Raises ConfigError if standard output is closed, before anything is computed.
    """
    if sys.stdin is None:
        sys.stdin = io.StringIO()
    if sys.stdout is None:
        raise ConfigError("standard output is closed: redirect it to a file or to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def run_app(app: Callable[[], None]) -> None:
    """Run a command; an error is one line and exit code 1."""
    try:
        setup_stdio()
        app()
    except (ChoreographError, OSError, UnicodeDecodeError) as exc:
        file, text = getattr(exc, "filename", None), str(exc)
        if file is not None:
            text = f"{file}: {getattr(exc, 'strerror', text)}"
        elif isinstance(exc, UnicodeDecodeError):
            text = f"not UTF-8: {text}"
        console = make_console(stderr=True)
        console.print("[red]error[/red]: ", end="")
        print_text(console, " ".join(text.splitlines()))
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
