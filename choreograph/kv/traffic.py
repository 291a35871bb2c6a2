"""Moves encodings between the device and lower tiers. Owns the transfers under way; knows no policy and no calls.

KVFlow, section 3.2. A transfer only copies; what it means is settled here, in the engine's own thread, when it has
ended. A failed or cancelled one rolls back: what it had reserved is free again and the encoding is where it was.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ..events import EventLog
from .arena import Arena
from .encoding import Encoding
from .tiers import Copy, Tier, Work
from .transfers import Kind, Mover, Transfer

Way = Literal["load", "offload", "lower"]
KINDS: dict[Way, Kind] = {"load": "loading", "offload": "offloading", "lower": "offloading"}


class Elsewhere:
    """Where something came from that nobody here keeps a copy of."""

    name = "elsewhere"

    def free(self, copy: Copy) -> None:
        pass


ELSEWHERE = Elsewhere()


@dataclass(eq=False)
class Move:
    """One transfer and what it is for. copy: the one it reads or makes. source: the tier a lowered copy leaves."""

    way: Way
    encoding: Encoding
    tier: Tier | Elsewhere
    copy: Copy
    transfer: Transfer
    source: Tier | None = None


class Traffic:
    """The tiers below the device, highest first, and what moves between them."""

    def __init__(self, arena: Arena, tiers: Sequence[Tier], mover: Mover, events: EventLog) -> None:
        self.arena = arena
        self.tiers = tuple(tiers)
        self.mover = mover
        self._events = events
        self.moves: list[Move] = []

    @property
    def loads(self) -> int:
        return sum(move.way == "load" for move in self.moves)

    @property
    def pages_coming(self) -> int:
        """Pages of the device that offloads under way will free."""
        return sum(len(m.encoding.pages) for m in self.moves if m.way == "offload" and not m.encoding.in_use)

    def leaving(self, tier: Tier) -> int:
        """Tokens whose room in a tier will be free when they have been lowered."""
        return sum(move.copy.tokens for move in self.moves if move.source is tier)

    def keep_inputs(self, layers: Iterable[int], width: int) -> None:
        """From now on what comes into these layers is kept, on the device and below. Nothing may be moving."""
        assert not self.moves
        self.arena.keep_inputs(layers, width)
        for tier in self.tiers:
            tier.keep_inputs(layers, width)

    def takes(self, tier: Tier, encoding: Encoding) -> bool:
        """Whether a tier could keep a copy, if it had room. What is computed in some layers only is not worth one."""
        sound = encoding.layers is None and tier.name not in encoding.refused
        return sound and tier.ever_fits(len(encoding.tokens))

    def load(self, encoding: Encoding) -> None:
        """Starts to fill the pages that an encoding was given from its nearest copy."""
        tier = next(t for t in self.tiers if t.name in encoding.copies)
        copy = encoding.copies[tier.name]
        self._start(
            Move("load", encoding, tier, copy, self._transfer("load", copy, tier.get(copy, self.arena, encoding.pages)))
        )

    def receive(self, encoding: Encoding, work: Work) -> None:
        """Starts to fill the pages of an encoding with what comes from elsewhere."""
        copy = Copy(ELSEWHERE.name, len(encoding.tokens))
        self._start(Move("load", encoding, ELSEWHERE, copy, self._transfer("load", copy, work)))

    def offload(self, encoding: Encoding, tier: Tier) -> None:
        copy = tier.reserve(len(encoding.tokens))
        work = tier.put(self.arena, encoding.pages, copy)
        self._start(Move("offload", encoding, tier, copy, self._transfer("offload", copy, work)))

    def lower(self, encoding: Encoding, source: Tier, tier: Tier) -> None:
        """From host memory to disk."""
        copy = tier.reserve(len(encoding.tokens))
        work = tier.put(source.arena, encoding.copies[source.name].pages, copy)  # type: ignore[attr-defined]
        self._start(Move("lower", encoding, tier, copy, self._transfer("lower", copy, work), source))

    def _transfer(self, way: Way, copy: Copy, work: Work) -> Transfer:
        layers = len(self.arena.keys)
        return Transfer(KINDS[way], layers, copy.tokens, work.copy_layer, prepare=work.prepare, finish=work.finish)

    def _start(self, move: Move) -> None:
        assert move.encoding.moving is None, f"encoding {move.encoding.id} moves already"
        move.encoding.moving = move.transfer
        self.moves.append(move)
        self.mover.start(move.transfer)

    def ended(self) -> Iterator[Move]:
        """The moves that have ended since the last time, one by one: the next one is under way until it is asked for.
        Copies that they made are the encodings' now; what failed has been rolled back, but for the device pages of a
        load, which are the store's."""
        for move in [move for move in self.moves if move.transfer.ended]:
            self.moves.remove(move)
            move.encoding.moving = None
            self._end(move)
            yield move

    def _end(self, move: Move) -> None:
        error = move.transfer.error
        if error is not None:
            if not (move.way == "load" and move.transfer.cancelled):  # what a load could not read is of no use
                self.free(move.encoding, move.tier, move.copy)
            if move.way != "load" and not move.transfer.cancelled:  # not tried for ever: a disk may be full
                move.encoding.refused.add(move.tier.name)
            self._events.write("failed_transfer", encoding=move.encoding.id, way=move.way, why=repr(error))
            return
        if move.way != "load":
            move.encoding.copies[move.tier.name] = move.copy
        if move.source is not None:
            self.free(move.encoding, move.source, move.encoding.copies[move.source.name])
        kind = {"load": "loaded", "offload": "offloaded", "lower": "lowered"}[move.way]
        self._events.write(kind, encoding=move.encoding.id, tokens=move.copy.tokens, tier=move.tier.name)

    def free(self, encoding: Encoding, tier: Tier | Elsewhere, copy: Copy) -> None:
        """Gives a copy up. A file that the disk does not give back stays, known to nobody, until the tier ends."""
        if encoding.copies.get(tier.name) is copy:
            del encoding.copies[tier.name]
        try:
            tier.free(copy)
        except OSError as problem:
            self._events.write("left_behind", encoding=encoding.id, tokens=copy.tokens, why=repr(problem))

    def forget(self, encoding: Encoding) -> None:
        """Frees every copy; nothing may be moving."""
        assert encoding.moving is None
        for tier in self.tiers:
            if tier.name in encoding.copies:
                self.free(encoding, tier, encoding.copies[tier.name])

    def wait(self) -> bool:
        """Waits for the oldest move; False if there is none."""
        if not self.moves:
            return False
        self.mover.wait(self.moves[0].transfer)
        return True

    def arrivals(self, transfers: Iterable[Transfer]) -> tuple[Callable[[int], None], ...]:
        """Of each transfer, what waits for a layer of it."""
        return tuple(partial(self.mover.wait_for, transfer) for transfer in transfers)

    def cancel(self, encoding: Encoding) -> None:
        if encoding.moving is not None:
            encoding.moving.cancel()

    def close(self) -> None:
        self.mover.close()
        for tier in self.tiers:
            tier.close()

    def check(self, encodings: Sequence[Encoding]) -> None:
        for tier in self.tiers:
            copies = [e.copies[tier.name] for e in encodings if tier.name in e.copies]
            tier.check(copies + [m.copy for m in self.moves if m.way != "load" and m.tier is tier])
        moving = [move.encoding.id for move in self.moves]
        assert len(moving) == len(set(moving)), "two transfers of one encoding"
        assert sorted(moving) == sorted(e.id for e in encodings if e.moving is not None), "a transfer is lost"
