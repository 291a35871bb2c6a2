"""Who keeps which encoding on the device, and until when. Knows neither pages nor calls."""

import math
from collections.abc import Callable

from .encoding import Encoding

Hold = Callable[[Encoding, tuple[str, object]], None]


class Pins:
    """A pin is a holder of an encoding that goes by itself when its time has come. clock: seconds, rising."""

    def __init__(self, hold: Hold, let_go: Hold, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._hold, self._let_go = hold, let_go
        self._until: dict[tuple[Encoding, object], float | None] = {}

    def pin(self, encoding: Encoding, owner: object, seconds: float | None = None) -> None:
        """Keeps an encoding on the device for an owner, for some seconds or, as for an endless time, until unpinned."""
        self._until[encoding, owner] = None if seconds is None or seconds == math.inf else self.clock() + seconds
        self._hold(encoding, ("pin", owner))

    def unpin(self, encoding: Encoding, owner: object) -> None:
        if self._until.pop((encoding, owner), 0) != 0:
            self._let_go(encoding, ("pin", owner))

    def unpin_where(self, whose: Callable[[object], bool]) -> None:
        for encoding, owner in [pin for pin in self._until if whose(pin[1])]:
            self.unpin(encoding, owner)

    def expire(self) -> None:
        """Takes back those whose time is over."""
        timed = [(pin, until) for pin, until in self._until.items() if until is not None]
        now = self.clock() if timed else 0.0  # a clock that processes share costs an exchange
        for (encoding, owner), until in timed:
            if until <= now:
                self.unpin(encoding, owner)

    @property
    def next_end(self) -> float | None:
        """Seconds until the next one goes by itself; None if none will."""
        times = [until for until in self._until.values() if until is not None]
        return max(0.0, min(times) - self.clock()) if times else None

    def __len__(self) -> int:
        return len(self._until)

    def check(self) -> None:
        for encoding, owner in self._until:
            assert ("pin", owner) in encoding.holders, "a pin holds nothing"
