"""Plan, execute, express, review, with a step graph of the agents.

PEER (Wang et al. 2024); KVFlow, Figure 1. The agents share an introduction and have a role each, which stay the same in every
turn; the step graph predicts which role is needed next. The reviewer may send the answer back.
"""

from ...agents import StepGraph, Workflow
from ...api.message import Message
from ...errors import ConfigError
from .run import WorkflowRun, check_choices, exact
from .single_call import STOP_STRINGS, solve_prompt

INTRODUCTION = (
    "You are one of four agents who answer a question together: a planner, an executor, a writer and a reviewer."
)
ROLES = {
    "planner": "You are the planner. Divide the question into the steps that answer it, one a line. Do not answer it.",
    "executor": "You are the executor. Carry out every step of the plan, in order, with its result.",
    "writer": "You are the writer. From the results, write the answer to the question, in the form that it asks for.",
    "reviewer": "You are the reviewer. Check the answer. Write ACCEPT if it is right, else REVISE and what is wrong.",
}
AGENTS = {
    "planner": None,
    "executor": {"any_of": ["planner", "reviewer"]},
    "writer": "executor",
    "reviewer": "writer",
}

FORMS = ("shared", "in_context")


def run(
    wf: WorkflowRun,
    task: str,
    *,
    rounds: int = 2,
    prompt: str = "plain",
    form: str = "shared",
    exact_judges: bool = False,
) -> Message:
    """Return the writer's last answer, after at most `rounds` of them.

    Args:
        form: "shared": the question is computed once for all agents and does not attend to their roles; "in_context":
            it is in the header of every turn, and attends to the role and to what other agents wrote.
        exact_judges: the reviewer reads the answer as in prefix mode.
    """
    if rounds < 1:
        raise ConfigError(f"rounds={rounds}: use 1 or more")
    check_choices(form=(form, FORMS))
    team = Workflow(wf.session, StepGraph.read({"agents": AGENTS, "name": "peer"}))
    introduction = wf.prefill("introduction", wf.user(INTRODUCTION))
    asked = wf.user(solve_prompt(task, prompt))
    in_header = [asked] if form == "in_context" else []
    question = [] if in_header else [wf.prefill("question", asked, [introduction])]

    def turn(name: str, label: str, *seen: Message) -> Message:
        with team.agent(name) as agent:
            role = wf.prefill("role", wf.user(ROLES[name]), [introduction])
            agent.mark_fixed(role)
            header = [*in_header, wf.assistant(label)]
            parents = [introduction, role, *question, *seen]
            # a shared question does not attend to the role, on purpose
            judge = exact(exact_judges and name == "reviewer")
            return wf.decode(name, header, parents, stop=STOP_STRINGS, warn_blocked=False, **judge).result()

    plan = turn("planner", "Plan:\n")
    review: list[Message] = []
    for number in range(1, rounds + 1):
        results = turn("executor", "Results:\n", plan, *review)
        answer = turn("writer", "Answer:\n", results)
        if number == rounds:
            break
        review = [turn("reviewer", "Review:\n", answer)]
        verdict = review[0].text.upper()
        if "ACCEPT" not in verdict and "REVISE" not in verdict:
            wf.record_parse_failure("reviewer")
        if "REVISE" not in verdict:
            break
        review = [answer, *review]
    wf.record("answer", wf.read_answer("writer", answer))
    return answer
