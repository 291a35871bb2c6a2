"""DroidSpeak's figures of a profile, and what only they need: scattered layers and transfer to other data."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from choreograph import Engine, LayerPattern
from choreograph.errors import ConfigError
from choreograph.lab.profiling.profile_report import SCORE_LABELS
from choreograph.lab.profiling.profiler import (
    PairContext,
    ProfileConfig,
    QAExample,
    enable_all_patterns,
    group_by_context,
)
from choreograph.layer_reuse import ParetoPoint, PatternScores, Profile
from choreograph.outputs import BASE_MODEL

from . import plots


def draw_figures(profile: Profile, directory: Path, name: str) -> list[Path]:
    """Draw Figures 7, 8 and 12 and the frontier as SVG files; return their paths."""
    label = SCORE_LABELS.get(profile.metric, profile.metric)
    receiver_mean, receiver_f1 = (float(np.mean(x)) for x in (profile.receiver_scores, profile.receiver_f1))
    files = [directory / f"{name}-{kind}.svg" for kind in ("layers", "heat", "frontier", "spread")]
    bars: list[plots.ErrorBar] = []
    for values in profile.per_layer_f1:
        low, high = np.percentile(values, [25, 75])
        bars.append((float(np.mean(values)), float(low), float(high)))
    plots.layer_bars(bars, files[0], level=receiver_f1, critical=profile.critical(), ylabel="F1")
    cells = {c.pattern.ranges[0]: float(np.mean(c.values)) for c in profile.ranges if len(c.pattern.ranges) == 1}
    plots.heat_map(cells, files[1], label=label)
    plots.pareto_plot(
        {
            "frontier": [(point.cost, receiver_mean - point.loss) for point in profile.pareto_points()],
            "full prefill": [(1.0, receiver_mean)],
            "full reuse": [(profile.cost(LayerPattern()), float(np.mean(profile.full_reuse_scores)))],
        },
        files[2],
        xlabel="cost, of a full prefill",
        ylabel=label,
    )
    changes = [[a - b for a, b in zip(values, profile.receiver_f1, strict=True)] for values in profile.per_layer_f1]
    plots.layer_spread(changes, files[3], critical=profile.critical(), ylabel="change of F1")
    return files


def profile_top_layers(
    engine: Engine,
    receiver: str,
    examples: Sequence[QAExample],
    profile: Profile,
    counts: Sequence[int],
    *,
    sender: str = BASE_MODEL,
    config: ProfileConfig | None = None,
) -> list[PatternScores]:
    """Score the `counts` most critical layers of a profile, adjacent or not (Figure 11), on its own examples."""
    config = config or ProfileConfig()
    if tuple(example.id for example in examples) != profile.inputs:
        raise ConfigError("scattered layers are compared on the inputs of the profile: give the same ones")
    enable_all_patterns(engine, receiver, sender)
    worst = sorted(range(profile.layers), key=lambda layer: float(np.mean(profile.per_layer[layer])))
    patterns = [LayerPattern.from_layers(worst[:count]) for count in counts]
    scores: list[list[float]] = []  # [example][pattern]
    for group in group_by_context(examples):
        with engine.session(seed=0) as session:
            context = PairContext(session, group[0].context, receiver, sender, config)
            variants = [context.compute_variant(pattern) for pattern in patterns]
            scores += [context.make_probe(example).score_all(variants) for example in group]
    return [PatternScores(pattern, values) for pattern, values in zip(patterns, zip(*scores, strict=True), strict=True)]


def transfer_loss(profile: Profile, other: Profile) -> list[tuple[ParetoPoint, float]]:
    """Return the Pareto points with the loss of each in another profile (Figure 17)."""
    losses = {point.pattern: point.loss for point in other.points()}
    return [(point, losses[point.pattern]) for point in profile.pareto_points() if point.pattern in losses]
