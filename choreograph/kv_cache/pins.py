"""Pins: entries that stay on the device for a time."""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from .entry import KVEntry

_ChangeOwner = Callable[[KVEntry, tuple[str, object]], None]  # adds or removes an owner of an entry


class PinTable:
    """Pins: owners of entries that are removed automatically when they expire."""

    def __init__(self, acquire: _ChangeOwner, release: _ChangeOwner, clock: Callable[[], float]) -> None:
        self.clock = clock  # returns monotonic seconds
        self._acquire, self._release = acquire, release
        self.expiry: dict[tuple[KVEntry, object], float] = {}  # seconds of the clock, infinite for no expiry
        self._next: list[
            tuple[float, int, tuple[KVEntry, object]]
        ] = []  # heap of finite ones, stale where `expiry` differs
        self._new_number = count().__next__  # orders pins of equal expiry
        self._by_session: dict[object, dict[tuple[KVEntry, object], None]] = {}  # by the first item of the owner

    def pin(self, entry: KVEntry, owner: object, seconds: float | None = None) -> None:
        """Keep an entry on the device for `seconds`, or until unpinned."""
        seconds = math.inf if seconds is None else seconds
        until = self.expiry[entry, owner] = seconds if seconds == math.inf else self.clock() + seconds
        if until < math.inf:
            heappush(self._next, (until, self._new_number(), (entry, owner)))
        if isinstance(owner, tuple):
            self._by_session.setdefault(owner[0], {})[entry, owner] = None
        self._acquire(entry, ("pin", owner))

    def unpin(self, entry: KVEntry, owner: object) -> None:
        if self.expiry.pop((entry, owner), None) is None:
            return
        if isinstance(owner, tuple):
            pins = self._by_session[owner[0]]
            del pins[entry, owner]
            if not pins:
                del self._by_session[owner[0]]
        self._release(entry, ("pin", owner))

    def unpin_session(self, session_id: int) -> None:
        """Remove the pins whose owner is a tuple that starts with `session_id`."""
        for entry, owner in list(self._by_session.get(session_id, ())):
            self.unpin(entry, owner)

    def expire(self) -> None:
        """Remove the pins whose time is over."""
        if self._first_expiry() < math.inf:  # a clock shared by processes costs a broadcast
            now = self.clock()
            while self._first_expiry() <= now:
                self.unpin(*self._next[0][2])

    @property
    def next_expiry(self) -> float | None:
        """Seconds until the next pin expires; None if none does."""
        until = self._first_expiry()
        return None if until == math.inf else max(0.0, until - self.clock())

    def _first_expiry(self) -> float:
        """Return the first expiry in clock seconds, infinite without one."""
        while self._next and self.expiry.get(self._next[0][2]) != self._next[0][0]:
            heappop(self._next)
        return self._next[0][0] if self._next else math.inf

    def __len__(self) -> int:
        return len(self.expiry)

    def check(self) -> None:
        """Check that every pin is an owner of its entry."""
        assert self._first_expiry() == min(self.expiry.values(), default=math.inf), "a pin is missing in the heap"
        for entry, owner in self.expiry:
            assert ("pin", owner) in entry.owners, "a pin is not among the owners of its entry"
