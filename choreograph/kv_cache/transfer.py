"""Background copies of KV cache layers, by thread or CUDA stream.

A transfer copies layer by layer, so that a step can compute a layer as soon as it is copied. What
`prepare` copies is there before the first layer. A transfer does not change cache state: the thread
that started it polls for completed ones.
"""

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

TransferDirection = Literal["loading", "offloading"]
DIRECTIONS: tuple[TransferDirection, ...] = ("loading", "offloading")


@dataclass(eq=False)
class Transfer:
    """One copy in flight, layer by layer.

    It ends early on an error, or on `cancel` between two layers.
    """

    direction: TransferDirection  # shown as the location of the entry
    layers: int  # number of layers
    tokens: int  # number of tokens
    copy_layer: Callable[[int], None]  # copies one layer, in the background
    prepare: Callable[[], None] = lambda: None  # runs before the first layer, in the background
    finish: Callable[[], None] = lambda: None  # runs after the last layer, in the background
    inputs_first: bool = False  # `prepare` copies the cached inputs of all layers
    error: BaseException | None = None
    is_finished: bool = False  # completed, failed or cancelled
    cancelled: bool = False
    # one for `prepare` and one per copied layer: a CUDA event if a stream copies
    layer_events: list[Any] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def run(
        self, record_event: Callable[[], Any] = lambda: None, synchronize: Callable[[], None] = lambda: None
    ) -> None:
        """Run the whole transfer in the calling thread.

        Args:
            record_event: Returns an event that completes with the copies launched so far.
            synchronize: Waits for all launched copies; also called if the transfer fails.
        """
        try:
            try:
                self.prepare()
                for layer in range(-1, self.layers):
                    if self.cancelled:
                        raise InterruptedError("cancelled")
                    if layer >= 0:
                        self.copy_layer(layer)
                    with self._changed:
                        self.layer_events.append(record_event())
                        self._changed.notify_all()
            finally:
                synchronize()
            self.finish()
        except BaseException as exc:  # reported to the engine thread through `error`
            self.error = exc
        with self._changed:
            self.is_finished = True
            self._changed.notify_all()

    @property
    def has_inputs(self) -> bool:
        """True if the cached inputs of all layers are copied."""
        return bool(self.layer_events) if self.inputs_first else self.is_finished

    def cancel(self) -> None:
        self.cancelled = True

    def wait_for(self, layer: int) -> None:
        """Wait until a layer is copied; -1 waits for `prepare`.

        Raises:
            TransferError: if the transfer failed or was cancelled.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_finished or len(self.layer_events) > layer + 1)
        if self.error is not None:
            raise TransferError(self) from self.error

    def wait(self) -> None:
        """Wait until the transfer has ended, successfully or not."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_finished)


class TransferError(Exception):
    """Failure of a transfer that a step needed.

    The step is rolled back and the entry recomputed.
    """

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(f"a transfer failed: {transfer.error!r}")
        self.transfer = transfer


class _Lane:
    """Transfers of one direction, in order on one thread, stopped when idle."""

    def __init__(self, execute: Callable[[Transfer], None], idle_seconds: float) -> None:
        self.queue: deque[Transfer] = deque()  # the first one is running
        self._execute, self._idle_seconds = execute, idle_seconds
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, transfer: Transfer) -> None:
        with self._changed:
            self.queue.append(transfer)
            if self._thread is None:
                name = f"choreograph-{transfer.direction}"
                self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self.queue) or self._closed, self._idle_seconds)
                if not self.queue:
                    self._thread = None
                    return
            self._execute(self.queue[0])
            with self._changed:
                self.queue.popleft()

    def close(self) -> None:
        """Cancel all transfers and join the thread."""
        with self._changed:
            for transfer in self.queue:
                transfer.cancel()
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()


class ThreadExecutor:
    """Executor with one thread for each direction of transfer (KVFlow §3.2)."""

    def __init__(self, idle_seconds: float = 5.0) -> None:
        self._idle_seconds = idle_seconds
        self._create_lanes()
        _EXECUTORS.add(self)

    def _create_lanes(self) -> None:
        self._lanes = {name: _Lane(self._execute, self._idle_seconds) for name in DIRECTIONS}

    def start(self, transfer: Transfer) -> None:
        self._lanes[transfer.direction].start(transfer)

    def _execute(self, transfer: Transfer) -> None:
        transfer.run()

    def wait(self, transfer: Transfer) -> None:
        """Wait until a transfer has ended, successfully or not."""
        transfer.wait()

    def wait_for(self, transfer: Transfer, layer: int) -> None:
        """Wait for a layer.

        Raises:
            TransferError: if the transfer failed.
        """
        transfer.wait_for(layer)

    def close(self) -> None:
        """Cancel all transfers and join the threads."""
        for lane in self._lanes.values():
            lane.close()

    def reset_after_fork(self) -> None:
        """Fail all transfers in a forked child, which has no threads."""
        for lane in self._lanes.values():
            for transfer in lane.queue:
                transfer.error, transfer.is_finished = InterruptedError("the process was forked"), True
                transfer._changed = threading.Condition()  # the thread may have held the old lock
        self._create_lanes()


_EXECUTORS: weakref.WeakSet[ThreadExecutor] = weakref.WeakSet()


def _call_on_all(method: Callable[[ThreadExecutor], None]) -> None:
    for executor in list(_EXECUTORS):
        method(executor)


atexit.register(_call_on_all, ThreadExecutor.close)  # a copy during interpreter shutdown would crash it
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=partial(_call_on_all, ThreadExecutor.reset_after_fork))


class CudaStreamExecutor(ThreadExecutor):
    """Executor that runs transfers on separate CUDA streams, one for each direction.

    A step that needs a layer makes the device wait for it, not the host. A thread launches
    copies, reads and writes files, and waits for the stream, so that pages are freed only after the
    copy. Host memory should be pinned.

    Args:
        cuda: Module that creates streams and events: `torch.cuda` or a fake.
    """

    def __init__(self, device: torch.device, idle_seconds: float = 5.0, *, cuda: Any = torch.cuda) -> None:
        super().__init__(idle_seconds)
        self._device, self._cuda = device, cuda
        self._copy_streams = {name: cuda.Stream(device) for name in DIRECTIONS}
        self._start_events: dict[Transfer, Any] = {}

    def start(self, transfer: Transfer) -> None:
        """Queue a transfer after all work launched on the compute stream.

        That work may still read or write the same pages.
        """
        self._start_events[transfer] = self._cuda.current_stream(self._device).record_event()
        super().start(transfer)

    def _execute(self, transfer: Transfer) -> None:
        stream = self._copy_streams[transfer.direction]
        with self._cuda.stream(stream):
            stream.wait_event(self._start_events.pop(transfer))
            transfer.run(stream.record_event, stream.synchronize)

    def wait_for(self, transfer: Transfer, layer: int) -> None:
        transfer.wait_for(layer)
        self._cuda.current_stream(self._device).wait_event(transfer.layer_events[layer + 1])


class SyncExecutor(ThreadExecutor):
    """Executor that completes a transfer in `start`, alike on all ranks."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._synchronize = torch.cuda.current_stream(device).synchronize if device.type == "cuda" else lambda: None

    def start(self, transfer: Transfer) -> None:
        transfer.run(synchronize=self._synchronize)


def make_executor(device: torch.device, idle_seconds: float = 5.0) -> ThreadExecutor:
    """Return the default executor of a device."""
    return CudaStreamExecutor(device, idle_seconds) if device.type == "cuda" else ThreadExecutor(idle_seconds)
