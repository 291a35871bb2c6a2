"""What enters a server is checked once: JSON, texts, sizes, paths and headers."""

import json
import socket
import time

import httpx
import pytest
from helpers.live_server import make_engine, serving
from hypothesis import given
from hypothesis import strategies as st

from choreograph.server.api_errors import ApiError
from choreograph.server.request_body import MAX_CONTAINERS, MAX_DEPTH, MAX_KEYS, MAX_VALUES, check_text, parse_body

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
JSON = {"content-type": "application/json"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)  # fmt: skip


def has_invalid_text(value):
    if isinstance(value, str):
        return "\0" in value or any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, dict):
        return any(has_invalid_text(part) for pair in value.items() for part in pair)
    return isinstance(value, list) and any(map(has_invalid_text, value))


@given(json_values, st.booleans())
def test_valid_bodies_are_parsed_as_they_are_and_invalid_texts_are_refused(value, is_ascii):
    if has_invalid_text(value):
        with pytest.raises(ApiError):
            parse_body(json.dumps(value).encode())
    else:
        assert parse_body(json.dumps(value, ensure_ascii=is_ascii).encode()) == value


@given(json_values, st.sampled_from(["\0", "\ud800", "\udfff", "a\ud83db"]), st.data())
def test_an_invalid_text_anywhere_is_refused(value, text, data):
    places = [[value]]
    for place in places:
        places += [
            part for part in (place.values() if isinstance(place, dict) else place) if isinstance(part, (dict, list))
        ]
    place = data.draw(st.sampled_from(places))
    if isinstance(place, list):
        place.append(text)
    elif data.draw(st.booleans()):
        place[text] = 1
    else:
        place["key"] = text
    with pytest.raises(ApiError) as caught:
        parse_body(json.dumps(places[0]).encode())
    assert caught.value.status == 400


def test_an_error_names_the_field_and_the_character():
    with pytest.raises(ApiError) as caught:
        parse_body(json.dumps(CHAT | {"structured_outputs": {"choice": ["ok", "a\ud83d"]}}).encode())
    error = caught.value.body["error"]
    assert error["param"] == "structured_outputs.choice[1]" and "U+D83D at character 1" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e400}', b'{"a": ' + b"9" * 5000 + b"}", b"\xff", b'{"a": "\xed\xa0\x80"}',
        '{"a": 1}'.encode("utf-16"), b"{", b"", b'{"a": "\x00"}', b"[" * 5000, b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
        b"[" + b"{}," * MAX_CONTAINERS + b"1]", b"[" + b"1," * (MAX_VALUES + 1) + b"1]",
        json.dumps({f"k{i}": 1 for i in range(MAX_KEYS + 1)}).encode(),
    ],
)  # fmt: skip
def test_bodies_that_are_no_json_or_too_large_are_refused(body):
    with pytest.raises(ApiError) as caught:
        parse_body(body)
    assert caught.value.status == 400 and caught.value.body["error"]["message"]


def test_bodies_at_the_limits_are_accepted():
    parse_body(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    parse_body(json.dumps({f"k{i}": [1] for i in range(MAX_KEYS)}).encode())
    parse_body(json.dumps([0] * MAX_VALUES).encode())


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_every_other_text_is_valid(text):
    check_text(text, "field")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", CHAT | {"structured_outputs": {"regex": "\ud83d"}}),
        ("POST", "/v1/chat/completions", CHAT | {"user": "\ud83d"}),
        ("POST", "/v1/chat/completions", CHAT | {"stop": ["a", "b\0"]}),
        ("POST", "/v1/chat/completions", CHAT | {"metadata": {"\udc00": "x"}}),
        ("POST", "/v1/completions", {"model": "tiny", "prompt": ["a", "\ud83d"]}),
        ("POST", "/v1/responses", {"model": "tiny", "input": [{"role": "user", "content": "\0"}]}),
        ("POST", "/tokenize", {"prompt": "\ud83d"}),
        ("PUT", "/v1/schemas/x", {"pml": "\ud83d"}),
        ("PUT", "/v1/workflows/x", {"agents": {"\ud83d": None}}),
        ("POST", "/v1/choreograph/sessions", {"workflow": "a\0"}),
        ("POST", "/v1/choreograph/sessions/0/calls", {"calls": [{"kind": "prefill", "tokens": "\ud83d"}]}),
    ],
)
def test_every_route_refuses_invalid_text_with_the_name_of_the_field(live, method, path, body):
    answer = httpx.request(method, f"{live.url}{path}", content=json.dumps(body), headers=JSON)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert "U+" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["%00", "%ff", "a%ed%a0%80"])
@pytest.mark.parametrize(
    ("method", "path"), [("DELETE", "/v1/workflows/"), ("GET", "/v1/models/"), ("PUT", "/v1/schemas/")]
)
def test_names_in_paths_are_texts(live, method, path, name):
    answer = httpx.request(method, f"{live.url}{path}{name}", json={"pml": "x"} if method == "PUT" else None)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "path"


def test_names_in_headers_are_as_short_as_in_bodies(live):
    headers = {"x-choreography-agent": "a" * 257}
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "x-choreography-agent"


def test_a_client_without_a_key_is_refused_before_its_body_is_read(talker_folder):
    with serving(make_engine(talker_folder), api_keys=("first-secret",)) as server:
        for path in ("/v1/chat/completions", "/tokenize", "/v1/choreograph/sessions"):
            answer = httpx.post(f"{server.url}{path}", content=b"[" * 5000, headers=JSON)
            assert answer.status_code == 401
        headers = JSON | {"authorization": "Bearer first-secret"}
        assert httpx.post(f"{server.url}/tokenize", content=b"[" * 5000, headers=headers).status_code == 400


def test_a_refused_request_is_one_line_of_the_log(live, capfd, caplog):
    for body in (CHAT | {"stop": "\ud83d"}, CHAT | {"model": "other"}, CHAT | {"structured_outputs": {"regex": "("}}):
        answer = httpx.post(f"{live.url}/v1/chat/completions", content=json.dumps(body), headers=JSON)
        assert answer.status_code in (400, 404)
    output = capfd.readouterr()
    assert "Traceback" not in output.err + output.out + caplog.text
    assert len((output.err + output.out).splitlines()) <= 3


def test_a_client_that_leaves_within_its_body_is_no_server_error(live, capfd, caplog):
    host, port = live.url.removeprefix("http://").split(":")
    for length, part in ((100, b'{"model"'), (10, b"")):
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}"
            connection.sendall(head.encode() + b"\r\n\r\n" + part)
            time.sleep(0.1)
    assert httpx.get(f"{live.url}/health").status_code == 200
    time.sleep(0.1)
    assert "Traceback" not in capfd.readouterr().err + caplog.text
