"""The cache on an engine: clients, limits, threads, programs, and the command line."""

import copy
import json
import re
import runpy
import threading

import pytest
from helpers.chat_templates import TEMPLATES
from helpers.command_line import app
from helpers.inspect_engine import inspect
from typer.testing import CliRunner

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.errors import (
    CacheFullError,
    ConfigError,
    MessageReleasedError,
    PromptError,
    SchemaError,
    WrongSessionError,
)
from choreograph.prompt_cache import (
    Param,
    PromptCache,
    assistant,
    dumps,
    load_prompt,
    module,
    parameter,
    program,
    scaffold,
    schema,
    system,
    union,
    user,
)
from choreograph.prompt_cache.layout import placeholder_token

STORY = schema("story", system("Short."), module("a", "Once upon a time. "), module("b", "There was a fox. "))
ASK = '<prompt schema="story"><b/><a/><user>What was there?</user></prompt>'
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def answer(cache: PromptCache, prompt=ASK) -> list[int]:
    with cache.engine.session() as session:
        return cache.generate(session, prompt, sampling=GREEDY).tokens


def test_an_answer_is_a_chat_turn(engine, characters):
    with PromptCache(engine, STORY) as cache, engine.session() as session:
        told = cache.generate(session, ASK, sampling=GREEDY)
        assert characters.decode(told.tokens).startswith("<|assistant|>") and told.tokens[-1] == characters.eos_token_id
        assert told.position == cache.resolve(ASK).end
        more = session.decode("And", parents=[told], sampling=GREEDY)  # an ordinary message: workflows go on from it
        assert more.position == len(told.tokens)


@pytest.mark.parametrize("template", ["llama-2", "mistral-1", "mistral-1-system", "mistral-3", "phi-3-first"])
def test_a_template_without_a_generation_prompt_is_answered_after_the_prompt(model, characters, template):
    tokenizer = copy.deepcopy(characters)
    tokenizer.bos_token, tokenizer.chat_template = "<bos>", TEMPLATES[template]
    engine = Engine.from_pretrained(model, tokenizer=tokenizer)
    s = schema("s", system("Be brief."), user("Here: ", module("a", "a fox"), "."), assistant("Read."))
    turns = [("system", "Be brief."), ("user", "Here: a fox."), ("assistant", "Read."), ("user", "Who?")]
    if template in ("mistral-1", "mistral-3", "phi-3-first"):  # the template moves or refuses the system text
        turns[:2] = [("user", "Be brief.\n\nHere: a fox.")]
    conversation = [{"role": role, "content": text} for role, text in turns]
    expected = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    with PromptCache(engine, s) as cache, engine.session() as session, engine.session(mode="naive") as other:
        ask = '<prompt schema="s"><a/>Who?</prompt>'
        told = cache.generate(session, ask, forced_tokens=[40])
        resolved = cache.resolve(ask)
        assert tokenizer.decode(resolved.flatten(cache.layout)) == expected
        assert told.position + told.length - resolved.end == 1 + len(cache._answer_template(resolved)[1])
        assert expected.endswith(tokenizer.decode(told.tokens[: resolved.end - told.position]))
        assert cache.generate(other, ask, forced_tokens=[40]).result().done
    engine.check()


def test_a_part_of_a_message_is_a_parent(engine):
    with engine.session() as session:
        whole = session.prefill("abcdefgh")
        two = [whole[0:3], whole[5:8]]
        placed = session.prefill("xy", parents=two, offsets=[0, 5])
        assert placed.position == 8 and placed.offsets == (0, 5)
        assert [p.length for p in placed.parents] == [3, 3]
        packed = session.prefill("xy", parents=two)
        assert packed.position == 6 and packed.offsets == (0, 3)
        for bad, says in (
            ([whole[0:3], whole[2:4]], "given twice"),
            ([whole, whole[2:4]], "given twice"),
        ):
            with pytest.raises(ValueError, match=says):
                session.prefill("z", parents=bad)
        with pytest.raises(ValueError, match="part 0:9 of message"):
            session.prefill("z", parents=[whole[0:9]]).result()
        with pytest.raises(ValueError, match="0 <= start < stop"):
            whole[3:3]
    with engine.session(mode="prefix") as session:
        whole = session.prefill("abcdefgh")
        text = session.decode("x", parents=[whole[1:3]], forced_tokens=[40])
        assert text.result().position == 2


def test_borrowing_shares_and_refuses(engine):
    with engine.session() as owner, engine.session() as other, engine.session(client_id="x") as stranger:
        message = owner.prefill("a shared text")
        copy = other.import_message(message)
        assert copy.tokens == message.tokens and copy.usage.cached_tokens == len(message.tokens)
        engine.check()
        with pytest.raises(WrongSessionError):
            stranger.import_message(message)
        owner.close()
        assert other.decode("x", parents=[copy], sampling=GREEDY).tokens
        with pytest.raises(MessageReleasedError):
            other.import_message(message)


@pytest.mark.parametrize("keep", ["device", "host"])
def test_reported_reuse_is_not_computed(engine, keep):
    """Neither the last token, where an answer starts with it, nor a scaffold that no prompt has needed yet is."""
    both = scaffold(module("a", "a" * 20), module("b", "b" * 30))
    with PromptCache(engine, schema("s", "x" * 10, both, module("c", "c" * 40)), location=keep) as cache:
        cache.warmup()
        for inside, reused in (("<c/>", 49), ("<a/>Go!", 30), ("<a/><b/>Go!", 10), ("<b/><a/>Go!", 60)):
            ask = f'<prompt schema="s">{inside}</prompt>'
            serving, rows = cache.resolve(ask), engine.stats().num_batched_tokens
            assert cache.count_cached_tokens(ask) == reused
            assert answer(cache, ask)
            whole = sum(len(one.tokens) for one in serving.new_texts) + sum(one.num_tokens for one in serving.cached)
            assert engine.stats().num_batched_tokens - rows <= whole - reused + GREEDY.max_tokens - 1


@pytest.mark.parametrize("keep", ["device", "host"])
def test_a_session_holds_its_answers_and_nothing_else(engine, keep):
    """Also of modules in several slots, and where the answer is refused."""
    trips = schema("t", module("m", "I have ", parameter("days", 3), " days for ", parameter("what", 3), ". "))
    ask = '<prompt schema="t"><m days="3" what="fun"/>Go!</prompt>'
    with PromptCache(engine, trips, location=keep) as cache, engine.session() as session:
        told = cache.generate(session, ask, sampling=GREEDY)
        assert session.messages == [told]
        with pytest.raises(ConfigError, match="stop_token_ids"):
            cache.generate(session, ask, sampling=SamplingParams(stop_token_ids=[9999]))
        assert session.messages == [told] and told.tokens
        told.release()
        cache.check()
        if keep == "host":
            assert not engine.stats().num_referenced_entries, "the device is left to others"


PLACES = schema(
    "places",
    "Go: ",
    union(module("sea", "s" * 20), module("alps", "a" * 24, union(module("tent", "t" * 8), module("hut", "h" * 12)))),
    module("other", "o" * 16),
)


@pytest.mark.parametrize("keep", ["device", "host"])
def test_other_members_of_a_used_union_are_prefetched(engine, keep):
    with PromptCache(engine, PLACES, location=keep) as cache, engine.session() as session:
        ask = '<prompt schema="places"><alps><tent/></alps><user>So?</user></prompt>'
        cache.generate(session, ask, forced_tokens=[40]).result()
        assert cache.prefetch_unions(ask) == 20 + 12  # neither used ones nor those outside of the unions
        engine.run_until_idle()
        cache.check()
        for inside, new in (("<sea/>", 0), ("<alps><hut/></alps>", 0), ("<other/>", 16)):
            before = engine.stats().num_batched_tokens
            cache.generate(session, f'<prompt schema="places">{inside}Hm</prompt>', forced_tokens=[40]).result()
            engine.run_until_idle()
            assert engine.stats().num_batched_tokens - before == 2 + 1 + new
        assert cache.prefetch_unions('<prompt schema="places"><other/></prompt>') == 0
        if keep == "device":
            assert cache.prefetch_unions(ask) == 0
        else:
            assert engine.stats().num_referenced_entries == len(session.messages) == 4, "only the answers are held"


def test_a_prefetched_member_is_loaded_from_a_lower_tier(model, characters):
    config = EngineConfig(cache=CacheConfig(capacity=128, host_capacity=256, page_size=4, poison_freed_pages=True))
    engine = Engine.from_pretrained(model, tokenizer=characters, config=config)
    two = schema("s", union(module("a", "a" * 40), module("b", "b" * 40)))
    with PromptCache(engine, two) as cache, engine.session() as session:
        cache.warmup()
        session.prefill("z" * 100).result().release()  # both members are offloaded
        engine.run_until_idle()
        ask = '<prompt schema="s"><a/>So</prompt>'
        cache.generate(session, ask, forced_tokens=[40]).result().release()
        member = cache._messages[next(key for key in cache._messages if key.path == ("b",))]
        assert member.kv_location == "host"
        assert cache.prefetch_unions(ask) == 40
        while member.kv_location == "loading":
            inspect(engine).step(wait=True)
            inspect(engine).poll_transfers()
        assert member.kv_location == "device"
    engine.check()


def test_what_failed_holds_nothing_on_the_device(model, characters):
    config = EngineConfig(cache=CacheConfig(capacity=128, page_size=4, poison_freed_pages=True))
    engine = Engine.from_pretrained(model, tokenizer=characters, config=config)
    with PromptCache(engine, schema("s", "x" * 20, module("a", "y" * 60)), location="host") as cache:
        with engine.session() as session:
            big = session.prefill("z" * 100).pin()
            for refused in (cache.warmup, lambda: cache.generate(session, '<prompt schema="s"><a/>So</prompt>')):
                with pytest.raises(CacheFullError):
                    refused()
                cache.check()
                assert not cache._session.messages
            big.unpin()
        assert cache.warmup() and not cache.warmup()
    engine.check()


@pytest.mark.parametrize("keep", ["device", "host"])
def test_threads_share_a_cache(engine, keep):
    s = schema("s", "Intro ", *(module(f"m{i}", f"text of module {i}. ") for i in range(4)))
    prompts = [f'<prompt schema="s"><m{i}/><m{(i + 1) % 4}/><user>So?</user></prompt>' for i in range(4)]
    with PromptCache(engine, s, client_id="alone") as cache, engine.session(client_id="alone") as session:
        alone = [cache.generate(session, prompt, sampling=GREEDY).tokens for prompt in prompts]
    problems: list[object] = []
    with PromptCache(engine, s, location=keep) as cache:

        def ask(first: int) -> None:
            try:
                for i in range(first, first + 8):
                    problems.extend([] if answer(cache, prompts[i % 4]) == alone[i % 4] else [i])
            except Exception as exc:
                problems.append(exc)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        cache.check()
    assert not problems


def test_a_copy_that_finds_no_room_is_computed(model, characters):
    config = EngineConfig(cache=CacheConfig(capacity=128, page_size=4, poison_freed_pages=True))
    engine = Engine.from_pretrained(model, tokenizer=characters, config=config)
    with engine.session() as session:
        message = session.prefill("a text of some length")
        tokens, copy = message.tokens, message.export_kv()
        message.release()
        big = session.prefill("z" * 120).pin()
        again = session.import_kv(tokens, copy)
        assert not inspect(again).is_finished  # it waits, like any call
        big.unpin()
        assert again.result().usage.computed_tokens == len(tokens)
        engine.check()


def test_options_are_checked(engine):
    with pytest.raises(ConfigError, match="location='disk'"):
        PromptCache(engine, STORY, location="disk")
    with PromptCache(engine, STORY) as cache:
        with (
            engine.session(client_id="other") as session,
            pytest.raises(WrongSessionError, match="another engine or client"),
        ):
            cache.generate(session, ASK)
        with pytest.raises(PromptError, match="no module 'zzz'"):
            cache.warmup(["zzz"])
        assert cache.warmup(["a"]) and not cache.warmup([("a",)])
        with pytest.raises(PromptError, match="no module 'ab'"):  # not those of its letters
            cache.warmup("ab")
        assert cache.warmup("b")
        with pytest.raises(PromptError, match="prompt=3: give PML as text"):
            cache.resolve(3)
    with pytest.raises(SchemaError, match="schema=None: give PML as text"):
        PromptCache(engine, None)
    empty = PromptCache(engine, schema("none"))
    with engine.session() as session, pytest.raises(PromptError, match="the prompt is empty"):
        empty.generate(session, '<prompt schema="none"/>')
    full = PromptCache(engine, schema("full", "x" * 399))
    with engine.session() as session, pytest.raises(PromptError, match="no room for an answer"):
        full.generate(session, '<prompt schema="full"><user>x</user></prompt>')


def test_the_placeholder_tells_nothing(embedded, characters):
    assert placeholder_token(characters) == characters.unk_token_id
    tokenizer = embedded.tokenizer  # its unknown token also ends texts
    assert tokenizer.decode([placeholder_token(tokenizer)]) == " "


# -- programs -------------------------------------------------------------------------------------------------


@program
def trip(plan: bool, days: Param(3), place: str, peak: Param(6, default="any")):
    with system:
        "You plan trips."
    with user:
        if plan:
            f"I have {days} days."
            match place:
                case "coast":
                    "I want to swim."
                case "alps":
                    f"I want to climb {peak}."


class TestPrograms:
    def test_the_function_is_the_schema(self):
        alps = module("alps", "I want to climb ", parameter("peak", 6, default="any"), ".")
        plan = module(
            "plan", "I have ", parameter("days", 3), " days.", union(module("coast", "I want to swim."), alps)
        )
        assert trip.schema == schema("trip", system("You plan trips."), user(plan))

    def test_a_call_is_a_prompt(self, engine):
        prompt = trip("And then?", plan=True, days="3", place="alps", peak="Eiger")
        assert prompt == load_prompt(
            '<prompt schema="trip"><plan days="3"><alps peak="Eiger"/></plan>And then?</prompt>'
        )
        assert trip() == load_prompt('<prompt schema="trip"/>')
        with PromptCache(engine, trip.schema) as cache:
            assert answer(cache, trip(plan=True, days=3, place="coast"))

    @pytest.mark.parametrize("first", ["from __future__ import annotations", ""])
    def test_annotations_may_be_texts(self, tmp_path, first):
        lines = [first, "from choreograph.prompt_cache import Param, program", "@program"]
        lines += ["def go(days: Param(3), far: 'how far?'):", "    f'For {days} days.'", "    if far: 'Away.'"]
        (tmp_path / "go.py").write_text("\n".join(lines))
        result = runpy.run_path(str(tmp_path / "go.py"))["go"].schema
        assert result == schema("go", "For ", parameter("days", 3), " days.", module("far", "Away."))

    def test_mistakes(self):
        for arguments, says in (
            ({"plan": True, "days": "3", "place": "moon"}, "use one of"),
            ({"plam": True}, "no argument 'plam'"),
            ({"place": "alps"}, "change nothing"),
        ):
            with pytest.raises(PromptError, match=says):
                trip(**arguments)
        with pytest.raises(SchemaError, match=r"program wrong, line \d+: text, `if name:`"):

            @program
            def wrong():
                print("hello")

        with pytest.raises(SchemaError, match="annotated with Param"):

            @program
            def missing(days: str):
                with user:
                    f"{days} days"


# -- the command line -----------------------------------------------------------------------------------------


class TestCommands:
    @pytest.fixture
    def files(self, tmp_path):
        big = schema(
            "story",
            system("Answer briefly."),
            user(module("fox", "The fox is called Rusty."), module("owl", "The owl is called Sage.")),
        )
        (tmp_path / "story.pml").write_text(dumps(big))
        (tmp_path / "ask.pml").write_text(
            '<prompt schema="story"><fox/><user>What is the name of the fox?</user></prompt>'
        )
        (tmp_path / "bad.pml").write_text('<prompt schema="story"><wolf/></prompt>')
        return tmp_path

    def call(self, *arguments):
        from choreograph.errors import ChoreographError

        result = CliRunner().invoke(app, ["pml", *map(str, arguments)])
        if result.exception and not isinstance(result.exception, (SystemExit, ChoreographError)):
            raise result.exception
        return result

    def test_check_and_show(self, files):
        told = self.call("check", files / "story.pml", files / "ask.pml")
        assert told.exit_code == 0 and "2 modules" in told.output and "ask.pml:" in told.output
        told = self.call("check", files / "story.pml", files / "ask.pml", files / "bad.pml")
        assert "bad.pml: the schema has no module 'wolf'" in str(told.exception)
        told = self.call("show", files / "story.pml", "--svg", files / "story.svg")
        assert "fox" in told.output and "owl" in told.output
        assert (files / "story.svg").read_text().count('id="PolyCollection') >= 6

    def test_a_terminal_shows_every_module_at_its_place(self, files):
        told = CliRunner().invoke(
            app, ["pml", "show", str(files / "story.pml")], env={"FORCE_COLOR": "1", "COLUMNS": "80"}
        )
        shown = re.sub(r"\x1b\[[0-9;]*m", "", told.output)
        _, fox, owl = re.findall(r"│ ([.#-]{16}) │", shown)
        assert "positions" in shown and "own tokens" in shown
        assert fox.index("#") < owl.index("#") and fox.endswith(".") and owl.startswith(".")

    def test_a_slip_in_a_prompt_is_told_before_anything_is_computed(self, files):
        told = self.call("run", files / "story.pml", files / "bad.pml")
        assert "no module 'wolf'" in str(told.exception) and "encoded" not in told.output

    def test_warm_and_run(self, files):
        told = self.call("warm", files / "story.pml", "--save", files / "story.safetensors")
        assert told.exit_code == 0, told.output
        told = self.call(
            "run",
            files / "story.pml",
            files / "ask.pml",
            "--cache",
            files / "story.safetensors",
            "--compare",
            "--max-tokens",
            12,
            "--json",
        )
        report = json.loads(told.stdout)
        assert report["cached"]["text"] and report["plain"]["text"]
        assert report["cached"]["cached"] > report["plain"]["cached"] == 0
