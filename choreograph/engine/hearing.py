"""Who watches what is generated. Owns the rows that are not heard yet; knows no step and no cache.

Hearers are others' code: they hear of a step when all of it is published, so that none of them can leave it half done.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import CallFailed, ChoreographError
from .call import Call, State

if TYPE_CHECKING:
    from torch import Tensor


class Hearing:
    """Every row is heard once, in the order of the steps. fail: ends a call with an error."""

    def __init__(self, fail: Callable[[Call, ChoreographError], None]) -> None:
        self._fail = fail
        self._unheard: deque[tuple[Call, Tensor]] = deque()

    def note(self, call: Call) -> None:
        """Keeps the row behind the token that a call is about to take, if anybody watches."""
        generation = call.generation
        if generation is not None and generation.watch is not None and generation.next_row is not None:
            self._unheard.append((call, generation.next_row))

    def tell(self) -> None:
        """Lets the hearers hear; a call whose hearer raises fails, alone."""
        while self._unheard:
            call, row = self._unheard.popleft()
            if call.state not in (State.FAILED, State.CANCELLED):
                self._tell_one(call, row)

    def _tell_one(self, call: Call, row: "Tensor") -> None:
        assert call.generation is not None and call.generation.watch is not None
        try:
            call.generation.watch(row)
        except Exception as problem:
            self._fail(call, failure(call, "what watches it raised", problem))


def failure(call: Call, what: str, problem: Exception) -> CallFailed:
    """What a reader of the call is told; the problem is its cause."""
    failed = CallFailed(f"message {call.id}: {what} {type(problem).__name__}: {problem}")
    failed.__cause__ = problem
    return failed
