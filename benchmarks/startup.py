"""From starting `choreograph chat` to the first text of its answer: first and second start.

The import of PyTorch and transformers' model classes, which every start needs, is measured alone too.

Each start is a process of its own. The first one of a round has empty caches (built kernels, measured
backends), the second one those that the first has left. The model's files are in the machine's page cache.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .common import median_row, save

# required and aimed seconds by whether the caches are filled
LIMITS = {False: (15, 10), True: (3, 2)}

IMPORTS = "import torch; from transformers import LlamaForCausalLM"
IMPORT_ROW = "PyTorch and transformers' model classes: import"


def seconds_of_import() -> float:
    """Return the seconds of a process that imports what every start needs, without collections as the command does."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", f"import gc, os; gc.disable(); {IMPORTS}; os._exit(0)"],  # without Python's clean-up
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - start


def first_text(caches: Path) -> float:
    """Return the seconds from starting the command to the first characters of the answer."""
    command = [sys.executable, "-m", "choreograph", "chat", "--max-tokens", "8"]
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(caches),
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has bytecode
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(b"Name three colours.\n\n")
        process.stdin.close()
        has_text = bool(process.stdout.read(1))
        elapsed = time.perf_counter() - start
        process.stdout.read()
        errors = process.stderr.read().decode(errors="replace")
    if process.returncode or not has_text:
        raise SystemExit(f"choreograph chat ended with {process.returncode}: {errors[-2000:]}")
    return elapsed


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as caches:
            for is_second in times:
                times[is_second].append(first_text(Path(caches)))
                print(json.dumps({"second": is_second, "seconds": round(times[is_second][-1], 2)}), flush=True)
    imports = [seconds_of_import() for _ in range(given.rounds)]
    rows = [median_row(IMPORT_ROW, imports, "s", better="lower")]
    for is_second, samples in times.items():
        required, target = LIMITS[is_second]
        name = f"{'second' if is_second else 'first'} start: first text"
        rows.append(median_row(name, samples, "s", better="lower", required=required, target=target))
    save("startup", rows)


if __name__ == "__main__":
    main()
