"""Parsers of generated text: final answers, votes, decisions, lists. They return None if nothing matches."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

_BOX = re.compile(r"\\boxed\s*\{")

_STATED_ANSWER = re.compile(
    r"(?:final answer|answer|result)\b[^\n]{0,40}?(?:\bis\b|:|=)\s*\**\s*(?P<value>[^\n]*)", re.IGNORECASE
)

_FORMULA = re.compile(  # dollar signs by pandoc's rules: amounts of money in "$2 = $18"
    r"\$(?=[^\s$])([^$\n]*?(?<=\S))\$(?!\d)|\$\s([^$\n]+)\s\$(?!\s*\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]"
)

_REMARK = re.compile(r"^([^(\[{]*?\d[^(\[{]*?)[,;]\s+(?!(?:or|and)\b)[A-Za-z]{2,}.*$")  # 18 dollars, since 9 * 2 = 18

_UNDECIDED = re.compile(
    r"(?:cooperat|defect)\w*(?:\s+or\s+(?:to\s+)?(?:cooperat|defect|not\b)|(?:\s+and\s+|\s*/\s*)(?:cooperat|defect))",
    re.IGNORECASE,
)

_DECISION = re.compile(
    r"(?P<no>(?:\b(?:not|never|cannot|refuse|avoid|instead\s+of)|n['’]t)\s+(?:\w+\s+){0,2})?\b(?P<verb>co-?operat|defect)",
    re.IGNORECASE,
)

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?")

_PUNCTUATION = " \t\n.,;:!*`\"'"

_UNIT = re.compile(  # 12 dollars; not 12 million, 3 and a half, 2 pi, 5 x
    r"^\$?(?P<number>-?[\d,]*\.?\d+(?:/\d+)?)\s+(?!(?:[a-ceiknpqrtx-z]|[x-z]{2,3}|[ap]m|and|or|pi|theta|alpha|half|"
    r"halves|(?:third|fourth|fifth|sixth|eighth|tenth|dozen|hundred|thousand|[mbtr]+illion)s?|squared|cubed|base)\b)"
    r"[A-Za-z ]+$",
    re.IGNORECASE,
)

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...}, which may contain balanced braces."""
    result = None
    for start in _BOX.finditer(text):
        depth = 1
        for at in range(start.end(), len(text)):
            depth += (text[at] == "{") - (text[at] == "}")
            if not depth:
                result = text[start.end() : at].strip()
                break
    return result or None


def final_answer(text: str, *, is_complete: bool = True) -> str | None:
    """Return the answer of a solution: boxed, after "the answer is", or its last expression or number.

    Args:
        is_complete: False for a truncated text, whose last expression is an intermediate step.
    """
    result = boxed(text) or _stated_answer(text) or (_last_expression(text) if is_complete else None)
    return result if result and re.search(r"\w", result) else None


def _stated_answer(text: str) -> str | None:
    values = [match["value"].strip(_PUNCTUATION) for match in _STATED_ANSWER.finditer(text)]
    if values and values[-1]:
        bare = _REMARK.sub(r"\1", values[-1]).split(r"\boxed{")[-1].strip("$ ")
        for begin, end in ((r"\(", r"\)"), (r"\[", r"\]")):
            bare = bare.removeprefix(begin).removesuffix(end)
        return bare.strip(_PUNCTUATION) or None
    return None


def _last_expression(text: str) -> str | None:
    """Return the last formula of the last line, or the last number of the text."""
    last = (text.strip().splitlines() or [""])[-1]
    formulas = [next(filter(None, groups)).strip().rstrip(".,;") for groups in _FORMULA.findall(last)]
    if formulas:
        return formulas[-1]
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace("$", "").replace(",", "") if numbers else None


def majority(answers: Iterable[str | None]) -> str | None:
    """Return the most frequent answer, normalized; the earliest of equally frequent ones."""
    counted = Counter(normalize_answer(a) for a in answers if a is not None)
    return max(counted, key=lambda a: counted[a], default=None)


def normalize_answer(answer: str) -> str:
    """Remove units, spaces and markup that do not matter when answers of one problem are compared."""
    bare = re.sub(r"\\(?:left|right|,|!|;)|\$", "", answer).replace("{,}", ",")
    bare = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", bare).strip(_PUNCTUATION)
    bare = re.sub(r"\s", "", without_unit(without_thousands(bare))).strip(_PUNCTUATION)
    bare = re.sub(r"\\[dt]frac", r"\\frac", re.sub(r"^[a-zA-Z]=", "", bare))
    return re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", bare).lower()


def without_unit(answer: str) -> str:
    """Return 12 for "12 dollars"; words that change the number (12 million) stay."""
    return _UNIT.sub(r"\g<number>", answer)


def without_thousands(text: str) -> str:
    """Return 5000 for 5,000."""
    return _THOUSANDS.sub("", text)


def first_choice(text: str, max_number: int) -> int | None:
    """Return the first number from 1 to `max_number`."""
    return next((n for n in map(int, re.findall(r"\d{1,9}", text)) if 1 <= n <= max_number), None)


def first_decision(text: str) -> str | None:
    """Return "cooperate" or "defect", the first in any inflection.

    A negated one is the other; "to cooperate or to defect" is None.
    """
    if _UNDECIDED.search(text):
        return None
    result = _DECISION.search(text)
    if result is None:
        return None
    cooperates = (result["verb"].lower() != "defect") != bool(result["no"])
    return "cooperate" if cooperates else "defect"


def first_yes_no(text: str) -> bool | None:
    """Return True if the first of these words is "yes"."""
    return next(iter(all_yes_no(text)), None)


def all_yes_no(text: str) -> list[bool]:
    """Return True for every "yes" and False for every "no", in order."""
    return [word.lower() == "yes" for word in re.findall(r"\b(?:yes|no)\b", text, re.IGNORECASE)]


def parse_groups(text: str, items: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Divide the items by "Group 1: ... Group 2: ...", each into the first group that names it.

    Returns None unless every item is named and no group is empty.
    """
    first, mark, second = text.partition("Group 2")
    if not mark:
        return None
    divided: tuple[list[str], list[str]] = ([], [])
    for item in items:
        name = re.compile(rf"\b{re.escape(item)}\b", re.IGNORECASE)
        if name.search(first):
            divided[0].append(item)
        elif name.search(second):
            divided[1].append(item)
    return divided if all(divided) and sum(map(len, divided)) == len(items) else None
