"""Transfers of KV entries between the device and the offload tiers (KVFlow §3.2).

A transfer only copies. Its effect on the cache is applied here, in the engine thread, once it has
completed. A failed or cancelled one is rolled back: its reserved space is freed and the entry stays
where it was.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ..events import EventBus
from .entry import KVEntry
from .pool import KVPool
from .tiers import Tier, TierCopy, TransferOps
from .transfer import Transfer, TransferDirection, TransferExecutor

TransferKind = Literal["load", "offload", "lower"]

TRANSFER_DIRECTIONS: dict[TransferKind, TransferDirection] = {
    "load": "loading",
    "offload": "offloading",
    "lower": "offloading",
}


class RemoteSource:
    """Pseudo tier of imported entries: the copy is not managed here."""

    name = "elsewhere"

    def free(self, copy: TierCopy) -> None:
        pass


REMOTE = RemoteSource()


@dataclass(eq=False)
class TransferJob:
    """One transfer in flight, with the entry and the copy it is for."""

    kind: TransferKind
    entry: KVEntry
    tier: Tier | RemoteSource  # tier of `copy`
    copy: TierCopy  # copy that is read (load) or written (offload, lower)
    transfer: Transfer
    source: Tier | None = None  # tier that a demoted copy leaves


class OffloadManager:
    """Offload tiers, highest first, and the transfers between them and the device."""

    def __init__(self, pool: KVPool, tiers: Sequence[Tier], executor: TransferExecutor, events: EventBus) -> None:
        self.pool = pool
        self.tiers = tuple(tiers)
        self.executor = executor
        self._events = events
        self.jobs: list[TransferJob] = []

    @property
    def num_loads(self) -> int:
        return sum(pending.kind == "load" for pending in self.jobs)

    @property
    def pages_being_freed(self) -> int:
        """Device pages that running offloads will free."""
        return sum(len(m.entry.pages) for m in self.jobs if m.kind == "offload" and not m.entry.in_use)

    def tokens_being_freed(self, tier: Tier) -> int:
        """Return the tokens that running demotions will free on a tier."""
        return sum(pending.copy.tokens for pending in self.jobs if pending.source is tier)

    def enable_hidden_cache(self, layers: Iterable[int], hidden_size: int) -> None:
        """Cache the inputs of these layers, on the device and all tiers.

        No transfer may be running.
        """
        assert not self.jobs
        self.pool.enable_hidden_cache(layers, hidden_size)
        for tier in self.tiers:
            tier.enable_hidden_cache(layers, hidden_size)

    def accepts(self, tier: Tier, entry: KVEntry) -> bool:
        """Return whether a tier could store the entry if empty; False for partial-layer entries."""
        is_supported = entry.computed_layers is None and tier.name not in entry.failed_tiers
        return is_supported and tier.fits_when_empty(len(entry.tokens))

    def load(self, entry: KVEntry) -> None:
        """Start filling an entry's allocated pages from its nearest copy."""
        tier = next(t for t in self.tiers if t.name in entry.tier_copies)
        copy = entry.tier_copies[tier.name]
        self._start(
            TransferJob(
                "load",
                entry,
                tier,
                copy,
                self._make_transfer("load", copy, tier.load_ops(copy, self.pool, entry.pages)),
            )
        )

    def load_remote(self, entry: KVEntry, ops: TransferOps) -> None:
        """Start filling an entry's allocated pages from an external source."""
        copy = TierCopy(REMOTE.name, len(entry.tokens))
        self._start(TransferJob("load", entry, REMOTE, copy, self._make_transfer("load", copy, ops)))

    def offload(self, entry: KVEntry, tier: Tier) -> None:
        """Start copying an entry from the device to a tier, which must have space for it."""
        copy = tier.reserve(len(entry.tokens))
        work = tier.store_ops(self.pool, entry.pages, copy)
        self._start(TransferJob("offload", entry, tier, copy, self._make_transfer("offload", copy, work)))

    def demote(self, entry: KVEntry, source: Tier, tier: Tier) -> None:
        """Start copying an entry from one tier to a lower one."""
        copy = tier.reserve(len(entry.tokens))
        work = tier.store_ops(source.pool, entry.tier_copies[source.name].pages, copy)  # type: ignore[attr-defined]
        self._start(TransferJob("lower", entry, tier, copy, self._make_transfer("lower", copy, work), source))

    def _make_transfer(self, kind: TransferKind, copy: TierCopy, ops: TransferOps) -> Transfer:
        layers = len(self.pool.keys)
        return Transfer(
            TRANSFER_DIRECTIONS[kind], layers, copy.tokens, ops.copy_layer, prepare=ops.prepare, finish=ops.finish
        )

    def _start(self, job: TransferJob) -> None:
        assert job.entry.transfer is None, f"KV entry {job.entry.id} already has a transfer"
        job.entry.transfer = job.transfer
        self.jobs.append(job)
        self.executor.start(job.transfer)

    def pop_finished(self) -> Iterator[TransferJob]:
        """Apply and yield completed transfers one by one; later ones stay pending until requested.

        Written copies now belong to their entries. Failed transfers are rolled back, except for the
        device pages of a load, which the caller frees.
        """
        for pending in [pending for pending in self.jobs if pending.transfer.is_finished]:
            self.jobs.remove(pending)
            pending.entry.transfer = None
            self._complete(pending)
            yield pending

    def _complete(self, job: TransferJob) -> None:
        error = job.transfer.error
        if error is not None:
            if not (job.kind == "load" and job.transfer.cancelled):  # a copy that cannot be read is useless
                self.free(job.entry, job.tier, job.copy)
            if job.kind != "load" and not job.transfer.cancelled:  # do not retry: a disk may be full
                job.entry.failed_tiers.add(job.tier.name)
            self._events.emit("failed_transfer", encoding=job.entry.id, way=job.kind, why=repr(error))
            return
        if job.kind != "load":
            job.entry.tier_copies[job.tier.name] = job.copy
        if job.source is not None:
            self.free(job.entry, job.source, job.entry.tier_copies[job.source.name])
        kind = {"load": "loaded", "offload": "offloaded", "lower": "lowered"}[job.kind]
        self._events.emit(kind, encoding=job.entry.id, tokens=job.copy.tokens, tier=job.tier.name)

    def free(self, entry: KVEntry, tier: Tier | RemoteSource, copy: TierCopy) -> None:
        """Free a copy. A file that cannot be removed stays until the tier is closed."""
        if entry.tier_copies.get(tier.name) is copy:
            del entry.tier_copies[tier.name]
        try:
            tier.free(copy)
        except OSError as exc:
            self._events.emit("left_behind", encoding=entry.id, tokens=copy.tokens, why=repr(exc))

    def free_copies(self, entry: KVEntry) -> None:
        """Free every copy of an entry without a running transfer."""
        assert entry.transfer is None
        for tier in self.tiers:
            if tier.name in entry.tier_copies:
                self.free(entry, tier, entry.tier_copies[tier.name])

    def wait(self) -> bool:
        """Wait for the oldest transfer; return False if there is none."""
        if not self.jobs:
            return False
        self.executor.wait(self.jobs[0].transfer)
        return True

    def layer_waiters(self, transfers: Iterable[Transfer]) -> tuple[Callable[[int], None], ...]:
        """Return one function per transfer that waits until a given layer is copied."""
        return tuple(partial(self.executor.wait_for, transfer) for transfer in transfers)

    def cancel(self, entry: KVEntry) -> None:
        if entry.transfer is not None:
            entry.transfer.cancel()

    def close(self) -> None:
        self.executor.close()
        for tier in self.tiers:
            tier.close()

    def check(self, entries: Sequence[KVEntry]) -> None:
        for tier in self.tiers:
            copies = [e.tier_copies[tier.name] for e in entries if tier.name in e.tier_copies]
            tier.check(copies + [m.copy for m in self.jobs if m.kind != "load" and m.tier is tier])
        entry_ids = [pending.entry.id for pending in self.jobs]
        assert len(entry_ids) == len(set(entry_ids)), "two transfers of one KV entry"
        assert sorted(entry_ids) == sorted(e.id for e in entries if e.transfer is not None), "a transfer is lost"
