"""Tables and a picture of a profile."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..utils import ensure_writable, require
from .profile import Profile

if TYPE_CHECKING:
    from ..evaluation.statistics import Estimate

SCORE_LABELS = {
    "f1": "F1",
    "likelihood": "log-likelihood of a token",
    "agreement": "log-likelihood of its own token",
}


def summary_rows(profile: Profile) -> list[tuple[str, str]]:
    """Return mean scores, the loss from reusing all layers, and critical layers."""
    scores = {
        "receiver": profile.receiver_scores,
        "all of the sender's": profile.full_reuse_scores,
        "sender": profile.sender_scores,
    }
    result = [(name, f"{np.mean(values):.3f}") for name, values in scores.items()]
    result.append(("loss from reusing all", _format(profile.loss(profile.full_reuse_scores))))
    result.append(("critical layers", ", ".join(map(str, profile.critical())) or "none"))
    return result


def frontier_rows(profile: Profile) -> list[tuple[str, str, str, str]]:
    """Return pattern, fraction of layers, cost and loss of each point of the frontier, cheapest first."""
    scores = {cell.pattern: cell.values for cell in profile.ranges}
    result = []
    for pattern, _, cost in profile.frontier():
        values = scores.get(pattern, profile.receiver_scores if pattern.layers else profile.full_reuse_scores)
        fraction = len(pattern.layers) / profile.layers
        result.append((str(pattern), f"{fraction:.0%}", f"{cost:.2f}", _format(profile.loss(values))))
    return result


def _format(loss: "Estimate") -> str:
    return f"{loss.value:+.3f} ({loss.low:+.3f} to {loss.high:+.3f})"


def draw_profile(profile: Profile, path: Path) -> None:
    """Draw scores with one layer reused, scores of all ranges, and the frontier, as one SVG file."""
    matplotlib = require("matplotlib", "viz")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    ensure_writable(path)
    label = SCORE_LABELS.get(profile.metric, profile.metric)
    receiver_mean, critical = float(np.mean(profile.receiver_scores)), profile.critical()
    figure, (layers, heat, frontier) = pyplot.subplots(1, 3, figsize=(14, 3.6), layout="constrained")

    colors = ["tab:red" if layer in critical else "tab:blue" for layer in range(len(profile.per_layer))]
    layers.bar(range(len(colors)), [np.mean(values) for values in profile.per_layer], color=colors)
    layers.axhline(receiver_mean, color="tab:red", linestyle="--")
    layers.set(xlabel="the layer that is reused", ylabel=label)

    starts, ends = np.array([cell.pattern.ranges[0] for cell in profile.ranges]).reshape(-1, 2).T
    image = heat.scatter(ends, starts, c=[np.mean(cell.values) for cell in profile.ranges], cmap="Blues", marker="s")
    heat.set(xlabel="computes up to layer", ylabel="computes from layer")
    figure.colorbar(image, ax=heat, label=label)

    points = [(point.cost, receiver_mean - point.loss) for point in profile.frontier()]
    frontier.plot(*zip(*points, strict=True), marker="o")
    frontier.set(xlabel="cost, of a full prefill", ylabel=label)
    figure.savefig(path)
    pyplot.close(figure)
