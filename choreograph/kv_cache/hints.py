"""Eviction hints of agent workflows, and the fixed parts of their prompts (KVFlow §3.1).

An entry may hold more than the fixed part of a prompt: in prefix mode the varying rest, and the
fixed parts of several agents. `FixedPartIndex` has the keys of all fixed parts that go through an
entry, so the steps-to-execution of an entry are the minimum over the agents below it in the prefix
tree.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..namespace import Namespace
from .entry import KVEntry, KVSlice
from .eviction import EvictionCandidate
from .hashing import content_hash


class FixedPartIndex:
    """Entries that hold a fixed part of a prompt, by its key."""

    def __init__(self) -> None:
        self._entries: dict[bytes, dict[KVEntry, None]] = {}
        # keys of the parts that go through an entry, by the token where they end or leave it
        self._ends: dict[KVEntry, dict[int, set[bytes]]] = {}

    def add(self, key: bytes, entry: KVEntry, end: int) -> None:
        """Add an entry that has a fixed part up to token `end`."""
        self._ends.setdefault(entry, {}).setdefault(end, set()).add(key)
        self._entries.setdefault(key, {})[entry] = None

    def add_prefix(self, key: bytes, path: Iterable[KVSlice]) -> None:
        """Add the slices in the prefix tree of a fixed part."""
        for entry, token_start, num_tokens, *_ in path:
            self.add(key, entry, token_start + num_tokens)

    def get(self, key: bytes) -> list[KVEntry]:
        """Return the entries that hold a fixed part, in token order."""
        return sorted(self._entries.get(key, ()), key=lambda entry: entry.base_position)

    def ends(self, entry: KVEntry) -> Mapping[int, set[bytes]]:
        """Return the keys of the parts in an entry, by the token where they end or leave it."""
        return self._ends.get(entry, {})

    def split(self, entry: KVEntry, index: int, tail: KVEntry) -> None:
        """Move the ends behind token `index` of an entry to its tail."""
        ends = self._ends.get(entry, {})
        for end in [end for end in ends if end > index]:
            for key in ends.pop(end):
                self.add(key, entry, index)
                self.add(key, tail, end - index)

    def remove(self, entry: KVEntry) -> None:
        """Forget a deleted entry."""
        for keys in self._ends.pop(entry, {}).values():
            for key in keys:
                self._entries[key].pop(entry, None)
                if not self._entries[key]:
                    del self._entries[key]

    def check(self, entries: Iterable[KVEntry]) -> None:
        """Check that both directions agree, and that all entries exist."""
        pairs = {(key, entry) for entry, ends in self._ends.items() for keys in ends.values() for key in keys}
        assert pairs == {(key, entry) for key, some in self._entries.items() for entry in some}
        assert self._ends.keys() <= set(entries), "a deleted KV entry has fixed parts"


def prefix_key(namespace: Namespace, tokens: Sequence[int]) -> bytes:
    """Return the key of a fixed part of a prefix-mode prompt."""
    return content_hash(replace(namespace, is_prompt=True), tokens, 0, ())


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

    def __init__(self, fixed_parts: FixedPartIndex) -> None:
        self._fixed_parts = fixed_parts
        self._hints: dict[object, EvictionHints] = {}
        self._agents: WeakKeyDictionary[KVEntry, object] = WeakKeyDictionary()  # agent that an entry belongs to
        self.steps_to_execution = MinBySource()
        self._while_referenced = MinBySource()
        self._ephemeral_groups: Counter[object] = Counter()  # number of sources that name each

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

    def set_agent(self, entry: KVEntry, agent: object) -> None:
        """Record the agent that an entry belongs to; None for no agent."""
        if agent is not None:
            self._agents[entry] = agent

    def agent(self, entry: KVEntry) -> object:
        return self._agents.get(entry)

    def candidate(self, entry: KVEntry) -> EvictionCandidate:
        """Return the policy inputs of an entry."""
        steps = None
        if self._hints and entry.content_hash is not None:
            steps = self.steps_to_execution.get(entry.content_hash)
            if steps is None and entry.owners:
                steps = self._while_referenced.get(entry.content_hash)
        for keys in self._fixed_parts.ends(entry).values():
            for key in keys:
                value = self.steps_to_execution.get(key)
                if value is not None and (steps is None or value < steps):
                    steps = value
        ephemeral = steps is None and bool(self._ephemeral_groups) and self._agents.get(entry) in self._ephemeral_groups
        return EvictionCandidate(
            entry.id, entry.id, entry.last_access, entry.hit_count, bool(entry.owners), steps, ephemeral
        )
