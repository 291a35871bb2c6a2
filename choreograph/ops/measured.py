"""Which attention code is the fastest on this machine, in a model's shape: measured once, kept, looked up by `auto`.

Without a measurement `auto` takes what is made for the device. The table lies in the user's cache folder.
"""

import json
import platform
import time
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from platformdirs import user_cache_path
from torch import Tensor

from ..places import make_folder, write_whole
from .attend import FEW, Backend, BySize, make_backend
from .kind import Heads, Kind
from .native import BackendUnavailable
from .plan import Plan, Read, make_plan

ROUNDS = 7
CONTEXT = 2048  # slots


Table = dict[str, dict[str, float]]  # seconds, by name of the backend and case


def open_backend(name: str, heads: Heads, dtype: torch.dtype, device: torch.device) -> tuple[Backend, str | None]:
    """As `make_backend`; `auto` is the fastest of what was measured, in small and in large steps."""
    table = _tables().get(_key(heads, dtype, device), {}) if name == "auto" else {}
    sides = _open(list(table), heads, dtype, device)
    table = {name: taken for name, taken in table.items() if name in sides}
    if not table:
        return make_backend(name, heads.width, dtype, device)
    small, large = winners(table)
    return (sides[small] if small == large else BySize(sides[small], sides[large])), None


def _open(names: Sequence[str], heads: Heads, dtype: torch.dtype, device: torch.device) -> dict[str, Backend]:
    """Those that can run here."""
    found = {}
    for name in names:
        try:
            found[name] = make_backend(name, heads.width, dtype, device)[0]
        except BackendUnavailable:
            continue
    return found


def winners(table: Table) -> tuple[str, str]:
    """The fastest in small steps, and in large ones."""

    def seconds(name: str, few: bool) -> float:
        return sum(taken for case, taken in table[name].items() if case.startswith("few") == few)

    return min(table, key=lambda name: seconds(name, True)), min(table, key=lambda name: seconds(name, False))


def measure(heads: Heads, kind: Kind, dtype: torch.dtype, device: torch.device, *, context: int = CONTEXT) -> Table:
    """Seconds of one layer in steps that occur, in turns, the median, of all backends that can run here."""
    names = ("native", "sdpa") if device.type == "cpu" else ("triton", "flex", "sdpa")
    sides = _open(names, heads, dtype, device)
    made = torch.Generator().manual_seed(0)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=made).to(dtype).to(device)

    keys, values = (noise(2 * context, heads.groups, heads.width) for _ in range(2))
    found: Table = {name: {} for name in sides}
    for case, plan in _cases(context):
        rows = [noise(count, plan.rows, heads.width) for count in (heads.query, heads.groups, heads.groups)]
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(ROUNDS):
            for name, side in list(sides.items()):
                try:
                    taken[name].append(_seconds(side, plan, rows, keys, values, kind, device))
                except Exception as problem:  # a compiler's, or too little memory: it is out of the race, and says why
                    warnings.warn(f"{name} is left out, it fails here: {str(problem)[:300]}", stacklevel=2)
                    del sides[name]
        for name in sides:
            found[name][case] = sorted(taken[name])[ROUNDS // 2]
    return {name: found[name] for name in sides}


def keep(table: Table, heads: Heads, dtype: torch.dtype, device: torch.device) -> Path:
    """Puts a measurement into the table of this machine."""
    path = _path()
    make_folder(path.parent)
    write_whole(path, json.dumps(_tables() | {_key(heads, dtype, device): table}, indent=1))
    return path


def _cases(context: int) -> Iterator[tuple[str, Plan]]:
    """Steps of few rows, over one context, shared and moved; and steps of many rows, of a prompt."""
    half = context // 2
    own = range(context, context + FEW)
    moved = [Read(0, 0, 1, 3, half, 0, 3), Read(half, 0, 1, -half, half, 0, 0), Read(own[0], 0, 1, 0, 1, 1, context)]
    shared = [Read(0, row, row + 1, 0, context, 0, 0) for row in range(8)]
    shared += [Read(own[row], row, row + 1, 0, 1, 1, context) for row in range(8)]
    many = [Read(0, 0, half, 0, half, 0, 0), Read(context, 0, half, 0, 1, 1, half)]
    yield "few rows: one", make_plan([own[0]], moved, [context])
    yield "few rows: eight that share", make_plan(list(own[:8]), shared, [context] * 8)
    yield "many rows", make_plan(list(range(context, context + half)), many, list(range(half, context)))


def _seconds(
    side: Backend, plan: Plan, rows: list[Tensor], keys: Tensor, values: Tensor, kind: Kind, device: torch.device
) -> float:
    """Of a layer behind the first one, which works the plan out for all."""
    for last in (False, True):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        side(plan, rows[0], rows[1], rows[2], keys, values, keys.shape[-1] ** -0.5, kind)
        if last and device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _path() -> Path:
    return user_cache_path("choreograph") / "backends.json"


def _tables() -> dict[str, Table]:
    try:
        found: dict[str, Table] = json.loads(_path().read_text())
    except (OSError, ValueError):
        return {}
    tables = found if isinstance(found, dict) else {}
    return {key: table for key, table in tables.items() if _is_table(table)}


def _is_table(table: object) -> bool:
    """Whether it is what `measure` gives: others may have written into the file."""
    return isinstance(table, dict) and all(
        isinstance(cases, dict) and cases and all(isinstance(taken, float) for taken in cases.values())
        for cases in table.values()
    )


def _key(heads: Heads, dtype: torch.dtype, device: torch.device) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    made = f"choreograph {_version()}, torch {torch.__version__}"
    return f"{where}, {threads} threads, {made}, {dtype}, {heads.query}/{heads.groups}/{heads.width}"


def _version() -> str:
    try:
        return version("choreograph")
    except PackageNotFoundError:  # run from a folder that nobody installed
        return "not installed"
