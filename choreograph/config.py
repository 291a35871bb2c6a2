"""Engine configuration: frozen pydantic dataclasses, validated once when created."""

import dataclasses
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, dataclass_transform, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    StrictBool,
    TypeAdapter,
    ValidationError,
)
from pydantic import (
    dataclasses as pydantic_dataclasses,
)

from .errors import ChoreographError, ConfigError
from .utils import can_create_dir

BackendName = Literal["auto", "native", "triton", "sdpa", "reference"]
HINTED_POLICIES = ("workflow",)  # those that read the hints of agents

EvictionPolicyName = Literal["workflow", "lru", "lfu", "fifo"]
Quantization = Literal["int4"]
KVCacheDtype = Literal["auto", "int8"]

BACKENDS: tuple[str, ...] = get_args(BackendName)
EVICTION_POLICY_NAMES: tuple[str, ...] = get_args(EvictionPolicyName)


def as_int(value: object) -> int | None:
    """Return an integer of any library as int, else None.

    Accepts NumPy integers and tensors of one element; rejects booleans.
    """
    try:
        return operator.index(None if isinstance(value, bool) else value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _to_int(value: object) -> int:
    number = as_int(value)
    if number is None:
        raise ValueError("use a whole number")
    return number


Int = Annotated[int, BeforeValidator(_to_int)]
PositiveInt = Annotated[Int, Field(ge=1)]
NonNegativeInt = Annotated[Int, Field(ge=0)]


def _check_size(value: object) -> int | str:
    if isinstance(value, str):
        try:
            if not value[-1:].isalpha():
                raise ValueError("no unit")
            TypeAdapter(ByteSize).validate_python(value)
        except ValueError:
            raise ValueError('use a size like "512MiB" or "4GiB", or a number of tokens') from None
        return value
    if (number := as_int(value)) is None or number < 1:
        raise ValueError('use None, a number of tokens, or a size like "512MiB" or "4GiB"')
    return number


CacheSize = Annotated[int | str, BeforeValidator(_check_size)]


def parse_capacity(size: int | str, bytes_per_token: int) -> int:
    """Convert a capacity in tokens, or bytes ("4GiB"), to tokens."""
    return size if isinstance(size, int) else TypeAdapter(ByteSize).validate_python(size) // bytes_per_token


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, Field))
def validated(error: type[Exception] = ConfigError) -> Callable[[type], Any]:
    """Make a class a frozen pydantic dataclass.

    Invalid or unknown options raise `error` with name and value. A docstring below a field describes it where users
    set it; `choreograph serve` has an option for each such field.
    """

    def decorate(cls: type) -> Any:
        config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        result: Any = pydantic_dataclasses.dataclass(frozen=True, config=config)(cls)
        validate = result.__init__

        @wraps(validate)
        def checked_init(self: Any, *args: Any, **options: Any) -> None:
            try:
                validate(self, *args, **options)
            except ValidationError as exc:
                raise error(_describe(exc, options, sorted(f.name for f in dataclasses.fields(self)))) from None

        result.__init__ = checked_init
        return result

    return decorate


def _describe(error: ValidationError, options: dict[str, Any], known: list[str]) -> str:
    """Return "name=value: what to use instead" of the first invalid option."""
    first = error.errors(include_url=False)[0]
    if isinstance(raised := first.get("ctx", {}).get("error"), ChoreographError):  # of __post_init__
        return str(raised)
    reason = str(first["msg"]).removeprefix("Value error, ").replace("Input should be", "should be")
    name = next((str(part) for part in first["loc"]), "")
    value = options[name] if name in options else first["input"]
    if first["type"] == "unexpected_keyword_argument":
        return f"{name}={value!r}: no such option; known: {known}"
    return f"{name}={value!r}: {reason}"


def check_count(value: object, name: str, min_value: int) -> None:
    """Raise ConfigError unless `value` is an integer of at least `min_value`."""
    number = as_int(value)
    if number is None or number < min_value:
        raise ConfigError(f"{name}={value!r}: use {min_value} or more")


def _check_disk_dir(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    if not isinstance(path, (str, os.PathLike)) or not can_create_dir(Path(path)):
        raise ValueError("use the path of a directory that exists or can be created")
    return path


def _check_eviction(value: object) -> object:
    if not callable(value) and value not in EVICTION_POLICY_NAMES:
        raise ValueError(f"use one of {list(EVICTION_POLICY_NAMES)}, or a function of eviction candidates")
    return value


def _instance_of(kind: type) -> BeforeValidator:
    """Return a validator that accepts only instances of `kind`, not dicts."""

    def check(value: object) -> object:
        if not isinstance(value, kind):
            raise ValueError(f"use {kind.__name__}(...)")
        return value

    return BeforeValidator(check)


def _check_ascending(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if not sizes or sorted(set(sizes)) != list(sizes):
        raise ValueError("use None, or batch sizes in ascending order")
    return sizes


@validated()
class CacheConfig:
    """Size of the KV cache, its lower tiers and its eviction policy."""

    capacity: CacheSize | None = None
    """KV cache: tokens, or a size like 4GiB; by default from the model's limit and the free memory."""
    page_size: PositiveInt = 16  # tokens per page, the unit of allocation
    eviction: Annotated[EvictionPolicyName | Callable[[Iterable[Any]], Any], BeforeValidator(_check_eviction)] = "lru"
    """Eviction policy: ranks entries that no running request or pin uses; in Python also a function like those in
    `kv_cache/eviction.py`."""
    host_capacity: CacheSize | None = None
    """Host tier: tokens, or a size; by default there is none."""
    disk_capacity: CacheSize | None = None
    """Disk tier: tokens, or a size; by default there is none."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Format of keys and values in all tiers: that of the model, or int8 with a float32 scale for each token and head."""
    # directory of the disk tier; None: the temporary directory
    disk_dir: Annotated[Any, AfterValidator(_check_disk_dir)] | None = None
    poison_freed_pages: StrictBool = False  # fill freed pages with NaN, so that tests detect reads of freed memory

    def __post_init__(self) -> None:
        if isinstance(self.capacity, int) and self.capacity < self.page_size:
            raise ConfigError(f"capacity={self.capacity}: use at least one page of {self.page_size} tokens")

    @property
    def uses_hints(self) -> bool:
        """True if the order of eviction may depend on agents' steps."""
        return self.eviction in HINTED_POLICIES or callable(self.eviction)


def check_capacity(cache: CacheConfig, bytes_per_token: int, device_memory: int, host_memory: int) -> None:
    """Check that each tier holds a page and fits into memory.

    Args:
        bytes_per_token: KV bytes of one token.
        device_memory: total device memory in bytes.
        host_memory: total host memory in bytes.

    Raises:
        ConfigError: if a capacity is too small or larger than the memory.
    """
    for name, min_tokens, memory in (
        ("capacity", cache.page_size, device_memory),
        ("host_capacity", cache.page_size, host_memory),
        ("disk_capacity", 1, None),
    ):
        size = getattr(cache, name)
        if size is None:
            continue
        num_tokens = parse_capacity(size, bytes_per_token)
        num_bytes = num_tokens * bytes_per_token
        if num_tokens < min_tokens:
            min_bytes = min_tokens * bytes_per_token
            raise ConfigError(f"{name}={size!r}: use {min_bytes:,} bytes ({min_tokens} tokens) or more")
        if memory is not None and num_bytes > memory:
            raise ConfigError(f"{name}={size!r}: takes {num_bytes:,} bytes, the memory has {memory:,}; use less")


@contextmanager
def allocating(name: str, size: object, num_bytes: int) -> Iterator[None]:
    """Name the option whose memory cannot be allocated in the block.

    Raises:
        ConfigError: if the block has no memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as exc:  # PyTorch has an error of its own for GPUs alone
        if isinstance(exc, RuntimeError) and not re.search("out of memory|can't allocate memory", str(exc)):
            raise
        raise ConfigError(f"{name}={size!r}: {num_bytes:,} bytes cannot be allocated; use less") from exc


@validated()
class SchedulerConfig:
    """Limits of one scheduler step."""

    max_num_batched_tokens: PositiveInt = 1024  # tokens of one forward pass; longer prefills are chunked
    # tokens of prompts in a step that also decodes, so that decodes do not wait long; None: no other limit
    max_num_prefill_tokens: PositiveInt | None = None
    max_num_seqs: PositiveInt = 256  # requests that may run at the same time
    # run ready requests before requests whose context is still being loaded (KVFlow §3.2)
    skip_loading: StrictBool = True


@validated()
class EngineConfig:
    """All options of an engine.

    Rotary tables that depend on the sequence length (longrope, dynamic) are computed for ``max_model_len``.
    """

    cache: Annotated[CacheConfig, _instance_of(CacheConfig)] = dataclasses.field(default_factory=CacheConfig)
    scheduler: Annotated[SchedulerConfig, _instance_of(SchedulerConfig)] = dataclasses.field(
        default_factory=SchedulerConfig
    )
    # attention backend; "auto" takes the kernel of the device if it can be built. With "sdpa" and "reference", PyTorch
    # computes the other parts of the layers too
    backend: BackendName = "auto"
    compile: StrictBool = False
    """Run small steps on a GPU as CUDA graphs; compiling takes minutes."""
    # batch sizes in tokens with a CUDA graph; None: 2 to 256 tokens
    compile_sizes: Annotated[tuple[PositiveInt, ...], Field(strict=True), AfterValidator(_check_ascending)] | None = (
        None
    )
    draft_tokens: NonNegativeInt = 0
    """Speculative decoding: most tokens to draft in a step from text that a request reads."""
    quantization: Quantization | None = None
    """Format of the weights."""
    max_model_len: PositiveInt | None = None
    """Positions to use at most; by default the limit of the model."""

    @property
    def uses_operators(self) -> bool:
        """True if layers on a CPU run through operators of our own; otherwise PyTorch computes all of them."""
        return self.backend in ("auto", "native")
