"""A header of several turns: all of it is computed in the call's context, as messages of one turn each would be."""

import pytest
from helpers import tiny_models
from helpers.char_tokenizer import tokenizer
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import CacheConfig, Engine, EngineConfig, Turn
from choreograph.errors import InvalidTokensError
from choreograph.lab.workflows.run import WorkflowRun

MODES = ["choreographed", "prefix", "naive"]
FORCED = [40, 41, 42]


@pytest.fixture(scope="module")
def engine():
    """The tiny model over a tokenizer with a chat template."""
    cache = CacheConfig(capacity=4096, page_size=4, poison_freed_pages=True)
    vocabulary = len(tokenizer())
    with_chat = tiny_models.build(vocabulary=vocabulary, positions=1024)
    return Engine.from_pretrained(with_chat, tokenizer=tokenizer(), config=EngineConfig(cache=cache))


def answer(session, parents, turns, *, apart):
    """Decode the last turn; the others are in the header, or messages of their own."""
    context = list(parents)
    if apart:
        for turn in turns[:-1]:
            context.append(session.prefill(turn, context))
    return session.decode(turns[-1] if apart else turns, context, forced_tokens=FORCED, logprobs=len(tokenizer()))


def scores(message):
    return [score for item in message.logprobs for _, score in sorted(item.top.items())]


turns = st.lists(
    st.builds(Turn, st.sampled_from(["system", "user", "assistant"]), st.text("abc ?", max_size=6)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=many(25), deadline=None)
@given(turns=turns, texts=st.lists(st.text("xyz ", min_size=1, max_size=9), max_size=3), mode=st.sampled_from(MODES))
def test_a_header_of_turns_gives_what_messages_of_one_turn_each_give(engine, turns, texts, mode):
    with engine.session(mode=mode) as session, engine.session(mode=mode) as other:
        results = []
        for owner, is_apart in ((session, True), (other, False)):
            parents = [owner.prefill(owner.user(text)) for text in texts]
            said = answer(owner, parents, turns, apart=is_apart)
            own = [*said.parents[len(texts) :], said]  # messages of the turns
            reader = answer(owner, [*parents, *own], [Turn("user", "so"), Turn("assistant", "")], apart=is_apart)
            results.append((said, [token for message in own for token in message.tokens], reader))
        (said, tokens, reader), (same, same_tokens, same_reader) = results
        assert tokens == same_tokens and same.role == said.role == turns[-1].role
        assert said.position + said.length == same.position + same.length
        assert scores(said) == pytest.approx(scores(same), abs=2e-4)
        assert scores(reader) == pytest.approx(scores(same_reader), abs=2e-4), "later calls read all of its turns"
    engine.check()


def test_only_the_first_turn_opens_a_conversation(embedded):
    with embedded.session() as session:
        for opening in (True, False):
            header = [session.user("Why?", opening=opening), session.assistant()]
            text = embedded.tokenizer.decode(session.decode(header, max_tokens=1).tokens)
            assert text.count("<|im_start|>system") == opening
            assert text.count("<|im_start|>user\nWhy?<|im_end|>") == text.count("<|im_start|>assistant") == 1


def test_tokens_of_a_prefill_are_turns_too(engine):
    with engine.session() as session:
        whole = session.prefill([session.system("be brief"), session.user("why?")])
        first = session.prefill(session.system("be brief"))
        second = session.prefill(session.user("why?"), [first])
        assert whole.tokens == first.tokens + second.tokens and whole.role == "user"


def test_the_text_of_the_answer_leaves_the_header_out(engine):
    with engine.session() as session:
        header = [session.user("why?"), session.assistant("so")]
        message = session.decode(header, forced_tokens=tokenizer().encode(" yes"))
        assert message.text == " yes"
        assert tokenizer().decode(message.tokens) == "<|user|>why?<end><|assistant|>so yes<end>"


@pytest.mark.parametrize("prompt", [["turn", "text"], ["turn", 5], ["text", "turn"], [5, "turn"], ["turn", []]])
@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_a_list_of_turns_has_turns_alone(engine, prompt, call):
    kinds = {"turn": Turn("user", "x"), "text": "x"}
    with engine.session() as session:
        with pytest.raises(InvalidTokensError, match="chat turn"):
            getattr(session, call)([kinds.get(item, item) if isinstance(item, str) else item for item in prompt])
        assert not session.messages


def test_a_list_of_calls_has_headers_of_turns(engine):
    with engine.session() as session:
        header = [session.user("why?"), session.assistant()]
        first, second = session.decode([{"header": header, "max_tokens": 2}, {"header": header[1], "max_tokens": 2}])
        assert first.length > second.length


def test_repair_of_all_parents_of_a_header_of_turns_is_prefix_mode(engine):
    results = []
    for mode in ("choreographed", "prefix"):
        with engine.session(mode=mode, repair=1.0) as session:
            parents = [session.prefill(session.user(text)) for text in ("the inn", "the mill")]
            message = answer(session, parents, [Turn("user", "where?"), Turn("assistant", "at")], apart=False)
            results.append(scores(message))
            assert (message.usage.repaired_tokens > 0) == (mode == "choreographed")
    assert results[0] == pytest.approx(results[1], abs=2e-4)


def test_a_workflow_asks_in_the_header(engine):
    with engine.session() as session:
        run = WorkflowRun(session)
        note = run.prefill("note", run.user("the inn"))
        said = run.decode("answer", [run.user("where?"), run.assistant("at")], [note], max_tokens=3)
        both = run.decode("again", [{"header": [run.user("why?"), run.assistant()], "parents": [note, said]}] * 2)
        assert [message.role for message in (said, *both)] == ["assistant"] * 3
        assert tokenizer().decode(said.tokens).startswith("<|user|>where?<end><|assistant|>at")
