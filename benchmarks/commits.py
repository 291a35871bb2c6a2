"""Compare two checkouts of the project, in turns in one run: `python -m benchmarks.commits OLD NEW [--pairs 15]`.

Prints the median times of decode steps, prefills and a first token over reordered parents, and the ratio of
the medians of each pair with a bootstrapped 95% interval. Both use this environment's packages.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

CASES = ("decode 1", "decode 8 shared", "decode 32 own", "prefill 512", "prefill 1024", "first token")


def run_worker(root: Path) -> None:
    """Measure the cases named on standard input with the package in `root`; print seconds."""
    sys.path.insert(0, str(root))
    import choreograph
    from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams

    assert Path(choreograph.__file__).is_relative_to(root), choreograph.__file__
    size = "capacity" if hasattr(CacheConfig(), "capacity") else "tokens"  # its name before the renames
    engine = Engine.from_pretrained(config=EngineConfig(cache=CacheConfig(**{size: 16384})))
    chance = random.Random(0)

    def tokens(count):
        return [chance.randrange(1000, 20000) for _ in range(count)]

    def generate(count):
        return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)

    def num_generated(message):
        return len(
            message._request.decode_state.tokens if hasattr(message, "_request") else message._call.generation.tokens
        )

    def decode(count, *, own_context):
        with engine.session(seed=0) as session:
            parents = [] if own_context else [session.prefill(tokens(512))]
            header = 256 if own_context else 4
            messages = [session.decode(tokens(header), parents, sampling=generate(12)) for _ in range(count)]
            while any(num_generated(message) < 2 for message in messages):
                engine.step()
            return statistics.median(seconds(engine.step) for _ in range(8))

    def prefill(count):
        with engine.session(seed=0) as session:
            return seconds(lambda: session.prefill(tokens(count)).result())

    def first_token():
        with engine.session(seed=0) as session:
            context = [session.prefill(tokens(200)).result() for _ in range(4)]
            order = [context[i] for i in (2, 0, 3, 1)]
            return seconds(lambda: session.decode(tokens(16), order, sampling=generate(1)).result())

    measures = {
        "decode 1": lambda: decode(1, own_context=False),
        "decode 8 shared": lambda: decode(8, own_context=False),
        "decode 32 own": lambda: decode(32, own_context=True),
        "prefill 512": lambda: prefill(512),
        "prefill 1024": lambda: prefill(1024),
        "first token": first_token,
    }
    print("ready", flush=True)
    for line in sys.stdin:
        print(measures[line.strip()](), flush=True)


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class Worker:
    """Process that measures one checkout."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, __file__, "--worker", str(root)]
        environment = os.environ | {"PYTHONPATH": str(root)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env=environment
        )
        assert self._process.stdout is not None and self._process.stdin is not None
        assert self._process.stdout.readline().strip() == "ready"

    def measure(self, case: str) -> float:
        self._process.stdin.write(case + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def compare(old: Worker, new: Worker, case: str, num_pairs: int) -> str:
    """Measure pairs in alternating order; return a line with medians, ratio and interval."""
    for worker in (old, new):
        worker.measure(case)
    pairs = []
    for index in range(num_pairs):
        if index % 2:
            before, after = old.measure(case), new.measure(case)
        else:
            after, before = new.measure(case), old.measure(case)
        pairs.append((before, after))
    ratios = [after / before for before, after in pairs]
    chance = random.Random(0)
    samples = sorted(statistics.median(chance.choices(ratios, k=num_pairs)) for _ in range(2000))
    before, after = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
    interval = f"{statistics.median(ratios):.3f} [{samples[50]:.3f}, {samples[1949]:.3f}]"
    return f"{case:16s} {before:9.2f} ms {after:9.2f} ms   {interval}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("roots", nargs="*", type=Path)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--worker", type=Path)
    arguments = parser.parse_args()
    if arguments.worker:
        run_worker(arguments.worker)
        return
    old, new = (Worker(root.resolve()) for root in arguments.roots)
    print(f"{'':16s} {'old':>12s} {'new':>12s}   new/old (95%)")
    for case in CASES:
        print(compare(old, new, case, arguments.pairs), flush=True)


if __name__ == "__main__":
    main()
