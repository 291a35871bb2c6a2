"""Brings what a call sees to the device: loads what lower tiers keep and rebuilds what was dropped. Owns the plan for
the one call that is doing so; knows the store, not models.

What a call sees is gathered depth first: before something dropped is rebuilt, what *it* saw is gathered, as deep as
that goes. Only one call at a time may hold a part of what it needs, so no two can wait for each other's room; where
there is too little, the plan keeps what it has, and goes on when running calls have ended. Where none runs and what was
gathered first is in the way of what has to be rebuilt, it goes and comes back afterwards, a bounded number of times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import CacheFull, CallFailed, NeverFits, RoomLater
from ..kv.encoding import Encoding, Sight
from ..kv.store import Store

_MEND = "shorten the call (max_tokens counts) or raise CacheConfig.tokens"


@dataclass
class _Frame:
    """What has to be there before `target` (None: the call itself) can be computed. added: held for it alone."""

    needed: list[Encoding]
    target: Encoding | None
    added: list[Encoding] = field(default_factory=list)


class Residence:
    """rebuild: starts to compute an encoding that has pages but no content. running: whether calls compute, which will
    give room when they end."""

    def __init__(self, store: Store, rebuild: Callable[[Encoding], None], running: Callable[[], bool]) -> None:
        self._store = store
        self._rebuild = rebuild
        self._running = running
        self._owner: int | None = None
        self._patience = 0
        self._held: dict[int, Encoding] = {}

    def bring(self, call: int, sights: Sequence[Sight], capacity: int = 0, *, band: bool = False) -> None:
        """Everything that the sights show is on the device, or on its way, and held until `done`; or CacheFull, and
        what could be had is held until the next attempt. capacity: tokens that the call itself needs room for; band:
        where some layers have room alone."""
        self._refuse_what_no_cache_holds(sights, capacity, band)
        if self._owner != call:
            self.done(self._owner)
            self._patience = 2 * len(sights) + 8
        self._owner = call
        before, self._held = self._held, {}
        try:
            self._gather(sights)
        finally:
            for encoding in before.values():
                if encoding.id not in self._held:
                    self._store.let_go(encoding, ("plan", call))

    def _refuse_what_no_cache_holds(self, sights: Sequence[Sight], capacity: int, of_band: bool) -> None:
        """What a call sees and makes has to be on the device at once."""
        arena = self._store.arena
        for band in (False, True):
            seen = {s.encoding.id: len(s.encoding.tokens) for s in sights if (s.encoding.layers is not None) == band}
            own = capacity if band == of_band else 0
            pages = sum(map(arena.pages_for, (*seen.values(), own)))
            if pages > arena.size(band):
                raise NeverFits(
                    f"needs room for {sum(seen.values())} tokens that it sees and {own} of its own, in whole pages "
                    f"{pages * arena.page_size}; the whole "
                    f"{'room for shared layers' if band else 'cache'} holds {arena.size(band) * arena.page_size}: "
                    + ("share(tokens=...) sets it" if band else _MEND)
                )

    def done(self, call: int | None) -> None:
        """The call has its own holds now, or has ended."""
        if call is None or call != self._owner:
            return
        held, self._held, self._owner = self._held, {}, None
        for encoding in held.values():
            self._store.let_go(encoding, ("plan", call))

    def _gather(self, sights: Sequence[Sight]) -> None:
        stack = [_Frame(_seen(sights), None)]
        while stack:
            frame = stack[-1]
            self._hold(frame)
            missing = _next_missing(frame.needed)
            if missing is not None and missing.lost:
                raise CallFailed("what it sees came from another process and is lost: make it again")
            if missing is not None and not missing.copies:
                stack.append(_Frame(_seen(missing.context), missing))
                continue
            try:
                if missing is None:
                    self._finish(frame)
                    stack.pop()
                else:
                    self._store.load(missing)
            except RoomLater:
                raise
            except CacheFull:
                if not self._make_way(stack):
                    raise

    def _hold(self, frame: _Frame) -> None:
        for encoding in frame.needed:
            if encoding.id not in self._held:
                self._held[encoding.id] = encoding
                frame.added.append(encoding)
                self._store.hold(encoding, ("plan", self._owner))

    def _make_way(self, stack: Sequence[_Frame]) -> bool:
        """Lets go of what was gathered for later while something is rebuilt that needs its room."""
        if not self._patience or self._running():
            return False
        now = {e.id for e in stack[-1].needed} | {frame.target.id for frame in stack if frame.target is not None}
        later = [e for f in stack[:-1] for e in f.needed if e.id in self._held and e.id not in now and e.whole]
        for encoding in later:
            if self._held.pop(encoding.id, None) is not None:
                self._store.let_go(encoding, ("plan", self._owner))
        self._patience -= bool(later)
        return bool(later)

    def _finish(self, frame: _Frame) -> None:
        if frame.target is None:
            return
        self._store.give_pages(frame.target)
        self._rebuild(frame.target)  # it holds what it sees by itself
        for encoding in frame.added:
            if self._held.pop(encoding.id, None) is not None:
                self._store.let_go(encoding, ("plan", self._owner))


def _seen(sights: Sequence[Sight]) -> list[Encoding]:
    return list({sight.encoding.id: sight.encoding for sight in sights}.values())


def _next_missing(needed: list[Encoding]) -> Encoding | None:
    """What is gathered first stays in the way of the rest: what has to be rebuilt from what it saw, which needs most
    room beside it, comes before what is loaded, or rebuilt by itself."""
    missing = [encoding for encoding in needed if not encoding.resident]
    return min(missing, key=lambda one: bool(one.copies) or not one.context, default=None)
