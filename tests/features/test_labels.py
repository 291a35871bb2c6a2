"""Labels flow to what saw them; a reader's clearance refuses them."""

import pytest
from helpers import model_variants, tiny_models

from choreograph import SamplingParams
from choreograph.errors import ConfigError, InvalidRequestError, LeakError, WrongSessionError

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def test_labels_flow_to_everything_that_attended():
    engine = tiny_models.engine()
    with engine.session() as session:
        secret = session.prefill([1, 2, 3], labels={"alice"})
        public = session.prefill([4, 5])
        plan = session.decode([6], [public, secret], sampling=GREEDY, labels=["plan"])
        reader = session.prefill([7], [plan[1:2], public])
        assert secret.labels == {"alice"} and public.labels == frozenset()
        assert plan.labels == reader.labels == {"alice", "plan"}


def test_session_defaults_are_replaced_by_the_call():
    engine = tiny_models.engine()
    with engine.session(labels={"alice"}, clearance={"alice"}, on_leak="error") as session:
        own = session.prefill([1])
        public = session.prefill([2], labels=())
        bob = session.prefill([3], labels={"bob"})
        assert own.labels == {"alice"} and public.labels == frozenset()
        with pytest.raises(LeakError, match="bob"):
            session.decode([4], [bob])
        assert session.decode([4], [own, bob], clearance={"alice", "bob"}).labels == {"alice", "bob"}


@pytest.mark.parametrize("mode", ["choreographed", "prefix", "naive"])
@pytest.mark.parametrize("on_leak", ["error", "reencode"])
def test_a_text_with_forbidden_labels_is_refused_in_every_mode(mode, on_leak):
    engine = tiny_models.engine()
    with engine.session(mode=mode) as session:
        secret = session.prefill([1, 2], labels={"alice", "x"})
        with pytest.raises(LeakError, match=rf"parent {secret.id} has labels \['alice'\].*\['x'\].*declassify"):
            session.decode([3], [secret], clearance={"x"}, on_leak=on_leak)
        assert engine.stats().num_waiting == (mode == "choreographed")


def test_error_mode_refuses_what_saw_forbidden_labels():
    engine = tiny_models.engine()
    with engine.session(on_leak="error") as session:
        secret = session.prefill([1, 2], labels={"alice"})
        said = session.decode([3], [secret], sampling=GREEDY)
        with pytest.raises(LeakError, match=rf"parent {said.id} attended to .*\['alice'\].*reencode"):
            session.decode([4], [said], clearance=set())
        assert session.decode([4], [said], clearance={"alice"}, sampling=GREEDY).labels == {"alice"}


def test_a_refused_batch_submits_nothing():
    engine = tiny_models.engine()
    with engine.session(clearance=set()) as session:
        secret = session.prefill([1, 2], labels={"alice"})
        public = session.prefill([3])
        said = session.prefill([4], [secret], clearance={"alice"})
        with pytest.raises(LeakError):
            session.prefill([{"tokens": [5], "parents": [said]}, {"tokens": [5], "parents": [secret]}])
        assert session.messages == [secret, public, said]


def test_prefix_mode_reads_texts_only():
    engine = tiny_models.engine()
    with engine.session(mode="prefix", on_leak="error") as session:
        secret = session.prefill([1, 2], labels={"alice"})
        said = session.decode([3], [secret], sampling=GREEDY)
        reader = session.decode([4], [said], clearance=set(), sampling=GREEDY)
        assert said.labels == {"alice"} and reader.labels == frozenset()


def test_declassification_is_explicit_and_counts_for_later_readers():
    engine = tiny_models.engine()
    with engine.session(on_leak="error") as session:
        secret = session.prefill([1, 2], labels={"alice", "x"})
        before = session.prefill([3], [secret])
        assert secret.declassify("alice") is secret and secret.labels == {"x"}
        after = session.prefill([3], [secret])
        assert before.labels == {"alice", "x"} and after.labels == {"x"}
        assert session.prefill([4], [before.declassify("alice", "x")], clearance=set()).labels == frozenset()
        with pytest.raises(InvalidRequestError, match=r"\['alice'\]"):
            secret.declassify("alice")
    assert engine.events.counts["declassified"] == 2


def test_entries_are_shared_only_between_equal_labels():
    engine = tiny_models.engine()
    with engine.session() as session:
        for labels in ((), {"alice"}, {"alice", "bob"}):
            first, second = (session.prefill([1, 2, 3], labels=labels).result() for _ in range(2))
            assert (first.finish_reason, second.finish_reason) == ("encoded", "cached")
    with engine.session(mode="prefix") as session:
        for labels in ((), {"alice"}):
            cached = [session.decode([1, 2, 3], labels=labels, sampling=GREEDY).usage.cached_tokens for _ in range(2)]
            assert cached == [0, 2]


def test_imported_messages_keep_their_labels():
    engine = tiny_models.engine()
    with engine.session() as first, engine.session() as second, engine.session(mode="prefix") as third:
        secret = first.prefill([1, 2], labels={"alice"})
        said = first.prefill([3], [secret])
        copy = second.import_message(said)
        assert copy.labels == {"alice"} and copy.finish_reason == "cached"
        assert third.import_message(said).labels == frozenset()  # its text alone
        assert third.import_message(secret).labels == {"alice"}
        with pytest.raises(LeakError):
            second.decode([4], [copy], clearance=set(), on_leak="error")
        assert second.import_message(said.declassify("alice")).labels == frozenset()
        with engine.session(client_id="other") as other, pytest.raises(WrongSessionError):
            other.import_message(secret)


def test_imported_kv_has_the_labels_of_its_parents():
    engine = tiny_models.engine()
    with engine.session() as first, engine.session() as second:
        said = first.prefill([3], [first.prefill([1, 2], labels={"alice"})])
        secret = second.prefill([1, 2], labels={"alice"})
        assert second.import_kv([3], said.export_kv(), [secret]).labels == {"alice"}


def test_variants_for_other_models_have_the_labels():
    engine = model_variants.engine()
    other = next(name for name in engine.models if name != "base")
    with engine.session() as session:
        said = session.prefill([3], [session.prefill([1, 2], labels={"alice"})], labels={"x"})
        reader = session.decode([4], [said], model=other, sampling=GREEDY)
        assert reader.labels == {"alice", "x"}
        (variant,) = said.variants.values()
        assert variant.labels == {"alice", "x"}


@pytest.mark.parametrize("option", [{"labels": "alice"}, {"labels": [1]}, {"clearance": [""]}, {"on_leak": "drop"}])
def test_wrong_options_are_refused(option):
    engine = tiny_models.engine()
    (name,) = option
    with pytest.raises(ConfigError, match=name):
        engine.session(**option)
    with engine.session() as session, pytest.raises(ConfigError, match=name):
        session.prefill([1], **option)


def test_a_message_is_declassified_before_it_is_computed():
    engine = tiny_models.engine()
    with engine.session() as session:
        secret = session.prefill([9, 9, 9], labels={"secret"})
        message = session.decode([4, 5], [secret], temperature=0, max_tokens=4)
        assert message.declassify("secret").labels == frozenset()
        assert len(message.output_token_ids) == 4
        engine.check()
