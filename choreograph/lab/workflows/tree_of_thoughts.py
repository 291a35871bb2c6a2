"""Tree of Thoughts: branches, votes, best answer (Yao et al. 2023).

Prompt Choreography, Figure 6. Every voter attends to all branches after its own instructions. The
branches were decoded independently and are placed at other positions than where they were computed.
"""

import re
from collections import Counter

from ...api.message import Message
from ...errors import ConfigError
from .parsing import first_choice
from .run import WorkflowRun, check_choices
from .single_call import STOP_STRINGS, TEXT_PROMPT, solve_header, solve_prompt

VOTE = (  # after Yao et al.
    "Given an instruction and several solutions, decide which solution is most promising. Analyze each solution in "
    'detail, then conclude in the last line "The best solution is {{s}}", where s is the number of the solution.\n\n'
    "Instruction: {task}"
)

SHORT_VOTE = (
    "Several solutions of one problem follow. Judge which one is the most correct. "
    "Answer with its number only.\n\nProblem: {task}"
)

ANSWER = (
    "A solution of a problem follows. Check it and give the final answer in one or two sentences, "
    "in \\boxed{{}}.\n\nProblem: {task}"
)

FORMS = ("paper", "short")

VOTE_TOKENS = 512

_CONCLUSION = re.compile(
    r"\bbest (?:solution|choice)(?: number)?(?: is)?[^\w\n]*(?:(?:solution|choice|number)\b)?[^\w\n]*(\d{1,9})\b",
    re.IGNORECASE,
)


def run(
    wf: WorkflowRun, task: str, *, branches: int = 8, voters: int = 4, prompt: str = "worked", form: str = "paper"
) -> Message:
    """Solve a problem in branches; answer from the branch with most votes.

    Args:
        form: "paper": voters analyze the solutions, then name one; "short": they name one at once.
    """
    if branches < 1 or voters < 1:
        raise ConfigError(f"branches={branches}, voters={voters}: use 1 or more of each")
    check_choices(form=(form, FORMS))
    problem = wf.prefill("problem", wf.user(solve_prompt(task, prompt)))
    headers = [wf.assistant(f"Solution {i + 1}:\n{solve_header(prompt)}") for i in range(branches)]
    solutions = [wf.decode("solve", header, [problem], stop=STOP_STRINGS) for header in headers]
    is_short = form == "short"
    instructions = wf.prefill("vote prompt", wf.user((SHORT_VOTE if is_short else VOTE).format(task=task)))
    question = wf.prefill(
        "answer prompt", wf.user((TEXT_PROMPT if prompt == "text" else ANSWER).format(task=task))
    )  # computed while branches decode
    header = wf.assistant("The best solution is number" if is_short else "Analysis:\n")
    limit = 16 if is_short else VOTE_TOKENS
    votes = [wf.decode("vote", header, [instructions, *solutions], max_tokens=limit) for _ in range(voters)]
    read = first_choice if is_short else last_conclusion
    best = solutions[count_votes(wf, [read(vote.text, branches) for vote in votes])]
    return wf.decode("answer", wf.assistant(f"Final answer: {solve_header(prompt)}".rstrip()), [question, best])


def last_conclusion(text: str, max_number: int) -> int | None:
    """Return the number that an analysis names last as the best solution."""
    numbers = [int(number) for number in _CONCLUSION.findall(text)]
    return next((number for number in reversed(numbers) if 1 <= number <= max_number), None)


def count_votes(wf: WorkflowRun, votes: list[int | None]) -> int:
    """Return the most voted index; lowest on ties, 0 without parsable votes."""
    counted: Counter[int] = Counter()
    for number in votes:
        if number is None:
            wf.record_parse_failure("vote")
        else:
            counted[number - 1] += 1
    best = min(counted, key=lambda index: (-counted[index], index), default=0)
    wf.record("best", best + 1)
    return best
