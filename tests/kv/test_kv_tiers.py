"""Lower tiers: bit-equal copies, budgets, order of leaving, rollback of failed and interrupted transfers, damage."""

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from choreograph.config import CacheConfig, budget
from choreograph.errors import CacheFull, ConfigError, RoomLater
from choreograph.events import EventLog
from choreograph.kv.advice import Advice
from choreograph.kv.arena import Arena
from choreograph.kv.store import Store
from choreograph.kv.tiers import DiskTier, HostTier
from choreograph.kv.transfers import ThreadMover, Transfer, TransferFailed

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


def make(pages=8, host=None, disk=None, folder=None, eviction="lru", mover=None, clock=lambda: 0.0) -> Store:
    arena = Arena(
        pages=pages, page_size=2, layers=[(1, 4), (2, 4)], dtype=torch.bfloat16, device=torch.device("cpu"), poison=True
    )
    tiers = ([HostTier(arena, host)] if host else []) + ([DiskTier(arena, disk, folder)] if disk else [])
    return Store(arena, eviction=eviction, events=EventLog(), tiers=tiers, mover=mover or ThreadMover(), clock=clock)


def whole(store: Store, count: int, name: str, holder=MESSAGE):
    """An encoding as a finished prefill of random content leaves it, and its content."""
    encoding = store.create(list(range(count)), 0, (), capacity=count, holder=CALL)
    for tensor in (*store.arena.keys, *store.arena.values):
        tensor[encoding.slots] = torch.randn(count, *tensor.shape[1:]).bfloat16()
    encoding.scheduled = encoding.encoded = count
    store.publish(encoding, name.encode())
    if holder is not None:
        store.hold(encoding, holder)
    store.let_go(encoding, CALL)
    return encoding, store.arena.read(encoding.slots)


def settle(store: Store) -> list:
    failed: list = []
    while store.traffic.moves:
        store.wait()
        failed = store.settle()
        store.check()
    return failed


def fill(store: Store, count: int):
    """Room for `count` tokens, waiting for transfers as a scheduler does."""
    while True:
        try:
            return store.create([0] * count, 0, (), capacity=count, holder=("call", 99))
        except RoomLater:
            store.wait()
            store.settle()
            store.check()


def same(store: Store, encoding, content) -> bool:
    now = store.arena.read(encoding.slots)
    return all(torch.equal(a, b) for x, y in zip(now, content, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("below", ["host", "disk"])
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), holes=st.integers(0, 3))
def test_what_left_comes_back_bit_for_bit_wherever_its_pages_are(below, sizes, holes):
    store = make(pages=24, **{below: 64})
    apart = [store.create([0], 0, (), capacity=1, holder=("call", 50 + i)) for i in range(2 * holes)]
    for one in apart[::2]:
        store.let_go(one, ("call", 50 + apart.index(one)))
    encodings = [whole(store, size, str(i)) for i, size in enumerate(sizes)]
    big = fill(store, 2 * (24 - holes))
    assert all(e.state == below for e, _ in encodings)
    store.let_go(big, ("call", 99))
    for encoding, _ in reversed(encodings):
        store.hold(encoding, ("call", 98))
        store.load(encoding)
        assert encoding.state == "loading"
    settle(store)
    assert all(e.state == "device" and same(store, e, content) for e, content in encodings)
    store.traffic.close()


def test_states_follow_a_transfer_and_nothing_that_moves_is_a_victim():
    mover = ManualMover()
    store = make(pages=4, host=8, mover=mover)
    encoding, _ = whole(store, 8, "a")
    with pytest.raises(RoomLater):
        store.create([0] * 4, 0, (), capacity=4, holder=CALL)
    assert encoding.state == "offloading" and len(encoding.pages) == 4
    with pytest.raises(RoomLater):  # asked again, nothing starts twice
        store.create([0] * 4, 0, (), capacity=4, holder=CALL)
    assert len(mover.queue) == 1
    mover.run()
    store.settle()
    assert encoding.state == "host" and store.arena.free_pages == 4
    store.hold(encoding, CALL)
    store.load(encoding)
    assert encoding.state == "loading"
    with pytest.raises(CacheFull):
        store.create([0] * 4, 0, (), capacity=4, holder=("call", 2))
    mover.run()
    assert store.settle() == [] and encoding.state == "device"
    store.check()


def test_an_encoding_that_is_wanted_while_it_leaves_stays():
    mover = ManualMover()
    store = make(pages=4, host=8, mover=mover)
    encoding, content = whole(store, 8, "a")
    with pytest.raises(RoomLater):
        store.create([0] * 4, 0, (), capacity=4, holder=CALL)
    store.hold(encoding, ("call", 7))
    mover.run()
    store.settle()
    assert encoding.state == "device" and same(store, encoding, content)
    store.let_go(encoding, ("call", 7))
    store.create([0] * 4, 0, (), capacity=4, holder=CALL)  # it has a copy now: no transfer is needed
    assert encoding.state == "host" and not mover.queue
    store.check()


class Broken(ManualMover):
    """Breaks every transfer after one layer."""

    def run(self) -> None:
        for transfer in self.queue:
            inner = transfer._copy_layer

            def copy_layer(layer, inner=inner):
                if layer:
                    raise OSError("the cable is out")
                inner(layer)

            transfer._copy_layer = copy_layer
        super().run()


def test_a_failed_offload_leaves_the_encoding_where_it_was():
    mover = Broken()
    store = make(pages=4, host=8, mover=mover)
    encoding, content = whole(store, 8, "a")
    with pytest.raises(RoomLater):
        store.create([0] * 4, 0, (), capacity=4, holder=CALL)
    mover.run()
    assert store.settle() == []
    assert encoding.state == "device" and same(store, encoding, content) and not encoding.copies
    assert store.traffic.tiers[0].arena.free_pages == 4
    store.check()


def test_a_failed_load_gives_the_pages_back_and_names_the_encoding():
    store = make(pages=4, host=8)
    encoding, _ = whole(store, 8, "a")
    store.let_go(fill(store, 4), ("call", 99))
    store.traffic.mover = Broken()
    store.hold(encoding, CALL)
    store.load(encoding)
    step = encoding.moving
    store.traffic.mover.run()
    with pytest.raises(TransferFailed):
        step.wait_for(1)
    assert store.settle() == [encoding] and encoding.state == "dropped" and store.arena.free_pages == 4
    store.check()


def test_a_cancelled_transfer_rolls_back_and_what_nobody_holds_is_gone():
    mover = ManualMover()
    store = make(pages=4, host=8, mover=mover)
    encoding, _ = whole(store, 8, "a")
    encoding.reusable = False
    with pytest.raises(RoomLater):
        store.create([0] * 4, 0, (), capacity=4, holder=CALL)
    store.let_go(encoding, MESSAGE)
    assert encoding.state == "offloading"
    mover.run()
    store.settle()
    assert store.counts["free_pages"] == 4 and store.find(b"a") is None
    store.check()


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_file_is_found_out(damage, tmp_path):
    store = make(pages=4, disk=8, folder=tmp_path)
    encoding, _ = whole(store, 8, "a")
    store.let_go(fill(store, 4), ("call", 99))
    file = encoding.copies["disk"].file
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content if damage == "flip" else content[:-5])
    store.hold(encoding, CALL)
    store.load(encoding)
    assert settle(store) == [encoding] and encoding.state == "dropped" and not encoding.copies
    assert store._events.counts["failed_transfer"] == 1


def test_a_transfer_that_cannot_be_settled_takes_no_other_with_it(monkeypatch):
    mover = ManualMover()
    store = make(pages=4, host=16, mover=mover)
    encodings = [whole(store, 2, name)[0] for name in "abc"]
    for encoding in encodings:
        store.traffic.offload(encoding, store.traffic.tiers[0])
    mover.run()
    with monkeypatch.context() as broken:
        broken.setattr(store._events, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.settle()
    assert len(store.traffic.moves) == 2
    store.check()
    store.settle()
    assert [encoding.state for encoding in encodings[1:]] == ["host", "host"] and not store.traffic.moves
    store.check()


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_host_memory_gives_to_disk_and_disk_to_nothing(tmp_path):
    store = make(pages=4, host=8, disk=8, folder=tmp_path)
    names = "abcde"
    encodings = {}
    for name in names:
        fill_room = store.arena.free_pages < 2
        if fill_room:
            store.let_go(fill(store, 4), ("call", 99))
        encodings[name] = whole(store, 4, name)[0]
    store.let_go(fill(store, 8), ("call", 99))
    settle(store)
    assert {name: e.state for name, e in encodings.items()} == {
        "a": "dropped", "b": "disk", "c": "disk", "d": "host", "e": "host"
    }  # fmt: skip
    assert store.find(b"a") is encodings["a"]  # a message holds it: it can be rebuilt
    store.clear_idle()
    store.check()


def test_what_varies_and_nobody_holds_gets_no_copy():
    store = make(pages=4, host=8, eviction="workflow")
    fixed, _ = whole(store, 4, "fixed", holder=None)
    suffix, _ = whole(store, 4, "suffix", holder=None)
    fixed.group = suffix.group = "agent"
    store.counsel.take("w", Advice({b"fixed": 5.0}, varying=frozenset({"agent"})))
    fill(store, 4)
    assert store.find(b"suffix") is None and fixed.state == "device"
    store.check()


def test_advice_of_several_sources_counts_by_the_soonest_and_can_be_taken_back():
    store = make(pages=4, eviction="workflow")
    whole(store, 4, "a", holder=None), whole(store, 4, "b", holder=None)
    store.counsel.take("one", Advice({b"a": 9.0, b"b": 3.0}))
    store.counsel.take("two", Advice({b"a": 1.0}))
    fill(store, 4)
    assert store.find(b"a") is not None and store.find(b"b") is None
    store.counsel.take("two", None)
    assert store.counsel.facts(store.find(b"a")).steps == 9.0


def test_what_varies_is_worth_something_while_a_message_names_it():
    store = make(pages=4, host=16, eviction="workflow")
    task, _ = whole(store, 4, "task")
    fixed, _ = whole(store, 4, "fixed", holder=None)
    task.group = fixed.group = "agent"
    store.counsel.take("w", Advice({b"fixed": 3.0}, {b"task": 1.0}, frozenset({"agent"})))
    assert (store.counsel.facts(task).steps, store.counsel.facts(task).varying) == (1.0, False)
    fill(store, 4)
    assert task.state == "device" and fixed.state == "host"
    store.let_go(task, MESSAGE)
    assert (store.counsel.facts(task).steps, store.counsel.facts(task).varying) == (None, True)
    store.check()


def test_a_prefetch_leaves_what_is_wanted_as_soon():
    """Else prompts that are wanted next would push each other out in turns."""
    mover = ManualMover()
    store = make(pages=4, host=32, eviction="workflow", mover=mover)
    one, _ = whole(store, 8, "one", holder=None)
    with pytest.raises(RoomLater):
        whole(store, 4, "x")
    mover.run(), store.settle()
    two, _ = whole(store, 8, "two", holder=None)
    assert (one.state, two.state) == ("host", "device")
    store.hold(one, MESSAGE), store.let_go(one, MESSAGE)  # used last: among equals the other one would go first
    store.counsel.take("w", Advice({b"one": 1.0, b"two": 1.0}))
    assert not store.prefetch(b"one", 4) and not mover.queue and two.state == "device"


def test_a_copy_that_a_call_waits_for_stays_in_its_tier():
    store = make(pages=4, host=4)
    wanted, _ = whole(store, 4, "wanted")
    store.let_go(fill(store, 8), ("call", 99))
    settle(store)
    assert wanted.state == "host"
    store.hold(wanted, ("plan", 2))
    other, _ = whole(store, 4, "other")
    store.let_go(fill(store, 8), ("call", 99))
    settle(store)
    assert (wanted.state, other.state) == ("host", "dropped")
    store.let_go(wanted, ("plan", 2))
    store.check()


def test_a_prefetch_takes_the_place_only_of_what_is_wanted_later():
    mover = ManualMover()
    store = make(pages=4, host=32, eviction="workflow", mover=mover)
    early, _ = whole(store, 8, "early", holder=None)
    with pytest.raises(RoomLater):
        whole(store, 4, "x")
    mover.run(), store.settle()
    late, _ = whole(store, 8, "late", holder=None)
    assert early.state == "host" and late.state == "device"
    store.counsel.take("w", Advice({b"early": 5.0, b"late": 2.0}))
    assert not store.prefetch(b"early", 4) and not mover.queue
    store.counsel.take("w", Advice({b"early": 1.0, b"late": 2.0}))
    assert not store.prefetch(b"early", 4)  # the room is on its way
    mover.run(), store.settle()
    assert late.state == "host"
    assert not store.prefetch(b"early", 0)  # a limit on loads at a time
    assert store.prefetch(b"early", 1) and early.state == "loading"
    assert not store.prefetch(b"early", 2)  # never two loads of one thing
    mover.run(), store.settle()
    assert early.state == "device"
    store.check()


def test_pins_have_owners_and_a_time_to_live():
    now = [0.0]
    store = make(pages=4, clock=lambda: now[0])
    encoding, _ = whole(store, 8, "a")
    store.pins.pin(encoding, "x", seconds=5.0)
    store.pins.pin(encoding, "y")
    store.pins.unpin(encoding, "somebody else")
    now[0] = 6.0
    store.settle()
    assert encoding.in_use and not store.busy
    with pytest.raises(CacheFull):
        store.create([0], 0, (), capacity=1, holder=CALL)
    store.pins.unpin(encoding, "y")
    assert not encoding.in_use
    store.create([0], 0, (), capacity=1, holder=CALL)
    assert encoding.state == "dropped"
    store.check()


def test_budgets_are_tokens_or_bytes():
    assert budget(100, 24) == 100
    assert budget("1KiB", 24) == 42 and budget("1.5 kb", 24) == 62 and budget("2GiB", 1 << 20) == 2048
    for wrong in ("lots", 0, -1, True, "5", 1.5):
        with pytest.raises(ConfigError, match="host"):
            CacheConfig(host=wrong)
