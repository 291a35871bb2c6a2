"""File helpers, cleanup of several resources, and a lock that defers SIGINT."""

import atexit
import ctypes
import gc
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, MissingDependencyError, ModelError, RequestFailedError

if TYPE_CHECKING:
    from pydantic import ValidationError


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or raise MissingDependencyError with its extra."""
    try:
        return import_module(module)
    except ImportError as exc:
        if exc.name is not None and not f"{module}.".startswith(f"{exc.name}."):
            raise  # installed, but one of its own imports fails
        raise MissingDependencyError(
            f"{exc.name or module} is not installed: run pip install 'choreograph[{extra}]'"
        ) from None


@contextmanager
def importing_torch() -> Iterator[None]:
    """Collect no garbage inside the block, which imports PyTorch.

    Imports create many objects that stay; collections would scan them again and again, and do not scan them later. Does
    nothing if PyTorch is imported already: other objects of the process would never be freed.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        freeze_objects()
        gc.enable()


def freeze_objects() -> None:
    """Exclude all present objects from garbage collections."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # extension modules report objects that are left when the process ends


def release_freed_memory() -> None:
    """Give freed memory back to the operating system, where the C library can."""
    with suppress(AttributeError, OSError, TypeError):  # only glibc has the function
        ctypes.CDLL(None).malloc_trim(0)


def connect_to_ray(address: str | None, **options: Any) -> bool:
    """Connect to Ray; return whether a local one was started.

    A process that is connected stays so.

    Args:
        address: of a running Ray, such as "auto"; None or "local": one is started.
        options: of `ray.init`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = require("ray", "ray")
    if ray.is_initialized():
        return False
    is_local = address in (None, "local")
    try:
        ray.init(address=address or "local", **({"include_dashboard": False} if is_local else {}) | options)
    except ConnectionError as exc:
        raise ConfigError(f"ray_address={address!r}: no Ray there ({exc}): start one with `ray start --head`") from None
    return is_local


HUB_TIMEOUT = 3.0  # seconds to wait for the Hub before only its cache is used


@contextmanager
def hub_or_cache() -> Iterator[bool]:
    """Go offline inside the block if the Hub does not answer.

    Yields whether it answers. The Hub's client would try every file five times, with pauses.
    """
    from huggingface_hub import constants, get_session

    answers: list[object] = []

    def ask() -> None:
        with suppress(Exception):  # no network
            answers.append(get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT))

    was_offline = constants.HF_HUB_OFFLINE
    if not was_offline:
        thread = threading.Thread(target=ask, daemon=True)  # looking up the name has no timeout of its own
        thread.start()
        thread.join(HUB_TIMEOUT)
    constants.HF_HUB_OFFLINE = not answers
    try:
        yield bool(answers)
    finally:
        constants.HF_HUB_OFFLINE = was_offline


def check_on_hub(model: str) -> None:
    """Check that a Hub model is cached or the Hub answers.

    Takes seconds and imports little, so it can run before the engine is imported.

    Raises:
        ModelError: if the model is not cached and the Hub does not answer.
    """
    if Path(model).exists() or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model) or model.lower().endswith(".gguf"):
        return
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    with hub_or_cache() as answers:
        if not answers:
            raise ModelError(
                f"model {model!r} is not in the cache of the Hub, which does not answer: check the name and the network, "
                "or name a folder"
            )


MAX_YAML_VALUES = 100_000  # in a document whose aliases are written out
MAX_YAML_DEPTH = 100
MAX_YAML_BITS = 1024  # of an integer; Python refuses to print those of thousands of digits


class RepeatedKeyError(ValueError):
    """Mapping of a file that has a key twice."""


def parse_yaml(text: str, extra: str) -> Any:
    """Parse YAML of plain values, in which no mapping has a key twice.

    Args:
        extra: to install for it.

    Raises:
        RepeatedKeyError: if a mapping has a key twice.
        ValueError: if it is not YAML.
    """
    require("yaml", extra)
    import yaml

    sizes: dict[int, int] = {}  # values in each sequence and mapping, where aliases are written out

    class UniqueKeyLoader(yaml.SafeLoader):
        depth = 0  # levels of the value that is being read

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if repeated := [key for key, count in Counter(keys).items() if count > 1]:
                raise RepeatedKeyError(f"{repeated[0]!r} stands twice: give it once")
            return node

        def compose_node(self, parent: Any, index: Any) -> Any:
            is_alias = self.check_event(yaml.AliasEvent)
            self.depth += 1
            if self.depth > MAX_YAML_DEPTH:
                raise ValueError(f"nested too deep, in more than {MAX_YAML_DEPTH} levels: use fewer")
            node = super().compose_node(parent, index)
            self.depth -= 1
            if not is_alias and isinstance(node, yaml.CollectionNode):
                pairs = node.value if isinstance(node, yaml.MappingNode) else ((item,) for item in node.value)
                sizes[id(node)] = 1 + sum(sizes.get(id(child), 1) for pair in pairs for child in pair)
                if sizes[id(node)] > MAX_YAML_VALUES:
                    raise ValueError(f"more than {MAX_YAML_VALUES:,} values with those of aliases: use fewer")
            return node

        def construct_yaml_int(self, node: Any) -> int:
            number: int = super().construct_yaml_int(node)
            if number.bit_length() > MAX_YAML_BITS:
                raise ValueError(f"an integer of {number.bit_length()} bits: use a smaller one")
            return number

    UniqueKeyLoader.add_constructor("tag:yaml.org,2002:int", UniqueKeyLoader.construct_yaml_int)
    try:
        return yaml.load(text, UniqueKeyLoader)
    except RepeatedKeyError:
        raise
    # PyYAML leaves values such as an integer without digits or a month of 99 to Python
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as exc:
        raise ValueError(" ".join(str(exc).split())) from None


def ensure_dir(path: Path) -> None:
    """Create a directory and its parents; raise ConfigError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{path}: directory cannot be created ({exc.strerror}): use another path") from None


def can_create_dir(path: Path) -> bool:
    """Return whether `path` is a directory or could be created as one."""
    there = next((place for place in (path, *path.absolute().parents) if place.exists()), None)
    return there is not None and there.is_dir()


def atomic_write(file: Path, write: Callable[[Path], object]) -> None:
    """Replace a file atomically.

    Args:
        write: writes the content to the path that it gets, in the same directory.

    Raises:
        ConfigError: if the file cannot be written.
    """
    part = file.with_name(file.name + ".part")
    try:
        write(part)
        os.replace(part, file)
    except OSError as exc:
        raise ConfigError(f"{file}: cannot be written ({exc.strerror or exc}): use another path") from None
    finally:
        part.unlink(missing_ok=True)  # after a failure


def atomic_write_text(file: Path, text: str) -> None:
    """Replace `file` by `text` atomically."""
    if file.exists() and not file.is_file():  # a device, a pipe
        file.write_text(text, encoding="utf-8")
    else:
        atomic_write(file, lambda part: part.write_text(text, encoding="utf-8"))


def ensure_writable(file: Path | None) -> None:
    """Create a file's directory; raise ConfigError if the file is not writable."""
    if file is None:
        return
    if file.is_dir():
        raise ConfigError(f"{file}: is a directory: use the path of a file")
    ensure_dir(file.parent)
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{file}: is not writable: use another path")


def describe_validation_error(exc: "ValidationError") -> str:
    """Return pydantic's first error as one line: option, value and rule."""
    error = exc.errors()[0]
    message = error["msg"].removeprefix("Value error, ")
    name = ".".join(map(str, error["loc"]))
    return f"{name}={str(error['input'])[:60]}: {message}" if name else message


def call_all(calls: Iterable[Callable[[], object]]) -> list[Exception]:
    """Call all callables even if one raises; return the exceptions."""
    errors: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as exc:
            errors.append(exc)
    return errors


def as_exception(exc: BaseException) -> Exception:
    """Return an exception for a client.

    A panic of a library in Rust is no `Exception`; it must not end the engine's thread.
    """
    if isinstance(exc, Exception):
        return exc
    error = RequestFailedError(f"{type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error


def close_after(close: Callable[[], object], error: BaseException | None) -> None:
    """Call `close` in an `__exit__`, without hiding the block's exception.

    An exception of `close` becomes a note on the block's exception, if there is one.
    """
    try:
        close()
    except Exception as exc:
        if error is None:
            raise
        error.add_note(f"Closing raised another: {exc!r}")


SIGINT_POLL_SECONDS = 0.1  # seconds between two checks for SIGINT while another thread has the lock


class _SigintState:
    """State of the deferral of SIGINT in the main thread.

    All locks share it, since a process has one handler.
    """

    num_holds = 0  # of all locks, by the main thread
    is_pending = False  # SIGINT arrived while deferred
    previous_handler: Callable[..., object] | int | None = None  # None: not deferred


def _defer_sigint() -> None:
    if (
        _SigintState.previous_handler is None and signal.getsignal(signal.SIGINT) is not None
    ):  # else not Python's to set
        _SigintState.previous_handler = signal.signal(
            signal.SIGINT, lambda *_: setattr(_SigintState, "is_pending", True)
        )


def _deliver_sigint() -> None:
    """Restore the handler and run it if SIGINT arrived."""
    handler, _SigintState.previous_handler = _SigintState.previous_handler, None
    if handler is not None:
        signal.signal(signal.SIGINT, handler)
    if _SigintState.is_pending:
        _SigintState.is_pending = False
        if callable(handler):  # not raise_signal: an event loop got the signal when it arrived
            handler(signal.SIGINT, sys._getframe())
        else:
            signal.raise_signal(signal.SIGINT)


class DeferSigintLock:
    """Re-entrant lock; while the main thread holds it, SIGINT is deferred."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0  # acquisitions of the owning thread

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if threading.current_thread() is not threading.main_thread():
            acquired = self._lock.acquire(blocking, timeout)
        else:
            _defer_sigint()
            acquired = self._lock.acquire(blocking=False) or (blocking and self._wait(timeout))
            _SigintState.num_holds += acquired
            if not _SigintState.num_holds:
                _deliver_sigint()
        self._depth += acquired
        return acquired

    def _wait(self, timeout: float) -> bool:
        """Wait for another thread to release the lock.

        SIGINT interrupts the wait if the main thread holds no other lock.
        """
        if timeout >= 0:
            return self._lock.acquire(timeout=timeout)
        while not self._lock.acquire(timeout=SIGINT_POLL_SECONDS):
            if _SigintState.is_pending and not _SigintState.num_holds:
                _deliver_sigint()
                _defer_sigint()
        return True

    def release(self, *_exc_info: object) -> None:
        self._depth -= 1
        self._lock.release()
        if threading.current_thread() is threading.main_thread():
            _SigintState.num_holds -= 1
            if not _SigintState.num_holds:
                _deliver_sigint()

    __enter__ = acquire
    __exit__ = release

    def sleep(self, seconds: float) -> None:
        """Release the lock for some seconds, for other threads and SIGINT."""
        depth = self._depth
        try:
            for _ in range(depth):
                self.release()
            time.sleep(seconds)
        finally:
            for _ in range(depth):
                self.acquire()


@contextmanager
def allow_sigint() -> Iterator[None]:
    """Deliver SIGINT immediately inside this block, even while a `DeferSigintLock` is held."""
    is_deferred = _SigintState.num_holds > 0 and threading.current_thread() is threading.main_thread()
    if is_deferred:
        _deliver_sigint()
    try:
        yield
    finally:
        if is_deferred:
            _defer_sigint()
