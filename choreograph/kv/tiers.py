"""Where encodings wait off the device: host memory and disk, each within its budget. Knows bytes, not policies.

A tier reserves room for a copy, says how to fill it from an arena and how to read it back (layer by layer, for a
`Transfer`), and frees it. The host tier is an arena of its own; the disk tier writes one checked file per encoding.
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

from ..config import CacheConfig, budget
from ..errors import ConfigError
from ..places import make_folder
from .arena import Arena


@dataclass
class Copy:
    """What a tier keeps of one encoding: pages of the host arena, or a file and the checksum of its content."""

    tier: str
    tokens: int
    pages: list[int] = field(default_factory=list)
    file: Path | None = None
    checksum: int | None = None


class Work(NamedTuple):
    """The three parts of a transfer."""

    copy_layer: Callable[[int], None]
    prepare: Callable[[], None] = lambda: None
    finish: Callable[[], None] = lambda: None


class Damaged(Exception):
    """A copy that is not what was written."""


@runtime_checkable
class Tier(Protocol):
    name: str

    def keep_inputs(self, layers: Iterable[int], width: int) -> None:
        """What comes into some layers will be kept too."""

    def fits(self, tokens: int) -> bool:
        """Whether there is room for a copy now."""

    def ever_fits(self, tokens: int) -> bool:
        """Whether there would be room if the tier were empty."""

    def reserve(self, tokens: int) -> Copy: ...

    def free(self, copy: Copy) -> None:
        """Its room is free, even if OSError says that what it was could not be removed."""

    def put(self, source: Arena, pages: Sequence[int], copy: Copy) -> Work: ...

    def get(self, copy: Copy, target: Arena, pages: Sequence[int]) -> Work: ...

    def check(self, copies: Sequence[Copy]) -> None:
        """Raises AssertionError unless exactly these copies take room."""

    def close(self) -> None: ...


class HostTier:
    """An arena in host memory, pinned where the device is a GPU, so that a copy is a few long moves."""

    name = "host"

    def __init__(self, device: Arena, tokens: int) -> None:
        self.arena = Arena(
            pages=tokens // device.page_size,
            page_size=device.page_size,
            layers=[(k.shape[1], k.shape[2]) for k in device.keys],
            dtype=device.keys[0].dtype,
            device=torch.device("cpu"),
            poison=device.poison,
            pinned=device.keys[0].is_cuda,
        )

    def keep_inputs(self, layers: Iterable[int], width: int) -> None:
        self.arena.keep_inputs(layers, width)

    def fits(self, tokens: int) -> bool:
        return self.arena.pages_for(tokens) <= self.arena.free_pages

    def ever_fits(self, tokens: int) -> bool:
        return self.arena.pages_for(tokens) <= self.arena.pages

    def reserve(self, tokens: int) -> Copy:
        return Copy(self.name, tokens, pages=self.arena.allocate(self.arena.pages_for(tokens)))

    def free(self, copy: Copy) -> None:
        self.arena.release(copy.pages)
        copy.pages = []

    def put(self, source: Arena, pages: Sequence[int], copy: Copy) -> Work:
        return Work(_between(source, pages, self.arena, copy.pages, copy.tokens))

    def get(self, copy: Copy, target: Arena, pages: Sequence[int]) -> Work:
        return Work(_between(self.arena, copy.pages, target, pages, copy.tokens))

    def check(self, copies: Sequence[Copy]) -> None:
        self.arena.check()
        taken = [page for copy in copies for page in copy.pages]
        assert len(taken) == len(set(taken)), "two copies share a page of host memory"
        assert len(taken) + self.arena.free_pages == self.arena.pages, "pages of host memory are lost"

    def close(self) -> None:
        pass


class DiskTier:
    """One safetensors file per encoding in a folder of its own, which goes with the engine."""

    name = "disk"

    def __init__(self, device: Arena, tokens: int, folder: str | os.PathLike[str] | None = None) -> None:
        """Raises ConfigError for a folder that takes no files."""
        self._token_bytes = device.bytes_per_token
        self._limit = tokens
        self._used = 0
        if folder is not None:
            make_folder(Path(folder))
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="choreograph-", dir=folder))
        except OSError as problem:
            raise ConfigError(
                f"disk_folder={folder!r}: nothing can be written there ({problem}); use another"
            ) from None
        self._names = itertools.count(1)
        self.close = weakref.finalize(self, _remove, self.folder, os.getpid())

    def keep_inputs(self, layers: Iterable[int], width: int) -> None:
        pass  # a file holds what there is

    def fits(self, tokens: int) -> bool:
        return self.ever_fits(self._used + tokens)

    def ever_fits(self, tokens: int) -> bool:
        return tokens <= self._limit and self.close.alive

    def reserve(self, tokens: int) -> Copy:
        assert self.fits(tokens)
        self._used += tokens
        return Copy(self.name, tokens, file=self.folder / f"{next(self._names)}.safetensors")

    def free(self, copy: Copy) -> None:
        file, copy.file = copy.file, None
        if file is not None:
            self._used -= copy.tokens  # whatever the disk says
            try:
                file.with_suffix(".part").unlink(missing_ok=True)
            finally:
                file.unlink(missing_ok=True)

    def put(self, source: Arena, pages: Sequence[int], copy: Copy) -> Work:
        staging: dict[str, np.ndarray] = {}
        file, moves = copy.file, _moves(pages, source.page_size, None, copy.tokens)
        assert file is not None

        def copy_layer(layer: int) -> None:
            for name, tensor in source.tensors(layer).items():
                staging[f"{name}.{layer}"] = np.concatenate([raw(tensor[a : a + n].cpu()) for a, _, n in moves])

        def finish() -> None:
            copy.checksum = checksum(staging[name].data for name in sorted(staging))
            part = file.with_suffix(".part")
            save_file(staging, part)
            os.replace(part, file)
            staging.clear()

        return Work(copy_layer, finish=finish)

    def get(self, copy: Copy, target: Arena, pages: Sequence[int]) -> Work:
        staging: dict[str, np.ndarray] = {}
        moves = _moves(pages, target.page_size, None, copy.tokens)

        def prepare() -> None:
            assert copy.file is not None
            try:
                staging.update(load_file(copy.file))
            except (OSError, SafetensorError, ValueError) as problem:
                raise Damaged(f"cannot be read: {problem}") from problem
            if checksum(staging[name].data for name in sorted(staging)) != copy.checksum:
                raise Damaged("its checksum is another")

        def copy_layer(layer: int) -> None:
            for name, tensor in target.tensors(layer).items():
                content, at = staging.pop(f"{name}.{layer}", None), 0
                if content is None and name == "inputs":  # nobody kept them when the copy was made
                    continue
                assert content is not None
                for slot, _, count in moves:
                    _fill(tensor[slot : slot + count], content[at : at + count])
                    at += count

        return Work(copy_layer, prepare=prepare, finish=staging.clear)

    def check(self, copies: Sequence[Copy]) -> None:
        assert self._used == sum(copy.tokens for copy in copies) <= self._limit, "room on disk is miscounted"


def make_tiers(arena: Arena, config: CacheConfig) -> list[Tier]:
    """The tiers below the device that the options ask for, highest first."""
    tiers: list[Tier] = []
    if config.host:
        tiers.append(HostTier(arena, budget(config.host, arena.bytes_per_token)))
    if config.disk:
        tiers.append(DiskTier(arena, budget(config.disk, arena.bytes_per_token), config.disk_folder))
    return tiers


def _between(source: Arena, from_pages: Sequence[int], target: Arena, to_pages: Sequence[int], tokens: int):
    """Copies all that is kept of one layer from pages of one arena to pages of another."""
    moves = _moves(from_pages, source.page_size, to_pages, tokens)

    def copy_layer(layer: int) -> None:
        from_, to = source.tensors(layer), target.tensors(layer)
        for old, new in ((from_[name], to[name]) for name in from_ if name in to):
            for a, b, count in moves:
                if old.device.type == new.device.type == "cpu":
                    _fill(new[b : b + count], raw(old[a : a + count]))
                else:
                    new[b : b + count].copy_(old[a : a + count], non_blocking=True)

    return copy_layer


def _moves(
    from_pages: Sequence[int], size: int, to_pages: Sequence[int] | None, tokens: int
) -> list[tuple[int, int, int]]:
    """(slot, slot, count) of each stretch that is consecutive on both sides; without a target, of the source alone."""
    moves: list[tuple[int, int, int]] = []
    left = tokens
    for old, new in zip(from_pages, to_pages if to_pages is not None else from_pages, strict=True):
        a, b, count = old * size, new * size, min(left, size)
        left -= count
        last = moves[-1] if moves else (0, 0, 0)
        if moves and (a, b) == (last[0] + last[2], last[1] + last[2]):
            moves[-1] = (last[0], last[1], last[2] + count)
        else:
            moves.append((a, b, count))
    assert left == 0, "pages and tokens do not agree"
    return moves


def raw(slots: Tensor) -> np.ndarray:
    """Bytes of some slots in host memory, as numpy sees them: (count, bytes of a slot)."""
    return slots.detach().reshape(len(slots), -1).view(torch.uint8).numpy()


def _fill(slots: Tensor, content: np.ndarray) -> None:
    """Writes bytes into slots. In host memory with one thread: torch would take all cores from the step."""
    if slots.device.type == "cpu":
        raw(slots)[:] = content
    else:
        slots.copy_(torch.from_numpy(content).view(slots.dtype).reshape(slots.shape))


def checksum(parts: Iterable[bytes | memoryview]) -> int:
    """Of all parts in their order. Reads gigabytes a second, and lets other threads run meanwhile."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def _remove(folder: Path, process: int) -> None:
    """In the process that made it: a forked child ends too."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
