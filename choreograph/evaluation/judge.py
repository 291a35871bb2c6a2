"""Which of two answers is better, by a judge model: asked in both orders, a win only where both orders agree."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..engine.concurrency import run_concurrently
from ..engine.engine import Engine
from ..errors import ChoreographError
from ..sampling_params import SamplingParams
from .metrics import RunRecordView

JUDGE_PROMPT = (
    "Two answers to one request follow. Which one is better: more complete, more coherent, better written?\n\n"
    "Request: {request}\n\n[Answer A]\n{a}\n\n[Answer B]\n{b}\n\nReply with A or B."
)

ANSWER_HEADER = "The better answer is"


class Verdict(NamedTuple):
    """1 for a win of the second answer in both orders, -1 for the first, 0 for a tie; unread: orders not understood;
    problem: why they could not be asked."""

    score: int
    unparsed: int
    error: str = ""


def judge_pairs(
    engine: Engine,
    requests: Sequence[str],
    first: Sequence[RunRecordView],
    second: Sequence[RunRecordView],
    *,
    concurrency: int = 32,
) -> Iterator[tuple[int, Verdict]]:
    """The judge's verdict on every pair, as they come: (number of the pair, verdict). One that cannot be asked, such as
    of answers that are too long together, is unread; if none can, the first error is raised."""

    def program(request: str, one: str, two: str):
        def run() -> Verdict:
            votes = [_query_judge(engine, request, one, two), _query_judge(engine, request, two, one)]
            seen = [
                None if v is None else (v == "A") == straight for v, straight in zip(votes, (True, False), strict=True)
            ]
            unread = seen.count(None)
            if unread or seen[0] != seen[1]:
                return Verdict(0, unread)
            return Verdict(-1 if seen[0] else 1, 0)

        return run

    jobs = (program(q, a["answer"], b["answer"]) for q, a, b in zip(requests, first, second, strict=True))
    first_error, read = None, 0
    for outcome in run_concurrently(engine, jobs, max_programs=concurrency):
        if outcome.error is None:
            read += 1
            yield outcome.index, outcome.value
        elif isinstance(outcome.error, ChoreographError):
            first_error = first_error or outcome.error
            yield outcome.index, Verdict(0, 2, f"{type(outcome.error).__name__}: {outcome.error}")
        else:
            raise outcome.error
    if first_error is not None and not read:
        raise first_error


def _query_judge(engine: Engine, request: str, a: str, b: str) -> str | None:
    """A or B, the first that the judge names as a word of its own; greedy."""
    with engine.session(mode="prefix") as s:
        question = s.prefill(s.user(JUDGE_PROMPT.format(request=request, a=a, b=b)))
        sampling = SamplingParams(temperature=0, max_tokens=8)
        text = s.decode(s.assistant(ANSWER_HEADER), [question], sampling=sampling).text
    named = re.search(r"\b([AB])\b", text)
    return named and named[1]
