"""Invariants and statistics of the KV cache."""

from collections.abc import Iterable, Mapping

from .entry import KVEntry
from .pool import KVPool


def stats(entries: Iterable[KVEntry], pool: KVPool) -> dict[str, int]:
    """Count entries and pages, with partial-layer pages if there are any."""
    everything = list(entries)
    referenced = [e for e in everything if e.owners]
    result = {
        "held_encodings": len(referenced),
        "idle_encodings": len(everything) - len(referenced),
        "held_pages": sum(len(e.pages) for e in referenced if e.computed_layers is None),
        "free_pages": pool.free_pages,
        "pages": pool.pages,
    }
    if pool.num_pages(partial=True):
        result["held_band_pages"] = sum(len(e.pages) for e in referenced if e.computed_layers is not None)
        result["band_pages"] = pool.num_pages(partial=True)
    return result


def uses_model(entries: Iterable[KVEntry], model: str) -> bool:
    """Return whether a referenced entry was computed by `model` or attended to its output."""
    waiting, seen = [e for e in entries if e.owners], set[int]()
    while waiting:
        entry = waiting.pop()
        if entry.model == model:
            return True
        if entry.id not in seen:
            seen.add(entry.id)
            waiting += [kv_slice.entry for kv_slice in entry.context]
    return False


def check(entries: Mapping[int, KVEntry], pool: KVPool) -> None:
    """Check that entries and pages agree; raise AssertionError if not."""
    pool.check()
    pages = [page for e in entries.values() for page in e.pages]
    assert len(pages) == len(set(pages)), "two KV entries share a page"
    for partial_pool in (False, True):
        num_used = sum((page > pool.pages) == partial_pool for page in pages)
        assert num_used + pool.num_free(partial_pool) == pool.num_pages(partial_pool), "pages are lost"
    for e in entries.values():
        assert e.owners or e.transfer or (e.is_indexed and e.has_data), f"KV entry {e.id} is leaked"
        assert e.num_computed_tokens <= e.num_scheduled_tokens <= len(e.tokens)
        assert not e.pages or len(e.tokens) <= len(e.pages) * e.page_size
        assert e.pages or not e.num_computed_tokens, f"KV entry {e.id} has computed tokens but no pages"
        assert all((page > pool.pages) == (e.computed_layers is not None) for page in e.pages)
