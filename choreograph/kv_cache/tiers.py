"""Offload tiers for KV entries: host memory and disk, each with a capacity.

A tier reserves space for a copy, returns the operations that fill it from a pool and read it back
(layer by layer, for a `Transfer`), and frees it. The host tier is a `KVPool` of its own; the disk tier
writes one checksummed file per entry.
"""

import itertools
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from ..config import CacheConfig, parse_capacity
from ..errors import ConfigError
from ..utils import ensure_dir
from .pool import KVPool


@dataclass
class TierCopy:
    """Copy of one KV entry on a tier."""

    tier: str  # name of the tier
    tokens: int  # number of tokens
    pages: list[int] = field(default_factory=list)  # pages of the host pool
    file: Path | None = None  # file of the disk tier
    checksum: int | None = None  # CRC-32 of the file's content


class TransferOps(NamedTuple):
    """The three operations of a transfer, all run in the background."""

    copy_layer: Callable[[int], None]  # called with each layer index
    prepare: Callable[[], None] = lambda: None  # before the first layer
    finish: Callable[[], None] = lambda: None  # after the last layer


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
        copy.pages = []

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
    """Disk tier: one safetensors file per entry in a temporary folder, removed with the engine.

    Methods are those of `HostTier`.

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
            self.folder = Path(tempfile.mkdtemp(prefix="choreograph-", dir=folder))
        except OSError as exc:
            raise ConfigError(f"disk_dir={folder!r}: nothing can be written there ({exc}); use another") from None
        self._names = itertools.count(1)
        self.close = weakref.finalize(self, _remove, self.folder, os.getpid())

    def fits(self, tokens: int) -> bool:
        return self.fits_when_empty(self._used + tokens)

    def fits_when_empty(self, tokens: int) -> bool:
        return tokens <= self._limit and self.close.alive

    def reserve(self, tokens: int) -> TierCopy:
        assert self.fits(tokens)
        self._used += tokens
        return TierCopy(self.name, tokens, file=self.folder / f"{next(self._names)}.safetensors")

    def free(self, copy: TierCopy) -> None:
        """Free a copy. Its space counts as free even if removing it raises OSError."""
        file, copy.file = copy.file, None
        if file is not None:
            self._used -= copy.tokens
            try:
                file.with_suffix(".part").unlink(missing_ok=True)
            finally:
                file.unlink(missing_ok=True)

    def store_ops(self, source: KVPool, pages: Sequence[int], copy: TierCopy) -> TransferOps:
        staging: dict[str, np.ndarray] = {}
        file, ranges = copy.file, _copy_ranges(pages, pages, source.page_size, copy.tokens)
        assert file is not None

        def copy_layer(layer: int) -> None:
            for name, tensor in source.tensors(layer).items():
                parts = [as_bytes(tensor[slot : slot + count].cpu()) for slot, _, count in ranges]
                staging[f"{name}.{layer}"] = np.concatenate(parts)

        def finish() -> None:
            copy.checksum = checksum(staging[name].data for name in sorted(staging))
            part = file.with_suffix(".part")
            save_file(staging, part)
            os.replace(part, file)
            staging.clear()

        return TransferOps(copy_layer, finish=finish)

    def load_ops(self, copy: TierCopy, target: KVPool, pages: Sequence[int]) -> TransferOps:
        staging: dict[str, np.ndarray] = {}
        ranges = _copy_ranges(pages, pages, target.page_size, copy.tokens)

        def prepare() -> None:
            assert copy.file is not None
            staging.update(load_file(copy.file))
            if checksum(staging[name].data for name in sorted(staging)) != copy.checksum:
                raise OSError(f"{copy.file}: checksum mismatch")

        def copy_layer(layer: int) -> None:
            for name, tensor in target.tensors(layer).items():
                content, start = staging.pop(f"{name}.{layer}", None), 0
                if content is None and name == "inputs":  # inputs were not cached when the copy was written
                    continue
                assert content is not None
                for slot, _, count in ranges:
                    _write_bytes(tensor[slot : slot + count], content[start : start + count])
                    start += count

        return TransferOps(copy_layer, prepare=prepare, finish=staging.clear)

    def check(self, copies: Sequence[TierCopy]) -> None:
        assert self._used == sum(copy.tokens for copy in copies) <= self._limit, "disk usage is miscounted"


Tier = HostTier | DiskTier


def make_tiers(pool: KVPool, config: CacheConfig) -> list[Tier]:
    """Create the configured offload tiers, highest first."""
    tiers: list[Tier] = []
    if config.host_capacity:
        tiers.append(HostTier(pool, parse_capacity(config.host_capacity, pool.bytes_per_token)))
    if config.disk_capacity:
        tiers.append(DiskTier(pool, parse_capacity(config.disk_capacity, pool.bytes_per_token), config.disk_dir))
    return tiers


def _copy_between(
    source: KVPool, from_pages: Sequence[int], target: KVPool, to_pages: Sequence[int], tokens: int
) -> Callable[[int], None]:
    """Return a function that copies a layer from pages of one pool to pages of another."""
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
    """Return (source slot, target slot, count) of each range contiguous in source and target."""
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


def as_bytes(slots: Tensor) -> np.ndarray:
    """View slots in host memory as a numpy array: (slots, bytes per slot) uint8."""
    return slots.detach().reshape(len(slots), -1).view(torch.uint8).numpy()


def _write_bytes(slots: Tensor, content: np.ndarray) -> None:
    """Write bytes into slots; on the host with one thread, since torch would use all cores."""
    if slots.device.type == "cpu":
        as_bytes(slots)[:] = content
    else:
        slots.copy_(torch.from_numpy(content).view(slots.dtype).reshape(slots.shape))


def checksum(parts: Iterable[bytes | memoryview]) -> int:
    """Return the CRC-32 of all parts in order. Gigabytes per second; releases the GIL."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def _remove(folder: Path, pid: int) -> None:
    """Remove the folder, unless this is a forked child of the process that created it."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
