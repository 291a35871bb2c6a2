"""Encodings: who holds them, how equal work is found, what is evicted first."""

import pytest
import torch
from nested import calls_nest

from choreograph.errors import CacheFull
from choreograph.events import EventLog
from choreograph.kv.arena import Arena
from choreograph.kv.encoding import Sight, content_key
from choreograph.kv.policy import Facts, by_workflow, first_in_first_out, least_frequently_used, least_recently_used
from choreograph.kv.prefix import PrefixTree
from choreograph.kv.store import Store
from choreograph.kv.view import context_reads, own_reads

HOLDER = ("call", 1)


def make(pages: int = 8, eviction: str = "lru") -> Store:
    arena = Arena(
        pages=pages, page_size=2, layers=[(1, 4)], dtype=torch.float32, device=torch.device("cpu"), poison=True
    )
    return Store(arena, eviction=eviction, events=EventLog())


def whole(store: Store, tokens: list[int], name: str, start: int = 0, context=()):
    """An encoding as a finished prefill leaves it."""
    encoding = store.create(tokens, start, context, capacity=len(tokens), holder=HOLDER)
    encoding.scheduled = encoding.encoded = len(tokens)
    store.publish(encoding, name.encode())
    return encoding


@pytest.mark.parametrize(("eviction", "gone"), [("lru", "b"), ("fifo", "a")])
def test_idle_encodings_go_in_the_order_of_the_policy(eviction, gone):
    store = make(eviction=eviction)
    encodings = {name: whole(store, [1, 2, 3, 4], name) for name in "abc"}
    for encoding in encodings.values():
        store.let_go(encoding, HOLDER)
    store.hold(encodings["a"], ("call", 2))
    store.let_go(encodings["a"], ("call", 2))
    store.create([9] * 6, 0, (), capacity=6, holder=("call", 3))
    assert {name for name in "abc" if store.find(name.encode()) is None} == {gone}
    store.check()


def test_held_encodings_are_never_evicted_and_the_error_has_the_numbers():
    store = make()
    kept = whole(store, [1] * 12, "kept")
    with pytest.raises(CacheFull, match=r"needs 3 pages of 2 tokens; 2 of 8 are free and 0 can be evicted"):
        store.create([2] * 6, 0, (), capacity=6, holder=("call", 3))
    assert store.find(b"kept") is kept
    store.check()


def test_an_unfinished_encoding_is_dropped_with_its_last_holder_and_nothing_happens_twice():
    store = make()
    encoding = store.create([1, 2, 3], 0, (), capacity=3, holder=HOLDER)
    store.let_go(encoding, ("call", 4))
    assert store.counts["held_encodings"] == 1
    store.let_go(encoding, HOLDER)
    store.let_go(encoding, HOLDER)
    assert store.counts == {"held_encodings": 0, "idle_encodings": 0, "held_pages": 0, "free_pages": 8, "pages": 8}
    store.check()


def test_policies_are_pure_orders():
    facts = [Facts(1, 1, 9, uses=2), Facts(2, 2, 3, uses=7), Facts(3, 3, 5, uses=1), Facts(4, 0, 1, uses=0, held=True)]
    assert least_recently_used(facts) == [2, 3, 1, 4]
    assert first_in_first_out(facts) == [1, 2, 3, 4]
    assert least_frequently_used(facts) == [3, 1, 2, 4]
    assert least_recently_used([]) == []


def test_by_workflow_varying_parts_go_first_and_fixed_ones_by_falling_steps():
    facts = {
        "soon": Facts(1, 1, 1, steps=1),
        "later": Facts(2, 2, 9, steps=4),
        "never": Facts(3, 3, 8, steps=float("inf")),
        "unknown": Facts(4, 4, 2),
        "unknown but held": Facts(5, 5, 1, held=True),
        "suffix": Facts(6, 6, 10, varying=True, held=True),
    }
    names = {one.id: name for name, one in facts.items()}
    order = [names[id] for id in by_workflow(facts.values())]
    assert order == ["suffix", "never", "unknown", "unknown but held", "later", "soon"]


def test_content_keys_name_relative_placement_tokens_context_and_salt():
    store = make(pages=64)
    a, b = whole(store, [1, 2], "a"), whole(store, [3], "b")

    def key(tokens=(7, 8), start=10, context=((a, 0), (b, 4)), salt="s") -> bytes:
        return content_key(salt, tokens, start, [Sight(e, 0, len(e.tokens), at) for e, at in context])

    assert key() == key(start=15, context=((a, 5), (b, 9)))
    others = [
        key(tokens=(8, 7)),
        key(start=11),
        key(context=((a, 0), (b, 5))),
        key(context=((b, 4), (a, 0))),
        key(context=((a, 0),)),
        key(salt="t"),
    ]
    assert len({key(), *others}) == 7


def test_reads_cover_exactly_what_is_seen_across_scattered_pages():
    store = make(pages=10)
    blocks = [store.create([1] * 4, 0, (), capacity=4, holder=("call", i)) for i in range(5)]
    for i in (0, 2):
        store.let_go(blocks[i], ("call", i))
    scattered = store.create(list(range(8)), 100, (), capacity=8, holder=HOLDER)
    assert len(scattered.spans) == 2
    reads = list(context_reads([Sight(scattered, 1, 6, 31)], 0, 3))
    assert [(r.lo, r.limit, r.shift, r.position) for r in reads] == [
        (scattered.slot(1), 3, 31 - 1 - 100, 31),
        (scattered.slot(4), 3, 31 - 1 - 100, 34),
    ]
    seen = dict.fromkeys(range(5, 9), 0)
    for read in own_reads(scattered, 5, 2, 6):
        for row in range(read.row0, read.row1):
            seen[row] += read.limit + read.step * (row - read.row0)
    assert seen == {5: 3, 6: 4, 7: 5, 8: 6}


def test_prefix_tree_hangs_encodings_where_texts_part():
    store, tree = make(pages=64), PrefixTree()
    first = whole(store, [1, 2, 3, 4, 5], "first")
    assert tree.insert(first, [])
    second = whole(store, [9, 8], "second", start=3)
    assert tree.insert(second, [1, 2, 3])
    assert [(s.encoding, s.first, s.count, s.start) for s in tree.match([1, 2, 3, 9, 8, 7])] == [
        (first, 0, 3, 0),
        (second, 0, 2, 3),
    ]
    assert sum(s.count for s in tree.match([1, 2, 3, 4, 9])) == 4
    assert tree.match([2]) == []
    tree.check()
    repeat = whole(store, [4, 5, 6], "repeat", start=3)  # its first two tokens are known already
    assert tree.insert(repeat, [1, 2, 3])
    assert [(s.encoding, s.first, s.count) for s in tree.match([1, 2, 3, 4, 5, 6])] == [(first, 0, 5), (repeat, 2, 1)]
    assert not tree.insert(whole(store, [9], "nothing new", start=3), [1, 2, 3])
    tree.check()
    for encoding in (repeat, second, first):
        tree.forget(encoding)
    assert tree.match([1, 2, 3]) == []
    tree.check()


def test_prefixes_hang_deeper_than_calls_may_nest():
    depth = 60
    store = make(pages=2 * depth)
    store.tree("one", grow=True)
    tokens = list(range(depth))
    chain = [whole(store, [token], str(token), start=token) for token in tokens]
    with calls_nest(depth):
        for token, encoding in enumerate(chain):
            assert store.tree("one").insert(encoding, tokens[:token])
        assert [sight.encoding for sight in store.tree("one").match([*tokens, 99])] == chain
        assert not store._hangs_free(chain[0])
        for encoding in chain[1:]:
            store.let_go(encoding, HOLDER)
        assert store._hangs_free(chain[0])
        store._forget(chain[0])
    assert store.counts["free_pages"] == 2 * depth
    store.check()
