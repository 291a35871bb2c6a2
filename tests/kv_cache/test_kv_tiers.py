"""Lower tiers: bit-equal copies, budgets, order of leaving, rollback of failed and interrupted transfers, damage."""

from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from choreograph.config import CacheConfig, parse_capacity
from choreograph.errors import CacheBusyError, CacheFullError, ConfigError
from choreograph.events import EventBus
from choreograph.kv_cache.hints import EvictionHints
from choreograph.kv_cache.manager import KVCacheManager
from choreograph.kv_cache.pool import KVPool
from choreograph.kv_cache.prefetch import Prefetcher
from choreograph.kv_cache.tiers import DiskTier, HostTier
from choreograph.kv_cache.transfer import ThreadExecutor, Transfer, TransferError

CALL, MESSAGE = ("call", 1), ("message", 1)


class ManualMover:
    """Runs transfers when it is told to."""

    def __init__(self) -> None:
        self.queue: deque[Transfer] = deque()

    def start(self, transfer: Transfer) -> None:
        self.queue.append(transfer)

    def run(self) -> None:
        while self.queue:
            self.queue.popleft().run()

    def wait(self, transfer: Transfer) -> None:
        self.run()

    def wait_for(self, transfer: Transfer, layer: int) -> None:
        self.run()

    def close(self) -> None:
        pass


def make(pages=8, host=None, disk=None, folder=None, eviction="lru", mover=None, clock=lambda: 0.0) -> KVCacheManager:
    arena = KVPool(
        pages=pages,
        page_size=2,
        layers=[(1, 4), (2, 4)],
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        poison_freed_pages=True,
    )
    tiers = ([HostTier(arena, host)] if host else []) + ([DiskTier(arena, disk, folder)] if disk else [])
    return KVCacheManager(
        arena, eviction=eviction, events=EventBus(), tiers=tiers, executor=mover or ThreadExecutor(), clock=clock
    )


def whole(store: KVCacheManager, count: int, name: str, holder=MESSAGE):
    """An encoding as a finished prefill of random content leaves it, and its content."""
    entry = store.allocate_entry(list(range(count)), 0, (), capacity=count, owner=CALL)
    for tensor in (*store.pool.keys, *store.pool.values):
        tensor[entry.slots] = torch.randn(count, *tensor.shape[1:]).bfloat16()
    entry.num_scheduled_tokens = entry.num_computed_tokens = count
    store.register(entry, name.encode())
    if holder is not None:
        store.acquire(entry, holder)
    store.release(entry, CALL)
    return entry, store.pool.export_slots(entry.slots)


def settle(store: KVCacheManager) -> list:
    failed: list = []
    while store.offload_manager.jobs:
        store.wait_for_space()
        failed = store.poll_transfers()
        store.check()
    return failed


def fill(store: KVCacheManager, count: int):
    """Room for `count` tokens, waiting for transfers as a scheduler does."""
    while True:
        try:
            return store.allocate_entry([0] * count, 0, (), capacity=count, owner=("call", 99))
        except CacheBusyError:
            store.wait_for_space()
            store.poll_transfers()
            store.check()


def same(store: KVCacheManager, encoding, content) -> bool:
    now = store.pool.export_slots(encoding.slots)
    return all(torch.equal(a, b) for x, y in zip(now, content, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("below", ["host", "disk"])
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), holes=st.integers(0, 3))
@settings(deadline=None)
def test_an_offloaded_entry_is_loaded_bit_for_bit_into_any_pages(below, sizes, holes):
    store = make(pages=24, **{below: 64})
    apart = [store.allocate_entry([0], 0, (), capacity=1, owner=("call", 50 + i)) for i in range(2 * holes)]
    for one in apart[::2]:
        store.release(one, ("call", 50 + apart.index(one)))
    entries = [whole(store, size, str(i)) for i, size in enumerate(sizes)]
    big = fill(store, 2 * (24 - holes))
    assert all(e.location == below for e, _ in entries)
    store.release(big, ("call", 99))
    for entry, _ in reversed(entries):
        store.acquire(entry, ("call", 98))
        store.load(entry)
        assert entry.location == "loading"
    settle(store)
    assert all(e.location == "device" and same(store, e, content) for e, content in entries)
    store.offload_manager.close()


def test_states_follow_a_transfer_and_nothing_that_moves_is_a_victim():
    mover = ManualMover()
    store = make(pages=4, host=8, mover=mover)
    entry, _ = whole(store, 8, "a")
    with pytest.raises(CacheBusyError):
        store.allocate_entry([0] * 4, 0, (), capacity=4, owner=CALL)
    assert entry.location == "offloading" and len(entry.pages) == 4
    with pytest.raises(CacheBusyError):  # asked again, nothing starts twice
        store.allocate_entry([0] * 4, 0, (), capacity=4, owner=CALL)
    assert len(mover.queue) == 1
    mover.run()
    store.poll_transfers()
    assert entry.location == "host" and store.pool.free_pages == 4
    store.acquire(entry, CALL)
    store.load(entry)
    assert entry.location == "loading"
    with pytest.raises(CacheFullError):
        store.allocate_entry([0] * 4, 0, (), capacity=4, owner=("call", 2))
    mover.run()
    assert store.poll_transfers() == [] and entry.location == "device"
    store.check()


def test_an_encoding_that_is_wanted_while_it_leaves_stays():
    mover = ManualMover()
    store = make(pages=4, host=8, mover=mover)
    entry, content = whole(store, 8, "a")
    with pytest.raises(CacheBusyError):
        store.allocate_entry([0] * 4, 0, (), capacity=4, owner=CALL)
    store.acquire(entry, ("call", 7))
    mover.run()
    store.poll_transfers()
    assert entry.location == "device" and same(store, entry, content)
    store.release(entry, ("call", 7))
    store.allocate_entry([0] * 4, 0, (), capacity=4, owner=CALL)  # it has a copy now: no transfer is needed
    assert entry.location == "host" and not mover.queue
    store.check()


def test_an_entry_that_is_copied_ahead_stays_and_its_eviction_waits_for_nothing():
    mover = ManualMover()
    store = make(pages=4, host=8, mover=mover)
    entry, content = whole(store, 8, "a")
    assert store.copy_ahead(entry) and not store.copy_ahead(entry), "one copy at a time"
    assert not store.evictable(partial=False), "nothing that moves is a victim"
    with pytest.raises(CacheBusyError):
        store.allocate_entry([0] * 8, 0, (), capacity=8, owner=("call", 2))
    with pytest.raises(CacheFullError, match="needs 5 pages"):
        store.allocate_entry([0] * 10, 0, (), capacity=10, owner=("call", 2))
    mover.run()
    store.poll_transfers()
    store.check()
    assert entry.location == "device" and same(store, entry, content)
    assert not store.copy_ahead(entry), "it has a copy"
    store.allocate_entry([0] * 4, 0, (), capacity=4, owner=("call", 2))
    assert entry.location == "host" and not mover.queue
    store.check()


def test_entries_without_a_copy_are_dropped_if_evicted_ones_are_not_offloaded():
    mover = ManualMover()
    store = make(pages=8, host=16, mover=mover)
    store.offloads_evicted = False
    copied, _ = whole(store, 8, "a", holder=None)
    dropped, _ = whole(store, 8, "b", holder=None)
    assert store.copy_ahead(copied)
    mover.run()
    store.poll_transfers()
    store.allocate_entry([0] * 16, 0, (), capacity=16, owner=CALL)
    assert copied.location == "host" and store.lookup(b"a") is copied
    assert dropped.location == "dropped" and store.lookup(b"b") is None and not mover.queue
    store.check()


class Broken(ManualMover):
    """Breaks every transfer after one layer."""

    def run(self) -> None:
        for transfer in self.queue:
            inner = transfer.copy_layer

            def copy_layer(layer, inner=inner):
                if layer:
                    raise OSError("the cable is out")
                inner(layer)

            transfer.copy_layer = copy_layer
        super().run()


def test_a_failed_offload_leaves_the_encoding_where_it_was():
    mover = Broken()
    store = make(pages=4, host=8, mover=mover)
    entry, content = whole(store, 8, "a")
    with pytest.raises(CacheBusyError):
        store.allocate_entry([0] * 4, 0, (), capacity=4, owner=CALL)
    mover.run()
    assert store.poll_transfers() == []
    assert entry.location == "device" and same(store, entry, content) and not entry.tier_copies
    assert store.offload_manager.tiers[0].pool.free_pages == 4
    store.check()


def test_a_failed_load_gives_the_pages_back_and_names_the_encoding():
    store = make(pages=4, host=8)
    entry, _ = whole(store, 8, "a")
    store.release(fill(store, 4), ("call", 99))
    store.offload_manager.executor = Broken()
    store.acquire(entry, CALL)
    store.load(entry)
    step = entry.transfer
    store.offload_manager.executor.run()
    with pytest.raises(TransferError):
        step.wait_for(1)
    assert store.poll_transfers() == [entry] and entry.location == "dropped" and store.pool.free_pages == 4
    store.check()


def test_a_cancelled_transfer_rolls_back_and_what_nobody_holds_is_gone():
    mover = ManualMover()
    store = make(pages=4, host=8, mover=mover)
    entry, _ = whole(store, 8, "a")
    store._unregister(entry)
    with pytest.raises(CacheBusyError):
        store.allocate_entry([0] * 4, 0, (), capacity=4, owner=CALL)
    store.release(entry, MESSAGE)
    assert entry.location == "offloading"
    mover.run()
    store.poll_transfers()
    assert store.stats["num_free_pages"] == 4 and store.lookup(b"a") is None
    store.check()


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "swapped", "older format"])
def test_a_damaged_file_is_found_out(damage, tmp_path):
    store = make(pages=8, disk=16, folder=tmp_path)
    entry, _ = whole(store, 8, "a")
    other, _ = whole(store, 8, "b")
    store.release(fill(store, 16), ("call", 99))
    file = entry.tier_copies["disk"].file
    content = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "swapped":
        file.write_bytes(other.tier_copies["disk"].file.read_bytes())
    elif damage == "older format":
        save_file(
            {f"{kind}.{layer}": np.zeros((8, 4), np.uint8) for kind in ("keys", "values") for layer in (0, 1)}, file
        )
    else:
        content[-13] ^= 1
        file.write_bytes(content if damage == "flip" else content[:-5])
    store.acquire(entry, CALL)
    store.load(entry)
    assert settle(store) == [entry] and entry.location == "dropped" and not entry.tier_copies
    expected = {"flip": "checksum of layer", "cut": "truncated", "gone": "No such file", "swapped": "another KV entry"}
    assert expected.get(damage, "has no format, this version reads") in entry.storage.lost_reason
    assert store._events.counts["failed_transfer"] == 1


def test_a_transfer_that_cannot_be_settled_takes_no_other_with_it(monkeypatch):
    mover = ManualMover()
    store = make(pages=4, host=16, mover=mover)
    entries = [whole(store, 2, name)[0] for name in "abc"]
    for entry in entries:
        store.offload_manager.offload(entry, store.offload_manager.tiers[0])
    mover.run()
    with monkeypatch.context() as broken:
        broken.setattr(store._events, "emit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.poll_transfers()
    assert len(store.offload_manager.jobs) == 2
    store.check()
    store.poll_transfers()
    assert [entry.location for entry in entries[1:]] == ["host", "host"] and not store.offload_manager.jobs
    store.check()


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_host_memory_gives_to_disk_and_disk_to_nothing(tmp_path):
    store = make(pages=4, host=8, disk=8, folder=tmp_path)
    names = "abcde"
    entries = {}
    for name in names:
        fill_room = store.pool.free_pages < 2
        if fill_room:
            store.release(fill(store, 4), ("call", 99))
        entries[name] = whole(store, 4, name)[0]
    store.release(fill(store, 8), ("call", 99))
    settle(store)
    assert {name: e.location for name, e in entries.items()} == {
        "a": "dropped", "b": "disk", "c": "disk", "d": "host", "e": "host"
    }  # fmt: skip
    assert store.lookup(b"a") is entries["a"]  # a message holds it: it can be rebuilt
    store.evict_unreferenced()
    store.check()


def test_an_unreferenced_ephemeral_entry_is_not_offloaded():
    store = make(pages=4, host=8, eviction="workflow")
    fixed, _ = whole(store, 4, "fixed", holder=None)
    suffix, _ = whole(store, 4, "suffix", holder=None)
    for entry in (fixed, suffix):
        store.hints.set_agent(entry, "agent")
    store.hints.update("w", EvictionHints({b"fixed": 5.0}, ephemeral_groups=frozenset({"agent"})))
    fill(store, 4)
    assert store.lookup(b"suffix") is None and fixed.location == "device"
    store.check()


def test_advice_of_several_sources_counts_by_the_soonest_and_can_be_taken_back():
    store = make(pages=4, eviction="workflow")
    whole(store, 4, "a", holder=None), whole(store, 4, "b", holder=None)
    store.hints.update("one", EvictionHints({b"a": 9.0, b"b": 3.0}))
    store.hints.update("two", EvictionHints({b"a": 1.0}))
    fill(store, 4)
    assert store.lookup(b"a") is not None and store.lookup(b"b") is None
    store.hints.update("two", None)
    assert store.hints.candidate(store.lookup(b"a")).steps_to_execution == 9.0


def test_what_varies_is_worth_something_while_a_message_names_it():
    store = make(pages=4, host=16, eviction="workflow")
    task, _ = whole(store, 4, "task")
    fixed, _ = whole(store, 4, "fixed", holder=None)
    for entry in (task, fixed):
        store.hints.set_agent(entry, "agent")
    store.hints.update("w", EvictionHints({b"fixed": 3.0}, {b"task": 1.0}, frozenset({"agent"})))
    assert (store.hints.candidate(task).steps_to_execution, store.hints.candidate(task).ephemeral) == (1.0, False)
    fill(store, 4)
    assert task.location == "device" and fixed.location == "host"
    store.release(task, MESSAGE)
    assert (store.hints.candidate(task).steps_to_execution, store.hints.candidate(task).ephemeral) == (None, True)
    store.check()


def prefetch(store: KVCacheManager, prefetcher: Prefetcher, name: bytes, max_loads: int) -> bool:
    """Ask for a part, and return whether its load was started."""
    before = store.offload_manager.num_loads
    prefetcher.update("w", [name], max_loads)
    prefetcher.run()
    return store.offload_manager.num_loads > before


def test_a_prefetch_evicts_nothing_unless_enough_can_be_evicted():
    mover = ManualMover()
    store = make(pages=8, host=32, eviction="workflow", mover=mover)
    prefetcher = Prefetcher(store, EventBus())
    large, _ = whole(store, 16, "large", holder=None)
    with pytest.raises(CacheBusyError):
        whole(store, 4, "x")
    mover.run(), store.poll_transfers()
    soon, _ = whole(store, 12, "soon", holder=None)
    late, _ = whole(store, 4, "late", holder=None)
    store.hints.update("w", EvictionHints({b"large": 1.0, b"soon": 1.0, b"late": 5.0}))
    assert not prefetch(store, prefetcher, b"large", 4) and not mover.queue
    assert (large.location, soon.location, late.location) == ("host", "device", "device")
    assert not prefetcher.is_pending  # until pages become usable, or other parts are asked for
    store.hints.update("w", EvictionHints({b"large": 1.0, b"soon": 6.0, b"late": 5.0}))
    assert not prefetch(store, prefetcher, b"large", 4)  # the room is on its way
    mover.run(), store.poll_transfers()
    assert (soon.location, late.location) == ("host", "host")
    assert prefetcher.is_pending and prefetch(store, prefetcher, b"large", 4)
    mover.run(), store.poll_transfers()
    store.check()


def test_a_prefetch_leaves_what_is_wanted_as_soon():
    """Else prompts that are wanted next would push each other out in turns."""
    mover = ManualMover()
    store = make(pages=4, host=32, eviction="workflow", mover=mover)
    prefetcher = Prefetcher(store, EventBus())
    one, _ = whole(store, 8, "one", holder=None)
    with pytest.raises(CacheBusyError):
        whole(store, 4, "x")
    mover.run(), store.poll_transfers()
    two, _ = whole(store, 8, "two", holder=None)
    assert (one.location, two.location) == ("host", "device")
    store.acquire(one, MESSAGE), store.release(one, MESSAGE)  # used last: among equals the other one would go first
    store.hints.update("w", EvictionHints({b"one": 1.0, b"two": 1.0}))
    assert not prefetch(store, prefetcher, b"one", 4) and not mover.queue and two.location == "device"


def test_a_copy_that_a_call_waits_for_stays_in_its_tier():
    store = make(pages=4, host=4)
    expected, _ = whole(store, 4, "wanted")
    store.release(fill(store, 8), ("call", 99))
    settle(store)
    assert expected.location == "host"
    store.acquire(expected, ("plan", 2))
    other, _ = whole(store, 4, "other")
    store.release(fill(store, 8), ("call", 99))
    settle(store)
    assert (expected.location, other.location) == ("host", "dropped")
    store.release(expected, ("plan", 2))
    store.check()


def test_a_prefetch_takes_the_place_only_of_what_is_wanted_later():
    mover = ManualMover()
    store = make(pages=4, host=32, eviction="workflow", mover=mover)
    prefetcher = Prefetcher(store, EventBus())
    early, _ = whole(store, 8, "early", holder=None)
    with pytest.raises(CacheBusyError):
        whole(store, 4, "x")
    mover.run(), store.poll_transfers()
    late, _ = whole(store, 8, "late", holder=None)
    assert early.location == "host" and late.location == "device"
    store.hints.update("w", EvictionHints({b"early": 5.0, b"late": 2.0}))
    assert not prefetch(store, prefetcher, b"early", 4) and not mover.queue
    store.hints.update("w", EvictionHints({b"early": 1.0, b"late": 2.0}))
    assert not prefetch(store, prefetcher, b"early", 4)  # the room is on its way
    mover.run(), store.poll_transfers()
    assert late.location == "host"
    assert not prefetch(store, prefetcher, b"early", 0)  # a limit on loads at a time
    assert prefetch(store, prefetcher, b"early", 1) and early.location == "loading"
    assert not prefetch(store, prefetcher, b"early", 2)  # never two loads of one thing
    mover.run(), store.poll_transfers()
    assert early.location == "device"
    store.check()


def test_pins_have_owners_and_a_time_to_live():
    now = [0.0]
    store = make(pages=4, clock=lambda: now[0])
    entry, _ = whole(store, 8, "a")
    store.pins.pin(entry, "x", seconds=5.0)
    store.pins.pin(entry, "y")
    store.pins.unpin(entry, "somebody else")
    now[0] = 6.0
    store.poll_transfers()
    assert entry.in_use and not store.has_pending
    with pytest.raises(CacheFullError):
        store.allocate_entry([0], 0, (), capacity=1, owner=CALL)
    store.pins.unpin(entry, "y")
    assert not entry.in_use
    store.allocate_entry([0], 0, (), capacity=1, owner=CALL)
    assert entry.location == "dropped"
    store.check()


def test_budgets_are_tokens_or_bytes():
    assert parse_capacity(100, 24) == 100
    assert (
        parse_capacity("1KiB", 24) == 42
        and parse_capacity("1.5 kb", 24) == 62
        and parse_capacity("2GiB", 1 << 20) == 2048
    )
    for wrong in ("lots", 0, -1, True, "5", 1.5):
        with pytest.raises(ConfigError, match="host"):
            CacheConfig(host_capacity=wrong)
