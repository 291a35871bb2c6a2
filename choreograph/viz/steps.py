"""Draws an Agent Step Graph: who waits for whom, and how many steps away each agent is. Knows no cache."""

from collections.abc import Mapping
from html import escape

from ..workflow.graph import NEVER, Join, StepGraph
from .graph import text_width

BOX, HIGH, ACROSS, DOWN, LEFT, TOP = 150, 44, 70, 84, 30, 66  # boxes are wider where a name is
SHADES = ("#1b7837", "#5aae61", "#a6dba0", "#d9f0d3")  # runs now, next, soon, later


def lines(graph: StepGraph, steps: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """(agent, what it waits for, steps) of every agent, the nearest first."""
    order = sorted(graph.agents, key=lambda agent: steps[agent])
    return [(agent, described(graph.waits[agent]), shown(steps[agent])) for agent in order]


def shown(steps: float) -> str:
    return "runs now" if steps == 0 else "never" if steps == NEVER else f"{steps:g}"


def described(join: Join | None) -> str:
    """A join in words: "all of coder and tester"."""
    if join is None:
        return "nothing"
    parts = [f"({described(one)})" if isinstance(one, Join) else one for one in join.of]
    return parts[0] if len(parts) == 1 else f"{join.kind.replace('_', ' ')} {', '.join(parts)}"


def svg(graph: StepGraph, steps: Mapping[str, float], title: str = "") -> str:
    """The picture as SVG text: columns by the distance from the first agents, darker what runs sooner."""
    title = title or graph.name
    wide = max(BOX, 16 + text_width(graph.agents, 13))
    places = {a: (LEFT + c * (wide + ACROSS), TOP + r * DOWN) for a, (c, r) in _places(graph).items()}
    width = max(max(x for x, _ in places.values()) + wide + ACROSS, 24 + text_width([title], 16))
    height = max(y for _, y in places.values()) + DOWN + 10
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
    parts += [_box(agent, *places[agent], wide, steps[agent], graph.waits[agent]) for agent in graph.agents]
    return "\n".join([*parts, "</svg>"])


def _places(graph: StepGraph) -> dict[str, tuple[int, int]]:
    """Column and row of every agent: one column behind the nearest agent that it waits for."""
    column = dict.fromkeys(graph.first, 0)
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


def _box(agent: str, x: int, y: int, wide: int, steps: float, join: Join | None) -> str:
    shade = SHADES[min(int(steps), len(SHADES) - 1)] if steps < NEVER else "#f0f0f0"
    ink = "white" if steps == 0 else "#222"
    kind = f" ({join.kind.replace('_', ' ')})" if join is not None and len(join.of) > 1 else ""
    return (
        f'<rect x="{x}" y="{y}" width="{wide}" height="{HIGH}" rx="6" fill="{shade}" stroke="#666"/>'
        f'<text x="{x + wide / 2}" y="{y + 18}" text-anchor="middle" fill="{ink}">{escape(agent)}</text>'
        f'<text x="{x + wide / 2}" y="{y + 35}" text-anchor="middle" font-size="11" fill="{ink}">'
        f"{shown(steps)}{kind}</text>"
    )


def _arrow(start: tuple[int, int], end: tuple[int, int], wide: int) -> str:
    """A line to the next column, or a dashed bow back."""
    x1, y1 = start[0] + wide, start[1] + HIGH / 2
    x2, y2 = end[0], end[1] + HIGH / 2
    if end[0] > start[0]:
        return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#666" marker-end="url(#tip)"/>'
    low = max(y1, y2) + HIGH / 2
    a, b = x1 - wide / 2, x2 + wide / 2
    bow = f"M{a},{y1 + HIGH / 2} C{a},{low + 34} {b},{low + 34} {b},{y2 + HIGH / 2}"
    return f'<path d="{bow}" fill="none" stroke="#666" stroke-dasharray="5 4" marker-end="url(#tip)"/>'
