"""Real clients of the server: chats, streams, tools, structured outputs, responses, completions."""

import json
import re

import httpx
import openai
import pytest

from choreograph import SamplingParams
from choreograph.server.structured.constraints import _close_objects

ASK = [{"role": "user", "content": "Which river flows through Paris?"}]
GREEDY = {"model": "tiny", "temperature": 0, "seed": 1}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks up a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "population")
]


def in_process_text(live, messages, **options):
    """The text of the same chat from a session of the same engine, of another client."""
    prompt = live.engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with live.engine.session(mode="prefix", client_id="test") as session:
        return session.decode(prompt, sampling=SamplingParams(**options)).text


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.0, "seed": 7, "top_p": 0.9}])
def test_a_chat_has_the_text_of_the_engine_in_process(live, client, options):
    answer = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=12, **options)
    live.wait_until_idle()
    assert answer.choices[0].message.content == in_process_text(live, ASK, max_tokens=12, **options)
    assert answer.usage.completion_tokens == 12 and answer.choices[0].finish_reason == "length"


def test_a_repeated_prompt_is_cached(client):
    messages = [{"role": "user", "content": "Say this again and again, and once more after that."}]
    first, second = (client.chat.completions.create(**GREEDY, messages=messages, max_tokens=4) for _ in range(2))
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1


def test_a_stream_is_the_whole_answer_with_usage_at_its_end(client):
    whole = client.chat.completions.create(**GREEDY, messages=ASK, max_tokens=9, n=2)
    chunks = list(
        client.chat.completions.create(
            **GREEDY, messages=ASK, max_tokens=9, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == [
        "length"
    ] * 2
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 18
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_answers_of_one_request_have_seeds_of_their_own(client):
    both = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=8, n=2, seed=3)
    second = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=8, seed=4)
    assert both.choices[0].message.content != both.choices[1].message.content == second.choices[0].message.content


def test_a_stop_string_ends_an_answer_and_is_not_part_of_it(client):
    text = client.chat.completions.create(**GREEDY, messages=ASK, max_tokens=20).choices[0].message.content
    stop = text[len(text) // 2 :][:3]
    parts = client.chat.completions.create(**GREEDY, messages=ASK, max_tokens=20, stop=[stop], stream=True)
    chunks = [choice for part in parts for choice in part.choices]
    assert "".join(choice.delta.content or "" for choice in chunks) == text[: text.index(stop)]
    assert chunks[-1].finish_reason == "stop"


def test_log_probabilities_come_with_the_most_likely_tokens(client):
    answer = client.chat.completions.create(**GREEDY, messages=ASK, max_tokens=5, logprobs=True, top_logprobs=3)
    items = answer.choices[0].logprobs.content
    assert len(items) == 5 and all(len(item.top_logprobs) == 3 for item in items)
    assert all(item.logprob == max(top.logprob for top in item.top_logprobs) <= 0 for item in items)


async def test_concurrent_requests_have_the_answers_of_single_ones(live):
    chats = [[{"role": "user", "content": f"Tell me about the number {number}."}] for number in range(6)]
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        import asyncio

        answers = await asyncio.gather(
            *(client.chat.completions.create(**GREEDY, messages=chat, max_tokens=8) for chat in chats)
        )
        for chat, answer in zip(chats, answers, strict=True):
            single = await client.chat.completions.create(**GREEDY, messages=chat, max_tokens=8)
            assert single.choices[0].message.content == answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called_with_arguments_of_its_schema(client, stream):
    options = {"messages": ASK, "tools": TOOLS, "max_tokens": 60, "model": "tiny", "seed": 5, "temperature": 0.3}
    options["tool_choice"] = {"type": "function", "function": {"name": "population"}}
    if stream:
        chunks = [part.choices[0] for part in client.chat.completions.create(**options, stream=True)]
        calls = [call for choice in chunks for call in choice.delta.tool_calls or ()]
        reason = chunks[-1].finish_reason
    else:
        choice = client.chat.completions.create(**options).choices[0]
        calls, reason = choice.message.tool_calls, choice.finish_reason
        assert choice.message.content is None
    (call,) = calls
    assert call.function.name == "population" and reason == "tool_calls"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) <= {"city", "days"} and len(arguments["city"]) <= 8


def test_tool_results_are_part_of_the_prompt(live, client):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "minus four degrees"},
    ]
    answer = client.chat.completions.create(**GREEDY, messages=messages, tools=TOOLS, max_tokens=3)
    reply = httpx.post(f"{live.url}/tokenize", json={"messages": messages, "tools": TOOLS}).json()
    text = httpx.post(f"{live.url}/detokenize", json={"tokens": reply["tokens"]}).json()["prompt"]
    assert reply["count"] == answer.usage.prompt_tokens
    assert all(part in text for part in ("minus four degrees", '"city": "Oslo"', "Looks up a city.", "<tool_response>"))


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, r"\d{3}-[a-f]{2}"),
        ({"structured_outputs": {"choice": ["north", "south"]}}, "north|south"),
        ({"structured_outputs": {"grammar": 'start: "a" /[bc]/ "d"'}}, "a[bc]d"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [yz] "w"'}}, "x[yz]w"),
        ({"structured_outputs": {"json": {"enum": ["one", 2]}}}, '"one"|2'),
    ],
)
def test_structured_outputs_follow_their_grammar(client, options, pattern):
    for seed in range(2):
        answer = client.chat.completions.create(
            model="tiny", messages=ASK, max_tokens=30, seed=seed, extra_body=options
        )
        assert re.fullmatch(pattern, answer.choices[0].message.content, re.DOTALL)


def test_a_json_schema_gives_an_object_of_it(client):
    schema = {
        "type": "object",
        "properties": {"grade": {"enum": ["A", "B"]}, "points": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["grade", "points"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "grade", "schema": schema}}
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=40, seed=2, response_format=form, n=2
    )
    for choice in answer.choices:
        value = json.loads(choice.message.content)
        assert value["grade"] in ("A", "B") and 0 <= value["points"] <= 9 and choice.finish_reason == "stop"


def test_a_response_continues_an_earlier_one(client):
    first = client.responses.create(model="tiny", input="Hello", max_output_tokens=6, temperature=0)
    second = client.responses.create(
        model="tiny", input="Go on", previous_response_id=first.id, max_output_tokens=6, temperature=0
    )
    chat = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Go on"},
    ]
    same = client.chat.completions.create(**GREEDY, messages=chat, max_tokens=6)
    assert second.output_text == same.choices[0].message.content
    assert second.status == "incomplete" and second.usage.input_tokens == same.usage.prompt_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_events_of_a_streamed_response_build_its_text(client):
    events = list(client.responses.create(model="tiny", input="Hello", max_output_tokens=6, temperature=0, stream=True))
    kinds = [event.type for event in events]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].response.output_text == text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert text == client.responses.create(model="tiny", input="Hello", max_output_tokens=6, temperature=0).output_text
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.incomplete"


def test_completions_continue_texts_and_token_ids(live, client):
    answer = client.completions.create(**GREEDY, prompt=["One two", "Red green"], max_tokens=4, echo=True)
    assert [
        choice.text.startswith(prompt) for choice, prompt in zip(answer.choices, ["One two", "Red green"], strict=True)
    ]
    tokens = httpx.post(f"{live.url}/tokenize", json={"prompt": "One two"}).json()["tokens"]
    same = client.completions.create(**GREEDY, prompt=tokens, max_tokens=4, logprobs=1)
    assert "One two" + same.choices[0].text == answer.choices[0].text
    assert len(same.choices[0].logprobs.tokens) == 4


def test_metrics_have_the_names_of_vllm(live, client):
    client.chat.completions.create(**GREEDY, messages=ASK, max_tokens=2)
    text = httpx.get(f"{live.url}/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total",
        "num_preemptions_total", "time_to_first_token_seconds", "inter_token_latency_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds",
    ):  # fmt: skip
        assert f"# TYPE choreograph:{name}" in text, name


def test_status_routes_and_models_answer(live, client):
    assert [httpx.get(f"{live.url}/{path}").status_code for path in ("health", "ready", "version")] == [200] * 3
    assert [model.id for model in client.models.list().data] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_objects_have_no_properties_that_the_schema_does_not_list():
    open_schema = {
        "type": "object",
        "properties": {"properties": {"type": "object", "properties": {"a": {"type": "string"}}}},
        "$defs": {
            "any": {"type": "object"},
            "rest": {"type": "object", "properties": {}, "additionalProperties": True},
        },
    }
    closed = _close_objects(open_schema)
    assert closed["additionalProperties"] is False
    assert closed["properties"]["properties"]["additionalProperties"] is False
    assert closed["$defs"] == open_schema["$defs"]
    assert "additionalProperties" not in open_schema
