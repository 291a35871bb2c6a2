"""Entry point of `choreograph` and `python -m choreograph`."""

import sys
from typing import Any

from .errors import MissingDependencyError
from .utils import require


def main() -> None:
    """Run the command line; exit with code 2 without extra `cli`."""
    try:
        require("rich", "cli")
        require("typer", "cli")
    except MissingDependencyError as exc:
        print(f"error: {exc}", file=sys.stderr)
        raise SystemExit(2) from None
    from .cli.main import main as run_command_line
    from .cli.serve_command import DASHBOARD_TABS

    DASHBOARD_TABS["Playground"] = _open_playground
    run_command_line()


def _open_playground(service: Any) -> Any:
    from .lab.playground import open_playground  # loads the workflows

    return open_playground(service)


if __name__ == "__main__":
    main()
