"""What a prompt from cached modules computes, against one dense mask over a plain model (`pictures`)."""

import copy

import pytest
import torch
from helpers.hypothesis_profile import many
from helpers.layout_ascii import logprobs, rows
from helpers.model_configs import CONFIGS
from helpers.oracle_families import Graph, row_logprobs
from helpers.random_schemas import prompts, schemas
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.errors import CacheFullError
from choreograph.prompt_cache import (
    Prompt,
    PromptCache,
    load_prompt,
    load_schema,
    module,
    parameter,
    scaffold,
    schema,
    user,
)

FORCED = [40, 41, 42]
QUIET = settings(max_examples=many(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def measured(cache: PromptCache, prompt: Prompt, *, mode: str = "choreographed", forced=FORCED) -> torch.Tensor:
    """Log-probabilities of every token in front of each forced one."""
    heard: list[torch.Tensor] = []
    with cache.engine.session(mode=mode, client_id=cache.client_id) as session:
        answer = cache.generate(session, prompt, sampling=SamplingParams(temperature=0), forced_tokens=forced)
        answer.on_logprobs(lambda row: heard.append(row.clone()))
        answer.result()
    cache.engine.run_until_idle()
    cache.engine.check()
    return torch.stack(heard)


@QUIET
@given(data=st.data())
def test_modules_are_the_block_diagonal_mask_at_absolute_positions(data, engine, model, characters):
    s = data.draw(schemas())
    keep = data.draw(st.sampled_from(["device", "host"]))
    with PromptCache(engine, s, location=keep) as cache:
        for _ in range(2):  # a second prompt finds some modules and not others
            prompt = data.draw(prompts(s))
            expected = logprobs(model, s, prompt, characters, FORCED)
            torch.testing.assert_close(measured(cache, prompt), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_serves_modules(family, characters):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[family])
    config.vocab_size = len(characters)
    model = AutoModelForCausalLM.from_config(config).eval()
    s = schema("s", "Look: ", module("a", "for ", parameter("p", 3), " days"), module("b", "or not"), user("Now."))
    prompt = load_prompt('<prompt schema="s"><b/><a p="12"/><user>So?</user></prompt>')
    limit = config.max_position_embeddings if family == "llama, dynamic" else None  # a longer one has another table
    options = EngineConfig(cache=CacheConfig(capacity=1024), max_model_len=limit)
    engine = Engine.from_pretrained(model, tokenizer=characters, config=options)
    tokens, positions, sees = rows(s, prompt, characters, FORCED)
    graph = Graph(tokens, positions, [[(j, positions[j]) for j in row.nonzero()[:, 0].tolist()] for row in sees])
    expected = row_logprobs(model, graph)[len(tokens) - len(FORCED) - 1 : -1]
    with PromptCache(engine, s) as cache:
        for _ in range(2):  # encoded, then found
            torch.testing.assert_close(
                measured(cache, prompt).double(), torch.from_numpy(expected), atol=2e-4, rtol=1e-3
            )


def test_a_whole_schema_in_one_module_is_the_plain_model(engine, model, characters):
    text = "It was a dark and stormy night; the rain fell in torrents."
    with PromptCache(engine, schema("all", module("story", text))) as cache:
        result = measured(cache, load_prompt('<prompt schema="all"><story/></prompt>'))
    tokens = characters(text, add_special_tokens=False)["input_ids"] + FORCED
    with torch.no_grad():
        plain = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    at = len(tokens) - len(FORCED) - 1
    torch.testing.assert_close(result, plain[at : at + len(FORCED)], atol=1e-5, rtol=1e-5)


def test_a_scaffold_is_encoded_jointly_where_all_of_it_is_imported(engine, model, characters):
    s = schema(
        "s", "Look: ", scaffold(module("a", "first thing "), module("b", "second ", module("c", "inner "))), "end"
    )
    with PromptCache(engine, s) as cache:
        for text, together in (
            ("<a/><b><c/></b>", [("a",), ("b",), ("b", "c")]),
            ("<b/><a/>", [("a",), ("b",)]),
            ("<a/>", []),
            ("<b><c/></b>", []),
        ):
            prompt = load_prompt(f'<prompt schema="s">{text}<user>So?</user></prompt>')
            expected = logprobs(model, s, prompt, characters, FORCED, together)
            torch.testing.assert_close(measured(cache, prompt), expected, atol=1e-4, rtol=1e-4)


@QUIET
@given(data=st.data())
def test_a_scaffolded_schema_serves_what_a_fresh_cache_serves(data, engine):
    """Random sequences of requests are recomputation without a store."""
    s = data.draw(schemas(scaffolds=True))
    with PromptCache(engine, s) as cache:
        for _ in range(3):
            prompt = data.draw(prompts(s))
            result = measured(cache, prompt)
            with PromptCache(engine, s, client_id="another") as fresh:
                alone = measured(fresh, prompt)
            engine.clear_cache()
            torch.testing.assert_close(result, alone, atol=1e-4, rtol=1e-4)


def test_an_unselected_module_has_no_influence(engine):
    shown = '<module name="a">Apples. </module><module name="b">{}</module>'
    answers = []
    for other in ("Bananas.", "Cherry!!"):
        text = f'<schema name="s">{shown.format(other)}</schema>'
        with PromptCache(engine, load_schema(text)) as cache:
            cache.warmup()
            answers.append(measured(cache, load_prompt('<prompt schema="s"><a/><user>Hm?</user></prompt>')))
        engine.clear_cache()
    torch.testing.assert_close(*answers, atol=0, rtol=0)


def test_an_argument_replaces_its_placeholder(engine):
    """With an argument of full length nothing of the placeholder is seen: the module's text alone, and the argument."""
    s = schema("s", module("m", "For ", parameter("days", 2), "!"))
    told = {}
    with PromptCache(engine, s) as cache:
        for days in ("12", "34", "1"):
            told[days] = measured(cache, load_prompt(f'<prompt schema="s"><m days="{days}"/><user>?</user></prompt>'))
        serving = cache.resolve('<prompt schema="s"><m days="1"/></prompt>')
    assert not torch.equal(told["12"], told["34"])
    assert [(one.position, one.num_tokens) for one in serving.cached] == [(0, 4), (6, 1)]  # 4 and 5 are unused
    assert [(one.start, len(one.tokens)) for one in serving.new_texts] == [(4, 1)]


def test_the_order_of_imports_is_irrelevant(engine):
    s = schema("s", "Now: ", module("a", "one "), module("b", "two "), module("c", "three "))
    with PromptCache(engine, s) as cache:
        result = []
        for imports in ("<a/><b/><c/>", "<c/><a/><b/>", "<b/><c/><a/>"):
            result.append(measured(cache, load_prompt(f'<prompt schema="s">{imports}<user>Well?</user></prompt>')))
            engine.clear_cache()  # the prompt's own text is encoded anew
    for other in result[1:]:
        torch.testing.assert_close(result[0], other, atol=1e-5, rtol=1e-5)


def test_other_modes_read_the_same_text(engine, characters):
    s = schema("s", "Go to ", module("m", parameter("town", 8), " soon. "), user(module("n", "Please. ")))
    prompt = load_prompt('<prompt schema="s"><m town="Rome"/><n/> Now?</prompt>')
    with PromptCache(engine, s) as cache:
        linear = cache.resolve(prompt).flatten(cache.layout)
        assert characters.decode(linear) == "Go to Rome soon. <|user|>Please. <end><|user|>Now?<end>"
        prefix, naive = (measured(cache, prompt, mode=mode) for mode in ("prefix", "naive"))
        torch.testing.assert_close(prefix, naive, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keep", ["device", "host"])
def test_a_cached_module_is_not_computed_again(engine, keep):
    s = schema("s", "x" * 20, module("a", "y" * 30, parameter("p", 4), "z" * 10), module("b", "w" * 50))
    with PromptCache(engine, s, location=keep) as cache:
        assert cache.warmup() == 20 + 44 + 50
        assert cache.warmup() == 0
        before = engine.stats().num_batched_tokens
        with engine.session() as session:
            answer = cache.generate(
                session, '<prompt schema="s"><b/><a p="hi"/><user>So</user></prompt>', forced_tokens=[40]
            )
            answer.result()
            assert answer.usage.cached_tokens == 20 + 40 + 50
            engine.run_until_idle()
        cache.check()
        assert (
            engine.stats().num_batched_tokens - before == 2 + 4 + 1 + 2
        )  # argument, turn, header, and the answer with its end
        if keep == "host":
            engine.clear_cache()
            assert engine.stats().num_free_pages == engine.stats().num_pages


@pytest.mark.parametrize("keep", ["device", "host"])
def test_usage_counts_as_cached_what_existed_before_the_call(engine, keep):
    s = schema("s", "x" * 20, module("a", "y" * 30), module("b", "w" * 50))

    def usage(inside, cache, session):
        answer = cache.generate(session, f'<prompt schema="s">{inside}<user>So</user></prompt>', forced_tokens=[40])
        return answer.result().usage.cached_tokens

    with PromptCache(engine, s, location=keep) as cache, engine.session() as session:
        assert usage("<a/>", cache, session) == 0  # everything is encoded by this call
        assert usage("<a/><b/>", cache, session) == 20 + 30
        assert usage("<a/><b/>hm", cache, session) == 20 + 30 + 50
        assert usage("<a/><b/>hm", cache, session) == 20 + 30 + 50 + 2 + 4  # the same new text is found again
    with PromptCache(engine, s) as other, engine.session() as session:
        assert usage("<a/>", other, session) == 20 + 30 + 4  # by content


@pytest.mark.parametrize(
    ("a", "inside"),
    [
        (("y" * 30, parameter("p", 4)), '<a p="hi"/> then <b/>!'),
        # an argument of one token sees one of two and is seen by a turn: still one pass
        (("y" * 9, parameter("p", 4), "z" * 9, parameter("q", 4), "x"), '<a p="hi" q="o"/>'),
    ],
)
def test_new_text_is_encoded_in_one_step(engine, a, inside):
    s = schema("s", module("a", *a), module("b", "w" * 50))
    with PromptCache(engine, s) as cache:
        cache.warmup()
        steps = engine.stats().num_steps
        with engine.session() as session:
            text = f'<prompt schema="s">{inside}<user>So</user></prompt>'
            assert cache.generate(session, text, forced_tokens=[40]).tokens
            assert engine.stats().num_steps == steps + 1


@pytest.mark.parametrize("keep", ["device", "host"])
def test_equal_modules_at_different_places(engine, model, characters, keep):
    """They share one encoding, whose keys are rotated to the place of the first: copies must remember that."""
    s = schema("s", module("a", "the same text "), module("b", "the same text "), module("c", "other"))
    with PromptCache(engine, s, location=keep) as cache:
        assert cache.warmup() == 14 + 5
        for imports in ("<b/><c/>", "<a/><b/>", "<a/>"):
            if keep == "host":
                engine.clear_cache()
            prompt = load_prompt(f'<prompt schema="s">{imports}<user>So?</user></prompt>')
            expected = logprobs(model, s, prompt, characters, FORCED)
            torch.testing.assert_close(measured(cache, prompt), expected, atol=1e-4, rtol=1e-4)


def test_a_copy_comes_back_bit_for_bit(engine):
    with engine.session() as session:
        first = session.prefill("some text that is copied")
        second = session.prefill("and its child", parents=[first])
        copies = [first.export_kv(), second.export_kv()]
        tokens = [first.tokens, second.tokens]
    engine.clear_cache()
    rows = engine.stats().num_batched_tokens
    with engine.session() as session:
        first = session.import_kv(tokens[0], copies[0])
        second = session.import_kv(tokens[1], copies[1], parents=[first])
        for message, taken in zip((first, second), copies, strict=True):
            again = message.export_kv()
            assert again.base_position == taken.base_position
            for before, after in zip(taken.layers, again.layers, strict=True):
                assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert engine.stats().num_batched_tokens == rows


def test_a_copy_waits_for_what_is_shared_and_not_computed_yet(engine):
    """A content hit ends at once, though the first message of that content is still to be computed."""
    with engine.session() as one, engine.session() as two:
        one.prefill("x" * 40)  # not read
        taken = two.prefill("x" * 40).export_kv()
        assert all(keys.isfinite().all() for keys, _ in taken.layers)


def test_new_text_that_ends_behind_later_new_text(engine):
    s = schema("s", module("a", "aa"), module("d", "dd", parameter("p", 3)))
    with PromptCache(engine, s) as cache, engine.session() as session:
        prompt = '<prompt schema="s"><a/>0123456789<d p="x"/></prompt>'
        answer = cache.generate(session, prompt, forced_tokens=[40])
        assert answer.position == 2 and answer.tokens[:10] == cache._tokenizer.encode_text("0123456789")


def test_a_module_that_found_no_room_is_encoded_when_there_is(model, characters):
    config = EngineConfig(cache=CacheConfig(capacity=128, page_size=4, poison_freed_pages=True))
    small = Engine.from_pretrained(model, tokenizer=characters, config=config)
    with PromptCache(small, schema("s", module("a", "y" * 60))) as cache, small.session() as session:
        big = session.prefill("z" * 100).pin()
        prompt = '<prompt schema="s"><a/><user>So</user></prompt>'
        with pytest.raises(CacheFullError):
            cache.generate(session, prompt, forced_tokens=[40]).result()
        big.unpin()
        assert cache.generate(session, prompt, forced_tokens=[40]).tokens
        small.check()


def test_another_client_shares_nothing(engine):
    s = schema("s", "x" * 20)
    with (
        PromptCache(engine, s) as one,
        PromptCache(engine, s, client_id="other") as two,
        PromptCache(engine, s) as same,
    ):
        assert (one.warmup(), two.warmup(), same.warmup()) == (20, 20, 0)
