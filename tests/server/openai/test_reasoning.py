"""Reasoning: streamed in order, counted, and followed by what a grammar asks for."""

import json

import openai
import pytest
from helpers.forced_answers import ASK, TOOLS, arguments_of, call, chat, forced, tool
from helpers.live_server import make_engine, serving

REASONED = "<think>ab cd</think>hi there"
SCHEMA = {
    "type": "object",
    "properties": {"grade": {"enum": ["A"]}},
    "required": ["grade"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "grade", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def thinking(talker_folder):
    with serving(make_engine(talker_folder), thinks=True) as live:
        yield live


@pytest.fixture(scope="module")
def opened(talker_folder):
    """A server whose chat template opens the tag, which the tokenizer has no token for."""
    engine = make_engine(talker_folder)
    engine.tokenizer.chat_template += "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
    with serving(engine) as live:
        assert live.app.state.service.thinks
        yield live


@pytest.fixture
def thinking_client(thinking):
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def opened_client(opened):
    with openai.OpenAI(base_url=f"{opened.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def respond(client, text, **options):
    options = {"model": "tiny", "input": "Hi", "temperature": 0, "max_output_tokens": 300} | options
    return client.responses.create(**options, extra_body=forced(text))


def test_reasoning_of_a_response_is_streamed_before_its_text(thinking, thinking_client):
    events = list(respond(thinking_client, REASONED, stream=True))
    added = [(event.output_index, event.item.type) for event in events if event.type == "response.output_item.added"]
    assert added == [(0, "reasoning"), (1, "message")]
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds.index("response.reasoning_text.delta") < kinds.index("response.reasoning_text.done")
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "ab cd" and len(deltas) > 1
    (done,) = [event for event in events if event.type == "response.reasoning_text.done"]
    assert (done.text, done.output_index, done.content_index) == ("ab cd", 0, 0)
    whole = respond(thinking_client, REASONED)
    num_reasoning = len(thinking.engine.tokenizer.encode("ab cd"))
    for response in (events[-1].response, whole):
        assert response.usage.output_tokens_details.reasoning_tokens == num_reasoning
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert response.output[0].content[0].text == "ab cd" and response.output_text == "hi there"


def test_reasoning_of_a_chat_is_counted(thinking, thinking_client):
    options = {"model": "tiny", "messages": ASK, "temperature": 0, "extra_body": forced(REASONED)}
    num_reasoning = len(thinking.engine.tokenizer.encode("ab cd"))
    whole = thinking_client.chat.completions.create(**options)
    *chunks, last = thinking_client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    for usage in (whole.usage, last.usage):
        assert usage.completion_tokens_details.reasoning_tokens == num_reasoning < usage.completion_tokens
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "ab cd"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content == "hi there"


def test_log_probabilities_are_those_of_the_content(thinking_client):
    choice = chat(thinking_client, REASONED, logprobs=True)
    assert b"".join(bytes(item.bytes) for item in choice.logprobs.content) == b"hi there"
    response = respond(thinking_client, REASONED, top_logprobs=1)
    assert "".join(item.token for item in response.output[1].content[0].logprobs) == "hi there"


def test_a_cut_while_reasoning_is_told(thinking, thinking_client):
    limit = len(thinking.engine.tokenizer.encode("<think>ab"))
    for stream in (False, True):
        choice = chat(thinking_client, REASONED, stream=stream, max_tokens=limit)
        assert choice.finish_reason == "length" and not choice.message.content
        assert choice.message.reasoning_content == "ab"
    response = respond(thinking_client, REASONED, max_output_tokens=limit)
    assert response.status == "incomplete" and response.output[0].content[0].text == "ab"
    assert response.usage.output_tokens_details.reasoning_tokens == 1


def test_calls_behind_reasoning_are_calls(thinking_client):
    arguments = '{"zone": 1}'
    text = f"<think>a call: {call('{}')}</think>\n{call(arguments)}"
    for stream in (False, True):
        choice = chat(thinking_client, text, stream=stream, tools=TOOLS)
        assert arguments_of(choice) == [arguments] and choice.message.reasoning_content == f"a call: {call('{}')}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_begins_behind_reasoning_that_the_prompt_opened(opened, opened_client, stream):
    encode = opened.engine.tokenizer.encode
    assert len(encode("</think>")) > 1
    bias = {str(token): 100 for token in encode("</think>")}  # the model writes parts of the tag until it is complete
    options = {"temperature": 1, "seed": 2, "max_tokens": 400, "extra_body": {"logit_bias": bias}}
    choice = chat(opened_client, stream=stream, response_format=FORMAT, **options)
    assert json.loads(choice.message.content) == {"grade": "A"} and choice.finish_reason == "stop"
    assert choice.message.reasoning_content and "grade" not in choice.message.reasoning_content
    choice = chat(opened_client, stream=stream, tools=[tool()], tool_choice="required", **options)
    assert arguments_of(choice) == ["{}"] and choice.message.reasoning_content
    options = {"model": "tiny", "input": "Hi", "temperature": 1, "max_output_tokens": 400, "stream": stream}
    text = {"format": {"type": "json_schema", "name": "grade", "schema": SCHEMA}}
    result = opened_client.responses.create(**options, text=text, extra_body={"logit_bias": bias, "seed": 2})
    response = list(result)[-1].response if stream else result
    assert json.loads(response.output_text) == {"grade": "A"}
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


def test_an_answer_with_a_schema_does_not_end_inside_reasoning(opened, opened_client):
    bias = {str(opened.engine.tokenizer.eos_token_id): 100}
    choice = chat(
        opened_client, response_format=FORMAT, max_tokens=20, extra_body={"logit_bias": bias, "ignore_eos": True}
    )
    assert choice.finish_reason == "length" and not choice.message.content
