"""Memory of a running process over time, and the slope of it.

Resident memory alone does not say what grows: the samples also hold what malloc has given out (`mallinfo2`), what it
holds free, and the number of blocks of Python's own allocator.
"""

import ctypes
import os
import sys
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

NUM_BLOCKS = 40  # of the samples: a regression over their means, whose errors hardly depend on each other
STUDENT = 2.02  # 97.5% quantile of Student's distribution with NUM_BLOCKS - 2 degrees of freedom

Sample = Mapping[str, float]
FIGURES = ("seconds", "rss", "anonymous", "malloc_in_use", "malloc_free", "python_blocks", "threads", "files")


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def _malloc_counts() -> tuple[float, float]:
    """Return the MiB that malloc has given out, and those that it holds free; NaN where there is no glibc."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return float("nan"), float("nan")
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return (info.uordblks + info.hblkhd) / 2**20, info.fordblks / 2**20


def sample(start: float) -> dict[str, float]:
    """Return the `FIGURES` of this process; memory in MiB."""
    with open("/proc/self/smaps_rollup") as file:
        parts = {line.split()[0].rstrip(":"): int(line.split()[1]) for line in file if line.split()[-1] == "kB"}
    in_use, free = _malloc_counts()
    values = (
        *(time.monotonic() - start, parts["Rss"] / 1024, parts["Anonymous"] / 1024, in_use, free),
        *(sys.getallocatedblocks(), threading.active_count(), len(os.listdir("/proc/self/fd"))),
    )
    return dict(zip(FIGURES, map(float, values), strict=True))


class MemorySampler:
    """Thread that samples the memory of this process."""

    def __init__(self, period: float = 2.0) -> None:
        self._values = array("d")  # of all samples: dicts would grow by a MiB an hour
        self._period, self._start, self._end = period, time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(self._period):
            self._values.extend(sample(self._start).values())

    def stop(self) -> list[dict[str, float]]:
        self._end.set()
        self._thread.join()
        rows = zip(*[iter(self._values)] * len(FIGURES), strict=True)
        return [dict(zip(FIGURES, row, strict=True)) for row in rows]


def slope_an_hour(samples: Sequence[Sample], name: str) -> dict[str, float] | None:
    """Return the slope of a figure in its unit an hour, with the 95% interval.

    Neighbouring samples depend on each other: the line is fitted to the means of blocks.
    """
    if len(samples) < 3 * NUM_BLOCKS:
        return None
    points = np.asarray([(item["seconds"] / 3600, item[name]) for item in samples])
    x, y = np.asarray([block.mean(axis=0) for block in np.array_split(points, NUM_BLOCKS)]).T
    slope, intercept = np.polyfit(x, y, 1)
    residuals = y - slope * x - intercept
    error = float(np.sqrt((residuals**2).sum() / (NUM_BLOCKS - 2) / ((x - x.mean()) ** 2).sum()))
    return {"value": float(slope), "low": float(slope - STUDENT * error), "high": float(slope + STUDENT * error)}


def mapped_memory() -> dict[str, float]:
    """Return the resident MiB of this process by kind of mapping."""
    result: dict[str, float] = {}
    kind = ""
    with open("/proc/self/smaps") as file:
        for line in file:
            name, *fields = line.split()
            if not name.endswith(":"):
                path = fields[4] if len(fields) > 4 else ""
                is_code = "x" in fields[0]
                kind = path if path.startswith("[") else "files" if path else "code" if is_code else "anonymous"
            elif name == "Rss:":
                result[kind] = result.get(kind, 0.0) + int(fields[0]) / 1024
    return {kind: round(size, 2) for kind, size in sorted(result.items())}


def left_behind(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return what of threads and open files a process has more than before."""
    return [f"{name} {sorted(more)}" for name in before if (more := set(after[name]) - set(before[name]))]


def held() -> dict[str, list[str]]:
    """Return the threads and open files of this process, by name."""
    files = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the listing's own descriptor
            continue
        files.append(target)
    return {"threads": [thread.name for thread in threading.enumerate()], "files": files}
