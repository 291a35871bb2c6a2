"""Decode steps and prefills of the default engine, against a copy of the weights and against another checkout.

A step of few tokens reads every weight once, so the time of copying as many bytes in memory is the measure of decode steps.
`--against FOLDER` compares with the engine of another checkout, `--options` being those of its `EngineConfig` in JSON. Each
engine is a process of its own; they take turns, and a copy is measured behind each turn. Results are saved as `steps`, with AMX
as `steps_amx`, with AVX2 as `steps_avx2`.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .common import last_result, median_row, ratio_row, result_of_processor, row_from_record, save

CASES = {  # name -> (tokens of a prompt, number of prompts, decodes of each; 0: time the prefill)
    "decode of 1 behind 512": (512, 1, 1),
    "decode of 8 over one context of 512": (512, 1, 8),
    "decode of 32 with contexts of 256 of their own": (256, 32, 1),
    "prefill of 1024": (1024, 1, 0),
    "prefill of 4096": (4096, 1, 0),
    "prefill of 16 prompts of 512": (512, 16, 0),
}
COPY_LIMITS = {"decode of 1 behind 512": 1.15, "decode of 8 over one context of 512": 1.4}  # of the time of a copy
RESULT = result_of_processor("steps")
AGAINST_LIMITS = {name: 1.1 if decodes else 1.05 for name, (_, _, decodes) in CASES.items()}

WORKER = """
import json, statistics, sys, time
import torch
from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams

cache = CacheConfig(capacity=16384)
engine = Engine.from_pretrained(dtype="bfloat16", config=EngineConfig(cache=cache, **json.loads(sys.argv[1])))
engine.warm_up()
num_bytes = sum(p.nbytes for p in engine.core.hf_model.model.parameters())
weights, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)

def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start

def measure(length, prompts, decodes, seed):
    engine.clear_cache()
    noise = torch.Generator().manual_seed(seed)
    with engine.session(seed=0) as session:
        contexts = [torch.randint(100, 40000, (length,), generator=noise).tolist() for _ in range(prompts)]
        if not decodes:
            messages = [session.prefill(tokens) for tokens in contexts]
            return timed(lambda: [message.result() for message in messages])
        parents = [session.prefill(tokens) for tokens in contexts]
        for parent in parents:
            parent.result()
        sampling = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True)
        messages = [session.decode([50 + i], [p], sampling=sampling) for p in parents for i in range(decodes)]
        return statistics.median([timed(engine.step) for _ in range(24)][4:])

for line in sys.stdin:
    case = json.loads(line)
    result = {"time": measure(*case), "copy": min(timed(lambda: target.copy_(weights)) for _ in range(4))}
    print(json.dumps(result), flush=True)
"""


class Worker:
    """Engine of a checkout in a process of its own."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        environment = os.environ | {"PYTHONPATH": str(folder)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
        )

    def measure(self, case: tuple[int, int, int], seed: int) -> dict[str, float]:
        """Return the seconds of a case, and of a copy of the weights."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps([*case, seed]), file=process.stdin, flush=True)
        result: dict[str, float] = json.loads(process.stdout.readline())
        return result

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--against", type=Path, help="another checkout")
    options.add_argument("--options", type=json.loads, default={}, help="of the other checkout's EngineConfig, in JSON")
    options.add_argument(
        "--only", nargs="*", choices=[*CASES], default=[*CASES], help="the others keep their last result"
    )
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    workers = [Worker(Path(__file__).parents[1], {})]
    if given.against:
        workers.append(Worker(given.against, given.options))
    kept = last_result(RESULT).get("rows", [])
    rows = [row_from_record(row) for row in kept if not row["measure"].startswith(tuple(given.only))]
    for name, case in CASES.items():
        if name not in given.only:
            continue
        results: list[list[dict[str, float]]] = [[] for _ in workers]
        for seed in range(-1, given.rounds):
            for worker, result in zip(workers, results, strict=True):
                measured = worker.measure(case, seed + 1)
                if seed >= 0:  # the first one warms up
                    result.append(measured)
        own = [r["time"] for r in results[0]]
        rows.append(median_row(name, [t * 1e3 for t in own], "ms", better="lower"))
        if name in COPY_LIMITS:
            copies = [r["copy"] for r in results[0]]
            rows.append(
                ratio_row(
                    f"{name}: time over that of a copy of the weights",
                    own,
                    copies,
                    better="lower",
                    required=COPY_LIMITS[name],
                )
            )
        if given.against:
            others = [r["time"] for r in results[1]]
            rows.append(
                ratio_row(
                    f"{name}: time over that of the other checkout",
                    own,
                    others,
                    better="lower",
                    required=AGAINST_LIMITS[name],
                )
            )
    for worker in workers:
        worker.close()
    save(RESULT, rows, options={"against": given.options if given.against else None, "rounds": given.rounds})


if __name__ == "__main__":
    main()
