"""Chat turns joined are what the template renders for the whole conversation, as text and as token ids."""

import copy

import pytest
from helpers import chat_templates, tiny_models
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from choreograph import Engine, SamplingParams, Turn
from choreograph.api.chat import ChatTemplate
from choreograph.errors import ConfigError, InvalidTokensError, SamplingError
from choreograph.models import template_sandbox

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start|>' + m['role'] + '<|end|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}"
)
LLAMA_2 = (  # no special tokens around user turns: each turn ends where the tokenizer splits anyway
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' ' + eos_token }}"
    "{% else %}{{ '<<SYS>> ' + m['content'] + ' <</SYS>> ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (  # users and assistants take turns, nobody else speaks
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
)
SYSTEM_FIRST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system goes first') }}{% endif %}"
    "{{ '<|start|>' + m['role'] + '<|end|>' + m['content'] + '<|eot|>' }}{% endfor %}"
)
GEMMA = (  # refuses a system turn that opens, and takes one where an answer should be
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' }}{% endfor %}"
)
PHI_3 = (  # the end token stands behind a whole conversation, unless an answer is asked for
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)
QWEN_3 = (  # the last answer is shown with its thinking, those before it are not
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
HARMONY = (  # the last answer ends otherwise than those before it
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|start|>assistant final:' + m['content'] }}"
    "{% if loop.last and not add_generation_prompt %}{{ eos_token }}{% else %}{{ '<|end|>' }}{% endif %}"
    "{% else %}{{ '<|start|>' + m['role'] + ':' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama-3": LLAMA_3, "llama-2": LLAMA_2, "mistral": MISTRAL, "system-first": SYSTEM_FIRST}

plain_texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Cf")), max_size=30)
texts = st.one_of(plain_texts, st.sampled_from(["", "x", "a b", "\n", "  two  ", "{{ 1 + 1 }}", "éß汉字🙂", "[/INST]"]))


@pytest.fixture(scope="session")
def tokenizer(embedded):
    return embedded.tokenizer


@pytest.fixture(scope="session")
def formats(tokenizer):
    """name -> (tokenizer with that template, its chat format)."""
    made = {"embedded": tokenizer}
    for name, template in TEMPLATES.items():
        made[name] = with_template(tokenizer, template)
    return {name: (t, ChatTemplate(t)) for name, t in made.items()}


def with_template(tokenizer, template):
    """A copy with its own beginning and end tokens, put in front of every text as most tokenizers do."""
    one = copy.deepcopy(tokenizer)
    one.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    one.add_tokens(["<|start|>", "<|end|>", "<|eot|>"], special_tokens=True)
    one.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", one.bos_token_id)]
    )
    one.chat_template = template
    return one


def rendered(tokenizer, turns) -> str:
    messages = [{"role": t.role, "content": t.text} for t in turns]
    return tokenizer.apply_chat_template(messages, tokenize=False)


def check_joined(tokenizer, chat, turns) -> None:
    whole = rendered(tokenizer, turns)
    assert "".join(chat._checked_turn(t, opening=not i) for i, t in enumerate(turns)) == whole
    ids = [token for i, t in enumerate(turns) for token in chat.encode(t, opening=not i)]
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]


def conversation(texts, *, system: bool) -> list[Turn]:
    roles = ["user", "assistant"] * len(texts)
    return [Turn(role, text) for role, text in zip((["system"] if system else []) + roles, texts, strict=False)]


@settings(max_examples=many(60), deadline=None)
@given(words=st.lists(texts, min_size=1, max_size=5), system=st.booleans(), data=st.data())
def test_turns_joined_are_the_conversation(formats, words, system, data):
    name = data.draw(st.sampled_from(sorted(formats)))
    if name == "mistral" and system:
        system = False
    check_joined(*formats[name], conversation(words, system=system))


@pytest.mark.parametrize("name", ["embedded", "chatml", "llama-3"])
def test_turns_of_roles_in_any_order_join_to_the_conversation(formats, name):
    roles = ["system", "user", "user", "assistant", "system", "assistant", "user", "system"]
    for shift in range(len(roles)):
        check_joined(*formats[name], [Turn(role, f"{role} says") for role in roles[shift:] + roles[:shift]])


def test_every_role_can_open(formats):
    for name in ("embedded", "chatml", "llama-3", "llama-2"):
        for role, then in (("system", "user"), ("user", "assistant"), ("assistant", "user")):
            check_joined(*formats[name], [Turn(role, "first"), Turn(then, "second")])


@pytest.mark.parametrize("name", ["embedded", *TEMPLATES])
def test_header_and_footer_frame_the_turn(formats, name):
    tokenizer, chat = formats[name]
    header, footer = chat.open_turn(Turn("assistant", "Sure:"), opening=False)
    generated = tokenizer(" yes", add_special_tokens=False)["input_ids"]
    turns = [Turn("user", "Will it?"), Turn("assistant", "Sure: yes")]
    joined = chat.encode(turns[0], opening=True) + header + generated + footer
    assert tokenizer.decode(joined) == rendered(tokenizer, turns)
    assert joined == tokenizer(rendered(tokenizer, turns), add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["embedded", "chatml", "llama-3"])
def test_an_empty_header_is_the_generation_prompt(formats, name):
    tokenizer, chat = formats[name]
    header, _ = chat.open_turn(Turn("assistant", ""), opening=False)
    assert tokenizer.decode(header) in ("<|im_start|>assistant\n", "<|start|>assistant<|end|>\n\n")


@pytest.mark.parametrize("name", ["embedded", *TEMPLATES])
def test_an_answer_that_opens_has_its_header_behind_the_beginning(formats, name):
    """Also where the template asks for an answer with nothing of its own."""
    tokenizer, chat = formats[name]
    header, _ = chat.open_turn(Turn("assistant", ""), opening=False)
    opening, _ = chat.open_turn(Turn("assistant", ""), opening=True)
    assert opening == tokenizer(chat._conversation_prefix, add_special_tokens=False)["input_ids"] + header


@pytest.mark.parametrize("name", ["llama-3", "llama-2", "mistral", "system-first"])
def test_the_beginning_belongs_to_opening_turns(formats, name):
    tokenizer, chat = formats[name]
    for turn in (Turn("user", "x"), Turn("assistant", "x")):
        assert tokenizer.bos_token_id not in chat.encode(turn, opening=False)
        assert tokenizer.bos_token_id not in [token for part in chat.open_turn(turn, opening=False) for token in part]
    assert chat.encode(Turn("user", "x"), opening=True).count(tokenizer.bos_token_id) == 1
    assert chat.open_turn(Turn("user", "x"), opening=True)[0][0] == tokenizer.bos_token_id


def test_a_default_system_prompt_belongs_to_opening_turns(formats):
    tokenizer, chat = formats["embedded"]
    assert "helpful" in tokenizer.decode(chat.encode(Turn("user", "x"), opening=True))
    assert "helpful" not in tokenizer.decode(chat.encode(Turn("user", "x"), opening=False))
    assert "helpful" not in tokenizer.decode(chat.encode(Turn("system", "x"), opening=True))


# -- templates that write the end of a conversation otherwise than its middle -------------------------------------


def asked(tokenizer, turns) -> str:
    messages = [{"role": t.role, "content": t.text} for t in turns]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("template", [PHI_3, QWEN_3, HARMONY], ids=["phi-3", "qwen-3", "harmony"])
@pytest.mark.parametrize("system", [False, True])
def test_a_conversation_that_goes_on_is_what_the_template_asks_an_answer_with(tokenizer, template, system):
    one = with_template(tokenizer, template)
    chat = ChatTemplate(one)
    turns = conversation(["a", "b", "c"] if not system else ["a", "b", "c", "d"], system=system)
    ids = [token for i, turn in enumerate(turns) for token in chat.encode(turn, opening=not i)]
    header, _ = chat.open_turn(Turn("assistant", ""), opening=False)
    assert ids + header == one(asked(one, turns), add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (PHI_3, ("<|start|>assistant\nSo", "<|end|>\n")),
        (QWEN_3, ("<|start|>assistant\n<think>\n\n</think>\n\nSo", "<|end|>\n")),
        (HARMONY, ("<|start|>assistant final:So", "<|end|>")),  # as before another turn, not as the last one
    ],
    ids=["phi-3", "qwen-3", "harmony"],
)
def test_an_answer_with_first_words_is_the_last_of_its_conversation(tokenizer, template, wanted):
    one = with_template(tokenizer, template)
    assert tuple(map(one.decode, ChatTemplate(one).open_turn(Turn("assistant", "So"), opening=False))) == wanted


def test_an_answer_that_nothing_stands_in_front_of_needs_first_words(tokenizer):
    chat = ChatTemplate(with_template(tokenizer, MISTRAL.replace("' ' + m['content']", "m['content']")))
    assert chat.open_turn(Turn("assistant", ""), opening=False) == ([], [chat.tokenizer.eos_token_id])
    assert chat.open_turn(Turn("assistant", "Yes"), opening=False)[0]
    model = tiny_models.build(vocabulary=len(chat.tokenizer))
    with Engine.from_pretrained(model, tokenizer=chat.tokenizer).session() as session:
        question = session.prefill(session.user("Who?"))
        with pytest.raises(ConfigError, match="nothing before an answer: give the turn its first words"):
            session.decode(session.assistant(), [question])


# -- what ends a turn ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize("mode", ["choreographed", "prefix", "naive"])
def test_a_turn_ends_as_the_template_ends_it_whatever_was_generated(tokenizer, end, mode):
    model = tiny_models.build(vocabulary=len(tokenizer) + 64)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    forced = [*tokenizer("A tree.", add_special_tokens=False)["input_ids"], tokenizer.convert_tokens_to_ids(end)]
    turns = [Turn("user", "What is it?"), Turn("assistant", "A tree."), Turn("user", "Why?")]
    with Engine.from_pretrained(model, tokenizer=tokenizer).session(mode=mode) as session:
        question = session.prefill(turns[0])
        answer = session.decode(session.assistant(), [question], forced_tokens=forced)
        follow = session.prefill(turns[2], [question, answer])
        assert answer.output_token_ids == forced and answer.text == "A tree."
        joined = question.tokens + answer.tokens + follow.tokens
        reply = session.decode(session.assistant(), [question, answer, follow], sampling=SamplingParams(max_tokens=2))
        assert len(reply.output_token_ids) <= 2
        session.engine.check()
    assert tokenizer.decode(joined) == rendered(tokenizer, turns)


def test_a_stop_string_that_is_a_special_token_stops_on_it(tokenizer):
    model = tiny_models.build(vocabulary=len(tokenizer) + 64)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    sampling = SamplingParams(max_tokens=5, stop="<|im_end|>", logit_bias={stop: 100}, ignore_eos=True)
    with Engine.from_pretrained(model, tokenizer=tokenizer).session() as session:
        message = session.decode("Hello", sampling=sampling)
        assert message.output_token_ids == [stop] and message.finish_reason == "stop" and not message.text


def test_a_stop_string_that_starts_with_the_first_token_stops(tokenizer):
    model = tiny_models.build(vocabulary=len(tokenizer) + 64)
    (six,) = tokenizer(" the", add_special_tokens=False)["input_ids"]
    with Engine.from_pretrained(model, tokenizer=tokenizer).session() as session:
        message = session.decode("Say", sampling=SamplingParams(max_tokens=5, stop=" the", logit_bias={six: 100}))
        assert message.output_token_ids == [six] and message.finish_reason == "stop"


def test_a_token_that_the_model_has_no_row_for_is_refused_and_harms_nothing(tokenizer):
    engine = Engine.from_pretrained(tiny_models.build(vocabulary=len(tokenizer)), tokenizer=with_extra(tokenizer))
    with engine.session(seed=1) as session:
        for refused in (
            lambda: session.decode("a[PAD]b"),
            lambda: session.prefill(session.user("a[PAD]b")),
            lambda: session.prefill([{"tokens": "a"}, {"tokens": "[PAD]"}]),
        ):
            with pytest.raises(InvalidTokensError, match=r"\[PAD\].*no row"):
                refused()
        with pytest.raises(SamplingError, match="logit_bias"):
            session.decode("a", sampling=SamplingParams(logit_bias={len(tokenizer): 1.0}))
        assert session.decode("ab", sampling=SamplingParams(max_tokens=2)).result().usage.completion_tokens == 2
    engine.check()


def with_extra(tokenizer):
    one = copy.deepcopy(tokenizer)
    one.add_special_tokens({"additional_special_tokens": ["[PAD]"]})
    return one


# -- templates that refuse -----------------------------------------------------------------------------------


def test_a_template_without_room_for_a_later_system_turn_says_so(formats):
    _, chat = formats["system-first"]
    assert chat.encode(Turn("system", "first"), opening=True)
    with pytest.raises(ConfigError, match="no place for a turn of role 'system'"):
        chat.encode(Turn("system", "later"), opening=False)
    assert chat.encode(Turn("user", "still works"), opening=False)


def test_a_session_folds_a_system_turn(tokenizer):
    model = tiny_models.build(vocabulary=len(tokenizer) + 64)
    folding = with_template(tokenizer, chat_templates.LLAMA_2)
    with Engine.from_pretrained(model, tokenizer=folding).session() as session:
        system = session.prefill(session.system("Be brief."))
        user = session.prefill(session.user("What is it?"), [system])
        text = folding.decode(system.tokens + user.tokens)
    assert text == rendered(folding, conversation(["Be brief.", "What is it?"], system=True))


@pytest.mark.parametrize("front", ["", "{{ bos_token }}"])
def test_a_template_that_drops_a_lone_system_turn_folds_it(tokenizer, front):
    """Templates that write the system text into the first user turn render nothing for the system turn alone."""
    folded = (
        front + "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' }}"
        "{% if loop.index0 == 1 and messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}"
        "{{ m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    one = with_template(tokenizer, folded)
    chat = ChatTemplate(one)
    system = chat.encode(Turn("system", "Be brief."), opening=True)
    user = chat.encode(Turn("user", "Why?"), opening=False, after_system=True)
    assert one.decode(system + user) == rendered(one, conversation(["Be brief.", "Why?"], system=True))


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
        "{% for i in range(10**5) %}{{ messages[0].content * 1000 }}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'a'.center(10**10) }}",
        "{{ 'a' | center(10**10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% if n < 40 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}",
        "{% set n = namespace(x='aaaaaaaaaa') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='aaaaaaaaaa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='aaaaaaaaaa') %}{% for i in range(40) %}{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
        "{% for i in range(3) recursive %}{{ loop(range(10**5)) }}{% endfor %}",
        "{% for i in range(10**5) %}{{ range(10**5) | sum }}{% endfor %}",
        "{{ '%*d' % (10**10, 1) }}",
        "{% set n = namespace(x=3) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set t %}{% for i in range(10**4) %}{{ 'a' * 10**6 }}{% endfor %}{% endset %}",
        "{% set t %}{% for i in range(10**5) %}" + "a" * 10**4 + "{% endfor %}{% endset %}",
    ],
)
def test_a_template_that_would_run_for_hours_is_refused(tokenizer, template, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.3)
    chat = ChatTemplate(with_template(tokenizer, template))
    with pytest.raises(ConfigError, match="the chat template"):
        chat.encode(Turn("user", "Hello there"), opening=True)


@pytest.mark.parametrize(
    "expression",
    ["raise_exception.__globals__.keys()", "messages.__class__.__mro__", "messages.append(1)", "namespace(_a=1)"],
)
def test_a_template_reaches_neither_the_interpreter_nor_the_messages(tokenizer, expression):
    chat = ChatTemplate(with_template(tokenizer, f"{{{{ {expression} | length }}}}"))
    with pytest.raises(template_sandbox.ChatRejectedError):
        chat.render([{"role": "user", "content": "Hello there"}])


def test_an_engine_with_a_template_that_loops_refuses_its_turns_and_serves_tokens(tokenizer, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.1)
    looping = "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}"
    model = tiny_models.build(vocabulary=len(tokenizer) + 64)
    with Engine.from_pretrained(model, tokenizer=with_template(tokenizer, looping)).session(seed=1) as session:
        with pytest.raises(ConfigError, match="runs longer"):
            session.prefill(session.user("Hello"))
        assert len(session.decode([5], sampling=SamplingParams(max_tokens=3, ignore_eos=True)).output_token_ids) == 3
        assert session.decode([5], sampling=SamplingParams(max_tokens=3)).result().done


def test_unknown_roles_and_texts(formats):
    for _, chat in formats.values():
        with pytest.raises(ConfigError, match="role='narrator'"):
            chat.encode(Turn("narrator", "x"), opening=True)
    for text in (None, 5, b"x", ["x"]):
        with pytest.raises(InvalidTokensError, match="text="):
            Turn("user", text)


def test_a_template_that_always_fails_is_one_clear_error(tokenizer):
    chat = ChatTemplate(with_template(tokenizer, "{{ raise_exception('never') }}"))
    for opening in (True, False):
        with pytest.raises(ConfigError, match="'user'"):
            chat.encode(Turn("user", "x"), opening=opening)


def test_a_broken_template_is_one_clear_error(tokenizer):
    chat = ChatTemplate(with_template(tokenizer, "{% for"))
    with pytest.raises(ConfigError, match="'user'"):
        chat.encode(Turn("user", "x"), opening=True)


# -- text without roles, and tokenizers without a template ---------------------------------------------------


def test_a_turn_without_a_template_is_plain_text(formats):
    for name, (tokenizer, chat) in formats.items():
        ids = tokenizer("plain text", add_special_tokens=False)["input_ids"]
        assert chat.encode_text("plain text", opening=False) == ids
        beginning = [] if name == "embedded" else [tokenizer.bos_token_id]
        assert chat.encode_text("plain text", opening=True) == beginning + ids


def test_a_tokenizer_that_frames_texts_gives_only_its_beginning(tokenizer):
    framing = with_template(tokenizer, CHATML)
    framing.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", framing.bos_token_id), ("</s>", framing.eos_token_id)]
    )
    ids = framing("x", add_special_tokens=False)["input_ids"]
    assert ChatTemplate(framing).encode_text("x", opening=True) == [framing.bos_token_id, *ids]


def test_no_template(tokenizer):
    bare = with_template(tokenizer, None)
    chat = ChatTemplate(bare)
    assert bare.decode(chat.encode(Turn("user", "hello"), opening=True)) == "<s>User: hello\n"
    assert bare.decode(chat.encode(Turn("user", "hello"), opening=False)) == "User: hello\n"
    header, footer = chat.open_turn(Turn("assistant", "Yes"), opening=False)
    assert (bare.decode(header), bare.decode(footer)) == ("Assistant: Yes", "\n")
    header, _ = chat.open_turn(Turn("assistant", ""), opening=False)
    assert bare.decode(header) == "Assistant:"  # the space belongs to what is said
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    assert plain.decode(ChatTemplate(plain).encode(Turn("user", "hello"), opening=True)) == "User: hello\n"


def test_the_conversation_of_a_session(embedded):
    """What a session encodes turn by turn is the rendered conversation."""
    with embedded.session() as session:
        first = session.prefill(session.system("Be brief."))
        question = session.prefill(session.user("Two and two?"), parents=[first])
        answer = session.decode(
            session.assistant("It is"),
            parents=[first, question],
            forced_tokens=embedded.tokenizer(" four.", add_special_tokens=False)["input_ids"],
        )
        turns = [Turn("system", "Be brief."), Turn("user", "Two and two?"), Turn("assistant", "It is four.")]
        assert embedded.tokenizer.decode(first.tokens + question.tokens + answer.tokens) == rendered(
            embedded.tokenizer, turns
        )
        assert answer.position == first.length + question.length


def test_a_turn_may_leave_out_what_opens_a_conversation(talker):
    with talker.session() as session:
        rules = session.prefill(session.system("Be brief."))
        behind = session.prefill(session.user("Hello."), [rules])
        alone = session.prefill(session.user("Hello.", opening=False))
        assert alone.tokens == behind.tokens != session.prefill(session.user("Hello.")).tokens
        header = session.decode(session.assistant("So", opening=False), sampling=SamplingParams(max_tokens=1))
        expected = session.decode(session.assistant("So"), [rules], sampling=SamplingParams(max_tokens=1))
        assert header.tokens[:-1][:4] == expected.tokens[:-1][:4]


def test_what_is_kept_of_headers_is_of_the_tokenizer_as_it_is(tokenizer):
    """Another template, another token, several templates, one with the time of the day."""
    chat, turn = ChatTemplate(with_template(tokenizer, CHATML)), Turn("assistant", "So")
    mine = chat.tokenizer
    before = chat.open_turn(turn, opening=True)
    assert chat.open_turn(turn, opening=True) == before
    before[0].clear()  # whoever is given it may change it
    assert chat.open_turn(turn, opening=True)[0]
    mine.chat_template = CHATML.replace("<|im_start|>", "<|eot|>")
    assert mine.decode(chat.open_turn(turn, opening=True)[0]).startswith("<|eot|>")
    mine.chat_template = {"default": CHATML}
    assert mine.decode(chat.open_turn(turn, opening=True)[0]).startswith("<|im_start|>")
    mine.chat_template = "{{ strftime_now('%f') }} " + CHATML
    assert len({tuple(chat.encode(Turn("user", "hi"), opening=True)) for _ in range(5)}) > 1
