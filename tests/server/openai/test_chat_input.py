"""What chats may hold, on a running server: sizes, stop strings, tools, calls, reasoning, orders of roles."""

import httpx
import openai
import pytest
from helpers import chat_templates
from helpers.live_server import make_engine, serving
from transformers import AutoTokenizer, LlamaForCausalLM

ASK = {"role": "user", "content": "Which river flows through Paris?"}
CHAT, RESPONSES, TEXT = "v1/chat/completions", "v1/responses", "v1/completions"
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def strict(talker_folder, tmp_path_factory):
    """A server of a model whose template refuses system turns and wants roles to alternate."""
    folder = str(tmp_path_factory.mktemp("strict"))
    LlamaForCausalLM.from_pretrained(talker_folder).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(talker_folder)
    tokenizer.chat_template = chat_templates.GEMMA_2
    tokenizer.save_pretrained(folder)
    with serving(make_engine(folder)) as server:
        yield server


def post(live, path, body):
    return httpx.post(f"{live.url}/{path}", json={"model": "tiny", **body}, timeout=60)


def prompt_text(live, messages, **options):
    """Return the prompt of a chat, as the server tokenizes it."""
    answer = post(live, "tokenize", {"messages": messages, **options})
    assert answer.status_code == 200, answer.text
    return live.engine.tokenizer.decode(answer.json()["tokens"])


def error_of(answer):
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


# -- sizes ---------------------------------------------------------------------------------------------------

TOO_LONG = {
    "messages": [{"role": "user", "content": "a"}] * 20_000,
    "words": [{"role": "user", "content": "word " * 600_000}],
    "letters": [{"role": "user", "content": "a" * 2_000_000}],
    "blanks": [{"role": "user", "content": " " * 3_000_000}],
    "emoji": [{"role": "user", "content": "👨‍👩" * 60_000}],
}


@pytest.mark.parametrize("kind", TOO_LONG)
@pytest.mark.parametrize("path", [CHAT, "tokenize", RESPONSES, TEXT])
def test_a_prompt_that_cannot_fit_is_refused_without_work_on_all_of_it(live, monkeypatch, path, kind):
    messages, num_chars = TOO_LONG[kind], []
    tokenize = live.engine.chat._tokenize
    monkeypatch.setattr(
        live.engine.chat, "_tokenize", lambda text, **options: num_chars.append(len(text)) or tokenize(text, **options)
    )
    field = {RESPONSES: "input", TEXT: "prompt"}.get(path, "messages")
    value = "".join(message["content"] for message in messages) * (9 if kind == "messages" else 1)
    error = error_of(post(live, path, {field: value if path == TEXT else messages}))
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert "maximum context length is 8192 tokens" in error["message"]
    assert sum(num_chars) < 1_200_000 and max(num_chars, default=0) <= 200_000
    assert httpx.get(f"{live.url}/health").status_code == 200


@pytest.mark.parametrize("path", [CHAT, "tokenize", RESPONSES])
def test_a_chat_of_too_many_messages_is_refused_before_they_are_read(live, path):
    field = "input" if path == RESPONSES else "messages"
    # the last one would be refused for its content, if it was read
    error = error_of(
        post(live, path, {field: [{"role": "user", "content": "a"}] * 40_000 + [{"role": "user", "content": 1}]})
    )
    assert error["param"] == field and "40,001 items" in error["message"]


def test_a_chat_of_many_messages_is_answered(live, client):
    chat = [{"role": ("user", "assistant")[index % 2], "content": str(index % 10)} for index in range(301)]
    for reuse in ("exact", "messages", "auto"):
        options = {"choreography": {"reuse": reuse, "workflow": "many"}}
        answer = client.chat.completions.create(model="tiny", messages=chat, max_tokens=2, extra_body=options)
        assert answer.usage.prompt_tokens > 3 * len(chat)
        live.wait_until_idle()


# -- stop strings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [[f"stop {n}" for n in range(10_000)], [f"s{n}" for n in range(257)], ["x" * 2049]])
@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_more_stop_strings_than_the_limit_are_refused(live, path, stop):
    field = {CHAT: {"messages": [ASK]}, TEXT: {"prompt": "x"}, RESPONSES: {"input": "x"}}[path]
    error = error_of(post(live, path, field | {"stop": stop}))
    assert error["param"] == "stop" and "use at most 2" in error["message"] and len(error["message"]) < 100


def test_many_stop_strings_are_looked_up_at_once(live, client, monkeypatch):
    ask = {"model": "tiny", "messages": [ASK], "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    text = client.chat.completions.create(**ask).choices[0].message.content
    calls = []
    kind = type(live.engine.tokenizer)
    get_vocab = kind.get_vocab
    monkeypatch.setattr(kind, "get_vocab", lambda self: calls.append(1) or get_vocab(self))
    stop = [f"\u2063{number}" for number in range(255)]
    assert client.chat.completions.create(**ask, stop=[*stop, "\u2064"]).choices[0].message.content == text
    cut = client.chat.completions.create(**ask, stop=[*stop, text[5:9]]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (text[: text.index(text[5:9])], "stop")
    assert not calls


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_more_token_ids_than_the_limit_are_refused(live, field):
    ids = range(5000)
    value = {str(token): 1 for token in ids} if field == "logit_bias" else list(ids)
    error = error_of(post(live, CHAT, {"messages": [ASK], field: value}))
    assert error["param"] == field and "5,000 token ids: use at most 4,096" in error["message"]


# -- tools and calls -----------------------------------------------------------------------------------------


def call(arguments):
    function = {"name": "get_time", "arguments": arguments}
    return [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    ]


@pytest.mark.parametrize("server", ["live", "strict"])
def test_the_prompt_has_the_characters_of_tools_and_calls(server, request):
    live = request.getfixturevalue(server)
    function = {"name": "北京时间", "description": "Wie spät ist es?", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    chat = [ASK, *call('{"zone": "北京"}'), {"role": "tool", "tool_call_id": "c", "content": "早上"}]
    text = prompt_text(live, chat, tools=tools)
    assert '"arguments": {"zone": "北京"}' in text and "北京时间" in text and "spät" in text and "\\u" not in text


@pytest.mark.parametrize("arguments", ["", " ", "null"])
def test_calls_without_arguments_have_an_empty_object(live, client, arguments):
    history = [ASK, *call(arguments), {"role": "tool", "tool_call_id": "c", "content": "ten"}]
    text = prompt_text(live, history, tools=[TOOL])
    assert '{"name": "get_time", "arguments": {}}' in text
    answer = client.chat.completions.create(model="tiny", messages=history, tools=[TOOL], max_tokens=2)
    item = {"type": "function_call", "call_id": "c", "name": "get_time", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "c", "output": "ten"}
    tool = {"type": "function", "name": "get_time", "parameters": TOOL["function"]["parameters"]}
    response = client.responses.create(
        model="tiny", input=[ASK, item, output], tools=[tool], max_output_tokens=2, extra_body={"return_token_ids": True}
    )  # fmt: skip
    assert response.usage.input_tokens == answer.usage.prompt_tokens


def test_arguments_that_are_no_json_stay_text(live):
    assert r'"arguments": "{\"zone\": "}' in prompt_text(live, [ASK, *call('{"zone": ')], tools=[TOOL])


# -- variables of the template -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("tools", [TOOL]),
        ("chat_template", "x"),
        ("messages", []),
        ("documents", []),
        ("tokenizer", "x"),
        ("tokenize", True),
        ("eos_token", "x"),
        ("raise_exception", "x"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "tokenize", RESPONSES])
def test_variables_that_the_server_sets_are_refused(live, path, name, value):
    field = {"input": "x"} if path == RESPONSES else {"messages": [ASK]}
    error = error_of(post(live, path, field | {"chat_template_kwargs": {name: value}}))
    assert error["param"] == "chat_template_kwargs" and repr(name) in error["message"]


def test_other_variables_are_accepted(live, client):
    options = {"chat_template_kwargs": {"enable_thinking": False, "self": 1, "source": "x"}}
    assert client.chat.completions.create(model="tiny", messages=[ASK], max_tokens=2, extra_body=options).choices


# -- reasoning in the history --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["thinking", "redacted_thinking", "reasoning"])
def test_the_reasoning_of_earlier_answers_is_left_out(live, client, kind):
    parts = [{"type": kind, kind: "Hm, a river.", "signature": "x"}, {"type": "text", "text": "The Seine."}]
    plain = {"role": "assistant", "content": "The Seine."}
    text = prompt_text(live, [ASK, {"role": "assistant", "content": parts}, ASK])
    assert text == prompt_text(live, [ASK, plain, ASK]) and "Hm" not in text
    chat = [ASK, {"role": "assistant", "content": parts}, ASK]
    answer = client.chat.completions.create(model="tiny", messages=chat, max_tokens=2)
    response = client.responses.create(model="tiny", input=chat, max_output_tokens=2)
    assert answer.usage.prompt_tokens == response.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match=kind):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=2)


def test_images_in_the_history_are_refused(client):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    for role in ("user", "assistant"):
        with pytest.raises(openai.BadRequestError, match="image_url"):
            client.chat.completions.create(model="tiny", messages=[{"role": role, "content": [image]}], max_tokens=2)


# -- templates that accept few orders of roles ---------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "The Seine."}


@pytest.mark.parametrize(
    "chat",
    [
        [SYSTEM, ASK],
        [SYSTEM, {"role": "developer", "content": "Be kind."}, ASK],
        [SYSTEM, ASK, ANSWER, {"role": "system", "content": "Be precise."}, ASK],
        [ASK, ASK, ANSWER, ASK],
        [ASK, ANSWER, ANSWER, ASK],
        [SYSTEM, ANSWER, ASK],
    ],
)
@pytest.mark.parametrize("reuse", ["exact", "messages", "auto"])
def test_chats_are_folded_for_a_strict_template(strict, chat, reuse):
    text = prompt_text(strict, chat)
    assert [message["content"] in text for message in chat] == [True] * len(chat)
    with openai.OpenAI(base_url=f"{strict.url}/v1", api_key="none", max_retries=0) as client:
        options = {"choreography": {"reuse": reuse, "workflow": "strict"}}
        answer = client.chat.completions.create(model="tiny", messages=chat, max_tokens=2, extra_body=options)
        assert answer.usage.prompt_tokens == post(strict, "tokenize", {"messages": chat}).json()["count"]
    strict.wait_until_idle()


def test_a_chat_that_a_strict_template_refuses_names_the_message(strict):
    error = error_of(post(strict, CHAT, {"messages": [ANSWER, ASK]}))
    assert error["param"] == "messages[0]" and "rejects message 0 of the chat, of role 'assistant'" in error["message"]
    error = error_of(post(strict, RESPONSES, {"input": [ANSWER, ASK]}))
    assert error["param"] == "input" and "rejects message 0 of the chat" in error["message"]


@pytest.mark.parametrize("reuse", ["exact", "messages", "auto"])
def test_more_messages_than_pages_are_answered(live, reuse):
    messages = [{"role": "user" if number % 2 == 0 else "assistant", "content": "a"} for number in range(601)]
    body = {"messages": messages, "max_tokens": 2, "choreography": {"reuse": reuse, "workflow": "many"}}
    answer = post(live, CHAT, body)
    assert answer.status_code == 200, answer.text
    again = post(live, CHAT, body).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] > again["prompt_tokens"] // 2
