"""Index of stored keys and values, by name and by content."""

import hashlib
import itertools
import time
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

HINT_SECONDS = 600.0  # after which steps to the next use are forgotten
MAX_CONTEXTS = 4  # entries of equal tokens that are found by their content; the oldest is evicted
MAX_TAIL = 8  # tokens at the end of a turn, its footer, that its entry may lack

_uids = itertools.count(1)


class EntryScope(NamedTuple):
    """Requests that may share entries. Others never see them."""

    salt: str | None  # `cache_salt` of the request: its tenant
    adapter: tuple[Any, ...]  # name, id and path of the LoRA adapter
    labels: tuple[str, ...]  # sorted
    workflow: str | None = None


@dataclass(eq=False)
class KVRecord:
    """Keys and values of consecutive tokens that one request computed."""

    scope: EntryScope
    tokens: tuple[int, ...]
    home: int  # position at which the key of the first token was rotated
    context: Any  # running hash of everything that the first token attends to
    name: str | None = None  # given by a client; None: found by its content
    uid: int = field(default_factory=lambda: next(_uids))  # of these tensors; never used again
    pins: int = 0  # requests that read it
    is_stored: bool = False  # a step that writes it was scheduled
    steps: int | None = None  # to its next use
    hinted: float = 0.0  # time.monotonic() of `steps`

    def __len__(self) -> int:
        return len(self.tokens)


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Return tokens as bytes, four of them each."""
    return array("I", tokens).tobytes()


def _digest(scope: EntryScope, tokens: bytes) -> bytes:
    return hashlib.sha256(repr(scope).encode() + b"\0" + tokens).digest()


class EntryIndex:
    """Entries by name and by content, least recently used first.

    Args:
        capacity: tokens that may be stored.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_tokens = 0
        self.version = 0  # changes with what can be found
        self.num_evicted = 0
        self._records: OrderedDict[int, KVRecord] = OrderedDict()  # by uid
        self._names: dict[tuple[EntryScope, str], KVRecord] = {}
        self._contents: dict[bytes, list[KVRecord]] = {}  # without names, one of each context
        self._released: list[int] = []  # uids that workers still hold
        self._orphans: dict[int, KVRecord] = {}  # pinned, no longer found

    def __len__(self) -> int:
        return len(self._records)

    def find_name(self, scope: EntryScope, name: str) -> KVRecord | None:
        record = self._names.get((scope, name))
        return record if record is not None and record.is_stored else None

    def find_turn(self, scope: EntryScope, tokens: Sequence[int]) -> list[KVRecord]:
        """Return entries of a turn, perhaps without its end; longer ones first."""
        packed = pack_tokens(tokens)
        return [
            record
            for tail in range(min(MAX_TAIL, len(tokens) - 1) + 1)
            for record in self._contents.get(_digest(scope, packed[: len(packed) - 4 * tail]), ())
            if record.is_stored
        ]

    def has_content(self, record: KVRecord) -> bool:
        """Return whether an entry has the same tokens and context."""
        known = self._contents.get(_digest(record.scope, pack_tokens(record.tokens)), ())
        return any(other.context.digest() == record.context.digest() for other in known)

    def reserve(self, record: KVRecord) -> bool:
        """Add an entry that a step will write; evict others.

        Returns False if it does not fit with what is in use.
        """
        known = None if record.name is None else self._names.get((record.scope, record.name))
        room = self.capacity - self.num_tokens + (len(known) if known is not None and not known.pins else 0)
        victims = self._victims(len(record) - room, known)
        if victims is None:
            return False
        for victim in victims:
            self.remove(victim)
            self.num_evicted += 1
        if known is not None:
            self.remove(known)
        self._records[record.uid] = record
        self.num_tokens += len(record)
        if record.name is not None:
            self._names[record.scope, record.name] = record
        else:
            equal = self._contents.setdefault(_digest(record.scope, pack_tokens(record.tokens)), [])
            equal.append(record)
            if len(equal) > MAX_CONTEXTS:
                self.remove(equal[0])
        return True

    def _victims(self, excess: int, replaced: KVRecord | None) -> list[KVRecord] | None:
        """Return entries to evict: least recently used, then needed last."""
        now, victims = time.monotonic(), list[KVRecord]()
        if excess <= 0:
            return victims
        free = [r for r in self._records.values() if r.is_stored and not r.pins and r is not replaced]
        hinted = [record for record in free if record.steps is not None and now - record.hinted < HINT_SECONDS]
        hinted.sort(key=lambda record: -(record.steps or 0))
        keep = {record.uid for record in hinted}
        for record in itertools.chain((record for record in free if record.uid not in keep), hinted):
            if excess <= 0:
                break
            victims.append(record)
            excess -= len(record)
        return victims if excess <= 0 else None

    def mark_stored(self, record: KVRecord) -> None:
        """Note that the step which writes the entry is scheduled."""
        record.is_stored = True
        self.version += 1

    def use(self, record: KVRecord) -> None:
        if record.uid in self._records:
            self._records.move_to_end(record.uid)

    def hint(self, record: KVRecord, steps: int) -> None:
        """Set the steps to the next use of an entry."""
        record.steps, record.hinted = steps, time.monotonic()

    def pin(self, record: KVRecord) -> None:
        record.pins += 1

    def unpin(self, record: KVRecord) -> None:
        record.pins -= 1
        if not record.pins and self._orphans.pop(record.uid, None) is not None:
            self.num_tokens -= len(record)
            self._released.append(record.uid)

    def remove(self, record: KVRecord) -> None:
        """Remove an entry. Requests that read it keep it until they end."""
        if self._records.pop(record.uid, None) is None:
            return
        if record.name is not None:
            if self._names.get((record.scope, record.name)) is record:
                del self._names[record.scope, record.name]
        else:
            key = _digest(record.scope, pack_tokens(record.tokens))
            self._contents[key].remove(record)
            if not self._contents[key]:
                del self._contents[key]
        self.version += 1
        if record.pins:
            self._orphans[record.uid] = record
            return
        self.num_tokens -= len(record)
        if record.is_stored:
            self._released.append(record.uid)

    def clear(self) -> None:
        """Remove all entries: the weights have changed."""
        for record in list(self._records.values()):
            self.remove(record)

    def take_released(self, saved: Collection[int] = ()) -> list[int]:
        """Return the entries that workers can drop, once.

        Args:
            saved: entries that the same step writes; they are dropped with the next one.
        """
        released = [uid for uid in self._released if uid not in saved]
        self._released = [uid for uid in self._released if uid in saved]
        return released

    def stored_uids(self) -> set[int]:
        """Return the entries that workers hold when all steps have run."""
        held = {uid for uid, record in (*self._records.items(), *self._orphans.items()) if record.is_stored}
        return held | set(self._released)

    def check(self) -> None:
        """Raise AssertionError if the index contradicts itself."""
        held = [*self._records.values(), *self._orphans.values()]
        assert self.num_tokens == sum(map(len, held)), (self.num_tokens, sum(map(len, held)))
        assert self.num_tokens <= self.capacity
        assert all(record.pins > 0 for record in self._orphans.values())
        assert all(record.pins >= 0 for record in held)
        found = [*self._names.values(), *itertools.chain(*self._contents.values())]
        assert {record.uid for record in found} == set(self._records) and len(found) == len(self._records)
