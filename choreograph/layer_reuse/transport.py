"""Channels between two processes: blocks of bytes, and JSON objects as blocks.

`Channel` uses `torch.distributed`. Another transport needs the two methods of `Transport`.
"""

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError

MAX_JSON_BYTES = 1 << 20  # of one object


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


def send_json(transport: Transport, message: Mapping[str, Any]) -> Callable[[], None]:
    """Start sending an object; the result waits until it is sent.

    The frames are its byte count as int64 and UTF-8 JSON.
    """
    raw = json.dumps(message).encode()
    waits = [
        transport.send(torch.tensor([len(raw)]).view(torch.uint8)),
        transport.send(torch.frombuffer(bytearray(raw), dtype=torch.uint8)),
    ]

    def wait_all() -> None:
        for wait in waits:
            wait()

    return wait_all


def receive_json(transport: Transport) -> dict[str, Any]:
    """Receive a JSON object; raise ChannelError for anything else."""
    size = int(transport.receive(8).view(torch.int64))
    if not 0 < size <= MAX_JSON_BYTES:
        raise ChannelError(f"the peer sent {size} bytes of JSON, the limit is {MAX_JSON_BYTES}")
    try:
        result = json.loads(transport.receive(size).numpy().tobytes())
    except (ValueError, RecursionError) as exc:
        raise ChannelError(f"the peer sent no JSON: {exc}") from exc
    if not isinstance(result, dict):
        raise ChannelError(f"the peer sent a {type(result).__name__}, not a JSON object")
    return result
