"""Eviction policies, eviction hints and pins.

Call path: `allocate_pages` calls `KVCacheManager.reclaim` when the device has too few free pages.
`reclaim` cuts unused entries into pieces of one priority (`fixed_parts.split_unused`) and calls
`_evict`; `evict_entry` offloads an entry or frees its pages. `Prefetcher` evicts in the same order
for the entry that it loads, and `_reclaim_tier` evicts copies from the host and disk tiers.

Candidates: on the device, complete entries that are not in use and have no running transfer.
Running requests and pins exclude an entry before the policy is called. The policy that
`CacheConfig(eviction=...)` names orders the candidates.

A policy is a pure function that returns the IDs of all its candidates, first to evict first. To add
one, write the function here, add it to `EVICTION_POLICIES` below and its name to
`EvictionPolicyName` in `config.py`. CONTRIBUTING.md lists the tests and the documentation to
extend.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from .entry import KVEntry

if TYPE_CHECKING:
    from .manager import KVCacheManager


class EvictionCandidate(NamedTuple):
    """Inputs of an eviction policy for one entry not in use."""

    id: int  # entry ID
    created: int  # increasing counter
    last_access: int  # increasing counter
    hits: int = 0  # references taken since creation
    referenced: bool = False  # a message still references it
    steps_to_execution: float | None = None  # until needed (KVFlow §3.1); None: no hint
    ephemeral: bool = False  # part of an agent's prompt that changes on every run


EvictionPolicy = Callable[[Iterable[EvictionCandidate]], list[int]]


def least_recently_used(candidates: Iterable[EvictionCandidate]) -> list[int]:
    """Order by last access, unreferenced entries first."""
    return _sorted(candidates, lambda item: (item.referenced, item.last_access))


def least_frequently_used(candidates: Iterable[EvictionCandidate]) -> list[int]:
    """Order by references taken since creation, unreferenced entries first."""
    return _sorted(candidates, lambda item: (item.referenced, item.hits, item.last_access))


def first_in_first_out(candidates: Iterable[EvictionCandidate]) -> list[int]:
    """Order by creation, unreferenced entries first."""
    return _sorted(candidates, lambda item: (item.referenced, item.created))


def workflow_aware(candidates: Iterable[EvictionCandidate]) -> list[int]:
    """Order by steps-to-execution (KVFlow §3.1).

    Ephemeral entries first, then those of agents that never run again, entries without hints (least
    recently used first), and fixed prefixes by decreasing steps-to-execution.
    """

    def rank(item: EvictionCandidate) -> tuple[float, ...]:
        if item.ephemeral:
            return (0, 0, item.last_access)
        if item.steps_to_execution is None:
            return (2, item.referenced, item.last_access)
        if item.steps_to_execution == math.inf:
            return (1, 0, item.last_access)
        return (3, -item.steps_to_execution, item.last_access)

    return _sorted(candidates, rank)


def _sorted(
    candidates: Iterable[EvictionCandidate], rank: Callable[[EvictionCandidate], tuple[float, ...]]
) -> list[int]:
    return [item.id for item in sorted(candidates, key=lambda item: (*rank(item), item.id))]


EVICTION_POLICIES: dict[str, EvictionPolicy] = {
    "workflow": workflow_aware,
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "fifo": first_in_first_out,
}


class EvictionHints(NamedTuple):
    """Eviction hints of one workflow, by content hash."""

    steps_to_execution: Mapping[bytes, float]  # steps until needed
    while_referenced: Mapping[bytes, float] = MappingProxyType({})  # the same, only while owned
    ephemeral_groups: frozenset[object] = frozenset()  # agent keys whose other entries are ephemeral


class MinBySource:
    """Numbers by key, merged by minimum over all sources (KVFlow §3.1)."""

    def __init__(self) -> None:
        self._values: dict[bytes, dict[object, float]] = {}  # by key and source

    def replace(self, source: object, old: Mapping[bytes, float], new: Mapping[bytes, float]) -> None:
        """Replace the numbers of a source, at a cost independent of others."""
        for key in old.keys() - new.keys():
            values = self._values[key]
            del values[source]
            if not values:
                del self._values[key]
        for key, value in new.items():
            if old.get(key) != value:
                self._values.setdefault(key, {})[source] = value

    def get(self, key: bytes) -> float | None:
        values = self._values.get(key)
        return None if values is None else min(values.values())

    def __len__(self) -> int:
        return len(self._values)


NO_HINTS = EvictionHints({})


class HintRegistry:
    """Eviction hints of all workflows, merged by minimum (KVFlow §3.1)."""

    def __init__(self) -> None:
        self._hints: dict[object, EvictionHints] = {}
        self.steps_to_execution = MinBySource()
        self._while_referenced = MinBySource()
        self._ephemeral_groups: Counter[object] = Counter()  # number of sources that name each

    @property
    def num_sources(self) -> int:
        return len(self._hints)

    def update(self, source: object, hints: EvictionHints | None) -> None:
        """Replace the hints of a source; None removes them."""
        old, new = self._hints.pop(source, NO_HINTS), hints or NO_HINTS
        if hints is not None:
            self._hints[source] = hints
        self.steps_to_execution.replace(source, old.steps_to_execution, new.steps_to_execution)
        self._while_referenced.replace(source, old.while_referenced, new.while_referenced)
        if old.ephemeral_groups != new.ephemeral_groups:
            self._ephemeral_groups.update(new.ephemeral_groups)
            self._ephemeral_groups -= Counter(old.ephemeral_groups)

    def add_referenced(self, source: object, key: bytes, steps: float) -> None:
        """Add a number to the `while_referenced` of a source that has hints."""
        self._while_referenced.replace(source, {}, {key: steps})
        hints = self._hints[source]
        self._hints[source] = hints._replace(while_referenced={**hints.while_referenced, key: steps})

    def candidate(self, entry: KVEntry) -> EvictionCandidate:
        """Return the policy inputs of an entry."""
        steps = None
        if self._hints and entry.content_hash is not None:
            steps = self.steps_to_execution.get(entry.content_hash)
            if steps is None and entry.owners:
                steps = self._while_referenced.get(entry.content_hash)
        for keys in entry.fixed_ends.values():
            for key in keys:
                value = self.steps_to_execution.get(key)
                if value is not None and (steps is None or value < steps):
                    steps = value
        ephemeral = steps is None and entry.agent_key is not None and entry.agent_key in self._ephemeral_groups
        return EvictionCandidate(
            entry.id, entry.id, entry.last_access, entry.hit_count, bool(entry.owners), steps, ephemeral
        )


class PinTable:
    """Pins: owners of entries that are removed automatically when they expire."""

    def __init__(self, cache_manager: "KVCacheManager", clock: Callable[[], float]) -> None:
        self.clock = clock  # returns monotonic seconds
        self._cache_manager = cache_manager
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
        self._cache_manager.acquire(entry, ("pin", owner))

    def unpin(self, entry: KVEntry, owner: object) -> None:
        if self.expiry.pop((entry, owner), None) is None:
            return
        if isinstance(owner, tuple):
            pins = self._by_session[owner[0]]
            del pins[entry, owner]
            if not pins:
                del self._by_session[owner[0]]
        self._cache_manager.release(entry, ("pin", owner))

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
