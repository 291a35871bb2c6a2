"""Tree of Thoughts (Yao et al. 2023) as in Prompt Choreography, Figure 6: branches, votes, an answer from the best.

Every voter sees all branches behind its own instructions: branches that were decoded independently of each
other and stand there at positions where they were not encoded.
"""

import re
from collections import Counter
from dataclasses import replace

from ..chat import Turn
from ..errors import ConfigError
from ..message import Message
from .performance import Performance

SOLVE = "Solve this problem. Reason step by step, briefly, and end with the result.\n\nProblem: {task}"
VOTE = (
    "Several solutions of one problem follow. Judge which one is the most correct. "
    "Answer with its number only.\n\nProblem: {task}"
)
ANSWER = "A solution of a problem follows. Give the final answer in one or two sentences.\n\nProblem: {task}"


def run(p: Performance, task: str, *, branches: int = 8, voters: int = 4) -> Message:
    """The final answer, not read yet."""
    if branches < 1 or voters < 1:
        raise ConfigError(f"branches={branches}, voters={voters}: use 1 or more of each")
    problem = p.prefill("problem", Turn("user", SOLVE.format(task=task)))
    solutions = [p.decode("solve", Turn("assistant", f"Solution {i + 1}:"), [problem]) for i in range(branches)]
    instructions = p.prefill("vote prompt", Turn("user", VOTE.format(task=task)))
    short = replace(p.sampling, max_tokens=min(16, p.sampling.max_tokens))  # a number is all that is asked for
    votes = [
        p.decode("vote", Turn("assistant", "The best solution is number"), [instructions, *solutions], sampling=short)
        for _ in range(voters)
    ]
    best = solutions[choose(p, [vote.text for vote in votes], branches)]
    question = p.prefill("answer prompt", Turn("user", ANSWER.format(task=task)))
    return p.decode("answer", Turn("assistant", "Final answer:"), [question, best])


def choose(p: Performance, votes: list[str], branches: int) -> int:
    """The index with most votes, the lowest of equals; the first one where no vote can be read."""
    counted: Counter[int] = Counter()
    for text in votes:
        number = parse_vote(text, branches)
        if number is None:
            p.could_not_parse("vote")
        else:
            counted[number - 1] += 1
    return min(counted, key=lambda index: (-counted[index], index), default=0)


def parse_vote(text: str, branches: int) -> int | None:
    """The first number in the text that names a branch."""
    return next((n for n in map(int, re.findall(r"\d{1,9}", text)) if 1 <= n <= branches), None)
