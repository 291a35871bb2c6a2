"""Campaigns that try to break the promises of the package, each for a limited time.

make torture                                               # all campaigns, a minute each
make torture ARGS="pairs tenants --seconds 600 --seed 7"
make torture ARGS="pairs --seconds 600 --keep"             # also written to benchmarks/results/torture.json

Each campaign runs in a process of its own. Prints the seed, a table and every broken promise; exits with 1 if there is one.
"""

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from importlib.util import find_spec

from rich.console import Console

from choreograph.console import print_table

from ..common import merge_results, provenance, write
from .campaign import CAMPAIGNS, Options, Outcome, run_here

RESULT = "torture"  # name of the result file


def run_apart(name: str, options: Options) -> Outcome:
    """Run a campaign in a new process, whose end is a broken promise."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # models are tiny: threads would only wait for each other
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(run_here, name, options).result()
        except BrokenProcessPool as exc:
            return Outcome(0, 0, (f"seed {options.seed}: the process of the campaign ended: {exc}",))


def keep(name: str, options: Options, outcome: Outcome) -> None:
    """Write the outcome of a campaign into the result file, beside those of the others."""
    run = {**provenance(), **asdict(options), **asdict(outcome)}
    write(RESULT, [], "several", runs=merge_results(RESULT, "runs", {name: run}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name in CAMPAIGNS if find_spec(f"{__package__}.{name}")]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)} (default: all)")
    parser.add_argument("--seconds", type=float, default=60, help="of each campaign")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help=f"write to results/{RESULT}.json")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(known):
        parser.error(f"unknown campaigns {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    options = Options(arguments.seconds, arguments.seed)
    outcomes = {}
    for name in arguments.names or known:
        print(f"{name}: {options.seconds:g} s, seed {options.seed}", flush=True)
        outcomes[name] = run_apart(name, options)
        if arguments.keep:
            keep(name, options, outcomes[name])
    lines = [(name, str(x.inputs), str(x.faults), str(len(x.lost))) for name, x in outcomes.items()]
    print_table(Console(width=100), f"seed {options.seed}", ("campaign", "inputs", "faults", "lost"), lines)
    for name, outcome in outcomes.items():
        for line in outcome.lost:
            print(f"{name}: {line}")
    return int(any(outcome.lost for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
