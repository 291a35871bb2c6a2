"""`connect(engine="vllm")`: sessions on a server give what sessions in process give.

The server is `helpers.fake_vllm`, over an engine of the same model.
"""

from contextlib import contextmanager

import pytest
from helpers import tiny_models
from helpers.char_tokenizer import tokenizer
from helpers.fake_vllm import serving_vllm
from helpers.hypothesis_profile import many
from helpers.message_graphs import VOCABULARY, graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import Engine, Repair, SamplingParams, connect
from choreograph.errors import (
    ConfigError,
    DuplicateParentError,
    InvalidPositionError,
    InvalidRequestError,
    InvalidTokensError,
    MessageReleasedError,
    NotAMessageError,
    RequestFailedError,
    RequestTooLargeError,
    SamplingError,
    SessionClosedError,
    WrongSessionError,
)

VALUES = ("tokens", "output_token_ids", "position", "offsets", "length")
EVERYTHING = SamplingParams(logprobs=VOCABULARY)


@contextmanager
def remote(*, holes: bool = True, **options):
    """A fake server over the tiny model, and an engine that is connected to it."""
    options = {"max_model_len": 1024} | options
    with (
        serving_vllm(tiny_models.engine(tokens=8192), holes=holes, **options) as (url, fake),
        connect(url, engine="vllm") as engine,
    ):
        yield engine, fake


@pytest.fixture(scope="module")
def servers():
    """Two engines on servers, without and with holes, and one in process."""
    with remote(holes=False) as (without, first), remote() as (with_holes, second):
        yield {False: (without, first), True: (with_holes, second)}, tiny_models.engine(tokens=8192)


def build(session, nodes, **options):
    """Submit a message graph; forced decodes have all log-probabilities."""
    messages = []
    for node in nodes:
        parents = [messages[index] for index in node.parents]
        args = parents, node.offsets, node.position
        if node.generated is None:
            messages.append(session.prefill(node.tokens, *args, **options))
        else:
            decode = {"sampling": EVERYTHING, "footer": node.footer, "forced_tokens": node.generated}
            messages.append(session.decode(node.tokens, *args, **decode, **options))
    return messages


def assert_same(message, expected, names=VALUES):
    assert {name: getattr(message, name) for name in names} == {name: getattr(expected, name) for name in names}
    for item, other in zip(message.logprobs or (), expected.logprobs or (), strict=True):
        assert item.token == other.token
        assert item.top == pytest.approx(other.top, abs=2e-4)


@settings(max_examples=many(40), deadline=None)
@given(nodes=graphs(), data=st.data())
def test_random_graphs_give_the_values_of_a_session_in_process(servers, nodes, data):
    remotes, local = servers
    engine, fake = remotes[True]
    reader = data.draw(st.lists(st.integers(0, len(nodes) - 1), unique=True, min_size=1, max_size=3))
    cut = data.draw(st.booleans())

    def run(session):
        messages = build(session, nodes)
        parents = [messages[i][0 : max(1, messages[i].length - 1)] if cut else messages[i] for i in reader]
        answer = session.decode([3, 1], parents, temperature=0, max_tokens=6, logprobs=4, ignore_eos=True)
        return [*messages, answer]

    with engine.session(seed=0) as session, local.session(seed=0) as same:
        for message, expected in zip(run(session), run(same), strict=True):
            names = ["finish_reason"] if message.kind == "decode" else []  # equal prefills are not shared
            assert_same(message, expected, [*VALUES, *names])
    assert not fake.names
    fake.engine.check()


@settings(max_examples=many(15), deadline=None)
@given(nodes=graphs(max_nodes=4))
def test_prefix_mode_concatenates_the_texts(servers, nodes):
    remotes, local = servers
    engine, fake = remotes[True]
    names = [*VALUES, "finish_reason"]
    with engine.session(mode="prefix", seed=1) as session, local.session(mode="prefix", seed=1) as same:
        messages, others = build(session, nodes), build(same, nodes)
        for m, e in zip(messages, others, strict=True):
            assert_same(m, e, names)
        answers = [s.decode([5], [ms[-1]], max_tokens=4) for s, ms in ((session, messages), (same, others))]
        assert_same(*answers, names)
    assert not fake.names


@pytest.mark.parametrize("holes", [False, True])
@settings(max_examples=many(15), deadline=None)
@given(nodes=graphs(max_nodes=4), share=st.sampled_from([0.05, 0.4, 0.9, 1.0]))
def test_repair_computes_the_first_tokens_of_every_parent_again(servers, holes, nodes, share):
    remotes, local = servers
    engine, fake = remotes[holes]

    def run(session):
        messages = build(session, nodes, repair=share)
        answer = session.decode([3], messages[-3:], temperature=0, max_tokens=4, logprobs=9, repair=share)
        later = session.decode([4], [answer], temperature=0, max_tokens=2, logprobs=3)
        return [*messages, answer, later]

    with engine.session(seed=0) as session, local.session(seed=0) as same:
        for message, expected in zip(run(session), run(same), strict=True):
            assert_same(message, expected, ["tokens", "position", "offsets"])
    assert not fake.names


def test_a_full_repair_equals_prefix_mode_and_reuses_nothing(servers):
    engine, _ = servers[0][True]

    def run(**options):
        with engine.session(seed=0, **options) as session:
            parents = [session.prefill([1, 2, 3]), session.prefill([4, 5])]
            return session.decode([6], parents, temperature=0, max_tokens=4, logprobs=5).result()

    exact, repaired, reused = run(mode="prefix"), run(repair=1.0), run()
    assert_same(exact, repaired, ["tokens"])
    assert reused.usage.cached_tokens == 5
    assert repaired.usage.repaired_tokens == 5 and repaired.usage.computed_tokens == 6


def test_holes_are_one_request_if_the_server_computes_them(servers):
    for holes, (engine, fake) in servers[0].items():
        with engine.session(repair=0.5) as session:
            first, second = (session.prefill([1, 2, 3, 4]) for _ in range(2))
            answer = session.decode([5], [first, second], temperature=0, max_tokens=1, footer=[])
            first.result(), second.result()
            before = len(fake.bodies)
            assert answer.result().usage.repaired_tokens == 2, "nothing precedes the first parent"
            if holes:
                assert len(fake.bodies) <= before + 1
            spans = [span["stop"] - span["start"] for span in fake.spans_sent()[-1]]
            assert spans == ([4, 2] if holes else [4, 2, 2])


def test_only_the_message_is_completed_that_is_read(servers):
    engine, fake = servers[0][True]
    with engine.session() as session:
        answers = [session.decode([1, i], max_tokens=3, temperature=0, footer=[9]).result() for i in range(2)]
        start = len(fake.bodies)
        session.decode([5], [answers[0]], max_tokens=1).result()
        session.decode([6], [answers[0]], max_tokens=1).result()
        session.decode([7], [answers[1][:4]], max_tokens=1).result()  # these are stored
        stored = [len(spans) for spans in fake.spans_sent()[start:]]
        assert stored == [1, 1, 1, 1] and fake.bodies[start]["max_tokens"] == 1


def test_parallel_decodes_are_one_batch():
    with remote() as (engine, fake), engine.session(seed=0) as session:
        question = session.prefill([1, 2, 3]).result()
        fake.delay = 0.2
        answers = [session.decode([4], [question], max_tokens=3, ignore_eos=True) for _ in range(8)]
        assert fake.max_in_flight < 8, "submitting does not wait"
        assert len({tuple(answer.output_token_ids) for answer in answers}) > 1
        assert fake.max_in_flight == 8


@pytest.mark.parametrize("hides_errors", [False, True])
def test_lost_entries_are_computed_again(hides_errors):
    with remote() as (engine, fake), engine.session(seed=0) as session, tiny_models.engine().session(seed=0) as same:
        fake.hides_errors = hides_errors

        def run(session, lose):
            first = session.prefill([1, 2, 3])
            second = session.decode([4], [first], max_tokens=4, temperature=0, footer=[5])
            third = session.prefill([6, 7], [second, first], [9, None])
            third.result()
            first.release()
            lose()
            fourth = session.decode([8], [third, second], max_tokens=4, temperature=0, logprobs=3).result()
            lose()
            return [fourth, session.decode([9], [fourth], max_tokens=4, temperature=0, logprobs=3).result()]

        for message, expected in zip(run(session, fake.evict), run(same, lambda: None), strict=True):
            assert_same(message, expected, ["tokens", "position"])
        session.close()
        assert not fake.names


def test_a_server_that_stores_nothing_ends_in_an_error():
    with remote() as (engine, fake), engine.session() as session:
        parent = session.prefill([1, 2, 3]).result()
        fake.store = lambda key, pieces: None
        fake.evict()
        with pytest.raises(RequestFailedError, match="capacity"):
            session.decode([4], [parent], max_tokens=1).result()


def test_released_entries_leave_the_server_with_the_next_request():
    with remote() as (engine, fake), engine.session() as session:
        parent = session.prefill([1, 2, 3])
        answer = session.decode([4], [parent], max_tokens=2)
        parent.release()
        assert answer.length >= 2, "a reader in flight keeps what it reads"
        answer.release()
        session.prefill([5]).result()
        assert len(fake.names) == 1
        session.close()
        assert not fake.names


def test_an_unread_message_that_is_released_is_cancelled():
    with remote() as (engine, fake):
        fake.delay = 0.1
        with engine.session() as session:
            message = session.decode([1], max_tokens=200, ignore_eos=True)
            message.release()
            with pytest.raises(MessageReleasedError):
                _ = message.tokens
        engine.run_until_idle()


def test_errors_are_those_of_the_library(servers):
    engine, _ = servers[0][True]
    with engine.session() as session, engine.session() as other:
        message, foreign = session.prefill([5, 6, 7]), other.prefill([1])
        for call, error in (
            (lambda: session.prefill(range(0)), InvalidTokensError),
            (lambda: session.prefill("text"), ConfigError),
            (lambda: session.decode(range(0), [message]), InvalidTokensError),
            (lambda: session.prefill([1], [message], [-1]), InvalidPositionError),
            (lambda: session.prefill([1], [message], new_offset=5000), InvalidPositionError),
            (lambda: session.prefill([1], ["x"]), NotAMessageError),
            (lambda: session.prefill([1], [message, message]), DuplicateParentError),
            (lambda: session.prefill([1], [foreign]), WrongSessionError),
            (lambda: session.decode([1], max_tokens=0), SamplingError),
            (lambda: session.decode([1], nonsense=1), InvalidRequestError),
            (lambda: session.decode([1], [message[2:9]]).result(), InvalidPositionError),
            (lambda: session.decode([1], prompt_logprobs=1), ConfigError),
            (lambda: session.decode([1], [message], kv_reuse="reuse"), ConfigError),
            (lambda: session.decode([1], [message], repair=Repair(0.5, "attention")), ConfigError),
            (lambda: session.decode([1], [message], repair=Repair(0, "align")), ConfigError),
            (lambda: session.decode([1], [message], repair=Repair(0.5, "first", (0.9, 0.8))), ConfigError),
            (lambda: session.decode([1], model="other"), ConfigError),
            (lambda: session.prefill([1] * 2000).result(), InvalidPositionError),
            (lambda: engine.session(mode="naive"), ConfigError),
            (lambda: message.export_kv(), ConfigError),
            (lambda: message.pin(), ConfigError),
        ):
            with pytest.raises(error):
                call()
        assert message.tokens == [5, 6, 7]
        message.release()
        with pytest.raises(MessageReleasedError):
            session.prefill([1], [message])
    with engine.session(mode="prefix", repair=Repair(0.2, "attention")) as session:
        assert session.decode([1], [session.prefill([5])], max_tokens=1).tokens, "this mode ignores repairs"
    with pytest.raises(SessionClosedError):
        session.prefill([1])
    with pytest.raises(RequestFailedError, match=r"127\.0\.0\.1:9"):
        connect("http://127.0.0.1:9", engine="vllm")
    with pytest.raises(ConfigError, match="engine='other'"):
        connect("http://127.0.0.1:9", engine="other")


def test_contexts_beyond_the_servers_length_are_refused_with_the_numbers():
    with remote(max_model_len=20) as (engine, _), engine.session() as session:
        parents = [session.prefill([1] * 8, new_offset=0) for _ in range(3)]
        with pytest.raises(RequestTooLargeError, match="25 tokens"):
            session.decode([2], parents, [0, 0, 0], 8).result()
        assert len(session.decode([2], parents[:1], max_tokens=None, ignore_eos=True).output_token_ids) == 10


def test_a_plain_vllm_is_refused(monkeypatch):
    with remote() as (engine, _):
        monkeypatch.setattr("helpers.fake_vllm.Completion._finish", lambda self, choice: {"usage": None})
        with pytest.raises(ConfigError, match="kv-transfer-config"):
            engine.session()
        assert engine.session(mode="prefix").decode([1], max_tokens=2, ignore_eos=True)


def test_a_session_may_close_while_its_prefills_are_on_the_server():
    with remote() as (engine, fake):
        fake.delay = 0.05
        with engine.session() as session:
            messages = [session.prefill([1, 2])]
            for _ in range(5):
                messages.append(session.prefill([3, 4], messages[-2:], [7, 3][: len(messages)]))
            messages[1].result()
        assert not fake.names
        assert len(fake.bodies) <= 10, "nothing is computed again for messages that are released"


def test_requests_of_a_client_carry_its_name_as_salt():
    with remote() as (engine, fake):
        for client in ("default", "alice", "bob"):
            with engine.session(client_id=client) as session:
                session.decode([4], [session.prefill([1, 2, 3])], max_tokens=1).result()
        assert {body.get("cache_salt") for body in fake.bodies} == {None, "alice", "bob"}
        assert not fake.names, "names are released where they are stored"


def test_the_key_of_the_server_is_sent_and_a_closed_engine_ends_its_requests():
    with remote() as (engine, fake):
        fake.delay = 0.3
        session = engine.session()
        answer = session.decode([1], max_tokens=4)
        engine.close()
        engine.close()
        with pytest.raises((SessionClosedError, RequestFailedError)):
            answer.result()
        with pytest.raises(SessionClosedError):
            session.prefill([1])


def test_a_failed_parent_fails_its_readers():
    with remote(max_model_len=20) as (engine, _), engine.session() as session:
        parents = [session.prefill([1] * 8, new_offset=0) for _ in range(3)]
        failed = session.decode([2], parents, [0, 0, 0], 8)
        reader = session.decode([3], [failed], new_offset=0)
        with pytest.raises(RequestFailedError, match="max-model-len"):
            reader.result()
        assert len(failed.parents) == 3 and isinstance(failed.error, RequestTooLargeError)


def test_questions_are_asked_in_the_header(caplog):
    model = tiny_models.build(vocabulary=len(tokenizer()), positions=1024)
    served, local = (Engine.from_pretrained(model, tokenizer=tokenizer()) for _ in range(2))

    def run(session):
        inn, mill = (session.prefill(session.user(text)) for text in ("the inn", "the mill"))
        said = session.decode(
            [session.user("where?"), session.assistant("at")], [inn, mill], max_tokens=4, temperature=0
        )
        reader = session.decode([session.user("sure?"), session.assistant()], [mill, said], max_tokens=4, temperature=0)
        blocked = session.decode(session.assistant(), [mill, inn], max_tokens=1, temperature=0)
        return [said, reader, blocked]

    with (
        serving_vllm(served, max_model_len=1024) as (url, _),
        connect(url, engine="vllm", tokenizer=tokenizer()) as engine,
        engine.session() as session,
        local.session() as same,
    ):
        for message, expected in zip(run(session), run(same), strict=True):
            assert_same(message, expected)
    assert ["a user turn that saw nothing of" in record.getMessage() for record in caplog.records] == [True, True]
