"""Every workflow in every mode: the same texts, the topology of the paper, outputs that cannot be read."""

import pytest
from helpers.inspect_engine import inspect

from choreograph import SamplingParams
from choreograph.errors import ChoreographError, ConfigError, DataError, InvalidRequestError
from choreograph.lab.evaluation.experiment import code_hash
from choreograph.lab.workflows import Condition, WorkflowRun, conditions_of, find, names, takes_pairs
from choreograph.lab.workflows.debate_iterative import read_verdict
from choreograph.lab.workflows.tree_of_thoughts import last_conclusion

TASKS = {
    "single_call": "What is 3 + 4?",
    "tree_of_thoughts": "What is 3 + 4?",
    "debate_iterative": "What is 3 + 4?",
    "debate_parallel": "What is 3 + 4?",
    "multi_qa": ["What is the capital of France?", "Who wrote Hamlet?"],
    "branch_solve_merge": ["dog", "run", "sea", "stone"],
    "prisoners_dilemma": "Alice",
    "peer": "What is 3 + 4?",
}
SMALL = {
    "tree_of_thoughts": {"branches": 3, "voters": 2},
    "debate_iterative": {"rounds": 2},
    "debate_parallel": {"rounds": 2},
}
GREEDY = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture
def play(talker):
    """Runs a workflow and hands out its performance with everything known."""
    sessions = []

    def go(name, mode="choreographed", forced=None, task=None, sampling=GREEDY, **options):
        session = talker.session(mode=mode, seed=3)
        sessions.append(session)
        p = WorkflowRun(session, sampling=sampling, replay=forced)
        p.answer = find(name)(p, task or TASKS[name], **{**SMALL.get(name, {}), **options})
        p.answer.result()
        talker.run_until_idle()
        return p

    yield go
    for session in sessions:
        session.close()
    talker.clear_cache()


IN_CONTEXT = {  # forms whose instructions are in the header: stages of these calls, and what they attend to
    "multi_qa": {"answer": ["system", "question", "question"]},
    "debate_parallel": {"round 2": ["question", "round 1", "round 1"]},
    "tree_of_thoughts": {"vote": ["problem", "solve", "solve", "solve"], "answer": ["problem", "solve"]},
    "branch_solve_merge": {"merge": ["system", "solve", "solve"]},
    "peer": {"planner": ["introduction", "role"], "writer": ["introduction", "role", "executor"]},
}
FORMS = [
    ("tree_of_thoughts", "paper"),
    ("tree_of_thoughts", "short"),
    ("debate_iterative", "paper"),
    ("debate_iterative", "short"),
    ("debate_parallel", "guided"),
    ("debate_parallel", "paper"),
    ("multi_qa", "guided"),
    ("multi_qa", "paper"),
    ("branch_solve_merge", "paper"),
    ("peer", "shared"),
    *((name, "in_context") for name in IN_CONTEXT),
]
WITH_FORMS = [(name, {}) for name in TASKS if name not in dict(FORMS)] + [
    (name, {"form": form}) for name, form in FORMS
]


def steps(p, stage):
    return [message for name, message in p.calls if name == stage]


def test_a_message_that_repeats_one_that_was_cut_is_cut_too(play):
    """A number on the way in a text that was cut off is no vote, whoever says it."""
    cut = play("debate_parallel")
    last = steps(cut, "round 2")
    assert {m.finish_reason for m in last} == {"length"} and all(map(cut.was_truncated, last))
    again = play("debate_parallel", forced=cut.transcript())
    assert all(map(again.was_truncated, steps(again, "round 2"))) and again.parse_failures == cut.parse_failures
    ended = play("debate_parallel", forced=cut.transcript(), sampling=SamplingParams(temperature=0, max_tokens=400))
    assert not any(map(ended.was_truncated, steps(ended, "round 2"))), "below the limit"


def test_every_workflow_is_tested():
    assert set(TASKS) == set(names())


@pytest.mark.parametrize(("name", "form"), WITH_FORMS)
def test_all_modes_use_the_same_texts_and_naive_equals_prefix(name, form, play):
    runs = {mode: play(name, mode, **form) for mode in ("naive", "prefix")}
    assert runs["naive"].transcript() == runs["prefix"].transcript()
    content = runs["prefix"].transcript()
    for options in ({}, {"topology": "parallel"}) if name in ("multi_qa", "branch_solve_merge") else ({},):
        forced = play(name, "choreographed", content, **form, **options)
        assert forced.transcript() == content
        assert forced.outputs == runs["prefix"].outputs, "what is found out is what was said"
        assert [s for s, _ in forced.calls] == [s for s, _ in runs["prefix"].calls]
        for (_, a), (_, b) in zip(forced.calls, runs["prefix"].calls, strict=True):
            assert a.tokens == b.tokens, "the same text in every mode"
    assert all(m.finish_reason in ("stop", "length", "encoded", "cached") for _, m in runs["prefix"].calls)


@pytest.mark.parametrize("name", TASKS)
def test_conditions_are_options_that_the_workflow_has(name):
    conditions = conditions_of(find(name))
    assert next(iter(conditions)) == "baseline"
    assert conditions["baseline"].mode == "prefix"
    assert all(isinstance(c, Condition) for c in conditions.values())
    assert takes_pairs(find(name)) == (name == "multi_qa")


def test_the_second_question_sees_the_first_in_prefix_mode_only(play):
    serial, parallel = (play("multi_qa", topology=t) for t in ("serial", "parallel"))
    for p in (serial, parallel):
        system = steps(p, "system")[0]
        assert all(q.parents == (system,) for q in steps(p, "question"))
    (answer,) = steps(serial, "answer")
    system, first, second, closing = answer.parents
    assert answer.offsets == (0, system.length, system.length + first.length, answer.position - closing.length)
    (answer,) = steps(parallel, "answer")
    system, first, second, closing = answer.parents
    end = system.length + max(first.length, second.length)
    assert answer.offsets == (0, system.length, system.length, end)
    assert answer.position == end + closing.length


def test_parallel_stories_overlap_and_the_merge_stands_behind_the_longer_one(play):
    (merged,) = steps(play("branch_solve_merge", topology="parallel"), "merge")
    prompt, first, second = merged.parents
    assert merged.offsets == (0, prompt.length, prompt.length)
    assert merged.position == prompt.length + max(first.length, second.length)


def test_no_agent_reads_its_own_answer(play):
    p = play("debate_parallel", agents=3, rounds=2)
    first, second = steps(p, "round 1"), steps(p, "round 2")
    for i, message in enumerate(second):
        assert first[i] not in message.parents
        assert [m for m in first if m in message.parents] == first[:i] + first[i + 1 :]


def test_a_debate_ends_with_a_yes_and_goes_on_with_anything_else(play, talker):
    def ids(text):
        return talker.tokenizer(text, add_special_tokens=False)["input_ids"]

    short = {"rounds": 3, "form": "short"}
    stopped = play("debate_iterative", forced={"verdict": [ids(" Yes, they do.")] * 3}, **short)
    assert (len(steps(stopped, "affirmative")), stopped.outputs["rounds"]) == (1, 1)
    whole = play("debate_iterative", forced={"verdict": [ids(" No."), ids(" Perhaps.")]}, **short)
    assert (len(steps(whole, "negative")), whole.outputs["rounds"]) == (3, 3)
    assert whole.parse_failures == {"verdict": 1}
    assert len(steps(whole, "affirmative")[-1].parents) == 1 + 4


def test_the_moderator_speaks_in_every_round_and_nobody_attends_to_its_verdicts(play):
    """Figure 6 of Prompt Choreography: parents are the role's prompt, then all turns of both sides."""
    p = play("debate_iterative", rounds=3)
    prompts = {role: steps(p, f"{role} prompt")[0] for role in ("affirmative", "negative", "moderator")}
    turns = [m for stage, m in p.calls if stage in ("affirmative", "negative")]
    assert len(turns) == 6 and len(steps(p, "verdict")) == 3
    for number, turn in enumerate(turns):
        assert turn.parents == (prompts[("affirmative", "negative")[number % 2]], *turns[:number])
    for number, verdict in enumerate(steps(p, "verdict"), 1):
        assert verdict.parents == (prompts["moderator"], *turns[: 2 * number])
    (conclude,) = steps(p, "conclude prompt")
    assert conclude.parents == (prompts["moderator"],)
    assert p.answer.parents == (prompts["moderator"], *turns, conclude)
    order = [stage for stage, m in p.calls if m.kind == "decode"]
    assert order == ["affirmative", "negative", "verdict"] * 3 + ["answer"]
    assert p.parse_failures == {"verdict": 3} and p.outputs["rounds"] == 3


def test_a_short_debate_has_no_verdict_in_its_last_round(play):
    p = play("debate_iterative", rounds=3, form="short")
    moderator = steps(p, "moderator prompt")[0]
    turns = [m for stage, m in p.calls if stage in ("affirmative", "negative")]
    assert [v.parents for v in steps(p, "verdict")] == [(moderator, *turns[:2]), (moderator, *turns[:4])]
    assert p.answer.parents == (moderator, *turns)


def test_a_verdict_with_a_preference_and_an_answer_ends_the_debate_and_is_its_answer(play, talker):
    def ids(text):
        return talker.tokenizer(text, add_special_tokens=False)["input_ids"]

    yes = ids('They agree.", "Whether there is a preference": "Yes", "debate_answer": "7"}')
    empty = ids('Who knows.", "Whether there is a preference": "Yes", "debate_answer": ""}')
    p = play("debate_iterative", forced={"verdict": [empty, yes]}, rounds=3)
    assert p.answer is steps(p, "verdict")[1] and not steps(p, "answer")
    assert p.outputs == {"rounds": 2, "answer": "7"} and not p.parse_failures


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('Both say 7.", "Whether there is a preference": "Yes", "debate_answer": "7"}', (True, "7")),
        (
            'A preference: yes would be early.", "Whether there is a preference": "No", "debate_answer": ""}',
            (False, None),
        ),
        ('x", "Whether there is a preference": "No", "Supported Side": "", "debate_answer": "12"', (False, "12")),
        ('x", "Preference": Yes, "Answer": 3.5}', (True, "3.5")),
        (r'x", "Whether there is a preference": "Yes", "debate_answer": "\\frac{1}{2}"}', (True, r"\frac{1}{2}")),
        ('x", "Whether there is a preference": "Yes", "debate_answer": "The answer is $18$."}', (True, "18")),
        ("I agree with the affirmative side, and the", (None, None)),
    ],
)
def test_verdicts_are_read_whether_or_not_they_are_json(text, verdict):
    assert read_verdict(text) == verdict


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Solution 1 adds wrongly. Solution 2 is right.\nThe best solution is 2.", 2),
        ('The best solution is "3".', 3),
        ("**The best choice is solution 1**, not 2", 1),
        ("At first the best solution is 1. Checked again, the best solution is 3", 3),
        ("The best solution is number 4", None),
        ("The best solution is {s}. Solution 2", None),
        ("Solution 2 is right", None),
    ],
)
def test_a_vote_that_reasons_counts_by_its_conclusion_alone(text, number):
    assert last_conclusion(text, 3) == number


@pytest.mark.parametrize("form", ["paper", "short"])
def test_voters_attend_to_all_branches_and_the_answer_to_the_best_one(form, play, talker):
    text = " 2" if form == "short" else " Solution 1 is wrong. The best solution is 2"
    vote = talker.tokenizer(text, add_special_tokens=False)["input_ids"]
    p = play("tree_of_thoughts", forced={"vote": [vote, vote]}, form=form)
    (problem,), solutions = steps(p, "problem"), steps(p, "solve")
    assert [m.parents for m in solutions] == [(problem,)] * 3
    assert [m.parents for m in steps(p, "vote")] == [(steps(p, "vote prompt")[0], *solutions)] * 2
    assert p.answer.parents == (steps(p, "answer prompt")[0], solutions[1])
    assert not p.parse_failures and p.outputs["best"] == 2


@pytest.mark.parametrize("form", ["guided", "paper"])
def test_the_instruction_of_a_parallel_debate_precedes_the_answers_in_the_papers_form(form, play):
    p = play("debate_parallel", agents=3, rounds=3, form=form)
    (question,), (update,) = steps(p, "question"), steps(p, "update prompt")
    for number in (2, 3):
        earlier = steps(p, f"round {number - 1}")
        for i, message in enumerate(steps(p, f"round {number}")):
            others = [*earlier[:i], *earlier[i + 1 :]]
            expected = [question, update, *others] if form == "paper" else [question, *others, update]
            assert message.parents == tuple(expected)


@pytest.mark.parametrize("name", IN_CONTEXT)
def test_instructions_in_context_attend_to_all_that_precedes_them(name, play):
    p = play(name, form="in_context")
    stages = {message.id: stage for stage, message in p.calls}
    for stage, parents in IN_CONTEXT[name].items():
        for message in steps(p, stage):
            assert [stages[parent.id] for parent in message.parents] == parents
            assert message.roles == ("user", "assistant"), "the instruction is a turn of the header"


@pytest.mark.parametrize(
    ("name", "form", "stages"),
    [
        ("tree_of_thoughts", "short", ["vote"]),
        ("tree_of_thoughts", "in_context", ["vote"]),
        ("debate_iterative", "paper", ["verdict", "answer"]),
        ("debate_iterative", "short", ["verdict", "answer"]),
        ("peer", "shared", ["reviewer"]),
        ("peer", "in_context", ["reviewer"]),
    ],
)
def test_exact_judges_read_as_in_prefix_mode(name, form, stages, play):
    sampling = SamplingParams(temperature=0, max_tokens=3, logprobs=0)
    baseline = play(name, "prefix", sampling=sampling, form=form)
    texts = baseline.transcript()
    runs = {e: play(name, forced=texts, sampling=sampling, form=form, exact_judges=e) for e in (False, True)}

    def scores(run):
        return [item.logprob for stage in stages for message in steps(run, stage) for item in message.logprobs]

    assert scores(runs[True]) == pytest.approx(scores(baseline), abs=1e-4)
    assert scores(runs[False]) != pytest.approx(scores(baseline), abs=1e-3)


def test_questions_in_the_papers_form_have_a_system_prompt_and_nothing_else(play):
    for topology in ("serial", "parallel"):
        p = play("multi_qa", form="paper", topology=topology)
        (system,), questions, (answer,) = steps(p, "system"), steps(p, "question"), steps(p, "answer")
        assert "Answer all questions." in system.text and not steps(p, "closing")
        assert answer.parents == (system, *questions)
        first, second = questions
        start = system.length if topology == "parallel" else system.length + first.length
        assert answer.offsets == (0, system.length, start)
        longest = max(first.length, second.length) if topology == "parallel" else first.length + second.length
        assert answer.position == system.length + longest, "right behind the last token of a question"


def test_votes_that_cannot_be_read_are_counted_and_the_first_branch_goes_on(play, talker):
    nothing = talker.tokenizer(" none", add_special_tokens=False)["input_ids"]
    p = play("tree_of_thoughts", forced={"vote": [nothing, nothing]})
    assert p.parse_failures == {"vote": 2}
    assert steps(p, "solve")[0] in p.answer.parents


def test_with_a_guard_the_same_game_leaks_nothing(play):
    sampling = SamplingParams(temperature=0, max_tokens=5, logprobs=1)
    first = play("prisoners_dilemma", strategy="defect", guard=True, sampling=sampling)
    texts = first.transcript()

    def heard(guard, orders):
        p = play("prisoners_dilemma", forced=texts, guard=guard, sampling=sampling, orders=orders)
        assert p.transcript() == texts
        stages = ("Bob says", "Bob decides", "Bob predicts")
        return p, [one.logprob for stage in stages for message in steps(p, stage) for one in message.logprobs]

    (guarded, before), (_, after) = heard(True, "Defect."), heard(True, "Whatever Bob says, cooperate with him.")
    assert after == pytest.approx(before, abs=1e-5)
    _, open_before = heard(False, "Defect.")
    _, open_after = heard(False, "Whatever Bob says, cooperate with him.")
    assert open_after != pytest.approx(open_before, abs=1e-3)
    (decides,), said = steps(guarded, "Bob decides"), steps(guarded, "Alice says")
    assert decides.labels == {"Bob-private"} and said[0].labels == {"Alice-private"}
    assert [m.tokens for m in decides.parents if m.labels == frozenset()] == [m.tokens for m in said]


@pytest.mark.parametrize("first", ["Alice", "Bob"])
@pytest.mark.parametrize("leak", ["both", "system", "plan", "none"])
def test_what_leaks_from_alice_to_bob(first, leak, play):
    p = play("prisoners_dilemma", task=first, leak=leak, strategy="defect")
    system, plan = steps(p, "Alice system")[0], steps(p, "Alice plans")[0]
    said, retold = steps(p, "Alice says"), steps(p, "retold")
    (decides,) = steps(p, "Bob decides")
    heard = [m for m in decides.parents if m in said + retold]
    assert heard == (said if leak == "both" else retold)
    assert system not in decides.parents and plan not in decides.parents
    for own, told in zip(said, retold, strict=False):
        assert (told.tokens, told.position) == (own.tokens, own.position)
        assert (system in told.parents) == (leak == "system")
        assert plan not in told.parents
        copies = [m for m in told.parents if m.tokens == plan.tokens]
        openings = steps(p, "opening")
        assert [m.parents for m in copies] == ([tuple(m for m in openings if m in told.parents)] * (leak == "plan"))
        place = dict(zip([m.id for m in own.parents], own.offsets, strict=True))
        for parent, offset in zip(told.parents, told.offsets, strict=True):
            assert parent in (*retold, system, *openings, *copies) or offset == place[parent.id]
    order = [stage for stage, _ in p.calls if stage.endswith("says")]
    assert order[:2] == [f"{first} says", f"{'Bob' if first == 'Alice' else 'Alice'} says"]
    assert set(p.outputs) == {"Alice decides", "Bob decides", "Bob predicts"}


def test_turns_are_those_of_a_session(talker):
    with talker.session() as session:
        p = WorkflowRun(session)
        for mine, its in ((p.system, session.system), (p.user, session.user), (p.assistant, session.assistant)):
            assert mine("Hello") == its("Hello")
            assert mine("Hello", opening=False) == its("Hello", opening=False) != its("Hello")


def test_lists_of_calls_are_those_of_a_session(talker):
    def play(forced=None, listed=True):
        with talker.session(seed=3) as session:
            p = WorkflowRun(session, sampling=SamplingParams(temperature=0.9, max_tokens=6), replay=forced)
            texts = [{"tokens": p.user(text)} for text in ("One", "Two")]
            asked = p.prefill("ask", texts) if listed else [p.prefill("ask", **call) for call in texts]
            calls = [{"header": p.assistant(), "parents": asked, "max_tokens": most} for most in (2, 4)]
            said = p.decode("say", calls) if listed else [p.decode("say", **call) for call in calls]
            said.append(p.decode("say", p.assistant(), said))
            return [stage for stage, _ in p.calls], [message.result().tokens for message in said], p.transcript()

    stages, said, content = play()
    assert stages == ["ask", "ask", "say", "say", "say"]
    assert [len(tokens) for tokens in content["say"]] == [2, 4, 6]
    assert play(listed=False) == (stages, said, content)
    assert play(forced=content)[2] == content


def test_what_stands_beside_a_list_of_calls_is_named(talker):
    with talker.session() as session:
        p = WorkflowRun(session)
        asked = p.prefill("ask", p.user("One"))
        for bad in ({"parents": [asked]}, {"max_tokens": 3}):
            with pytest.raises(InvalidRequestError, match=f"{next(iter(bad))}=.* with a list"):
                p.decode("say", [{"header": p.assistant()}], **bad)
        with pytest.raises(InvalidRequestError, match="needs 'tokens'"):
            p.prefill("ask", [{"parents": [asked]}])
        with pytest.raises(InvalidRequestError, match="into a list"):
            p.prefill("ask", p.user("Two"), asked)
        assert [stage for stage, _ in p.calls] == ["ask"]


def test_orders_are_for_alice_alone(play):
    p = play("prisoners_dilemma", strategy="defect", orders="Say nothing of the prize.")
    told = {name: steps(p, f"{name} system")[0].text for name in ("Alice", "Bob")}
    assert "always defect.\nSay nothing of the prize." in told["Alice"]
    assert "prize" not in told["Bob"] and "defect." not in told["Bob"].partition("as you can get.")[2]


def test_plans_are_copied_and_the_talk_is_free(play):
    sampling = SamplingParams(temperature=0.9, max_tokens=6)
    before = play("prisoners_dilemma", "prefix", sampling=sampling)
    copied = {stage: before.transcript()[stage] for stage in ("Alice plans", "Bob plans")}
    after = play("prisoners_dilemma", forced=copied, sampling=sampling)
    assert {s: after.transcript()[s] for s in copied} == copied


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("tree_of_thoughts", {"branches": 0}, "branches=0"),
        ("debate_iterative", {"rounds": 0}, "rounds=0"),
        *((name, {"form": "long"}, r"form='long': use one of \[.*'paper'") for name, form in FORMS if form == "paper"),
        ("debate_parallel", {"agents": 0}, "agents=0"),
        ("multi_qa", {"topology": "ring"}, "ring"),
        ("branch_solve_merge", {"task": "one"}, "two concepts"),
        ("prisoners_dilemma", {"task": "Carol"}, "Carol"),
        ("prisoners_dilemma", {"strategy": "win"}, "win"),
        ("prisoners_dilemma", {"leak": "all"}, "all"),
        ("prisoners_dilemma", {"leak": "none", "guard": True}, "guard"),
        ("prisoners_dilemma", {"rounds": 0}, "rounds=0"),
    ],
)
def test_bad_options_say_what_is_possible(name, options, said, play):
    with pytest.raises(ConfigError, match=said):
        play(name, **options)


OWN = """
from __future__ import annotations
from dataclasses import dataclass
from functools import cache, partial
from choreograph.lab.workflows import Condition, single_call
CONDITIONS = {"first": Condition("prefix"), "second": Condition("naive")}

@dataclass
class Prompt:
    text: str

def run(p, task):
    return p.decode("answer", p.assistant(), [p.prefill("task", p.user(Prompt(task).text))], max_tokens=2)

class Callable:
    def __call__(self, p, task):
        return run(p, task)

"""


@pytest.mark.parametrize(
    "last", ["", "run = cache(run)", "run = single_call.run", "run = partial(run)", "run = Callable()"]
)
def test_what_stands_beside_run_is_that_of_its_file(last, tmp_path):
    """However the file comes by its `run`; and a dataclass with postponed annotations is one."""
    file = tmp_path / "own.py"
    file.write_text(OWN + last)
    before = code_hash(find(str(file)))
    assert list(conditions_of(find(str(file)))) == ["first", "second"]
    file.write_text(OWN.replace("first", "one") + last)
    assert list(conditions_of(find(str(file)))) == ["one", "second"]
    assert code_hash(find(str(file))) != before


def test_a_file_that_borrows_a_workflow_has_its_conditions_by_default(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("from choreograph.lab.workflows.multi_qa import run")
    assert conditions_of(find(str(file))) == conditions_of(find("multi_qa"))


def test_one_stop_string_is_not_its_letters(talker):
    with talker.session() as session:
        p = WorkflowRun(session, sampling=SamplingParams(stop="a", max_tokens=2))
        for stop in ("END", ["END"], ("END",)):
            assert inspect(p.decode("say", "x", stop=stop)).decode_state.sampling.stop == ("a", "END")


def test_calls_take_every_sampling_parameter(talker):
    with talker.session() as session:
        p = WorkflowRun(session, sampling=SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        said = p.decode("say", "x", max_tokens=4, temperature=1.5, seed=3, top_k=5)
        again = p.decode("say", [{"header": "x", "max_tokens": 4, "temperature": 1.5, "seed": 3, "top_k": 5}])[0]
        assert said.output_token_ids == again.output_token_ids
        assert len(said.output_token_ids) == 4
        assert len(p.decode("say", "x", max_tokens=99).output_token_ids) == 6, "the run's limit holds"
        assert p.decode("say", "x", logprobs=2).logprobs


WRONG = """
def ask(p):
    return p.decode("say", "x", {0})

def run(p, task):
    return ask(p)
"""


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("most=4", r"most=4: no such argument; known: .*'stop'.*'max_tokens'"),
        ("max_tokens=0", "max_tokens=0"),
        ("temperature='hot'", "temperature='hot'"),
        ("stop=5", "stop=5"),
        ("sampling=7", "sampling=7"),
        ("offsets=[1]", "1 offsets for 0 parents"),
    ],
)
def test_a_wrong_argument_of_a_call_names_the_line_of_the_workflow(argument, said, talker, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(WRONG.format(argument))
    with talker.session() as session, pytest.raises(ChoreographError, match=f"own.py, line 3: {said}") as caught:
        find(str(file))(WorkflowRun(session), "")
    assert "\n" not in str(caught.value)
    file.write_text(WRONG.format(argument).replace("decode", "prefill"))
    with talker.session() as session, pytest.raises(ChoreographError, match=r"own\.py, line 3: "):
        find(str(file))(WorkflowRun(session), "")


def test_a_note_is_json(talker):
    with talker.session() as session:
        p = WorkflowRun(session)
        p.record("votes", [1, 2])
        with pytest.raises(DataError, match="note 'votes'"):
            p.record("votes", {1, 2})
        assert p.outputs == {"votes": [1, 2]}


@pytest.mark.parametrize(
    ("conditions", "said"),
    [
        ("{}", "CONDITIONS"),
        ("['prefix']", "CONDITIONS"),
        ("{'a': 'prefix'}", "CONDITIONS"),
        ("{'a': Condition('prefx')}", "'prefx'"),
    ],
)
def test_conditions_that_are_none_are_refused_before_anything_runs(conditions, said, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN + f"CONDITIONS = {conditions}")
    with pytest.raises(ConfigError, match=said):
        conditions_of(find(str(file)))


@pytest.mark.parametrize("mode", ["choreographed", "prefix", "naive"])
def test_the_reviewer_of_peer_may_send_the_answer_back(play, mode):
    first = play("peer", mode, rounds=3)
    if mode == "choreographed":
        assert sum(role.usage.computed_tokens > 0 for role in steps(first, "role")) == 4  # one for each agent
    script = dict(first.transcript())
    tokenizer = first.session.engine.tokenizer
    script["reviewer"] = [tokenizer.encode("REVISE: the sum is wrong.", add_special_tokens=False)] * 2
    for name in ("executor", "writer"):
        script[name] = script[name][:1] * 3
    again = play("peer", mode, forced=script, rounds=3)
    stages = [stage for stage, message in again.calls if message.kind == "decode"]
    assert stages == ["planner", *["executor", "writer", "reviewer"] * 2, "executor", "writer"]
    assert again.answer is again.calls[-1].message and len(steps(again, "role")) == len(stages)
