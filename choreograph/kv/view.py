"""Turns what a call sees into reads of slots. Pure; knows encodings, not calls or models."""

from collections.abc import Iterable, Iterator

from ..ops.plan import Read
from .encoding import Encoding, Sight, Span


def context_reads(sights: Iterable[Sight], row0: int, row1: int, layer: int = 0) -> Iterator[Read]:
    """In a layer, every row sees every token of every sight that reaches it (contract, point 2)."""
    for sight in sights:
        if not sight.reaches(layer):
            continue
        end = sight.first + sight.count
        for span in sight.encoding.spans:
            first, last = max(span.first, sight.first), min(span.first + span.count, end)
            if first < last:
                slot = span.slot + first - span.first
                position = sight.start + first - sight.first
                yield Read(slot, row0, row1, sight.shift, last - first, 0, position)


def own_reads(encoding: Encoding, row0: int, token0: int, token1: int, first: int = 0) -> Iterator[Read]:
    """Row row0 + i computes token token0 + i, which sees its own encoding from token `first` up to itself."""
    rows = token1 - token0
    for span in spans_from(encoding, first):
        if span.first >= token1:
            break
        position = encoding.start + span.first
        inside = min(max(span.first - token0, 0), rows)  # rows before this see nothing of the span
        behind = min(max(span.first + span.count - token0, 0), rows)  # rows from here on see all of it
        if inside < behind:
            limit = token0 + inside + 1 - span.first
            yield Read(span.slot, row0 + inside, row0 + behind, 0, limit, 1, position)
        if behind < rows:
            yield Read(span.slot, row0 + behind, row0 + rows, 0, span.count, 0, position)


def spans_from(encoding: Encoding, first: int) -> Iterator[Span]:
    for span in encoding.spans:
        skipped = max(0, first - span.first)
        if skipped < span.count:
            yield Span(span.first + skipped, span.slot + skipped, span.count - skipped)


def layers_alike(sights: Iterable[Sight], layers: int) -> list[list[int]]:
    """The layers in groups within which exactly the same is seen."""
    somewhere = {sight.layers for sight in sights if sight.layers is not None and sight.count}
    if not somewhere:
        return [list(range(layers))]
    groups: dict[tuple[bool, ...], list[int]] = {}
    for layer in range(layers):
        groups.setdefault(tuple(layer in some for some in somewhere), []).append(layer)
    return list(groups.values())
