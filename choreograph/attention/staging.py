"""Asynchronous copies between host and device through pinned buffers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a device without synchronizing."""
    host_tensor = torch.tensor(numbers, dtype=dtype)
    return host_tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host_tensor.to(device)


class PinnedBuffer:
    """Pinned host array that is repeatedly copied into one device tensor.

    `host` is (count,) numpy, `device` a (count,) tensor of the same dtype.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._source = torch.zeros(count, dtype=dtype, pin_memory=on_gpu)
        self.host = self._source.numpy()
        self.device = torch.zeros(count, dtype=dtype, device=device)
        self._copy_done: Any = torch.cuda.Event() if on_gpu else None

    def wait(self) -> None:
        """Wait until the last copy has read the host array, so that it can be modified."""
        if self._copy_done is not None:
            self._copy_done.synchronize()

    def flush(self) -> None:
        """Launch the copy from `host` to `device`."""
        self.device.copy_(self._source, non_blocking=True)
        if self._copy_done is not None:
            self._copy_done.record()


class AsyncHostCopy:
    """Asynchronous host copy of a tensor, as of its creation in stream order."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._copy_done = tensor, None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copy_done = torch.cuda.Event()
            self._copy_done.record()

    def read(self) -> Tensor:
        """Wait for the copy and return it."""
        if self._copy_done is not None:
            self._copy_done.synchronize()
        return self._host
