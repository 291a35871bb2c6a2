"""Random lives of an engine: every operation, error and cancellation leaves arena, store and queues whole."""

from typing import ClassVar

import pytest
from helpers import tiny_models
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from choreograph import ChoreographError, SamplingParams
from choreograph.errors import InvalidRequestError

tokens = st.lists(st.integers(0, 5), min_size=1, max_size=20)


class Life(RuleBasedStateMachine):
    """Sessions in all modes over a cache that is too small for all of them."""

    messages = Bundle("messages")
    sessions = Bundle("sessions")
    below: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.engine = tiny_models.engine(tokens=160, step=7, calls=5, **self.below)

    @rule(target=sessions, mode=st.sampled_from(["choreographed", "prefix", "naive"]))
    def open(self, mode):
        return self.engine.session(mode=mode, seed=1)

    @rule(
        target=messages,
        session=sessions,
        ids=tokens,
        parents=st.lists(messages, max_size=3),
        offset=st.one_of(st.none(), st.integers(-1, 300)),
        decode=st.booleans(),
        size=st.integers(1, 30),
    )
    def call(self, session, ids, parents, offset, decode, size):
        """Any call, most of them legal; an illegal one changes nothing."""
        before = inspect(self.engine).cache_manager.stats
        try:
            if decode:
                ways = SamplingParams(max_tokens=size, stop_token_ids=[3])
                return session.decode(ids, parents, new_offset=offset, sampling=ways, footer=[7, 8])
            return session.prefill(ids, parents, new_offset=offset)
        except ChoreographError:
            assert inspect(self.engine).cache_manager.stats == before
            return multiple()

    @rule()
    def step(self):
        self.engine.step()

    @rule(message=messages)
    def read(self, message):
        try:
            assert message.result().length == len(message.tokens)
        except ChoreographError as exc:
            assert str(exc)

    @rule(message=messages)
    def release(self, message):
        message.release()

    @rule(message=messages)
    def encode(self, message):
        """Whatever was dropped or has left comes back."""
        try:
            assert len(message.export_kv().layers[0][0]) == message.length
        except ChoreographError as exc:
            assert str(exc)

    @rule(message=messages, owner=st.sampled_from([None, "a"]), seconds=st.sampled_from([None, 1e-4]))
    def pin(self, message, owner, seconds):
        try:
            message.pin(seconds, owner=owner)
        except ChoreographError as exc:
            assert str(exc)

    @rule(message=messages, owner=st.sampled_from([None, "a"]))
    def unpin(self, message, owner):
        message.unpin(owner=owner)

    @rule(session=sessions)
    def close(self, session):
        session.close()

    @rule()
    def forget(self):
        self.engine.clear_cache()

    @rule(message=messages)
    def interrupt(self, message):
        """A step that breaks in the middle is as if it had not been."""
        adapter = inspect(self.engine).hf_model
        healthy = adapter.forward

        def broken(*_):
            raise KeyboardInterrupt

        adapter.forward = broken
        try:
            self.engine.step()
        except KeyboardInterrupt:
            pass
        finally:
            adapter.forward = healthy

    @invariant()
    def whole(self):
        self.engine.check()

    def teardown(self):
        internals = inspect(self.engine)
        self.engine.run_until_idle()
        self.engine.check()
        for call in [*internals.waiting, *internals.running]:
            internals.lifecycle.release(call)
        self.engine.check()


class LifeWithTiers(Life):
    """The same with room below the device for some of what leaves it."""

    below: ClassVar[dict[str, int]] = {"host_capacity": 96, "disk_capacity": 64}


SETTINGS = settings(max_examples=many(60), stateful_step_count=40, deadline=None)
TestLife, TestLifeWithTiers = Life.TestCase, LifeWithTiers.TestCase
TestLife.settings = TestLifeWithTiers.settings = SETTINGS


@pytest.mark.parametrize("mode", ["prefix", "naive"])
def test_where_encodings_belong_to_whole_prompts_no_message_is_copied_out(mode):
    with tiny_models.engine().session(mode=mode, seed=0) as session:
        answer = session.decode([0], [], sampling=SamplingParams(max_tokens=1), footer=[7, 8])
        with pytest.raises(InvalidRequestError, match=f"{mode} mode"):
            answer.export_kv()


def test_nothing_is_held_when_every_session_is_closed():
    engine = tiny_models.engine()
    for mode in ("choreographed", "prefix", "naive"):
        with engine.session(mode=mode, seed=0) as session:
            root = session.prefill([1, 2, 3])
            for _ in range(3):
                session.decode([4], [root], sampling=SamplingParams(max_tokens=9))
            engine.step()
            engine.step()
        engine.run_until_idle()
        engine.check()
        counts = inspect(engine).cache_manager.stats
        assert counts["num_referenced_entries"] == 0 and not inspect(engine).running
    engine.clear_cache()
    assert engine.stats().num_free_pages == engine.stats().num_pages
