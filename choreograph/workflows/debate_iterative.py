"""Iterative debate of two sides with a moderator (Liang et al. 2024).

Prompt Choreography, Figure 6. Each side attends to its own instructions and every earlier turn of both.
Turns of the other side were computed after the other side's instructions. The moderator may stop the
debate after any round but the last, and gives the answer.
"""

from ..engine.message import Message
from ..errors import ConfigError
from .parsing import final_answer, first_yes_no
from .run import WorkflowRun
from .single_call import EXAMPLE, STOP_STRINGS

DEBATE = (
    "You debate the solution of a problem with an opponent. You are the {side} side{task_of_side}. You need not agree: "
    "the aim is the correct answer. "
)

FEW_SHOT_PROMPT = (
    f"{DEBATE}Argue step by step, with a short line for each step, like this:\n\n{EXAMPLE}\n\nProblem: {{task}}"
)

ZERO_SHOT_PROMPT = f"{DEBATE}Argue step by step and end with your answer in \\boxed{{{{}}}}.\n\nProblem: {{task}}"

SIDES = {
    "affirmative": " and speak first",
    "negative": ": look for mistakes in what the affirmative side says, then give your own solution",
}

MODERATOR = (
    "You moderate a debate of two sides, Affirmative and Negative, about the solution of a problem. After each "
    "round, judge whether one correct answer is settled.\n\nProblem: {task}"
)

SIDE_STOP_STRINGS = (*STOP_STRINGS, "\nAffirmative", "\nNegative")  # a side must not continue as the other

FINAL = "The final answer is \\boxed{"


def run(wf: WorkflowRun, task: str, *, rounds: int = 3, prompt: str = "worked") -> Message:
    """Debate a problem; return the moderator's final answer."""
    if rounds < 1:
        raise ConfigError(f"rounds={rounds}: use 1 or more")
    styles = {"worked": FEW_SHOT_PROMPT, "plain": ZERO_SHOT_PROMPT}
    if prompt not in styles:
        raise ConfigError(f"prompt={prompt!r}: use one of {list(styles)}")
    prompts = {
        side: wf.prefill(f"{side} prompt", wf.user(styles[prompt].format(side=side, task_of_side=duty, task=task)))
        for side, duty in SIDES.items()
    }
    moderator = wf.prefill("moderator prompt", wf.user(MODERATOR.format(task=task)))
    debate: list[Message] = []
    for number in range(1, rounds + 1):
        for side in SIDES:
            header = wf.assistant(f"{side.capitalize()} side:\n")
            debate.append(wf.decode(side, header, [prompts[side], *debate], stop=SIDE_STOP_STRINGS))
        if number == rounds or debate_is_over(wf, moderator, debate):
            break
    wf.record("rounds", number)
    final = wf.decode("answer", wf.assistant(f"Moderator: {FINAL}"), [moderator, *debate], max_tokens=48)
    wf.record("answer", final_answer(FINAL + final.text))
    return final


def debate_is_over(wf: WorkflowRun, moderator: Message, debate: list[Message]) -> bool:
    """Return whether the moderator ends the debate; False for an unparsable verdict."""
    header = wf.assistant("Moderator: Do both sides agree on one answer? My verdict (yes or no):")
    verdict = first_yes_no(wf.decode("verdict", header, [moderator, *debate], max_tokens=16).text)
    if verdict is None:
        wf.record_parse_failure("verdict")
    return bool(verdict)
