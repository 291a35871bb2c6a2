"""Draws a message graph as SVG: one row for each message, who it saw, and at which positions.

The axis is the logical position. A row's solid bar is the message itself; the pale bars before it are its
parents where this row placed them, numbered. A dashed bar stands at another place than its own (it was moved).
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from rich.cells import cell_len

from ..engine.message import Message

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#9c755f", "#edc948")

ROW, GAP, LEFT, WIDTH, TOP = 22, 6, 210, 900, 64


class MessageBar(NamedTuple):
    """number: of the message; from `start` on, `length` positions."""

    number: int
    position: int
    length: int
    is_shifted: bool


class MessageRow(NamedTuple):
    label: str
    stage: str
    bar: MessageBar
    context: list[MessageBar]


def message_rows(steps: Iterable[tuple[str, Message]]) -> list[MessageRow]:
    """What to draw of (stage, message) pairs whose messages are complete."""
    steps = list(steps)
    numbers = {message.id: index + 1 for index, (_, message) in enumerate(steps)}
    drawn = []
    for stage, message in steps:
        seen = [
            MessageBar(numbers.get(parent.id, 0), offset, parent.length, offset != parent.position)
            for parent, offset in zip(message.parents, message.offsets, strict=True)
        ]
        number = numbers[message.id]
        bar = MessageBar(number, message.position, message.length, False)
        drawn.append(MessageRow(f"{number} {stage} ({message.kind}, {message.length})", stage, bar, seen))
    return drawn


def message_graph_to_svg(steps: Iterable[tuple[str, Message]], title: str = "Message graph") -> str:
    """The picture as SVG text."""
    drawn = message_rows(steps)
    end = max((bar.position + bar.length for row in drawn for bar in (row.bar, *row.context)), default=1)
    left = max(LEFT, 24 + text_width((row.label for row in drawn), 12))
    scale = WIDTH / max(end, 1)
    stages = list(dict.fromkeys(row.stage for row in drawn))
    colours = {row.bar.number: COLOURS[stages.index(row.stage) % len(COLOURS)] for row in drawn}
    height = TOP + len(drawn) * (ROW + GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + WIDTH + 30}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="12" y="22" font-size="16">{escape(title)}</text>',
        '<text x="12" y="40" fill="#555">solid: the message at its own positions; pale: what it saw, by number; '
        "dashed outline: seen elsewhere than where it was encoded</text>",
        *axis(end, scale, left, TOP - 6, height),
    ]
    for index, row in enumerate(drawn):
        y = TOP + index * (ROW + GAP)
        parts.append(f'<text x="12" y="{y + 15}">{escape(row.label)}</text>')
        parts += [_bar(bar, left, y, scale, colours.get(bar.number, "#999"), is_context=True) for bar in row.context]
        parts.append(_bar(row.bar, left, y, scale, colours[row.bar.number], is_context=False))
    return "\n".join([*parts, "</svg>"])


def _bar(bar: MessageBar, left: int, y: int, scale: float, colour: str, *, is_context: bool) -> str:
    x, width = left + bar.position * scale, max(bar.length * scale, 1.5)
    look = f'fill="{colour}" fill-opacity="{0.28 if is_context else 1}"'
    if is_context:
        dash = ' stroke-dasharray="4 3"' if bar.is_shifted else ""
        look += f' stroke="{colour}"{dash}'
    label = ""
    if width > 9 * len(str(bar.number)):
        ink = "#222" if is_context else "white"
        label = f'<text x="{x + width / 2:.1f}" y="{y + 15}" text-anchor="middle" fill="{ink}">{bar.number}</text>'
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" rx="3" {look}/>{label}'


def text_width(texts: Iterable[str], size: int) -> int:
    """Pixels that the longest of some texts may take in a font of this size."""
    return round(0.6 * size * max(map(cell_len, texts), default=0))


def axis(end: int, scale: float, left: int, top: int, height: int) -> Sequence[str]:
    """Lines at round positions from `top` down to a picture's lower edge, with their numbers below."""
    step = next((s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000) if end / s <= 12), 20000)
    lines = []
    for at in range(0, end + 1, step):
        x = left + at * scale
        lines.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{height - 26}" stroke="#ddd"/>')
        lines.append(f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle" fill="#555">{at}</text>')
    return lines
