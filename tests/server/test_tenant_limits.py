"""What one tenant uses changes no other's answers: every limit is divided by the number of keys."""

import gc
from types import SimpleNamespace

import httpx
import pytest
from helpers.live_server import make_engine, serving
from transformers import AutoTokenizer

from choreograph.api.chat import Turn
from choreograph.api.session import Session
from choreograph.server import service
from choreograph.server.app import RequestSlots
from choreograph.server.openai.responses_api import ResponseStore, StoredResponse
from choreograph.server.server_config import ServerConfig
from choreograph.server.service import drop_word_cache

KEYS = ("first-secret", "second-secret")
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
LIMITS = {"max_requests": 2, "max_schemas": 4, "max_sessions": 6, "max_stored_responses": 4, "max_workflows": 6}


@pytest.fixture(scope="module")
def shared(talker_folder):
    """A server with two keys and narrow limits."""
    with serving(make_engine(talker_folder), api_keys=KEYS, max_workflow_tokens=2000, **LIMITS) as server:
        yield server


def ask(server, key, method, path, **options):
    headers = {"authorization": f"Bearer {key}"}
    return httpx.request(method, f"{server.url}{path}", headers=headers, timeout=60, **options)


def put_schema(server, key, name):
    pml = f'<schema name="{name}"><module name="a">Walk up the hill.</module></schema>'
    return ask(server, key, "PUT", f"/v1/schemas/{name}", json={"pml": pml})


def test_limits_are_divided_by_the_number_of_keys():
    limits = {"max_requests": 10, "max_workflow_tokens": 100, "max_stored_responses": 0}
    alone = ServerConfig(**limits).tenant_share
    assert (alone.max_requests, alone.max_workflow_tokens, alone.max_stored_responses) == (10, 100, 0)
    one_of_three = ServerConfig(**limits, api_keys=("a" * 8, "b" * 8, "c" * 8)).tenant_share
    assert (one_of_three.max_requests, one_of_three.max_workflow_tokens, one_of_three.max_stored_responses) == (
        3,
        33,
        0,
    )
    many = ServerConfig(max_requests=1, api_keys=tuple(f"key-{i:04}" for i in range(50))).tenant_share
    assert many.max_requests == 1


def test_a_tenant_with_its_share_of_schemas_leaves_room_for_others(shared):
    assert [put_schema(shared, KEYS[0], f"s{i}").status_code for i in range(3)] == [200, 200, 429]
    assert put_schema(shared, KEYS[0], "s0").status_code == 200  # replaced
    assert put_schema(shared, KEYS[1], "s0").status_code == 200
    assert ask(shared, KEYS[0], "DELETE", "/v1/schemas/s0").status_code == 200
    assert put_schema(shared, KEYS[0], "s2").status_code == 200


def test_a_tenant_with_its_share_of_requests_leaves_room_for_others(shared):
    body = CHAT | {"max_tokens": 3000, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    with httpx.stream("POST", f"{shared.url}/v1/chat/completions", json=body, headers=headers, timeout=60) as stream:
        lines = stream.iter_lines()  # its end would close the stream
        next(lines)
        refused = ask(shared, KEYS[0], "POST", "/v1/chat/completions", json=CHAT)
        assert refused.status_code == 429 and refused.headers["retry-after"]
        assert ask(shared, KEYS[0], "POST", "/tokenize", json={"prompt": "Hi"}).status_code == 200
        assert ask(shared, KEYS[1], "POST", "/v1/chat/completions", json=CHAT).status_code == 200
    shared.wait_until_idle()
    assert ask(shared, KEYS[0], "POST", "/v1/chat/completions", json=CHAT).status_code == 200


def test_a_refused_request_frees_its_slot(shared):
    for _ in range(5):
        assert ask(shared, KEYS[0], "POST", "/v1/chat/completions", json=CHAT | {"temperature": -1}).status_code == 400
    assert ask(shared, KEYS[0], "POST", "/v1/chat/completions", json=CHAT).status_code == 200


def test_a_tenant_with_its_share_of_sessions_leaves_room_for_others(shared):
    opened = [ask(shared, KEYS[0], "POST", "/v1/choreograph/sessions", json={}) for _ in range(4)]
    assert [reply.status_code for reply in opened] == [200, 200, 200, 429]
    other = ask(shared, KEYS[1], "POST", "/v1/choreograph/sessions", json={})
    assert other.status_code == 200
    for key, reply in [*((KEYS[0], reply) for reply in opened[:3]), (KEYS[1], other)]:
        assert ask(shared, key, "DELETE", f"/v1/choreograph/sessions/{reply.json()['id']}").status_code == 200


def test_responses_of_a_tenant_replace_its_own(shared):
    def respond(key):
        return ask(
            shared, key, "POST", "/v1/responses", json={"model": "tiny", "input": "Hi", "max_output_tokens": 2}
        ).json()["id"]

    def is_stored(key, response_id):
        return ask(shared, key, "GET", f"/v1/responses/{response_id}").status_code == 200

    kept, ids = respond(KEYS[1]), [respond(KEYS[0]) for _ in range(3)]
    assert [is_stored(KEYS[0], response_id) for response_id in ids] == [False, True, True]
    assert is_stored(KEYS[1], kept)


def test_stored_responses_are_limited_in_bytes():
    store = ResponseStore(10, 100)
    for number in range(4):
        store.add("a", StoredResponse({"id": str(number)}, [], 40))
    store.add("b", StoredResponse({"id": "0"}, [], 90))
    assert [store.get("a", "2").num_bytes, store.get("a", "3").num_bytes, store.get("b", "0").num_bytes] == [40, 40, 90]
    store.add("a", StoredResponse({"id": "large"}, [], 101))
    store.remove("b", "0")
    for tenant, response_id in (("a", "1"), ("a", "large"), ("a", "3"), ("b", "0")):
        with pytest.raises(Exception, match="not found"):
            store.get(tenant, response_id)


def test_messages_of_a_tenant_replace_its_own(shared):
    def cached(key, text):
        body = CHAT | {
            "messages": [{"role": "user", "content": text}],
            "choreography": {"reuse": "messages", "workflow": "w"},
        }
        reply = ask(shared, key, "POST", "/v1/chat/completions", json=body).json()
        shared.wait_until_idle()
        return reply["usage"]["choreography"]["message_tokens"] + reply["usage"]["choreography"]["prefix_tokens"]

    quiet = "A letter that the quiet tenant reads again and again. " * 4
    cached(KEYS[1], quiet)
    for number in range(20):
        cached(KEYS[0], f"A letter of number {number} that nobody reads again. " * 8)
    assert cached(KEYS[1], quiet) > 60
    store = shared.app.state.service.planner.store
    assert store.num_tokens <= 2000


def test_a_tenant_with_its_share_of_step_graphs_leaves_room_for_others(shared):
    graph = {"agents": {"writer": None, "reader": "writer"}}
    declared = [ask(shared, KEYS[0], "PUT", f"/v1/workflows/w{number}", json=graph) for number in range(4)]
    assert [reply.status_code for reply in declared] == [200, 200, 200, 429]
    assert ask(shared, KEYS[0], "PUT", "/v1/workflows/w0", json=graph).status_code == 200
    assert ask(shared, KEYS[1], "PUT", "/v1/workflows/w3", json=graph).status_code == 200
    assert ask(shared, KEYS[0], "DELETE", "/v1/workflows/w1").status_code == 200
    assert ask(shared, KEYS[0], "PUT", "/v1/workflows/w3", json=graph).status_code == 200


def test_slots_are_counted_by_tenant():
    slots = RequestSlots(1)
    with slots.hold("a"), slots.hold("b"), pytest.raises(Exception, match="share"):
        slots.hold("a").__enter__()
    with slots.hold("a"):
        pass


def test_log_probabilities_of_remote_calls_are_limited(shared):
    session = ask(shared, KEYS[0], "POST", "/v1/choreograph/sessions", json={}).json()["id"]
    path = f"/v1/choreograph/sessions/{session}"
    for name in ("logprobs", "prompt_logprobs"):
        call = {"kind": "decode", "tokens": [5] * 8, "sampling": {name: 40_000, "max_tokens": 1}}
        refused = ask(shared, KEYS[0], "POST", f"{path}/calls", json={"calls": [call]})
        assert refused.status_code == 400 and f"{name}=40000" in refused.json()["error"]["message"]
    assert ask(shared, KEYS[0], "POST", "/v1/choreograph/sessions", json={"labels": ["x" * 257]}).status_code == 400
    assert ask(shared, KEYS[0], "DELETE", path).status_code == 200


def test_unfinished_remote_calls_of_a_tenant_are_limited(shared):
    session = ask(shared, KEYS[0], "POST", "/v1/choreograph/sessions", json={}).json()["id"]
    path = f"/v1/choreograph/sessions/{session}"
    call = {"kind": "decode", "tokens": [5] * 8, "sampling": {"max_tokens": 2000, "ignore_eos": True}}
    statuses = [
        ask(shared, KEYS[0], "POST", f"{path}/calls", json={"calls": [call] * 200}).status_code for _ in range(2)
    ]
    assert statuses == [200, 429]
    assert ask(shared, KEYS[0], "DELETE", path).status_code == 200
    shared.wait_until_idle()


def open_sessions(server):
    """How many sessions of a server are in memory."""
    gc.collect()
    return sum(type(item) is Session and item.engine is server.engine for item in gc.get_objects())


def test_released_calls_leave_their_share_to_others_and_keep_no_session(shared):
    call = {"kind": "decode", "tokens": [5] * 8, "sampling": {"max_tokens": 2000, "ignore_eos": True}}
    before = open_sessions(shared)
    for _ in range(3):  # sessions that are closed before their calls are complete
        session = ask(shared, KEYS[0], "POST", "/v1/choreograph/sessions", json={}).json()["id"]
        path = f"/v1/choreograph/sessions/{session}"
        assert ask(shared, KEYS[0], "POST", f"{path}/calls", json={"calls": [call] * 200}).status_code == 200
        assert ask(shared, KEYS[0], "DELETE", path).status_code == 200
        shared.wait_until_idle()
    assert open_sessions(shared) <= before + 1  # calls are forgotten with the next ones


def test_a_schema_that_is_replaced_during_a_request_is_no_server_error(shared):
    put_schema(shared, KEYS[1], "s0")
    schemas = shared.app.state.service.schemas
    prompt = schemas.resolve("tenant-1", "s0", '<prompt schema="s0"><a/> Go on.</prompt>')
    assert schemas.cache_of(prompt) is prompt.cache
    put_schema(shared, KEYS[1], "s0")
    with pytest.raises(Exception, match="replaced meanwhile"):
        schemas.cache_of(prompt)


class Model:
    """A tokenizer's model that notes what its cache is told."""

    def __init__(self):
        self.calls = []

    def _clear_cache(self):
        self.calls.append("clear")

    def _resize_cache(self, capacity):
        self.calls.append(capacity)


def test_words_of_tenants_are_not_cached_where_their_time_would_tell_them():
    model = Model()
    drop_word_cache(SimpleNamespace(backend_tokenizer=SimpleNamespace(model=model)))
    assert model.calls == ["clear", 0]
    drop_word_cache(SimpleNamespace(backend_tokenizer=SimpleNamespace(model=object())))
    drop_word_cache(object())  # not a fast tokenizer


@pytest.mark.parametrize(("keys", "calls"), [((), 0), (KEYS[:1], 0), (KEYS, 1)])
def test_the_cache_of_words_is_dropped_for_several_keys(talker_folder, monkeypatch, keys, calls):
    dropped = []
    monkeypatch.setattr(service, "drop_word_cache", dropped.append)
    engine = make_engine(talker_folder)
    service.InferenceService(engine, ServerConfig(api_keys=keys))
    assert dropped == [engine.tokenizer] * calls
    engine.chat.open_turn(Turn("user", "A secret."), opening=True)
    assert any("A secret." in str(key) for key in engine.chat._cache) == (not calls)


def test_tokens_are_the_same_without_the_cache_of_words(talker_folder):
    text = "Tokenizers cache words, cache words and unlikelywordsofmanyletters. " * 3
    tokenizer = AutoTokenizer.from_pretrained(talker_folder)
    expected = tokenizer(text)["input_ids"]
    drop_word_cache(tokenizer)
    assert tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"] == expected
