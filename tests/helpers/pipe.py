"""A transport between two threads of one process, whose sender's frames pass when a test lets them."""

import queue
import threading

from choreograph.layer_reuse.transport import ChannelError


class Pipe:
    """Both ends of a channel. `allow` lets so many more frames of the sender pass; None: all."""

    def __init__(self, timeout: float = 5.0) -> None:
        requests, replies = queue.Queue(), queue.Queue()
        self._allowed, self._open = threading.Semaphore(0), threading.Event()
        self.sent: list[int] = []  # bytes of each frame that the sender has handed over
        self.receiver, self.sender = End(self, requests, replies, timeout), End(self, replies, requests, None)

    def allow(self, frames: int | None) -> None:
        if frames is None:
            self._open.set()
            frames = 1
        for _ in range(frames):
            self._allowed.release()

    def pass_gate(self) -> None:
        if not self._open.is_set():
            self._allowed.acquire()


class End:
    def __init__(self, pipe, outgoing, incoming, timeout) -> None:
        self._pipe, self._outgoing, self._incoming, self._timeout = pipe, outgoing, incoming, timeout

    def send(self, data):
        if self._timeout is None:  # the sender's end
            self._pipe.pass_gate()
            self._pipe.sent.append(data.numel())
        self._outgoing.put(data.clone())
        return lambda: None

    def receive(self, num_bytes):
        try:
            data = self._incoming.get(timeout=self._timeout)
        except queue.Empty:
            raise ChannelError("timed out") from None
        assert data.numel() == num_bytes
        return data
