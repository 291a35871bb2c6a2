"""Scores of run records by example kind; unparsed outputs count as wrong."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...errors import DataError
from ...utils import require
from ..workflows.answers import math_equal, without_thousands
from ..workflows.parsing import all_yes_no, final_answer, first_decision, first_yes_no
from . import longbench
from .datasets import Example

RunRecordView = Mapping[str, Any]
Scores = dict[str, float]

SCORING_VERSION = 4  # of the rules that read and compare answers: raise it with every change of a score

_ARTICLES = re.compile(r"\b(?:a|an|the)\s+(?=\S)")
_INNER_MARKS = re.compile(r"(?<=\w)['’](?=\w)|(?<=[^\W\d])\.(?=\w)|(?<=\w)\.(?=[^\W\d])")
_FULL_STOP = re.compile(r"(?<!\d)\.|\.(?!\d)")  # not a decimal point


def normalize_text(text: str) -> str:
    """Return text in lower case without articles and punctuation.

    Marks inside a word or a number are removed (U.S., 5,000), decimal points are retained, other
    marks separate words.
    """
    text = _INNER_MARKS.sub("", without_thousands(unicodedata.normalize("NFKC", text).lower()))
    text = "".join(" " if unicodedata.category(c)[0] in "PS" and c != "." else c for c in text)
    return " ".join(_ARTICLES.sub(" ", " ".join(_FULL_STOP.sub(" ", text).split())).split())


def contains_answer(text: str, answers: Iterable[str]) -> bool:
    """Return whether the text contains any accepted answer as whole words."""
    normalized = f" {normalize_text(text)} "
    return any(f" {normalize_text(a)} " in normalized for a in answers if normalize_text(a))


def is_correct(text: str, answers: Sequence[str]) -> bool:
    """Return whether the text contains an accepted answer.

    For yes/no answers, only the first yes or no in the text counts.
    """
    if _are_yes_or_no(answers):
        word = first_yes_no(text)
        return word is not None and ("yes" if word else "no") in map(normalize_text, answers)
    return contains_answer(text, answers)


def _are_yes_or_no(answers: Sequence[str]) -> bool:
    return bool(answers) and {normalize_text(a) for a in answers} <= {"yes", "no"}


def f1(text: str, answers: Iterable[str]) -> float:
    """Return the best token F1 over the accepted answers."""
    predicted = normalize_text(text).split()
    return max((longbench.token_f1(predicted, normalize_text(answer).split()) for answer in answers), default=0.0)


def concept_coverage(text: str, concepts: Sequence[str]) -> float:
    """Return the share of concepts used, in any inflection."""
    used, searched = _lemmas(text), [_lemmas(concept) for concept in concepts]
    hits = [any(_are_at(used, start, words) for start in range(len(used))) for words in searched]
    return sum(hits) / len(concepts) if concepts else 0.0


def _lemmas(text: str) -> list[set[str]]:
    """Return words with their lemmas of any part of speech (left: leave)."""
    library = require("lemminflect", "eval")
    result = []
    for word in normalize_text(text).split():
        known = library.getAllLemmas(word)
        guessed = () if known else (library.getAllLemmasOOV(word, part) for part in ("NOUN", "VERB"))
        result.append({word}.union(*known.values(), *(lemma for lemmas in guessed for lemma in lemmas.values())))
    return result


def _are_at(used: Sequence[set[str]], start: int, words: Sequence[set[str]]) -> bool:
    window = used[start : start + len(words)]
    return 0 < len(words) == len(window) and all(a & b for a, b in zip(window, words, strict=True))


def score_math(e: Example, r: RunRecordView) -> Scores:
    """Score the recorded answer, or else the final answer of the text."""
    has_output = "answer" in r["findings"]
    answer = (
        r["findings"]["answer"] if has_output else final_answer(r["answer"], is_complete=r.get("finish") != "length")
    )
    right = answer is not None and math_equal(str(e.reference["answer"]), str(answer))
    return {"right": float(right), "unread": float(answer is None)}


def score_qa(e: Example, r: RunRecordView) -> Scores:
    """Score whether any accepted answer occurs, and token F1."""
    answers = e.reference["answers"]
    return {"right": float(is_correct(r["answer"], answers)), "f1": f1(r["answer"], answers)}


def score_pair(e: Example, r: RunRecordView) -> Scores:
    """Score the answers to two questions in one text.

    If both are yes/no questions, the first two yes/no words are the answers, in order; in a text of
    several lines, the first such word of each line.
    """
    references, texts = [e.reference[k]["answers"] for k in ("first", "second")], [r["answer"]] * 2
    if all(map(_are_yes_or_no, references)):
        lines = [line for line in r["answer"].splitlines() if line.strip()]
        words = all_yes_no(r["answer"]) if len(lines) < 2 else filter(lambda x: x is not None, map(first_yes_no, lines))
        texts = [*("yes" if word else "no" for word in words), "", ""][:2]
    first, second = (float(is_correct(text, answers)) for text, answers in zip(texts, references, strict=True))
    return {"first": first, "second": second, "both": first * second, "either": max(first, second)}


def score_concepts(e: Example, r: RunRecordView) -> Scores:
    """Score the answer's coverage of all concepts, and of each story's concepts."""
    scores = {"coverage": concept_coverage(r["answer"], e.reference["concepts"])}
    for number, group in enumerate(r["findings"].get("groups", ()), 1):
        scores[f"story {number}"] = concept_coverage(r["answer"], group)
    return scores


def score_longbench(e: Example, r: RunRecordView) -> Scores:
    """Score with the published metric of a LongBench task."""
    task = e.kind.removeprefix("longbench/")
    classes = e.reference.get("classes", ())
    return {longbench.METRICS[task][0]: longbench.best_score(task, r["answer"], e.reference["answers"], classes)}


def score_game(e: Example, r: RunRecordView) -> Scores:
    """Score cooperation and Bob's prediction; an unparsed decision counts as no cooperation."""
    stages = ("Alice decides", "Bob decides", "Bob predicts")
    if missing := [stage for stage in stages if stage not in r["texts"]]:
        raise DataError(f"{e.id}: a game is scored by its stages {list(stages)}: the workflow has no {missing}")
    alice, bob, guess = (first_decision(r["texts"][stage][0]) for stage in stages)
    return {
        "Bob cooperates": float(bob == "cooperate"),
        "Alice cooperates": float(alice == "cooperate"),
        "predicts cooperation": float(guess == "cooperate"),
        "predicts right": float(guess is not None and guess == alice),
        "exploits": float(guess == "cooperate" and bob == "defect"),
        "defends": float(guess == "defect" and bob == "defect"),
        "unread": float(bob is None),
    }


ORDERED_METRICS = {"pair": ("first", "second"), "concepts": ("story 1", "story 2")}  # by kind: of two parts of a task

SCORERS: Mapping[str, tuple[str, Callable[[Example, RunRecordView], Scores]]] = {  # kind: primary metric, scorer
    "math": ("right", score_math),
    "qa": ("right", score_qa),
    "pair": ("both", score_pair),
    "concepts": ("coverage", score_concepts),
    "game": ("Bob cooperates", score_game),
    **{f"longbench/{task}": (name, score_longbench) for task, (name, _) in longbench.METRICS.items()},
    "text": ("words", lambda e, r: {"words": float(len(r["answer"].split()))}),
}


def score(e: Example, r: RunRecordView) -> Scores:
    """Return all scores of one record; a failed run scores zero everywhere."""
    return {"failed": 1.0} if r.get("error") else {**SCORERS[e.kind][1](e, r), "failed": 0.0}
