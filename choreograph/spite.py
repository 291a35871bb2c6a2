"""Ends things in spite of what goes wrong with some of them. Knows nothing of what it ends."""

from collections.abc import Callable, Iterable


def call_all(calls: Iterable[Callable[[], object]]) -> list[Exception]:
    """Calls all of them, even if one raises; returns what was raised."""
    problems: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as problem:
            problems.append(problem)
    return problems


def close_behind(close: Callable[[], object], problem: BaseException | None) -> None:
    """Closes what a block used that was left by a problem, or by none. What closing raises does not take the problem's
    place: it is told as a note on it."""
    try:
        close()
    except Exception as another:
        if problem is None:
            raise
        problem.add_note(f"Closing raised another: {another!r}")
