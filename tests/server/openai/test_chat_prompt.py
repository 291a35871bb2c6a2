"""Chats become prompts: rendered once, cut at the ends of messages, folded for strict templates."""

import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import chat_templates
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph.api import chat as text_module
from choreograph.api.chat import ChatTemplate
from choreograph.errors import InvalidRequestError
from choreograph.models import template_sandbox
from choreograph.server.api_errors import ApiError
from choreograph.server.openai.chat_messages import ChatMessage, as_turn
from choreograph.server.openai.chat_prompt import ChatRenderer, answer_key
from choreograph.server.openai.chat_turns import MAX_ARGUMENT_DEPTH, parse_arguments

MACRO = (  # the output of a macro is written at once
    "{% macro turn(m) %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endmacro %}"
    "{% macro all() %}{% for m in messages %}{{ turn(m) }}{% endfor %}{% endmacro %}{{ all() }}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REBUILT = (  # the loop goes over other objects than the messages
    "{% set ns = namespace(turns=[]) %}{% for m in messages %}"
    "{% set ns.turns = ns.turns + [{'role': m.role, 'content': m.content}] %}{% endfor %}"
    "{% for m in ns.turns %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SCANNING = (  # loops inside of the loop over messages, and `continue`
    "{% for m in messages %}{% if not m.content %}{% continue %}{% endif %}"
    "{% for other in messages %}{% if other.content == m.content %}{% break %}{% endif %}{% endfor %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = chat_templates.TEMPLATES | {"macro": MACRO, "rebuilt": REBUILT, "scanning": SCANNING}
SEPARABLE = [name for name in chat_templates.TEMPLATES if name != "gpt-oss"]
CHAT = [("user", "Which river?"), ("assistant", "The Seine."), ("user", "And where?"), ("assistant", "In Paris."),
        ("user", "Thanks.")]  # fmt: skip


def messages_of(turns):
    return [{"role": role, "content": content} for role, content in turns]


@pytest.fixture(scope="module")
def renderer_of(talker):
    """Return the renderer of a template."""

    def create(template):
        tokenizer = copy.deepcopy(talker.tokenizer)
        tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
        tokenizer.chat_template = template
        return ChatRenderer(ChatTemplate(tokenizer))

    return create


class Counter:
    """Counts the calls of a function, and the characters of their results."""

    def __init__(self, function):
        self._function, self.num_calls = function, 0

    def __call__(self, *args, **options):
        self.num_calls += 1
        return self._function(*args, **options)


@pytest.fixture
def renderings(monkeypatch):
    counter = Counter(template_sandbox.render_messages)
    monkeypatch.setattr(text_module, "render_messages", counter)
    return counter


# -- one rendering -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("opens", [True, False])
def test_a_prompt_is_the_rendering_of_the_template_and_its_segments_join_to_it(renderer_of, name, opens):
    renderer, messages = renderer_of(TEMPLATES[name]), messages_of(CHAT)
    prompt = renderer.prompt(messages, add_generation_prompt=opens, with_segments=True)
    tokenizer = renderer._tokenizer
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
    assert prompt.tokens == tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = [tokenizer.decode(segment.tokens) for segment in prompt.segments]
    assert "".join(pieces) + prompt.header_text == text
    assert tokenizer.decode(prompt.header) == prompt.header_text and prompt.header


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% set m = {'content': m.content} %}{{ m.content }};{% endfor %}",
        "{% for m in messages %}{% for m in messages %}{{ m.content }}{% endfor %}|{{ m.content }}{% endfor %}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ loop.length }}{{ m.content }}{% if loop.nextitem %},{% endif %}{% endfor %}",
        "{% for m in messages recursive %}{{ m.content }}{% if m.turns %}{{ loop(m.turns) }}{% endif %}{% endfor %}",
        "{% set t %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ t | upper }}",
        "{% macro f(turns) %}{% for m in turns %}<{{ m.content }}>{% endfor %}{% endmacro %}{{ f(messages[1:]) }}{{ f(messages) }}",
        "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}",
        "{% for g in messages | groupby('role') %}{% for m in g.list %}{{ m.content }}{% endfor %}{% endfor %}",
        "{% for i in range(messages | length) %}{{ messages[i].content }}{% endfor %}",
        "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}{{ messages[-1].content }}",
        "{% for m in messages %}{%- if m.role == 'user' -%}\n  {{ m.content }}\n {%- else -%} [{{ m.content }}] {% endif %}\n{% endfor %}",
        "{% if not messages %}{% for m in messages %}{% endfor %}{% else %}{% for m in messages %}{{ m.content }}{% endfor %}{% endif %}",
    ],
)  # fmt: skip
def test_noting_where_messages_begin_changes_no_text(renderer_of, template):
    renderer, messages = renderer_of(template), messages_of(CHAT)
    text = renderer._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = renderer.prompt(messages, with_segments=True)
    pieces = [renderer._tokenizer.decode(segment.tokens) for segment in prompt.segments]
    assert "".join(pieces) + prompt.header_text == text == renderer._tokenizer.decode(prompt.tokens)


@pytest.mark.parametrize("name", [*SEPARABLE, "scanning"])
def test_every_message_is_a_segment_wherever_it_is(renderer_of, name):
    renderer = renderer_of(TEMPLATES[name])
    prompt = renderer.prompt(messages_of(CHAT), with_segments=True)
    pieces = [renderer._tokenizer.decode(segment.tokens) for segment in prompt.segments]
    pieces += [prompt.header_text] * (len(pieces) < len(CHAT))  # a template without generation prompt
    assert [content in piece for (_, content), piece in zip(CHAT, pieces, strict=True)] == [True] * len(CHAT)
    keys = [segment.answer_key for segment in prompt.segments]
    expected = [answer_key(content, ()) if role == "assistant" else None for role, content in CHAT]
    assert keys == expected[: len(keys)]
    longer = renderer.prompt(messages_of([*CHAT[:2], *CHAT]), with_segments=True)
    assert {segment.tokens for segment in prompt.segments[1:]} <= {segment.tokens for segment in longer.segments}


@pytest.mark.parametrize("name", ["macro", "rebuilt"])
def test_messages_that_a_template_does_not_separate_are_one_part(renderer_of, name):
    prompt = renderer_of(TEMPLATES[name]).prompt(messages_of(CHAT), with_segments=True)
    assert len(prompt.segments) <= 1 and all(segment.answer_key is None for segment in prompt.segments)


def test_results_of_tools_that_share_a_turn_are_separate(renderer_of):
    turns = messages_of([("user", "Two cities"), ("assistant", "I look."), ("tool", "Paris"), ("tool", "Rome")])
    renderer = renderer_of(chat_templates.QWEN_2_5)
    renderer.knows_tools = True  # though it writes no definitions
    prompt = renderer.prompt(turns, with_segments=True)
    assert [name in renderer._tokenizer.decode(prompt.segments[-1].tokens) for name in ("Paris", "Rome")] == [0, 1]


@pytest.mark.parametrize("name", ["chatml", "qwen-3", "gemma-2", "phi-3", "macro", "rebuilt"])
def test_a_chat_is_rendered_once_and_tokenized_twice_however_long_it_is(renderer_of, renderings, monkeypatch, name):
    renderer = renderer_of(TEMPLATES[name])
    renderer.prompt(messages_of(CHAT), with_segments=True)  # what is known of the template
    num_chars = []
    tokenize = type(renderer._tokenizer).__call__

    def counting(self, text, *args, **options):
        num_chars.append(len(text) if isinstance(text, str) else sum(map(len, text)))
        return tokenize(self, text, *args, **options)

    monkeypatch.setattr(type(renderer._tokenizer), "__call__", counting)
    for length in (3, 301):
        num_chars.clear()
        before = renderings.num_calls
        turns = messages_of([CHAT[index % 2] for index in range(length)])
        prompt = renderer.prompt(turns, with_segments=True)
        assert renderings.num_calls == before + 1
        assert len(num_chars) == 2 and num_chars[0] == num_chars[1] == len(renderer._tokenizer.decode(prompt.tokens))


def test_threads_render_at_the_same_time(renderer_of):
    renderer = renderer_of(chat_templates.QWEN_3)
    chats = [messages_of([(role, f"{content} {number}") for role, content in CHAT]) for number in range(16)]
    expected = [renderer.prompt(chat, with_segments=True) for chat in chats]
    barrier = threading.Barrier(4)

    def render(start):
        barrier.wait()
        return [renderer.prompt(chat, with_segments=True) for chat in chats[start::4] * 8]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(render, range(4)))
    assert results == [expected[start::4] * 8 for start in range(4)]


# -- bounds before the work ----------------------------------------------------------------------------------


def test_a_chat_of_more_messages_than_tokens_is_refused_before_it_is_rendered(renderer_of, renderings):
    renderer = renderer_of(chat_templates.CHATML)
    with pytest.raises(ApiError, match="context length is 500 tokens") as error:
        renderer.prompt(messages_of([("user", "a")] * 501), max_tokens=500, param="input")
    assert renderings.num_calls == 0
    assert (
        error.value.body["error"]["code"] == "context_length_exceeded" and error.value.body["error"]["param"] == "input"
    )


@pytest.mark.parametrize("unit", ["a", " ", "\n", "word ", "👨‍👩", "7", "é", "日本", "a.", "<|im_end|>"])
def test_a_text_that_cannot_fit_is_refused_before_all_of_it_is_tokenized(renderer_of, monkeypatch, unit):
    renderer, limit = renderer_of(chat_templates.CHATML), 2000
    num_chars = []
    monkeypatch.setattr(
        renderer._template, "_tokenize", lambda text, tokenize=renderer._template._tokenize: (
            num_chars.append(len(text)) or tokenize(text)
        )
    )  # fmt: skip
    text = unit * (3_000_000 // len(unit))
    for refused in (
        lambda: renderer.tokenize(text, max_tokens=limit),
        lambda: renderer.prompt(messages_of([("user", text)]), max_tokens=limit),
    ):
        num_chars.clear()
        with pytest.raises(ApiError, match=f"context length is {limit} tokens"):
            refused()
        assert max(num_chars) <= text_module.SLICE_CHARS and sum(num_chars) < 300_000


letters = st.sampled_from(
    ["a", "b", "e", " ", "  ", "\n", "\t", ".", "1", "é", "日", "👨‍👩", "e\u0301", "The", " the", "<|im_end|>"]
)
runs = st.lists(st.tuples(letters, st.integers(1, 40)), min_size=1, max_size=8)


@settings(max_examples=many(200), deadline=None)
@given(parts=runs, repeats=st.integers(1, 12), slice_chars=st.sampled_from([128, 200, 1024]))
def test_no_text_that_fits_is_refused(talker, parts, repeats, slice_chars):
    text = "".join(unit * count for unit, count in parts) * repeats
    num_tokens = len(talker.chat.encode_text(text, opening=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "SLICE_CHARS", slice_chars)
        patch.setattr(text_module, "CUT_TOKENS", 8)
        patch.setattr(text_module, "MAX_CHARS_PER_TOKEN", 0)
        assert not talker.chat.is_longer(text, num_tokens)


def test_a_text_at_the_limit_is_accepted(renderer_of):
    renderer = renderer_of(chat_templates.CHATML)
    for text in ("word " * 2000, " " * 40_000, "\n" * 3000, "👨‍👩" * 300):
        num_tokens = len(renderer.tokenize(text))
        assert len(renderer.tokenize(text, max_tokens=num_tokens)) == num_tokens


# -- templates that accept few orders of roles ---------------------------------------------------------------

STRICT = ["gemma-2", "gemma-3", "mistral-1", "mistral-1-system", "mistral-3", "llama-2"]
ORDERS = {
    "two system turns": "ssuau",
    "a system turn in the middle": "suasu",
    "a late system turn": "uasu",
    "a system turn at the end": "suas",
    "one system turn": "s",
    "consecutive user turns": "uuauu",
    "consecutive answers": "uaau",
    "a system turn before an answer": "sau",
    "system turns alone": "ss",
}
ROLES = {"s": "system", "u": "user", "a": "assistant"}
MAIN_ORDERS = ("a system turn in the middle", "consecutive user turns", "system turns alone")


@pytest.mark.parametrize(
    "order", [name if name in MAIN_ORDERS else pytest.param(name, marks=pytest.mark.slow) for name in ORDERS]
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_text_of_a_chat_is_in_the_prompt_in_any_order_of_roles(renderer_of, name, order):
    renderer = renderer_of(TEMPLATES[name])
    turns = messages_of([(ROLES[letter], f"text {index} of it.") for index, letter in enumerate(ORDERS[order])])
    try:
        text = renderer._tokenizer.decode(renderer.prompt(turns, with_segments=True).tokens)
    except InvalidRequestError as exc:
        assert str(exc).startswith("messages[0]") and ORDERS[order] == "sau" and name in STRICT
        return
    assert [f"text {index} of it." in text for index in range(len(turns))] == [True] * len(turns)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("ssu", "<bos>[INST] 0\n\n1\n\n2 [/INST]"),
        ("suasu", "<bos>[INST] 0\n\n1 [/INST]2</s>[INST] 3\n\n4 [/INST]"),
        ("uus", "<bos>[INST] 0\n\n1\n\n2 [/INST]"),
        ("sau", "<bos>[INST] 0 [/INST]1</s>[INST] 2 [/INST]"),
    ],
)
def test_turns_are_joined_where_roles_must_alternate(renderer_of, order, expected):
    renderer = renderer_of(chat_templates.MISTRAL_1)
    turns = messages_of([(ROLES[letter], str(index)) for index, letter in enumerate(order)])
    assert renderer._tokenizer.decode(renderer.prompt(turns).tokens) == expected.replace("<bos>", "<s>")


def test_a_chat_that_cannot_be_folded_names_the_message(renderer_of):
    def refusal(template, order, param="messages"):
        turns = messages_of([(ROLES.get(letter, "tool"), "x") for letter in order])
        renderer = renderer_of(template)
        renderer.knows_tools = True
        with pytest.raises(InvalidRequestError) as error:
            renderer.prompt(turns, param=param)
        return str(error.value)

    assert refusal(chat_templates.MISTRAL_1, "au").startswith("messages[0]: the chat template rejects message 0")
    assert "message 4 of the chat, of role 'tool'" in refusal(chat_templates.MISTRAL_1, "uuaut")
    assert refusal(chat_templates.GPT_OSS, "uat").startswith("messages[2]")
    assert refusal(chat_templates.GPT_OSS, "uat", "input").startswith("input: the chat template rejects message 2")
    outside = (
        "{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}" + chat_templates.CHATML
    )  # before the loop over messages
    assert refusal(outside, "uat").startswith("messages[2]")


def test_a_chat_beyond_the_bounds_of_templates_is_rendered_once(renderer_of, renderings, monkeypatch):
    renderer = renderer_of("{% for m in messages %}{{ m.content }}{% endfor %}")
    renderer.prompt(messages_of([("user", "x")]))
    before = renderings.num_calls
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.0)
    with pytest.raises(InvalidRequestError, match="runs longer than 0 s: send fewer or shorter messages"):
        renderer.prompt(messages_of([("user", "x")] * 40))
    assert renderings.num_calls == before + 1


# -- several templates, and variables ------------------------------------------------------------------------


def test_a_tokenizer_with_several_templates_renders_the_one_that_transformers_chooses(renderer_of):
    templates = {"default": "{% for m in messages %}{{ m.content }}{% endfor %}D",
                 "tool_use": "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }}",
                 "rag": "R"}  # fmt: skip
    renderer, turns = renderer_of(templates), messages_of([("user", "x")])
    tools = [{"type": "function", "function": {"name": "sage", "parameters": {}}}]
    for given_tools in ([], tools):
        text = renderer._tokenizer.apply_chat_template(turns, tools=given_tools or None, tokenize=False)
        assert renderer._tokenizer.decode(renderer.prompt(turns, given_tools).tokens) == text
    assert renderer.knows_tools and "tojson" in renderer.template_text


def test_each_of_several_templates_runs_within_the_bounds(renderer_of, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.1)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="runs longer"):
        renderer_of({"default": endless, "tool_use": endless}).prompt(messages_of([("user", "x")]))
    with pytest.raises(InvalidRequestError, match="no default"):
        renderer_of({"rag": "x"}).prompt(messages_of([("user", "x")]))


@pytest.mark.parametrize("name", ["self", "source", "tokenizer_", "context", "thinking budget", "enable_thinking"])
def test_variables_of_any_other_name_reach_the_template(renderer_of, name):
    renderer = renderer_of("{{ messages[0].content }}{% if enable_thinking %} thinks{% endif %}")
    text = renderer._tokenizer.decode(renderer.prompt(messages_of([("user", "x")]), variables={name: True}).tokens)
    assert text == ("x thinks" if name == "enable_thinking" else "x")


# -- calls ---------------------------------------------------------------------------------------------------


def test_tools_and_calls_are_written_with_their_characters(renderer_of):
    tool = {"type": "function", "function": {"name": "时间", "description": "Wie spät ist es?", "parameters": {}}}
    call = {"function": {"name": "时间", "arguments": '{"zone": "北京"}'}}
    message = ChatMessage(role="assistant", tool_calls=[call])
    chat = [{"role": "user", "content": "x"}, as_turn(message), {"role": "tool", "content": "早上"}]
    native = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    for template in (chat_templates.CHATML, chat_templates.GEMMA_2, native):
        renderer = renderer_of(template)
        text = renderer._tokenizer.decode(renderer.prompt(chat, [tool]).tokens)
        assert "\\u" not in text and "spät" in text and "早上" in text
        assert '{"name": "时间", "arguments": {"zone": "北京"}}' in text


def test_what_the_server_notes_of_a_message_is_not_in_the_prompt(renderer_of):
    renderer = renderer_of("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    chat = messages_of([("user", "x"), ("assistant", "y")])
    text = renderer._tokenizer.decode(renderer.prompt(chat).tokens)
    assert text == "".join(json.dumps(message) for message in chat)


@pytest.mark.parametrize("arguments", ["", " ", "\n", "null", " null ", "{}", " {} ", {}, None])
def test_no_arguments_are_an_empty_object(renderer_of, arguments):
    assert parse_arguments(arguments) == {}
    message = ChatMessage(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])
    template = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}{% for name, value in call.function.arguments"
        " | items %}{{ name }}{% endfor %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    renderer = renderer_of(template)
    assert renderer._tokenizer.decode(renderer.prompt([as_turn(message)]).tokens) == "{}"
    assert answer_key("", [{"function": {"name": "f", "arguments": arguments}}]) == answer_key(
        "", [{"function": {"name": "f", "arguments": "{}"}}]
    )


NESTED = "[" * MAX_ARGUMENT_DEPTH + "]" * MAX_ARGUMENT_DEPTH


@pytest.mark.parametrize(
    "text",
    ["{", '{"a": }', "NaN", '{"a": Infinity}', '{"a": 1e400}', f'{{"a": {NESTED}}}', "[" * 900 + "]" * 900, "{" * 10**5,
     "9" * 5000],
)  # fmt: skip
def test_arguments_that_are_no_json_or_nested_deeply_stay_text(text):
    assert parse_arguments(text) == text
    json.loads(answer_key("", [{"function": {"name": "f", "arguments": text}}]))


def test_other_arguments_are_read():
    assert parse_arguments('{"a": [1, 2.5, "x", null, true]}') == {"a": [1, 2.5, "x", None, True]}
    assert parse_arguments('{"a": 12345678901234567890123}') == {"a": 12345678901234567890123}


# -- parts of a message --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "reasoning", "text": "Hm."},
        {"type": "reasoning", "text": ["Hm."], "summary": []},
        {"type": "reasoning_text", "text": "Hm."},
    ],
)
def test_reasoning_in_an_earlier_answer_is_left_out(part):
    message = ChatMessage(role="assistant", content=[part, {"type": "text", "text": "Yes."}])
    assert as_turn(message) == {"role": "assistant", "content": "Yes."}
    assert ChatMessage(role="assistant", content=[part]).text == ""
    with pytest.raises(ValueError, match="content"):
        ChatMessage(role="user", content=[part])


def test_parts_that_are_no_text_are_refused():
    for role in ("user", "assistant"):
        with pytest.raises(ValueError, match="reads text alone"):
            ChatMessage(role=role, content=[{"type": "image_url", "image_url": {"url": "x"}}])
