"""Copies keys and values beside computation. Owns the thread and the stream that do; knows tensors, not encodings.

A transfer goes layer by layer, so that a step may compute a layer as soon as that layer has arrived. State changes
are not made here: whoever started a transfer asks for the ended ones and acts on them in its own thread.
"""

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import torch

Kind = Literal["loading", "offloading"]
Work = Callable[[int], None]


class Transfer:
    """One copy under way: `layers_done` of `layers` have arrived. prepare runs before the first, finish after the
    last, both in the background too. An error ends it; so does `cancel`, between two layers."""

    def __init__(
        self,
        kind: Kind,
        layers: int,
        tokens: int,
        copy_layer: Work,
        *,
        prepare: Callable[[], None] = lambda: None,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self.kind = kind
        self.layers = layers
        self.tokens = tokens
        self.layers_done = 0
        self.error: BaseException | None = None
        self.ended = False
        self.cancelled = False
        self.marks: list[Any] = []  # of layers that a stream copies: what says that they have arrived
        self._copy_layer, self._prepare, self._finish = copy_layer, prepare, finish
        self._changed = threading.Condition()

    def run(self, mark: Callable[[], Any] = lambda: None, settle: Callable[[], None] = lambda: None) -> None:
        """Does all of it, in whichever thread. Where copies are only begun here, `mark` gives what says that those so
        far have arrived, and `settle` returns when all have; what was begun has settled before the end, failed or not.
        """
        try:
            try:
                self._prepare()
                for layer in range(self.layers):
                    if self.cancelled:
                        raise InterruptedError("cancelled")
                    self._copy_layer(layer)
                    with self._changed:
                        self.marks.append(mark())
                        self.layers_done += 1
                        self._changed.notify_all()
            finally:
                settle()
            self._finish()
        except BaseException as problem:  # the engine's thread hears of it, whatever it is
            self.error = problem
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def cancel(self) -> None:
        self.cancelled = True

    def fail(self, problem: BaseException) -> None:
        """Of one that nobody carries out any more, whoever held its lock."""
        self.error, self.ended, self._changed = problem, True, threading.Condition()

    def wait_for(self, layer: int) -> None:
        """Returns when a layer has arrived; raises the error of a transfer that failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended or self.layers_done > layer)
        if self.error is not None:
            raise TransferFailed(self) from self.error

    def wait(self) -> None:
        """Returns when it has ended, well or not."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended)


class TransferFailed(Exception):
    """A step needed what a transfer could not bring; the step is taken back and what it wanted is rebuilt."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(f"a transfer failed: {transfer.error!r}")
        self.transfer = transfer


@runtime_checkable
class Mover(Protocol):
    """Runs transfers, in order of submission, and is how others wait for them."""

    def start(self, transfer: Transfer) -> None: ...

    def wait(self, transfer: Transfer) -> None:
        """Returns when a transfer has ended, well or not."""

    def wait_for(self, transfer: Transfer, layer: int) -> None:
        """Returns when a layer has arrived; raises TransferFailed where it never will."""

    def close(self) -> None: ...


_MOVERS: "weakref.WeakSet[ThreadMover]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that copies while the interpreter goes would take it down."""
    for mover in list(_MOVERS):
        mover.close()


def _begin_again() -> None:
    """In the child of a fork, where no thread of its parent's goes on."""
    for mover in list(_MOVERS):
        mover.begin_again()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


class ThreadMover:
    """One background thread, started with the first transfer and ended when there is nothing to do for a while."""

    def __init__(self, idle_seconds: float = 5.0) -> None:
        self._queue: deque[Transfer] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._running: Transfer | None = None
        self._closed = False
        self._idle_seconds = idle_seconds
        _MOVERS.add(self)

    def start(self, transfer: Transfer) -> None:
        with self._changed:
            self._queue.append(transfer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="choreograph-transfers", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def begin_again(self) -> None:
        """Without the thread that there was: what it had under way has failed."""
        for transfer in (*filter(None, (self._running,)), *self._queue):
            transfer.fail(InterruptedError("the process was forked"))
        self._queue.clear()
        self._changed, self._thread, self._running = threading.Condition(), None, None

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closed, self._idle_seconds)
                if not self._queue:
                    self._thread = None
                    return
                transfer = self._running = self._queue.popleft()
            self._carry_out(transfer)
            self._running = None

    def _carry_out(self, transfer: Transfer) -> None:
        transfer.run()

    def wait(self, transfer: Transfer) -> None:
        transfer.wait()

    def wait_for(self, transfer: Transfer, layer: int) -> None:
        transfer.wait_for(layer)

    def close(self) -> None:
        """Cancels what is under way, and returns when the thread has ended."""
        with self._changed:
            for transfer in (*self._queue, *filter(None, (self._running,))):
                transfer.cancel()
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()


class StreamMover(ThreadMover):
    """Copies on a stream of their own beside the one that computes. Host memory is expected to be pinned.

    A step that needs a layer makes the device wait for it, not the host. The thread hands the copies over, reads and
    writes files, and sees the end: pages change hands only when the device has done its part. cuda: what makes
    streams and events, torch.cuda or a stand-in for it.
    """

    def __init__(self, device: torch.device, idle_seconds: float = 5.0, *, cuda: Any = torch.cuda) -> None:
        super().__init__(idle_seconds)
        self._device, self._cuda = device, cuda
        self._copies = cuda.Stream(device)
        self._begun: dict[Transfer, Any] = {}

    def start(self, transfer: Transfer) -> None:
        """Behind all that the computing stream was given until now: it may still read or write these pages."""
        self._begun[transfer] = self._cuda.current_stream(self._device).record_event()
        super().start(transfer)

    def _carry_out(self, transfer: Transfer) -> None:
        with self._cuda.stream(self._copies):
            self._copies.wait_event(self._begun.pop(transfer))
            transfer.run(self._copies.record_event, self._copies.synchronize)

    def wait_for(self, transfer: Transfer, layer: int) -> None:
        transfer.wait_for(layer)
        self._cuda.current_stream(self._device).wait_event(transfer.marks[layer])


class InlineMover:
    """Carries a transfer out where it is started: it ends at the same step in all processes that compute together."""

    def __init__(self, device: torch.device) -> None:
        self._settle = torch.cuda.current_stream(device).synchronize if device.type == "cuda" else lambda: None

    def start(self, transfer: Transfer) -> None:
        transfer.run(settle=self._settle)

    def wait(self, transfer: Transfer) -> None:
        transfer.wait()

    def wait_for(self, transfer: Transfer, layer: int) -> None:
        transfer.wait_for(layer)

    def close(self) -> None:
        pass


def mover_for(device: torch.device) -> Mover:
    return StreamMover(device) if device.type == "cuda" else ThreadMover()
