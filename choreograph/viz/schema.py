"""Draws a schema's layout: a tree with positions for a terminal, and an SVG with unions side by side."""

from collections.abc import Iterator, Mapping
from html import escape

from ..pml.layout import Layout, Path, Piece, union_of
from ..pml.objects import Union
from .graph import COLOURS, axis

ROW, GAP, LEFT, WIDTH, TOP = 20, 5, 230, 860, 62


BAR = 48  # characters of a bar, at most


def lines(layout: Layout, bar: int = BAR) -> list[tuple[str, str, str, str, str]]:
    """(name, what it is, bar, positions, own tokens) of every piece, in document order. bar: its characters."""
    numbers = {id(union): number for number, union in enumerate(_unions(layout), 1)}
    return [
        (
            _label(piece),
            _kind(layout, piece, numbers),
            _bar(piece, max(layout.length, 1), bar),
            f"{piece.start}-{piece.end - 1}" if piece.end > piece.start else "-",
            str(piece.tokens),
        )
        for piece in layout.pieces.values()
    ]


def _bar(piece: Piece, length: int, width: int) -> str:
    """Text as #, room for an argument as ?, what a module spans as -, the rest as dots: one scale for all, so unions
    stand below one another."""
    marks = ["."] * width
    spans = [("-", piece.start, piece.end), *(("#", run.start, run.end) for run in piece.runs)]
    spans += [("?", slot.start, slot.start + slot.length) for slot in piece.slots.values()]
    for mark, start, end in spans:
        first = start * width // length
        for at in range(first, max(first + (end > start), end * width // length)):
            marks[min(at, width - 1)] = mark
    return "".join(marks)


def _unions(layout: Layout) -> list[Union]:
    """Every union once, in document order."""
    found = {id(union): union for path in layout.pieces if path and (union := union_of(layout, path))}
    return list(found.values())


def _label(piece: Piece) -> str:
    return "  " * len(piece.path) + (piece.path[-1] if piece.path else "(always present)")


def _kind(layout: Layout, piece: Piece, unions: Mapping[int, int]) -> str:
    facts = []
    if piece.path and (union := union_of(layout, piece.path)):
        facts.append(f"one of union {unions[id(union)]}")
    if any(piece.path in group for group in layout.groups):
        facts.append("scaffold")
    if not piece.cache:
        facts.append("not cached")
    facts += [f"{slot.name}: {slot.length} at {slot.start}" for slot in piece.slots.values()]
    return ", ".join(facts)


def svg(layout: Layout) -> str:
    """Every piece is a row, so that the members of a union stand above one another at the same positions."""
    rows = list(layout.pieces.values())
    end = max(layout.length, 1)
    scale = WIDTH / end
    height = TOP + len(rows) * (ROW + GAP) + 34
    title = f"Schema {layout.schema.name}: {layout.length} positions, {layout.cached_tokens} tokens cached"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 30}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="12" y="22" font-size="16">{escape(title)}</text>',
        '<text x="12" y="40" fill="#555">solid: text encoded once; hatched: room for an argument; pale: what a module '
        "spans; a bracket joins the members of a union</text>",
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" fill="white"/><line x1="0" y1="0" x2="0" y2="6" stroke="#555" stroke-width="2"/>'
        "</pattern></defs>",
        *axis(end, scale, LEFT, TOP - 6, height),
    ]
    places = {piece.path: TOP + index * (ROW + GAP) for index, piece in enumerate(rows)}
    for index, piece in enumerate(rows):
        parts += _row(layout, piece, places[piece.path], scale, COLOURS[index % len(COLOURS)])
    parts += _brackets(layout, places, scale)
    return "\n".join([*parts, "</svg>"])


def _row(layout: Layout, piece: Piece, y: int, scale: float, colour: str) -> Iterator[str]:
    name = piece.path[-1] if piece.path else "(always present)"
    weight = ' fill="#888"' if not piece.cache else ""
    label = escape(_short(name, 30 - 2 * len(piece.path)))
    yield f'<text x="{12 + 12 * len(piece.path)}" y="{y + 14}"{weight}>{label}</text>'
    x, width = LEFT + piece.start * scale, (piece.end - piece.start) * scale
    yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{colour}" fill-opacity="0.15"/>'
    for run in piece.runs:
        x, width = LEFT + run.start * scale, max(len(run.tokens) * scale, 1)
        yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{colour}"/>'
    for slot in piece.slots.values():
        x, width = LEFT + slot.start * scale, max(slot.length * scale, 2)
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="url(#hatch)" stroke="{colour}">'
            f"<title>{escape(slot.name)}: {slot.length} tokens</title></rect>"
        )


def _brackets(layout: Layout, places: dict[Path, int], scale: float) -> Iterator[str]:
    """A line in front of the members of each union."""
    for union in _unions(layout):
        paths = [path for path in layout.pieces if path and union_of(layout, path) is union]
        rows = [places[path] for path in paths]
        x = LEFT + layout.pieces[paths[0]].start * scale - 4
        yield (
            f'<path d="M{x + 3:.1f} {min(rows)} H{x:.1f} V{max(rows) + ROW} H{x + 3:.1f}" fill="none" '
            'stroke="#222" stroke-width="1.5"/>'
        )


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"
