"""Tables and figures of a profile of layer reuse."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...layer_reuse.profile import Profile
from ...viz import saved_figure
from ..evaluation.statistics import Estimate, difference

SCORE_LABELS = {
    "f1": "F1",
    "likelihood": "log-likelihood of a token",
    "agreement": "log-likelihood of its own token",
}


def estimate_loss(profile: Profile, values: Sequence[float]) -> Estimate:
    """Estimate the mean loss of `values` against the receiver's scores, paired by input."""
    return difference(profile.receiver_scores, values)


def summary_rows(profile: Profile) -> list[tuple[str, str]]:
    """Return table rows: mean scores, loss of full reuse and critical layers."""
    scores = {
        "receiver": profile.receiver_scores,
        "all of the sender's": profile.full_reuse_scores,
        "sender": profile.sender_scores,
    }
    result = [(name, f"{np.mean(values):.3f}") for name, values in scores.items()]
    result.append(("loss from reusing all", _format(estimate_loss(profile, profile.full_reuse_scores))))
    result.append(("critical layers (F1)", ", ".join(map(str, profile.critical())) or "none"))
    return result


def frontier_rows(profile: Profile) -> list[tuple[str, str, str, str]]:
    """Return frontier rows (pattern, fraction of layers, cost, loss), cheapest first."""
    scores = {cell.pattern: cell.values for cell in profile.ranges}
    result = []
    for pattern, _, cost in profile.frontier():
        values = scores.get(pattern, profile.receiver_scores if pattern.layers else profile.full_reuse_scores)
        fraction = len(pattern.layers) / profile.layers
        result.append((str(pattern), f"{fraction:.0%}", f"{cost:.2f}", _format(estimate_loss(profile, values))))
    return result


def _format(loss: Estimate) -> str:
    return f"{loss.value:+.3f} ({loss.low:+.3f} to {loss.high:+.3f})"


def draw_profile(profile: Profile, path: Path) -> None:
    """Plot per-layer scores, range scores and the frontier in one SVG file."""
    label = SCORE_LABELS.get(profile.metric, profile.metric)
    receiver_mean, critical = float(np.mean(profile.receiver_scores)), profile.critical()
    with saved_figure(path, 14, 3.6, ncols=3) as (layers, heat, frontier):
        colors = ["tab:red" if layer in critical else "tab:blue" for layer in range(len(profile.per_layer))]
        layers.bar(range(len(colors)), [np.mean(values) for values in profile.per_layer], color=colors)
        layers.axhline(receiver_mean, color="tab:red", linestyle="--")
        layers.set(xlabel="the layer that is reused", ylabel=label)

        cells = [cell for cell in profile.ranges if len(cell.pattern.ranges) == 1]
        starts, ends = np.array([cell.pattern.ranges[0] for cell in cells]).reshape(-1, 2).T
        image = heat.scatter(ends, starts, c=[np.mean(cell.values) for cell in cells], cmap="Blues", marker="s")
        heat.set(xlabel="computes up to layer", ylabel="computes from layer")
        heat.figure.colorbar(image, ax=heat, label=label)

        points = [(point.cost, receiver_mean - point.loss) for point in profile.pareto_points()]
        frontier.plot(*zip(*points, strict=True), marker="o")
        frontier.set(xlabel="cost, of a full prefill", ylabel=label)
