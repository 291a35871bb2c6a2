"""Message graph, schema layout, step graph and plots (extra `viz`)."""

import math
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .utils import ensure_writable, require

if TYPE_CHECKING:  # each picture needs its own package only
    from .agents.step_graph import StepGraph
    from .api.message import Message
    from .prompt_cache.layout import Layout

Point = tuple[float, float]

STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
STYLE |= {"svg.hashsalt": "choreograph", "svg.fonttype": "none", "text.parse_math": False}  # equal data, equal file
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#9c755f", "#edc948")
SHADES = ("#1b7837", "#5aae61", "#a6dba0", "#d9f0d3")  # agents that run now, next, soon, later
ROW, AXIS_WIDTH, CHAR = 0.3, 9.0, 0.085  # inches of a row, of an axis of positions and of a letter
BAR = 0.8  # share of a row that its bar takes


@contextmanager
def saved_figure(path: Path, width: float, height: float, layout: Any = "constrained", **grid: Any) -> Iterator[Any]:
    """Yield the axes of a figure (size in inches), saved at exit."""
    require("matplotlib", "viz")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ensure_writable(path)
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the viewer of an SVG has other fonts
        figure = Figure((width, height), layout=layout)
        yield figure.subplots(**grid)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})


@contextmanager
def panel_grid(path: Path, count: int, width: float, height: float, max_columns: int = 3) -> Iterator[Any]:
    """Yield the axes of a grid of panels (size of one in inches); those beyond `count` are hidden."""
    columns = min(max_columns, count)
    rows = -(-count // columns)
    with saved_figure(path, width * columns, height * rows, nrows=rows, ncols=columns, squeeze=False) as axes:
        for panel in axes.flat[count:]:
            panel.set_axis_off()
        yield axes


def speedup_over_tokens(series: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Plot speedups over generated tokens by workflow (Prompt Choreography, Figure 7)."""
    with panel_grid(path, len(series), 3.0, 2.8) as axes:
        for panel, (label, points) in zip(axes.flat, series.items(), strict=False):
            panel.scatter([x for x, _ in points], [y for _, y in points], s=12)
            panel.axhline(1, color="grey", linewidth=0.8, linestyle=":")
            panel.set_title(label, fontsize=9)
            panel.set_xlabel("tokens generated")
        for row in axes:
            row[0].set_ylabel("end-to-end speed-up")


class MessageBar(NamedTuple):
    """A message where one row of the graph attends to it."""

    number: int  # of the message, from 1; 0 if it is not in the graph
    position: int  # of its first token
    length: int  # in tokens
    is_shifted: bool  # True if it was computed at another position


def message_bars(steps: Sequence[tuple[str, "Message"]]) -> list[list[MessageBar]]:
    """Return, per message, the bars of its context and its own."""
    numbers = {message.id: number for number, (_, message) in enumerate(steps, 1)}
    rows = []
    for number, (_, message) in enumerate(steps, 1):
        parents = zip(message.parents, message.offsets, strict=True)
        context = [MessageBar(numbers.get(p.id, 0), start, p.length, start != p.position) for p, start in parents]
        rows.append([*context, MessageBar(number, message.position, message.length, False)])
    return rows


def draw_message_graph(steps: Sequence[tuple[str, "Message"]], path: Path, title: str = "Message graph") -> None:
    """Draw a row of bars per (stage, completed message) over positions."""
    rows = message_bars(steps)
    end = max((bar.position + bar.length for row in rows for bar in row), default=1)
    stages = list(dict.fromkeys(stage for stage, _ in steps))
    colors = [COLORS[stages.index(stage) % len(COLORS)] for stage, _ in steps]
    labels = [f"{i} {stage} ({message.kind}, {message.length})" for i, (stage, message) in enumerate(steps, 1)]
    note = "solid: the message; pale: its context, by number; dashed: at other positions than it was computed at"
    with _position_axes(path, labels, end, f"{title}\n{note}") as axes:
        for y, row in enumerate(rows):
            for bar in row:
                is_own, color = bar is row[-1], colors[bar.number - 1] if bar.number else "#999999"
                look = {"facecolor": color if is_own else (color, 0.28), "edgecolor": color}
                spans = [(bar.position, bar.length)]
                axes.broken_barh(spans, (y - BAR / 2, BAR), linestyle="--" if bar.is_shifted else "-", **look)
                if bar.length * AXIS_WIDTH > 1.2 * CHAR * len(str(bar.number)) * end:
                    ink = "white" if is_own else "#222222"
                    axes.text(bar.position + bar.length / 2, y, bar.number, ha="center", va="center", color=ink)


def draw_questions(runs: Mapping[str, Sequence[tuple[float, float, float]]], path: Path) -> None:
    """Draw when questions were answered, one row for each run.

    Args:
        runs: label -> start of each question, time until its first token, and end, in seconds.
    """
    with saved_figure(path, AXIS_WIDTH, 0.8 + 2 * ROW * len(runs)) as axes:
        for row, questions in enumerate(runs.values()):
            starts, waits = [start for start, _, _ in questions], [ttft for _, ttft, _ in questions]
            firsts, answers = zip(*((start + ttft, end - start - ttft) for start, ttft, end in questions), strict=True)
            labels = ("until the first token", "answer") if row == 0 else (None, None)
            axes.barh([row] * len(waits), waits, BAR, starts, color=COLORS[1], edgecolor="white", label=labels[0])
            axes.barh([row] * len(waits), answers, BAR, firsts, color=COLORS[0], edgecolor="white", label=labels[1])
        axes.set_yticks(range(len(runs)), list(runs))
        axes.invert_yaxis()
        axes.set_xlabel("seconds; where notes are encoded once, that comes first")
        axes.legend(loc="lower right")
        axes.set_title(f"{len(next(iter(runs.values())))} questions over five of ten notes each, one after the other")


def draw_layout(layout: "Layout", path: Path) -> None:
    """Draw a row per module over positions, with brackets around unions."""
    from .prompt_cache.layout import enclosing_union

    modules = list(layout.modules.values())
    labels = ["\u00a0\u00a0" * len(m.path) + m.path[-1][:30] if m.path else "(always present)" for m in modules]
    title = f"Schema {layout.schema.name}: {layout.length} positions, {layout.num_cached_tokens} tokens cached"
    note = "solid: text computed once; hatched: room for an argument; pale: the module; bracket: members of a union"
    members: dict[int, list[int]] = {}  # rows of each union
    with _position_axes(path, labels, layout.length, f"{title}\n{note}") as axes:
        for y, module in enumerate(modules):
            color, place = COLORS[y % len(COLORS)], (y - BAR / 2, BAR)
            axes.broken_barh([(module.start, module.end - module.start)], place, facecolor=color, alpha=0.15)
            axes.broken_barh([(run.start, len(run.tokens)) for run in module.runs], place, facecolor=color)
            slots = [(slot.start, slot.length) for slot in module.parameter_slots.values()]
            axes.broken_barh(slots, place, facecolor="white", edgecolor=color, hatch="////")
            if module.path and (union := enclosing_union(layout, module.path)):
                members.setdefault(id(union), []).append(y)
        for rows in members.values():
            x, tick = modules[rows[0]].start, max(layout.length, 1) / 250
            top, bottom = rows[0] - 0.45, rows[-1] + 0.45
            axes.plot([x, x - tick, x - tick, x], [top, top, bottom, bottom], color="#222222", clip_on=False)


def step_graph_boxes(graph: "StepGraph") -> dict[str, tuple[float, float, float]]:
    """Return (left, top, width) of every agent's box in inches."""
    column = dict.fromkeys(graph.entry_agents, 0)  # one after the nearest agent that an agent waits for
    for distance in range(1, len(graph.agents) + 1):
        near = [agent for before, agent in graph.edges if column.get(before) == distance - 1 and agent not in column]
        column |= dict.fromkeys(near, distance)
    width, rows, boxes = max(1.6, 0.2 + _text_width(graph.agents)), Counter[int](), {}
    for agent in graph.agents:
        at = column.get(agent, 0)
        boxes[agent] = (0.3 + at * (width + 0.8), 0.8 + rows[at] * 0.9, width)
        rows[at] += 1
    return boxes


def draw_step_graph(graph: "StepGraph", steps: Mapping[str, float], path: Path, title: str = "") -> None:
    """Draw agents in columns, darker the sooner they run."""
    title, boxes, box_height = title or graph.name, step_graph_boxes(graph), 0.5
    width = max(0.4 + _text_width([title]) * 1.4, *(left + wide + 0.8 for left, _, wide in boxes.values()))
    height = max(top for _, top, _ in boxes.values()) + 1.0
    with saved_figure(path, width, height, layout=None) as axes:
        axes.set(position=(0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        axes.text(0.15, 0.25, title, fontsize=12)
        axes.text(0.15, 0.5, "steps until each agent can run next; dashed: to an earlier agent", color="#555555")
        for before, agent in graph.edges:
            (x, y, wide), (next_x, next_y, _) = boxes[before], boxes[agent]
            ends, look = ((next_x, next_y + box_height / 2), (x + wide, y + box_height / 2)), {}
            if next_x <= x:  # a dashed bow below the boxes, 0.4 inches deep
                ends = (next_x + wide / 2, next_y + box_height), (x + wide / 2, y + box_height)
                look = {"linestyle": "--", "connectionstyle": f"arc3,rad={-0.8 / max(math.dist(*ends), 1)}"}
            axes.annotate("", *ends, arrowprops={"arrowstyle": "-|>", "color": "#666666", **look})
        for agent, (x, y, wide) in boxes.items():
            away, dependency = steps[agent], graph.dependencies[agent]
            note = format_steps(away)
            if dependency is not None and len(dependency.operands) > 1:
                note += f" ({dependency.kind.replace('_', ' ')})"
            shade = "#f0f0f0" if math.isinf(away) else SHADES[min(int(away), len(SHADES) - 1)]
            axes.broken_barh([(x, wide)], (y, box_height), facecolor=shade, edgecolor="#666666", zorder=2)
            ink, middle = "white" if away == 0 else "#222222", (x + wide / 2, y + box_height / 2)
            axes.text(*middle, f"{agent}\n{note}", ha="center", va="center", color=ink)


def format_steps(steps: float) -> str:
    """Return a number of steps in words."""
    return "runs now" if steps == 0 else "never" if math.isinf(steps) else f"{steps:g}"


@contextmanager
def _position_axes(path: Path, labels: Sequence[str], end: int, title: str) -> Iterator[Any]:
    """Yield axes over positions with one labeled row per label."""
    left, rows = max(2.0, 0.3 + _text_width(labels)), max(len(labels), 1)
    width, height = left + AXIS_WIDTH + 0.3, rows * ROW + 1.1
    place = (left / width, 0.4 / height, AXIS_WIDTH / width, rows * ROW / height)
    with saved_figure(path, width, height, layout=None) as axes:
        axes.set(position=place, xlim=(0, max(end, 1)), ylim=(rows - 0.5, -0.5), axisbelow=True)
        axes.set_yticks(range(len(labels)), labels, ha="left")
        axes.tick_params(axis="y", length=0, pad=72 * (left - 0.15))
        axes.set_title(title, loc="left", x=(0.15 - left) / AXIS_WIDTH)
        axes.grid(axis="x", color="#dddddd")
        yield axes


def _text_width(texts: Iterable[str]) -> float:
    """Return an upper bound in inches of the longest text's width."""
    # An East Asian wide letter takes two cells.
    cells = (sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text) for text in texts)
    return CHAR * max(cells, default=0)
