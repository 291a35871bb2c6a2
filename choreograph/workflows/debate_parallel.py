"""Parallel multi-agent debate (Du et al. 2024; Prompt Choreography, Figure 6): agents x rounds, then a majority.

In every later round an agent reads what the others answered in the round before, not what it said itself. What to do
with those answers is said behind them, in the last turn before its own; in Figure 6 it stands before them.
"""

from ..engine.message import Message
from ..errors import ConfigError
from .parsing import final_answer, majority, normalize_answer
from .run import WorkflowRun
from .single_call import STOP_STRINGS, solve_prompt

UPDATE = (
    "These are the solutions of other agents, which may be wrong. Check them, then write your own solution of the "
    "problem, with a short line for each step and the answer in \\boxed{}."
)


def run(wf: WorkflowRun, task: str, *, agents: int = 3, rounds: int = 3, prompt: str = "worked") -> Message:
    """The last answer of the first agent that is with the majority."""
    if agents < 1 or rounds < 1:
        raise ConfigError(f"agents={agents}, rounds={rounds}: use 1 or more of each")
    question = wf.prefill("question", wf.user(solve_prompt(task, prompt)))
    headers = [wf.assistant(f"Agent {i + 1}:\n") for i in range(agents)]
    answers = [wf.decode("round 1", header, [question], stop=STOP_STRINGS) for header in headers]
    update = wf.prefill("update prompt", wf.user(UPDATE), [question])
    for number in range(2, rounds + 1):
        answers = [
            wf.decode(f"round {number}", header, [question, *answers[:i], *answers[i + 1 :], update], stop=STOP_STRINGS)
            for i, header in enumerate(headers)
        ]
    finals = [final_answer(answer.text, is_complete=not wf.was_truncated(answer)) for answer in answers]
    for final in finals:
        if final is None:
            wf.record_parse_failure(f"round {rounds}")
    agreed = majority(finals)
    chosen = next((i for i, final in enumerate(finals) if final and normalize_answer(final) == agreed), 0)
    wf.record("answer", finals[chosen])
    return answers[chosen]
