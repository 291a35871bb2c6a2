"""Calls of the package's own functions, counted with `sys.setprofile`; comprehensions count as calls."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import choreograph

PACKAGE = str(Path(choreograph.__file__).parent)


def count_calls(function: Callable[[], Any]) -> Counter[str]:
    """Run `function`; return the number of calls by "file:function"."""
    calls: Counter[str] = Counter()

    def record(frame: Any, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(record)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def files_of(calls: Counter[str]) -> set[str]:
    return {name.partition(":")[0] for name in calls}


def describe(title: str, calls: Counter[str]) -> str:
    """Return the list of calls, most frequent first within each file."""
    lines = [f"{title}: {calls.total()} calls of {len(calls)} functions in {len(files_of(calls))} files"]
    return "\n".join(lines + [f"  {count:3d} {name}" for name, count in sorted(calls.items())])
