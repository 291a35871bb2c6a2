"""Frozen options, validated once when made. Owns defaults; knows no tensors and no messages."""

from dataclasses import dataclass, field

from .errors import ConfigError

BACKENDS = ("auto", "native", "sdpa", "reference")
EVICTIONS = ("lru", "fifo")
QUANTIZATIONS = (None, "int8")


def _check(ok: bool, name: str, value: object, mend: str) -> None:
    if not ok:
        raise ConfigError(f"{name}={value!r}: {mend}")


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class CacheConfig:
    """Where encodings live.

    tokens: slots of the arena; None sizes it from the model's limit and the free memory.
    page_size: slots in a page, the unit of allocation.
    eviction: which encodings that no message holds any more go first.
    poison: fill freed pages with NaN, so that a read of freed memory cannot go unseen (tests).
    """

    tokens: int | None = None
    page_size: int = 16
    eviction: str = "lru"
    poison: bool = False

    def __post_init__(self) -> None:
        _check(_whole(self.page_size, 1), "page_size", self.page_size, "use 1 or more")
        _check(
            self.tokens is None or _whole(self.tokens, self.page_size),
            "tokens",
            self.tokens,
            f"use None or at least one page of {self.page_size}",
        )
        _check(self.eviction in EVICTIONS, "eviction", self.eviction, f"use one of {EVICTIONS}")


@dataclass(frozen=True)
class SchedulerConfig:
    """How much one step does.

    max_step_tokens: rows of one forward pass; longer prefills are cut into chunks of what is left.
    max_calls: calls that may be in flight at once.
    """

    max_step_tokens: int = 1024
    max_calls: int = 256

    def __post_init__(self) -> None:
        _check(_whole(self.max_step_tokens, 1), "max_step_tokens", self.max_step_tokens, "use 1 or more")
        _check(_whole(self.max_calls, 1), "max_calls", self.max_calls, "use 1 or more")


@dataclass(frozen=True)
class EngineConfig:
    """All options of an engine.

    backend: the attention code: `auto` takes the compiled kernel where it can be built.
    compile: run small steps through `torch.compile`; the first use of a bucket waits for it.
    compile_rows: row counts that get a compiled graph; a step is padded to the next one.
    quantization: None, or "int8" for weight-only int8 through torchao.
    """

    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    backend: str = "auto"
    compile: bool = False
    compile_rows: tuple[int, ...] = (1, 2, 4, 8, 16)
    quantization: str | None = None

    def __post_init__(self) -> None:
        _check(self.backend in BACKENDS, "backend", self.backend, f"use one of {BACKENDS}")
        _check(
            self.quantization in QUANTIZATIONS,
            "quantization",
            self.quantization,
            f"use one of {QUANTIZATIONS}",
        )
        rows = self.compile_rows
        _check(
            isinstance(rows, tuple)
            and rows != ()
            and all(_whole(r, 1) for r in rows)
            and sorted(set(rows)) == list(rows),
            "compile_rows",
            rows,
            "use rising whole numbers of 1 or more",
        )
