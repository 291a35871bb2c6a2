"""Encodings: who holds them, how equal work is found, what is evicted first."""

import pytest
import torch
from helpers.recursion_limit import limit_recursion

from choreograph.errors import CacheFullError
from choreograph.events import EventBus
from choreograph.kv_cache.entry import KVSlice, TokenRuns, causal_reads, context_reads
from choreograph.kv_cache.eviction import (
    EvictionCandidate,
    first_in_first_out,
    least_frequently_used,
    least_recently_used,
    workflow_aware,
)
from choreograph.kv_cache.hashing import content_hash
from choreograph.kv_cache.manager import KVCacheManager
from choreograph.kv_cache.pool import KVPool
from choreograph.kv_cache.prefix_tree import PrefixTree
from choreograph.namespace import Client, Namespace

HOLDER = ("call", 1)


def make(pages: int = 8, eviction: str = "lru") -> KVCacheManager:
    arena = KVPool(
        pages=pages,
        page_size=2,
        layers=[(1, 4)],
        dtype=torch.float32,
        device=torch.device("cpu"),
        poison_freed_pages=True,
    )
    return KVCacheManager(arena, eviction=eviction, events=EventBus())


def whole(store: KVCacheManager, tokens: list[int], name: str, start: int = 0, context=()):
    """An encoding as a finished prefill leaves it."""
    entry = store.allocate_entry(tokens, start, context, capacity=len(tokens), owner=HOLDER)
    entry.num_scheduled_tokens = entry.num_computed_tokens = len(tokens)
    store.register(entry, name.encode())
    return entry


@pytest.mark.parametrize(("eviction", "gone"), [("lru", "b"), ("fifo", "a")])
def test_idle_encodings_go_in_the_order_of_the_policy(eviction, gone):
    store = make(eviction=eviction)
    entries = {name: whole(store, [1, 2, 3, 4], name) for name in "abc"}
    for entry in entries.values():
        store.release(entry, HOLDER)
    store.acquire(entries["a"], ("call", 2))
    store.release(entries["a"], ("call", 2))
    store.allocate_entry([9] * 6, 0, (), capacity=6, owner=("call", 3))
    assert {name for name in "abc" if store.lookup(name.encode()) is None} == {gone}
    store.check()


def test_held_encodings_are_never_evicted_and_the_error_has_the_numbers():
    store = make()
    kept = whole(store, [1] * 12, "kept")
    with pytest.raises(CacheFullError, match=r"needs 3 pages of 2 tokens; 2 of 8 are free and 0 can be evicted"):
        store.allocate_entry([2] * 6, 0, (), capacity=6, owner=("call", 3))
    assert store.lookup(b"kept") is kept
    store.check()


def test_an_unfinished_encoding_is_dropped_with_its_last_holder_and_nothing_happens_twice():
    store = make()
    entry = store.allocate_entry([1, 2, 3], 0, (), capacity=3, owner=HOLDER)
    store.release(entry, ("call", 4))
    assert store.stats["num_referenced_entries"] == 1
    store.release(entry, HOLDER)
    store.release(entry, HOLDER)
    assert store.stats == {"num_pages": 8, "num_free_pages": 8} | dict.fromkeys(
        set(store.stats) - {"num_pages", "num_free_pages"}, 0
    )
    store.check()


def test_policies_are_pure_orders():
    facts = [
        EvictionCandidate(1, 1, 9, hits=2),
        EvictionCandidate(2, 2, 3, hits=7),
        EvictionCandidate(3, 3, 5, hits=1),
        EvictionCandidate(4, 0, 1, hits=0, referenced=True),
    ]
    assert least_recently_used(facts) == [2, 3, 1, 4]
    assert first_in_first_out(facts) == [1, 2, 3, 4]
    assert least_frequently_used(facts) == [3, 1, 2, 4]
    assert least_recently_used([]) == []


def test_by_workflow_varying_parts_go_first_and_fixed_ones_by_falling_steps():
    facts = {
        "soon": EvictionCandidate(1, 1, 1, steps_to_execution=1),
        "later": EvictionCandidate(2, 2, 9, steps_to_execution=4),
        "never": EvictionCandidate(3, 3, 8, steps_to_execution=float("inf")),
        "unknown": EvictionCandidate(4, 4, 2),
        "unknown but held": EvictionCandidate(5, 5, 1, referenced=True),
        "suffix": EvictionCandidate(6, 6, 10, ephemeral=True, referenced=True),
    }
    names = {one.id: name for name, one in facts.items()}
    order = [names[id] for id in workflow_aware(facts.values())]
    assert order == ["suffix", "never", "unknown", "unknown but held", "later", "soon"]


def test_content_keys_name_relative_placement_tokens_context_and_salt():
    store = make(pages=64)
    a, b = whole(store, [1, 2], "a"), whole(store, [3], "b")

    def key(tokens=(7, 8), start=10, context=((a, 0), (b, 4)), salt="s", source=None, runs=None) -> bytes:
        slices = [KVSlice(e, 0, len(e.tokens), at) for e, at in context]
        return content_hash(Namespace(client=Client(salt)), tokens, start, slices, source, runs)

    assert key() == key(start=15, context=((a, 5), (b, 9)))
    others = [
        key(tokens=(8, 7)),
        key(start=11),
        key(context=((a, 0), (b, 5))),
        key(context=((b, 4), (a, 0))),
        key(context=((a, 0),)),
        key(salt="t"),
        key(source=a),
        key(source=b),
        key(runs=TokenRuns((0, 1), (10, 14), False)),
        key(runs=TokenRuns((0, 1), (10, 15), False)),
    ]
    assert len({key(), *others}) == 11


def test_reads_cover_exactly_what_is_seen_across_scattered_pages():
    store = make(pages=10)
    blocks = [store.allocate_entry([1] * 4, 0, (), capacity=4, owner=("call", i)) for i in range(5)]
    for i in (0, 2):
        store.release(blocks[i], ("call", i))
    scattered = store.allocate_entry(list(range(8)), 100, (), capacity=8, owner=HOLDER)
    assert len(scattered.slot_ranges) == 2
    reads = list(context_reads([KVSlice(scattered, 1, 6, 31)], 0, 3))
    assert [(r.slot_start, r.kv_len, r.shift, r.position) for r in reads] == [
        (scattered.slot(1), 3, 31 - 1 - 100, 31),
        (scattered.slot(4), 3, 31 - 1 - 100, 34),
    ]
    seen = dict.fromkeys(range(5, 9), 0)
    for read in causal_reads(scattered, 5, 2, 6):
        for row in range(read.q_start, read.q_end):
            seen[row] += read.kv_len + read.causal * (row - read.q_start)
    assert seen == {5: 3, 6: 4, 7: 5, 8: 6}


def test_prefix_tree_hangs_encodings_where_texts_part():
    store, tree, namespace = make(pages=64), PrefixTree(), Namespace()
    first = whole(store, [1, 2, 3, 4, 5], "first")
    assert tree.insert(namespace, first, [])
    second = whole(store, [9, 8], "second", start=3)
    assert tree.insert(namespace, second, [1, 2, 3])
    assert [(s.entry, s.token_start, s.num_tokens, s.position) for s in tree.match(namespace, [1, 2, 3, 9, 8, 7])] == [
        (first, 0, 3, 0),
        (second, 0, 2, 3),
    ]
    assert sum(s.num_tokens for s in tree.match(namespace, [1, 2, 3, 4, 9])) == 4
    assert tree.match(namespace, [2]) == []
    tree.check()
    repeat = whole(store, [4, 5, 6], "repeat", start=3)  # its first two tokens are known already
    assert tree.insert(namespace, repeat, [1, 2, 3])
    assert [(s.entry, s.token_start, s.num_tokens) for s in tree.match(namespace, [1, 2, 3, 4, 5, 6])] == [
        (first, 0, 5),
        (repeat, 2, 1),
    ]
    assert not tree.insert(namespace, whole(store, [9], "nothing new", start=3), [1, 2, 3])
    tree.check()
    for entry in (repeat, second, first):
        tree.remove(entry)
    assert tree.match(namespace, [1, 2, 3]) == []
    tree.check()


def test_prefixes_hang_deeper_than_calls_may_nest():
    depth = 60
    store = make(pages=2 * depth)
    tree, namespace = store.prefix_tree, Namespace()
    tokens = list(range(depth))
    chain = [whole(store, [token], str(token), start=token) for token in tokens]
    with limit_recursion(depth):
        for token, entry in enumerate(chain):
            assert tree.insert(namespace, entry, tokens[:token])
        assert [kv_slice.entry for kv_slice in tree.match(namespace, [*tokens, 99])] == chain
        descendants = list(tree.descendants(chain[0]))
        assert descendants == chain[1:] and all(entry.owners for entry in descendants)
        for entry in chain[1:]:
            store.release(entry, HOLDER)
        assert not any(entry.owners for entry in tree.descendants(chain[0]))
        store._delete(chain[0])
    assert store.stats["num_free_pages"] == 2 * depth
    store.check()
