"""Frozen options, validated once when made. Owns defaults; knows no tensors and no messages."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from .errors import ConfigError
from .places import may_be_folder

BACKENDS = ("auto", "native", "triton", "flex", "sdpa", "reference")
EVICTIONS = ("workflow", "lru", "lfu", "fifo")
QUANTIZATIONS = (None, "int8", "int4")


_UNITS = {
    unit: base**power
    for power, letter in enumerate("kmgt", 1)
    for unit, base in ((f"{letter}b", 1000), (f"{letter}ib", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)", re.IGNORECASE)


def _check(ok: bool, name: str, value: object, mend: str) -> None:
    if not ok:
        raise ConfigError(f"{name}={value!r}: {mend}")


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_size(value: object) -> bool:
    return isinstance(value, str) and _SIZE.fullmatch(value) is not None


def budget(size: int | str, bytes_per_token: int) -> int:
    """Tokens that a budget holds: a number of tokens, or a size in bytes."""
    if isinstance(size, int):
        return size
    found = _SIZE.fullmatch(size)
    assert found is not None
    return int(float(found[1]) * _UNITS[found[2].lower()]) // bytes_per_token


def _check_switch(name: str, value: object) -> None:
    _check(isinstance(value, bool), name, value, "use True or False")


def check_count(value: object, name: str, least: int) -> None:
    """Raises ConfigError unless `value` is a whole number of at least `least`."""
    _check(_whole(value, least), name, value, f"use {least} or more")


@dataclass(frozen=True)
class CacheConfig:
    """Where encodings live.

    tokens: slots of the arena, or a size ("4GiB"); None sizes it from the model's limit and the free memory.
    page_size: slots in a page, the unit of allocation.
    eviction: which encodings that no call uses leave the device first.
    host, disk: room below the device for what leaves it, in tokens or as a size ("4GiB"); None: no such tier.
    disk_folder: where the files of the disk tier go; None: the folder for temporary files.
    poison: fill freed pages with NaN, so that a read of freed memory cannot go unseen (tests).
    """

    tokens: int | str | None = None
    page_size: int = 16
    eviction: str = "lru"
    host: int | str | None = None
    disk: int | str | None = None
    disk_folder: str | os.PathLike[str] | None = None
    poison: bool = False

    def __post_init__(self) -> None:
        _check(_whole(self.page_size, 1), "page_size", self.page_size, "use 1 or more")
        _check(
            self.tokens is None or _whole(self.tokens, self.page_size) or _is_size(self.tokens),
            "tokens",
            self.tokens,
            f'use None, at least one page of {self.page_size}, or a size like "512MiB" or "4GiB"',
        )
        for name in ("host", "disk"):
            value = getattr(self, name)
            ok = value is None or _whole(value, 1) or _is_size(value)
            _check(ok, name, value, 'use None, a number of tokens, or a size like "512MiB" or "4GiB"')
        folder = self.disk_folder
        ok = folder is None or (isinstance(folder, (str, os.PathLike)) and may_be_folder(Path(folder)))
        _check(ok, "disk_folder", folder, "use None, or the path of a folder that is there or can be made")
        _check(self.eviction in EVICTIONS, "eviction", self.eviction, f"use one of {EVICTIONS}")
        _check_switch("poison", self.poison)


def check_sizes(cache: CacheConfig, token_bytes: int, device: int, host: int) -> None:
    """Raises ConfigError for a size that holds not a page, or nothing, and for more than the memory of the device or of
    the host. token_bytes: of one token; device, host: bytes of their memory."""
    for name, least, most in (("tokens", cache.page_size, device), ("host", cache.page_size, host), ("disk", 1, None)):
        size = getattr(cache, name)
        if size is None:
            continue
        held = budget(size, token_bytes)
        _check(
            held >= least,
            name,
            size,
            f"{least * token_bytes:,} bytes hold {least} token{'s' * (least > 1)}; use that or more",
        )
        fits = most is None or held * token_bytes <= most
        _check(fits, name, size, f"that takes {held * token_bytes:,} bytes, the memory has {most or 0:,}; use less")


@dataclass(frozen=True)
class SchedulerConfig:
    """How much one step does.

    max_step_tokens: rows of one forward pass; longer prefills are cut into chunks of what is left.
    max_calls: calls that may be in flight at once.
    status_aware: pass over calls whose context is being loaded while others are ready.
    """

    max_step_tokens: int = 1024
    max_calls: int = 256
    status_aware: bool = True

    def __post_init__(self) -> None:
        _check(_whole(self.max_step_tokens, 1), "max_step_tokens", self.max_step_tokens, "use 1 or more")
        _check(_whole(self.max_calls, 1), "max_calls", self.max_calls, "use 1 or more")
        _check_switch("status_aware", self.status_aware)


@dataclass(frozen=True)
class EngineConfig:
    """All options of an engine.

    backend: the attention code: `auto` takes the kernel that is made for the device, where it can be built.
    compile: run small steps through `torch.compile`, on a GPU as CUDA graphs; the first use of a bucket waits for it.
    compile_rows: row counts that get a graph; a step is padded to the next one. None: 1 to 16, on a GPU 2 to 256. On
    the CPU each graph keeps weights of its own, packed: as much memory again as the model.
    quantization: None, or "int8" or "int4" for weight-only quantisation through torchao.
    max_positions: fewer logical positions than the model has; None: all. Rotary tables that change with the length
    (long-rope, dynamic) are frozen at this many.
    """

    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    backend: str = "auto"
    compile: bool = False
    compile_rows: tuple[int, ...] | None = None
    quantization: str | None = None
    max_positions: int | None = None

    def __post_init__(self) -> None:
        _check(isinstance(self.cache, CacheConfig), "cache", self.cache, "use CacheConfig(...)")
        _check(isinstance(self.scheduler, SchedulerConfig), "scheduler", self.scheduler, "use SchedulerConfig(...)")
        _check_switch("compile", self.compile)
        _check(self.backend in BACKENDS, "backend", self.backend, f"use one of {BACKENDS}")
        _check(
            self.quantization in QUANTIZATIONS,
            "quantization",
            self.quantization,
            f"use one of {QUANTIZATIONS}",
        )
        _check(
            self.max_positions is None or _whole(self.max_positions, 1),
            "max_positions",
            self.max_positions,
            "use None or 1 or more",
        )
        rows = self.compile_rows
        _check(
            rows is None
            or (
                isinstance(rows, tuple)
                and rows != ()
                and all(_whole(r, 1) for r in rows)
                and sorted(set(rows)) == list(rows)
            ),
            "compile_rows",
            rows,
            "use None or rising whole numbers of 1 or more",
        )
