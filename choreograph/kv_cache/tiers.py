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
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from safetensors import SafetensorError
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


class CorruptCopyError(Exception):
    """A copy cannot be read or fails its checksum."""


@runtime_checkable
class Tier(Protocol):
    """Storage below the device that keeps copies of KV entries."""

    name: str

    def enable_hidden_cache(self, layers: Iterable[int], hidden_size: int) -> None:
        """Also keep the inputs of these layers from now on."""

    def fits(self, tokens: int) -> bool:
        """Return whether a copy of `tokens` tokens fits now."""

    def fits_when_empty(self, tokens: int) -> bool:
        """Return whether a copy of `tokens` tokens would fit if the tier were empty."""

    def reserve(self, tokens: int) -> TierCopy: ...

    def free(self, copy: TierCopy) -> None:
        """Free a copy. Its space counts as free even if removing it raises OSError."""

    def store_ops(self, source: KVPool, pages: Sequence[int], copy: TierCopy) -> TransferOps: ...

    def load_ops(self, copy: TierCopy, target: KVPool, pages: Sequence[int]) -> TransferOps: ...

    def check(self, copies: Sequence[TierCopy]) -> None:
        """Raise AssertionError unless exactly these copies use space."""

    def close(self) -> None: ...


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

    def enable_hidden_cache(self, layers: Iterable[int], hidden_size: int) -> None:
        self.pool.enable_hidden_cache(layers, hidden_size)

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
        return TransferOps(_copy_between(source, pages, self.pool, copy.pages, copy.tokens))

    def load_ops(self, copy: TierCopy, target: KVPool, pages: Sequence[int]) -> TransferOps:
        return TransferOps(_copy_between(self.pool, copy.pages, target, pages, copy.tokens))

    def check(self, copies: Sequence[TierCopy]) -> None:
        self.pool.check()
        used_pages = [page for copy in copies for page in copy.pages]
        assert len(used_pages) == len(set(used_pages)), "two copies share a page of host memory"
        assert len(used_pages) + self.pool.free_pages == self.pool.pages, "pages of host memory are lost"

    def close(self) -> None:
        pass


class DiskTier:
    """Disk tier: one safetensors file per entry in a temporary folder, removed with the engine."""

    name = "disk"

    def __init__(self, device_pool: KVPool, tokens: int, folder: str | os.PathLike[str] | None = None) -> None:
        """Create the folder.

        Raises:
            ConfigError: if `folder` is not writable.
        """
        self._token_bytes = device_pool.bytes_per_token
        self._limit = tokens
        self._used = 0
        if folder is not None:
            ensure_dir(Path(folder))
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="choreograph-", dir=folder))
        except OSError as exc:
            raise ConfigError(f"disk_dir={folder!r}: nothing can be written there ({exc}); use another") from None
        self._names = itertools.count(1)
        self.close = weakref.finalize(self, _remove, self.folder, os.getpid())

    def enable_hidden_cache(self, layers: Iterable[int], hidden_size: int) -> None:
        pass  # files store every tensor that exists

    def fits(self, tokens: int) -> bool:
        return self.fits_when_empty(self._used + tokens)

    def fits_when_empty(self, tokens: int) -> bool:
        return tokens <= self._limit and self.close.alive

    def reserve(self, tokens: int) -> TierCopy:
        assert self.fits(tokens)
        self._used += tokens
        return TierCopy(self.name, tokens, file=self.folder / f"{next(self._names)}.safetensors")

    def free(self, copy: TierCopy) -> None:
        file, copy.file = copy.file, None
        if file is not None:
            self._used -= copy.tokens  # even if the file cannot be removed
            try:
                file.with_suffix(".part").unlink(missing_ok=True)
            finally:
                file.unlink(missing_ok=True)

    def store_ops(self, source: KVPool, pages: Sequence[int], copy: TierCopy) -> TransferOps:
        staging: dict[str, np.ndarray] = {}
        file, ranges = copy.file, _copy_ranges(pages, source.page_size, None, copy.tokens)
        assert file is not None

        def copy_layer(layer: int) -> None:
            for name, tensor in source.tensors(layer).items():
                staging[f"{name}.{layer}"] = np.concatenate([as_bytes(tensor[a : a + n].cpu()) for a, _, n in ranges])

        def finish() -> None:
            copy.checksum = checksum(staging[name].data for name in sorted(staging))
            part = file.with_suffix(".part")
            save_file(staging, part)
            os.replace(part, file)
            staging.clear()

        return TransferOps(copy_layer, finish=finish)

    def load_ops(self, copy: TierCopy, target: KVPool, pages: Sequence[int]) -> TransferOps:
        staging: dict[str, np.ndarray] = {}
        ranges = _copy_ranges(pages, target.page_size, None, copy.tokens)

        def prepare() -> None:
            assert copy.file is not None
            try:
                staging.update(load_file(copy.file))
            except (OSError, SafetensorError, ValueError) as exc:
                raise CorruptCopyError(f"cannot be read: {exc}") from exc
            if checksum(staging[name].data for name in sorted(staging)) != copy.checksum:
                raise CorruptCopyError("checksum mismatch")

        def copy_layer(layer: int) -> None:
            for name, tensor in target.tensors(layer).items():
                content, at = staging.pop(f"{name}.{layer}", None), 0
                if content is None and name == "inputs":  # inputs were not cached when the copy was written
                    continue
                assert content is not None
                for slot, _, count in ranges:
                    _write_bytes(tensor[slot : slot + count], content[at : at + count])
                    at += count

        return TransferOps(copy_layer, prepare=prepare, finish=staging.clear)

    def check(self, copies: Sequence[TierCopy]) -> None:
        assert self._used == sum(copy.tokens for copy in copies) <= self._limit, "disk usage is miscounted"


def make_tiers(pool: KVPool, config: CacheConfig) -> list[Tier]:
    """Create the configured offload tiers, highest first."""
    tiers: list[Tier] = []
    if config.host_capacity:
        tiers.append(HostTier(pool, parse_capacity(config.host_capacity, pool.bytes_per_token)))
    if config.disk_capacity:
        tiers.append(DiskTier(pool, parse_capacity(config.disk_capacity, pool.bytes_per_token), config.disk_dir))
    return tiers


def _copy_between(source: KVPool, from_pages: Sequence[int], target: KVPool, to_pages: Sequence[int], tokens: int):
    """Return a function that copies a layer from pages of one pool to pages of another."""
    ranges = _copy_ranges(from_pages, source.page_size, to_pages, tokens)

    def copy_layer(layer: int) -> None:
        from_, to = source.tensors(layer), target.tensors(layer)
        for old, new in ((from_[name], to[name]) for name in from_ if name in to):
            for a, b, count in ranges:
                if old.device.type == new.device.type == "cpu":
                    _write_bytes(new[b : b + count], as_bytes(old[a : a + count]))
                else:
                    new[b : b + count].copy_(old[a : a + count], non_blocking=True)

    return copy_layer


def _copy_ranges(
    from_pages: Sequence[int], page_size: int, to_pages: Sequence[int] | None, tokens: int
) -> list[tuple[int, int, int]]:
    """Return (source slot, target slot, count) of each range contiguous in source and target.

    Without `to_pages`, ranges are those of the source alone.
    """
    ranges: list[tuple[int, int, int]] = []
    left = tokens
    for old, new in zip(from_pages, to_pages if to_pages is not None else from_pages, strict=True):
        a, b, count = old * page_size, new * page_size, min(left, page_size)
        left -= count
        last = ranges[-1] if ranges else (0, 0, 0)
        if ranges and (a, b) == (last[0] + last[2], last[1] + last[2]):
            ranges[-1] = (last[0], last[1], last[2] + count)
        else:
            ranges.append((a, b, count))
    assert left == 0, "number of pages does not match the tokens"
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
