"""From starting `choreograph chat` to the first text of its answer: first and second start, eager and compiled.

The import of PyTorch and transformers' model classes, which every start needs, is measured alone too.

Each start is a process of its own. The first one of a round has empty caches (built kernels, measured backends,
inductor's), the second one those that the first has left. The model's files are in the machine's page cache.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .common import last_result, median_row, row_from_record, save

# required seconds by whether steps are compiled and whether the caches are filled
LIMITS: dict[tuple[bool, bool], tuple[float, float] | None] = {
    (False, False): (20, 10),
    (False, True): (4, 2),
    (True, False): None,
    (True, True): (10, 3),
}


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


def first_text(caches: Path, *, compile: bool) -> float:
    """Return the seconds from starting the command to the first characters of the answer."""
    command = [sys.executable, "-m", "choreograph", "chat", "--max-tokens", "8", *(["--compile"] if compile else [])]
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(caches),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
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
    options.add_argument("--only", choices=("eager", "compiled"), nargs="*", default=["eager", "compiled"])
    given = options.parse_args()
    times: dict[tuple[bool, bool], list[float]] = {}
    for _ in range(given.rounds):
        for compile in (name == "compiled" for name in given.only):
            with tempfile.TemporaryDirectory() as caches:
                for is_second in (False, True):
                    taken = first_text(Path(caches), compile=compile)
                    times.setdefault((compile, is_second), []).append(taken)
                    print(
                        json.dumps({"compiled": compile, "second": is_second, "seconds": round(taken, 2)}), flush=True
                    )
    imports = [seconds_of_import() for _ in range(given.rounds)]
    rows = [median_row(IMPORT_ROW, imports, "s", better="lower")]
    for (compile, is_second), samples in times.items():
        limit = LIMITS[compile, is_second]
        name = f"{'second' if is_second else 'first'} start, {'compiled' if compile else 'eager'}: first text"
        facts = {} if limit is None else {"required": limit[0], "target": limit[1]}
        rows.append(median_row(name, samples, "s", better="lower", **facts))
    measured = {row.measure for row in rows}  # of `--only`; the others keep their last result
    had = [row_from_record(row) for row in last_result("startup").get("rows", []) if row["measure"] not in measured]
    save("startup", had + rows)


if __name__ == "__main__":
    main()
