"""Scores of records, by the kind of their example: pure functions from what was said and what is known to numbers.

Answers in mathematics are compared by math-verify, words by their stems (Snowball). None stands for an output that
could not be read: it counts as wrong, and is counted.
"""

import re
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import snowballstemmer
from math_verify import parse, verify

from ..errors import DataError
from ..workflows.parsing import all_yes_no, final_answer, first_decision, first_yes_no, without_thousands, without_unit
from .datasets import Example

RunRecordView = Mapping[str, Any]

Scores = dict[str, float]

PARSE_TIMEOUT = 5  # seconds for one expression

_ARTICLES = re.compile(r"\b(?:a|an|the)\s+(?=\S)")

_INNER_MARKS = re.compile(r"(?<=\w)['’](?=\w)|(?<=[^\W\d])\.(?=\w)|(?<=\w)\.(?=[^\W\d])")

_FULL_STOP = re.compile(r"(?<!\d)\.|\.(?!\d)")  # none of a fraction


def math_equal(reference: str, answer: str) -> bool:
    """Whether two mathematical expressions are equal; the gold one is the first. What takes too long is not.

    The time limit is an alarm of the main thread; other threads go without.
    """
    reference, answer = (without_unit(side.strip().rstrip(".,; ")) for side in (reference, answer))
    if reference == answer:
        return True
    limit = PARSE_TIMEOUT if threading.current_thread() is threading.main_thread() else None
    sides = [parse(f"${side.strip('$')}$", parsing_timeout=limit) for side in (reference, answer)]
    return all(sides) and bool(verify(*sides, timeout_seconds=limit))


def normalize_text(text: str) -> str:
    """Lower case, no articles in front of a word, single spaces; marks inside a word go (U.S.), and those of thousands
    (5,000); the point of a fraction stays, other marks part words."""
    joined = without_thousands(unicodedata.normalize("NFKC", text).lower())
    joined = _INNER_MARKS.sub("", joined)
    bare = "".join(" " if unicodedata.category(c)[0] in "PS" and c != "." else c for c in joined)
    return " ".join(_ARTICLES.sub(" ", " ".join(_FULL_STOP.sub(" ", bare).split())).split())


def contains_answer(text: str, answers: Iterable[str]) -> bool:
    """Whether any alias stands in the text as whole words."""
    said = f" {normalize_text(text)} "
    return any(f" {normalize_text(a)} " in said for a in answers if normalize_text(a))


def is_correct(text: str, answers: Sequence[str]) -> bool:
    """Whether an alias is mentioned; where all are a yes or a no, whether the first of these words is it."""
    if _are_yes_or_no(answers):
        said = first_yes_no(text)
        return said is not None and ("yes" if said else "no") in map(normalize_text, answers)
    return contains_answer(text, answers)


def _are_yes_or_no(answers: Sequence[str]) -> bool:
    return bool(answers) and {normalize_text(a) for a in answers} <= {"yes", "no"}


def f1(text: str, answers: Iterable[str]) -> float:
    """The best token F1 over the aliases."""
    said = normalize_text(text).split()
    return max((_f1(said, normalize_text(a).split()) for a in answers), default=0.0)


def _f1(predicted: Sequence[str], reference: Sequence[str]) -> float:
    shared = sum((Counter(predicted) & Counter(reference)).values())
    return 2 * shared / (len(predicted) + len(reference)) if shared else 0.0


def concept_coverage(text: str, concepts: Sequence[str]) -> float:
    """The share of the concepts that the text uses, one of several words in order; in any regular inflection."""
    stem = snowballstemmer.stemmer("english").stemWord

    def stems(words: str) -> str:
        return f" {' '.join(map(stem, normalize_text(words).split()))} "

    used = stems(text)
    return sum(stems(c) in used for c in concepts) / len(concepts) if concepts else 0.0


def score_math(e: Example, r: RunRecordView) -> Scores:
    noted = "answer" in r["findings"]
    answer = r["findings"]["answer"] if noted else final_answer(r["answer"], is_complete=r.get("finish") != "length")
    right = answer is not None and math_equal(str(e.reference["answer"]), str(answer))
    return {"right": float(right), "unread": float(answer is None)}


def score_qa(e: Example, r: RunRecordView) -> Scores:
    return {
        "right": float(is_correct(r["answer"], e.reference["answers"])),
        "f1": f1(r["answer"], e.reference["answers"]),
    }


def score_pair(e: Example, r: RunRecordView) -> Scores:
    """Where both ask for a yes or a no, each has a word of its own, in their order: the first of its line, if there are
    several lines."""
    known, texts = [e.reference[k]["answers"] for k in ("first", "second")], [r["answer"]] * 2
    if all(map(_are_yes_or_no, known)):
        lines = [line for line in r["answer"].splitlines() if line.strip()]
        words = all_yes_no(r["answer"]) if len(lines) < 2 else filter(lambda x: x is not None, map(first_yes_no, lines))
        texts = [*("yes" if word else "no" for word in words), "", ""][:2]
    first, second = (float(is_correct(text, one)) for text, one in zip(texts, known, strict=True))
    return {"first": first, "second": second, "both": first * second, "either": max(first, second)}


def score_concepts(e: Example, r: RunRecordView) -> Scores:
    scores = {"coverage": concept_coverage(r["answer"], e.reference["concepts"])}
    for number, group in enumerate(r["findings"].get("groups", ()), 1):
        scores[f"story {number}"] = concept_coverage(r["answer"], group)
    return scores


def score_game(e: Example, r: RunRecordView) -> Scores:
    """Cooperation of both, what Bob predicts, and what comes of it; an unread decision is no cooperation."""
    requested = ("Alice decides", "Bob decides", "Bob predicts")
    if missing := [stage for stage in requested if stage not in r["texts"]]:
        raise DataError(
            f"{e.id}: a game is scored by what its stages {list(requested)} say; the workflow has no {missing}"
        )
    alice, bob, guess = (first_decision(r["texts"][stage][0]) for stage in requested)
    return {
        "Bob cooperates": float(bob == "cooperate"),
        "Alice cooperates": float(alice == "cooperate"),
        "predicts cooperation": float(guess == "cooperate"),
        "predicts right": float(guess is not None and guess == alice),
        "exploits": float(guess == "cooperate" and bob == "defect"),
        "defends": float(guess == "defect" and bob == "defect"),
        "unread": float(bob is None),
    }


SCORERS: Mapping[str, Callable[[Example, RunRecordView], Scores]] = {
    "math": score_math,
    "qa": score_qa,
    "pair": score_pair,
    "concepts": score_concepts,
    "game": score_game,
    "text": lambda e, r: {"words": float(len(r["answer"].split()))},
}

PRIMARY_METRIC = {
    "math": "right",
    "qa": "right",
    "pair": "both",
    "concepts": "coverage",
    "game": "Bob cooperates",
    "text": "words",
}


def score(e: Example, r: RunRecordView) -> Scores:
    """All figures of one record. A run that ended with an error scores zero everywhere."""
    if r.get("error"):
        return {"failed": 1.0}
    return {**SCORERS[e.kind](e, r), "failed": 0.0}
