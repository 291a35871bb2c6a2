"""What the device reaches where nothing of ours runs: the assumptions that predictions rest on."""

import torch

from .bench import Bench, PartResult, device_seconds
from .budget import Allowance


def measure(bench: Bench, allowance: Allowance) -> PartResult:
    size = 64 if bench.trial else 8192
    a, b = bench.noise(size, size), bench.noise(size, size)
    host = torch.empty(1 << (20 if bench.trial else 30), dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    there = torch.empty_like(host, device=bench.device)
    device_seconds(lambda: a @ b)
    products = [2 * size**3 / device_seconds(lambda: a @ b) for _ in range(10)]
    copies = [len(host) / device_seconds(lambda: there.copy_(host, non_blocking=True)) for _ in range(5)]
    return {
        "memory, plain copy": [bench.bandwidth / 1e12],
        "product of matrices": [rate / 1e12 for rate in products],
        "host to device": [rate / 1e9 for rate in copies],
    }
