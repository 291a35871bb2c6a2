"""Owns every encoding: its pages, who holds it, and how equal work is found again. Knows no calls.

An encoding is *held* by messages and by calls in flight. When the last holder lets go, it becomes *idle* if it
is whole and can be found again (by content, or as a prefix), and gives its pages back otherwise. Idle
encodings are evicted, in the order of the policy, when pages are needed.
"""

from collections.abc import Iterable

from ..errors import CacheFull
from ..events import EventLog
from .arena import Arena
from .encoding import Encoding, Sight
from .policy import ORDERS, IdleFacts
from .prefix import PrefixTree

SPARE = 32  # an eviction frees this share of the arena more than it must, so that not every call sorts the idle


class Store:
    """One arena and the encodings in it."""

    def __init__(self, arena: Arena, *, eviction: str, events: EventLog) -> None:
        self.arena = arena
        self._order = ORDERS[eviction]
        self._events = events
        self._encodings: dict[int, Encoding] = {}
        self._by_key: dict[bytes, Encoding] = {}
        self._trees: dict[str, PrefixTree] = {}
        self._clock = 0
        self._idle_pages = 0

    # -- life ---------------------------------------------------------------------------------------------

    def create(
        self, tokens: list[int], start: int, context: Iterable[Sight], *, capacity: int, holder: object
    ) -> Encoding:
        """A new encoding with room for `capacity` tokens; evicts idle ones if it must, or raises CacheFull."""
        self._make_room(self.arena.pages_for(capacity))
        pages = self.arena.allocate(self.arena.pages_for(capacity))
        self._clock += 1
        encoding = Encoding(
            id=self._clock,
            tokens=tokens,
            start=start,
            context=tuple(context),
            pages=pages,
            page_size=self.arena.page_size,
            promised=len(tokens),
            used_at=self._clock,
        )
        encoding.holders.add(holder)
        self._encodings[encoding.id] = encoding
        return encoding

    def hold(self, encoding: Encoding, holder: object) -> None:
        assert encoding.id in self._encodings, f"encoding {encoding.id} is gone"
        if not encoding.holders:
            self._idle_pages -= len(encoding.pages)
        encoding.holders.add(holder)
        self._touch(encoding)

    def let_go(self, encoding: Encoding, holder: object) -> None:
        """One holder less; the last one decides between idle and gone. Nothing happens twice."""
        if holder not in encoding.holders:
            return
        encoding.holders.discard(holder)
        self._touch(encoding)
        if not encoding.holders:
            self._idle_pages += len(encoding.pages)
            if not (encoding.reusable and encoding.whole):
                self._drop(encoding)

    def trim(self, encoding: Encoding) -> None:
        """Gives back the pages that a finished encoding did not need."""
        self.arena.release(encoding.keep_pages(self.arena.pages_for(len(encoding.tokens))))

    def _touch(self, encoding: Encoding) -> None:
        self._clock += 1
        encoding.used_at = self._clock

    # -- finding equal work -------------------------------------------------------------------------------

    def find(self, key: bytes) -> Encoding | None:
        return self._by_key.get(key)

    def publish(self, encoding: Encoding, key: bytes) -> None:
        """Gives an encoding its name; the first one of a name is the one that others find."""
        encoding.key = key
        if key not in self._by_key:
            self._by_key[key] = encoding
            encoding.reusable = True

    def tree(self, salt: str) -> PrefixTree:
        return self._trees.setdefault(salt, PrefixTree(salt))

    # -- room ---------------------------------------------------------------------------------------------

    def room(self) -> int:
        """Pages that are free or could be made free."""
        return self.arena.free_pages + self._idle_pages

    def clear_idle(self) -> None:
        """Forgets everything that nobody holds."""
        self._evict(self.arena.pages + 1)

    def _make_room(self, pages: int) -> None:
        if self.arena.free_pages < pages:
            if self.room() < pages:
                raise CacheFull(
                    f"needs {pages} pages of {self.arena.page_size} tokens; {self.arena.free_pages} of "
                    f"{self.arena.pages} are free and {self.room() - self.arena.free_pages} can be evicted: "
                    "release messages or raise CacheConfig.tokens"
                )
            self._evict(pages + self.arena.pages // SPARE)
        if self.arena.free_pages < pages:
            raise CacheFull(
                f"needs {pages} pages, {self.arena.free_pages} free; the idle rest is the prefix of calls in "
                "flight: release messages or raise CacheConfig.tokens"
            )

    def _evict(self, pages: int) -> None:
        """Drops idle encodings until `pages` are free; prefixes go after what hangs on them."""
        progress = True
        while progress and self.arena.free_pages < pages:
            progress = False
            idle = {e.id: e for e in self._encodings.values() if not e.holders and not e.children}
            for one in self._order(IdleFacts(e.id, e.id, e.used_at) for e in idle.values()):
                if self.arena.free_pages >= pages:
                    break
                self._events.write("evicted", encoding=one, tokens=len(idle[one].tokens))
                self._drop(idle[one])
                progress = True

    def _drop(self, encoding: Encoding) -> None:
        if encoding.key is not None and self._by_key.get(encoding.key) is encoding:
            del self._by_key[encoding.key]
        if encoding.tree is not None:
            tree = encoding.tree
            tree.forget(encoding)
            if tree.empty:
                self._trees.pop(tree.salt, None)
        del self._encodings[encoding.id]
        self._idle_pages -= len(encoding.pages)
        self.arena.release(encoding.pages)
        encoding.keep_pages(0)

    # -- state --------------------------------------------------------------------------------------------

    @property
    def counts(self) -> dict[str, int]:
        """Encodings and pages, held and idle."""
        held = [e for e in self._encodings.values() if e.holders]
        return {
            "held_encodings": len(held),
            "idle_encodings": len(self._encodings) - len(held),
            "held_pages": sum(len(e.pages) for e in held),
            "free_pages": self.arena.free_pages,
            "pages": self.arena.pages,
        }

    def check(self) -> None:
        """Pages are conserved, every page has one encoding, idle ones can be found, contexts of held are there."""
        self.arena.check()
        pages = [page for e in self._encodings.values() for page in e.pages]
        assert len(pages) == len(set(pages)), "two encodings share a page"
        assert len(pages) + self.arena.free_pages == self.arena.pages, "pages are lost"
        idle = sum(len(e.pages) for e in self._encodings.values() if not e.holders)
        assert idle == self._idle_pages, "idle pages are miscounted"
        for e in self._encodings.values():
            assert e.holders or (e.reusable and e.whole), f"encoding {e.id} is idle but cannot be found"
            assert e.encoded <= e.scheduled <= len(e.tokens) <= len(e.pages) * e.page_size
        for key, e in self._by_key.items():
            assert e.key == key and e.id in self._encodings
        for tree in self._trees.values():
            tree.check()
