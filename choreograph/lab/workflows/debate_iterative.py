"""Iterative debate of two sides with a moderator (Liang et al. 2024).

Prompt Choreography, Figure 6. Each side attends to its own instructions and every earlier turn of both.
Turns of the other side were computed after the other side's instructions. In every round the moderator
attends to its instructions and all turns, gives its reasons and a verdict, and may end the debate; no
one attends to a verdict.
"""

import re
from collections.abc import Mapping
from typing import Any

from ...api.message import Message
from ...errors import ConfigError
from .parsing import final_answer, first_yes_no
from .run import WorkflowRun, check_choices, exact
from .single_call import EXAMPLE, STOP_STRINGS

DEBATE = (  # the second sentence is level 2 of Liang et al.
    "You are a debater in a debate of two sides about the solution of a problem, and speak for the {side} side. It's "
    "not necessary to fully agree with each other's perspectives, as our objective is to find the correct answer. {duty} "
)

FEW_SHOT_PROMPT = (
    f"{DEBATE}Argue step by step, with a short line for each step, like this:\n\n{EXAMPLE}\n\nProblem: {{task}}"
)

ZERO_SHOT_PROMPT = f"{DEBATE}Argue step by step and end with your answer in \\boxed{{{{}}}}.\n\nProblem: {{task}}"

SIDES = {
    "affirmative": "You speak first. Later, say whether you agree with the negative side, with reasons and an answer.",
    "negative": "You disagree with the affirmative side's answer: provide your answer and reasons.",
}

MODERATOR = (
    "You are a moderator. Two debaters, Affirmative and Negative, will present their answers and discuss their "
    "perspectives on the problem below. At the end of each round, evaluate both sides' answers and determine if there "
    "is a clear preference for an answer candidate. If so, summarize your reasons and give the final answer that you "
    "think is correct, and the debate will conclude. If not, the debate will continue. Output JSON in this format: "
    '{{"Reason": "", "Whether there is a preference": "Yes or No", "Supported Side": "Affirmative or Negative", '
    '"debate_answer": ""}}\n\nProblem: {task}'
)

SHORT_MODERATOR = (
    "You moderate a debate of two sides, Affirmative and Negative, about the solution of a problem. After each "
    "round, judge whether one correct answer is settled.\n\nProblem: {task}"
)

CONCLUDE = (
    "The debate has ended without a verdict. Summarize your reasons and give the final answer that you think is "
    'correct. Output JSON in this format: {"Reason": "", "debate_answer": ""}'
)

FORMS = ("paper", "short")

SIDE_STOP_STRINGS = (*STOP_STRINGS, "\nAffirmative", "\nNegative")  # a side must not continue as the other

VERDICT_TOKENS = 512

VERDICT_START = '{"Reason": "'

FINAL = "The final answer is \\boxed{"

_PREFERENCE = re.compile(r"preference\W{1,5}(yes|no)\b", re.IGNORECASE)

_ANSWER = re.compile(r'answer"?\s*:\s*(?:"((?:[^"\\]|\\.)*)"?|([^",}\n]+))', re.IGNORECASE)


def run(
    wf: WorkflowRun,
    task: str,
    *,
    rounds: int = 3,
    prompt: str = "worked",
    form: str = "paper",
    exact_judges: bool = False,
) -> Message:
    """Debate a problem; return the moderator's final answer.

    Args:
        form: "paper", or "short": the moderator says yes or no after every round but the last, without
            reasons, then states the final answer.
        exact_judges: the moderator reads the debate as in prefix mode.
    """
    if rounds < 1:
        raise ConfigError(f"rounds={rounds}: use 1 or more")
    styles = {"worked": FEW_SHOT_PROMPT, "plain": ZERO_SHOT_PROMPT}
    check_choices(prompt=(prompt, styles), form=(form, FORMS))
    prompts = {
        side: wf.prefill(f"{side} prompt", wf.user(styles[prompt].format(side=side, duty=duty, task=task)))
        for side, duty in SIDES.items()
    }
    instructions = MODERATOR if form == "paper" else SHORT_MODERATOR
    moderator = wf.prefill("moderator prompt", wf.user(instructions.format(task=task)))
    judge, debate = exact(exact_judges), list[Message]()
    for number in range(1, rounds + 1):
        for side in SIDES:
            header = wf.assistant(f"{side.capitalize()} side:\n")
            debate.append(wf.decode(side, header, [prompts[side], *debate], stop=SIDE_STOP_STRINGS))
        if form == "paper":
            verdict = moderate(wf, "verdict", [moderator, *debate], judge)
            has_preference, answer = read_verdict(verdict.text)
            if has_preference is None:
                wf.record_parse_failure("verdict")
            if has_preference and answer:
                wf.record("rounds", number)
                wf.record("answer", answer)
                return verdict
        elif number == rounds or debate_is_over(wf, moderator, debate, judge):
            break
    wf.record("rounds", number)
    if form == "short":
        header = wf.assistant(f"Moderator: {FINAL}")
        final = wf.decode("answer", header, [moderator, *debate], max_tokens=48, **judge)
        wf.record("answer", final_answer(FINAL + final.text))
        return final
    conclude = wf.prefill("conclude prompt", wf.user(CONCLUDE), [moderator])
    final = moderate(wf, "answer", [moderator, *debate, conclude], judge)
    wf.record("answer", read_verdict(final.text)[1] or final_answer(final.text, is_complete=False))
    return final


def moderate(wf: WorkflowRun, stage: str, context: list[Message], judge: Mapping[str, Any]) -> Message:
    """Decode a verdict that starts with its reasons; `judge` has options of the call."""
    return wf.decode(stage, wf.assistant(f"Moderator:\n{VERDICT_START}"), context, max_tokens=VERDICT_TOKENS, **judge)


def read_verdict(text: str) -> tuple[bool | None, str | None]:
    """Return a verdict's preference and its answer, None if not stated.

    The text need not be valid JSON: small models leave out quotes and braces, and formulas contain
    backslashes.
    """
    preferences, answers = _PREFERENCE.findall(text), [quoted or bare for quoted, bare in _ANSWER.findall(text)]
    answer = next((value.replace("\\\\", "\\") for value in reversed(answers) if re.search(r"\w", value)), None)
    return (
        preferences[-1].lower() == "yes" if preferences else None,
        None if answer is None else final_answer(f"The answer is {answer}"),
    )


def debate_is_over(wf: WorkflowRun, moderator: Message, debate: list[Message], judge: Mapping[str, Any]) -> bool:
    """Return whether a short verdict ends the debate."""
    header = wf.assistant("Moderator: Do both sides agree on one answer? My verdict (yes or no):")
    verdict = first_yes_no(wf.decode("verdict", header, [moderator, *debate], max_tokens=16, **judge).text)
    if verdict is None:
        wf.record_parse_failure("verdict")
    return bool(verdict)
