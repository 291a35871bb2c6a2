"""Soak: mixed work at full load, through the server and in process, for as long as `--seconds` says.

Two processes work at the same time on crowded engines, whose cache, host tier and disk tier are all too small. One runs
programs in threads (`soak_programs.py`); one serves HTTP to clients of three tenants (`soak_clients.py`).

Promised: every request that its client does not abort succeeds, and a share of them is compared, token by token, with a quiet
engine; `check()` of every owner holds all the time; anonymous memory has no slope after a warm-up; no thread, file, page or
reference is left at the end.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .campaign import Options, Outcome
from .process_memory import FIGURES, slope_an_hour
from .soak_clients import Clients
from .tiny_family import save_family

NUM_CLIENTS = 24
WARM_UP = 1 / 3  # share of the time that the slope of memory leaves out
JUDGED_SECONDS = 1200  # shorter runs still warm up: their slope is reported, and not held against them
SLOPE_LIMIT = 1.0  # MiB an hour: a run fails if the whole interval of anonymous memory's slope is above it
END_SECONDS = 300


class Worker:
    """A process of `soak_worker`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self._process = process
        self.addresses = json.loads(process.stdout.readline() or "{}")

    def finish(self) -> dict[str, Any]:
        """End the input; return the report."""
        output, _ = self._process.communicate(timeout=END_SECONDS)
        if self._process.returncode:
            return {"lost": [f"the process ended with {self._process.returncode}"], "counts": {}, "samples": []}
        report: dict[str, Any] = json.loads(output.splitlines()[-1])
        return report


@contextmanager
def worker(role: str, folder: Path, seed: int) -> Iterator[Worker]:
    """Run a worker process inside the block."""
    command = [sys.executable, "-m", "benchmarks.torture.soak_worker", role, str(folder), str(seed)]
    # Two arenas: with one for each thread, memory that malloc holds free in one is not given to another thread.
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "2"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **settings},
    )
    try:
        yield Worker(process)
    finally:
        process.kill()
        process.wait()


def growth_of(name: str, summary: dict[str, Any], options: Options) -> list[str]:
    """Return what is lost if the memory of a worker has a slope.

    It is judged by anonymous memory: the kernel may drop pages of files, which hides growth of the resident set.
    """
    slope = summary["slopes_an_hour"].get("anonymous")
    if options.seconds < JUDGED_SECONDS or slope is None or slope["low"] <= SLOPE_LIMIT:
        return []
    text = f"{slope['value']:.1f} MiB an hour ({slope['low']:.1f} to {slope['high']:.1f})"
    return [f"seed {options.seed}, {name}: anonymous memory grows by {text}"]


def summary_of(report: dict[str, Any]) -> dict[str, Any]:
    """Return counts and memory of a worker's report."""
    samples = report["samples"]
    steady = [sample for sample in samples if sample["seconds"] > samples[-1]["seconds"] * WARM_UP]
    slopes = {name: slope for name in FIGURES[1:] if (slope := slope_an_hour(steady, name)) is not None}
    return {
        "counts": report["counts"],
        "slopes_an_hour": slopes,
        "samples": samples[:: max(1, len(samples) // 120)],
        "objects": report.get("objects", []),
        "maps": report.get("maps", [])[-1:],
    }


def run(options: Options) -> Outcome:
    """Run the server with its clients and the programs at the same time."""
    lost: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        save_family(Path(folder))
        with (
            worker("programs", Path(folder), options.seed) as programs,
            worker("server", Path(folder), options.seed) as server,
        ):
            urls = server.addresses["url"], server.addresses["quiet"]
            clients = Clients(*urls, options.seed, time.monotonic() + options.seconds)
            asyncio.run(clients.run(NUM_CLIENTS))
            reports = {"in process": programs.finish(), "server": server.finish()}
    details: dict[str, Any] = {"clients": dict(clients.counts)}
    lost += clients.lost
    for name, report in reports.items():
        lost += [f"{name}: {line}" for line in report["lost"]]
        details[name] = summary_of(report)
        lost += growth_of(name, details[name], options)
    inputs = reports["in process"]["counts"].get("requests", 0) + clients.counts["sent"]
    faults = clients.counts["aborted"] + reports["in process"]["counts"].get("engine cancelled", 0)
    return Outcome(inputs, faults, tuple(lost), details)
