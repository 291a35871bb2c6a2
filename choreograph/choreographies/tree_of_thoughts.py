"""Tree of Thoughts (Yao et al. 2023) as in Prompt Choreography, Figure 6: branches, votes, an answer from the best.

Every voter sees all branches behind its own instructions: branches that were decoded independently of each
other and stand there at positions where they were not encoded.
"""

from collections import Counter

from ..errors import ConfigError
from ..message import Message
from .direct import NEXT, ask
from .performance import Performance
from .reading import choice

VOTE = (
    "Several solutions of one problem follow. Judge which one is the most correct. "
    "Answer with its number only.\n\nProblem: {task}"
)
ANSWER = (
    "A solution of a problem follows. Check it and give the final answer in one or two sentences, "
    "in \\boxed{{}}.\n\nProblem: {task}"
)


def run(p: Performance, task: str, *, branches: int = 8, voters: int = 4, prompt: str = "worked") -> Message:
    """The final answer, not read yet."""
    if branches < 1 or voters < 1:
        raise ConfigError(f"branches={branches}, voters={voters}: use 1 or more of each")
    problem = p.prefill("problem", p.user(ask(task, prompt)))
    headers = [p.assistant(f"Solution {i + 1}:\n") for i in range(branches)]
    solutions = [p.decode("solve", header, [problem], stop=NEXT) for header in headers]
    instructions = p.prefill("vote prompt", p.user(VOTE.format(task=task)))
    question = p.prefill("answer prompt", p.user(ANSWER.format(task=task)))  # encoded while branches decode
    header, seen = p.assistant("The best solution is number"), [instructions, *solutions]
    votes = [p.decode("vote", header, seen, most=16) for _ in range(voters)]  # a number is all that is asked for
    best = solutions[choose(p, [vote.text for vote in votes], branches)]
    return p.decode("answer", p.assistant("Final answer:"), [question, best])


def choose(p: Performance, votes: list[str], branches: int) -> int:
    """The index with most votes, the lowest of equals; the first one where no vote can be read."""
    counted: Counter[int] = Counter()
    for text in votes:
        number = choice(text, branches)
        if number is None:
            p.could_not_parse("vote")
        else:
            counted[number - 1] += 1
    best = min(counted, key=lambda index: (-counted[index], index), default=0)
    p.note("best", best + 1)
    return best
