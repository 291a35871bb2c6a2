"""A profile as tables and pictures."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .. import viz as charts
from ..evaluation.statistics import Estimate
from .profile import Profile

LABELS = {"f1": "F1", "likelihood": "log-likelihood of a token", "agreement": "log-likelihood of its own token"}


def frontier_rows(profile: Profile) -> list[tuple[str, ...]]:
    """The frontier, the cheapest first: pattern, share of layers, cost, loss with its interval."""
    known = {cell.pattern: cell.values for cell in profile.ranges}
    result: list[tuple[str, ...]] = []
    for point in profile.frontier():
        values = known.get(
            point.pattern, profile.receiver_scores if point.pattern.layers else profile.full_reuse_scores
        )
        share = len(point.pattern.layers) / profile.layers
        result.append((str(point.pattern), f"{share:.0%}", f"{point.cost:.2f}", _interval(profile.loss(values))))
    return result


def summary_rows(profile: Profile) -> list[tuple[str, str]]:
    """What the pair is like: quality alone and shared, critical layers."""
    mean = {
        "receiver": profile.receiver_scores,
        "all of the sender's": profile.full_reuse_scores,
        "sender": profile.sender_scores,
    }
    result = [(name, f"{sum(values) / len(values):.3f}") for name, values in mean.items()]
    result.append(("loss from reusing all", _interval(profile.loss(profile.full_reuse_scores))))
    result.append(("critical layers", ", ".join(map(str, profile.critical())) or "none"))
    return result


def draw_figures(profile: Profile, folder: Path, name: str) -> list[Path]:
    """Figures 7, 8, 12 and the frontier, as SVG."""
    label = LABELS.get(profile.metric, profile.metric)
    own = float(np.mean(profile.receiver_scores))
    files = [folder / f"{name}-{kind}.svg" for kind in ("layers", "heat", "frontier", "spread")]
    charts.layer_bars(
        [_quartiles(values) for values in profile.per_layer],
        files[0],
        level=own,
        critical=profile.critical(),
        ylabel=label,
    )
    cells = {}
    for cell in profile.ranges:
        (begin, end), *_ = cell.pattern.ranges
        cells[begin, end] = float(np.mean(cell.values))
    charts.heat_map(cells, files[1], label=label)
    charts.pareto_plot(
        {
            "frontier": [(p.cost, own - p.loss) for p in profile.frontier()],
            "full prefill": [(1.0, own)],
            "full reuse": [(profile.points()[0].cost, float(np.mean(profile.full_reuse_scores)))],
        },
        files[2],
        xlabel="cost, of a full prefill",
        ylabel=label,
    )
    changes = [[a - b for a, b in zip(values, profile.receiver_scores, strict=True)] for values in profile.per_layer]
    charts.layer_spread(changes, files[3], critical=profile.critical(), ylabel=f"change of {label}")
    return files


def _quartiles(values: Sequence[float]) -> charts.ErrorBar:
    low, high = np.percentile(values, [25, 75])
    return float(np.mean(values)), float(low), float(high)


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:+.3f} ({estimate.low:+.3f} to {estimate.high:+.3f})"
