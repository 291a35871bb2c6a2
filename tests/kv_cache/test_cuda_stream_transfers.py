"""Transfers on a stream of their own, over stand-ins whose streams run in any order that their events allow."""

import random
import threading
from collections import deque
from contextlib import contextmanager

import pytest
import torch
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph.kv_cache.transfer import CudaStreamExecutor, ThreadExecutor, Transfer, TransferError, make_executor

LAYERS = 4


class Streams:
    """What CudaStreamExecutor uses of torch.cuda. Launched work waits until a stream is run."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.lock = threading.RLock()
        self.all: list[Stream] = []
        self.Stream = lambda device: Stream(self)
        self.computing = Stream(self)
        self.local = threading.local()

    def current_stream(self, device=None):
        return getattr(self.local, "stream", self.computing)

    @contextmanager
    def stream(self, stream):
        self.local.stream = stream
        yield
        del self.local.stream

    def launch(self, work) -> None:
        with self.lock:
            self.current_stream().queue.append(work)

    def run(self, until) -> None:
        """One piece of work after the other, of any stream whose next piece may go."""
        while not until():
            with self.lock:
                ready = [s for s in self.all if s.queue and not s.blocked]
                if ready:
                    self.chance.choice(ready).queue.popleft()()


class Stream:
    def __init__(self, world: Streams) -> None:
        self.world, self.queue = world, deque()
        world.all.append(self)

    @property
    def blocked(self) -> bool:
        first = self.queue[0]
        return isinstance(first, Wait) and not first.event["done"]

    def record_event(self):
        event = {"done": False}
        with self.world.lock:
            self.queue.append(lambda: event.update(done=True))
        return event

    def wait_event(self, event) -> None:
        with self.world.lock:
            self.queue.append(Wait(event))

    def synchronize(self) -> None:
        self.world.run(until=lambda: not self.queue)


class Wait:
    def __init__(self, event) -> None:
        self.event = event

    def __call__(self) -> None:
        pass


@given(seed=st.integers(0, 1000), count=st.integers(1, 4))
@settings(max_examples=many(30), deadline=None)
def test_copies_start_behind_what_was_computed_and_steps_read_what_has_arrived(seed, count):
    world = Streams(seed)
    mover = CudaStreamExecutor(torch.device("cuda"), 0.01, cuda=world)
    sources, targets, read = [[[0] * LAYERS for _ in range(count)] for _ in range(3)]
    transfers = []
    for number in range(count):

        def compute(layer, number=number):
            sources[number][layer] = 100 * number + layer + 1

        def copy(layer, number=number):
            targets[number][layer] = sources[number][layer]

        for layer in range(LAYERS):
            world.launch(lambda layer=layer, compute=compute: compute(layer))
        transfers.append(Transfer("loading", LAYERS, 1, lambda layer, copy=copy: world.launch(lambda: copy(layer))))
        mover.start(transfers[-1])
    for layer in range(LAYERS):
        for number, transfer in enumerate(transfers):
            mover.wait_for(transfer, layer)
            world.launch(lambda n=number, layer=layer: read[n].__setitem__(layer, targets[n][layer]))
    for transfer in transfers:
        mover.wait(transfer)
        assert transfer.error is None
    world.computing.synchronize()
    assert read == targets == [[100 * n + layer + 1 for layer in range(LAYERS)] for n in range(count)]


def test_what_a_failed_transfer_had_begun_is_over_before_its_end_is_known():
    world = Streams(0)
    mover = CudaStreamExecutor(torch.device("cuda"), 0.01, cuda=world)
    copied = []

    def copy(layer) -> None:
        if layer == 2:
            raise OSError("no such page")
        world.launch(lambda: copied.append(layer))

    transfer = Transfer("loading", LAYERS, 1, copy)
    mover.start(transfer)
    mover.wait(transfer)
    assert copied == [0, 1] and isinstance(transfer.error, OSError)
    with pytest.raises(TransferError):
        mover.wait_for(transfer, 0)


def test_the_host_has_a_thread_alone():
    assert type(make_executor(torch.device("cpu"))) is ThreadExecutor


def test_a_load_does_not_wait_for_an_offload():
    release, executor = threading.Event(), ThreadExecutor()
    offload = Transfer("offloading", 1, 1, lambda layer: release.wait(20) and None)
    load = Transfer("loading", LAYERS, 1, lambda layer: None)
    executor.start(offload)
    executor.start(load)
    executor.wait(load)
    assert not offload.is_finished
    release.set()
    executor.wait(offload)
    assert offload.error is None
    executor.close()
