"""Transfers of KV entries between the device and the offload tiers (KVFlow §3.2).

A transfer only copies. Its effect on the cache is applied here, in the engine thread, once it has
completed. A failed or cancelled one is rolled back: its reserved space is freed and the entry stays
where it was.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ..events import EventBus
from .entry import KVEntry
from .pool import KVPool
from .tiers import HostTier, Tier, TierCopy, TransferOps
from .transfer import ThreadExecutor, Transfer

TransferKind = Literal["load", "offload", "lower"]

EVENT_KINDS: dict[TransferKind, str] = {"load": "loaded", "offload": "offloaded", "lower": "lowered"}
REMOTE_TIER = "elsewhere"  # tier name of the source of an imported entry, in events


@dataclass(eq=False)
class TransferJob:
    """One transfer in flight, with the entry and the copy it is for."""

    kind: TransferKind
    entry: KVEntry
    copy: TierCopy  # copy that is read (load) or written (offload, lower)
    transfer: Transfer
    source: HostTier | None = None  # tier that a demoted copy leaves


class OffloadManager:
    """Offload tiers, highest first, and the transfers between them and the device."""

    def __init__(self, pool: KVPool, tiers: Sequence[Tier], executor: ThreadExecutor, events: EventBus) -> None:
        self.pool = pool
        self.tiers = tuple(tiers)
        self.executor = executor
        self.jobs: list[TransferJob] = []
        self.num_loads = 0  # jobs that load an entry
        self._events = events

    @property
    def pages_being_freed(self) -> int:
        """Device pages that running offloads will free."""
        return sum(len(job.entry.pages) for job in self.jobs if job.kind == "offload" and not job.entry.in_use)

    def tokens_being_freed(self, tier: Tier) -> int:
        """Return the tokens that running demotions will free on a tier."""
        return sum(job.copy.tokens for job in self.jobs if job.source is tier)

    def enable_hidden_cache(self, layers: Iterable[int], hidden_size: int) -> None:
        """Cache the inputs of these layers, on the device and all tiers.

        No transfer may be running.
        """
        assert not self.jobs
        self.pool.enable_hidden_cache(layers, hidden_size)
        for tier in self.tiers:
            if isinstance(tier, HostTier):  # files store every tensor that exists
                tier.pool.enable_hidden_cache(layers, hidden_size)

    def accepts(self, tier: Tier, entry: KVEntry) -> bool:
        """Return whether a tier could store the entry if empty; False for partial-layer entries."""
        is_supported = entry.computed_layers is None and tier.name not in entry.failed_tiers
        return is_supported and tier.fits_when_empty(len(entry.tokens))

    def load(self, entry: KVEntry) -> None:
        """Start filling an entry's allocated pages from its nearest copy."""
        tier = next(t for t in self.tiers if t.name in entry.tier_copies)
        copy = entry.tier_copies[tier.name]
        self._start("load", entry, copy, tier.load_ops(copy, self.pool, entry.pages))

    def load_remote(self, entry: KVEntry, ops: TransferOps) -> None:
        """Start filling an entry's allocated pages from an external source."""
        self._start("load", entry, TierCopy(REMOTE_TIER, len(entry.tokens)), ops)

    def offload(self, entry: KVEntry, tier: Tier) -> None:
        """Start copying an entry from the device to a tier, which must have space for it."""
        copy = tier.reserve(len(entry.tokens))
        self._start("offload", entry, copy, tier.store_ops(self.pool, entry.pages, copy))

    def demote(self, entry: KVEntry, source: HostTier, tier: Tier) -> None:
        """Start copying an entry from one tier to a lower one."""
        copy = tier.reserve(len(entry.tokens))
        ops = tier.store_ops(source.pool, entry.tier_copies[source.name].pages, copy)
        self._start("lower", entry, copy, ops, source)

    def _start(
        self, kind: TransferKind, entry: KVEntry, copy: TierCopy, ops: TransferOps, source: HostTier | None = None
    ) -> None:
        assert entry.transfer is None, f"KV entry {entry.id} already has a transfer"
        direction: Literal["loading", "offloading"] = "loading" if kind == "load" else "offloading"
        entry.transfer = Transfer(direction, len(self.pool.keys), copy.tokens, *ops)
        self.jobs.append(TransferJob(kind, entry, copy, entry.transfer, source))
        self.num_loads += kind == "load"
        self.executor.start(entry.transfer)

    def complete(self, job: TransferJob) -> None:
        """Apply a finished transfer: its copy now belongs to the entry, or it is rolled back.

        The caller frees the device pages of a failed load.
        """
        self.jobs.remove(job)
        self.num_loads -= job.kind == "load"
        entry, transfer = job.entry, job.transfer
        entry.transfer = None
        if transfer.error is not None:
            if not (job.kind == "load" and transfer.cancelled):  # a copy that cannot be read is useless
                self.free(entry, job.copy)
            if job.kind != "load" and not transfer.cancelled:  # do not retry: a disk may be full
                entry.failed_tiers.add(job.copy.tier)
            self._events.emit("failed_transfer", encoding=entry.id, way=job.kind, why=repr(transfer.error))
            return
        if job.kind != "load":
            entry.tier_copies[job.copy.tier] = job.copy
        if job.source is not None:
            self.free(entry, entry.tier_copies[job.source.name])
        self._events.emit(EVENT_KINDS[job.kind], encoding=entry.id, tokens=job.copy.tokens, tier=job.copy.tier)

    def free(self, entry: KVEntry, copy: TierCopy) -> None:
        """Free a copy. A file that cannot be removed stays until the tier is closed."""
        if entry.tier_copies.get(copy.tier) is copy:
            del entry.tier_copies[copy.tier]
        for tier in self.tiers:
            try:
                if tier.name == copy.tier:
                    tier.free(copy)
            except OSError as exc:
                self._events.emit("left_behind", encoding=entry.id, tokens=copy.tokens, why=repr(exc))

    def wait(self) -> bool:
        """Wait for the oldest transfer; return False if there is none."""
        if not self.jobs:
            return False
        self.executor.wait(self.jobs[0].transfer)
        return True

    def layer_waiters(self, transfers: Iterable[Transfer]) -> tuple[Callable[[int], None], ...]:
        """Return one function per transfer that waits until a given layer is copied."""
        return tuple(partial(self.executor.wait_for, transfer) for transfer in transfers)

    def close(self) -> None:
        self.executor.close()
        for tier in self.tiers:
            tier.close()

    def check(self, entries: Sequence[KVEntry]) -> None:
        """Check that copies and transfers agree with the entries."""
        for tier in self.tiers:
            copies = [e.tier_copies[tier.name] for e in entries if tier.name in e.tier_copies]
            tier.check(copies + [job.copy for job in self.jobs if job.kind != "load" and job.copy.tier == tier.name])
        entry_ids = [job.entry.id for job in self.jobs]
        assert len(entry_ids) == len(set(entry_ids)), "two transfers of one KV entry"
        assert sorted(entry_ids) == sorted(e.id for e in entries if e.transfer is not None), "a transfer is lost"
        assert self.num_loads == sum(job.kind == "load" for job in self.jobs), "wrong number of loads"
