"""Faults of the disk tier: full, read-only, slow, gone, and files that are damaged while they are in use.

No request may fail: what cannot be stored or read back is computed again.
"""

import os
import random
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from choreograph import Engine
from choreograph.kv_cache.container import ContainerFile

from .fault_case import Case

NUM_PROGRAMS = 3  # on one engine
DISK: dict[str, Any] = {"disk_capacity": 8192}


def _folder_of(engine: Engine) -> Path:
    folder: Path = engine.core.cache_manager.offload_manager.tiers[-1].folder  # type: ignore[union-attr]
    return folder


def _run(case: Case, engine: Engine) -> None:
    for _ in range(NUM_PROGRAMS):
        case.run_programs(engine)
        engine.check()


@contextmanager
def _disk_engine(case: Case, folder: Path | None = None) -> Iterator[Engine]:
    options = {**DISK, "disk_dir": folder or case.folder}
    if case.rng.random() < 0.5:
        options["host_capacity"] = 512
    with case.engine(**options) as engine:
        yield engine


def _file_limit(case: Case) -> None:
    """Files may not grow: every write beyond a few kilobytes fails."""
    with _disk_engine(case) as engine:
        case.run_programs(engine)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (case.rng.choice((0, 1 << 10, 1 << 14)), before[1]))
        try:
            _run(case, engine)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        case.run_programs(engine)
        case.inject("file size limit", engine.events.counts["failed_transfer"])


@contextmanager
def _mounted(case: Case) -> Iterator[Path | None]:
    """Mount a file system of 1 MiB in memory; None where that is not allowed."""
    folder = case.folder / "mounted"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        is_mounted = False
    try:
        yield folder if is_mounted else None
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def _full_disk(case: Case) -> None:
    """The file system has 1 MiB."""
    with _mounted(case) as folder:
        case.tally.counts["file systems that could not be mounted"] += folder is None
        if folder is None:
            return
        filler = folder / "filler"
        filler.write_bytes(bytes(case.rng.randrange(700_000, 1_000_000)))
        with _disk_engine(case, folder) as engine:
            _run(case, engine)
            filler.unlink()
            case.run_programs(engine)
            case.inject("full disk", engine.events.counts["failed_transfer"])


def _read_only(case: Case) -> None:
    """The file system becomes read-only while it is in use."""
    with _mounted(case) as folder:
        if folder is None:
            return
        with _disk_engine(case, folder) as engine:
            case.run_programs(engine)
            remount = ["mount", "-o", "remount,ro", str(folder)]
            if subprocess.run(remount, capture_output=True, check=False).returncode:
                return
            _run(case, engine)
            case.inject("read-only disk", engine.events.counts["failed_transfer"])
            subprocess.run(["mount", "-o", "remount,rw", str(folder)], capture_output=True, check=False)


def _failing_calls(case: Case) -> None:
    """Creating, writing, opening or reading a file fails now and then, and all of them are slow."""
    number = 0

    def failing(function: Callable[..., Any], rng: random.Random) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal number
            time.sleep(rng.random() * 0.003)
            if rng.random() < 0.2:
                number += 1
                raise OSError(rng.choice((5, 28, 30)), "injected")
            return function(*args, **options)

        return call

    with ExitStack() as stack, _disk_engine(case) as engine:
        for name in ("create", "open", "write", "read"):
            function = getattr(ContainerFile, name)
            stack.enter_context(
                mock.patch.object(ContainerFile, name, failing(function, random.Random(case.rng.random())))
            )
        _run(case, engine)
        case.inject("failing and slow calls", number)


def _damaged_files(case: Case) -> None:
    """Files are truncated, deleted, swapped, or get a flipped byte, while the engine runs."""
    with _disk_engine(case) as engine:
        folder, end, rng, number = _folder_of(engine), threading.Event(), random.Random(case.rng.random()), 0

        def damage() -> None:
            nonlocal number
            while not end.wait(0.001):
                files = list(folder.glob("*.safetensors"))
                if files:
                    try:
                        _damage(rng.choice(files), files, rng)
                        number += 1
                    except OSError:  # it was removed meanwhile
                        continue

        thread = threading.Thread(target=damage)
        thread.start()
        try:
            _run(case, engine)
        finally:
            end.set()
            thread.join()
        case.run_programs(engine)
        case.inject("damaged files", number)


def _damage(file: Path, files: list[Path], rng: random.Random) -> None:
    kind = rng.choice(("truncate", "flip", "delete", "swap", "zero", "grow"))
    if kind == "delete":
        file.unlink()
        return
    size = file.stat().st_size
    if kind == "swap":
        other = rng.choice(files)
        content = other.read_bytes()
        with open(file, "r+b") as target:
            target.write(content)
            target.truncate()
        return
    with open(file, "r+b") as target:
        if kind == "truncate":
            target.truncate(rng.randrange(size + 1))
        elif kind == "grow":
            target.seek(size)
            target.write(b"more")
        elif size:
            place = rng.randrange(size)
            target.seek(place)
            byte = target.read(1)
            target.seek(place)
            target.write(b"\0" if kind == "zero" else bytes([byte[0] ^ (1 << rng.randrange(8))]))


def _lost_folder(case: Case) -> None:
    """The folder is removed while the engine runs."""
    with _disk_engine(case) as engine:
        case.run_programs(engine)
        folder = _folder_of(engine)
        shutil.rmtree(folder, ignore_errors=True)
        if case.rng.random() < 0.5:
            folder.write_text("a file")
        _run(case, engine)
        case.inject("lost folder")
        if folder.is_file():
            folder.unlink()


def _two_engines(case: Case) -> None:
    """Two engines keep their files in one folder."""
    with _disk_engine(case) as first, _disk_engine(case) as second:
        for engine in (first, second, first):
            _run(case, engine)
        case.inject("shared folder")
    left = os.listdir(case.folder)
    if left:
        raise AssertionError(f"files {left} are left")


DISK_FAULTS = {
    "file size limit": _file_limit,
    "full disk": _full_disk,
    "read-only disk": _read_only,
    "failing calls": _failing_calls,
    "damaged files": _damaged_files,
    "lost folder": _lost_folder,
    "two engines": _two_engines,
}
