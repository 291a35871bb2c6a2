"""Numbers on their way between the host and a device, neither of which waits for what the other is doing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sent(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, without waiting for what it computes."""
    made = torch.tensor(numbers, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


class Sent:
    """Numbers of the host that are copied into one tensor of a device again and again."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._source = torch.zeros(count, dtype=dtype, pin_memory=on_gpu)
        self.host = self._source.numpy()
        self.there = torch.zeros(count, dtype=dtype, device=device)
        self._copied: Any = torch.cuda.Event() if on_gpu else None

    def wait(self) -> None:
        """Until the numbers that were sent last have left the host."""
        if self._copied is not None:
            self._copied.synchronize()

    def send(self) -> None:
        self.there.copy_(self._source, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class Fetched:
    """What a tensor of a device is where this is made, whatever the device is given to do behind it."""

    def __init__(self, there: Tensor) -> None:
        self._here, self._copied = there, None
        if there.device.type == "cuda":
            self._here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
            self._here.copy_(there, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> Tensor:
        """Waits for it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._here
