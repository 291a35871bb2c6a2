"""Host work of a plain decode step: everything but the model's own kernels, for 1 and 32 requests.

The bundled model's shapes, greedy, without a temperature. Method: the forward pass of the model (`HFModel.logits`, called
once a step) is replaced by one that returns logits made beforehand after building the same input tensors, so a step does
all of the engine's work but no kernel of the model, and the attention metadata is built as the kernel needs it. What is
timed is the whole `Engine.step` in processor time of its thread. Sampling is in it: the argmax over the logits of every row
is a kernel too, so its time, measured apart on the same logits, is given in a row of its own and not subtracted.

Beside the times, calls of the package's own functions are counted: those of a step, and those of submitting a decode.
`--against FOLDER` compares with another checkout, in processes that take turns.
"""

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import choreograph

from .common import Row, engine, greedy, median_row, ratio_row, save
from .host_work_times import decoding_engine, step_times, submission_times

BOUNDS = {1: (0.5, 0.2), 32: (1.5, 0.8)}
SUBMISSIONS = 2000


def count_calls(function: Callable[[], object]) -> Counter[str]:
    """Run `function`; return the calls of the package's own functions, by "file:function"."""
    package, calls = str(Path(choreograph.__file__).parent), Counter[str]()

    def record(frame: Any, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[f"{frame.f_code.co_filename[len(package) + 1 :]}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(record)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def count_rows() -> list[Row]:
    """Count the calls of a submission and of a plain decode step; print where they are."""
    e = engine(tokens=4096)
    with e.session(seed=0) as session:
        question = session.prefill([1, 2, 3])
        context = session.prefill([4, 5, 6, 7], [question])
        session.decode([9], sampling=greedy(20)).result()  # computes what is kept: the end tokens of the model
        submission = count_calls(lambda: session.decode([8, 9], [question, context], sampling=greedy(20)))
        for _ in range(5):  # admission, the header, and steps that build the plan of the next one
            e.step()
        step = count_calls(e.step)
    rows = []
    for name, calls in (("submission of a decode", submission), ("decode step, 1 request", step)):
        files = {call.partition(":")[0] for call in calls}
        print(f"{name}: {calls.total()} calls of {len(calls)} functions in {len(files)} files")
        print("\n".join(f"  {count:3d} {call}" for call, count in sorted(calls.items())))
        rows.append(Row(f"calls of a {name}", calls.total(), "", calls.total(), calls.total(), better="lower"))
    return rows


def compare(checkout: Path, rounds: int, num_steps: int) -> list[Row]:
    """Measure this checkout and another one in turn; return the ratios of the times."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    script = Path(__file__).with_name("host_work_times.py")
    for number in range(rounds):
        results = {}
        for folder in (Path(), checkout) if number % 2 else (checkout, Path()):
            command = [sys.executable, "-P", str(script), str(num_steps)]
            output = subprocess.run(
                command, env=os.environ | {"PYTHONPATH": str(folder.resolve())}, capture_output=True, check=True
            ).stdout
            results[folder] = json.loads(output.splitlines()[-1])
        print(f"round {number + 1}:", results)
        for name, value in results[Path()].items():
            pairs.setdefault(name, []).append((value, results[checkout][name]))
    return [
        ratio_row(f"{name}, over that of the other checkout", *zip(*values, strict=True), better="lower")
        for name, values in pairs.items()
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--profile", action="store_true", help="print where the time goes; nothing is saved")
    options.add_argument("--against", type=Path, help="another checkout, for instance of the commit before")
    options.add_argument("--rounds", type=int, default=8, help="pairs of runs with --against")
    given = options.parse_args()
    torch.set_num_threads(1)
    if given.against is not None:
        save("host_work_change", compare(given.against, given.rounds, given.steps))
        return
    rows = []
    for num_requests, (required, target) in BOUNDS.items():
        if given.profile:
            e, _ = decoding_engine(num_requests, given.steps)
            profile = cProfile.Profile()
            profile.runcall(lambda e=e: [e.step() for _ in range(given.steps)])
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)
            continue
        steps, maxima = step_times(num_requests, given.steps)
        name = f"{num_requests} request{'s' if num_requests > 1 else ''}"
        bounds = {"required": required, "target": target}
        rows.append(median_row(f"host work of a decode step, {name}", steps, "ms", better="lower", **bounds))
        rows.append(median_row(f"of it the search for the largest logits, {name}", maxima, "ms", better="lower"))
    if rows:
        submissions = submission_times(SUBMISSIONS)
        rows.append(median_row("submission of a decode over four parents", submissions, "ms", better="lower"))
        save("host_work", [*rows, *count_rows()])


if __name__ == "__main__":
    main()
