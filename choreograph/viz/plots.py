"""Figures of measured results, as the papers draw them. Draws what it is given; owns no measurement."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..utils import ensure_writable

Point = tuple[float, float]

ErrorBar = tuple[float, float, float]  # value, low, high


def _figure(width: float = 5.0, height: float = 3.4, panels: int = 1, rows: int = 1) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "choreograph", "font.size": 9, "axes.spines.top": False})
    matplotlib.rcParams.update({"axes.spines.right": False, "legend.frameon": False})
    from matplotlib import pyplot

    one = rows == panels == 1
    figure, axes = pyplot.subplots(rows, panels, figsize=(width, height), layout="constrained", squeeze=one)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    ensure_writable(path)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {}, dpi=150)
    pyplot.close(figure)


def speedup_over_branches(
    series: Mapping[str, Sequence[tuple[float, ErrorBar]]], path: Path, *, title: str = ""
) -> None:
    """Figure 5: end-to-end speed-up over the number of branches, a line for each number of voters, with intervals."""
    figure, axes = _figure()
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
    axes.set_xlabel("branches")
    axes.set_ylabel("end-to-end speed-up")
    axes.set_title(title)
    axes.legend()
    _save(figure, path)


def speedup_over_tokens(
    series: Mapping[str, Sequence[Point]], path: Path, *, notes: Mapping[str, str] | None = None
) -> None:
    """Figure 7: end-to-end speed-up against the tokens that a workflow generated, one panel a workflow."""
    figure, axes = _figure(3.0 * len(series), 2.8, len(series))
    panels = [axes] if len(series) == 1 else list(axes[0])
    for panel, (label, points) in zip(panels, series.items(), strict=True):
        panel.scatter([x for x, _ in points], [y for _, y in points], s=12)
        panel.axhline(1, color="grey", linewidth=0.8, linestyle=":")
        panel.set_title(f"{label}\n{(notes or {}).get(label, '')}".strip(), fontsize=9)
        panel.set_xlabel("tokens generated")
    panels[0].set_ylabel("end-to-end speed-up")
    _save(figure, path)


def difference_bars(
    groups: Mapping[str, Mapping[str, ErrorBar]], path: Path, *, ylabel: str, baseline: float = 0
) -> None:
    """Figure 8: differences from the baseline with intervals; a cluster for each group, a bar for each condition.

    level: where nothing has changed, 1 for ratios.
    """
    figure, axes = _figure(max(5.4, 1.1 * len(groups)), 3.2)
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        bars = [bars.get(name, (float("nan"),) * 3) for bars in groups.values()]
        xs = [x + (index - (len(names) - 1) / 2) * width for x in range(len(groups))]
        spread = [[b[0] - b[1] for b in bars], [b[2] - b[0] for b in bars]]
        axes.bar(xs, [b[0] for b in bars], width * 0.9, yerr=spread, capsize=2, label=name, error_kw={"linewidth": 0.8})
    axes.axhline(baseline, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(ylabel)
    axes.legend(fontsize=8)
    _save(figure, path)


def ttft_plot(series: Mapping[str, Sequence[tuple[float, float]]], path: Path, *, num_new_tokens: int) -> None:
    """Time to first token over cached tokens (Prompt Cache, Figure 5): all of it, and the cached line alone."""
    figure, axes = _figure(7.2, 3.2, panels=2)
    panels = list(axes[0])
    for panel, chosen in zip(panels, (series, dict(list(series.items())[:1])), strict=True):
        for label, points in chosen.items():
            panel.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.2, label=label)
        panel.set_xlabel("cached tokens")
        panel.set_ylim(bottom=0)
        panel.legend()
    panels[0].set_ylabel(f"ms to the first token, {num_new_tokens} new tokens")
    _save(figure, path)


def learning_curves(series: Mapping[str, tuple[Sequence[Point], float]], path: Path) -> None:
    """Log-loss for validation over updates, a panel for each training; the dotted line is the baseline's own."""
    wide = min(3, len(series))
    rows = -(-len(series) // wide)
    figure, axes = _figure(3.6 * wide, 2.6 * rows, wide, rows)
    panels = [axes] if len(series) == 1 else list(axes.flat)
    for empty in panels[len(series) :]:
        empty.set_axis_off()
    for panel, (label, (points, floor)) in zip(panels, series.items(), strict=False):
        panel.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, linewidth=1.2)
        panel.axhline(floor, color="grey", linewidth=0.8, linestyle=":")
        panel.set_title(label, fontsize=9)
        panel.set_xlabel("updates")
    for first in panels[::wide]:
        first.set_ylabel("log-loss of a token")
    _save(figure, path)


def layer_bars(
    values: Sequence[ErrorBar], path: Path, *, level: float, critical: Sequence[int] = (), ylabel: str
) -> None:
    """DroidSpeak, Figures 7 and 8: what reusing one layer alone leaves of the quality; critical layers in red. A bar's
    low and high are its spread over the inputs."""
    figure, axes = _figure(max(4.0, 0.2 * len(values)), 2.8)
    colours = ["tab:red" if layer in critical else "tab:blue" for layer in range(len(values))]
    spread = [[max(0.0, b[0] - b[1]) for b in values], [max(0.0, b[2] - b[0]) for b in values]]
    bars = [b[0] for b in values]
    axes.bar(range(len(bars)), bars, color=colours, yerr=spread, error_kw={"linewidth": 0.7}, capsize=1.5)
    axes.axhline(level, color="tab:red", linewidth=0.8, linestyle="--")
    axes.set_xlabel("the layer that is reused")
    axes.set_ylabel(ylabel)
    _save(figure, path)


def layer_spread(values: Sequence[Sequence[float]], path: Path, *, critical: Sequence[int] = (), ylabel: str) -> None:
    """DroidSpeak, Figure 8: over the inputs, what reusing one layer alone changes; critical layers in red, with the
    quartiles of each as a bar."""
    import numpy

    figure, axes = _figure(max(4.0, 0.25 * len(values)), 2.8)
    result = axes.violinplot([list(one) for one in values], positions=range(len(values)), widths=0.8, showextrema=False)
    for layer, body in enumerate(result["bodies"]):
        body.set_color("tab:red" if layer in critical else "tab:blue")
    low, high = numpy.percentile(values, [25, 75], axis=1)
    axes.vlines(range(len(values)), low, high, color="black", linewidth=1.2)
    axes.axhline(0, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("the layer that is reused")
    axes.set_ylabel(ylabel)
    _save(figure, path)


def heat_map(cells: Mapping[tuple[int, int], float], path: Path, *, label: str) -> None:
    """DroidSpeak, Figure 12: quality over where computing begins (up) and ends (to the right)."""
    import numpy

    begins, ends = sorted({b for b, _ in cells}), sorted({e for _, e in cells})
    grid = numpy.full((len(begins), len(ends)), numpy.nan)
    for (begin, end), value in cells.items():
        grid[begins.index(begin), ends.index(end)] = value
    figure, axes = _figure(4.6, 3.8)
    image = axes.imshow(grid, origin="lower", cmap="Blues", aspect="auto")
    for axis, ticks in ((axes.xaxis, ends), (axes.yaxis, begins)):
        shown = range(0, len(ticks), max(1, len(ticks) // 8))
        axis.set_ticks(list(shown), [str(ticks[i]) for i in shown])
    axes.set_xlabel("computes up to layer")
    axes.set_ylabel("computes from layer")
    figure.colorbar(image, ax=axes, label=label)
    _save(figure, path)


def pareto_plot(series: Mapping[str, Sequence[Point]], path: Path, *, xlabel: str, ylabel: str) -> None:
    """Quality over cost, a line for each way of choosing; a series of one point is a mark."""
    figure, axes = _figure(4.8, 3.2)
    for label, points in series.items():
        line = "-" if len(points) > 1 else "none"
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.2, linestyle=line, label=label)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.legend()
    _save(figure, path)
