"""Positions of schemas and prompts, against the recursion of `pictures` and by example."""

import copy

import pytest
from helpers.hypothesis_profile import many
from helpers.layout_ascii import blocks
from helpers.random_schemas import prompts, schemas
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph.api.chat import ChatTemplate
from choreograph.errors import PromptError, SchemaError
from choreograph.prompt_cache import load_prompt, load_schema, module, parameter, schema, system, union, user
from choreograph.prompt_cache.layout import ChatTokenizer, compute_layout
from choreograph.prompt_cache.resolve import resolve_prompt


@pytest.fixture(scope="session")
def tokens(characters):
    return ChatTokenizer(ChatTemplate(characters), characters)


@settings(max_examples=many(150), deadline=None)
@given(data=st.data())
def test_positions_are_those_of_the_picture(data, characters, tokens):
    s = data.draw(schemas(scaffolds=True))
    layout, expected = compute_layout(s, tokens, 10_000), blocks(s, characters)
    assert list(layout.modules) == list(expected)
    for path, piece in layout.modules.items():
        result = [(run.start + i, t) for run in piece.runs for i, t in enumerate(run.tokens)]
        assert result == list(zip(expected[path].positions, expected[path].tokens, strict=True))
        assert {n: range(x.start, x.start + x.length) for n, x in piece.parameter_slots.items()} == expected[path].slots
    prompt = data.draw(prompts(s))
    serving = resolve_prompt(prompt, layout, tokens)
    shown = [one.position + i for one in serving.cached for i in range(one.num_tokens)]
    assert len(shown) == len(set(shown)), "no position is visible twice"
    assert serving.end >= max((one.end for one in serving.new_texts), default=0)


TRIP = schema(
    "trip",
    "0123456789",
    module("a", "aaaaa"),
    union(module("b", "bb"), module("c", "cccccccc")),
    "mid",
    module("d", "ddddd", module("e", "ee"), "DD"),
    "end",
)  # 0-9 text, 10-14 a, 15-16 b or 15-22 c, 23-25 text, 26-30 d, 31-32 e, 33-34 d, 35-37 text


def placed(tokens, inside: str) -> list[tuple[int, int]]:
    serving = resolve_prompt(
        load_prompt(f'<prompt schema="trip">{inside}</prompt>'), compute_layout(TRIP, tokens, 1000), tokens
    )
    return [(one.start, one.end) for one in serving.new_texts]


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("hi", [(38, 40)]),  # nothing is imported: behind everything
        ("<a/>hi", [(38, 40)]),
        ("hi<a/>", [(10, 12)]),  # behind the text that stands before a
        ("<a/>hi<d/>", [(15, 17)]),  # where a ends: in the gap that the union leaves
        ("<a/>hi<b/>", [(15, 17)]),  # no gap: it starts where a ends all the same
        ("<b/>hi<d/>", [(17, 19)]),
        ("<a/>hi<b/>ho<d/>", [(15, 19)]),  # two texts that touch are encoded as one
        ("<a/>hi<!-- one text -->ho<d/>", [(15, 19)]),
        ("<a/><user>x</user>hi<d/>", [(15, 20)]),  # two texts in a row
        ("<d>hi<e/>ho</d>", [(31, 33), (35, 37)]),  # inside d: behind its own text, and behind all of it
        ("<d><e/></d>hi<a/>", [(35, 37)]),  # behind d, whatever comes after it in the prompt
        ("<c/><user>x</user>", [(38, 41)]),
        ("<a>hi</a>ho<d/>", [(15, 19)]),  # a ends with what is said in it
        ("<d><e>longer</e>ho</d>", [(33, 41)]),  # so does d: no two texts share a position
    ],
)
def test_new_text_stands_where_the_paper_puts_it(tokens, inside, expected):
    assert placed(tokens, inside) == expected


SIDES = schema(
    "sides",
    module("a", "AA"),
    module("b", "BB"),
    module("p", parameter("x", 3)),
    module("u", "UU", cache=False),
    module("n", "NN", module("o", "OO"), module("q", "QQ")),
    "CC",
)


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        ("<a/>hi<b/>ho<n/>", "AAhiBBhoNNCC"),  # hi ends where ho starts, and still b stands between them
        ("<a/><user>hi</user>ho<b/>", "AA<|user|>hi<end>hoBBCC"),
        ('<b/>hi<p x="arg"/>', "BBhiargCC"),  # an argument stands behind what is said in front of its module
        ('<p x="arg"/>hi<u/>', "arghiUUCC"),  # so does a module that is not cached
        ("<n>hi<o/>ho<q>hey</q></n>so", "NNhiOOhoQQheyCCso"),
        ("<n><o>hi</o>ho<q/></n>", "NNOOhihoQQCC"),
    ],
)
def test_plain_text_is_in_the_order_of_the_prompt(tokens, characters, inside, text):
    """However far what is said reaches into positions that are taken."""
    layout = compute_layout(SIDES, tokens, 1000)
    serving = resolve_prompt(load_prompt(f'<prompt schema="sides">{inside}</prompt>'), layout, tokens)
    assert characters.decode(serving.flatten(layout)) == text


class Begun(ChatTokenizer):
    """Tokenizer with a BOS token."""

    def bos_ids(self) -> list[int]:
        return [2]


def test_a_prompt_speaks_behind_the_beginning_that_it_encodes(characters):
    tokens = Begun(ChatTemplate(characters), characters)
    layout = compute_layout(schema("s", module("a", "aa"), module("b", "bb")), tokens, 1000)
    for inside, expected in (("hi<b/>", [(0, 3)]), ("hi<a/>", [(0, 2)]), ("<b/>hi", [(0, 1), (5, 7)])):
        new = resolve_prompt(load_prompt(f'<prompt schema="s">{inside}</prompt>'), layout, tokens).new_texts
        assert [(one.start, one.end) for one in new] == expected


def test_text_in_front_of_an_empty_import_stands_in_front_of_what_follows_it(tokens):
    layout = compute_layout(schema("s", "ab", module("m", module("n")), "cd"), tokens, 1000)
    (new,) = resolve_prompt(load_prompt('<prompt schema="s">hi<m/></prompt>'), layout, tokens).new_texts
    assert new.start == 2


def test_decoding_starts_behind_the_largest_used_position(tokens):
    s = schema("s", module("m", "abc", parameter("p", 10)), union(module("short", "x"), module("long", "y" * 50)))
    layout = compute_layout(s, tokens, 1000)
    assert resolve_prompt(load_prompt('<prompt schema="s"><m p="hi"/></prompt>'), layout, tokens).end == 5
    assert resolve_prompt(load_prompt('<prompt schema="s"><m p="hi"/><short/></prompt>'), layout, tokens).end == 14
    assert layout.length == 13 + 50


def test_a_default_stands_in_for_a_missing_argument(tokens):
    layout = compute_layout(schema("s", module("m", "ab", parameter("p", 4, default="xy"), "c")), tokens, 1000)
    (new,) = resolve_prompt(load_prompt('<prompt schema="s"><m/></prompt>'), layout, tokens).new_texts
    assert (new.start, len(new.tokens)) == (2, 2)
    nothing = resolve_prompt(load_prompt('<prompt schema="s"><m p=""/></prompt>'), layout, tokens)
    assert nothing.new_texts == [] and [(one.position, one.num_tokens) for one in nothing.cached] == [(0, 2), (6, 1)]


@pytest.mark.parametrize(
    ("inside", "says"),
    [
        ("<x/>", r"the schema has no module 'x'; it has \['a', 'b', 'c'"),
        ("<e/>", "stands inside another one: write <d><e/>"),
        ("<a/><a/>", "imported twice"),
        ("<b/><c/>", "'b' and 'c' exclude each other"),
        ('<a days="3"/>', r"no parameter 'days'; it has none"),
    ],
)
def test_prompts_that_do_not_follow(tokens, inside, says):
    with pytest.raises(PromptError, match=says):
        placed(tokens, inside)


def test_arguments_are_checked(tokens):
    layout = compute_layout(schema("s", module("m", parameter("p", 3)), parameter("q", 2)), tokens, 1000)
    for text, says in (
        ('<prompt schema="s" q="x"><m p="long"/></prompt>', "has 4 tokens, its parameter holds 3"),
        ('<prompt schema="t"/>', "is for schema 't', not for 's'"),
    ):
        with pytest.raises(PromptError, match=says):
            resolve_prompt(load_prompt(text), layout, tokens)


def test_an_argument_that_is_not_given_is_empty(tokens, characters):
    layout = compute_layout(
        schema("s", module("m", "ab", parameter("p", 3), "c"), parameter("q", 2), "."), tokens, 1000
    )
    for inside, text in (("<m/>", "abc."), ('<m p="x"/>', "abxc."), ('<m p=""/>', "abc.")):
        resolved = resolve_prompt(load_prompt(f'<prompt schema="s">{inside}</prompt>'), layout, tokens)
        assert characters.decode(resolved.flatten(layout)) == text
    assert [(one.position, one.num_tokens) for one in resolved.cached] == [(8, 1), (0, 2), (5, 1)]


CHAT = schema(
    "chat",
    module("front", "F"),
    system("S", module("rule", "R")),
    module("between", "B"),
    user("U", module("doc", "D"), module("more", "M")),
    module("talk", user("T", module("inner", "I"))),
)


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        ("hi", "<|system|>S<end><|user|>U<end><|user|>hi<end>"),
        ("\n  hi\n", "<|system|>S<end><|user|>U<end><|user|>hi<end>"),
        ("<doc/>hi", "<|system|>S<end><|user|>UD<end><|user|>hi<end>"),
        ("hi<front/>", "<|user|>hi<end>F<|system|>S<end><|user|>U<end>"),
        ("<front/>hi<doc/>", "F<|user|>hi<end><|system|>S<end><|user|>UD<end>"),
        ("<rule/>hi<doc/>", "<|system|>SRhi<end><|user|>UD<end>"),  # in the gap of a turn: part of the turn
        ("<doc/>hi<more/>", "<|system|>S<end><|user|>UDhiM<end>"),
        ("<between/>hi<more/>", "<|system|>S<end>B<|user|>hi<end><|user|>UM<end>"),
        ("<doc>hi</doc>", "<|system|>S<end><|user|>UDhi<end>"),
        ("<talk><inner/>hi</talk>", "<|system|>S<end><|user|>U<end><|user|>TI<end><|user|>hi<end>"),
        ("<talk>hi<inner/></talk>", "<|system|>S<end><|user|>U<end><|user|>ThiI<end>"),
        ("hi<user>ho</user>", "<|system|>S<end><|user|>U<end><|user|>hi<end><|user|>ho<end>"),
    ],
)
def test_new_text_outside_of_a_turn_of_a_chat_schema_is_a_user_turn(tokens, characters, inside, text):
    layout = compute_layout(CHAT, tokens, 1000)
    resolved = resolve_prompt(load_prompt(f'<prompt schema="chat">{inside}</prompt>'), layout, tokens)
    assert sorted(characters.decode(resolved.flatten(layout))) == sorted(text)
    assert characters.decode(resolved.flatten(layout)) == text


def test_an_ambiguous_name_lists_the_places(tokens):
    s = schema("s", module("a", module("x", "1")), module("b", module("x", "2")))
    with pytest.raises(PromptError, match="'x' is ambiguous, it may be a/x, b/x"):
        resolve_prompt(load_prompt('<prompt schema="s"><x/></prompt>'), compute_layout(s, tokens, 1000), tokens)


def test_a_required_union(tokens):
    s = schema("s", user(union(module("a", "x"), module("b", "y"), required=True)))
    with pytest.raises(PromptError, match="one of a, b is required"):
        resolve_prompt(load_prompt('<prompt schema="s"/>'), compute_layout(s, tokens, 1000), tokens)


def test_an_empty_prompt(tokens):
    with pytest.raises(PromptError, match="the prompt is empty"):
        resolve_prompt(
            load_prompt('<prompt schema="s"/>'), compute_layout(schema("s", module("m", "x")), tokens, 1000), tokens
        )


def test_a_schema_that_the_model_cannot_hold(tokens):
    with pytest.raises(SchemaError, match="takes 50 positions; the model has 40"):
        compute_layout(schema("s", "x" * 50), tokens, 40)
    with pytest.raises(SchemaError, match="length=999999999; the model has 40 positions"):
        compute_layout(schema("s", parameter("p", 999_999_999)), tokens, 40)
    with pytest.raises(SchemaError, match="its default has 3 tokens, its length is 2"):
        compute_layout(schema("s", parameter("p", 2, default="abc")), tokens, 40)


LLAMA_2 = (  # puts the system text into the first user turn
    "{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set turns = messages %}{% set system = false %}{% endif %}{% for m in turns %}"
    "{% if loop.first and system != false %}"
    "{% set text = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] %}{% else %}"
    "{% set text = m['content'] %}{% endif %}{% if m['role'] == 'user' %}{{ '[INST] ' + text + ' [/INST]' }}"
    "{% else %}{{ ' ' + text + ' ' }}{% endif %}{% endfor %}"
)


def test_a_system_turn_of_a_schema_is_folded_into_the_user_turn(characters):
    tokenizer = copy.deepcopy(characters)
    tokenizer.chat_template = LLAMA_2
    chat = ChatTokenizer(ChatTemplate(tokenizer), tokenizer)
    text = "<schema name='s'><system>Be brief.</system><user>Name a tree.</user></schema>"
    layout = compute_layout(load_schema(text), chat, 512)
    ids = [token for run in layout.modules[()].runs for token in run.tokens]
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a tree."}]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(turns, tokenize=False)
