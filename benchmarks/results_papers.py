"""Tables of `docs/results.md`: every table and figure of the four papers with the paper's number and ours.

The rows are in `templates/`; here are the figures that take more than a look at one number.
"""

from functools import partial

import numpy as np

from choreograph.lab.evaluation.report import format_estimate

from .tables import CELLS, TABLES, fill_template, record

PAPERS = ("choreography", "prompt-cache", "kvflow", "droidspeak")


def quality_cell(run: str, *paths: str) -> str:
    """Return figures of `condition > scores or differences > metric` of a run, in percent."""
    conditions, cells = record("quality")["summaries"][run]["conditions"], []
    for condition, kind, metric in (path.split(" > ") for path in paths):
        cells.append(format_estimate(conditions[condition][kind][metric], 100, sign=kind == "differences"))
    return " / ".join(cells)


def critical_layers_cell() -> str:
    """Return the number of critical layers of all pairs and data."""
    profiles = [run["profile"] for run in record("reuse")["runs"].values() if "profile" in run]
    return str(sum(len(layers) for profile in profiles for layers in profile["critical"].values()))


def knee_ratio_cell(pair: str) -> str:
    """Return the rate at the knee with half of the layers over that with all."""
    knee = record("reuse")["runs"][pair]["stream"]["knee"]
    return f"{knee['partial'] / knee['recompute']:.2f}x"


def transfer_losses_cell(pair: str) -> str:
    """Return what a profile of other data loses more, mean and most."""
    transfer = record("reuse")["runs"][pair]["profile"]["transfer"]
    losses = [there - here for points in transfer.values() for _, here, there in points]
    if not losses:
        raise KeyError("transfer")
    return f"{np.mean(losses):+.3f} / {max(losses):+.3f} nats"


PAPER_CELLS = {
    **CELLS,
    "quality": quality_cell,
    "critical_layers": critical_layers_cell,
    "knee_ratio": knee_ratio_cell,
    "transfer_losses": transfer_losses_cell,
}
TABLES |= {f"paper-{name}": partial(fill_template, f"paper-{name}", PAPER_CELLS) for name in PAPERS}
