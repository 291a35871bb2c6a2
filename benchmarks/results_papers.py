"""Tables of `docs/results.md`: every table and figure of the four papers with the paper's number and ours.

The rows are in `templates/`; here are the figures that take more than a look at one number.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from choreograph.lab.evaluation.statistics import ratio

from .gpu.predictions import Model
from .gpu.shape import FULL
from .results_reuse import knee_ratio, loading_cells
from .tables import CELLS, TABLES, by_measure, fill_template, format_row, record

PAPERS = ("choreography", "prompt-cache", "kvflow", "droidspeak")


def quality_cell(run: str, *paths: str) -> str:
    """Return figures of `condition > scores or differences > metric` of a run, in percent."""
    conditions, cells = record("quality")["summaries"][run]["conditions"], []
    for condition, kind, metric in (path.split(" > ") for path in paths):
        cells.append(format_row(conditions[condition][kind][metric], 100, sign=kind == "differences"))
    return " / ".join(cells)


def cut_cell(benchmark: str, run: str, *stages: str) -> str:
    """Return the share of the answers of each condition that the limit of tokens cut, of some stages or of all."""
    result = record(benchmark)
    summary = result["summaries"][run] if "summaries" in result else result["runs"][run]["scores"]
    limit, shares = (summary if "summaries" in result else result["runs"][run])["max_tokens"], []
    for condition in summary["conditions"].values():
        calls = {stage: count for stage, count in condition["calls"].items() if not stages or stage in stages}
        shares.append(100 * sum(condition["cut"].get(stage, 0) for stage in calls) / sum(calls.values()))
    return f"cut at {limit} tokens: {' / '.join(f'{share:.0f}' for share in shares)}%"


def training_cell(run: str) -> str:
    """Return on what an adapter was trained, and with what setting."""
    training = record("distill")["runs"][run]
    config = training["config"]
    return f"{training['traces']['learn']} traces, epochs: {config['epochs']}, dropout: {config['dropout']:g}"


def transfer_cell(measure: str, tokens: str) -> str:
    """Return the time of recomputing keys and values of some tokens over that of copying them, from measured rates of a GPU.

    Recomputation counts the products of an 8B model alone, at the rate of large products: it takes longer.
    """
    rows = by_measure(record("gpu"))
    copy = int(tokens) * FULL.token_bytes / (rows["host to device"]["value"] * 1e9)
    products = 2 * Model.from_shape(FULL).parameters * int(tokens) / (rows["product of matrices"]["value"] * 1e12)
    return f"{1e3 * {'copy': copy, 'products': products}[measure]:.1f}"


def fetched_cell(pair: str, tokens: str) -> str:
    """Return the ratio of first tokens behind a context of another process, all layers over some."""
    times = record("reuse")["runs"][pair]["remote"]["lengths"][tokens]
    return format_row(vars(ratio(times["full"], times["partial"])), places=2) + "x"


def prefill_cell(pair: str, tokens: str) -> str:
    """Return the ratio of prefills, all layers over some, and its rounds."""
    times = record("reuse")["runs"][pair]["latency"]["lengths"][tokens]
    return format_row(vars(ratio(times["full"], times["partial"])), places=2) + "x"


def absent_sets_cell() -> str:
    """Return the data sets of LongBench whose records are all too long to be timed."""
    counts = record("prompt_cache_longbench")["counts"]
    return ", ".join(name for name, count in counts.items() if not count["n"])


def critical_layers_cell() -> str:
    """Return the number of critical layers of all pairs and data whose profile is older than the definition."""
    runs = record("reuse")["runs"].values()
    profiles = [run["profile"] for run in runs if "profile" in run and "own F1" not in run["profile"]]
    return str(sum(len(layers) for profile in profiles for layers in profile["critical"].values()))


def critical_layers_of_pair_cell(pair: str) -> str:
    """Return the critical layers of a pair on each data set."""
    profile = record("reuse")["runs"][pair]["profile"]
    return "; ".join(f"{data}: {', '.join(map(str, layers)) or 'none'}" for data, layers in profile["critical"].items())


def linked_knee_cell(pair: str, way: str) -> str:
    """Return the rate at the knee of a way over that of full prefills, with contexts in another process."""
    return knee_ratio(record("reuse")["runs"][pair]["linked"], way)


def loading_cell(pair: str, tokens: str) -> str:
    """Return the share of loading in the time to the first token, and the share of loading that is hidden."""
    return " / ".join(f"{cell}%" for cell in loading_cells(record("reuse")["runs"][pair]["remote"]["lengths"][tokens]))


def knee_ratio_cell(pair: str) -> str:
    """Return the rate at the knee with half of the layers over that with all."""
    return knee_ratio(record("reuse")["runs"][pair]["stream"], "partial")


def transfer_losses_cell(pair: str) -> str:
    """Return what a profile of other data loses more, mean and most."""
    transfer = record("reuse")["runs"][pair]["profile"]["transfer"]
    losses = [there - here for points in transfer.values() for _, here, there in points]
    if not losses:
        raise KeyError("transfer")
    return f"{np.mean(losses):+.3f} / {max(losses):+.3f} nats"


PAPER_CELLS: dict[str, Callable[..., str]] = {
    **CELLS,
    "absent_sets": absent_sets_cell,
    "cut": cut_cell,
    "fetched": fetched_cell,
    "prefill": prefill_cell,
    "quality": quality_cell,
    "training": training_cell,
    "transfer": transfer_cell,
    "critical_layers": critical_layers_cell,
    "critical_of": critical_layers_of_pair_cell,
    "linked_knee": linked_knee_cell,
    "loading": loading_cell,
    "knee_ratio": knee_ratio_cell,
    "transfer_losses": transfer_losses_cell,
}
TABLES |= {f"paper-{name}": partial(fill_template, f"paper-{name}", PAPER_CELLS) for name in PAPERS}
