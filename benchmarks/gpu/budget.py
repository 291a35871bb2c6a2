"""A budget of seconds for all parts: each gets a share of what is left when it begins, and what it does not use goes to
those behind it. Pure but for the clock."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Clock = Callable[[], float]


@dataclass(frozen=True)
class Allowance:
    """The time of one part."""

    deadline: float
    clock: Clock = time.perf_counter

    @property
    def left(self) -> float:
        return self.deadline - self.clock()

    def rounds(self, max_rounds: int) -> Iterator[int]:
        """Numbers of rounds, as long as one more fits. The first one is always made."""
        taken: list[float] = []
        while has_time_for_round(taken, self.left, max_rounds):
            began = self.clock()
            yield len(taken)
            taken.append(self.clock() - began)


def has_time_for_round(taken: Sequence[float], left: float, max_rounds: int) -> bool:
    """Whether a round follows those that took so many seconds each."""
    return not taken or (len(taken) < max_rounds and max(taken) <= left)


class Budget:
    """shares: of every part, in order, relative to each other."""

    def __init__(self, seconds: float, shares: Mapping[str, float], clock: Clock = time.perf_counter) -> None:
        self._deadline, self._clock = clock() + seconds, clock
        self._shares = dict(shares)

    @property
    def left(self) -> float:
        return self._deadline - self._clock()

    def open(self, part: str, min_seconds: float = 0.0) -> Allowance | None:
        """The part's time: its share, or `least` seconds if that is more; None where not even those are left."""
        share = self._shares[part] / sum(self._shares.values())
        del self._shares[part]
        if self.left < min_seconds:
            return None
        return Allowance(self._clock() + max(min_seconds, share * self.left), self._clock)
