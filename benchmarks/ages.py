"""Which results are older than the code that they measure.

A figure is marked "measured before ..." while its date precedes that of a change which concerns its benchmark. The mark goes
when the benchmark is run again. Dates are compared, since tables are also generated where the history of commits is absent. So a
result of the day of a change is never marked, even if it was measured before: run such a benchmark again.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Change(NamedTuple):
    """A change of the code that some benchmarks measure."""

    date: str
    commit: str
    title: str  # completes "measured before ..."
    benchmarks: frozenset[str]
    concerns_only_times: bool = False  # so no part of `reuse` but those in `TIMED_PARTS`


CHANGES = (
    Change(
        "2026-11-26",
        "c10cf55f",
        "the prefix tree had steps and loads ran beside offloads",
        frozenset({"kvflow", "kvflow_calibration", "kvflow_peer"}),
    ),
    Change(
        "2026-11-26",
        "c10cf55f",
        "the prefix tree had steps, loads ran beside offloads and host time was charged",
        frozenset({"kvflow_machines"}),
    ),
    Change(
        "2026-11-26",
        "9b77ca3e",
        "layers were profiled as they are served",
        frozenset({"reuse"}),
    ),
    Change(
        "2026-11-27",
        "29bba907",
        "kernels of few rows on GPUs",
        frozenset({"gpu"}),
    ),
    Change(
        "2026-11-29",
        "5e4cc582",
        "our operators of decoder layers",
        frozenset(
            {
                *("arena", "kvflow", "kvflow_calibration", "kvflow_peer", "prompt_cache", "prompt_cache_longbench"),
                *("reuse", "scaling", "speed", "ttft"),
            }
        ),
        concerns_only_times=True,
    ),
    Change(
        "2026-12-01",
        "1d89a1c8",
        "one call for all layers",
        frozenset(
            {
                *("arena", "kvflow", "kvflow_calibration", "kvflow_peer", "load", "peers", "peers_avx2"),
                *("prompt_cache_longbench", "quantization", "reuse", "scaling", "serve", "speculative", "speed"),
                *("prompt_cache", "startup", "steps", "ttft"),
            }
        ),
        concerns_only_times=True,
    ),
)
# Parts of the result of `reuse` that are times.
TIMED_PARTS = frozenset({"latency", "linked", "remote", "stream"})


def changes_since(benchmark: str, made: Mapping[str, str], part: str | None = None) -> list[Change]:
    """Return the changes after a result that concern it.

    Args:
        made: date and commit of the result.
        part: of the benchmark `reuse`; None for all of it.
    """
    later = [change for change in CHANGES if benchmark in change.benchmarks and made["date"] < change.date]
    if part is not None and part not in TIMED_PARTS:
        later = [change for change in later if not change.concerns_only_times]
    return later


def age_note(benchmark: str, parts: Iterable[Mapping[str, str]], part: str | None = None) -> str:
    """Return "measured before ..." for results that are older than their code, else an empty string."""
    changes = [change for made in parts for change in changes_since(benchmark, made, part)]
    titles = dict.fromkeys(f"{change.title} ({change.commit})" for change in sorted(changes))
    return f"measured before {', and before '.join(titles)}" if titles else ""
