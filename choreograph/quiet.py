"""Locks under which Ctrl+C waits: an interrupt between two lines that belong together would leave a cache half changed.
Owns the handler of SIGINT while the main thread holds any of them; then the interrupt is raised. What takes long and
changes nothing that counts is `interruptible`."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 0.1  # seconds between two looks for an interrupt while another thread has the lock


class _Interrupts:
    """holds: of quiet locks by the main thread. before: the handler whose place is taken. noted: it was interrupted."""

    def __init__(self) -> None:
        self.holds, self.noted = 0, False
        self.before: Callable[..., object] | int | None = None

    def close(self) -> None:
        if self.before is None and signal.getsignal(signal.SIGINT) is not None:  # else it is not Python's to set
            self.before = signal.signal(signal.SIGINT, self._note)

    def open(self) -> None:
        before, self.before = self.before, None
        if before is not None:
            signal.signal(signal.SIGINT, before)
        if self.noted:
            self.noted = False
            if callable(before):  # alone: an event loop has heard of the signal when it came
                before(signal.SIGINT, sys._getframe())
            else:
                signal.raise_signal(signal.SIGINT)

    def _note(self, *_: object) -> None:
        self.noted = True


_INTERRUPTS = _Interrupts()


class QuietLock:
    """A lock that its thread may take again, for `threading.Condition` too: who waits there can be interrupted."""

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        self._depth = 0  # of the main thread

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not _in_main_thread():
            return bool(self._lock.acquire(blocking, timeout))
        _INTERRUPTS.close()
        got = self._lock.acquire(False) or (blocking and self._wait(timeout))
        self._depth += got
        _INTERRUPTS.holds += got
        if not _INTERRUPTS.holds:
            _INTERRUPTS.open()
        return bool(got)

    def _wait(self, timeout: float) -> bool:
        """Until another thread gives it back. Who holds nothing else can be interrupted meanwhile."""
        if timeout >= 0:
            return bool(self._lock.acquire(timeout=timeout))
        while not self._lock.acquire(timeout=PATIENCE):
            if _INTERRUPTS.noted and not _INTERRUPTS.holds:
                _INTERRUPTS.open()
                _INTERRUPTS.close()
        return True

    def release(self) -> None:
        self._lock.release()
        if _in_main_thread():
            self._depth -= 1
            _INTERRUPTS.holds -= 1
            if not _INTERRUPTS.holds:
                _INTERRUPTS.open()

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
            _INTERRUPTS.holds -= depth
            if not _INTERRUPTS.holds:
                _INTERRUPTS.open()
        return state, depth

    def _acquire_restore(self, saved: tuple[Any, int]) -> None:
        state, depth = saved
        if depth:
            _INTERRUPTS.close()
        self._lock._acquire_restore(state)
        self._depth += depth
        _INTERRUPTS.holds += depth


@contextmanager
def interruptible() -> Iterator[None]:
    """For what may be broken off, whatever is locked."""
    held = _in_main_thread() and _INTERRUPTS.holds > 0
    if held:
        _INTERRUPTS.open()
    try:
        yield
    finally:
        if held:
            _INTERRUPTS.close()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
