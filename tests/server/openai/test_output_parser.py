"""Answers split into reasoning, content and tool calls do not depend on how text arrives."""

import json

import pytest
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph.server.openai.chat_prompt import answer_key
from choreograph.server.structured.json_scanner import JsonScanner
from choreograph.server.structured.output_parser import OutputDelta, OutputParser, ParserOptions

NAMES = frozenset({"add", "find"})


def parse(pieces, form=None, **options):
    """(reasoning, content, calls) of an answer that arrives in pieces."""
    parser = OutputParser(ParserOptions(form, NAMES, **options))
    deltas = []
    for piece in pieces:
        deltas += [OutputDelta("content", piece)] if parser.is_transparent else parser.feed(piece)
    deltas += parser.finish()
    texts = ["".join(delta.text for delta in deltas if delta.kind == kind) for kind in ("reasoning", "content")]
    calls = [(delta.call.name, json.loads(delta.call.arguments)) for delta in deltas if delta.call]
    return (*texts, calls)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "form", "options", "expected"),
    [
        ("plain < text", None, {}, ("", "plain < text", [])),
        (f"So:\n{CALL}", "hermes", {}, ("", "So:", [("add", {"a": 1})])),
        (f"{CALL}\n{CALL}", "hermes", {}, ("", "", [("add", {"a": 1})] * 2)),
        (f"no form {CALL}", None, {}, ("", f"no form {CALL}", [])),
        ("<tool_call>{broken</tool_call>!", "hermes", {}, ("", "<tool_call>{broken</tool_call>!", [])),
        (
            '<tool_call>{"name": "other"}</tool_call>',
            "hermes",
            {},
            ("", '<tool_call>{"name": "other"}</tool_call>', []),
        ),
        ('<tool_call>{"name": "find", "arguments": {}}', "hermes", {}, ("", "", [("find", {})])),
        ("almost <tool_", "hermes", {}, ("", "almost <tool_", [])),
        (LLAMA, "llama3_json", {}, ("", "", [("add", {"a": 1})])),
        (f"<|python_tag|>{LLAMA}; {LLAMA}", "llama3_json", {}, ("", "", [("add", {"a": 1})] * 2)),
        (f"{CALL}\n{CALL} b", "hermes", {"single_call": True}, ("", " b", [("add", {"a": 1})])),
        (f"{LLAMA}; {LLAMA}", "llama3_json", {"single_call": True}, ("", "", [("add", {"a": 1})])),
        ('{"a": 1}', "llama3_json", {}, ("", '{"a": 1}', [])),
        (f"see {LLAMA}", "llama3_json", {}, ("", f"see {LLAMA}", [])),
        ("<think>\nhm</think>\n\nyes", None, {"thinks": True}, ("hm", "yes", [])),
        ("hm</think>yes", None, {"thinks": True, "starts_thinking": True}, ("hm", "yes", [])),
        ("cut off", None, {"thinks": True, "starts_thinking": True}, ("cut off", "", [])),
        (f"<think>hm</think>{CALL}", "hermes", {"thinks": True}, ("hm", "", [("add", {"a": 1})])),
        ("<th", None, {"thinks": True}, ("", "<th", [])),
        (f"{CALL} and {CALL}", "hermes", {}, ("", " and ", [("add", {"a": 1})] * 2)),
        (f"<tool_call>{LLAMA} more", "hermes", {}, ("", " more", [("add", {"a": 1})])),
        (f"<tool_call>{LLAMA}</tool_", "hermes", {}, ("", "", [("add", {"a": 1})])),
        (f"<tool_call>\n<tool_call>{LLAMA}", "hermes", {}, ("", "<tool_call>\n", [("add", {"a": 1})])),
        (f"{LLAMA}; {LLAMA[:9]}", "llama3_json", {}, ("", f"; {LLAMA[:9]}", [("add", {"a": 1})])),
        (f"{LLAMA} is it", "llama3_json", {}, ("", " is it", [("add", {"a": 1})])),
        (f"<think>{LLAMA}</think>{LLAMA}", "llama3_json", {"thinks": True}, (LLAMA, "", [("add", {"a": 1})])),
        ('<tool_call>{"name": "add", "name": "find"}', "hermes", {}, ("", "", [("find", {})])),
        (
            '<tool_call>{"a": {"name": "add"}, "name": 1}',
            "hermes",
            {},
            ("", '<tool_call>{"a": {"name": "add"}, "name": 1}', []),
        ),
    ],
)
def test_the_parts_of_an_answer(text, form, options, expected):
    assert parse([text], form, **options) == expected
    assert parse(list(text), form, **options) == expected


@settings(max_examples=many(80), deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(
            ["<think>", "</think>", CALL, LLAMA, "<tool_call>", "\n", "a", "<", "</tool_call>", "{", '"', "; "]
        )
    ),
    form=st.sampled_from([None, "hermes", "llama3_json"]),
    thinks=st.booleans(),
    cuts=st.lists(st.integers(0, 60)),
)
def test_pieces_do_not_change_the_parts(parts, form, thinks, cuts):
    text, pieces = "".join(parts), []
    rest = text
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    assert parse([*pieces, rest], form, thinks=thinks) == parse([text], form, thinks=thinks)


@settings(max_examples=many(200), deadline=None)
@given(
    text=st.lists(
        st.sampled_from([*'{}[]",:\\ \n-+.eE01u', '"a"', '"a":', "true", "null", "NaN", "1e400", "\x01", "é"])
    ),
    cut=st.integers(0, 30),
)
def test_json_ends_where_a_decoder_says(text, cut):
    text = "{" + "".join(text)
    scanner = JsonScanner()
    for piece in (text[:cut], text[cut:]):
        scanner.feed(piece)
    try:
        value, end = json.JSONDecoder(parse_constant=refuse).raw_decode(text)
    except ValueError:
        assert scanner.status != "complete"
    else:
        assert (scanner.status, scanner.num_chars) == ("complete", end)
        members = scanner.members(text[:end])
        assert {key: json.loads(source) for key, source in members.items()} == value


def refuse(constant):
    raise ValueError(constant)


def test_deep_nesting_needs_no_stack():
    arguments = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    (delta,) = OutputParser(ParserOptions("hermes", NAMES)).feed(
        f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    )
    assert delta.call.arguments == arguments


def test_an_answer_is_known_again_however_its_arguments_are_written():
    calls = [
        {"function": {"name": "add", "arguments": arguments}} for arguments in ('{"a":1, "b":2}', {"b": 2, "a": 1})
    ]
    assert answer_key(" text\n", calls[:1]) == answer_key("text", calls[1:]) != answer_key("text", [])
