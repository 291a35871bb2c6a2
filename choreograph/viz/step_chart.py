"""Draws an Agent Step Graph: who waits for whom, and how many steps away each agent is. Knows no cache."""

from collections.abc import Mapping
from html import escape

from ..agents.step_graph import UNREACHABLE, Dependency, StepGraph
from .message_graph import text_width

MIN_BOX_WIDTH, BOX_HEIGHT, COLUMN_GAP, ROW_PITCH, LEFT, TOP = 150, 44, 70, 84, 30, 66  # boxes are wider where a name is

SHADES = ("#1b7837", "#5aae61", "#a6dba0", "#d9f0d3")  # runs now, next, soon, later


def step_table_rows(graph: StepGraph, steps: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """(agent, what it waits for, steps) of every agent, the nearest first."""
    order = sorted(graph.agents, key=lambda agent: steps[agent])
    return [(agent, describe_dependency(graph.dependencies[agent]), format_steps(steps[agent])) for agent in order]


def format_steps(steps: float) -> str:
    return "runs now" if steps == 0 else "never" if steps == UNREACHABLE else f"{steps:g}"


def describe_dependency(dependency: Dependency | None) -> str:
    """A join in words: "all of coder and tester"."""
    if dependency is None:
        return "nothing"
    parts = [f"({describe_dependency(one)})" if isinstance(one, Dependency) else one for one in dependency.operands]
    return parts[0] if len(parts) == 1 else f"{dependency.kind.replace('_', ' ')} {', '.join(parts)}"


def step_graph_to_svg(graph: StepGraph, steps: Mapping[str, float], title: str = "") -> str:
    """The picture as SVG text: columns by the distance from the first agents, darker what runs sooner."""
    title = title or graph.name
    wide = max(MIN_BOX_WIDTH, 16 + text_width(graph.agents, 13))
    places = {a: (LEFT + c * (wide + COLUMN_GAP), TOP + r * ROW_PITCH) for a, (c, r) in _grid_cells(graph).items()}
    width = max(max(x for x, _ in places.values()) + wide + COLUMN_GAP, 24 + text_width([title], 16))
    height = max(y for _, y in places.values()) + ROW_PITCH + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        '<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
        '<path d="M0,0 L9,4 L0,8 z" fill="#666"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="24" font-size="16">{escape(title)}</text>',
        '<text x="12" y="44" fill="#555">steps until each agent can run next; dashed: back to an earlier one</text>',
    ]
    parts += [_arrow(places[before], places[agent], wide) for before, agent in graph.edges]
    parts += [_box(agent, *places[agent], wide, steps[agent], graph.dependencies[agent]) for agent in graph.agents]
    return "\n".join([*parts, "</svg>"])


def _grid_cells(graph: StepGraph) -> dict[str, tuple[int, int]]:
    """Column and row of every agent: one column behind the nearest agent that it waits for."""
    column = dict.fromkeys(graph.entry_agents, 0)
    for distance in range(1, len(graph.agents) + 1):
        near = [agent for before, agent in graph.edges if column.get(before) == distance - 1 and agent not in column]
        column |= dict.fromkeys(near, distance)
    rows: dict[int, int] = {}
    places = {}
    for agent in graph.agents:
        at = column.get(agent, 0)
        places[agent] = (at, rows.get(at, 0))
        rows[at] = rows.get(at, 0) + 1
    return places


def _box(agent: str, x: int, y: int, box_width: int, steps: float, dependency: Dependency | None) -> str:
    shade = SHADES[min(int(steps), len(SHADES) - 1)] if steps < UNREACHABLE else "#f0f0f0"
    ink = "white" if steps == 0 else "#222"
    kind = f" ({dependency.kind.replace('_', ' ')})" if dependency is not None and len(dependency.operands) > 1 else ""
    return (
        f'<rect x="{x}" y="{y}" width="{box_width}" height="{BOX_HEIGHT}" rx="6" fill="{shade}" stroke="#666"/>'
        f'<text x="{x + box_width / 2}" y="{y + 18}" text-anchor="middle" fill="{ink}">{escape(agent)}</text>'
        f'<text x="{x + box_width / 2}" y="{y + 35}" text-anchor="middle" font-size="11" fill="{ink}">'
        f"{format_steps(steps)}{kind}</text>"
    )


def _arrow(start: tuple[int, int], end: tuple[int, int], box_width: int) -> str:
    """A line to the next column, or a dashed bow back."""
    x1, y1 = start[0] + box_width, start[1] + BOX_HEIGHT / 2
    x2, y2 = end[0], end[1] + BOX_HEIGHT / 2
    if end[0] > start[0]:
        return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#666" marker-end="url(#tip)"/>'
    low = max(y1, y2) + BOX_HEIGHT / 2
    a, b = x1 - box_width / 2, x2 + box_width / 2
    bow = f"M{a},{y1 + BOX_HEIGHT / 2} C{a},{low + 34} {b},{low + 34} {b},{y2 + BOX_HEIGHT / 2}"
    return f'<path d="{bow}" fill="none" stroke="#666" stroke-dasharray="5 4" marker-end="url(#tip)"/>'
