"""Brings what a call sees to the device: loads what lower tiers keep and rebuilds what was dropped. Owns the plan for
the one call that is doing so; knows the store, not models.

What a call sees is gathered depth first: before something dropped is rebuilt, what *it* saw is gathered, as deep as
that goes. Only one call at a time may hold a part of what it needs, so no two can wait for each other's room; where
there is too little, the plan keeps what it has, and goes on when running calls have ended.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import NeverFits
from ..kv.encoding import Encoding, Sight
from ..kv.store import Store


@dataclass
class _Frame:
    """What has to be there before `target` (None: the call itself) can be computed. added: held for it alone."""

    needed: list[Encoding]
    target: Encoding | None
    added: list[Encoding] = field(default_factory=list)


class Residence:
    """rebuild: starts to compute an encoding that has pages but no content."""

    def __init__(self, store: Store, rebuild: Callable[[Encoding], None]) -> None:
        self._store = store
        self._rebuild = rebuild
        self._owner: int | None = None
        self._held: dict[int, Encoding] = {}

    def bring(self, call: int, sights: Sequence[Sight], capacity: int = 0) -> None:
        """Everything that the sights show is on the device, or on its way, and held until `done`; or CacheFull, and
        what could be had is held until the next attempt. capacity: tokens that the call itself needs room for."""
        self._refuse_what_no_cache_holds(sights, capacity)
        if self._owner != call:
            self.done(self._owner)
        self._owner = call
        before, self._held = self._held, {}
        try:
            self._gather(sights)
        finally:
            for encoding in before.values():
                if encoding.id not in self._held:
                    self._store.let_go(encoding, ("plan", call))

    def _refuse_what_no_cache_holds(self, sights: Sequence[Sight], capacity: int) -> None:
        """What a call sees and makes has to be on the device at once."""
        arena = self._store.arena
        seen = {sight.encoding.id: len(sight.encoding.tokens) for sight in sights}
        if sum(map(arena.pages_for, (*seen.values(), capacity))) > arena.pages:
            raise NeverFits(
                f"needs room for {sum(seen.values())} tokens that it sees and {capacity} of its own; "
                f"the whole cache holds {arena.pages * arena.page_size}: "
                "shorten the call (max_tokens counts) or raise CacheConfig.tokens"
            )

    def done(self, call: int | None) -> None:
        """The call has its own holds now, or has ended."""
        if call is None or call != self._owner:
            return
        held, self._held, self._owner = self._held, {}, None
        for encoding in held.values():
            self._store.let_go(encoding, ("plan", call))

    def _gather(self, sights: Sequence[Sight]) -> None:
        stack = [self._frame(sights, None)]
        while stack:
            frame = stack[-1]
            missing = next(_missing(frame.needed), None)
            if missing is None:
                self._finish(stack.pop())
            elif missing.copies:
                self._store.load(missing)
            else:
                stack.append(self._frame(missing.context, missing))

    def _frame(self, sights: Sequence[Sight], target: Encoding | None) -> _Frame:
        needed = list({sight.encoding.id: sight.encoding for sight in sights}.values())
        frame = _Frame(needed, target)
        for encoding in needed:
            if encoding.id not in self._held:
                self._held[encoding.id] = encoding
                frame.added.append(encoding)
                self._store.hold(encoding, ("plan", self._owner))
        return frame

    def _finish(self, frame: _Frame) -> None:
        if frame.target is None:
            return
        self._store.give_pages(frame.target)
        self._rebuild(frame.target)  # it holds what it sees by itself
        for encoding in frame.added:
            del self._held[encoding.id]
            self._store.let_go(encoding, ("plan", self._owner))


def _missing(needed: list[Encoding]) -> Iterator[Encoding]:
    return (encoding for encoding in needed if not encoding.resident)
