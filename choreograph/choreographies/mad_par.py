"""Parallel multi-agent debate (Du et al. 2024; Prompt Choreography, Figure 6): agents x rounds, then a majority.

In every later round an agent reads what the others answered in the round before, not what it said itself. What to do
with those answers is said behind them, in the last turn before its own; in Figure 6 it stands before them.
"""

from ..errors import ConfigError
from ..message import Message
from .direct import NEXT, ask
from .performance import Performance
from .reading import final_answer, majority, plain

UPDATE = (
    "These are the solutions of other agents, which may be wrong. Check them, then write your own solution of the "
    "problem, with a short line for each step and the answer in \\boxed{}."
)


def run(p: Performance, task: str, *, agents: int = 3, rounds: int = 3, prompt: str = "worked") -> Message:
    """The last answer of the first agent that is with the majority."""
    if agents < 1 or rounds < 1:
        raise ConfigError(f"agents={agents}, rounds={rounds}: use 1 or more of each")
    question = p.prefill("question", p.user(ask(task, prompt)))
    headers = [p.assistant(f"Agent {i + 1}:\n") for i in range(agents)]
    answers = [p.decode("round 1", header, [question], stop=NEXT) for header in headers]
    update = p.prefill("update prompt", p.user(UPDATE), [question])
    for number in range(2, rounds + 1):
        answers = [
            p.decode(f"round {number}", header, [question, *answers[:i], *answers[i + 1 :], update], stop=NEXT)
            for i, header in enumerate(headers)
        ]
    finals = [final_answer(answer.text, whole=not p.was_cut(answer)) for answer in answers]
    for final in finals:
        if final is None:
            p.could_not_parse(f"round {rounds}")
    agreed = majority(finals)
    chosen = next((i for i, final in enumerate(finals) if final and plain(final) == agreed), 0)
    p.note("answer", finals[chosen])
    return answers[chosen]
