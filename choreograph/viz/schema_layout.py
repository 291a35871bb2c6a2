"""Draws a schema's layout: a tree with positions for a terminal, and an SVG with unions side by side."""

from collections.abc import Iterator, Mapping
from html import escape

from ..prompt_cache.layout import Layout, ModuleLayout, ModulePath, enclosing_union
from ..prompt_cache.schema import Union
from .message_graph import COLOURS, axis

ROW, GAP, LEFT, WIDTH, TOP = 20, 5, 230, 860, 62

BAR_CHARS = 48  # characters of a bar, at most


def layout_table_rows(layout: Layout, bar_chars: int = BAR_CHARS) -> list[tuple[str, str, str, str, str]]:
    """(name, what it is, bar, positions, own tokens) of every piece, in document order. bar: its characters."""
    numbers = {id(union): number for number, union in enumerate(_unions(layout), 1)}
    return [
        (
            _label(piece),
            _describe_module(layout, piece, numbers),
            _bar(piece, max(layout.length, 1), bar_chars),
            f"{piece.start}-{piece.end - 1}" if piece.end > piece.start else "-",
            str(piece.num_tokens),
        )
        for piece in layout.modules.values()
    ]


def _bar(module_layout: ModuleLayout, length: int, width: int) -> str:
    """Text as #, room for an argument as ?, what a module spans as -, the rest as dots: one scale for all, so unions
    stand below one another."""
    marks = ["."] * width
    spans = [("-", module_layout.start, module_layout.end), *(("#", run.start, run.end) for run in module_layout.runs)]
    spans += [("?", slot.start, slot.start + slot.length) for slot in module_layout.parameter_slots.values()]
    for mark, start, end in spans:
        first = start * width // length
        for at in range(first, max(first + (end > start), end * width // length)):
            marks[min(at, width - 1)] = mark
    return "".join(marks)


def _unions(layout: Layout) -> list[Union]:
    """Every union once, in document order."""
    result = {id(union): union for path in layout.modules if path and (union := enclosing_union(layout, path))}
    return list(result.values())


def _label(module_layout: ModuleLayout) -> str:
    return "  " * len(module_layout.path) + (module_layout.path[-1] if module_layout.path else "(always present)")


def _describe_module(layout: Layout, module_layout: ModuleLayout, union_numbers: Mapping[int, int]) -> str:
    facts = []
    if module_layout.path and (union := enclosing_union(layout, module_layout.path)):
        facts.append(f"one of union {union_numbers[id(union)]}")
    if any(module_layout.path in group for group in layout.scaffold_groups):
        facts.append("scaffold")
    if not module_layout.cache:
        facts.append("not cached")
    facts += [f"{slot.name}: {slot.length} at {slot.start}" for slot in module_layout.parameter_slots.values()]
    return ", ".join(facts)


def layout_to_svg(layout: Layout) -> str:
    """Every piece is a row, so that the members of a union stand above one another at the same positions."""
    rows = list(layout.modules.values())
    end = max(layout.length, 1)
    scale = WIDTH / end
    height = TOP + len(rows) * (ROW + GAP) + 34
    title = f"Schema {layout.schema.name}: {layout.length} positions, {layout.num_cached_tokens} tokens cached"
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


def _row(layout: Layout, module_layout: ModuleLayout, y: int, scale: float, colour: str) -> Iterator[str]:
    name = module_layout.path[-1] if module_layout.path else "(always present)"
    weight = ' fill="#888"' if not module_layout.cache else ""
    label = escape(_truncate(name, 30 - 2 * len(module_layout.path)))
    yield f'<text x="{12 + 12 * len(module_layout.path)}" y="{y + 14}"{weight}>{label}</text>'
    x, width = LEFT + module_layout.start * scale, (module_layout.end - module_layout.start) * scale
    yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{colour}" fill-opacity="0.15"/>'
    for run in module_layout.runs:
        x, width = LEFT + run.start * scale, max(len(run.tokens) * scale, 1)
        yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{colour}"/>'
    for slot in module_layout.parameter_slots.values():
        x, width = LEFT + slot.start * scale, max(slot.length * scale, 2)
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="url(#hatch)" stroke="{colour}">'
            f"<title>{escape(slot.name)}: {slot.length} tokens</title></rect>"
        )


def _brackets(layout: Layout, row_offsets: dict[ModulePath, int], scale: float) -> Iterator[str]:
    """A line in front of the members of each union."""
    for union in _unions(layout):
        paths = [path for path in layout.modules if path and enclosing_union(layout, path) is union]
        rows = [row_offsets[path] for path in paths]
        x = LEFT + layout.modules[paths[0]].start * scale - 4
        yield (
            f'<path d="M{x + 3:.1f} {min(rows)} H{x:.1f} V{max(rows) + ROW} H{x + 3:.1f}" fill="none" '
            'stroke="#222" stroke-width="1.5"/>'
        )


def _truncate(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 1] + "\u2026"
