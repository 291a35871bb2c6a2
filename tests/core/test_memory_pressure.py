"""Several threads on a tiny cache, with pins that expire, copies that fail, and releases in flight, all at once.

Nothing may hang, nothing may be lost, and every message says what it says on a roomy engine.
"""

import random
import threading

from helpers import tiny_models
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.message_graphs import Node, graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import SamplingParams
from choreograph.kv_cache.transfer import ThreadExecutor, Transfer

LIMIT = 120.0  # seconds for a thread that should take one


class FailingMover(ThreadExecutor):
    """Breaks some transfers at a layer of theirs."""

    def __init__(self, pick: random.Random, share: float) -> None:
        super().__init__()
        self._pick, self._share = pick, share

    def start(self, transfer: Transfer) -> None:
        if self._pick.random() < self._share:
            copy_layer, at = transfer.copy_layer, self._pick.randrange(transfer.layers)

            def breaking(layer: int) -> None:
                if layer == at:
                    raise OSError("the link is down")
                copy_layer(layer)

            transfer.copy_layer = breaking
        super().start(transfer)


def program(engine, nodes: list[Node], mode: str, pick: random.Random, seed: int) -> list[list[int] | None]:
    """The tokens of every call of a graph; None for what was released before it was known."""
    last = {p: index for index, node in enumerate(nodes) for p in node.parents}
    with engine.session(seed=seed, mode=mode) as session:
        made, gone = [], set()
        for index, node in enumerate(nodes):
            place = {"parents": [made[p] for p in node.parents], "offsets": node.offsets, "new_offset": node.position}
            if node.generated is None:
                message = session.prefill(node.tokens, **place)
            else:
                ways = SamplingParams(temperature=0.9, max_tokens=6)
                message = session.decode(node.tokens, **place, sampling=ways, footer=node.footer)
            made.append(message)
            if pick.random() < 0.5:
                message.result()
            if pick.random() < 0.3 and (mode == "choreographed" or node.generated):
                message.pin(seconds=pick.choice([0.001, 0.01]), owner=f"{seed}")
            if pick.random() < 0.2:
                message.unpin(owner=f"{seed}")
            for number in range(index + 1):
                if last.get(number, number) <= index and pick.random() < 0.2:
                    made[number].release()
                    gone.add(number)
        return [None if number in gone else message.tokens for number, message in enumerate(made)]


@given(
    programs=st.lists(graphs(max_nodes=6), min_size=2, max_size=4),
    mode=st.sampled_from(["choreographed", "prefix"]),
    tokens=st.sampled_from([192, 256]),
    below=st.sampled_from(
        [
            {"host_capacity": 4096},
            {"host_capacity": 64},
            {"disk_capacity": 4096},
            {"host_capacity": 64, "disk_capacity": 64},
        ]
    ),
    eviction=st.sampled_from(["workflow", "lru", "lfu", "fifo"]),
    aware=st.booleans(),
    share=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=many(40), deadline=None)
def test_threads_pins_and_failing_copies_change_nothing(programs, mode, tokens, below, eviction, aware, share, seed):
    """Each thread has room for its worst moment: nothing may be refused."""
    engine = tiny_models.engine(tokens=tokens, page=2, eviction=eviction, aware=aware, **below)
    inspect(engine).offload_manager.executor = FailingMover(random.Random(seed), share)
    results: list[list[list[int] | None] | BaseException] = [[] for _ in programs]

    def work(index: int) -> None:
        try:
            results[index] = program(engine, programs[index], mode, random.Random(seed + index), index)
        except BaseException as exc:
            results[index] = exc

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "somebody waits for ever"
    for index, nodes in enumerate(programs):
        result = results[index]
        if isinstance(result, BaseException):
            raise result
        assert result == program(tiny_models.engine(tokens=8192), nodes, mode, random.Random(seed + index), index)
    engine.run_until_idle()
    engine.check()
    engine.clear_cache()
    counts = inspect(engine).cache_manager.stats
    assert counts["num_free_pages"] == counts["num_pages"] and not inspect(engine).pins
