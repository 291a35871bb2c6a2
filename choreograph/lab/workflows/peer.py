"""Plan, execute, express, review, with a step graph of the agents.

PEER (Wang et al. 2024); KVFlow, Figure 1. The agents share an introduction and have a role each, which stay the same in every
turn; the step graph predicts which role is needed next. The reviewer may send the answer back.
"""

from ...agents import StepGraph, Workflow
from ...api.message import Message
from ...errors import ConfigError
from .run import WorkflowRun
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


def run(wf: WorkflowRun, task: str, *, rounds: int = 2, prompt: str = "plain") -> Message:
    """Return the writer's last answer, after at most `rounds` of them."""
    if rounds < 1:
        raise ConfigError(f"rounds={rounds}: use 1 or more")
    team = Workflow(wf.session, StepGraph.read({"agents": AGENTS, "name": "peer"}))
    introduction = wf.prefill("introduction", wf.user(INTRODUCTION))
    question = wf.prefill("question", wf.user(solve_prompt(task, prompt)), [introduction])

    def turn(name: str, label: str, *seen: Message) -> Message:
        with team.agent(name) as agent:
            role = wf.prefill("role", wf.user(ROLES[name]), [introduction])
            agent.mark_fixed(role)
            parents = [introduction, role, question, *seen]
            # roles and question are each the same for all turns, and do not see each other
            return wf.decode(name, wf.assistant(label), parents, stop=STOP_STRINGS, warn_blocked=False).result()

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
