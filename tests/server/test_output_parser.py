"""Answers split into reasoning, content and tool calls do not depend on how text arrives."""

import json

import pytest
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph.server.chat_prompt import answer_key
from choreograph.server.output_parser import OutputDelta, OutputParser

NAMES = frozenset({"add", "find"})


def parse(pieces, form=None, **options):
    """(reasoning, content, calls) of an answer that arrives in pieces."""
    parser = OutputParser(form, NAMES, **options)
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
    ],
)
def test_the_parts_of_an_answer(text, form, options, expected):
    assert parse([text], form, **options) == expected
    assert parse(list(text), form, **options) == expected


@settings(max_examples=many(80), deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", CALL, LLAMA, "<tool_call>", "\n", "a", "<", "</tool_call>"])
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


def test_an_answer_is_known_again_however_its_arguments_are_written():
    calls = [
        {"function": {"name": "add", "arguments": arguments}} for arguments in ('{"a":1, "b":2}', {"b": 2, "a": 1})
    ]
    assert answer_key(" text\n", calls[:1]) == answer_key("text", calls[1:]) != answer_key("text", [])
