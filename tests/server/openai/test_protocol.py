"""Fields of OpenAI's and vLLM's protocols: what is accepted, what an answer holds, which field an error names."""

import json

import httpx
import pytest

from choreograph.errors import InvalidRequestError
from choreograph.server.openai.protocol import ChatCompletionRequest
from choreograph.server.structured.constraints import json_constraint

ASK = [{"role": "user", "content": "Which river flows through Paris?"}]
BODY = {"model": "tiny", "messages": ASK, "max_tokens": 4, "temperature": 0}
START = [*ASK, {"role": "assistant", "content": "The river Seine, which"}]


def post(live, path, body):
    return httpx.post(f"{live.url}/{path}", json=body, timeout=60)


def chunks(live, path, body):
    """Return the chunks of a stream."""
    text = post(live, path, body | {"stream": True}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/completions"])
def test_every_chunk_has_the_usage_so_far_on_demand(live, path):
    prompt = {"prompt": ["One two three", "Red"]} if path == "v1/completions" else {"messages": ASK}
    body = {"model": "tiny", "max_tokens": 5, "ignore_eos": True, "n": 2, "return_token_ids": True, **prompt}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = chunks(live, path, body | {"stream_options": options})
    num_prompt, num_generated = dict[int, int](), dict[int, int]()
    for part in parts:
        (choice,), usage = part["choices"], part["usage"]
        index = choice["index"]
        num_generated[index] = num_generated.get(index, 0) + len(choice.get("token_ids", ()))
        num_prompt.setdefault(index, usage["prompt_tokens"])
        total = num_prompt[index] + num_generated[index]
        expected = {"prompt_tokens": num_prompt[index], "completion_tokens": num_generated[index]}
        assert usage == expected | {"total_tokens": total}
    assert set(num_generated.values()) == {5}
    assert last["usage"]["prompt_tokens"] == sum(num_prompt[index] for index in num_prompt if index % 2 == 0)
    assert last["usage"]["completion_tokens"] == 5 * len(num_prompt)
    without = chunks(live, path, body | {"stream_options": {"continuous_usage_stats": True}})
    assert not any("usage" in part for part in without)


def test_streamed_completions_have_the_log_probabilities_of_every_token(live):
    body = {"model": "tiny", "prompt": "One", "max_tokens": 12, "seed": 3, "logprobs": 1, "return_token_ids": True}
    (whole,) = post(live, "v1/completions", body).json()["choices"]
    parts = [choice for part in chunks(live, "v1/completions", body) for choice in part["choices"]]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    assert [token for part in parts for token in part["logprobs"]["tokens"]] == whole["logprobs"]["tokens"]


def test_token_ids_of_the_prompt_are_returned_with_those_of_the_answer(live):
    chat = BODY | {"return_token_ids": True}
    tokens = post(live, "tokenize", {"messages": ASK}).json()["tokens"]
    assert post(live, "v1/chat/completions", chat).json()["prompt_token_ids"] == tokens
    first, *others = chunks(live, "v1/chat/completions", chat)
    assert first["prompt_token_ids"] == tokens and not any("prompt_token_ids" in part for part in others)
    body = {"model": "tiny", "prompt": [[5, 6], [7]], "max_tokens": 2, "return_token_ids": True}
    whole = [choice["prompt_token_ids"] for choice in post(live, "v1/completions", body).json()["choices"]]
    streamed = [choice for part in chunks(live, "v1/completions", body) for choice in part["choices"]]
    streamed.sort(key=lambda choice: choice["index"])
    assert whole == [choice["prompt_token_ids"] for choice in streamed if "prompt_token_ids" in choice] == [[5, 6], [7]]


CHAT, TEXT, RESPONSES = "v1/chat/completions", "v1/completions", "v1/responses"


@pytest.mark.parametrize(
    ("path", "change", "param", "text"),
    [
        (CHAT, {"stop": 5}, "stop", "a valid string or a valid list"),
        (CHAT, {"stop": ["x", None]}, "stop[1]", "a valid string"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a valid string or a valid list"),
        (CHAT, {"messages": [*ASK, {"role": "user", "content": [{"type": "text", "text": 5}]}]},
         "messages[1].content[0].text", "a valid string"),
        (CHAT, {"messages": [5]}, "messages[0]", "should be an object"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "Missing required parameter"),
        (CHAT, {"tool_choice": "x"}, "tool_choice", "'required' or an object"),
        (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function", "Missing required parameter"),
        (CHAT, {"tools": [{"function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters", "an object"),
        (CHAT, {"choreography": {"reuse": "auto", "x": 1}}, "choreography.x", "Unknown parameter"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
        (TEXT, {"prompt": [1, "x"]}, "prompt[0]", "a valid string"),
        (TEXT, {"prompt": 5}, "prompt", "a valid string or a valid list"),
        (TEXT, {"prompt": [5, 10**9]}, "prompt", "1000000000 is outside the vocabulary"),
        (TEXT, {"prompt": [[5], [-1]]}, "prompt", "-1 is outside the vocabulary"),
        (TEXT, {"prompt": [5] * 9000}, "prompt", "maximum context length"),
        (TEXT, {"prompt": "x", "stream_options": {}}, "stream_options", "stream=true"),
        (RESPONSES, {"input": [{"role": "user", "content": 5}]}, "input", "a valid string or a valid list"),
        (RESPONSES, {"input": "x", "tools": [{"type": "function"}]}, "tools", "name is missing"),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "x"}}}, "text", "'json_schema'"),
        (RESPONSES, {"input": "x " * 9000}, "input", "maximum context length"),
        ("detokenize", {"tokens": [10**9]}, "tokens", "1000000000 is outside the vocabulary"),
        ("tokenize", {"prompt": "x", "messages": ASK}, None, "give either prompt or messages"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_as_openai_does(live, path, change, param, text):
    body = {"messages": ASK, **change} if path == CHAT else change
    answer = post(live, path, {"model": "tiny"} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and text in error["message"], error


@pytest.mark.parametrize("content", ["[]", "5", '"x"', "null", ""])
def test_a_body_that_is_no_object_is_told_what_is_expected(live, content):
    for path in (CHAT, "v1/workflows/w"):
        method = "PUT" if path.startswith("v1/workflows") else "POST"
        headers = {"content-type": "application/json"}
        answer = httpx.request(method, f"{live.url}/{path}", content=content, headers=headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, None) and "must be a JSON object" in error["message"]


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({"regex": "(("}, "unclosed group"),
        ({"grammar": "start: /a"}, ""),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": 'root ::= "x" ('}, ""),
        ({"grammar": "start: start"}, ""),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#/$defs/no"}}, "/$defs/no"),
        ({"json": {"$ref": "#"}}, "no finite value"),
        ({"json": "{"}, ""),
    ],
)
def test_a_refused_grammar_is_explained_in_one_short_line(live, outputs, text):
    answer = post(live, CHAT, BODY | {"structured_outputs": outputs})
    (kind,), message = outputs, answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith(f"{kind}: ") and text in message
    assert "\n" not in message and len(message) < 320 and message.count(f"{kind}: ") == 1


def nested(name, **schema):
    return {"type": "object", "properties": {name: schema}, "required": [name]}


NODE = {"$ref": "#/$defs/node"}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#"}}},
        nested("next", **{"$ref": "#"}),
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "string"}, {"$ref": "#"}], "minItems": 2},
        {**NODE, "$defs": {"node": nested("next", **NODE)}},
        {**NODE, "$defs": {"node": nested("a", **{"$ref": "#/$defs/b~1c"}), "b/c": nested("d", **NODE)}},
    ],
)
def test_a_schema_that_only_endless_values_follow_is_refused(schema):
    with pytest.raises(InvalidRequestError, match=r"json: .* no finite value"):
        json_constraint(schema)


@pytest.mark.parametrize(
    "schema",
    [
        nested("next", anyOf=[{"$ref": "#"}, {"type": "null"}]),
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}},
        {**NODE, "$defs": {"node": nested("kids", type="array", items=NODE)}},
        {**NODE, "$defs": {"node": nested("x", **{"$ref": "#/$defs/leaf"}), "leaf": {"type": "integer"}}},
        {**NODE, "$defs": {"node": {"oneOf": [nested("x", **NODE), {"enum": [1, 2]}]}}},
    ],
)
def test_a_recursive_schema_with_finite_values_is_accepted(schema):
    assert json_constraint(schema).kind == "json"


def test_a_long_chain_of_references_is_accepted():
    chain = {f"n{i}": nested("next", **{"$ref": f"#/$defs/n{i + 1}"}) for i in range(600)} | {"n600": {"type": "null"}}
    assert json_constraint({"$ref": "#/$defs/n0", "$defs": chain}).kind == "json"


def test_definitions_of_tools_are_found_by_a_required_call(live):
    tools = []
    for name, kind in (("weather", "City"), ("rent", "Flat")):
        parameters = nested("place", **{"$ref": f"#/$defs/{kind}"})
        parameters["$defs"] = {kind: {"enum": ["Oslo", "Rome"]}}
        tools.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    body = BODY | {"tools": tools, "tool_choice": "required", "max_tokens": 60}
    (call,) = post(live, CHAT, body).json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["place"] in ("Oslo", "Rome")


def test_each_tool_has_definitions_of_its_own(live):
    tools = []
    for name in ("aa", "bb"):
        node = nested("value", **{"$ref": "#/$defs/Leaf"}) | {"definitions": {"Item": {"enum": [name]}}}
        item = nested("next", anyOf=[{"$ref": "#/definitions/Item"}, {"$ref": "#/$defs/Item"}])
        definitions = {"Item": node, "Leaf": {"enum": [name]}}
        parameters = nested("item", **{"$ref": "#/$defs/Item"}) | {"$defs": definitions, "definitions": {"Item": item}}
        tools.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    for choice in ("required", *({"type": "function", "function": {"name": name}} for name in ("aa", "bb"))):
        body = BODY | {"tools": tools, "tool_choice": choice, "max_tokens": 60}
        (call,) = post(live, CHAT, body).json()["choices"][0]["message"]["tool_calls"]
        name = call["function"]["name"] if choice == "required" else choice["function"]["name"]
        assert call["function"]["name"] == name
        assert json.loads(call["function"]["arguments"]) == {"item": {"value": name}}


def test_a_reference_to_its_own_root_describes_a_tool(live):
    parameters = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer = post(live, CHAT, BODY | {"tools": tools, "tool_choice": "required", "max_tokens": 200})
    assert answer.status_code == 200


@pytest.mark.parametrize("own", [{"$ref": "#"}, {"$ref": "#/$defs/a"}, {"$ref": "#/properties/b"}])
def test_tools_without_finite_arguments_or_with_unknown_references_are_refused(live, own):
    parameters = nested("a", **own) | {"$defs": {"a": {"$ref": "#"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer = post(live, CHAT, BODY | {"tools": tools, "tool_choice": "required"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "tools" and "parameters of f:" in error["message"]


def test_salts_of_different_fields_differ():
    def salt(**fields):
        return ChatCompletionRequest(model="m", messages=ASK, **fields).salt

    assert salt() == salt(cache_salt="", extra_key="")
    pairs = [
        {},
        {"cache_salt": "a"},
        {"extra_key": "a"},
        {"cache_salt": "a", "extra_key": "b"},
        {"cache_salt": '["a", "b"]'},
    ]
    assert len({salt(**pair) for pair in pairs}) == len(pairs)


def test_tokenize_and_detokenize_know_the_models(live):
    for path, body in (("tokenize", {"prompt": "x"}), ("detokenize", {"tokens": [5]})):
        assert post(live, path, body | {"model": "tiny"}).status_code == post(live, path, body).status_code == 200
        answer = post(live, path, body | {"model": "other"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_names_of_models_may_have_a_slash(live):
    answer = httpx.get(f"{live.url}/v1/models/folder/other")
    assert "'folder/other' does not exist" in answer.json()["error"]["message"] and answer.status_code == 404


def test_log_probabilities_of_a_response_are_those_of_the_chat_streamed_or_not(live, client):
    chat = BODY | {"logprobs": True, "top_logprobs": 2, "max_tokens": 8}
    expected = post(live, CHAT, chat).json()["choices"][0]["logprobs"]["content"]
    options = {"model": "tiny", "input": ASK[0]["content"], "max_output_tokens": 8, "temperature": 0, "top_logprobs": 2}
    (part,) = post(live, RESPONSES, options).json()["output"][0]["content"]
    assert part["logprobs"] == expected and len(expected[0]["top_logprobs"]) == 2
    events = list(client.responses.create(**options, stream=True))
    by_kind = {event.type: event for event in events}
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    tokens = [entry["token"] for entry in expected]
    assert [item.token for delta in deltas for item in delta.logprobs] == tokens
    assert all(len(item.top_logprobs) == 2 for delta in deltas for item in delta.logprobs)
    assert [item.token for item in by_kind["response.output_text.done"].logprobs] == tokens
    assert [item.token for item in by_kind["response.content_part.done"].part.logprobs] == tokens
    (content,) = by_kind["response.incomplete"].response.output[0].content
    assert content.model_dump()["logprobs"] == expected
    options |= {"top_logprobs": None, "include": ["message.output_text.logprobs"]}
    (part,) = post(live, RESPONSES, options).json()["output"][0]["content"]
    assert part["logprobs"] == [entry | {"top_logprobs": []} for entry in expected]


def test_status_routes_answer_head_requests(live):
    for route in ("health", "ready", "version", "metrics"):
        answer = httpx.head(f"{live.url}/{route}")
        assert (answer.status_code, answer.content) == (200, b"")


DEFAULTS = {
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
    "use_beam_search": False, "length_penalty": 1.0, "bad_words": [], "allowed_token_ids": None, "prompt_logprobs": None,
    "truncate_prompt_tokens": None, "return_tokens_as_token_ids": None, "kv_transfer_params": None, "extra_key": None,
    "stop": [], "stop_token_ids": [], "min_tokens": 0, "ignore_eos": False, "session_params": None, "input_ids": None,
}  # fmt: skip
CHAT_DEFAULTS = {"add_generation_prompt": True, "continue_final_message": False, "echo": False, "documents": None}
CHAT_DEFAULTS |= {"add_special_tokens": False, "chat_template": None, "mm_processor_kwargs": None}


def test_fields_of_vllm_are_accepted_with_their_defaults(live):
    plain = post(live, CHAT, BODY).json()["choices"][0]["message"]
    assert post(live, CHAT, BODY | DEFAULTS | CHAT_DEFAULTS).json()["choices"][0]["message"] == plain
    text = {"model": "tiny", "prompt": "One", "max_tokens": 2, "temperature": 0}
    assert post(live, TEXT, text | DEFAULTS).json()["choices"] == post(live, TEXT, text).json()["choices"]
    own = {"include_reasoning": True, "enable_response_messages": False, "input": "x", "model": "tiny"}
    assert post(live, RESPONSES, DEFAULTS | own | {"max_output_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"spaces_between_special_tokens": False}, {"include_stop_str_in_output": True}, {"use_beam_search": True},
        {"bad_words": ["x"]}, {"allowed_token_ids": [5]}, {"truncate_prompt_tokens": 5},
        {"echo": True}, {"add_special_tokens": True}, {"chat_template": "x"}, {"documents": []}, {"input_ids": [5]},
        {"add_generation_prompt": False},
    ],
)  # fmt: skip
def test_other_values_of_fields_without_support_are_refused(live, change):
    answer = post(live, CHAT, BODY | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, *change)


@pytest.mark.parametrize("options", [{"add_generation_prompt": False}, {}])
@pytest.mark.parametrize("reuse", ["exact", "messages", "auto"])
def test_the_last_message_is_continued(live, options, reuse):
    prompt = live.engine.tokenizer.apply_chat_template(START, continue_final_message=True, return_dict=False)
    body = options | {"messages": START, "continue_final_message": True}
    assert post(live, "tokenize", body).json()["tokens"] == prompt
    body |= {"model": "tiny", "max_tokens": 6, "temperature": 0, "choreography": {"reuse": reuse, "workflow": "c"}}
    answer = post(live, CHAT, body).json()["choices"][0]["message"]["content"]
    live.wait_until_idle()
    with live.engine.session(mode="prefix", client_id="test") as session:
        text = session.decode(prompt, max_tokens=6, temperature=0).text
    assert answer == text if reuse == "exact" else answer


def test_a_continued_message_is_found_again_as_one(live):
    reuse = {"reuse": "messages", "workflow": "continued"}
    start = {"role": "assistant", "content": "Several rivers do, of which"}
    body = BODY | {"messages": [*ASK, start], "continue_final_message": True, "choreography": reuse}
    text = start["content"] + post(live, CHAT, body).json()["choices"][0]["message"]["content"]
    live.wait_until_idle()
    chat = [*ASK, {"role": "assistant", "content": text}, {"role": "user", "content": "And through Rome?"}]
    usage = post(live, CHAT, BODY | {"messages": chat, "choreography": reuse}).json()["usage"]["choreography"]
    (stored,) = {
        stored
        for workflow in live.app.state.service.planner.store.workflows
        for index in workflow.indexes.values()
        for stored in index.by_content.values()
        if text in live.engine.tokenizer.decode(stored.tokens) and stored.message.kind == "decode"
    }
    assert usage["prefix_tokens"] >= len(stored.tokens) > 8


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": ASK}, "assistant"),
        ({"messages": [*ASK, {"role": "assistant", "content": " "}]}, "assistant"),
    ],
)
def test_a_chat_that_cannot_be_continued_is_refused(live, change, text):
    body = {"messages": START, "continue_final_message": True} | change
    for path, more in ((CHAT, {"model": "tiny"}), ("tokenize", {})):
        error = post(live, path, body | more).json()["error"]
        assert error["param"] == "continue_final_message" and text in error["message"]


def test_special_tokens_are_part_of_the_text_on_demand(live):
    tokenizer = live.engine.tokenizer
    special = tokenizer.eos_token_id
    body = BODY | {"logit_bias": {str(special): 100}, "ignore_eos": True, "max_tokens": 2}
    for path, change in ((CHAT, {}), (TEXT, {"messages": None, "prompt": "x"})):
        texts = []
        for skips in (True, False):
            options = {name: value for name, value in (body | change).items() if value is not None}
            (choice,) = post(live, path, options | {"skip_special_tokens": skips}).json()["choices"]
            texts.append(choice["message"]["content"] if path == CHAT else choice["text"])
        assert texts == ["", tokenizer.eos_token * 2]


def test_the_extra_key_separates_the_cache(live):
    body = BODY | {
        "messages": [{"role": "user", "content": "Only one key knows this text, which is long enough. " * 2}]
    }

    def cached(**options):
        usage = post(live, CHAT, body | options).json()["usage"]
        live.wait_until_idle()
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached() < 30 < cached()
    assert cached(extra_key="a") == 0 and cached(extra_key="a") > 30 and cached(extra_key="b") == 0
