"""What can be said of all encodings at once: how many there are, and that nothing is lost or taken twice."""

from collections.abc import Iterable, Mapping

from .arena import Arena
from .encoding import Encoding


def counts(encodings: Iterable[Encoding], arena: Arena) -> dict[str, int]:
    """Encodings and pages, held and idle; band: pages of those that exist in some layers only."""
    everything = list(encodings)
    held = [e for e in everything if e.holders]
    found = {
        "held_encodings": len(held),
        "idle_encodings": len(everything) - len(held),
        "held_pages": sum(len(e.pages) for e in held if e.layers is None),
        "free_pages": arena.free_pages,
        "pages": arena.pages,
    }
    if arena.size(band=True):
        found["held_band_pages"] = sum(len(e.pages) for e in held if e.layers is not None)
        found["band_pages"] = arena.size(band=True)
    return found


def holds(encodings: Iterable[Encoding], model: str) -> bool:
    """Whether anybody holds what a model computes, or what was computed with sight of it."""
    waiting, seen = [e for e in encodings if e.holders], set[int]()
    while waiting:
        encoding = waiting.pop()
        if encoding.model == model:
            return True
        if encoding.id not in seen:
            seen.add(encoding.id)
            waiting += [sight.encoding for sight in encoding.context]
    return False


def check(encodings: Mapping[int, Encoding], arena: Arena) -> None:
    """Raises AssertionError where an encoding and the pages do not agree."""
    arena.check()
    pages = [page for e in encodings.values() for page in e.pages]
    assert len(pages) == len(set(pages)), "two encodings share a page"
    for band in (False, True):
        taken = sum((page > arena.pages) == band for page in pages)
        assert taken + arena.free(band) == arena.size(band), "pages are lost"
    for e in encodings.values():
        assert e.holders or e.moving or (e.reusable and e.kept), f"encoding {e.id} is idle but cannot be found"
        assert e.encoded <= e.scheduled <= len(e.tokens)
        assert not e.pages or len(e.tokens) <= len(e.pages) * e.page_size
        assert e.pages or not e.encoded, f"encoding {e.id} is encoded nowhere"
        assert all((page > arena.pages) == (e.layers is not None) for page in e.pages)
