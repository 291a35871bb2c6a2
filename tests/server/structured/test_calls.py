"""Tool calls of answers: where they end, what their arguments are, and what may stand next to them."""

import json

import httpx
import openai
import pytest
from helpers.forced_answers import ASK, RESPONSE_TOOLS, TOOLS, ZONE, arguments_of, call, chat, forced, tool
from helpers.live_server import make_engine, serving

BOTH = pytest.mark.parametrize("stream", [False, True])


def response(client, text, **options):
    options = {
        "model": "tiny",
        "input": "Hi",
        "temperature": 0,
        "tools": RESPONSE_TOOLS,
        "max_output_tokens": 300,
    } | options
    return client.responses.create(**options, extra_body=forced(text))


def check_response_events(events):
    """Items are announced in order, and what is announced and added up is what is done."""
    announced, deltas, done = [], {}, {}
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(announced) and event.item.status == "in_progress"
            assert getattr(event.item, "arguments", "") == "" and not getattr(event.item, "content", None)
            announced.append(event.item)
        elif event.type.endswith(".delta"):
            deltas.setdefault(event.output_index, []).append(event.delta)
        elif event.type == "response.output_item.done":
            done[event.output_index] = event.item
            item = event.item
            text = item.arguments if item.type == "function_call" else "".join(part.text for part in item.content)
            assert "".join(deltas.get(event.output_index, [])) == text
            assert (item.id, item.type) == (announced[event.output_index].id, announced[event.output_index].type)
    final = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.id for item in final.output] == [done[index].id for index in range(len(announced))]
    return final


UTC, EST = (json.dumps({"zone": zone}) for zone in ("UTC", "EST"))
MIXED = f"Well: {call(UTC)}\n{call(EST)} bye"


@pytest.mark.parametrize("text", [call(UTC), MIXED, "", "only text"])
def test_the_items_of_a_streamed_response_add_up(client, text):
    events = list(response(client, text or " ", stream=True))
    final = check_response_events(events)
    whole = response(client, text or " ")
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert final.output_text == whole.output_text


def test_a_response_without_text_has_an_empty_message(live, client):
    events = list(
        client.responses.create(
            model="tiny", input="Hi", max_output_tokens=2, stream=True, temperature=0,
            extra_body={"logit_bias": {str(live.engine.tokenizer.eos_token_id): 100}},
        )
    )  # fmt: skip
    final = check_response_events(events)
    assert final.output_text == "" and [item.type for item in final.output] == ["message"]


def test_the_client_assembles_a_streamed_call_once(client):
    options = {"model": "tiny", "input": "Hi", "tools": RESPONSE_TOOLS, "temperature": 0, "max_output_tokens": 300}
    snapshots = []
    with client.responses.stream(**options, extra_body=forced(MIXED)) as stream:
        for event in stream:
            if event.type == "response.function_call_arguments.delta":
                snapshots.append(event.snapshot)
        final = stream.get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    assert snapshots == [item.arguments for item in calls] == [UTC, EST]
    assert final.output_text == "Well:  bye" and final.status == "completed"
    assert [item.type for item in final.output] == ["message", "function_call", "function_call", "message"]


async def test_the_asynchronous_client_assembles_a_streamed_call_once(live):
    options = {"model": "tiny", "input": "Hi", "tools": RESPONSE_TOOLS, "temperature": 0, "max_output_tokens": 300}
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        text = call(UTC)
        async with client.responses.stream(**options, extra_body=forced(text)) as stream:
            snapshots = [e.snapshot async for e in stream if e.type == "response.function_call_arguments.delta"]
            final = await stream.get_final_response()
        assert snapshots == [UTC] == [item.arguments for item in final.output]
        chat_options = {"model": "tiny", "messages": ASK, "tools": TOOLS, "temperature": 0, "max_tokens": 300}
        async with client.chat.completions.stream(**chat_options, extra_body=forced(text)) as stream:
            done = [e.arguments async for e in stream if e.type == "tool_calls.function.arguments.done"]
            completion = await stream.get_final_completion()
        assert done == [UTC] == arguments_of(completion.choices[0])


def test_a_response_with_calls_and_texts_is_sent_back_as_one_answer(live, client):
    first = response(client, MIXED)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "noon"}
        for item in first.output
        if item.type == "function_call"
    ]
    items = [
        {"role": "user", "content": "Hi"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        *outputs,
    ]
    resent = response(client, "fine", input=items)
    continued = response(client, "fine", input=outputs, previous_response_id=first.id)
    assert resent.usage.input_tokens == continued.usage.input_tokens


@BOTH
def test_a_cut_behind_a_call_is_told(live, client, stream):
    text = call(UTC) + " and so on" * 30
    limit = len(live.engine.tokenizer.encode(call(UTC))) + 3
    choice = chat(client, text, stream=stream, tools=TOOLS, max_tokens=limit)
    assert choice.finish_reason == "length" and arguments_of(choice) == [UTC]
    result = response(client, text, max_output_tokens=limit, stream=stream)
    final = check_response_events(list(result)) if stream else result
    assert final.status == "incomplete" and final.incomplete_details.reason == "max_output_tokens"
    assert [item.type for item in final.output] == ["function_call", "message"]
    assert [item.status for item in final.output] == ["completed", "incomplete"]


@BOTH
@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_a_cut_inside_a_second_call_keeps_the_first(talker_folder, stream, form):
    one, two = call(UTC), call('{"zone": "a longer one"}')
    if form == "llama3_json":
        one, two = (json.dumps({"name": "get_time", "parameters": {"zone": zone}}) for zone in ("UTC", "a longer one"))
        two = f"; {two}"
    with serving(make_engine(talker_folder), tool_parser=form) as live:
        tokenizer = live.engine.tokenizer
        limit = len(tokenizer.encode(one)) + len(tokenizer.encode(two)) // 2
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            choice = chat(client, one + two, stream=stream, tools=TOOLS, max_tokens=limit)
            assert choice.finish_reason == "length" and arguments_of(choice) == [UTC]
            assert choice.message.content and two.startswith(choice.message.content)


@BOTH
@pytest.mark.parametrize("stop", ["</tool_call>", "/tool", "</tool_call> and"])
def test_a_call_whose_end_is_a_stop_string_is_a_call(client, stream, stop):
    choice = chat(client, call(UTC) + " and more", stream=stream, tools=TOOLS, stop=[stop])
    assert arguments_of(choice) == [UTC] and choice.finish_reason == "tool_calls"
    assert not choice.message.content


@BOTH
@pytest.mark.parametrize(
    "zone",
    [
        "a</tool_call>b <tool_call> {c}",
        '}}"</tool_call>',
        "\\",
        "[{",
        "北京 😀",
        '<tool_call>{"name": "get_time"',
        "\u2028",
    ],
)
def test_markup_in_arguments_does_not_end_a_call(client, stream, zone):
    for arguments in (json.dumps({"zone": zone}), json.dumps({"zone": zone}, ensure_ascii=False)):
        choice = chat(client, call(arguments), stream=stream, tools=TOOLS)
        assert arguments_of(choice) == [arguments] and choice.finish_reason == "tool_calls"
        (item,) = response(client, call(arguments)).output
        assert item.arguments == arguments


@BOTH
@pytest.mark.parametrize(
    "value",
    ["1e400", "0.1000000000000000055", "12345678901234567890123", "1.0", "-0", r'"\ud83d"', r'"\u00e9\/"', "[1 ,  2]"],
)
def test_arguments_are_the_text_of_the_model(client, stream, value):
    arguments = f'{{"zone":{value} }}'
    assert arguments_of(chat(client, call(arguments), stream=stream, tools=TOOLS)) == [arguments]
    (item,) = response(client, call(arguments)).output
    assert item.arguments == arguments


@BOTH
@pytest.mark.parametrize(
    "arguments",
    [
        '{"zone": NaN}',
        '{"zone": -Infinity}',
        '{"zone": 01}',
        "{zone: 1}",
        '{"zone": "a\nb"}',
        '{"zone": 1,}',
        "[1]",
        '"no"',
    ],
)
def test_a_call_whose_arguments_are_no_json_object_is_content(client, stream, arguments):
    choice = chat(client, call(arguments), stream=stream, tools=TOOLS)
    assert choice.message.content == call(arguments) and not choice.message.tool_calls
    assert choice.finish_reason == "stop"


def test_arguments_in_a_string_are_read(client):
    text = call(json.dumps('{"zone": 1e400}'))
    assert arguments_of(chat(client, text, tools=TOOLS)) == ['{"zone": 1e400}']
    assert arguments_of(chat(client, call("null"), tools=TOOLS)) == ["{}"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
@pytest.mark.parametrize("function", [{}, {"parameters": None}, {"parameters": {}}, {"parameters": {"type": "object"}}])
def test_a_required_call_of_a_tool_without_parameters_has_no_arguments(client, choice, function):
    result = chat(client, tools=[tool(**function)], tool_choice=choice)
    assert arguments_of(result) == ["{}"] and result.finish_reason == "tool_calls"


def test_free_arguments_are_allowed_where_the_schema_says_so(client):
    free = {"type": "object", "additionalProperties": {"enum": [1]}}
    (arguments,) = arguments_of(chat(client, tools=[tool(parameters=free)], tool_choice="required", max_tokens=60)) or [
        "{}"
    ]
    assert set(json.loads(arguments).values()) <= {1}


SCHEMA = {
    "type": "object",
    "properties": {"grade": {"enum": ["A"]}},
    "required": ["grade"],
    "additionalProperties": False,
}
FORMATS = [{"type": "json_schema", "json_schema": {"name": "grade", "schema": SCHEMA}}]


@BOTH
@pytest.mark.parametrize("response_format", [*FORMATS, {"type": "json_object"}])
@pytest.mark.parametrize(
    ("form", "starts"),
    [("hermes", ("<tool", "{")), pytest.param("llama3_json", ("name", "grade"), marks=pytest.mark.slow)],
)
def test_tools_beside_a_format_give_calls_or_an_answer_of_it(talker_folder, form, starts, response_format, stream):
    zone = {"type": "object", "properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"]}
    options = {"tools": [tool(parameters=zone)], "response_format": response_format, "max_tokens": 80}
    is_free = response_format["type"] == "json_object"
    with serving(make_engine(talker_folder), tool_parser=form) as live:
        encode = live.engine.tokenizer.encode
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            call_bias, answer_bias = (  # decides between the two
                {str(encode(start[:end])[0]): 100 for end in range(1, len(start) + 1)} for start in starts
            )
            choice = chat(
                client, stream=stream, extra_body={"logit_bias": call_bias}, parallel_tool_calls=False, **options
            )
            if not (is_free and form == "llama3_json"):  # any object may have a name
                assert arguments_of(choice) == [UTC] and choice.finish_reason == "tool_calls"
            choice = chat(client, stream=stream, extra_body={"logit_bias": call_bias}, **options)
            if not is_free:
                assert set(arguments_of(choice)) == {UTC}
            if not is_free:
                choice = chat(client, stream=stream, extra_body={"logit_bias": answer_bias}, **options)
                assert json.loads(choice.message.content) == {"grade": "A"} and choice.finish_reason == "stop"


def test_tools_do_not_change_an_explicit_grammar(client):
    assert chat(client, "yes", tools=TOOLS).message.content == "yes"
    body = {"structured_outputs": {"json": SCHEMA}}
    assert json.loads(chat(client, tools=TOOLS, extra_body=body).message.content) == {"grade": "A"}


def test_a_required_call_beside_a_format_is_a_call(client):
    choice = chat(client, tools=[tool()], tool_choice="required", response_format=FORMATS[0])
    assert arguments_of(choice) == ["{}"]
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        chat(client, "yes", tools=TOOLS, tool_choice="required")


@BOTH
def test_names_of_tools_may_have_any_characters(client, stream):
    names = ['say "hi"', "наука", "a\\b", "😀", "</tool_call>"]
    for name in names:
        tools, choice = [tool(name)], {"type": "function", "function": {"name": name}}
        (result,) = chat(client, stream=stream, tools=tools, tool_choice=choice).message.tool_calls
        assert (result.function.name, result.function.arguments) == (name, "{}")
        text = f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {{}}}}</tool_call>'
        (result,) = chat(client, text, stream=stream, tools=tools).message.tool_calls
        assert result.function.name == name


@BOTH
def test_one_call_is_kept_where_calls_are_not_parallel(client, stream):
    text = call(UTC) + call(EST)
    choice = chat(client, text, stream=stream, tools=TOOLS, parallel_tool_calls=False)
    assert arguments_of(choice) == [UTC] and choice.finish_reason == "tool_calls"


def test_all_answers_of_a_request_have_their_calls(live):
    body = {"model": "tiny", "messages": ASK, "tools": TOOLS, "n": 3, "max_tokens": 60, "stream": True} | forced(MIXED)
    body["stream_options"] = {"include_usage": True}
    calls = {index: [] for index in range(3)}
    with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body, timeout=60) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    for chunk in chunks:
        for choice in chunk["choices"]:
            calls[choice["index"]] += choice["delta"].get("tool_calls", [])
    for items in calls.values():
        assert [item["index"] for item in items] == [0, 1] and len({item["id"] for item in items}) == 2
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_parameters_that_are_no_schema_are_named(client):
    with pytest.raises(openai.BadRequestError, match="parameters of get_time: ") as error:
        chat(client, tools=[tool(parameters=ZONE | {"not": {}})], tool_choice="required")
    assert error.value.param == "tools"
