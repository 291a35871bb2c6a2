"""Host and disk tiers for KV entries, and their transfers (KVFlow §3.2).

A tier reserves space for a copy and frees it. It returns the operations that copy an entry layer by
layer (`Transfer`), from a pool into the copy and back. The host tier is a `KVPool` of its own; the
disk tier writes one file per entry (`container`).
"""

import itertools
import os
import platform
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ..config import CacheConfig, allocating, parse_capacity
from ..errors import ConfigError
from ..events import EventBus
from ..utils import ensure_dir
from .container import ContainerFile, EntryInfo, Header, TensorKey, TensorKind, as_bytes
from .entry import KVEntry, KVSlice, TierCopy
from .pool import KVPool
from .transfer import ThreadExecutor, Transfer

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]


class TransferOps(NamedTuple):
    """The three operations of a transfer, all run in the background."""

    copy_layer: Callable[[int], None]  # called with each layer index
    prepare: Callable[[], None] = lambda: None  # before the first layer
    finish: Callable[[], None] = lambda: None  # after the last layer
    inputs_first: bool = False  # `prepare` copies the cached inputs of all layers, not `copy_layer`


class HostTier:
    """Host memory tier: a `KVPool`, pinned if the device is a GPU."""

    name = "host"

    def __init__(self, device_pool: KVPool, tokens: int) -> None:
        self.pool = KVPool(
            pages=tokens // device_pool.page_size,
            page_size=device_pool.page_size,
            layers=[(k.shape[1], k.shape[2]) for k in device_pool.keys],
            dtype=device_pool.keys[0].dtype,
            device=torch.device("cpu"),
            poison_freed_pages=device_pool.poison_freed_pages,
            pinned=device_pool.keys[0].is_cuda,
        )

    def fits(self, tokens: int) -> bool:
        return self.pool.num_pages_for(tokens) <= self.pool.free_pages

    def fits_when_empty(self, tokens: int) -> bool:
        return self.pool.num_pages_for(tokens) <= self.pool.pages

    def reserve(self, tokens: int) -> TierCopy:
        return TierCopy(self.name, tokens, pages=self.pool.allocate(self.pool.num_pages_for(tokens)))

    def free(self, copy: TierCopy) -> None:
        self.pool.release(copy.pages)

    def store_ops(self, source: KVPool, pages: Sequence[int], copy: TierCopy) -> TransferOps:
        """Return the operations that fill a copy from pages of a pool."""
        return TransferOps(_copy_between(source, pages, self.pool, copy.pages, copy.tokens))

    def load_ops(self, copy: TierCopy, target: KVPool, pages: Sequence[int]) -> TransferOps:
        """Return the operations that read a copy into pages of a pool."""
        return TransferOps(_copy_between(self.pool, copy.pages, target, pages, copy.tokens))

    def check(self, copies: Sequence[TierCopy]) -> None:
        """Raise AssertionError unless exactly these copies use space."""
        self.pool.check()
        used_pages = [page for copy in copies for page in copy.pages]
        assert len(used_pages) == len(set(used_pages)), "two copies share a page of host memory"
        assert len(used_pages) + self.pool.free_pages == self.pool.pages, "pages of host memory are lost"

    def close(self) -> None:
        pass


class DiskTier:
    """Disk tier: a temporary folder with one container per entry.

    Methods are those of `HostTier`. The folder is removed with the engine, or with the next one in its place if the
    process was killed.

    Raises:
        ConfigError: if `folder` is not writable.
    """

    name = "disk"

    def __init__(self, device_pool: KVPool, tokens: int, folder: str | os.PathLike[str] | None = None) -> None:
        self._limit = tokens
        self._used = 0  # tokens
        if folder is not None:
            ensure_dir(Path(folder))
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=folder))
            lock = _lock_folder(self.folder)
        except OSError as exc:
            raise ConfigError(f"disk_dir={folder!r}: nothing can be written there ({exc}); use another") from None
        _remove_abandoned(self.folder.parent)
        self._names = itertools.count(1)
        self.close = weakref.finalize(self, _remove, self.folder, os.getpid(), lock)

    def fits(self, tokens: int) -> bool:
        return self.fits_when_empty(self._used + tokens)

    def fits_when_empty(self, tokens: int) -> bool:
        return tokens <= self._limit and self.close.alive

    def reserve(self, tokens: int) -> TierCopy:
        assert self.fits(tokens)
        self._used += tokens
        return TierCopy(self.name, tokens, file=self.folder / f"{next(self._names)}.safetensors")

    def free(self, copy: TierCopy) -> None:
        """Free a copy."""
        assert copy.file is not None
        self._used -= copy.tokens  # even if the file cannot be removed
        copy.file.unlink(missing_ok=True)

    def store_ops(self, source: KVPool, pages: Sequence[int], copy: TierCopy) -> TransferOps:
        assert copy.file is not None
        file, ranges = copy.file, _copy_ranges(pages, pages, source.page_size, copy.tokens)
        # the name tells copies of equal shapes apart
        info = EntryInfo(shapes=tensor_shapes(source, copy.tokens), name=f"{self.folder.name}/{file.name}")
        header = Header([info], source.keys[0].dtype)
        container: ContainerFile

        def prepare() -> None:
            nonlocal container
            container, copy.checksum = ContainerFile.create(file, header), header.checksum

        def copy_layer(layer: int) -> None:
            tensors = source.tensors(layer)
            for number in header.numbers[0, layer]:
                rows = [_gather(tensors[kind], ranges) for kind in header.blocks[number].kinds]
                container.write(header.seal(number, rows))

        return TransferOps(copy_layer, prepare, finish=lambda: container.close())

    def load_ops(self, copy: TierCopy, target: KVPool, pages: Sequence[int]) -> TransferOps:
        assert copy.file is not None
        file, write = copy.file, layer_writer(target, pages, copy.tokens)
        container: ContainerFile

        def prepare() -> None:
            nonlocal container
            container = ContainerFile.open(file, "its KV is computed again")
            if container.header.checksum != copy.checksum:
                raise container.header.error("has the keys and values of another KV entry")

        def copy_layer(layer: int) -> None:
            header = container.header
            for number in header.numbers[0, layer]:
                write(layer, header.blocks[number].kinds, container.read(number).tensors)

        return TransferOps(copy_layer, prepare, finish=lambda: container.close())

    def check(self, copies: Sequence[TierCopy]) -> None:
        assert self._used == sum(copy.tokens for copy in copies) <= self._limit, "disk usage is miscounted"


Tier = HostTier | DiskTier


def make_tiers(pool: KVPool, config: CacheConfig) -> list[Tier]:
    """Create the configured offload tiers, highest first."""
    tiers: list[Tier] = []
    if config.host_capacity:
        num_tokens = parse_capacity(config.host_capacity, pool.bytes_per_token)
        with allocating("host_capacity", config.host_capacity, num_tokens * pool.bytes_per_token):
            tiers.append(HostTier(pool, num_tokens))
    if config.disk_capacity:
        tiers.append(DiskTier(pool, parse_capacity(config.disk_capacity, pool.bytes_per_token), config.disk_dir))
    return tiers


def _copy_between(
    source: KVPool, from_pages: Sequence[int], target: KVPool, to_pages: Sequence[int], tokens: int
) -> Callable[[int], None]:
    """Return a function that copies a layer between two pools."""
    ranges = _copy_ranges(from_pages, to_pages, source.page_size, tokens)

    def copy_layer(layer: int) -> None:
        from_tensors, to_tensors = source.tensors(layer), target.tensors(layer)
        for name in from_tensors.keys() & to_tensors.keys():
            old, new = from_tensors[name], to_tensors[name]
            for from_, to, count in ranges:
                if old.device.type == new.device.type == "cpu":
                    _write_bytes(new[to : to + count], as_bytes(old[from_ : from_ + count]))
                else:
                    new[to : to + count].copy_(old[from_ : from_ + count], non_blocking=True)

    return copy_layer


def _copy_ranges(
    from_pages: Sequence[int], to_pages: Sequence[int], page_size: int, tokens: int
) -> list[tuple[int, int, int]]:
    """Return (source slot, target slot, count) of each range contiguous in both."""
    ranges: list[tuple[int, int, int]] = []
    last_pages = (-1, -1)
    for index, pages in enumerate(zip(from_pages, to_pages, strict=True)):
        count = max(0, min(page_size, tokens - index * page_size))
        if pages == (last_pages[0] + 1, last_pages[1] + 1) and ranges:
            ranges[-1] = (ranges[-1][0], ranges[-1][1], ranges[-1][2] + count)
        else:
            ranges.append((pages[0] * page_size, pages[1] * page_size, count))
        last_pages = pages
    assert sum(count for _, _, count in ranges) == tokens, "number of pages does not match the tokens"
    return ranges


def _gather(slots: Tensor, ranges: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Return the bytes of ranges of slots, in host memory."""
    parts = [as_bytes(slots[start : start + count].cpu()) for start, _, count in ranges]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def tensor_shapes(pool: KVPool, num_tokens: int) -> dict[TensorKey, tuple[int, ...]]:
    """Return the shapes of all tensors of an entry in a pool."""
    return {
        (layer, cast(TensorKind, kind)): (num_tokens, *tensor.shape[1:])
        for layer in range(len(pool.keys))
        for kind, tensor in pool.tensors(layer).items()
    }


def layer_writer(
    pool: KVPool, pages: Sequence[int], num_tokens: int
) -> Callable[[int, Iterable[str], Iterable[np.ndarray]], None]:
    """Return a function that writes tensors of one layer into pages of a pool.

    It takes the layer, the names of the tensors and their bytes, (T, bytes of a token).
    """
    ranges = _copy_ranges(pages, pages, pool.page_size, num_tokens)

    def write(layer: int, names: Iterable[str], content: Iterable[np.ndarray]) -> None:
        tensors = pool.tensors(layer)
        for name, rows in zip(names, content, strict=True):
            start = 0
            for slot, _, count in ranges:
                _write_bytes(tensors[name][slot : slot + count], rows[start : start + count])
                start += count

    return write


def _write_bytes(slots: Tensor, content: np.ndarray) -> None:
    """Write bytes into slots."""
    if slots.device.type == "cpu":  # numpy uses one thread, torch would use all cores
        as_bytes(slots)[:] = content
    else:
        content = np.require(content, requirements="W")  # of torch; what another process sent may be read-only
        slots.copy_(torch.from_numpy(content).view(slots.dtype).reshape(slots.shape))


_FOLDER_PREFIX, _LOCK_NAME = "choreograph-", ".choreograph-disk-tier.lock"


def _machine() -> str:
    """Return what names this machine: file locks may hold on one machine only.

    On Linux it is the same in all containers of a kernel, and another one after each boot.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else platform.node()


def _lock_folder(folder: Path) -> int | None:
    """Mark a folder as used until this process and its forked children end; return the open file."""
    if fcntl is None:
        return None
    unnamed = folder / "unlocked"
    file = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(file, _machine().encode())
        unnamed.rename(folder / _LOCK_NAME)  # others look at a file that is locked already
    except OSError:  # a file system without locks: the folder is never taken for an abandoned one
        os.close(file)
        unnamed.unlink(missing_ok=True)
        return None
    return file


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user's processes that were killed on this machine."""
    with suppress(OSError):
        folders = [item for item in os.scandir(parent) if item.name.startswith(_FOLDER_PREFIX)]
        for folder in folders if fcntl is not None else ():
            with suppress(OSError):  # removed meanwhile, without a lock, in use, or with files of others
                if folder.is_dir(follow_symlinks=False) and folder.stat().st_uid == os.getuid():
                    _remove_if_unlocked(Path(folder.path))


def _remove_if_unlocked(folder: Path) -> None:
    """Remove the files of a disk tier, then its folder, if no process holds its lock."""
    lock = folder / _LOCK_NAME
    file = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.read(file, 4096) != _machine().encode():
            return
        for copy in folder.glob("*.safetensors*"):
            copy.unlink()
        lock.unlink()  # last: until then, the next engine finds the folder
    finally:
        os.close(file)
    folder.rmdir()


def _remove(folder: Path, pid: int, lock: int | None) -> None:
    """Remove the folder, except in a forked child of its creator."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


TransferKind = Literal["load", "offload", "copy", "lower"]

EVENT_KINDS: dict[TransferKind, str] = {
    "load": "loaded",
    "offload": "offloaded",
    "copy": "copied",
    "lower": "demoted",
}
REMOTE_TIER = "remote"  # tier name of the source of an imported entry, in events


@dataclass(eq=False)
class TransferJob:
    """One transfer in flight, with its entry and copy."""

    kind: TransferKind
    entry: KVEntry
    copy: TierCopy  # copy that is read (load) or written (offload, copy, lower)
    transfer: Transfer
    source: HostTier | None = None  # tier that a demoted copy leaves


class OffloadManager:
    """Offload tiers, highest first, and the transfers between tiers and device.

    A transfer only copies. `complete` applies its effect on the cache, in the engine thread.
    """

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

    def enable_hidden_cache(self, layers: Iterable[int], hidden_size: int, dtype: torch.dtype) -> None:
        """Cache the inputs of these layers, on the device and all tiers.

        No transfer may be running.
        """
        assert not self.jobs
        self.pool.enable_hidden_cache(layers, hidden_size, dtype)
        for tier in self.tiers:
            if isinstance(tier, HostTier):  # files store every tensor that exists
                tier.pool.enable_hidden_cache(layers, hidden_size, dtype)

    def accepts(self, tier: Tier, entry: KVEntry) -> bool:
        """Return whether an empty tier could store the entry."""
        is_supported = not entry.is_partial and tier.name not in entry.storage.failed_tiers
        return is_supported and tier.fits_when_empty(len(entry.tokens))

    def load(self, entry: KVEntry) -> None:
        """Start filling an entry's allocated pages from its nearest copy."""
        tier = next(t for t in self.tiers if t.name in entry.tier_copies)
        copy = entry.tier_copies[tier.name]
        self._start("load", entry, copy, tier.load_ops(copy, self.pool, entry.pages))

    def load_remote(self, entry: KVEntry, ops: TransferOps, executor: ThreadExecutor) -> None:
        """Start filling an entry's allocated pages from an external source."""
        self._start("load", entry, TierCopy(REMOTE_TIER, len(entry.tokens)), ops, executor=executor)

    def offload(self, entry: KVEntry, tier: Tier, *, stays: bool = False) -> None:
        """Start copying an entry from the device to a tier with space.

        Args:
            stays: the entry keeps its pages on the device; without it, they are freed once they are copied.
        """
        copy = tier.reserve(len(entry.tokens))
        self._start("copy" if stays else "offload", entry, copy, tier.store_ops(self.pool, entry.pages, copy))

    def demote(self, entry: KVEntry, source: HostTier, tier: Tier) -> None:
        """Start copying an entry from one tier to a lower one."""
        copy = tier.reserve(len(entry.tokens))
        ops = tier.store_ops(source.pool, entry.tier_copies[source.name].pages, copy)
        self._start("lower", entry, copy, ops, source)

    def _start(
        self,
        kind: TransferKind,
        entry: KVEntry,
        copy: TierCopy,
        ops: TransferOps,
        source: HostTier | None = None,
        executor: ThreadExecutor | None = None,
    ) -> None:
        assert entry.transfer is None, f"KV entry {entry.id} already has a transfer"
        direction: Literal["loading", "offloading"] = "loading" if kind == "load" else "offloading"
        transfer = Transfer(direction, len(self.pool.keys), copy.tokens, *ops)
        try:
            (executor or self.executor).start(transfer)
        except BaseException:
            if kind != "load":
                self.free(entry, copy)
            raise
        entry.storage.transfer = transfer
        self.jobs.append(TransferJob(kind, entry, copy, transfer, source))
        self.num_loads += kind == "load"

    def complete(self, job: TransferJob) -> None:
        """Add a finished transfer's copy to the entry, or roll back.

        The caller frees the device pages of a failed load.
        """
        self.jobs.remove(job)
        self.num_loads -= job.kind == "load"
        entry, transfer = job.entry, job.transfer
        entry.storage.transfer = None
        if transfer.error is not None:
            if not (job.kind == "load" and transfer.cancelled):  # a copy that cannot be read is useless
                self.free(entry, job.copy)
            if job.kind == "load":
                entry.storage.lost_reason = str(transfer.error)
            if job.kind != "load" and not transfer.cancelled:  # do not retry: a disk may be full
                entry.storage.failed_tiers.add(job.copy.tier)
            self._events.emit("failed_transfer", entry=entry.id, way=job.kind, why=repr(transfer.error))
            return
        if job.kind != "load":
            entry.tier_copies[job.copy.tier] = job.copy
        if job.source is not None:
            self.free(entry, entry.tier_copies[job.source.name])
        self._events.emit(EVENT_KINDS[job.kind], entry=entry.id, tokens=job.copy.tokens, tier=job.copy.tier)

    def free(self, entry: KVEntry, copy: TierCopy) -> None:
        """Free a copy of an entry."""
        if entry.tier_copies.get(copy.tier) is copy:
            del entry.tier_copies[copy.tier]
        for tier in self.tiers:
            try:
                if tier.name == copy.tier:
                    tier.free(copy)
            except OSError as exc:  # the file stays until the tier is closed
                self._events.emit("orphaned_file", entry=entry.id, tokens=copy.tokens, why=repr(exc))

    def wait(self) -> bool:
        """Wait for the oldest transfer; return False if there is none."""
        if not self.jobs:
            return False
        self.executor.wait(self.jobs[0].transfer)
        return True

    def layer_waiters(self, slices: Iterable[KVSlice]) -> tuple[Callable[[int], None], ...]:
        """Return a function per loading entry that waits for a layer.

        It waits only for layers in which the entry is visible.
        """
        loading: dict[Transfer, list[KVSlice]] = {}
        for kv_slice in slices:
            transfer = kv_slice.entry.transfer
            if transfer is not None and transfer.direction == "loading":
                loading.setdefault(transfer, []).append(kv_slice)

        def wait_for_layer(transfer: Transfer, visible: list[KVSlice], layer: int) -> None:
            if any(kv_slice.visible_in(layer) for kv_slice in visible):
                self.executor.wait_for(transfer, layer)

        return tuple(partial(wait_for_layer, transfer, visible) for transfer, visible in loading.items())

    def wait_for_inputs(self, entry: KVEntry, layer: int) -> None:
        """Wait until the cached inputs of a layer are not being loaded."""
        transfer = entry.transfer
        if transfer is not None and transfer.direction == "loading":
            self.executor.wait_for(transfer, -1 if transfer.inputs_first else layer)

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
