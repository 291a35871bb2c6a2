"""What every campaign shares: its options, its outcome, and what is counted while it runs."""

import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module

from choreograph import Engine

# What each campaign tries, by the name of its module; `docs/reliability.md` lists them in this order.
CAMPAIGNS: Mapping[str, str] = {
    "soak": "mixed work at full load through the server and in process",
    "faults": "failures of disks, memory, transfers, models, callbacks, signals and clocks",
    "ray_faults": "failures of replicas, gateways and nodes on Ray",
    "files": "damaged and hostile files of every format",
    "tenants": "one tenant that tries to see or to time the work of another",
    "pairs": "all pairs of features against the plain engine, token by token",
    "determinism": "each line of the table of determinism",
    "supply_chain": "versions, licences, wheels and pickles of dependencies",
}


@dataclass(frozen=True)
class Options:
    """Time and seed of a campaign."""

    seconds: float  # after which no new input is tried
    seed: int  # of everything that is drawn

    def rounds(self, at_least: int = 1) -> Iterator[int]:
        """Yield 0, 1, 2, ... until the time has passed and there were as many as that."""
        deadline, index = time.monotonic() + self.seconds, 0
        while index < at_least or time.monotonic() < deadline:
            yield index
            index += 1

    def draws(self, index: int) -> random.Random:
        """Return the generator of an input, which depends on the seed and the index alone."""
        return random.Random(f"{self.seed} {index}")


@dataclass(frozen=True)
class Outcome:
    """What a campaign tried and found."""

    inputs: int  # inputs tried: requests, files, cases or trials
    faults: int  # faults injected
    lost: tuple[str, ...]  # a line for each broken promise, with the seed and index that reproduce it
    details: Mapping[str, object] = field(default_factory=dict)  # further results that JSON can hold


@dataclass
class Tally:
    """What a running campaign has counted."""

    options: Options
    inputs: int = 0
    faults: int = 0
    lost: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # of kinds of inputs, faults or results, by name
    details: dict[str, object] = field(default_factory=dict)

    def lose(self, index: int, what: str) -> None:
        """Note a broken promise of the input with this index."""
        self.lost.append(f"seed {self.options.seed}, index {index}: {what}")

    def outcome(self) -> Outcome:
        """Return what was counted so far."""
        counts = {"counts": dict(sorted(self.counts.items()))} if self.counts else {}
        return Outcome(self.inputs, self.faults, tuple(self.lost), {**counts, **self.details})


def leftovers(engine: Engine) -> dict[str, int]:
    """Return what an engine still holds after all of its requests and a cleared cache, by name; empty if nothing."""
    engine.run_until_idle()
    engine.check()
    engine.clear_cache()
    engine.check()
    stats = engine.stats()
    held = {
        "running requests": stats.num_running,
        "waiting requests": stats.num_waiting,
        "referenced entries": stats.num_referenced_entries,
        "pages": stats.num_pages - stats.num_free_pages,
        **{f"tokens of {tier}": count for tier, count in stats.tier_tokens.items()},
    }
    return {name: count for name, count in held.items() if count}


def run_here(name: str, options: Options) -> Outcome:
    """Run a campaign; an exception that leaves it is a broken promise.

    It is here since a spawned process does not import a package's `__main__`.
    """
    try:
        return import_module(f"{__package__}.{name}").run(options)
    except Exception:
        return Outcome(0, 0, (f"seed {options.seed}: the campaign raised\n{traceback.format_exc()}",))
