"""Owns every encoding: its pages, who holds it, and how equal work is found again. Knows no calls.

An encoding is held by messages, by calls in flight and by pins. Calls and pins keep it on the device. What only
messages hold, or nobody, may leave: to a lower tier where there is one, else it is dropped. A message's encoding is
then rebuilt from its tokens and context when it is wanted; one that nobody holds is forgotten.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..errors import CacheFull, RoomLater
from ..events import EventLog
from ..types import BASE
from . import audit
from .advice import Counsel
from .arena import Arena
from .beginnings import Beginnings
from .encoding import Encoding, Sight
from .pins import Pins
from .policy import ORDERS
from .prefix import PrefixTree
from .tiers import Tier
from .traffic import Traffic
from .transfers import Mover, mover_for

MOMENT = 0.02  # seconds between two looks at whether a pin has gone
SPARE = 32  # an eviction frees this share of the arena more than it must, so that not every call sorts the idle


class Store:
    """One arena, the encodings in it, and the tiers below it."""

    def __init__(
        self,
        arena: Arena,
        *,
        eviction: str,
        events: EventLog,
        tiers: Sequence[Tier] = (),
        mover: Mover | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.arena = arena
        self.traffic = Traffic(arena, tiers, mover or mover_for(arena.keys[0].device), events)
        self.sleep = sleep
        self._eviction, self._order = eviction, ORDERS[eviction]
        self._events = events
        self._encodings: dict[int, Encoding] = {}
        self._by_key: dict[bytes, Encoding] = {}
        self._trees: dict[str, PrefixTree] = {}
        self._ticks = 0
        self.pins = Pins(self.hold, self.let_go, clock)
        self.counsel = Counsel()
        self.beginnings = Beginnings()

    # -- life ---------------------------------------------------------------------------------------------

    def create(
        self,
        tokens: list[int],
        start: int,
        context: Iterable[Sight],
        *,
        capacity: int,
        holder: tuple[str, object],
        model: str = BASE,
        layers: frozenset[int] | None = None,
    ) -> Encoding:
        """A new encoding with room for `capacity` tokens; makes room if it must, or raises CacheFull. layers: where
        alone it will be computed; None: in all."""
        pages = self._allocate(self.arena.pages_for(capacity), band=layers is not None)
        self._ticks += 1
        encoding = Encoding(
            id=self._ticks,
            tokens=tokens,
            start=start,
            context=tuple(context),
            pages=pages,
            page_size=self.arena.page_size,
            promised=len(tokens),
            used_at=self._ticks,
            model=model,
            layers=layers,
        )
        encoding.holders.add(holder)
        self._encodings[encoding.id] = encoding
        return encoding

    def holds(self, model: str) -> bool:
        """Whether anybody holds what a model computes, or what was computed with sight of it."""
        return audit.holds(self._encodings.values(), model)

    def hold(self, encoding: Encoding, holder: tuple[str, object]) -> None:
        """One holder more. An encoding that was forgotten is known again, without pages."""
        if encoding.id not in self._encodings:
            self._encodings[encoding.id] = encoding
            if encoding.key is not None:
                self.publish(encoding, encoding.key)
        encoding.holders.add(holder)
        encoding.uses += holder[0] != "plan"
        self._touch(encoding)

    def let_go(self, encoding: Encoding, holder: tuple[str, object]) -> None:
        """One holder less; the last one decides between idle and gone. Nothing happens twice."""
        if holder not in encoding.holders:
            return
        encoding.holders.discard(holder)
        self._touch(encoding)
        if not encoding.holders and not (encoding.reusable and encoding.kept):
            self._forget(encoding)

    def trim(self, encoding: Encoding) -> None:
        """Gives back the pages that a finished encoding did not need. What it has stays found wherever it goes."""
        encoding.promised = len(encoding.tokens)
        self.arena.release(encoding.keep_pages(self.arena.pages_for(len(encoding.tokens))))

    def _touch(self, encoding: Encoding) -> None:
        self._ticks += 1
        encoding.used_at = self._ticks

    def _forget(self, encoding: Encoding) -> None:
        """Takes an encoding that nobody holds out of everything; one that moves goes when the transfer has ended."""
        if encoding.moving is not None:
            self.traffic.cancel(encoding)
            return
        if encoding.key is not None and self._by_key.get(encoding.key) is encoding:
            del self._by_key[encoding.key]
        encoding.reusable = False
        self._unhang(encoding)
        self.beginnings.forget(encoding)
        self.traffic.forget(encoding)
        self._free_pages(encoding)
        del self._encodings[encoding.id]

    def _unhang(self, encoding: Encoding) -> None:
        """Takes an encoding off its prefix tree. What hangs on it cannot be found any more either."""
        tree = encoding.tree
        if tree is None:
            return
        for child in reversed(list(tree.below(encoding))):
            tree.forget(child)
            child.reusable = False
            if not child.holders and child.moving is None:
                self._forget(child)
        tree.forget(encoding)
        if tree.empty:
            self._trees.pop(tree.salt, None)

    def _hangs_free(self, encoding: Encoding) -> bool:
        """Whether nobody holds anything that hangs on an encoding."""
        return not encoding.tree or not any(child.holders for child in encoding.tree.below(encoding))

    def _free_pages(self, encoding: Encoding) -> None:
        self.arena.release(encoding.keep_pages(0))
        encoding.encoded = encoding.scheduled = 0

    def drop(self, encoding: Encoding) -> None:
        """Takes the pages of an encoding that was not computed after all. Its tokens and context remain."""
        self._free_pages(encoding)
        if not encoding.holders:
            self._forget(encoding)

    # -- finding equal work -------------------------------------------------------------------------------

    def find(self, key: bytes) -> Encoding | None:
        return self._by_key.get(key)

    def publish(self, encoding: Encoding, key: bytes) -> None:
        """Gives an encoding its name; the first one of a name is the one that others find."""
        encoding.key = key
        if self._by_key.setdefault(key, encoding) is encoding:
            encoding.reusable = True

    def tree(self, salt: str, *, grow: bool = False) -> PrefixTree:
        """What hangs under a name. An empty one is kept only if it is about to `grow`."""
        return self._trees.setdefault(salt, PrefixTree(salt)) if grow else self._trees.get(salt, PrefixTree(salt))

    # -- room ---------------------------------------------------------------------------------------------

    def _movable(self, band: bool) -> Iterator[Encoding]:
        """What could leave the pages that all layers have, or those of the band."""
        for e in self._encodings.values():
            if e.pages and (e.layers is not None) == band and not e.in_use and e.moving is None and e.whole:
                yield e

    def _free(self, band: bool) -> int:
        """Pages that are free, or will be without anybody's doing."""
        return self.arena.free(band) + (0 if band else self.traffic.pages_coming)

    def room(self, band: bool = False) -> int:
        """Pages that are free, or could be made free."""
        return self._free(band) + sum(len(e.pages) for e in self._movable(band))

    def clear_idle(self) -> None:
        """Forgets everything that nobody holds, on every tier."""
        while self.traffic.wait():
            self.settle()
        progress = True
        while progress:
            idle = [e for e in self._encodings.values() if not e.holders and not e.children]
            for encoding in idle:
                self._forget(encoding)
            progress = bool(idle)

    def _allocate(self, pages: int, *, band: bool) -> list[int]:
        if self.arena.free(band) < pages:
            self._make_room(pages, band)
        return self.arena.allocate(pages, band=band)

    def _make_room(self, pages: int, band: bool) -> None:
        arena, room = self.arena, self.room(band)
        if room < pages:
            raise CacheFull(
                f"needs {pages} pages of {arena.page_size} tokens; {arena.free(band)} of {arena.size(band)} are free "
                f"and {room - arena.free(band)} can be evicted: release messages or raise "
                + ("what models may share" if band else "CacheConfig.tokens")
            )
        self._evict(pages, spare=arena.size(band) // SPARE, band=band)
        if arena.free(band) < pages and not self.traffic.moves:
            self._evict(pages, prefixes=True, band=band)  # what hangs on them lies below and cannot make way
        if arena.free(band) < pages:
            kind, why = (
                (RoomLater, "others on their way") if self.traffic.moves else (CacheFull, "the idle rest pinned")
            )
            raise kind(f"needs {pages} pages, {arena.free(band)} free, {why}")

    def _evict(
        self,
        pages: int,
        *,
        spare: int = 0,
        before: Encoding | None = None,
        prefixes: bool = False,
        band: bool = False,
    ) -> None:
        """Sends encodings away until `pages` are free or will be. `before`: only those that the policy gives up before
        this one, and that are not wanted as soon. prefixes: with what hangs on them, not only after it."""
        progress, enough = True, lambda: self._free(band) >= pages + spare
        while progress and not enough():
            progress = False
            candidates = {e.id: e for e in self._movable(band)}
            others = {} if before is None else {before.id: before}
            for one in self._order(map(self.counsel.facts, (candidates | others).values())):
                if enough() or one in others:
                    break
                if one in self._encodings and (before is None or not self.counsel.as_soon(candidates[one], before)):
                    progress |= self._send_away(candidates[one], prefixes)

    def _send_away(self, encoding: Encoding, prefixes: bool) -> bool:
        """Starts what frees an encoding's pages, or frees them; False if neither can be done now."""
        to = "dropped"
        if encoding.copies:
            to = next(iter(encoding.copies))
        elif encoding.layers is None and (encoding.holders or not self.counsel.facts(encoding).varying):
            # what nobody will ask for again is not worth a copy, nor is what is soon made from another's
            tier = self._tier_for(encoding)
            if tier is not None:
                self.traffic.offload(encoding, tier)
                return True
            if any(self.traffic.leaving(one) for one in self.traffic.tiers):
                return False
        needed = encoding.children and not (prefixes and self._hangs_free(encoding))
        if to == "dropped" and (needed or (encoding.holders and not encoding.rebuildable)):
            return False
        self._tell_evicted(encoding, to)
        self._free_pages(encoding)
        if to == "dropped" and not encoding.holders:
            self._forget(encoding)
        return True

    def _tell_evicted(self, encoding: Encoding, to: str) -> None:
        """What left, where to, and what the policy knew of it."""
        known, size = self.counsel.facts(encoding), len(encoding.tokens)
        why = {"policy": self._eviction, "steps": known.steps, "varying": known.varying, "held": known.held}
        self._events.write("evicted", encoding=encoding.id, tokens=size, to=to, **why)

    # -- lower tiers --------------------------------------------------------------------------------------

    def _tier_for(self, encoding: Encoding) -> Tier | None:
        """The highest tier with room for a copy, once what is worth less has left it; None if there is none now."""
        for depth, tier in enumerate(self.traffic.tiers):
            if not self.traffic.takes(tier, encoding):
                continue
            if self._make_tier_room(depth, encoding):
                return tier
            if self.traffic.leaving(tier):
                return None
        return None

    def _make_tier_room(self, depth: int, incoming: Encoding) -> bool:
        tier, size = self.traffic.tiers[depth], len(incoming.tokens)
        if tier.fits(size):
            return True
        wanted = (e for e in self._encodings.values() if tier.name in e.copies and e.moving is None)
        candidates = {e.id: e for e in wanted if e.whole or not e.in_use}  # a call waits for the others
        for one in self._order(map(self.counsel.facts, (candidates | {incoming.id: incoming}).values())):
            if one == incoming.id or tier.fits(size) or self.traffic.leaving(tier) >= size:
                break
            self._leave_tier(depth, candidates[one])
        return tier.fits(size)

    def _leave_tier(self, depth: int, encoding: Encoding) -> None:
        """Gives up one tier's copy: at once where another copy or the device has it, or where no lower tier does."""
        tier, below = self.traffic.tiers[depth], self.traffic.tiers[depth + 1 :]
        elsewhere = encoding.whole or len(encoding.copies) > 1
        lower = None if elsewhere else next((t for t in below if self.traffic.takes(t, encoding)), None)
        if lower is not None and self._make_tier_room(depth + 1, encoding):
            self.traffic.lower(encoding, tier, lower)
            return
        if not elsewhere and (encoding.children or (encoding.holders and not encoding.rebuildable)):
            return
        self.traffic.free(encoding, tier, encoding.copies[tier.name])
        if not elsewhere:
            self._tell_evicted(encoding, "dropped")
            if not encoding.holders:
                self._forget(encoding)

    def give_pages(self, encoding: Encoding) -> None:
        """Room on the device for an encoding that is not there, or CacheFull."""
        assert not encoding.pages
        band = encoding.layers is not None
        encoding.pages = self._allocate(self.arena.pages_for(len(encoding.tokens)), band=band)
        encoding.keep_pages(len(encoding.pages))

    def load(self, encoding: Encoding) -> None:
        """Starts to bring an encoding back from its nearest copy, or raises CacheFull."""
        if encoding.moving is not None:
            raise RoomLater(f"encoding {encoding.id} is on its way to a lower tier")
        self.give_pages(encoding)
        self.traffic.load(encoding)

    def prefetch(self, key: bytes, limit: int) -> bool:
        """Loads what will be wanted, if it waits on a lower tier and only what is wanted later has to leave for it."""
        encoding = self._by_key.get(key)
        if encoding is None or encoding.pages or not encoding.copies or encoding.moving is not None:
            return False
        if self.traffic.loads >= limit:
            return False
        pages = self.arena.pages_for(len(encoding.tokens))
        self._evict(pages, before=encoding)
        if self.arena.free_pages < pages:
            return False
        self._events.write("prefetch", encoding=encoding.id, tokens=len(encoding.tokens))
        self.load(encoding)
        return True

    def settle(self) -> list[Encoding]:
        """Takes note of transfers that have ended and pins that have expired. Returns what could not be loaded: it has
        no pages now, and who waits for it has to be told."""
        failed = []
        for move in self.traffic.ended():
            encoding = move.encoding
            if move.way == "load" and move.transfer.error is None:
                encoding.encoded = encoding.scheduled = len(encoding.tokens)
            elif move.way == "load":
                failed.append(encoding)
                self._free_pages(encoding)
            elif move.way == "offload" and move.transfer.error is None and not encoding.in_use:
                self._tell_evicted(encoding, move.tier.name)
                self._free_pages(encoding)
            if not encoding.holders and not (encoding.reusable and encoding.kept and not move.transfer.cancelled):
                self._forget(encoding)
        self.pins.expire()
        return failed

    @property
    def busy(self) -> bool:
        """Whether room may come without anybody computing: a transfer ends or a pin expires."""
        return bool(self.traffic.moves) or self.pins.next_end is not None

    def wait(self) -> bool:
        """Waits until a transfer has ended, or for a moment if a pin will expire; False if nothing of the kind will."""
        if self.traffic.moves:
            return self.traffic.wait()
        left = self.pins.next_end
        if left is None:
            return False
        self.sleep(min(MOMENT, left))
        return True

    # -- state --------------------------------------------------------------------------------------------

    @property
    def counts(self) -> dict[str, int]:
        """Encodings and pages, held and idle, on every tier."""
        return audit.counts(self._encodings.values(), self.arena)

    def check(self) -> None:
        """Pages are conserved, every page has one encoding, what nobody holds can be found, copies are counted."""
        audit.check(self._encodings, self.arena)
        for key, e in self._by_key.items():
            assert e.key == key and e.id in self._encodings
        self.pins.check()
        self.traffic.check(list(self._encodings.values()))
        for tree in self._trees.values():
            tree.check()
