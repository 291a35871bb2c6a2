"""Damaged and hostile files of every format that the library and the command line read.

make torture ARGS="files --seconds 600"
python -m benchmarks.torture.files 179 681    # one input again: seed and index

An input is a valid one with changes to its files (`file_mutations.py`). It may be read, or refused by a `ChoreographError`
that names the file and says what to do. Lost is an input that raises anything else, takes more than 10 s of the processor
or 1 GiB, opens or changes a path outside its folder, or runs code. Inputs run in forks of a process that has imported all,
so that a crash loses one input.
"""

import contextlib
import gc
import json
import logging
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from .campaign import Options, Outcome, Tally

ROOT = Path(__file__).parents[2]
MAX_CPU_SECONDS = 10.0  # of one input
MAX_WAIT_SECONDS = 300.0  # without a result, for an input that waits and computes nothing
MAX_BYTES = 1 << 30  # that one input may add to the resident memory
ADDRESS_SPACE = 6 << 30  # that one input may reserve; more raises MemoryError
INPUTS_PER_FORK = 300
# What an error has to contain one of: what to do, what is expected, or the place in the file
FIX = re.compile(
    r"\b(use|give|get|remove|write|name|run|install|load|make|train|profile|check|close|add|move|map|merge|rename|save|keep|"
    r"learn|calibrate|declare|export|set|raise|correct|repair|separate|start|convert|choose|say|end|replace|ask|"
    r"needs?|must|is expected|are served|lacks|line \d+|known:|declared:|declared \(|instead of)\b|known:|declared:"
)
RUNS_CODE = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pickle.find_class")
TOUCHES_PATHS = ("open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate")


def run(options: Options) -> Outcome:
    """Read changed files in a process of its own until the time has passed."""
    tally = Tally(options)
    with tempfile.TemporaryDirectory(prefix="files-") as temporary:
        command = [sys.executable, "-m", __name__, "--work", str(options.seed), str(options.seconds), temporary]
        environment = os.environ | {
            "XDG_CACHE_HOME": f"{temporary}/cache",
            "HF_HOME": f"{temporary}/hub",
            "TMPDIR": f"{temporary}/tmp",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        Path(temporary, "tmp").mkdir()
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        result = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    try:
        counted = json.loads(result.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        tally.lose(0, f"the process that reads files ended with {result.returncode}")
        return tally.outcome()
    tally.inputs, tally.lost, tally.details = counted["inputs"], counted["lost"], counted["details"]
    tally.counts.update(counted["counts"])
    return tally.outcome()


# -- the process that reads -------------------------------------------------------------------------------


@dataclass
class Watch:
    """What the audit hook has seen of one input."""

    folders: tuple[str, ...]  # that may be read
    writable: tuple[str, ...]  # that may be changed
    events: list[str] = field(default_factory=list)
    is_active: bool = False

    def install(self) -> None:
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_active:
            return
        if event in RUNS_CODE:
            self.events.append(f"runs code: {event} {str(arguments)[:120]}")
        elif event in TOUCHES_PATHS and arguments and isinstance(arguments[0], (str, bytes, os.PathLike)):
            self.is_active = False  # resolving a path raises events of its own
            try:
                path = os.path.realpath(os.path.join(_directory(event, arguments), os.fsdecode(arguments[0])))
            except ValueError:  # a NUL in the name, which is refused below
                return
            finally:
                self.is_active = True
            mode, flags = (*arguments[1:], None, None)[:2]
            is_read = (
                event == "open" and not (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and "w" not in str(mode)
            )
            if not path.startswith(self.folders if is_read else self.writable):
                self.events.append(f"{'opens' if event == 'open' else event} {path}")


def _directory(event: str, arguments: tuple[Any, ...]) -> str:
    """Return what a relative path of an event is relative to: an open directory, or the working directory."""
    place = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.rename": 2}.get(event)
    number = -1 if place is None or place >= len(arguments) else arguments[place]
    return os.getcwd() if not isinstance(number, int) or number < 0 else os.readlink(f"/proc/self/fd/{number}")


class Work:
    """Inputs of one seed: how each is drawn, read and judged."""

    def __init__(self, seed: int, folder: Path) -> None:
        from . import file_readers

        self.name = file_readers.NAME
        self.options, self.folder = Options(0, seed), folder
        self.outside = folder / "outside"
        self.outside.mkdir(parents=True)
        (self.outside / "secret").write_text("secret")
        self.kinds = file_readers.create_kinds(folder / "valid")
        self.others = [data for kind in self.kinds for data in kind.files.values()]
        self.place = folder / "inputs"
        libraries = (
            sys.prefix,
            sys.base_prefix,
            str(ROOT),
            "/usr/lib",
            "/usr/share",
            "/proc/",
            "/sys/",
            "/dev/null",
            "/dev/urandom",
        )
        caches = (os.environ["XDG_CACHE_HOME"], os.environ["HF_HOME"], os.environ["TMPDIR"])
        own = tuple(os.path.realpath(path) for path in (self.place, *caches))
        # compiled modules of libraries are written when they are imported for the first time
        self.watch = Watch(
            (*map(os.path.realpath, libraries), *own, "/etc/"), (*own, os.path.realpath(sys.prefix), "/dev/null")
        )
        self.watch.folders = tuple(path for path in self.watch.folders if path != "/etc/")

    def read_valid(self) -> Iterator[str]:
        """Yield what is wrong with reading the valid input of each kind, which also imports what readers need."""
        for kind in self.kinds:
            folder = self.place / f"valid-{len(os.listdir(self.place)) if self.place.exists() else 0}" / self.name
            write_files(folder, kind.files)
            try:
                kind.use(kind.read(folder))
            except BaseException as exc:
                yield f"{kind.name}: the valid input is refused: {type(exc).__name__}: {exc}"

    def draw(self, index: int) -> tuple[Any, dict[str, bytes], list[str]]:
        """Return an input: its kind, files, and the names of changed files."""
        from .file_mutations import Mutator

        rng = self.options.draws(index)
        kind = rng.choices(self.kinds, [kind.weight for kind in self.kinds])[0]
        files, mutator = dict(kind.files), Mutator(rng, str(self.outside / "ran"), self.others)
        mutator.texts += (str(self.outside / "secret"), "../outside/secret", "../../../outside/secret")
        names = rng.sample(sorted(files), min(len(files), rng.choice((1, 1, 1, 2))))
        for name in names:
            draw = rng.random()
            if draw < 0.01:
                del files[name]
            elif draw < 0.03:
                files[name] = files[rng.choice(sorted(files))]
            else:
                files[name] = mutator.mutate(name, files[name])
        return kind, files, names

    def judge(self, index: int) -> dict[str, Any]:
        """Read one input; return its kind, result, memory and time."""
        kind, files, names = self.draw(index)
        folder = self.place / str(index) / self.name
        write_files(folder, files)
        memory, start = _reset_peak_memory(), time.process_time()
        self.watch.events, self.watch.is_active = [], True
        problems: list[str] = []
        try:
            result = self._read(kind, folder, [*files, self.name], problems)
        finally:
            self.watch.is_active = False
        seconds, added = time.process_time() - start, _peak_memory() - memory
        problems += dict.fromkeys(self.watch.events)
        if added > MAX_BYTES:
            problems.append(f"takes {added / 2**20:.0f} MiB")
        if seconds > MAX_CPU_SECONDS:
            problems.append(f"takes {seconds:.1f} s of the processor")
        if (self.outside / "ran").exists():
            problems.append("runs code")
            (self.outside / "ran").unlink()
        shutil.rmtree(folder.parent, ignore_errors=True)
        _clear(Path(os.environ["XDG_CACHE_HOME"]))
        changed = ", ".join(names)
        problems = [problem.replace(f"{folder}/", "") for problem in problems]
        lost = [f"{kind.name} ({changed} changed): {problem}" for problem in problems]
        return {"index": index, "kind": kind.name, "result": result, "bytes": added, "seconds": seconds, "lost": lost}

    def _read(self, kind: Any, folder: Path, names: list[str], problems: list[str]) -> str:
        from choreograph.errors import ChoreographError

        step = "read"
        try:
            value = kind.read(folder)
            step = "used"
            kind.use(value)
            return "read"
        except ChoreographError as exc:
            text = str(exc)
            if _lacks_memory(exc):
                problems.append(f"asks for too much memory before it is refused: {text[:300]}")
            elif step == "read" and not any(name in text for name in names):
                problems.append(f"the error names no file: {text[:300]}")
            elif step == "read" and not FIX.search(text):
                problems.append(f"the error names no fix: {text[:300]}")
            return "refused"
        except BaseException as exc:  # Rust raises exceptions that are no Exception
            frames = traceback.extract_tb(exc.__traceback__)
            where = next((f for f in reversed(frames) if "choreograph/" in f.filename), frames[-1])
            place = f"{Path(where.filename).name}:{where.lineno}"
            problems.append(f"{type(exc).__name__} at {place} when it is {step}: {' '.join(str(exc).split())[:300]}")
            return "lost"

    def read_all(self, first: int, send: Any) -> None:
        """Read inputs from an index on in this process, and send a line for each."""
        self.watch.install()
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE, used + ADDRESS_SPACE))
        for index in range(first, first + INPUTS_PER_FORK):
            send({"start": index})
            send(self.judge(index))
            if index % 10 == 0:
                gc.collect()


def _lacks_memory(exc: BaseException | None) -> bool:
    while exc is not None:
        if type(exc) is MemoryError or "allocate memory" in str(exc):
            return True
        exc = exc.__cause__
    return False


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write files into a new folder."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _clear(folder: Path) -> None:
    """Remove converted models."""
    shutil.rmtree(folder / "choreograph" / "models", ignore_errors=True)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    return 0


def _reset_peak_memory() -> int:
    """Set the peak of resident memory to what is resident, and return that, bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak_memory() -> int:
    return _status("VmHWM")


@dataclass
class Results:
    """What all forks have sent."""

    lost: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    inputs: int = 0
    largest: dict[str, Any] = field(default_factory=lambda: {"bytes": 0})
    slowest: dict[str, Any] = field(default_factory=lambda: {"seconds": 0.0})

    def add(self, line: dict[str, Any], seed: int) -> None:
        self.inputs += 1
        self.counts[f"{line['kind']}, {line['result']}"] += 1
        self.lost += [f"seed {seed}, index {line['index']}: {problem}" for problem in line["lost"]]
        self.largest = max(self.largest, line, key=lambda x: x["bytes"])
        self.slowest = max(self.slowest, line, key=lambda x: x["seconds"])


def run_forks(work: Work, seconds: float, results: Results, seed: int) -> None:
    """Read inputs in one fork after the other until the time has passed."""
    deadline, index = time.monotonic() + seconds, 0
    while index == 0 or time.monotonic() < deadline:
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(reader)
            _work_in_fork(work, index, writer)
        os.close(writer)
        try:
            index = _follow(pid, reader, index, deadline, work, results, seed)
        finally:
            os.close(reader)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _work_in_fork(work: Work, first: int, writer: int) -> None:
    """Read inputs and end the process."""
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        work.read_all(first, lambda line: os.write(writer, json.dumps(line).encode() + b"\n"))
    finally:
        os._exit(0)


def _follow(pid: int, reader: int, index: int, deadline: float, work: Work, results: Results, seed: int) -> int:
    """Collect the lines of a fork; return the index of the next input."""
    process, buffer, current, first = psutil.Process(pid), b"", index, index
    begin, cpu = time.monotonic(), 0.0
    while True:
        ready, _, _ = select.select([reader], [], [], 0.2)
        if ready:
            data = os.read(reader, 1 << 16)
            if not data:  # the fork has ended
                _, status = os.waitpid(pid, 0)
                if current >= index:  # in the middle of an input
                    kind, _, names = work.draw(current)
                    results.inputs += 1
                    results.counts[f"{kind.name}, lost"] += 1
                    end = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {status}"
                    results.lost.append(
                        f"seed {seed}, index {current}: {kind.name} ({', '.join(names)} changed): the process ended, {end}"
                    )
                    return current + 1
                return index
            *lines, buffer = (buffer + data).split(b"\n")
            for line in map(json.loads, lines):
                if "start" in line:
                    current, begin = line["start"], time.monotonic()
                    with contextlib.suppress(psutil.Error):
                        cpu = sum(process.cpu_times()[:2])
                else:
                    results.add(line, seed)
                    index, current = line["index"] + 1, -1
            if time.monotonic() > deadline and index > first:
                return index
            continue
        with contextlib.suppress(psutil.Error):
            used = sum(process.cpu_times()[:2]) - cpu
            if current >= 0 and (used > 2 * MAX_CPU_SECONDS or time.monotonic() - begin > MAX_WAIT_SECONDS):
                kind, _, names = work.draw(current)
                results.inputs += 1
                results.counts[f"{kind.name}, lost"] += 1
                results.lost.append(
                    f"seed {seed}, index {current}: {kind.name} ({', '.join(names)} changed): does not end, {used:.0f} s of the processor"
                )
                return current + 1


def main() -> int:
    logging.getLogger("choreograph").setLevel(logging.ERROR)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["--work"]:
        seed, seconds, folder = int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
        results = Results()
        work = Work(seed, folder)
        results.lost += [f"seed {seed}: {problem}" for problem in work.read_valid()]
        if not results.lost:
            run_forks(work, seconds, results, seed)
        details = {
            "largest": {key: results.largest.get(key) for key in ("index", "kind", "bytes")},
            "slowest": {key: results.slowest.get(key) for key in ("index", "kind", "seconds")},
        }
        print(
            json.dumps({"inputs": results.inputs, "lost": results.lost, "counts": results.counts, "details": details})
        )
        return 0
    seed, index = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="files-") as temporary:
        for name in ("XDG_CACHE_HOME", "HF_HOME", "TMPDIR"):
            os.environ[name] = f"{temporary}/{name}"
            Path(os.environ[name]).mkdir()
        os.environ["HF_HUB_OFFLINE"] = "1"
        work = Work(seed, Path(temporary))
        print(*work.read_valid(), sep="\n")
        work.watch.install()
        print(json.dumps(work.judge(index), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
