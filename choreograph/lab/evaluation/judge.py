"""Comparison of two answers by a judge, in both orders (Table 2)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...api.concurrency import run_concurrently
from ...api.engine import Engine
from ...errors import ChoreographError
from ...sampling_params import SamplingParams
from .datasets import Example

JUDGE_PROMPT = (
    "Two answers to one request follow. Which one is better: more complete, more coherent, better written?\n\n"
    "Request: {request}\n\n[Answer A]\n{a}\n\n[Answer B]\n{b}\n\nReply with A or B."
)
ANSWER_HEADER = "The better answer is"


class Verdict(NamedTuple):
    """The judge's verdict on one pair of answers."""

    score: int  # 1 if the second answer wins in both orders, -1 if the first does, 0 for a tie
    unparsed: int  # orders whose reply names no letter, 0 to 2
    error: str = ""  # why the judge could not be asked
    same_letter: bool = False  # both replies name the same letter: the judge prefers a place, not an answer


def judge_pairs(
    engine: Engine,
    requests: Sequence[str],
    first: Sequence[Mapping[str, Any]],
    second: Sequence[Mapping[str, Any]],
    *,
    concurrency: int = 32,
) -> Iterator[tuple[int, Verdict]]:
    """Yield (pair number, verdict) as the pairs of records are judged.

    Raises the first error if no pair could be judged, for example because the answers are too long together.
    """

    def ask(request: str, a: str, b: str) -> str | None:
        """Return the letter that the judge names first, with greedy sampling."""
        with engine.session(mode="prefix") as session:
            question = session.prefill(session.user(JUDGE_PROMPT.format(request=request, a=a, b=b)))
            sampling = SamplingParams(temperature=0, max_tokens=8)
            text = session.decode(session.assistant(ANSWER_HEADER), [question], sampling=sampling).text
        letter = re.search(r"\b([AB])\b", text)
        return letter and letter[1]

    def program(request: str, a: str, b: str):
        def run() -> Verdict:
            votes = [ask(request, a, b), ask(request, b, a)]
            score = 1 if votes == ["B", "A"] else -1 if votes == ["A", "B"] else 0
            return Verdict(score, votes.count(None), same_letter=votes[0] is not None and votes[0] == votes[1])

        return run

    programs = (program(q, a["answer"], b["answer"]) for q, a, b in zip(requests, first, second, strict=True))
    first_error, num_judged = None, 0
    for outcome in run_concurrently(engine, programs, max_programs=concurrency):
        if outcome.error is None:
            num_judged += 1
            yield outcome.index, outcome.value
        elif isinstance(outcome.error, ChoreographError):
            first_error = first_error or outcome.error
            yield outcome.index, Verdict(0, 2, f"{type(outcome.error).__name__}: {outcome.error}")
        else:
            raise outcome.error
    if first_error is not None and not num_judged:
        raise first_error


def judge_prompt(e: Example) -> str:
    """Return the task text that the judge model reads.

    Excludes the workflow's prompts.
    """
    task = e.task if isinstance(e.task, str) else "; ".join(map(str, e.task))
    prompts = {"concepts": f"Write a story that uses these concepts: {task}.", "pair": f"Answer both: {task}"}
    return prompts.get(e.kind, task)
