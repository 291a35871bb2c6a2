"""English LongBench tasks with the official script's metrics (Bai et al. 2024).

The prompts are not those of the paper, so scores compare conditions here, not with published tables.
"""

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from ...utils import require

_QUESTION = "{context}\n\nAnswer the question from the text above. Give only the answer, in a few words."
_EXAMPLES = "Continue after the examples with the answer to the last one only.\n\n{context}\n\n{input}"

PROMPTS = {
    **dict.fromkeys(
        ("narrativeqa", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"), f"{_QUESTION}\n\nQuestion: {{input}}"
    ),
    "qasper": f"{_QUESTION} Say yes or no where that is asked, and unanswerable if the text does not tell.\n\n"
    "Question: {input}",
    "gov_report": "{context}\n\nWrite a summary of this report, of one page.",
    "multi_news": "{context}\n\nWrite a summary of all of this news, of one page.",
    "qmsum": "{context}\n\nAnswer the query about this meeting in a few sentences.\n\nQuery: {input}",
    **dict.fromkeys(("trec", "triviaqa", "samsum"), _EXAMPLES),
    "passage_count": "{context}\n\nSome of these paragraphs are repeated. How many different ones are there? Give only the "
    "number.",
    "passage_retrieval_en": "{context}\n\nWhich paragraph does this abstract summarize?\n\n{input}\n\nGive only its number, "
    'like "Paragraph 1".',
    "lcc": "{context}\n\nWrite the next line of this code, and nothing else.",
    "repobench-p": "{context}{input}\n\nWrite the next line of this code, and nothing else.",
}

_FIRST_LINE_TASKS = ("trec", "triviaqa", "samsum")


def f1(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return the token F1, ignoring case, ASCII punctuation and articles."""
    predicted, expected = (
        re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(str.maketrans("", "", string.punctuation))).split()
        for text in (prediction, answer)
    )
    return token_f1(predicted, expected)


def token_f1(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Return the F1 of two lists of tokens, in any order."""
    shared = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * shared / (len(predicted) + len(expected)) if shared else 0.0


def rouge_l(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return the Rouge-L F1 of the `rouge` library, 0 on its errors."""
    scorer = require("rouge", "eval").Rouge(metrics=["rouge-l"])
    try:
        return scorer.get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError):
        return 0.0


def count(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return the share of predicted numbers that equal the answer."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return the share of predicted numbers that are the paragraph's."""
    paragraph = re.search(r"Paragraph (\d+)", answer)
    return count(prediction, paragraph[1]) if paragraph else 0.0


def classification(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return 1/n for n predicted classes that include the answer, else 0."""
    named = [name for name in classes if name in prediction]
    for name in named:  # the script skips the class after each one that it removes; so does this loop
        if name in answer and name != answer:
            named.remove(name)
    return 1 / len(named) if answer in named else 0.0


def edit_similarity(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return the similarity of the first code line, rounded to hundredths."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == answer:
        return 1.0
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


METRICS: dict[str, tuple[str, Callable[[str, str, Sequence[str]], float]]] = {  # task: name, metric
    **dict.fromkeys(
        ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), ("F1", f1)
    ),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), ("Rouge-L", rouge_l)),
    "trec": ("accuracy", classification),
    "passage_count": ("count", count),
    "passage_retrieval_en": ("retrieval", retrieval),
    **dict.fromkeys(("lcc", "repobench-p"), ("edit similarity", edit_similarity)),
}


def best_score(task: str, prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Return the task's metric for the best-matching accepted answer."""
    if task in _FIRST_LINE_TASKS:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return max((METRICS[task][1](prediction, answer, classes) for answer in answers), default=0.0)
