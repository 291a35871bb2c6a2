"""Memory under pressure, end to end: whatever leaves the device, by whichever policy, results are the same."""

import atexit
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers import message_graphs, tiny_models
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.recursion_limit import limit_recursion
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import SamplingParams
from choreograph.errors import CacheFullError, ChoreographError, InvalidRequestError, RequestFailedError
from choreograph.kv_cache.transfer import ThreadExecutor, Transfer

GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=0)


def run(engine, nodes, mode="choreographed"):
    """Every message of a graph, read in an order that goes back and forth; then what each leaves to a reader."""
    with engine.session(mode=mode, seed=3) as session:
        made = []
        for node in nodes:
            parents = [made[i] for i in node.parents]
            if node.generated is None:
                made.append(session.prefill(node.tokens, parents, node.offsets, node.position))
            else:
                made.append(
                    session.decode(
                        node.tokens, parents, node.offsets, node.position, sampling=GREEDY, footer=node.footer
                    )
                )
            if len(made) % 2:
                made[len(made) // 2].result()
                engine.check()
        readers = [session.decode([1], [message], sampling=GREEDY) for message in made]
        result = [(m.tokens, [one.logprob for one in m.logprobs]) for m in readers]
        engine.check()
        return [m.tokens for m in made], result


def close(one, other):
    assert one[0] == other[0]
    for (tokens, logprobs), (tokens2, logprobs2) in zip(one[1], other[1], strict=True):
        assert tokens == tokens2
        assert logprobs == pytest.approx(logprobs2, abs=2e-4)


@pytest.mark.parametrize(
    "below",
    [
        {},
        {"host_capacity": 40},
        {"disk_capacity": 60},
        {"host_capacity": 24, "disk_capacity": 24},
        {"host_capacity": 4096},
    ],
    ids=str,
)
@given(
    nodes=message_graphs.graphs(max_nodes=9),
    tokens=st.integers(12, 40),
    eviction=st.sampled_from(["workflow", "lru", "lfu", "fifo"]),
    aware=st.booleans(),
    mode=st.sampled_from(["choreographed", "choreographed", "prefix"]),
)
@settings(max_examples=many(12), deadline=None)
def test_results_are_the_same_under_every_policy_budget_and_tier(below, nodes, tokens, eviction, aware, mode):
    expected = run(tiny_models.engine(page=2), nodes, mode)
    engine = tiny_models.engine(tokens=4 * tokens, page=2, eviction=eviction, aware=aware, **below)
    try:
        result = run(engine, nodes, mode)
    except (CacheFullError, RequestFailedError, InvalidRequestError) as exc:  # refused, or a child of what was
        text = str(exc)
        assert "needs" in text
        kept = below.get("host_capacity") == 4096  # else a full tier drops too
        assert "the whole cache holds" in text or (not kept and crowded_out(nodes, 2 * tokens)), text
        return
    close(result, expected)


def crowded_out(nodes, pages) -> bool:
    """Whether some call sees what cannot be rebuilt beside the rest of what it sees, in pages of two tokens."""

    def own(node) -> int:
        made = 0 if node.generated is None else GREEDY.max_tokens + len(node.footer)
        return -(-(len(node.tokens) + made) // 2)

    def rebuilds(index: int) -> int:
        """The most that it takes to compute a node or anything behind it."""
        parents = nodes[index].parents
        alone = own(nodes[index]) + sum(own(nodes[p]) for p in parents)
        return max([alone, *map(rebuilds, parents)])

    return any(
        max(map(rebuilds, node.parents)) + sum(own(nodes[p]) for p in node.parents) > pages
        for node in nodes
        if node.parents
    )


def chain(session, length: int, size: int = 3):
    """Each message sees only the one before."""
    messages = [session.prefill(list(range(size)))]
    for index in range(1, length):
        messages.append(session.prefill([(index + k) % 50 for k in range(size)], [messages[-1]], [0], size))
    return messages


def test_however_deep_its_dropped_ancestors_are_a_message_returns():
    engine, roomy = tiny_models.engine(tokens=24, page=4), tiny_models.engine(tokens=8192)
    with engine.session() as session, roomy.session() as other, limit_recursion(250):
        messages, expected = chain(session, 300), chain(other, 300)
        engine.run_until_idle()
        assert sum(m.kv_location == "device" for m in messages) < 7
        before = engine.events.counts["recomputing"]
        result, right = messages[-5].export_kv(), expected[-5].export_kv()
        for (keys, values), (k, v) in zip(result.layers, right.layers, strict=True):
            torch.testing.assert_close(keys, k, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(values, v, atol=1e-4, rtol=1e-4)
        assert engine.events.counts["recomputing"] - before <= 300
        assert messages[150].kv_location == "dropped" and messages[150].wait_encoded() is messages[150]
        engine.check()


def test_a_released_ancestor_is_rebuilt_for_those_that_saw_it():
    engine, roomy = tiny_models.engine(tokens=24), tiny_models.engine()
    texts = []
    for one in (engine, roomy):
        with one.session() as session:
            root = session.prefill([1, 2, 3, 4])
            child = session.prefill([5, 6], [root]).result()
            root.release()
            for i in range(4):
                session.prefill([10 + i] * 16).result()
            texts.append(session.decode([7], [child], new_offset=9, sampling=GREEDY).tokens)
            one.check()
    assert texts[0] == texts[1]
    assert engine.events.counts["recomputing"] == 2


def test_a_request_that_never_fits_is_refused_and_one_that_does_not_fit_now_waits():
    engine = tiny_models.engine(tokens=32)
    with engine.session(seed=0) as session:
        big = [session.prefill([i] * 12) for i in range(4)]
        with pytest.raises(CacheFullError, match="24 context tokens and 16 own tokens, in whole pages 40; the whole"):
            session.decode([1] * 10, big[:2], sampling=SamplingParams(max_tokens=6)).result()
        ways = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
        readers = [session.decode([1, 2], [message], sampling=ways) for message in big]
        assert [len(reader.output_token_ids) for reader in readers] == [10] * 4
        engine.check()


def test_a_pinned_message_stays_and_the_session_gives_it_back():
    engine = tiny_models.engine(tokens=32, host_capacity=64)
    with engine.session() as session:
        kept = session.prefill([1] * 12).pin()
        also = session.prefill([2] * 12).pin(owner="a")
        with pytest.raises(CacheFullError):
            session.prefill([3] * 12).result()
        also.unpin(owner="b")
        assert also.kv_location == "device"
        also.unpin(owner="a")
        session.prefill([3] * 12).result()
        assert (kept.kv_location, also.kv_location) == ("device", "host")
        with pytest.raises(ChoreographError, match="seconds=0"):
            kept.pin(0)
        with pytest.raises(ChoreographError, match="seconds=nan"):
            kept.pin(math.nan)
    engine.check()
    assert engine.stats().num_referenced_pages == 0 and not inspect(engine).pins


@pytest.mark.parametrize("seconds", [None, math.inf])
def test_nobody_waits_for_a_pin_without_an_end(seconds):
    engine = tiny_models.engine(tokens=32)
    with engine.session() as session:
        kept = session.prefill([1] * 24).pin(seconds)
        assert inspect(engine).pins.next_expiry is None
        with pytest.raises(CacheFullError):
            session.prefill([2] * 24).result()
        assert kept.kv_location == "device"


def test_a_call_waits_for_a_pin_that_expires():
    engine = tiny_models.engine(tokens=32)
    with engine.session() as session:
        session.prefill([1] * 24).pin(seconds=0.05)
        assert session.prefill([2] * 24).result().kv_location == "device"


class Slow(ThreadExecutor):
    """Transfers begin when they are let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def start(self, transfer: Transfer) -> None:
        copy_layer = transfer.copy_layer

        def gated(layer: int) -> None:
            self.gate.wait(10)
            copy_layer(layer)

        transfer.copy_layer = gated
        super().start(transfer)


@pytest.mark.parametrize("aware", [True, False])
def test_a_call_whose_context_is_loading_is_passed_over_for_a_ready_one(aware):
    engine = tiny_models.engine(tokens=80, host_capacity=96, aware=aware)
    store = inspect(engine).cache_manager
    with engine.session() as session:
        away = session.prefill([1] * 24).result()
        big = session.prefill([2] * 76).result()
        assert away.kv_location == "host"
        big.release()
        store.offload_manager.executor = slow = Slow()
        late = session.decode([3], [away], sampling=GREEDY)
        soon = session.decode([4], sampling=GREEDY)
        opener = threading.Timer(0.2 if aware else 0.05, slow.gate.set)
        opener.start()
        if aware:
            engine.step()
            assert (
                away.kv_location == "loading" and inspect(soon).first_token_time and not inspect(late).first_token_time
            )
        else:
            engine.step()
            assert inspect(late).first_token_time  # the step waited for the load, layer by layer
        opener.join()
        assert late.result().usage.cached_tokens == 24
        engine.check()


def test_a_damaged_file_or_a_broken_transfer_leads_to_a_rebuild_and_the_same_result(tmp_path):
    texts = []
    for damage in (False, True):
        engine = tiny_models.engine(tokens=40, disk_capacity=96, disk_dir=tmp_path)
        with engine.session() as session:
            root = session.prefill([1, 2, 3, 4] * 5)
            child = session.prefill([9] * 8, [root]).result()
            session.prefill([7] * 40).release() or session.prefill([8] * 40).result().release()
            assert (root.kv_location, child.kv_location) == ("disk", "disk")
            if damage:
                file = inspect(root).entry.tier_copies["disk"].file
                file.write_bytes(file.read_bytes()[:-4] + b"oops")
            message = session.decode([5], [root, child], sampling=GREEDY)
            behind = session.prefill([6], [child])
            texts.append((message.tokens, behind.result().length))
            engine.check()
        assert engine.events.counts["failed_transfer"] == damage
        assert engine.events.counts["recomputing"] == damage
        assert not list(tmp_path.iterdir()) or inspect(engine).offload_manager.close() is None
    assert texts[0] == texts[1]


def test_an_engine_takes_its_files_with_it(tmp_path):
    engine = tiny_models.engine(tokens=40, disk_capacity=96, disk_dir=tmp_path)
    with engine.session() as session:
        session.prefill([1] * 32).result()
        session.prefill([2] * 32).result()
        assert list(tmp_path.rglob("*.safetensors"))
    engine.close()
    assert not list(tmp_path.iterdir())


def test_an_engine_that_is_closed_while_another_thread_computes_leaves_no_files(tmp_path):
    engine = tiny_models.engine(tokens=40, disk_capacity=96, disk_dir=tmp_path)
    closing = threading.Thread(target=engine.close)
    with engine.session() as session:
        first, second = (session.prefill([i] * 32) for i in range(2))
        with inspect(engine).lock:
            first.result()
            closing.start()
            closing.join(0.1)
            second.result()
            assert inspect(engine).is_closed and list(tmp_path.iterdir())  # what was sent away meanwhile is well
            inspect(engine).poll_transfers()
            assert not engine.events.counts["failed_transfer"]
        closing.join(20)
        assert not list(tmp_path.iterdir()) and not inspect(engine).offload_manager.tiers[0].fits_when_empty(1)
        assert len(first.pin().export_kv().layers) == 2
    engine.check()


def test_prefix_mode_finds_prefixes_that_left():
    engine, roomy = tiny_models.engine(tokens=48, host_capacity=200), tiny_models.engine()
    texts = []
    for one in (engine, roomy):
        with one.session(mode="prefix") as session:
            root = session.prefill([1, 2, 3, 4] * 6)
            for i in range(3):
                texts.append((one, session.decode([5, i], [root], sampling=GREEDY).tokens))
                session.decode([30 + i] * 30, sampling=GREEDY).result()
        one.check()
    assert [t for one, t in texts if one is engine] == [t for one, t in texts if one is roomy]
    assert engine.events.counts["loaded"]


def test_prefix_mode_finds_what_was_generated_when_it_has_left():
    engine = tiny_models.engine(tokens=48, host_capacity=200)
    with engine.session(mode="prefix") as session:
        said = session.decode([1, 2, 3, 4], sampling=GREEDY).result()
        session.decode([30] * 40, sampling=GREEDY).result()
        assert inspect(said).entry.location == "host"
        assert session.decode([5], [said], sampling=GREEDY).result().usage.cached_tokens == 4 + 6 - 1


TWO = SamplingParams(temperature=0, max_tokens=2)


@pytest.mark.parametrize("below", [{}, {"host_capacity": 16}])
@pytest.mark.parametrize("first", [True, False])
def test_what_was_gathered_makes_way_for_a_rebuild_that_needs_its_room(below, first):
    """D saw nearly all of the cache; beside X, which waits for the same call, it cannot be rebuilt."""

    def answer(engine, small: bool):
        with engine.session(seed=0) as s:
            seen = [s.prefill([i] * 8) for i in range(4)]
            d = s.prefill([9] * 8, seen).wait_encoded()
            x = s.prefill([20] * 8).wait_encoded()
            s.prefill([21] * 32).wait_encoded().release()
            s.decode([1], [x], sampling=TWO).result()
            assert not small or (d.kv_location != "device" and x.kv_location == "device")
            return s.decode([1], [d, x] if first else [x, d], sampling=TWO).tokens

    assert answer(tiny_models.engine(tokens=40, **below), True) == answer(tiny_models.engine(), False)


@pytest.mark.parametrize("tokens", range(120, 140, 4))
def test_what_stands_alone_is_rebuilt_after_what_needs_most_room(tokens):
    """Or each would drive the other out again, attempt by attempt, and more memory could be too little where less is
    enough."""
    engine = tiny_models.engine(tokens=tokens)
    with engine.session() as session:
        one, other, alone = session.prefill(range(60)), session.prefill([9] * 60), session.prefill([3] * 24)
        seen = session.prefill([5], [one, *(session.prefill([7, k, 1, 2, 3, 4], [other]) for k in range(2))])
        for message in session.messages:
            message.wait_encoded()
        full = session.prefill([1] * tokens)
        full.wait_encoded().release()
        assert {message.kv_location for message in (one, other, alone, seen)} == {"dropped"}
        assert session.decode([8], [alone, seen], sampling=GREEDY).finish_reason == "length"
        engine.check()


def test_two_that_cannot_be_rebuilt_beside_each_other_are_refused_and_not_tried_for_ever():
    engine = tiny_models.engine(tokens=40)
    with engine.session(seed=0) as s:
        both = []
        for number in range(2):
            seen = [s.prefill([4 * number + i] * 8) for i in range(4)]
            both.append(s.prefill([9 + number] * 8, seen).wait_encoded())
            for message in seen:
                message.release()
        s.prefill([21] * 32).wait_encoded().release()
        with pytest.raises(CacheFullError, match="needs"):
            s.decode([1], both, sampling=TWO).result()
        engine.check()


def test_a_tier_that_cannot_be_written_is_given_up_for_what_it_refused():
    engine = tiny_models.engine(tokens=40, disk_capacity=400)
    with engine.session(seed=0) as s:
        first = s.prefill([1] * 16).wait_encoded()
        shutil.rmtree(inspect(engine).offload_manager.tiers[-1].folder)
        s.prefill([2] * 32).wait_encoded()
        assert first.kv_location == "dropped" and engine.events.counts["failed_transfer"] == 1
        assert s.decode([3], [first], sampling=TWO).tokens


def stuck(path, missing_ok=False):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("how", ["unlink", "file", "folder"])
def test_a_disk_that_gives_nothing_back_leads_to_the_same_results_and_loses_no_memory(how, monkeypatch, tmp_path):
    """It cannot unlink; a folder stands where a file was; a file stands where the folder was."""
    engine, roomy = tiny_models.engine(tokens=112, disk_capacity=1024, disk_dir=tmp_path), tiny_models.engine()
    folder = inspect(engine).offload_manager.tiers[-1].folder

    def flow(engine, breaks=lambda: None):
        with engine.session(seed=1) as session:
            seen = [session.prefill([i + 1] * 24).result() for i in range(6)]
            breaks()
            answers = [session.decode([40], [message], sampling=GREEDY).output_token_ids for message in seen]
        engine.clear_cache()
        return answers

    def breaks() -> None:
        files = list(folder.glob("*.safetensors"))
        assert files
        if how == "unlink":
            monkeypatch.setattr(Path, "unlink", stuck)
        elif how == "file":
            for file in files:
                file.unlink()
                file.mkdir()
        else:
            shutil.rmtree(folder)
            folder.write_text("")

    expected = flow(roomy)
    assert flow(engine, breaks) == expected
    assert engine.events.counts["orphaned_file"]
    engine.check()
    for _ in range(3):
        assert flow(engine) == expected
        engine.check()
    monkeypatch.undo()
    assert flow(engine) == expected
    counts = inspect(engine).cache_manager.stats
    assert (
        counts["num_referenced_entries"] == counts["num_unreferenced_entries"] == 0
        and counts["num_free_pages"] == counts["num_pages"]
    )
    engine.check()


def test_a_pin_that_others_wait_for_can_be_taken_back_by_another_thread():
    engine = tiny_models.engine(tokens=40)
    with engine.session(seed=0) as s, engine.session(seed=0) as t:
        pinned = s.prefill([1] * 24)
        pinned.pin(seconds=3600)
        waiting = t.prefill([2] * 32)
        thread = threading.Thread(target=waiting.wait_encoded)
        thread.start()
        time.sleep(0.1)
        pinned.unpin()
        thread.join(60)
        assert not thread.is_alive() and waiting.kv_location == "device"


def test_equal_messages_are_pinned_each_for_itself():
    engine = tiny_models.engine()
    with engine.session() as s:
        one, two = s.prefill([1] * 8), s.prefill([1] * 8)
        one.pin()
        two.pin()
        one.unpin()
        assert inspect(two).entry.in_use
        two.unpin()
        assert not inspect(two).entry.in_use


def test_an_entry_that_a_cleared_cache_could_not_load_is_recomputed():
    engine = tiny_models.engine(tokens=40, disk_capacity=400)
    with engine.session(seed=0) as s:
        first = s.prefill([1] * 16).wait_encoded()
        s.prefill([2] * 32).wait_encoded().release()
        engine.clear_cache()
        file = next(inspect(engine).offload_manager.tiers[-1].folder.glob("*.safetensors"))
        file.write_bytes(b"x" * 50)
        answer = s.decode([3], [first], sampling=TWO)
        internals = inspect(engine)
        with internals.lock:
            internals.poll_transfers()
            internals.scheduler.schedule()  # admits the call while its context is being loaded
        engine.clear_cache()
        assert answer.tokens and engine.events.counts["recomputing"] == 1


def test_a_process_may_end_while_copies_are_under_way():
    program = (
        "import time\n"
        "from helpers import tiny_models\n"
        "from helpers.inspect_engine import inspect\n"
        "from choreograph.kv_cache import transfer\n"
        "engine = tiny_models.engine(tokens=40, host_capacity=4096)\n"
        "inspect(engine).offload_manager.executor.start(\n"
        "    transfer.Transfer('loading', 100000, 1, lambda layer: time.sleep(0.001)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=120, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr


def test_a_child_of_a_prefix_that_cannot_be_loaded_goes_with_it():
    """Both are being loaded for a call that is released; the prefix turns out to be damaged."""
    engine = tiny_models.engine(tokens=64, disk_capacity=4096)
    with engine.session(mode="prefix") as session:
        root = session.prefill([1, 2, 3, 4] * 4)
        first = session.decode([5], [root], sampling=GREEDY).result()
        second = session.decode([6] * 4, [root, first], sampling=GREEDY).result()
        session.decode([30] * 56, sampling=GREEDY).result()
        for file in inspect(engine).offload_manager.tiers[-1].folder.glob("*.safetensors"):
            file.write_bytes(b"x" * 50)
        internals, traffic = inspect(engine), inspect(engine).offload_manager
        again = session.decode([7], [root, first, second], sampling=GREEDY)
        while not traffic.num_loads:  # at first others leave
            traffic.wait()
            internals.poll_transfers()
            traffic.executor = slow = Slow()
            internals.scheduler.schedule()
            if not traffic.num_loads:
                slow.gate.set()
        assert traffic.num_loads >= 2
        again.release()
        slow.gate.set()
        engine.run_until_idle()
        while traffic.wait():
            engine.step()
        engine.check()
        assert session.decode([8], [root], sampling=GREEDY).tokens


def test_a_copy_is_taken_at_once_while_others_wait_for_a_long_pin():
    engine = tiny_models.engine(tokens=40, host_capacity=64)
    with engine.session() as session:
        away = session.prefill([1] * 8).result()
        session.prefill([2] * 40).result().release()
        assert away.kv_location == "host"
        session.prefill([3] * 24).pin(seconds=3600)
        waiting = session.prefill([4] * 32)
        result = []
        thread = threading.Thread(target=lambda: result.append(away.export_kv()), daemon=True)
        thread.start()
        thread.join(20)
        assert result and waiting.kv_location != "device"


def test_a_message_that_is_released_while_another_thread_pins_it_is_not_pinned():
    engine = tiny_models.engine(tokens=40)
    with engine.session() as session, engine.session() as other:
        late = other.prefill([2] * 24).result()
        session.prefill([1] * 32).pin(seconds=1)
        assert late.kv_location == "dropped"
        problems = []

        def pin() -> None:
            try:
                late.pin()
            except ChoreographError as exc:
                problems.append(exc)

        thread = threading.Thread(target=pin)
        thread.start()
        time.sleep(0.1)
        other.close()
        thread.join(20)
        assert problems and len(inspect(engine).pins) == 1


def count_steps(engine, most: int) -> None:
    step = inspect(engine).core.step

    def counted(**how):
        assert engine.stats().num_steps < most, "it is computed for ever"
        return step(**how)

    inspect(engine).core.step = counted


def test_what_a_pin_has_rebuilt_ahead_is_not_lost_to_a_call_that_waits_and_the_pin_is_refused():
    engine = tiny_models.engine(tokens=64, page=2)
    count_steps(engine, 200)
    with engine.session(mode="prefix") as session:
        root = session.prefill([1] * 20)
        first = session.decode([2] * 4, [root], sampling=GREEDY).result()
        message = session.decode([3] * 18, [root, first], sampling=GREEDY).result()
        session.decode([4] * 58, sampling=GREEDY).result()
        assert first.kv_location == message.kv_location == "dropped"
        session.decode([5] * 16, sampling=GREEDY).pin()
        session.decode([6] * 50, sampling=GREEDY)
        with pytest.raises(CacheFullError):
            message.pin()
        engine.check()


def test_what_only_a_pin_wants_is_not_lost_to_a_call_that_waits_for_its_room():
    engine = tiny_models.engine(tokens=48, page=16)
    count_steps(engine, 60)
    with engine.session(mode="prefix") as session:
        message = session.decode([1] * 12, sampling=GREEDY).result()
        session.decode([2] * 40, sampling=GREEDY).result()
        assert message.kv_location == "dropped"
        waiting = session.decode([3] * 20, sampling=GREEDY)
        assert message.pin().kv_location == "device"
        message.unpin()
        assert waiting.tokens


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("use", ["pin", "export_kv"])
def test_bringing_a_message_back_that_breaks_holds_nothing(use, monkeypatch):
    engine = tiny_models.engine(tokens=64)
    with engine.session() as session:
        seen = session.prefill([1] * 20)
        message = session.prefill([2] * 12, [seen]).result()
        session.prefill([3] * 62).result().release()
        assert seen.kv_location == message.kv_location == "dropped"
        with monkeypatch.context() as broken:
            broken.setattr(inspect(engine).hf_model, "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                getattr(message, use)()
        engine.check()
    engine.run_until_idle()
    assert engine.stats().num_referenced_entries == 0


def test_an_idle_prefix_goes_when_what_hangs_on_it_lies_in_a_full_tier():
    engine = tiny_models.engine(tokens=48, host_capacity=12, page=2)
    with engine.session(mode="prefix") as session:
        root = session.prefill([1, 2, 3, 4] * 7)
        session.decode([5, 6], [root], sampling=GREEDY).result()
        session.decode([7, 8], [root], sampling=GREEDY).result()
        for number in range(6):
            assert session.decode([20 + number] * 40, sampling=GREEDY).tokens
            engine.check()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_child_computes_and_leaves_its_parents_files(tmp_path):
    """The thread that copies is not in the child."""
    engine = tiny_models.engine(tokens=112, host_capacity=256, disk_capacity=1024, disk_dir=tmp_path)

    def flow() -> list[list[int]]:
        with engine.session(seed=1) as session:
            parents = [session.prefill([i + 1] * 24) for i in range(6)]
            for parent in parents:
                parent.result()
            return [session.decode([40], [p], sampling=SamplingParams(max_tokens=6)).output_token_ids for p in parents]

    expected, (folder,) = flow(), tmp_path.iterdir()
    child = os.fork()
    if not child:
        signal.alarm(60)
        same = flow() == expected
        atexit._run_exitfuncs()
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert folder.exists() and flow() == expected
    engine.check()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_the_files_of_a_killed_process_go_with_the_next_engine_and_those_of_others_stay(tmp_path):
    def folder_of(engine):
        return inspect(engine).offload_manager.tiers[-1].folder

    options = {"disk_capacity": 1024, "disk_dir": tmp_path}
    living = tiny_models.engine(**options)
    (tmp_path / "choreograph-of-another-program").mkdir()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        (folder_of(tiny_models.engine(**options)) / "1.safetensors").write_text("half")
        os.write(writing, b"x")
        time.sleep(60)
        os._exit(1)
    assert os.read(reading, 1) == b"x"
    abandoned = {*tmp_path.iterdir()} - {folder_of(living), tmp_path / "choreograph-of-another-program"}
    tiny_models.engine(**options)
    assert len(abandoned) == 1 and abandoned <= {*tmp_path.iterdir()}, "a process uses it"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    last = tiny_models.engine(**options)
    assert not abandoned & {*tmp_path.iterdir()}
    assert {folder_of(living), folder_of(last), tmp_path / "choreograph-of-another-program"} <= {*tmp_path.iterdir()}
    for file in (reading, writing):
        os.close(file)


@pytest.mark.parametrize("content", ["", "another machine"])
def test_folders_that_another_machine_or_program_locks_stay(tmp_path, content):
    for name in (".choreograph-disk-tier.lock", "lock"):
        (folder := tmp_path / f"choreograph-{name}").mkdir()
        (folder / name).write_text(content)
        (folder / "1.safetensors").write_text("another's")
    before = {*tmp_path.rglob("*")}
    tiny_models.engine(disk_capacity=1024, disk_dir=tmp_path)
    assert before <= {*tmp_path.rglob("*")}
