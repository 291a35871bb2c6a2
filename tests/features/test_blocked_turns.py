"""A question that saw nothing of what it is read with is warned of, once a session."""

import pytest
from helpers import tiny_models
from helpers.char_tokenizer import tokenizer

from choreograph import Budget, CacheConfig, Engine, EngineConfig, Repair, SamplingParams, Turn
from choreograph.errors import ConfigError
from choreograph.features.explain import SMALL_KL
from choreograph.lab.workflows import WorkflowRun, find

GREEDY = SamplingParams(temperature=0, max_tokens=2)
LOG = "choreograph"


@pytest.fixture(scope="module")
def engine():
    cache = CacheConfig(capacity=1 << 15, page_size=4, poison_freed_pages=True)
    model = tiny_models.build(vocabulary=len(tokenizer()), positions=4096)
    return Engine.from_pretrained(model, tokenizer=tokenizer(), config=EngineConfig(cache=cache))


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == LOG]


def turn(session, text, *parents, role="user", **options):
    return session.prefill(Turn(role, text), parents, **options)


def ask(session, *parents, header=None, **options):
    return session.decode(header or session.assistant(), parents, sampling=GREEDY, **options)


def documents(session, *parents, names="ab"):
    return [turn(session, f"document {name}", *parents) for name in names]


# -- calls that are warned of: (parents, and those of them that the last one did not see) ----------------------


def alone(session):
    docs = documents(session)
    return [*docs, turn(session, "where?")], docs


def one_document(session):
    docs = documents(session, names="a")
    return [*docs, turn(session, "where?")], docs


def behind_the_system_turn(session):
    system = turn(session, "be brief", role="system")
    docs = documents(session, system)
    return [system, *docs, turn(session, "where?", system)], docs


def behind_a_shared_introduction(session):
    introduction = turn(session, "we look for an inn")
    docs = documents(session, introduction)
    return [introduction, *docs, turn(session, "where?", introduction)], docs


def with_an_instruction(session):
    docs, question = documents(session), turn(session, "where?")
    return [*docs, question, turn(session, "be brief", question)], docs


def behind_a_conversation(session):
    question = turn(session, "where?")
    reply = ask(session, question)
    return [question, reply, turn(session, "sure?")], [question, reply]


def about_answers(session):
    question = turn(session, "where?")
    answers = [ask(session, question, header=session.assistant(name)) for name in "ab"]
    return [question, *answers, turn(session, "which is right?", question)], answers


def slices(session):
    docs = documents(session)
    return [docs[0][1:5], docs[1], turn(session, "where is it?")[2:8]], docs


@pytest.mark.parametrize(
    "program",
    [
        alone,
        one_document,
        behind_the_system_turn,
        behind_a_shared_introduction,
        with_an_instruction,
        behind_a_conversation,
        about_answers,
        slices,
    ],
)
def test_a_question_that_saw_nothing_is_named_once_with_the_fix(engine, caplog, program):
    with engine.session() as session:
        parents, unseen = program(session)
        assert warnings_of(caplog) == []
        message = ask(session, *parents)
        (text,) = warnings_of(caplog)
        names = ", ".join(f"message {parent.id}" for parent in unseen)
        assert text.startswith(
            f"message {message.id} answers message {parents[-1].id}, a user turn that saw nothing of "
        )
        assert f"nothing of {names} before it: " in text
        assert (
            "decode([session.user(...), session.assistant()], parents=[...])" in text and "warn_blocked=False" in text
        )
        ask(session, *parents)
        assert len(warnings_of(caplog)) == 1, "once a session"
        first, *_ = message.explain().recommendations
        assert text.startswith(first) and "35% instead of 15% right" in first
    with engine.session() as session:
        ask(session, *program(session)[0])
        assert len(warnings_of(caplog)) == 2


# -- calls that are not -----------------------------------------------------------------------------------------


def in_the_header(session):
    return ask(session, *documents(session), header=[session.user("where?"), session.assistant()])


def in_context(session):
    docs = documents(session)
    return ask(session, *docs, turn(session, "where?", *docs))


def in_context_of_one(session):
    docs = documents(session)
    return ask(session, *docs, turn(session, "where?", docs[0]))


def in_context_through_an_answer(session):
    docs = documents(session)
    said = in_context_reply(session, docs)
    return ask(session, *docs, said, turn(session, "sure?", said))


def in_context_reply(session, docs):
    return ask(session, *docs, header=[session.user("where?"), session.assistant()])


def of_equal_documents(session):
    question = turn(session, "where?", *documents(session))
    return ask(session, *documents(session), question)


def of_an_imported_question(session):
    with session.engine.session() as other:
        docs = documents(other)
        question = turn(other, "where?", *docs).result()
        copies = [session.import_message(message) for message in (*docs, question)]
        return ask(session, *copies)


def single_parent(session):
    return ask(session, turn(session, "where?"))


def behind_the_system_turn_alone(session):
    return ask(session, turn(session, "be brief", role="system"), turn(session, "where?"))


def system_turn_last(session):
    return ask(session, *documents(session), turn(session, "be brief", role="system"))


def answers_last(session):
    question = turn(session, "where?")
    answers = [ask(session, question, header=session.assistant(name)) for name in "ab"]
    return ask(session, turn(session, "which is right?"), *answers)


def tool_output_last(session):
    return ask(session, *documents(session), session.prefill(Turn("tool", "17 degrees")))


def user_turn_generated(session):
    return ask(session, *documents(session), header=session.user("where "))


def text_header(session):
    return ask(session, *documents(session), header="so where?")


def text_last(session):
    return ask(session, *documents(session), session.prefill("where?"))


def a_conversation(session):
    question = turn(session, "where?")
    reply = ask(session, question)
    return ask(session, question, reply, turn(session, "sure?", question, reply))


def switched_off(session):
    return ask(session, *alone(session)[0], warn_blocked=False)


def repaired(session):
    return ask(session, *alone(session)[0], repair=0.2)


SILENT = [
    in_the_header,
    in_context,
    in_context_of_one,
    in_context_through_an_answer,
    of_equal_documents,
    of_an_imported_question,
    single_parent,
    behind_the_system_turn_alone,
    system_turn_last,
    answers_last,
    tool_output_last,
    user_turn_generated,
    text_header,
    text_last,
    a_conversation,
]


@pytest.mark.parametrize("program", [*SILENT, switched_off, repaired])
def test_other_calls_are_not_warned_of(engine, caplog, program):
    with engine.session() as session:
        message = program(session)
        assert warnings_of(caplog) == []
        recommendations = message.explain().recommendations
        assert program is switched_off or not any("35% instead of 15%" in text for text in recommendations)
        ask(session, *alone(session)[0])
        assert len(warnings_of(caplog)) == 1, "the session warns still"


@pytest.mark.parametrize("mode", ["prefix", "naive"])
def test_modes_that_compute_the_whole_prompt_do_not_warn(engine, caplog, mode):
    with engine.session(mode=mode) as session:
        message = ask(session, *alone(session)[0])
        assert warnings_of(caplog) == [] and message.explain().recommendations == ()


@pytest.mark.parametrize(
    "options", [{"warn_blocked": False}, {"repair": 0.2}, {"max_kl": 0.1}, {"max_kl": Budget(1.0)}]
)
def test_a_session_does_not_warn(engine, caplog, options):
    with engine.session(**options) as session:
        ask(session, *alone(session)[0])
        assert warnings_of(caplog) == []


def test_a_repair_that_computes_nothing_does_not_silence_the_warning(engine, caplog):
    with engine.session(repair=Repair(0, "align", (0.9, 0.8))) as session:
        ask(session, *alone(session)[0])
        assert len(warnings_of(caplog)) == 1


def test_a_call_turns_the_warning_on_again(engine, caplog):
    with engine.session(warn_blocked=False) as session:
        ask(session, *alone(session)[0], warn_blocked=True)
        assert len(warnings_of(caplog)) == 1


def test_a_list_of_calls_is_warned_of_once(engine, caplog):
    with engine.session() as session:
        parents, _ = alone(session)
        session.decode([{"header": session.assistant(), "parents": parents, "sampling": GREEDY}] * 3)
        assert len(warnings_of(caplog)) == 1


def test_a_message_of_unknown_context_is_not_warned_of(engine, caplog):
    with engine.session() as writer:
        docs = documents(writer)
        question = turn(writer, "where?", *docs).result()
        tokens, snapshot = question.tokens, question.export_kv()
    with engine.session() as session:
        copy = session.import_encoded(tokens, snapshot)
        copy.roles = ("user",)
        ask(session, *documents(session), copy)
        assert warnings_of(caplog) == []


def test_the_option_is_checked(engine):
    with pytest.raises(ConfigError, match="warn_blocked='no': use True or False"):
        engine.session(warn_blocked="no")


def test_a_message_that_was_measured_to_be_like_prefix_mode_gets_no_advice(engine, monkeypatch):
    with engine.session(warn_blocked=False) as session:
        message = ask(session, *alone(session)[0])
        explanation = message.explain(measure=True)
        assert explanation.kl >= SMALL_KL and "35% instead of 15%" in explanation.recommendations[0]
        monkeypatch.setattr("choreograph.features.explain.SMALL_KL", 2 * explanation.kl)
        (text,) = message.explain(measure=True).recommendations
        assert text.endswith("nothing to do")


# -- workflows --------------------------------------------------------------------------------------------------

WORKFLOWS = {
    "tree_of_thoughts": ("What is 3 + 4?", ["paper", "short"], {"branches": 2, "voters": 2}),
    "debate_iterative": ("What is 3 + 4?", ["paper", "short"], {"rounds": 2}),
    "debate_parallel": ("What is 3 + 4?", ["guided", "paper"], {"rounds": 2}),
    "multi_qa": (["Who?", "Where?"], ["guided", "paper"], {}),
    "branch_solve_merge": (["dog", "run", "sea", "stone"], [None], {}),
    "prisoners_dilemma": ("Alice", [None], {}),
    "peer": ("What is 3 + 4?", [None], {}),
}
FORMS = [(name, form) for name, (_, forms, _) in WORKFLOWS.items() for form in forms]
SHARED = {("debate_parallel", "guided"), ("multi_qa", "guided"), ("multi_qa", "paper"), ("peer", None)}


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_workflows_of_the_papers_are_not_warned_of(engine, caplog, name, form):
    task, _, options = WORKFLOWS[name]
    with engine.session(seed=0) as session:
        run = WorkflowRun(session, sampling=GREEDY)
        find(name)(run, task, **options, **({"form": form} if form else {})).result()
        assert warnings_of(caplog) == []
        suspected = [
            message
            for _, message in run.calls
            if any("35% instead of 15%" in text for text in message.explain().recommendations)
        ]
        assert bool(suspected) == ((name, form) in SHARED), "these turn the warning off"
