"""Figures of benchmark results, as the papers draw them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from choreograph.viz import Point, panel_grid, saved_figure

ErrorBar = tuple[float, float, float]  # value, low, high


def speedup_over_branches(
    series: Mapping[str, Sequence[tuple[float, ErrorBar]]], path: Path, *, title: str = ""
) -> None:
    """Plot speedups over branches, by voters (Prompt Choreography, Figure 5)."""
    with saved_figure(path, 5.0, 3.4) as axes:
        for label, points in series.items():
            xs = [x for x, _ in points]
            ys = [bar[0] for _, bar in points]
            spread = [[bar[0] - bar[1] for _, bar in points], [bar[2] - bar[0] for _, bar in points]]
            axes.errorbar(xs, ys, yerr=spread, marker="o", markersize=4, capsize=2, linewidth=1.2, label=label)
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in series.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
        axes.axhline(1, color="grey", linewidth=0.8, linestyle=":")
        axes.set(xlabel="branches", ylabel="end-to-end speed-up", title=title)
        axes.legend()


def difference_bars(
    groups: Mapping[str, Mapping[str, ErrorBar]], path: Path, *, ylabel: str, baseline: float = 0
) -> None:
    """Plot differences from the baseline by group and condition (Figure 8).

    `baseline` is the value of no change, 1 for ratios.
    """
    with saved_figure(path, max(5.4, 1.1 * len(groups)), 3.2) as axes:
        names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
        width = 0.8 / len(names)
        for index, name in enumerate(names):
            bars = [bars.get(name, (float("nan"),) * 3) for bars in groups.values()]
            xs = [x + (index - (len(names) - 1) / 2) * width for x in range(len(groups))]
            spread = [[b[0] - b[1] for b in bars], [b[2] - b[0] for b in bars]]
            error = {"yerr": spread, "capsize": 2, "error_kw": {"linewidth": 0.8}}
            axes.bar(xs, [b[0] for b in bars], width * 0.9, label=name, **error)
        axes.axhline(baseline, color="black", linewidth=0.8)
        axes.set_xticks(range(len(groups)), list(groups))
        axes.set_ylabel(ylabel)
        axes.legend(fontsize=8)


def ttft_plot(series: Mapping[str, Sequence[Point]], path: Path, *, num_new_tokens: int) -> None:
    """Plot TTFT over cached tokens, all series and the first alone."""
    with saved_figure(path, 7.2, 3.2, ncols=2) as axes:
        for panel, lines in zip(axes, (series, dict(list(series.items())[:1])), strict=True):
            for label, points in lines.items():
                panel.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.2, label=label)
            panel.set_xlabel("cached tokens")
            panel.set_ylim(bottom=0)
            panel.legend()
        axes[0].set_ylabel(f"ms to the first token, {num_new_tokens} new tokens")


def learning_curves(series: Mapping[str, tuple[Sequence[Point], float]], path: Path) -> None:
    """Plot validation log-loss over updates; dotted: the baseline."""
    with panel_grid(path, len(series), 3.6, 2.6) as axes:
        for panel, (label, (points, baseline)) in zip(axes.flat, series.items(), strict=False):
            panel.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, linewidth=1.2)
            panel.axhline(baseline, color="grey", linewidth=0.8, linestyle=":")
            panel.set_title(label, fontsize=9)
            panel.set_xlabel("updates")
        for panel in axes[:, 0]:
            panel.set_ylabel("log-loss of a token")


def layer_bars(
    values: Sequence[ErrorBar], path: Path, *, level: float, critical: Sequence[int] = (), ylabel: str
) -> None:
    """Plot the quality after reusing each layer alone (DroidSpeak, Figure 7)."""
    with saved_figure(path, max(4.0, 0.2 * len(values)), 2.8) as axes:
        colors = ["tab:red" if layer in critical else "tab:blue" for layer in range(len(values))]
        heights = [b[0] for b in values]
        spread = [[max(0.0, b[0] - b[1]) for b in values], [max(0.0, b[2] - b[0]) for b in values]]
        axes.bar(range(len(values)), heights, color=colors, yerr=spread, error_kw={"linewidth": 0.7}, capsize=1.5)
        axes.axhline(level, color="tab:red", linewidth=0.8, linestyle="--")
        axes.set(xlabel="the layer that is reused", ylabel=ylabel)


def layer_spread(values: Sequence[Sequence[float]], path: Path, *, critical: Sequence[int] = (), ylabel: str) -> None:
    """Plot each layer's change over inputs, with quartiles (DroidSpeak, Figure 8)."""
    with saved_figure(path, max(4.0, 0.25 * len(values)), 2.8) as axes:
        parts = axes.violinplot(list(map(list, values)), positions=range(len(values)), widths=0.8, showextrema=False)
        for layer, body in enumerate(parts["bodies"]):
            body.set_color("tab:red" if layer in critical else "tab:blue")
        axes.vlines(range(len(values)), *np.percentile(values, [25, 75], axis=1), color="black", linewidth=1.2)
        axes.axhline(0, color="grey", linewidth=0.8, linestyle=":")
        axes.set(xlabel="the layer that is reused", ylabel=ylabel)


def heat_map(cells: Mapping[tuple[int, int], float], path: Path, *, label: str) -> None:
    """Plot the quality over computed layer ranges (DroidSpeak, Figure 12)."""
    starts, ends = sorted({start for start, _ in cells}), sorted({end for _, end in cells})
    grid = np.array([[cells.get((start, end), np.nan) for end in ends] for start in starts])
    with saved_figure(path, 4.6, 3.8) as axes:
        image = axes.imshow(grid, origin="lower", cmap="Blues", aspect="auto")
        for axis, layers in ((axes.xaxis, ends), (axes.yaxis, starts)):
            ticks = range(0, len(layers), max(1, len(layers) // 8))
            axis.set_ticks(list(ticks), [str(layers[i]) for i in ticks])
        axes.set(xlabel="computes up to layer", ylabel="computes from layer")
        axes.figure.colorbar(image, ax=axes, label=label)


def pareto_plot(series: Mapping[str, Sequence[Point]], path: Path, *, xlabel: str, ylabel: str) -> None:
    """Plot quality over cost, one line or mark per series."""
    with saved_figure(path, 4.8, 3.2) as axes:
        for label, points in series.items():
            line = "-" if len(points) > 1 else "none"
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.2, linestyle=line, label=label)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.legend()


def repair_curves(stages: Mapping[str, Mapping[str, Sequence[Point]]], path: Path) -> None:
    """Plot the divergence closed over the speed-up of the first token, by strategy, a panel a stage."""
    with panel_grid(path, len(stages), 2.7, 2.5, max_columns=4) as axes:
        for panel, (title, strategies) in zip(axes.flat, stages.items(), strict=False):
            for strategy, points in strategies.items():
                panel.plot(*zip(*points, strict=True), marker="o", markersize=3.5, linewidth=1.1, label=strategy)
            panel.axhline(100, color="grey", linewidth=0.8, linestyle=":")
            panel.axvline(1, color="grey", linewidth=0.8, linestyle=":")
            panel.set_title(title, fontsize=9)
        for panel in axes[:, 0]:
            panel.set_ylabel("KL closed, %")
        for panel in axes[-1]:
            panel.set_xlabel("TTFT, prefix mode over this")
        axes[0][0].legend(fontsize=7)


class Curve(NamedTuple):
    """Sides of a benchmark that differ in one number, from the fastest on."""

    label: str
    points: Sequence[tuple[float, ErrorBar]]  # seconds to the first token, quality with its interval
    notes: Sequence[str] = ()  # beside the points
    color: str = "#444444"
    labeled: int = -1  # number of the point that has the label, above or below its interval
    is_below: bool = False
    align: str = "center"  # of the label at the point


def quality_over_time(
    panels: Mapping[str, Sequence[Curve]], path: Path, *, level: float, margin: float, xlabel: str, ylabel: str
) -> None:
    """Plot quality over the time to first token, a panel for each engine.

    Args:
        level: quality without reuse; dotted.
        margin: quality that may be lost; a band below and above the level.
    """
    with saved_figure(path, 8.4, 3.7, ncols=len(panels), sharex=True, sharey=True, squeeze=False) as axes:
        for panel, (title, curves) in zip(axes[0], panels.items(), strict=True):
            panel.axhspan(level - margin, level + margin, color="#59a14f", alpha=0.14, linewidth=0)
            panel.axhline(level, color="#777777", linewidth=0.8, linestyle=":")
            for curve in curves:
                xs, ys = [x for x, _ in curve.points], [bar[0] for _, bar in curve.points]
                spread = [[bar[0] - bar[1] for _, bar in curve.points], [bar[2] - bar[0] for _, bar in curve.points]]
                look = {"marker": "o", "markersize": 5, "linewidth": 1.3, "color": curve.color}
                panel.errorbar(xs, ys, yerr=spread, elinewidth=0.8, capsize=2, **look)
                for (x, bar), note in zip(curve.points, curve.notes, strict=False):
                    offset = {"xytext": (5, 2), "textcoords": "offset points"}
                    panel.annotate(note, (x, bar[0]), **offset, fontsize=7, color=curve.color)
                x, bar = curve.points[curve.labeled]
                place = {"xytext": (0, -4 if curve.is_below else 4), "textcoords": "offset points"}
                place |= {"ha": curve.align}
                place |= {"va": "top" if curve.is_below else "bottom", "color": curve.color, "fontsize": 8.5}
                place["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5}
                panel.annotate(curve.label, (x, bar[1 + (not curve.is_below)]), **place)
            panel.set_xscale("log")
            panel.margins(x=0.14, y=0.1)
            panel.set_title(title, fontsize=10, loc="left")
            panel.set_xlabel(xlabel)
        ticks = [tick for tick in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if _is_within(tick, axes[0][0].get_xlim())]
        axes[0][0].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes[0][0].minorticks_off()
        axes[0][0].set_ylabel(ylabel)


def _is_within(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]
