"""Several threads on a tiny cache, with pins that expire, copies that fail, and files that are damaged, all at once.

Nothing may hang, nothing may be lost, and every message says what it says on a roomy engine.
"""

import random
import threading

import tiny
from graphs import Node, graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import SamplingParams
from choreograph.errors import CacheFull, CallError, CallFailed
from choreograph.kv.transfers import ThreadMover, Transfer

LIMIT = 120.0  # seconds for a thread that should take one


class FailingMover(ThreadMover):
    """Breaks some transfers at a layer of theirs."""

    def __init__(self, pick: random.Random, share: float) -> None:
        super().__init__()
        self._pick, self._share = pick, share

    def start(self, transfer: Transfer) -> None:
        if self._pick.random() < self._share:
            copy_layer, at = transfer._copy_layer, self._pick.randrange(transfer.layers)

            def breaking(layer: int) -> None:
                if layer == at:
                    raise OSError("the link is down")
                copy_layer(layer)

            transfer._copy_layer = breaking
        super().start(transfer)


def program(engine, nodes: list[Node], pick: random.Random, seed: int) -> list[list[int] | None]:
    """The tokens of every call of a graph that was not refused; pins and releases on the way change none of them."""
    found: list[list[int] | None] = []
    with engine.session(seed=seed) as session:
        made = []
        for node in nodes:
            try:
                parents = [made[p] for p in node.parents]
                if None in parents:
                    raise CallError("needs what the whole cache holds")
                place = {"parents": parents, "offsets": node.offsets, "new_offset": node.start}
                if node.generated is None:
                    message = session.prefill(node.tokens, **place)
                else:
                    ways = SamplingParams(temperature=0.9, max_tokens=6)
                    message = session.decode(node.tokens, **place, sampling=ways, footer=node.footer)
                made.append(message)
                if pick.random() < 0.5:
                    message.result()
                if pick.random() < 0.3:
                    message.pin(seconds=pick.choice([0.001, 0.01]), owner=f"{seed}")
                if pick.random() < 0.2:
                    message.unpin(owner=f"{seed}")
            except (CacheFull, CallFailed, CallError) as problem:
                assert "the whole cache holds" in str(problem), problem
                made += [None] * (len(found) + 1 - len(made))
                made[-1] = None
            found.append(None)
        for index, message in enumerate(made):
            try:
                found[index] = message and message.tokens
            except (CacheFull, CallFailed) as problem:
                assert "the whole cache holds" in str(problem), problem
    return found


@given(
    programs=st.lists(graphs(most=6), min_size=2, max_size=4),
    tokens=st.sampled_from([96, 128, 192]),
    below=st.sampled_from([{"host": 4096}, {"host": 64}, {"disk": 4096}, {"host": 64, "disk": 64}]),
    eviction=st.sampled_from(["workflow", "lru", "lfu", "fifo"]),
    aware=st.booleans(),
    share=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_threads_pins_and_failing_copies_change_nothing(programs, tokens, below, eviction, aware, share, seed):
    engine = tiny.engine(tokens=tokens, page=2, eviction=eviction, aware=aware, **below)
    engine.runner.store.traffic.mover = FailingMover(random.Random(seed), share)
    results: list[list[list[int] | None] | BaseException] = [[] for _ in programs]

    def work(index: int) -> None:
        try:
            results[index] = program(engine, programs[index], random.Random(seed + index), index)
        except BaseException as problem:
            results[index] = problem

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "somebody waits for ever"
    for index, nodes in enumerate(programs):
        found = results[index]
        if isinstance(found, BaseException):
            raise found
        wanted = program(tiny.engine(tokens=8192), nodes, random.Random(seed + index), index)
        assert [pair for pair in zip(found, wanted, strict=True) if pair[0] is not None and pair[0] != pair[1]] == []
    engine.drain()
    engine.check()
    engine.clear_cache()
    counts = engine.runner.store.counts
    assert counts["free_pages"] == counts["pages"] and not engine.runner.store.pins
