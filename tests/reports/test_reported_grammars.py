"""Public reports on structured outputs: a grammar holds to the end, or the request is refused."""

import json

import httpx
import pytest
from helpers.forced_answers import ASK, arguments_of, chat, tool

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


def ask(live, path="chat/completions", **body):
    body = {"model": "tiny", "temperature": 0, "max_tokens": 200, **body}
    return httpx.post(f"{live.url}/v1/{path}", json=body, timeout=60)


@pytest.mark.parametrize(
    "description",
    [
        "The directory. If not specified, use the cwd. IMPORTANT: Omit this field - DO NOT enter \"undefined\" or 'null'.",
        '"} ] root ::= [^"]* | "<tool_call>" \\" \\\\',
        '```json\n{\n  "a": </tool_call> <|im_end|>\n',
        "\u2028 \U0001f468\u200d\U0001f469 é ::= {{ x }} {% raw %}",
    ],
)
def test_the_description_of_a_parameter_does_not_change_its_grammar(client, description):
    parameters = {
        "type": "object",
        "properties": {"path": {"type": "string", "maxLength": 8, "description": description}},
        "required": ["path"],
        "additionalProperties": False,
    }
    tools = [tool("glob", parameters=parameters, description=description)]
    for is_stream in (False, True):
        choice = chat(client, tools=tools, tool_choice="required", stream=is_stream)
        assert [list(json.loads(arguments)) for arguments in arguments_of(choice)] == [["path"]]


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"grammar": 'start: "a" route'}},
        {"structured_outputs": {"grammar": "root ::= [unclosed"}},
        {"structured_outputs": {"regex": "(unclosed"}},
        {"structured_outputs": {"json": {"type": "string", "pattern": "^hello there indeed\\\\!$("}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": {"type": "string", "pattern": "a{2,1}"}},
            }
        },
        {"structured_outputs": {"json": {"$ref": "#/$defs/missing"}}},
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_grammar_that_cannot_be_read_is_refused_and_the_server_goes_on(live, body, is_stream):
    reply = ask(live, messages=ASK, stream=is_stream, **body)
    assert reply.status_code == 400 and reply.json()["error"]["message"]
    assert ask(live, messages=ASK, max_tokens=2).status_code == 200


@pytest.mark.parametrize("name", ["grammar", "guided_grammar", "json_schema"])
def test_a_grammar_under_another_name_is_not_ignored(live, name):
    """Another server's field: it is applied, or refused; an answer without it would be taken for one with it."""
    for path, prompt in (("completions", {"prompt": "How many?"}), ("chat/completions", {"messages": ASK})):
        reply = ask(live, path, **prompt, **{name: 'start: "yes"'}, max_tokens=8)
        if reply.status_code == 200:
            choice = reply.json()["choices"][0]
            assert "yes" in (choice.get("text") or choice["message"]["content"])
        else:
            assert reply.status_code == 400 and name in reply.json()["error"]["message"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_token_that_is_likely_does_not_cut_an_object(live, client, is_stream):
    eos = live.engine.tokenizer.eos_token_id
    others = live.engine.tokenizer.encode("the", add_special_tokens=False)[:1]
    extra = {"stop_token_ids": others, "structured_outputs": {"json": SCHEMA}}
    biases = {str(eos): 100, str(others[0]): 90}
    choice = chat(client, stream=is_stream, extra_body=extra, logit_bias=biases)
    assert choice.finish_reason == "stop" and set(json.loads(choice.message.content)) == {"name", "ok"}


def test_an_answer_ends_where_its_grammar_does(live, client):
    choice = chat(client, extra_body={"structured_outputs": {"json": {"enum": ["a", "b"]}}}, max_tokens=100)
    assert choice.finish_reason == "stop" and json.loads(choice.message.content) in ("a", "b")


def test_a_grammar_of_tags_and_free_text_does_not_end_the_process(live):
    grammar = 'start: thought /(.|\\n){0,40}/ end "Final JSON:\\n"\nthought: "<think>"\nend: "</think>"'
    for limit in (1, 8, 120):
        reply = ask(
            live, messages=ASK, structured_outputs={"grammar": grammar}, max_tokens=limit, temperature=1, seed=3
        )
        assert reply.status_code == 200
    assert httpx.get(f"{live.url}/health").status_code == 200
