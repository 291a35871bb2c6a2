"""Parallel debate of several agents with majority voting (Du et al. 2024).

Prompt Choreography, Figure 6. From the second round on, an agent attends to the other agents' last
answers, not to its own, and to the instruction to use them.
"""

from ...api.message import Message
from ...errors import ConfigError
from .answers import normalize_answer
from .parsing import majority
from .run import WorkflowRun, check_choices
from .single_call import STOP_STRINGS, solve_prompt

UPDATE = (
    "These are the solutions of other agents, which may be wrong. Check them, then write your own solution of the "
    "problem, with a short line for each step and the answer in \\boxed{}."
)

PAPER_UPDATE = (  # after Du et al.
    "The solutions to the problem from other agents follow. Using them as additional information, provide your answer "
    "to the problem, with your final answer in the form \\boxed{} at the end of your response."
)

FORMS = ("guided", "paper", "in_context")


def run(
    wf: WorkflowRun, task: str, *, agents: int = 3, rounds: int = 3, prompt: str = "worked", form: str = "guided"
) -> Message:
    """Debate a problem; return the first answer that matches the majority.

    Args:
        form: "guided": the instruction follows the other agents' answers; "paper": it precedes them; "in_context":
            it follows them in the header, so that it attends to them.
    """
    if agents < 1 or rounds < 1:
        raise ConfigError(f"agents={agents}, rounds={rounds}: use 1 or more of each")
    check_choices(form=(form, FORMS))
    question = wf.prefill("question", wf.user(solve_prompt(task, prompt)))
    headers = [wf.assistant(f"Agent {i + 1}:\n") for i in range(agents)]
    answers = [wf.decode("round 1", header, [question], stop=STOP_STRINGS) for header in headers]
    is_paper = form == "paper"
    instruction = wf.user(PAPER_UPDATE if is_paper else UPDATE)
    in_header = [instruction] if form == "in_context" else []
    update = [] if in_header else [wf.prefill("update prompt", instruction, [question])]
    for number in range(2, rounds + 1):
        others = [[*answers[:i], *answers[i + 1 :]] for i in range(agents)]
        contexts = [[question, *update, *o] if is_paper else [question, *o, *update] for o in others]
        answers = [
            wf.decode(f"round {number}", [*in_header, header], context, stop=STOP_STRINGS, warn_blocked=False)
            for header, context in zip(headers, contexts, strict=True)  # `update` is shared on purpose
        ]
    finals = [wf.read_answer(f"round {rounds}", answer) for answer in answers]
    agreed = majority(finals)
    chosen = next((i for i, final in enumerate(finals) if final and normalize_answer(final) == agreed), 0)
    wf.record("answer", finals[chosen])
    return answers[chosen]
