"""Tree of Thoughts: branches, votes, best answer (Yao et al. 2023).

Prompt Choreography, Figure 6. Every voter attends to all branches after its own instructions. The
branches were decoded independently and are placed at other positions than where they were computed.
"""

from collections import Counter

from ..engine.message import Message
from ..errors import ConfigError
from .parsing import first_choice
from .run import WorkflowRun
from .single_call import STOP_STRINGS, TEXT_PROMPT, solve_header, solve_prompt

VOTE = (
    "Several solutions of one problem follow. Judge which one is the most correct. "
    "Answer with its number only.\n\nProblem: {task}"
)

ANSWER = (
    "A solution of a problem follows. Check it and give the final answer in one or two sentences, "
    "in \\boxed{{}}.\n\nProblem: {task}"
)


def run(wf: WorkflowRun, task: str, *, branches: int = 8, voters: int = 4, prompt: str = "worked") -> Message:
    """Solve a problem in branches; answer from the branch with most votes."""
    if branches < 1 or voters < 1:
        raise ConfigError(f"branches={branches}, voters={voters}: use 1 or more of each")
    problem = wf.prefill("problem", wf.user(solve_prompt(task, prompt)))
    headers = [wf.assistant(f"Solution {i + 1}:\n{solve_header(prompt)}") for i in range(branches)]
    solutions = [wf.decode("solve", header, [problem], stop=STOP_STRINGS) for header in headers]
    instructions = wf.prefill("vote prompt", wf.user(VOTE.format(task=task)))
    question = wf.prefill(
        "answer prompt", wf.user((TEXT_PROMPT if prompt == "text" else ANSWER).format(task=task))
    )  # computed while branches decode
    header, context = wf.assistant("The best solution is number"), [instructions, *solutions]
    votes = [wf.decode("vote", header, context, max_tokens=16) for _ in range(voters)]
    best = solutions[count_votes(wf, [vote.text for vote in votes], branches)]
    return wf.decode("answer", wf.assistant(f"Final answer: {solve_header(prompt)}".rstrip()), [question, best])


def count_votes(wf: WorkflowRun, votes: list[str], branches: int) -> int:
    """Return the most voted index; lowest on ties, 0 without parsable votes."""
    counted: Counter[int] = Counter()
    for text in votes:
        number = first_choice(text, branches)
        if number is None:
            wf.record_parse_failure("vote")
        else:
            counted[number - 1] += 1
    best = min(counted, key=lambda index: (-counted[index], index), default=0)
    wf.record("best", best + 1)
    return best
