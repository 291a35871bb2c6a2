"""Failures of disks, memory, transfers, models, callbacks, signals and clocks, one kind after the other.

Each input is a group of small programs (`soak_programs.py`) on a crowded engine into which one kind of fault is injected.
Promised: tokens are those of an engine without faults; where a request must fail, it fails once, with one error of the
library that names the cause, and no other request changes; afterwards `check()` holds, and no page, reference or file
is left.
"""

import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from .campaign import Options, Outcome, Tally
from .fault_case import Case
from .fault_disks import DISK_FAULTS
from .fault_parts import PART_FAULTS
from .fault_processes import PROCESS_FAULTS

FAULTS: Mapping[str, Callable[[Case], None]] = {**DISK_FAULTS, **PART_FAULTS, **PROCESS_FAULTS}


def run(options: Options) -> Outcome:
    """Inject one kind of fault after the other."""
    tally, kinds = Tally(options), list(FAULTS)
    torch.set_num_threads(1)  # forked processes have no other threads
    for index in options.rounds():
        name = kinds[index % len(kinds)]
        with tempfile.TemporaryDirectory() as folder:
            try:
                FAULTS[name](Case(options.draws(index), tally, Path(folder)))
            except Exception as exc:
                tally.lose(index, f"{name}: {type(exc).__name__}: {exc}\n{traceback.format_exc()[-1200:]}")
        tally.inputs += 1
        tally.counts[f"inputs: {name}"] += 1
    return tally.outcome()
