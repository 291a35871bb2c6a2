"""Channels between two processes: containers in frames of bytes.

`Channel` uses `torch.distributed`. Another transport needs the two methods of `Transport`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CacheFileError, ConfigError
from ..kv_cache.container import Block, Header, read_header

MAX_HEADER_BYTES = 1 << 20
_FIX = "run the same version in both processes, over a link that keeps every byte"


class ChannelError(Exception):
    """The peer process is gone, timed out, or violated the protocol."""


class RefusedError(ChannelError):
    """The sender does not have what was requested; the channel stays usable."""


class Transport(Protocol):
    """Channel between two processes that keeps the order of what is sent.

    Its methods raise `ChannelError`. One thread may send while another receives.
    """

    def send(self, data: Tensor) -> Callable[[], None]:
        """Start sending a uint8 tensor; the result waits until it is sent."""

    def receive(self, num_bytes: int) -> Tensor:
        """Receive `num_bytes` bytes as a uint8 tensor."""


class Channel:
    """`Transport` over point-to-point operations of `torch.distributed`.

    Args:
        peer: rank of the other process.
        group: process group that only this channel uses; None: the default group.
        timeout: seconds that one transfer may take; None: as long as the group allows.
    """

    def __init__(self, peer: int, group: Any = None, timeout: float | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("no process group: call torch.distributed.init_process_group(...) first")
        self._peer = peer
        self._group = group
        self._timeout = () if timeout is None else (timedelta(seconds=timeout),)

    def send(self, data: Tensor) -> Callable[[], None]:
        return self._start(dist.isend, data)

    def receive(self, num_bytes: int) -> Tensor:
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self._start(dist.irecv, buffer)()
        return buffer

    def _start(self, operation: Any, buffer: Tensor) -> Callable[[], None]:
        def checked(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
            try:
                return call(*args, **options)
            except RuntimeError as exc:  # gloo raises nothing narrower
                raise ChannelError(str(exc).splitlines()[0]) from exc

        work = checked(operation, buffer, self._peer, group=self._group)

        def wait() -> None:
            if checked(work.wait, *self._timeout) is False:
                raise ChannelError(f"timed out after {buffer.numel()} bytes were due")

        return wait


def as_transport(peer: int | Transport, group: Any = None, timeout: float | None = None) -> Transport:
    """Return a `Channel` to a rank, or the given transport."""
    return Channel(peer, group, timeout) if isinstance(peer, int) else peer


def send_header(transport: Transport, header: Header) -> Callable[[], None]:
    """Start sending a header in two frames; the result waits until it is sent."""
    raw = np.frombuffer(bytearray(header.raw), np.uint8)
    waits = [transport.send(torch.from_numpy(frame)) for frame in (raw[:8], raw[8:])]

    def wait_all() -> None:
        for wait in waits:
            wait()

    return wait_all


def send_details(transport: Transport, **details: Any) -> Callable[[], None]:
    """Start sending a container with details only; the result waits until it is sent."""
    return send_header(transport, Header([], details=details))


def receive_header(transport: Transport) -> Header:
    """Receive a header; raise ChannelError for anything else."""
    with _checked():
        return read_header(lambda size: transport.receive(size).numpy(), "what the peer sent", _FIX, MAX_HEADER_BYTES)


def receive_block(transport: Transport, header: Header, index: int) -> Block:
    """Receive a block; raise ChannelError if it is not the one that was sent."""
    with _checked():
        return header.read_block(lambda size: transport.receive(size).numpy(), index)


@contextmanager
def _checked() -> Iterator[None]:
    try:
        yield
    except CacheFileError as exc:
        raise ChannelError(str(exc)) from exc
