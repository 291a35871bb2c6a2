"""`choreograph.connect`: sessions of a server give what sessions in process give."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import httpx
import pytest
from helpers.live_server import make_engine, serving

from choreograph import Engine, Repair, SamplingParams, connect
from choreograph.context.feature import ContextFeature
from choreograph.errors import (
    ChoreographError,
    ConfigError,
    GraphError,
    InvalidPositionError,
    InvalidRequestError,
    InvalidTokensError,
    LeakError,
    MessageReleasedError,
    NotAMessageError,
    RequestFailedError,
    SamplingError,
    SessionClosedError,
)
from choreograph.lab.workflows import find
from choreograph.lab.workflows.run import WorkflowRun
from choreograph.prompt_cache import PromptCache

VALUES = ("tokens", "text", "output_token_ids", "finish_reason", "position", "offsets", "length")


def logprobs_of(messages):
    """Log-probabilities of all tokens and of the most likely ones."""
    items = [item for message in messages for item in message.logprobs or ()]
    return [value for item in items for value in (item.logprob, *item.top.values())]


def program(session):
    """Messages in several forms: turns, texts, slices, offsets, batches."""
    rules = session.prefill(session.system("You are brief."))
    question = session.prefill(session.user("Which river flows through Paris?"), parents=[rules])
    first, second = session.decode(
        [
            {"header": session.assistant(), "parents": [rules, question], "sampling": SamplingParams(max_tokens=5)},
            {
                "header": session.assistant("The"),
                "parents": [question],
                "sampling": SamplingParams(max_tokens=4, seed=9),
            },
        ]
    )
    part = session.decode([7, 8, 9], [first[2:6], question], [30, None], temperature=0, max_tokens=4, logprobs=2)
    moved = session.prefill([5, 6, 7], [second, part], new_offset=200)
    forced = session.decode("Say", [moved], forced_tokens=[11, 12, 13], footer="")
    asked = session.decode(
        [session.user("Why?"), session.assistant("As")], [question, first], temperature=0, max_tokens=3
    )
    return [rules, question, first, second, part, moved, forced, asked]


@pytest.mark.parametrize("mode", ["choreographed", "prefix"])
def test_a_remote_session_gives_the_values_of_one_in_process(live, mode):
    with connect(live.url) as remote, remote.session(mode=mode, seed=3) as session:
        messages = program(session)
        got = [[getattr(message, name) for name in VALUES] for message in messages]
        logprobs, usage = logprobs_of(messages), session.usage
        assert all(message.timing.e2e is not None for message in messages if message.kind == "decode")
    live.wait_until_idle()
    with live.engine.session(mode=mode, seed=3, client_id="in process") as session:
        messages = program(session)
        assert got == [[getattr(message, name) for name in VALUES] for message in messages]
        assert logprobs == pytest.approx(logprobs_of(messages), abs=1e-3) and len(logprobs) == 12
        same = session.usage  # what is cached depends on which requests overlap
        assert usage.completion_tokens == same.completion_tokens
        assert usage.cached_tokens + usage.computed_tokens == same.cached_tokens + same.computed_tokens


def test_a_workflow_of_the_package_runs_against_a_server(live):
    def play(session):
        run = WorkflowRun(session, sampling=SamplingParams(temperature=0, max_tokens=6))
        answer = find("debate_parallel")(run, "Should the town build a bridge?", agents=2, rounds=2)
        return answer.text, run.transcript()

    with connect(live.url) as remote, remote.session(seed=0) as session:
        got = play(session)
    live.wait_until_idle()
    with live.engine.session(seed=0, client_id="in process") as session:
        assert play(session) == got


def test_a_remote_stream_comes_in_pieces(live):
    with connect(live.url) as remote, remote.session(seed=0) as session:
        message = session.decode("One two", max_tokens=60, ignore_eos=True)
        pieces = list(message.stream())
        assert len(pieces) > 1 and "".join(pieces) == message.text
        assert list(message.stream()) == [message.text]  # read already
        prompt = session.prefill("Three")
        assert list(prompt.stream()) == [prompt.text]


def test_a_remote_stream_that_is_left_does_not_end_its_message(live):
    with connect(live.url) as remote, remote.session(seed=0) as session:
        message = session.decode("One two", max_tokens=200, ignore_eos=True)
        stream = message.stream()
        first = next(stream)
        stream.close()
        assert message.text.startswith(first) and len(message.output_token_ids) == 200


def test_a_remote_stream_raises_the_error_of_the_library(live):
    with connect(live.url) as remote, remote.session() as session:
        parent = session.prefill([5, 6, 7])
        with pytest.raises(InvalidPositionError):
            list(session.decode([1], [parent[2:9]]).stream())


def test_errors_are_those_of_the_library(live):
    with connect(live.url) as remote:
        with remote.session() as session:
            message = session.prefill([5, 6, 7])
            for call, error in (
                (lambda: session.prefill(""), InvalidTokensError),
                (lambda: session.prefill([1], max_tokens=2), InvalidRequestError),
                (lambda: session.decode([1], lables=["x"]), InvalidRequestError),
                (lambda: session.decode([1], repair=Repair(0.5)), InvalidRequestError),
                (lambda: session.prefill([1], [message], [-1]), InvalidPositionError),
                (lambda: session.prefill([1], ["x"]), NotAMessageError),
                (lambda: session.decode([1], max_tokens=0), SamplingError),
                (lambda: session.decode([1], [message[2:9]]).text, RequestFailedError),
            ):
                with pytest.raises((error, InvalidPositionError)):
                    call()
            assert message.tokens == [5, 6, 7] and session.prefill([]) == []
            message.release()
            with pytest.raises(MessageReleasedError):
                session.prefill([1], [message])
        with pytest.raises(SessionClosedError):
            session.prefill([1])
    with pytest.raises(RequestFailedError):
        connect("http://127.0.0.1:9").session()


def test_a_question_that_saw_nothing_is_warned_of_where_the_client_runs(live, caplog):
    with connect(live.url) as remote:
        with remote.session() as session:
            parents = [session.prefill(session.user(text)) for text in ("The inn is old.", "When was it built?")]
            answer, _ = [session.decode(session.assistant(), parents, max_tokens=1) for _ in range(2)]
            (text,) = [record.getMessage() for record in caplog.records if record.name == "choreograph"]
            named = f"message {answer.id} answers message {parents[1].id}, a user turn that saw nothing of message {parents[0].id} "
            assert text.startswith(named) and answer.role == "assistant"
        with remote.session(warn_blocked=False) as session:
            parents = [session.prefill(session.user(text)) for text in ("The inn is old.", "When was it built?")]
            session.decode(session.assistant(), parents, max_tokens=1)
        with remote.session() as session:
            parents = [session.prefill(session.user(text)) for text in ("The inn is old.", "When was it built?")]
            session.decode(session.assistant(), parents, max_tokens=1, warn_blocked=False)
    assert len([record for record in caplog.records if record.name == "choreograph"]) == 1


def test_a_body_has_text_tokens_a_turn_or_turns(live):
    turn, last = {"role": "user", "text": "Why?"}, {"role": "assistant", "text": ""}
    with httpx.Client(base_url=f"{live.url}/v1/choreograph", timeout=60) as client:
        session = client.post("/sessions", json={}).json()["id"]

        def post(tokens, **fields):
            call = {"kind": "decode", "tokens": tokens, "sampling": {"max_tokens": 1}} | fields
            return client.post(f"/sessions/{session}/calls", json={"calls": [call]})

        for tokens in ("Why?", [5, 6], turn, [turn], [turn, last]):
            reply = post(tokens)
            assert reply.status_code == 200 and reply.json()["warnings"] == [], reply.text
        for tokens in ([turn, "Why?"], [turn, 5], [5, turn], [{"role": "user"}], [turn] * 33, [[turn]]):
            assert post(tokens).status_code == 400
        document = post(turn, kind="prefill", sampling=None).json()["messages"][0]["id"]
        question = post([turn], kind="prefill", sampling=None).json()["messages"][0]["id"]
        (text,) = post(last, parents=[{"id": document}, {"id": question}]).json()["warnings"]
        assert f"message {question}, a user turn that saw nothing of message {document} before it" in text
        client.delete(f"/sessions/{session}")


def test_a_closed_session_leaves_nothing_in_use(live):
    live.wait_until_idle()
    before = live.engine.stats().num_referenced_entries
    with connect(live.url) as remote:
        with remote.session() as session:
            session.decode([5, 6, 7], max_tokens=2000, ignore_eos=True)  # never read
        live.wait_until_idle()
        assert live.engine.stats().num_referenced_entries == before


def test_a_client_that_waits_for_a_released_call_gets_an_error(live):
    call = {"kind": "decode", "tokens": [5, 6], "sampling": {"max_tokens": 2000, "ignore_eos": True}}
    with connect(live.url) as remote, remote.session() as session, ThreadPoolExecutor(2) as pool:
        path = f"{live.url}/v1/choreograph/sessions/{session.id}"
        made = httpx.post(f"{path}/calls", json={"calls": [call]}).json()["messages"]
        decode = made[0]["id"]
        call = {"kind": "prefill", "tokens": [7] * 8, "parents": [{"id": decode}]}
        prefill = httpx.post(f"{path}/calls", json={"calls": [call]}).json()["messages"][0]["id"]
        waiting = [pool.submit(httpx.get, f"{path}/messages/{name}", timeout=60) for name in (decode, prefill)]
        time.sleep(0.2)
        for name in (prefill, decode):
            assert httpx.delete(f"{path}/messages/{name}").status_code == 200
        for future in waiting:
            assert future.result().status_code == 404, future.result().text
            assert future.result().json()["error"]["code"] == "MessageReleasedError"
    live.wait_until_idle()


def test_labels_and_clearances_work_as_in_process(live):
    with connect(live.url) as remote, remote.session(seed=0, clearance={"alice"}) as session:
        public, plan = session.prefill([1, 2, 3]), session.prefill([5, 6, 7], labels={"alice"})
        said = session.decode([8], [public, plan], forced_tokens=[9, 10])
        assert public.labels == frozenset() and said.labels == {"alice"}
        with pytest.raises(LeakError, match="alice"):
            session.decode([11], [plan], clearance=set(), max_tokens=2)
        with pytest.raises(LeakError, match="reencode"):
            session.decode([11], [said], clearance=set(), on_leak="error", max_tokens=2)
        reply = session.decode([11], [public, said], clearance=set(), max_tokens=2)
        assert reply.labels == frozenset() and reply.offsets == (0, 3)
        assert session.prefill([12], [plan.declassify("alice")], clearance=set()).labels == frozenset()


def test_repair_schemas_and_agents_work_as_in_process(talker_folder):
    schema = '<schema name="dock"><module name="a">The dock is deep.</module><module name="b">It has a gate.</module></schema>'
    prompt = '<prompt schema="dock"><b/> What has it?</prompt>'
    engine = make_engine(talker_folder, eviction="workflow")
    options = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}

    def program(session, first, **agent):
        text = session.prefill("A ship waits before the gate of the dock.")
        again = session.decode("So", [text, first], **agent, **options)
        return [first.text, again.text, again.usage.repaired_tokens]

    with serving(engine) as live, connect(live.url) as remote:
        assert httpx.put(f"{live.url}/v1/schemas/dock", json={"pml": schema}).status_code == 200
        agents = {"agents": {"reader": None, "judge": "reader"}}
        assert httpx.put(f"{live.url}/v1/workflows/w", json=agents).status_code == 200
        with remote.session(seed=0, workflow="w", repair=0.5) as session:
            got = program(session, session.decode(prompt, schema="dock", agent="reader", **options), agent="judge")
            with pytest.raises(GraphError, match="'stranger' is not declared"):
                session.decode("x", agent="stranger", max_tokens=2)
            with pytest.raises(InvalidRequestError, match="without parents"):
                session.decode(prompt, [session.prefill([1])], schema="dock", max_tokens=2)
            with pytest.raises(RequestFailedError, match="does not exist"):
                session.decode(prompt, schema="other", max_tokens=2)
            with pytest.raises(ConfigError, match="repair share=2"):
                session.prefill([1], repair=2)
        with remote.session(max_kl=0.0) as session:
            parents = [session.prefill([1, 2, 3]), session.prefill([4, 5, 6])]
            assert session.decode([7], parents, max_tokens=2).usage.repaired_tokens == 3  # the second one
        live.wait_until_idle()
        assert engine.stats().num_referenced_entries == 1  # the module
    with PromptCache(engine, schema) as cache, engine.session(seed=0, repair=0.5) as session:
        assert (
            got == program(session, cache.generate(session, prompt, sampling=SamplingParams(**options))) and got[2] > 0
        )


def test_ids_of_sessions_and_messages_tell_nothing_of_the_work_of_others(live):
    with connect(live.url) as remote:
        ids = []
        for _ in range(3):
            with remote.session() as session:
                messages = [session.prefill([5, 6, number]) for number in range(3)]
                session.decode([1], [messages[0]], max_tokens=1).result()
                ids += [session.id, *(message.id for message in messages)]
        assert len(set(ids)) == 12 and all(re.fullmatch("[0-9a-f]{32}", id) for id in ids)


def test_errors_name_messages_by_the_ids_that_the_client_has(live):
    with connect(live.url) as remote, remote.session() as session:
        message = session.prefill([5, 6, 7])
        late = session.decode([1], [message[2:9]])
        for call in (
            lambda: late.text,
            lambda: list(session.decode([1], [message[2:9]]).stream()),
            lambda: session.prefill([1], [message, message]),
            lambda: session.prefill([1], [message], [8190], 0),
            lambda: message.declassify("secret"),
        ):
            with pytest.raises(ChoreographError) as error:
                call()
            assert not re.search(r"(message|parent|request|session) \d+\b", str(error.value)), str(error.value)
            assert f"message {message.id}" in str(error.value)
        with pytest.raises(ChoreographError, match="message 7"):  # of the client's own text
            session.prefill([1], model="message 7")
        message.release()
        with pytest.raises(MessageReleasedError, match=message.id):
            session.prefill([1], [message])


@dataclass
class Topic:
    name: str


class Topics(ContextFeature):
    """Messages of different topics share no keys and values."""

    options: ClassVar = {"topic": str}

    def prepare(self, draft):
        if (topic := draft.options.get("topic")) is not None:
            draft.request.extend(Topic(topic))

    def namespace(self, request):
        topic = request.extension(Topic)
        return None if topic is None else topic.name


def test_options_of_a_feature_of_the_users_own_reach_it_through_the_server(talker_folder):
    engine = Engine.from_pretrained(talker_folder, dtype="float32", device="cpu", features=[Topics()])
    tokens = list(range(5, 45))
    with serving(engine) as live, connect(live.url) as remote:
        with remote.session(seed=0) as session:
            topics = [None, "a", "a", "b"]
            messages = [session.prefill(tokens, topic=topic) for topic in topics]
            assert [message.usage.cached_tokens for message in messages] == [0, 0, 40, 0]
        with remote.session(seed=0, topic="a") as session:
            assert session.prefill(tokens).usage.cached_tokens == 40
            with pytest.raises(InvalidRequestError, match=r"no such argument; known: .*'topic'"):
                session.prefill(tokens, topics="a")
        with pytest.raises(ConfigError, match="a session has no such option"):
            remote.session(topics="a")


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 200),
        ({"logprobs": 5000}, 400),
        ({"prompt_logprobs": 1}, 400),
        ({"max_tokens": 5}, 400),
        ({"header": [7, 8, 9]}, 400),
        ({"client_id": "other"}, 400),
        ({"options": {}}, 400),
        ({"priority": -(10**9)}, 200),
        ({"priority": -(10**10)}, 400),
    ],
)
def test_fields_of_a_call_are_options_of_features_or_refused(live, fields, status):
    with httpx.Client(base_url=f"{live.url}/v1/choreograph", timeout=60) as client:
        session = client.post("/sessions", json={}).json()["id"]
        call = {"kind": "decode", "tokens": [5], "sampling": {"max_tokens": 2}} | fields
        reply = client.post(f"/sessions/{session}/calls", json={"calls": [call]})
        assert reply.status_code == status, reply.text
        assert client.post("/sessions", json={"client_id": "x"}).status_code == 400
        client.delete(f"/sessions/{session}")
