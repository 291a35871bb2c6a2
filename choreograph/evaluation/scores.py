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

from ..choreographies.reading import decision, final_answer, without_thousands, without_unit, yes_or_no, yes_or_nos
from ..errors import DataError
from .data import Example

Record = Mapping[str, Any]
Scores = dict[str, float]
PATIENCE = 5  # seconds for one expression
_ARTICLES = re.compile(r"\b(?:a|an|the)\s+(?=\S)")
_WITHIN = re.compile(r"(?<=\w)['’](?=\w)|(?<=[^\W\d])\.(?=\w)|(?<=\w)\.(?=[^\W\d])")
_POINT = re.compile(r"(?<!\d)\.|\.(?!\d)")  # none of a fraction


def same_answer(gold: str, answer: str) -> bool:
    """Whether two mathematical expressions are equal; the gold one is the first. What takes too long is not.

    The time limit is an alarm of the main thread; other threads go without.
    """
    gold, answer = (without_unit(side.strip().rstrip(".,; ")) for side in (gold, answer))
    if gold == answer:
        return True
    limit = PATIENCE if threading.current_thread() is threading.main_thread() else None
    sides = [parse(f"${side.strip('$')}$", parsing_timeout=limit) for side in (gold, answer)]
    return all(sides) and bool(verify(*sides, timeout_seconds=limit))


def normal(text: str) -> str:
    """Lower case, no articles in front of a word, single spaces; marks inside a word go (U.S.), and those of thousands
    (5,000); the point of a fraction stays, other marks part words."""
    joined = without_thousands(unicodedata.normalize("NFKC", text).lower())
    joined = _WITHIN.sub("", joined)
    bare = "".join(" " if unicodedata.category(c)[0] in "PS" and c != "." else c for c in joined)
    return " ".join(_ARTICLES.sub(" ", " ".join(_POINT.sub(" ", bare).split())).split())


def mentions(text: str, answers: Iterable[str]) -> bool:
    """Whether any alias stands in the text as whole words."""
    said = f" {normal(text)} "
    return any(f" {normal(a)} " in said for a in answers if normal(a))


def answers_right(text: str, answers: Sequence[str]) -> bool:
    """Whether an alias is mentioned; where all are a yes or a no, whether the first of these words is it."""
    if _are_yes_or_no(answers):
        said = yes_or_no(text)
        return said is not None and ("yes" if said else "no") in map(normal, answers)
    return mentions(text, answers)


def _are_yes_or_no(answers: Sequence[str]) -> bool:
    return bool(answers) and {normal(a) for a in answers} <= {"yes", "no"}


def f1(text: str, answers: Iterable[str]) -> float:
    """The best token F1 over the aliases."""
    said = normal(text).split()
    return max((_f1(said, normal(a).split()) for a in answers), default=0.0)


def _f1(said: Sequence[str], gold: Sequence[str]) -> float:
    shared = sum((Counter(said) & Counter(gold)).values())
    return 2 * shared / (len(said) + len(gold)) if shared else 0.0


def coverage(text: str, concepts: Sequence[str]) -> float:
    """The share of the concepts that the text uses, one of several words in order; in any regular inflection."""
    stem = snowballstemmer.stemmer("english").stemWord

    def stems(words: str) -> str:
        return f" {' '.join(map(stem, normal(words).split()))} "

    used = stems(text)
    return sum(stems(c) in used for c in concepts) / len(concepts) if concepts else 0.0


def _math(e: Example, r: Record) -> Scores:
    noted = "answer" in r["findings"]
    answer = r["findings"]["answer"] if noted else final_answer(r["answer"], whole=r.get("finish") != "length")
    right = answer is not None and same_answer(str(e.gold["answer"]), str(answer))
    return {"right": float(right), "unread": float(answer is None)}


def _qa(e: Example, r: Record) -> Scores:
    return {"right": float(answers_right(r["answer"], e.gold["answers"])), "f1": f1(r["answer"], e.gold["answers"])}


def _pair(e: Example, r: Record) -> Scores:
    """Where both ask for a yes or a no, each has a word of its own, in their order: the first of its line, if there are
    several lines."""
    known, texts = [e.gold[k]["answers"] for k in ("first", "second")], [r["answer"]] * 2
    if all(map(_are_yes_or_no, known)):
        lines = [line for line in r["answer"].splitlines() if line.strip()]
        words = yes_or_nos(r["answer"]) if len(lines) < 2 else filter(lambda x: x is not None, map(yes_or_no, lines))
        texts = [*("yes" if word else "no" for word in words), "", ""][:2]
    first, second = (float(answers_right(text, one)) for text, one in zip(texts, known, strict=True))
    return {"first": first, "second": second, "both": first * second, "either": max(first, second)}


def _concepts(e: Example, r: Record) -> Scores:
    scores = {"coverage": coverage(r["answer"], e.gold["concepts"])}
    for number, group in enumerate(r["findings"].get("groups", ()), 1):
        scores[f"story {number}"] = coverage(r["answer"], group)
    return scores


def _game(e: Example, r: Record) -> Scores:
    """Cooperation of both, what Bob predicts, and what comes of it; an unread decision is no cooperation."""
    asked = ("Alice decides", "Bob decides", "Bob predicts")
    if missing := [stage for stage in asked if stage not in r["texts"]]:
        raise DataError(f"{e.id}: a game is scored by what its stages {list(asked)} say; the workflow has no {missing}")
    alice, bob, guess = (decision(r["texts"][stage][0]) for stage in asked)
    return {
        "Bob cooperates": float(bob == "cooperate"),
        "Alice cooperates": float(alice == "cooperate"),
        "predicts cooperation": float(guess == "cooperate"),
        "predicts right": float(guess is not None and guess == alice),
        "exploits": float(guess == "cooperate" and bob == "defect"),
        "defends": float(guess == "defect" and bob == "defect"),
        "unread": float(bob is None),
    }


SCORERS: Mapping[str, Callable[[Example, Record], Scores]] = {
    "math": _math,
    "qa": _qa,
    "pair": _pair,
    "concepts": _concepts,
    "game": _game,
    "text": lambda e, r: {"words": float(len(r["answer"].split()))},
}
MAIN = {
    "math": "right",
    "qa": "right",
    "pair": "both",
    "concepts": "coverage",
    "game": "Bob cooperates",
    "text": "words",
}


def score(e: Example, r: Record) -> Scores:
    """All figures of one record. A run that ended with an error scores zero everywhere."""
    if r.get("error"):
        return {"failed": 1.0}
    return {**SCORERS[e.kind](e, r), "failed": 0.0}
