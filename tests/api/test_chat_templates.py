"""Turns joined are the conversation as published chat templates render it, in every sequence of roles."""

import copy
import itertools

import jinja2
import pytest
from helpers import tiny_models
from helpers.chat_templates import TEMPLATES

from choreograph import Engine, SamplingParams, Turn
from choreograph.api.chat import ChatTemplate
from choreograph.api.validation import join_turns
from choreograph.errors import ConfigError
from choreograph.lab.workflows import multi_qa, prisoners_dilemma
from choreograph.lab.workflows.run import WorkflowRun

FOLDING = ("gemma-2", "gemma-3", "llama-2", "mistral-1", "mistral-1-system", "mistral-3", "phi-3-first")
SYSTEM_FIRST = ("deepseek-r1", "gpt-oss")  # no system turn after others
WITH_TOOLS = ("chatml", "llama-3", "llama-3.2", "qwen-2.5", "qwen-3", "smollm-2")
WITHOUT_PROMPT = ("llama-2", "mistral-1", "mistral-1-system", "mistral-3", "phi-3-first")  # no generation prompt
ACCEPTED = {  # sequences of up to four turns, the last of which is no answer, that a template renders in order
    "chatml": 255, "deepseek-r1": 23, "gemma-2": 7, "gemma-3": 7, "gpt-oss": 23, "llama-2": 7, "llama-3": 255,
    "llama-3.2": 255, "mistral-1": 10, "mistral-1-system": 10, "mistral-3": 10, "phi-3": 80, "phi-3-first": 40,
    "qwen-2.5": 215, "qwen-3": 215, "smollm-2": 255,
}  # fmt: skip


@pytest.fixture(scope="module")
def base_tokenizer(embedded):
    tokenizer = copy.deepcopy(embedded.tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return tokenizer


@pytest.fixture(params=TEMPLATES)
def name(request):
    return request.param


@pytest.fixture
def tokenizer(base_tokenizer, name):
    """The tokenizer with the template of that name."""
    base_tokenizer.chat_template = TEMPLATES[name]
    return base_tokenizer


def asked(tokenizer, turns) -> str | None:
    """The template's own rendering with a generation prompt; None if it refuses, drops or moves a turn."""
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError:
        return None
    places = [rendered.find(turn.text) for turn in turns]
    return rendered if -1 not in places and places == sorted(places) else None


def folded(turns) -> list[Turn]:
    """System texts as first lines of the user turns that follow them."""
    result, before = [], ""
    for turn in turns:
        if turn.role == "system":
            before += f"{turn.text}\n\n"
        elif turn.role == "user" or not before:
            result.append(Turn(turn.role, before + turn.text))
            before = ""
        else:
            result += [Turn("user", before), turn]
            before = ""
    return result + ([Turn("user", before)] if before else [])


def expected(name, tokenizer, turns) -> str | None:
    if name not in FOLDING:
        return asked(tokenizer, turns)
    if turns[0].role == "system" and (direct := asked(tokenizer, [turns[0], *folded(turns[1:])])) is not None:
        return direct
    return asked(tokenizer, folded(turns))


def encoded(chat, turns) -> list[int]:
    return join_turns(chat.encode_turns(turns, opening=True))


def sequences(name):
    roles = ("system", "user", "assistant", *(["tool"] if name in WITH_TOOLS else []))
    for length in (1, 2, 3, 4):
        for sequence in itertools.product(roles, repeat=length):
            if sequence[-1] == "assistant":  # templates show the thoughts of a last answer, and no other's
                continue
            if name in FOLDING and sequence[-1] == "system":  # opens a turn that waits for the user's text
                continue
            if name in SYSTEM_FIRST and "system" in sequence[1:]:
                continue
            if name.startswith("qwen") and ("tool", "tool") in itertools.pairwise(sequence):  # share one turn there
                continue
            yield sequence


def test_every_sequence_of_roles_is_what_the_template_renders(tokenizer, name):
    chat, num_accepted = ChatTemplate(tokenizer), 0
    for sequence in sequences(name):
        turns = [Turn(role, f"{role} {number}") for number, role in enumerate(sequence)]
        whole = expected(name, tokenizer, turns)
        if whole is None:
            continue
        num_accepted += 1
        ids = encoded(chat, turns)
        if name not in WITHOUT_PROMPT:
            header = [*turns, Turn("assistant", "")]
            ids = join_turns(chat.encode_turns(header, opening=True, opens_last=True))
        assert tokenizer.decode(ids) == whole
    assert num_accepted == ACCEPTED[name]


def test_an_answer_right_after_a_system_turn_closes_the_turn_that_holds_it(tokenizer, name):
    chat, turns = ChatTemplate(tokenizer), [Turn("system", "Be brief."), Turn("assistant", "Yes.")]
    text = tokenizer.decode(encoded(chat, turns))
    whole = expected(name, tokenizer, [*turns, Turn("user", "Why?")])
    if name in FOLDING:
        closing = chat._folded_turn_end
        assert closing.strip() and text.index("Be brief.") < text.index(closing.strip()) < text.index("Yes.")
    else:
        assert whole.startswith(text)


def test_an_empty_user_turn_after_a_folded_system_turn_repeats_nothing(tokenizer, name):
    ids = encoded(ChatTemplate(tokenizer), [Turn("system", "Be brief."), Turn("user", "  "), Turn("assistant", "Yes.")])
    assert tokenizer.decode(ids).count("Be brief.") == 1
    assert tokenizer.decode(ids).count("<<SYS>>") == (name == "llama-2")


def test_workflows_with_system_turns_run_where_the_template_folds_them(base_tokenizer):
    model = tiny_models.build(vocabulary=len(base_tokenizer), positions=2048)
    for name in ("gemma-2", "llama-2", "mistral-1"):
        base_tokenizer.chat_template = TEMPLATES[name]
        with Engine.from_pretrained(model, tokenizer=base_tokenizer).session(seed=1) as session:
            run = WorkflowRun(session, sampling=SamplingParams(max_tokens=2, ignore_eos=True))
            assert multi_qa.run(run, "Who?\nWhere?").result().done
            assert prisoners_dilemma.run(run, "Alice").result().done


def test_a_template_without_a_place_for_a_later_system_turn_says_so(base_tokenizer):
    for name in SYSTEM_FIRST:
        base_tokenizer.chat_template = TEMPLATES[name]
        with pytest.raises(ConfigError, match="system"):
            ChatTemplate(base_tokenizer).encode(Turn("system", "Be brief."), opening=False)
