"""Engine configuration: frozen dataclasses, validated once when created."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from .errors import ConfigError
from .utils import can_create_dir

BACKENDS = ("auto", "native", "triton", "sdpa", "reference")

EVICTION_POLICIES = ("workflow", "lru", "lfu", "fifo")

QUANTIZATIONS = (None, "int8", "int4")

_UNITS = {
    unit: base**power
    for power, letter in enumerate("kmgt", 1)
    for unit, base in ((f"{letter}b", 1000), (f"{letter}ib", 1024))
}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)", re.IGNORECASE)


def _check(ok: bool, name: str, value: object, hint: str) -> None:
    if not ok:
        raise ConfigError(f"{name}={value!r}: {hint}")


def _is_int(value: object, min_value: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= min_value


def _is_size(value: object) -> bool:
    return isinstance(value, str) and _SIZE.fullmatch(value) is not None


def parse_capacity(size: int | str, bytes_per_token: int) -> int:
    """Return a capacity in tokens; `size` is a number of tokens or a size in bytes ("4GiB")."""
    if isinstance(size, int):
        return size
    result = _SIZE.fullmatch(size)
    assert result is not None
    return int(float(result[1]) * _UNITS[result[2].lower()]) // bytes_per_token


def _check_switch(name: str, value: object) -> None:
    _check(isinstance(value, bool), name, value, "use True or False")


def check_count(value: object, name: str, min_value: int) -> None:
    """Raise ConfigError unless `value` is an integer of at least `min_value`."""
    _check(_is_int(value, min_value), name, value, f"use {min_value} or more")


@dataclass(frozen=True)
class CacheConfig:
    """Size of the KV cache, its lower tiers and its eviction policy."""

    capacity: int | str | None = None  # device tokens or bytes ("4GiB"); None: from the model limit and free memory
    page_size: int = 16  # tokens per page, the unit of allocation
    eviction: str = "lru"  # policy that ranks unreferenced entries, one of EVICTION_POLICIES
    host_capacity: int | str | None = None  # host tier, tokens or bytes ("4GiB"); None: no host tier
    disk_capacity: int | str | None = None  # disk tier, tokens or bytes ("4GiB"); None: no disk tier
    disk_dir: str | os.PathLike[str] | None = None  # directory of the disk tier; None: the temporary directory
    poison_freed_pages: bool = False  # fill freed pages with NaN, so that tests detect reads of freed memory

    def __post_init__(self) -> None:
        _check(_is_int(self.page_size, 1), "page_size", self.page_size, "use 1 or more")
        _check(
            self.capacity is None or _is_int(self.capacity, self.page_size) or _is_size(self.capacity),
            "capacity",
            self.capacity,
            f'use None, at least one page of {self.page_size}, or a size like "512MiB" or "4GiB"',
        )
        for name in ("host_capacity", "disk_capacity"):
            value = getattr(self, name)
            ok = value is None or _is_int(value, 1) or _is_size(value)
            _check(ok, name, value, 'use None, a number of tokens, or a size like "512MiB" or "4GiB"')
        folder = self.disk_dir
        ok = folder is None or (isinstance(folder, (str, os.PathLike)) and can_create_dir(Path(folder)))
        _check(ok, "disk_dir", folder, "use None, or the path of a directory that exists or can be created")
        _check(self.eviction in EVICTION_POLICIES, "eviction", self.eviction, f"use one of {EVICTION_POLICIES}")
        _check_switch("poison_freed_pages", self.poison_freed_pages)


def check_capacity(cache: CacheConfig, bytes_per_token: int, device_memory: int, host_memory: int) -> None:
    """Check that each tier holds at least one page and fits into memory.

    Args:
        bytes_per_token: KV bytes of one token.
        device_memory: total device memory in bytes.
        host_memory: total host memory in bytes.

    Raises:
        ConfigError: if a capacity is too small or larger than the memory.
    """
    for name, least, most in (
        ("capacity", cache.page_size, device_memory),
        ("host_capacity", cache.page_size, host_memory),
        ("disk_capacity", 1, None),
    ):
        size = getattr(cache, name)
        if size is None:
            continue
        held = parse_capacity(size, bytes_per_token)
        _check(
            held >= least,
            name,
            size,
            f"{least * bytes_per_token:,} bytes hold {least} token{'s' * (least > 1)}; use that or more",
        )
        fits = most is None or held * bytes_per_token <= most
        _check(fits, name, size, f"that takes {held * bytes_per_token:,} bytes, the memory has {most or 0:,}; use less")


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one scheduler step."""

    max_num_batched_tokens: int = 1024  # tokens of one forward pass; longer prefills are chunked
    max_num_seqs: int = 256  # requests that may run at the same time
    skip_loading: bool = True  # run ready requests before requests whose context is still being loaded (KVFlow §3.2)

    def __post_init__(self) -> None:
        _check(
            _is_int(self.max_num_batched_tokens, 1),
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            "use 1 or more",
        )
        _check(_is_int(self.max_num_seqs, 1), "max_num_seqs", self.max_num_seqs, "use 1 or more")
        _check_switch("skip_loading", self.skip_loading)


@dataclass(frozen=True)
class EngineConfig:
    """All options of an engine.

    With ``compile=True`` on a CPU, each compiled size keeps packed weights of its own: as much memory again as the
    model. Rotary tables that depend on the sequence length (longrope, dynamic) are computed for ``max_model_len``.
    """

    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    backend: str = "auto"  # attention backend; "auto" takes the kernel of the device if it can be built
    compile: bool = False  # run small steps through torch.compile, on a GPU as CUDA graphs
    compile_sizes: tuple[int, ...] | None = None  # batch sizes in tokens to compile; None: 1 to 16, on a GPU 2 to 256
    quantization: str | None = None  # None, or weight-only "int8" or "int4" through torchao
    max_model_len: int | None = None  # logical positions to use; None: the limit of the model

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
            self.max_model_len is None or _is_int(self.max_model_len, 1),
            "max_model_len",
            self.max_model_len,
            "use None or 1 or more",
        )
        rows = self.compile_sizes
        _check(
            rows is None
            or (
                isinstance(rows, tuple)
                and rows != ()
                and all(_is_int(r, 1) for r in rows)
                and sorted(set(rows)) == list(rows)
            ),
            "compile_sizes",
            rows,
            "use None or rising whole numbers of 1 or more",
        )
