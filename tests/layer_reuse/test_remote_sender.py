"""A sender in another process: what arrives is what it has, and what does not arrive is computed here."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import model_variants
from helpers.inspect_engine import inspect
from helpers.remote_worker import BELOW, CONTEXT, join

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams, SchedulerConfig
from choreograph.errors import ConfigError, InvalidRequestError, ModelError, WrongSessionError
from choreograph.layer_reuse.remote import RemoteSender, compatibility_info
from choreograph.layer_reuse.transport import ChannelError, send_details

GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
PATTERN = [1, 2, 4]
TESTS = Path(__file__).parent.parent


def values(message):
    return [one.logprob for one in message.logprobs]


@contextmanager
def processes(folder, *commands):
    """Processes that do as told; this one, the last of their group, joins them."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    file = folder / "meeting"
    started = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "helpers" / "remote_worker.py"), str(file), *how],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        )
        for how in commands
    ]
    try:
        join(str(file), len(commands), len(commands) + 1)
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def sender(folder, *how):
    """A process that sends as told; this process is its receiver."""
    with processes(folder, how) as (process,):
        yield process


def receiver(step=1024):
    """Its own model is what is "math" in the sender's family."""
    config = EngineConfig(
        cache=CacheConfig(capacity=512, page_size=4, poison_freed_pages=True),
        scheduler=SchedulerConfig(max_num_batched_tokens=step),
    )
    return Engine.from_pretrained(model_variants.finetuned(), config=config)


def local(pattern):
    """What the receiver would say if the sender were in its own engine."""
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", pattern=pattern)
    with engine.session() as session:
        first = session.prefill(CONTEXT)
        below = session.prefill(BELOW, [first])
        for parents in ([first], [first, below]):
            said = session.decode([7], parents, model="math", kv_reuse="partial", sampling=GREEDY)
            yield values(said)


def test_received_kv_equals_the_senders(tmp_path):
    with sender(tmp_path, "good"), RemoteSender(receiver(), 0, name="writer", timeout=60) as link:
        engine = link._engine
        engine.enable_layer_reuse("base", "writer", pattern=PATTERN)
        with engine.session() as session:
            first = link.partial_prefill(session, CONTEXT, PATTERN)
            below = link.partial_prefill(session, BELOW, PATTERN, [first])
            said = [session.decode([7], parents, sampling=GREEDY) for parents in ([first], [first, below])]
            for one, expected in zip(said, local(PATTERN), strict=True):
                assert values(one) == pytest.approx(expected, abs=1e-5)
            assert engine.events.counts["recomputed"] == 0 and engine.events.counts["loaded"] == 2
            unknown = link.partial_prefill(session, CONTEXT[1:], PATTERN)
            alone = session.decode([7], [session.prefill(CONTEXT[1:])], sampling=GREEDY)
            assert values(session.decode([7], [unknown], sampling=GREEDY)) == pytest.approx(values(alone), abs=1e-5)
            why = [event.data["why"] for event in engine.events.recent if event.kind == "recomputed"]
            assert len(why) == 1 and "is not computed by" in str(why[0])
            moved = link.partial_prefill(session, CONTEXT, PATTERN, new_offset=20)
            expected = session.decode([7], [first], offsets=[20], sampling=GREEDY)
            assert values(session.decode([7], [moved], offsets=[20], sampling=GREEDY)) == pytest.approx(
                values(expected), abs=1e-5
            )
            engine.check()
        engine.clear_cache()
        with engine.session() as session:  # asked for at once, before anything is read
            both = [link.partial_prefill(session, tokens, PATTERN) for tokens in (CONTEXT, CONTEXT[::-1])]
            said = [session.decode([7], [seen], sampling=GREEDY) for seen in both]
            assert values(said[0]) == pytest.approx(next(local(PATTERN)), abs=1e-5)
            assert engine.events.counts["recomputed"] == 1 and link.failure_reason is None
        engine.clear_cache()
        with engine.session() as session:
            link.partial_prefill(session, CONTEXT, PATTERN)
        engine.clear_cache()  # nobody waits for it any more
        with engine.session() as session:
            engine.enable_layer_reuse("base", "writer", pattern=[0, 0, 2])
            narrow = link.partial_prefill(session, CONTEXT, PATTERN)
            wide = link.partial_prefill(session, CONTEXT, [0, 0, 2])  # other layers of the same context
            reused = link.partial_prefill(session, CONTEXT, [0, 0, 0])
            for seen, pattern in ((narrow, PATTERN), (wide, [0, 0, 2]), (reused, [0, 0, 0])):
                said = session.decode([7], [seen], kv_reuse="reuse", sampling=GREEDY)
                assert values(said) == pytest.approx(next(local(pattern)), abs=1e-5)
            with pytest.raises(ConfigError, match=r"engine\.enable_layer_reuse"):
                link.partial_prefill(session, CONTEXT, [0, 3, 4])
            assert engine.events.counts["recomputed"] == 1 and link.failure_reason is None
        engine.clear_cache()
        engine.check()


@pytest.mark.slow
def test_three_processes_form_a_chain(tmp_path):
    """The middle one receives a context in part and sends what it made of it to the last one."""
    reply = [7, *BELOW]
    with processes(tmp_path, ("chain", "0"), ("chain", "1")):
        first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
        assert first is not second
        engine = Engine.from_pretrained(model_variants.base())
        with RemoteSender(engine, 1, name="math", timeout=60, group=second) as link, engine.session() as session:
            engine.enable_layer_reuse("base", "math", pattern=[0, 3, 5])
            seen = link.partial_prefill(session, reply)
            said = session.decode([9], [seen], sampling=GREEDY)
            result = values(said)
            assert seen.computed_layers == (3, 4) and engine.events.counts["recomputed"] == 0
    engine = model_variants.engine()
    engine.enable_layer_reuse("twin", "math", pattern=[0, 3, 5])
    with engine.session() as session:
        text = session.prefill(reply, model="math")
        said = session.decode([9], [text], model="twin", kv_reuse="partial", sampling=GREEDY)
        assert values(said) == pytest.approx(result, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "pattern", "step"),
    [
        ("dies", [1, 1, 1], 4),  # a part of the version is computed when it becomes known
        ("lies", [2, 2, 2], 1024),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("dies", [2, 2, 2], 1024),
                ("dies", [0, 0, 0], 1024),
                ("stalls", [2, 2, 2], 1024),
                ("leaves out", [2, 2, 2], 1024),
                ("has another model", [2, 2, 2], 1024),
                ("has another context", [2, 2, 2], 1024),
                ("flips a bit", [2, 2, 2], 1024),
                ("mumbles", [2, 2, 2], 1024),
            )
        ),
    ],
)
def test_a_context_that_does_not_arrive_is_computed_by_the_receiver(tmp_path, kind, pattern, step):
    engine, one = receiver(step), SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    with (
        sender(tmp_path, kind, json.dumps(compatibility_info(engine, "base"))),
        RemoteSender(engine, 0, name="writer", timeout=3) as link,
        engine.session() as session,
    ):
        engine.enable_layer_reuse("base", "writer", pattern=pattern)
        expected = values(session.decode([7], [session.prefill([*CONTEXT, 1])], sampling=GREEDY))
        seen = link.partial_prefill(session, CONTEXT, pattern)
        said = session.decode([1], [seen], kv_reuse="reuse", sampling=one)
        again = session.decode([1], [session.prefill(CONTEXT)], sampling=one)
        assert values(said) == pytest.approx(values(again), abs=1e-5)
        assert link.failure_reason and engine.events.counts["recomputed"] == 1
        late = link.partial_prefill(session, [*CONTEXT, 1], pattern)
        assert values(session.decode([7], [late], sampling=GREEDY)) == pytest.approx(expected, abs=1e-5)
        engine.run_until_idle()
        engine.check()
    engine.clear_cache()
    engine.check()


def test_a_sender_that_is_gone_is_noticed_before_anything_is_waited_for(tmp_path):
    engine = receiver()
    with (
        sender(tmp_path, "dies", json.dumps(compatibility_info(engine, "base"))) as process,
        RemoteSender(engine, 0, name="writer", timeout=3) as link,
        engine.session() as session,
    ):
        engine.enable_layer_reuse("base", "writer", pattern=[2, 2, 2])
        process.kill()
        process.wait()
        time.sleep(0.5)  # until this side's socket says so
        for wire in (lambda: link._transport.receive(8), lambda: send_details(link._transport)()):
            with pytest.raises(ChannelError):
                wire()
        seen = link.partial_prefill(session, CONTEXT, [2, 2, 2])
        alone = session.decode([7], [session.prefill(CONTEXT)], sampling=GREEDY)
        assert values(session.decode([7], [seen], sampling=GREEDY)) == pytest.approx(values(alone), abs=1e-5)
        assert link.failure_reason and engine.events.counts["recomputed"] == 1


def test_another_family_is_refused(tmp_path):
    engine = receiver()
    theirs = json.dumps(compatibility_info(engine, "base") | {"layers": 6, "tokenizer": "other"})
    with (
        sender(tmp_path, "dies", theirs),
        pytest.raises(ModelError, match="layers: 5 and 6; tokenizer: None and other"),
    ):
        RemoteSender(engine, 0, timeout=20)
    assert not inspect(engine).model_set.remote


@pytest.mark.parametrize("mode", ["prefix", "naive"])
def test_a_link_is_for_choreographed_sessions(tmp_path, mode):
    engine = receiver()
    with (
        sender(tmp_path, "dies", json.dumps(compatibility_info(engine, "base"))),
        RemoteSender(engine, 0, name="writer", timeout=20) as link,
        engine.session(mode=mode) as session,
    ):
        engine.enable_layer_reuse("base", "writer", pattern=[1, 1, 1])
        for pattern in ([1, 1, 1], [0, 4, 4]):
            with pytest.raises(InvalidRequestError, match=f"mode='{mode}' has no partial prefill"):
                link.partial_prefill(session, CONTEXT, pattern)
        with receiver().session() as foreign, pytest.raises(WrongSessionError, match="another engine"):
            link.partial_prefill(foreign, CONTEXT, [0, 4, 4])
        engine.check()


def test_there_has_to_be_a_group():
    with pytest.raises(ConfigError, match="init_process_group"):
        RemoteSender(receiver(), 0)
