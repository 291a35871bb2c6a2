"""File helpers, cleanup of several resources, and a lock that defers SIGINT."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import ConfigError, MissingDependencyError


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency; raise MissingDependencyError naming the extra that provides it."""
    try:
        return import_module(module)
    except ImportError as exc:
        if exc.name is not None and exc.name != module.partition(".")[0]:
            raise  # installed, but one of its own imports fails
        raise MissingDependencyError(
            f"{exc.name or module} is not installed: run pip install 'choreograph[{extra}]'"
        ) from None


def ensure_dir(path: Path) -> None:
    """Create a directory and its parents; raise ConfigError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{path}: no folder can be made there ({exc.strerror}): use another one") from None


def can_create_dir(path: Path) -> bool:
    """Return whether `path` is a directory or could be created as one."""
    there = next((place for place in (path, *path.absolute().parents) if place.exists()), None)
    return there is not None and there.is_dir()


def atomic_write_text(file: Path, text: str) -> None:
    """Replace `file` by `text` atomically."""
    if file.exists() and not file.is_file():  # a device, a pipe
        file.write_text(text, encoding="utf-8")
        return
    part = file.with_name(file.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, file)
    except OSError as exc:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{file}: cannot be written ({exc.strerror})") from None


def ensure_writable(file: Path | None) -> None:
    """Create the directory of `file`; raise ConfigError if the file could not be written."""
    if file is None:
        return
    if file.is_dir():
        raise ConfigError(f"{file}: this is a folder: name a file in it")
    ensure_dir(file.parent)
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{file}: may not be written: use another place")


def call_all(calls: Iterable[Callable[[], object]]) -> list[Exception]:
    """Call all callables even if one raises; return the exceptions."""
    problems: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as exc:
            problems.append(exc)
    return problems


def close_behind(close: Callable[[], object], problem: BaseException | None) -> None:
    """Closes what a block used that was left by a problem, or by none. What closing raises does not take the problem's
    place: it is told as a note on it."""
    try:
        close()
    except Exception as another:
        if problem is None:
            raise
        problem.add_note(f"Closing raised another: {another!r}")


SIGINT_POLL_SECONDS = 0.1  # seconds between two looks for an interrupt while another thread has the lock


class _SigintGuard:
    """holds: of quiet locks by the main thread. before: the handler whose place is taken. noted: it was interrupted."""

    def __init__(self) -> None:
        self.num_holds, self.is_pending = 0, False
        self.previous_handler: Callable[..., object] | int | None = None

    def block(self) -> None:
        if (
            self.previous_handler is None and signal.getsignal(signal.SIGINT) is not None
        ):  # else it is not Python's to set
            self.previous_handler = signal.signal(signal.SIGINT, self._on_sigint)

    def unblock(self) -> None:
        before, self.previous_handler = self.previous_handler, None
        if before is not None:
            signal.signal(signal.SIGINT, before)
        if self.is_pending:
            self.is_pending = False
            if callable(before):  # alone: an event loop has heard of the signal when it came
                before(signal.SIGINT, sys._getframe())
            else:
                signal.raise_signal(signal.SIGINT)

    def _on_sigint(self, *_: object) -> None:
        self.is_pending = True


_SIGINT_GUARD = _SigintGuard()


class DeferSigintLock:
    """Re-entrant lock that defers SIGINT while held; usable with `threading.Condition`."""

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        self._depth = 0  # of the main thread

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not _in_main_thread():
            return bool(self._lock.acquire(blocking, timeout))
        _SIGINT_GUARD.block()
        got = self._lock.acquire(False) or (blocking and self._wait(timeout))
        self._depth += got
        _SIGINT_GUARD.num_holds += got
        if not _SIGINT_GUARD.num_holds:
            _SIGINT_GUARD.unblock()
        return bool(got)

    def _wait(self, timeout: float) -> bool:
        """Wait for another thread to release the lock; interruptible if no other lock is held."""
        if timeout >= 0:
            return bool(self._lock.acquire(timeout=timeout))
        while not self._lock.acquire(timeout=SIGINT_POLL_SECONDS):
            if _SIGINT_GUARD.is_pending and not _SIGINT_GUARD.num_holds:
                _SIGINT_GUARD.unblock()
                _SIGINT_GUARD.block()
        return True

    def release(self) -> None:
        self._lock.release()
        if _in_main_thread():
            self._depth -= 1
            _SIGINT_GUARD.num_holds -= 1
            if not _SIGINT_GUARD.num_holds:
                _SIGINT_GUARD.unblock()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # what `threading.Condition` asks of a lock that may be taken several times

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())

    def _release_save(self) -> tuple[Any, int]:
        state, depth = self._lock._release_save(), 0
        if _in_main_thread():
            depth, self._depth = self._depth, 0
            _SIGINT_GUARD.num_holds -= depth
            if not _SIGINT_GUARD.num_holds:
                _SIGINT_GUARD.unblock()
        return state, depth

    def _acquire_restore(self, saved: tuple[Any, int]) -> None:
        state, depth = saved
        if depth:
            _SIGINT_GUARD.block()
        self._lock._acquire_restore(state)
        self._depth += depth
        _SIGINT_GUARD.num_holds += depth


@contextmanager
def allow_sigint() -> Iterator[None]:
    """Deliver SIGINT immediately inside this block, even while a `DeferSigintLock` is held."""
    held = _in_main_thread() and _SIGINT_GUARD.num_holds > 0
    if held:
        _SIGINT_GUARD.unblock()
    try:
        yield
    finally:
        if held:
            _SIGINT_GUARD.block()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
