"""Iterative multi-agent debate (Liang et al. 2024) as in Prompt Choreography, Figure 6: two sides and a moderator.

Each side sees its own instructions and every earlier turn of both; the moderator may stop the debate after any round
but the last, and says the answer at the end. A turn of the other side was encoded behind the other side's instructions.
"""

from ..errors import ConfigError
from ..message import Message
from .direct import EXAMPLE, NEXT
from .performance import Performance
from .reading import final_answer, yes_or_no

DEBATE = (
    "You debate the solution of a problem with an opponent. You are the {side} side{task_of_side}. You need not agree: "
    "the aim is the correct answer. "
)
WORKED = f"{DEBATE}Argue step by step, with a short line for each step, like this:\n\n{EXAMPLE}\n\nProblem: {{task}}"
PLAIN = f"{DEBATE}Argue step by step and end with your answer in \\boxed{{{{}}}}.\n\nProblem: {{task}}"
SIDES = {
    "affirmative": " and speak first",
    "negative": ": look for mistakes in what the affirmative side says, then give your own solution",
}
MODERATOR = (
    "You moderate a debate of two sides, Affirmative and Negative, about the solution of a problem. After each "
    "round, judge whether one correct answer is settled.\n\nProblem: {task}"
)
STOP = (*NEXT, "\nAffirmative", "\nNegative")  # a side that goes on as the other
FINAL = "The final answer is \\boxed{"


def run(p: Performance, task: str, *, rounds: int = 3, prompt: str = "worked") -> Message:
    """The moderator's final answer."""
    if rounds < 1:
        raise ConfigError(f"rounds={rounds}: use 1 or more")
    styles = {"worked": WORKED, "plain": PLAIN}
    if prompt not in styles:
        raise ConfigError(f"prompt={prompt!r}: use one of {list(styles)}")
    prompts = {
        side: p.prefill(f"{side} prompt", p.user(styles[prompt].format(side=side, task_of_side=duty, task=task)))
        for side, duty in SIDES.items()
    }
    moderator = p.prefill("moderator prompt", p.user(MODERATOR.format(task=task)))
    debate: list[Message] = []
    for number in range(1, rounds + 1):
        for side in SIDES:
            header = p.assistant(f"{side.capitalize()} side:\n")
            debate.append(p.decode(side, header, [prompts[side], *debate], stop=STOP))
        if number == rounds or settled(p, moderator, debate):
            break
    p.note("rounds", number)
    final = p.decode("answer", p.assistant(f"Moderator: {FINAL}"), [moderator, *debate], most=48)
    p.note("answer", final_answer(FINAL + final.text))
    return final


def settled(p: Performance, moderator: Message, debate: list[Message]) -> bool:
    """Whether the moderator ends the debate early; a verdict that cannot be read does not."""
    header = p.assistant("Moderator: Do both sides agree on one answer? My verdict (yes or no):")
    verdict = yes_or_no(p.decode("verdict", header, [moderator, *debate], most=16).text)
    if verdict is None:
        p.could_not_parse("verdict")
    return bool(verdict)
