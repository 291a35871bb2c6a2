"""Tree of Thoughts: branches, votes, best answer (Yao et al. 2023).

Prompt Choreography, Figure 6. Every voter attends to all branches after its own instructions. The
branches were decoded independently and are placed at other positions than where they were computed.
"""

import re
from collections import Counter
from typing import Any

from ...api.message import Message
from ...errors import ConfigError
from .parsing import first_choice
from .run import WorkflowRun, check_choices, exact
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

VOTE_BEHIND = (
    "Above are several solutions of one problem. Judge which one is the most correct. Answer with its number only."
)

ANSWER_BEHIND = "Check this solution and give the final answer in one or two sentences, in \\boxed{}."

TEXT_ANSWER_BEHIND = "Check this answer and give the final answer in one sentence."

FORMS = ("paper", "short", "in_context")

VOTE_TOKENS = 512

_CONCLUSION = re.compile(
    r"\bbest (?:solution|choice)(?: number)?(?: is)?[^\w\n]*(?:(?:solution|choice|number)\b)?[^\w\n]*(\d{1,9})\b",
    re.IGNORECASE,
)


def run(
    wf: WorkflowRun,
    task: str,
    *,
    branches: int = 8,
    voters: int = 4,
    prompt: str = "worked",
    form: str = "paper",
    exact_judges: bool = False,
) -> Message:
    """Solve a problem in branches; answer from the branch with most votes.

    Args:
        form: "paper": voters analyze the solutions, then name one; "short": they name one at once; "in_context": as
            "short", with the problem first and the instructions behind the solutions, in the headers of votes and answer.
        exact_judges: voters read the solutions as in prefix mode.
    """
    if branches < 1 or voters < 1:
        raise ConfigError(f"branches={branches}, voters={voters}: use 1 or more of each")
    check_choices(form=(form, FORMS))
    problem = wf.prefill("problem", wf.user(solve_prompt(task, prompt)))
    headers = [wf.assistant(f"Solution {i + 1}:\n{solve_header(prompt)}") for i in range(branches)]
    solutions = [wf.decode("solve", header, [problem], stop=STOP_STRINGS) for header in headers]
    is_short, is_text = form != "paper", prompt == "text"
    vote_header = [wf.assistant("The best solution is number" if is_short else "Analysis:\n")]
    answer_header = [wf.assistant(f"Final answer: {solve_header(prompt)}".rstrip())]
    if form == "in_context":
        instructions = question = problem
        vote_header.insert(0, wf.user(VOTE_BEHIND))
        answer_header.insert(0, wf.user(TEXT_ANSWER_BEHIND if is_text else ANSWER_BEHIND))
    else:
        instructions = wf.prefill("vote prompt", wf.user((SHORT_VOTE if is_short else VOTE).format(task=task)))
        question = wf.prefill(
            "answer prompt", wf.user((TEXT_PROMPT if is_text else ANSWER).format(task=task))
        )  # computed while branches decode
    options: dict[str, Any] = {"max_tokens": 16 if is_short else VOTE_TOKENS, **exact(exact_judges)}
    votes = [wf.decode("vote", vote_header, [instructions, *solutions], **options) for _ in range(voters)]
    read = first_choice if is_short else last_conclusion
    best = solutions[count_votes(wf, [read(vote.text, branches) for vote in votes])]
    return wf.decode("answer", answer_header, [question, best])


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
