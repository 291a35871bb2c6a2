"""Grammars: where an answer of one ends, and which are refused before they are compiled."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from helpers import char_tokenizer
from helpers.forced_answers import ASK, TOOLS, chat, tool
from transformers import AddedToken, AutoTokenizer

from choreograph.errors import InvalidRequestError
from choreograph.server.running_request import ForcedPrefix
from choreograph.server.structured.constraints import (
    GrammarCompiler,
    GrammarMask,
    after_reasoning,
    choice_constraint,
    grammar_constraint,
    json_constraint,
)

OPTIONS = [{"ignore_eos": True}, {"skip_special_tokens": False}, {"ignore_eos": True, "skip_special_tokens": False}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_an_answer_ends_where_its_grammar_does(live, client, options, stream):
    choice = chat(client, "yes", stream=stream, extra_body=options)
    assert choice.message.content == "yes" and choice.finish_reason == "stop"
    choice = chat(client, "yes", stream=stream, extra_body=options, logprobs=True)
    assert "".join(item.token for item in choice.logprobs.content) == "yes"
    body = {"model": "tiny", "prompt": "x", "max_tokens": 20, "structured_outputs": {"choice": ["yes"]}} | options
    (result,) = httpx.post(f"{live.url}/v1/completions", json=body).json()["choices"]
    assert (result["text"], result["finish_reason"]) == ("yes", "stop")
    extra = {"structured_outputs": {"choice": ["yes"]}} | options
    response = client.responses.create(model="tiny", input="Hi", max_output_tokens=20, extra_body=extra)
    assert (response.output_text, response.status) == ("yes", "completed")


@pytest.mark.parametrize("options", OPTIONS)
def test_a_required_call_ends_where_its_grammar_does(client, options):
    choice = chat(client, tools=[tool()], tool_choice="required", extra_body=options)
    assert choice.finish_reason == "tool_calls" and choice.message.content is None


INEXACT = [
    {"const": 12345678901234567890}, {"enum": ["a", 2**53 + 1]}, {"const": -(2**63)}, {"const": [{"a": 10**30}]},
    {"type": "integer", "minimum": -(10**30), "maximum": -(10**30)}, {"type": "integer", "maximum": -1e95, "minimum": -1e95},
    {"type": "number", "exclusiveMaximum": 1e300}, {"type": "integer", "multipleOf": 2**60},
]  # fmt: skip


@pytest.mark.parametrize("part", INEXACT)
def test_numbers_that_would_change_are_refused(live, client, part):
    schemas = [part, {"type": "object", "properties": {"a": part}}, {"$ref": "#/$defs/x", "$defs": {"x": part}}]
    for schema in schemas:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match="not exact"):
            chat(client, response_format=form)
        with pytest.raises(openai.BadRequestError, match="not exact"):
            chat(client, extra_body={"structured_outputs": {"json": json.dumps(schema)}})
        with pytest.raises(openai.BadRequestError, match="not exact"):
            chat(client, extra_body={"structured_outputs": {"grammar": f"start: %json {json.dumps(schema)}"}})
    parameters = {"type": "object", "properties": {"zone": part}}
    with pytest.raises(openai.BadRequestError, match="parameters of get_time"):
        chat(client, tools=[tool(parameters=parameters)], tool_choice="required")
    assert httpx.get(f"{live.url}/health").status_code == 200


@pytest.mark.parametrize(
    "value", [2**53, -(2**53), 9007199254740991, 0, -7, 0.1, 1.5, 1e-7, 12345678.125, 1e22, [2**53], {"a": 0.1}]
)
def test_a_constant_is_written_exactly(client, value):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": value}}}
    assert json.loads(chat(client, response_format=form).message.content) == value


def test_annotations_may_have_any_number():
    for key in ("default", "examples"):
        json_constraint({"type": "integer", key: [2**63]})
    json_constraint({"type": "object", "properties": {"default": {"type": "integer"}}})
    with pytest.raises(InvalidRequestError, match="not exact"):
        json_constraint({"type": "object", "properties": {"default": {"const": 2**63}}})


def chained(count):
    definitions = {f"n{i}": {"type": "array", "items": {"$ref": f"#/$defs/n{i + 1}"}} for i in range(count)}
    return {"$ref": "#/$defs/n0", "$defs": definitions | {f"n{count}": {"type": "null"}}}


def test_long_chains_of_definitions_of_tools_do_not_end_the_process(live):
    fields = {"tools": [tool(parameters=chained(6000))], "tool_choice": "required"}
    body = {"model": "tiny", "messages": ASK, "max_tokens": 2} | fields
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code in (200, 400) and httpx.get(f"{live.url}/health").status_code == 200


def test_a_grammar_is_read_as_lark(live):
    hidden = json.dumps({"grammars": [{"json_schema": {"const": -(2**63)}}]})
    body = {"model": "tiny", "messages": ASK, "max_tokens": 2, "structured_outputs": {"grammar": hidden}}
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "grammar"
    assert grammar_constraint('start: "a:b" /[a:(]+/ // (comment: (((\n').kind == "grammar"


def test_an_explicit_grammar_beside_tools_describes_the_whole_answer(client):
    choice = chat(client, tools=TOOLS, extra_body={"structured_outputs": {"regex": "[ab]{3}"}})
    assert len(choice.message.content) == 3 and choice.finish_reason == "stop"


def test_added_tokens_are_text_for_grammars_and_special_ones_are_not(talker_folder):
    """Tags are single tokens of some models, and texts of special tokens are written by others."""
    tokenizer = AutoTokenizer.from_pretrained(talker_folder)
    tokenizer.add_tokens([AddedToken("</think>", special=False), AddedToken("<tool_call>", special=False)])
    compiler = GrammarCompiler(tokenizer, len(tokenizer))
    tag, end = tokenizer.convert_tokens_to_ids(["</think>", "<|im_end|>"])
    try:
        (mask,) = compiler.masks(after_reasoning(choice_constraint(["yes"])), 1)
        assert mask.allowed()[tag] and not mask.allowed()[end]
        mask.advance(tag)
        for text in ("a<|im_end|>b", "<tool_call>{}"):
            (mask,) = compiler.masks(choice_constraint([text]), 1)
            written = []
            while tokenizer.decode(written) != text:
                written.append(int(mask.allowed().nonzero()[0]))
                mask.advance(written[-1])
            assert end not in written
    finally:
        compiler.close()


def test_a_tokenizer_that_grammars_cannot_read_is_named():
    tokenizer = char_tokenizer.tokenizer()
    with pytest.raises(InvalidRequestError, match="do not work with the model's tokenizer"):
        GrammarCompiler(tokenizer, len(tokenizer))


class SlowMatcher:
    """A matcher whose masks take a while; it may not change meanwhile."""

    def __init__(self):
        self.is_busy, self.tokens = False, []

    def compute_bitmask(self):
        self.is_busy = True
        time.sleep(0.03)
        self.is_busy = False
        return b"\xff"

    def consume_token(self, token):
        assert not self.is_busy, "it is used by another thread"
        self.tokens.append(token)
        return True

    def is_stopped(self):
        assert not self.is_busy, "it is used by another thread"
        return False

    def is_error(self):
        return False


def test_tokens_of_an_answer_that_continues_wait_for_the_mask_before_them():
    """Its first tokens are given: nobody asks for their masks."""
    matcher = SlowMatcher()
    with ThreadPoolExecutor(1) as executor:
        forced = ForcedPrefix([1, 2, 3], 8, GrammarMask("regex", matcher, 8, executor))
        for token in (1, 2, 3):
            assert forced.allowed().nonzero().flatten().tolist() == [token]
            forced.advance(token)
        assert forced.allowed().all() and matcher.tokens == [1, 2, 3]
