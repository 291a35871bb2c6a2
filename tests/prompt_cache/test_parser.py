"""PML as text: what is markup, what is prompt, and what is refused with which words."""

from pathlib import Path

import pytest
from helpers.hypothesis_profile import many
from helpers.random_schemas import prompts, schemas
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph.errors import PMLError, PMLSyntaxError, PromptError, SchemaError
from choreograph.prompt_cache import (
    Import,
    Module,
    Parameter,
    Prompt,
    Role,
    assistant,
    dumps,
    load_prompt,
    load_schema,
    module,
    parameter,
    schema,
    system,
    union,
    user,
)

TRAVEL = """<?xml version="1.0"?>
<!-- A trip. -->
<schema name="trip">
  <system>You plan trips.</system>
  <user>
    <module name="plan">
      I am free for <param name="days" len="4"/> days.
      <union>
        <module name='coast'>I want to swim.</module>
        <module name="alps">
          I want to climb <parameter name="peak" length="8"/>.
        </module>
      </union>
    </module>
  </user>
  <assistant>Gladly.</assistant>
</schema>
"""


def only_module(text: str) -> Module:
    (child,) = load_schema(f'<schema name="s"><module name="m">{text}</module></schema>').children
    return child


def test_a_schema_is_read_as_it_is_written():
    coast = module("coast", "I want to swim.")
    alps = module("alps", "          I want to climb ", parameter("peak", 8), ".\n")
    plan = module("plan", "      I am free for ", parameter("days", 4), " days.\n", union(coast, alps))
    assert load_schema(TRAVEL) == schema("trip", system("You plan trips."), user(plan), assistant("Gladly."))


def test_a_prompt_is_read_as_it_is_written():
    text = """<prompt schema="trip">
      <plan days="a week"><alps peak="Eiger"/></plan>
      <user>Where do I sleep?</user>
    </prompt>"""
    plan = Import("plan", (Import("alps", (), {"peak": "Eiger"}),), {"days": "a week"})
    assert load_prompt(text) == Prompt("trip", (plan, Role("user", ("Where do I sleep?",))))


@pytest.mark.parametrize(
    "text",
    [
        "if a < b && c > d: return x & y",
        "std::vector<int> v; #include <stdio.h>",
        "x = '<3' <- y <= z <> w",
        "AT&T &nbsp; &unknown; & &#x;",
        'print("<b>bold</b>", List<String>, List<Module>, Optional<Union>, vector<users>)',
        "&#" + "9" * 5000 + ";",
        "Größe 漢字 \U0001f600 e\u0301",
        "# a comment\n    def f():\n        return 1  // indeed",
        "</div> <p class='x'> <?php echo 1 ?>",
        "a\tb  c",
    ],
)
def test_code_survives(text):
    assert only_module(text) == module("m", text)
    assert load_prompt(dumps(Prompt("s", (text,)))) == Prompt("s", (text,))


def test_prompts_may_hold_code_too():
    for text in ("for (i=0; i<n; i++) x <<= 1;", "a<b && c>d", "i <3 you", "x <- y"):
        assert load_prompt(f'<prompt schema="s">{text}</prompt>') == Prompt("s", (text,))
    with pytest.raises(PMLSyntaxError, match="is not a whole tag"):
        load_prompt('<prompt schema="s"><plan days=3/></prompt>')
    with pytest.raises(PMLSyntaxError, match=r"<int> is not closed before </prompt>.*or &lt; for text"):
        load_prompt('<prompt schema="s">vector<int> x;</prompt>')


def test_entities_cdata_and_comments():
    assert only_module("&lt;module&gt; &amp;amp; &#65;&#x42;") == module("m", "<module> &amp; AB")
    assert only_module('<![CDATA[\n <module name="x"> &lt;]]>') == module("m", '\n <module name="x"> &lt;')
    assert only_module("one <!-- <module> never read --> two") == module("m", "one  two")


def test_layout_is_not_text():
    m = '<module name="m">\n    if x:\n      y\n  </module>'
    result = load_schema(f'<schema name="s">\n  {m}\n\n  <union>\n <module name="n"/> </union></schema>')
    assert result == schema("s", module("m", "    if x:\n      y\n"), union(module("n")))
    p, q = '<parameter name="p" length="1"/>', '<parameter name="q" length="2"/>'
    both = parameter("p", 1), parameter("q", 2)
    assert only_module(f"a {p} {q}") == module("m", "a ", both[0], " ", both[1])
    assert only_module(f"\n Name: {p}\n Age: {q}\n") == module("m", " Name: ", both[0], "\n Age: ", both[1], "\n")
    assert only_module(f"{p}\n{q}") == module("m", both[0], "\n", both[1])


def test_names_may_look_like_files():
    s = load_schema(
        '<schema name="code"><module name="unit.py">class Unit: ...</module><module name="größe-2"/></schema>'
    )
    assert [m.name for m in s.children] == ["unit.py", "größe-2"]
    assert load_prompt('<prompt schema="code"><unit.py/><größe-2/></prompt>').children[0] == Import("unit.py")


@settings(max_examples=many(150), deadline=None)
@given(data=st.data())
def test_writing_and_reading_is_a_round_trip(data):
    s = data.draw(schemas(scaffolds=True))
    assert load_schema(dumps(s)) == s
    assert dumps(load_schema(dumps(s))) == dumps(s)
    prompt = data.draw(prompts(s))
    assert load_prompt(dumps(prompt)) == prompt


@settings(max_examples=many(200), deadline=None)
@given(st.text(st.sampled_from("<>/&\"'=!?[]-ab \n;#x"), max_size=60))
def test_any_text_is_read_or_refused(text):
    """Never another exception, and what is read is stable."""
    for make, read in (("<schema name='s'>{}</schema>", load_schema), ("<prompt schema='s'>{}</prompt>", load_prompt)):
        try:
            value = read(make.format(text))
        except PMLError:
            continue
        assert read(dumps(value)) == value


@settings(max_examples=many(100), deadline=None)
@given(st.text(max_size=40))
def test_any_text_survives_as_a_value(text):
    text = text.replace("\r", "").encode("utf-8", "ignore").decode()
    value = schema("s", module("m", text, parameter("p", 1, default=text), text))
    assert load_schema(dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "says", "place"),
    [
        (
            '<schema name="s">\n  <module name="m">text\n</schema>',
            "<module> is not closed before </schema> in line 3",
            (2, 3),
        ),
        ('<schema name="s">\n <user>hi', "<user> is never closed: write </user>", (2, 2)),
        ('<schema name="s"></user></schema>', "</user> closes nothing that is open", (1, 18)),
        ("</schema>", "closes nothing", (1, 1)),
        ('<schema name="s"><module name=m>x</module></schema>', "is not a whole tag", (1, 18)),
        ('<schema name="s"><modul name="m">x</modul></schema>', "write <module>", (1, 18)),
        ('<schema name="s"><module>x</module></schema>', "needs the attribute name", (1, 18)),
        ('<schema name="s"><module name="m" size="3">x</module></schema>', "has no attribute 'size'", (1, 18)),
        ('<schema name="s"><module name="m" name="n"/></schema>', "stands twice", (1, 18)),
        ('<schema name="s"><parameter name="p"/></schema>', 'needs length="..."', (1, 18)),
        ('<schema name="s"><parameter name="p" length="0"/></schema>', "1 or more", (1, 18)),
        ('<schema name="s"><parameter name="p" length="2" len="2"/></schema>', 'needs length="..."', (1, 18)),
        ('<schema name="s"><parameter name="p" length="2">x</parameter></schema>', "holds nothing", (1, 18)),
        ('<schema name="s"><union>text</union></schema>', "<union> holds modules", (1, 18)),
        ('<schema name="s"><module name="m" cache="maybe"/></schema>', "use true or false", (1, 18)),
        ('<!DOCTYPE s [<!ENTITY a "b">]><schema name="s"/>', "DOCTYPE is refused", (1, 1)),
        ('<schema name="s"><!ENTITY a "aaaa"></schema>', "ENTITY is refused", (1, 18)),
        ('<schema name="s"><![CDATA[x</schema>', "CDATA section is never closed", (1, 18)),
        ('<schema name="s"><!-- x</schema>', "comment is never closed", (1, 18)),
        ('<schema name="s">&#0;</schema>', "is not a character", (1, 18)),
        ('<schema name="s">&#9999999;</schema>', "is not a character", (1, 18)),
        ("just text", "one <schema ...> ... </schema> is expected", (1, 1)),
        ('<schema name="s"/><schema name="t"/>', "one <schema ...>", (1, 1)),
        ("<schema/>", "needs the attribute name", (1, 1)),
        (
            '<schema name="s"><module name="m" src="x.txt"/></schema>',
            "needs a schema that is read from a file",
            (1, 18),
        ),
        ('<schema name="s">' + '<module name="m">' * 300 + "</module>" * 300 + "</schema>", "nested deeper than", None),
    ],
)
def test_syntax_errors_say_where(text, says, place):
    with pytest.raises(PMLSyntaxError, match=says) as caught:
        load_schema(text)
    if place is not None:
        assert (caught.value.line, caught.value.column) == place
        assert f"line {place[0]}, column {place[1]}" in str(caught.value)


@pytest.mark.parametrize(
    ("inside", "says"),
    [
        ('<module name="m"/><union><module name="m"/></union>', "module 'm' is declared twice"),
        ('<user><module name="m"/></user><module name="m"/>', "module 'm' is declared twice"),
        (
            '<module name="a"><parameter name="p" length="1"/><parameter name="p" length="1"/></module>',
            "'p' is declared twice",
        ),
        ('<parameter name="schema" length="1"/>', "cannot be called 'schema'"),
        ('<module name="union"/>', "is a word of the language"),
        ('<module name="two words"/>', "use one word"),
        ("<user>a<system>b</system></user>", "turns do not nest"),
        ('<user><module name="m"><assistant>x</assistant></module></user>', "turns do not nest"),
    ],
)
def test_schemas_that_contradict_themselves(inside, says):
    with pytest.raises(SchemaError, match=says):
        load_schema(f'<schema name="s">{inside}</schema>')


def test_the_same_name_in_different_modules_is_fine():
    inside = "".join(f'<module name="{name}"><module name="x"/></module>' for name in "ab")
    assert len(load_schema(f'<schema name="s">{inside}</schema>').children) == 2


def test_prompt_errors_of_syntax():
    for text, says in (
        ("<prompt><a/></prompt>", "needs the attribute schema"),
        ('<prompt schema="s"><user><a/></user></prompt>', "holds text only"),
        ('<prompt schema="s"><a></prompt>', "<a> is not closed before </prompt>"),
    ):
        with pytest.raises(PMLSyntaxError, match=says):
            load_prompt(text)
    with pytest.raises(PromptError, match="give a string"):
        Prompt("s", (Import("m", (), {"days": 3}),))


class TestFiles:
    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        (tmp_path / "inside").mkdir()
        (tmp_path / "inside" / "unit.py").write_text("class Unit:\n    pass  # a < b\n")
        (tmp_path / "secret.txt").write_text("secret")
        return tmp_path / "inside"

    def schema_file(self, folder: Path, src: str) -> Path:
        file = folder / "s.pml"
        file.write_text(f'<schema name="s"><module name="unit.py" src="{src}"/></schema>')
        return file

    def test_text_from_beside_the_schema(self, folder):
        (child,) = load_schema(self.schema_file(folder, "unit.py")).children
        assert child == module("unit.py", "class Unit:\n    pass  # a < b\n")

    @pytest.mark.parametrize("src", ["../secret.txt", "/etc/hostname", "inside/../../secret.txt", "link.txt"])
    def test_nothing_from_elsewhere(self, folder, src):
        (folder / "link.txt").symlink_to(folder.parent / "secret.txt")
        with pytest.raises(PMLSyntaxError, match="outside the schema's folder"):
            load_schema(self.schema_file(folder, src))

    @pytest.mark.parametrize("src", ["nothing.txt", "."])
    def test_what_cannot_be_read(self, folder, src):
        with pytest.raises(PMLSyntaxError, match="cannot be read as text"):
            load_schema(self.schema_file(folder, src))

    def test_a_file_that_is_not_there(self, tmp_path):
        for read, error in ((load_schema, SchemaError), (load_prompt, PromptError)):
            with pytest.raises(error, match=r"gone\.pml: cannot be read"):
                read(tmp_path / "gone.pml")


def test_values_check_themselves():
    with pytest.raises(SchemaError, match="length=0"):
        Parameter("p", 0)
    with pytest.raises(SchemaError, match="use text, parameters"):
        module("m", 3)
