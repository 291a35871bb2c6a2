"""Reads what models write: final answers, votes, decisions, lists. Pure; None where nothing can be read."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

_BOX = re.compile(r"\\boxed\s*\{")

_STATED_ANSWER = re.compile(
    r"(?:final answer|answer|result)\b[^\n]{0,40}?(?:\bis\b|:|=)\s*\**\s*(?P<value>[^\n]*)", re.IGNORECASE
)

_FORMULA = re.compile(  # dollars as pandoc reads them: in "$2 = $18" they are money
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
    r"""The content of the last complete \boxed{...}, braces inside it balanced."""
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
    """The answer that a solution ends with: boxed, or after "the answer is", or else the last expression or number of a
    text that is whole (of one that was cut off, that would be some step on the way)."""
    result = boxed(text) or _stated_answer(text) or (_last_expression(text) if is_complete else None)
    return result if result and re.search(r"\w", result) else None


def _stated_answer(text: str) -> str | None:
    said = [m["value"].strip(_PUNCTUATION) for m in _STATED_ANSWER.finditer(text)]
    if said and said[-1]:
        bare = _REMARK.sub(r"\1", said[-1]).split(r"\boxed{")[-1].strip("$ ")
        for begin, end in ((r"\(", r"\)"), (r"\[", r"\]")):
            bare = bare.removeprefix(begin).removesuffix(end)
        return bare.strip(_PUNCTUATION) or None
    return None


def _last_expression(text: str) -> str | None:
    """The last formula of the last line, or the last number of all."""
    last = (text.strip().splitlines() or [""])[-1]
    formulas = [next(filter(None, groups)).strip().rstrip(".,;") for groups in _FORMULA.findall(last)]
    if formulas:
        return formulas[-1]
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace("$", "").replace(",", "") if numbers else None


def majority(answers: Iterable[str | None]) -> str | None:
    """The answer that most gave, the earliest of equals; in the form that `plain` compares."""
    counted = Counter(normalize_answer(a) for a in answers if a is not None)
    return max(counted, key=lambda a: counted[a], default=None)


def normalize_answer(answer: str) -> str:
    """An answer without what does not change it, for comparing answers of one problem with each other."""
    bare = re.sub(r"\\(?:left|right|,|!|;)|\$", "", answer).replace("{,}", ",")
    bare = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", bare).strip(_PUNCTUATION)
    bare = re.sub(r"\s", "", without_unit(without_thousands(bare))).strip(_PUNCTUATION)
    bare = re.sub(r"\\[dt]frac", r"\\frac", re.sub(r"^[a-zA-Z]=", "", bare))
    return re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", bare).lower()


def without_unit(answer: str) -> str:
    """The number alone of "12 dollars"; what a word makes another number (12 million) stays as it is."""
    return _UNIT.sub(r"\g<number>", answer)


def without_thousands(text: str) -> str:
    """5000 for 5,000."""
    return _THOUSANDS.sub("", text)


def first_choice(text: str, max_number: int) -> int | None:
    """The first number in the text that is one of 1..most."""
    return next((n for n in map(int, re.findall(r"\d{1,9}", text)) if 1 <= n <= max_number), None)


def first_decision(text: str) -> str | None:
    """`cooperate` or `defect`, whichever the text names first in any inflection; "not to defect" is the other one, and
    "to cooperate or to defect" is none."""
    if _UNDECIDED.search(text):
        return None
    result = _DECISION.search(text)
    if result is None:
        return None
    cooperates = (result["verb"].lower() != "defect") != bool(result["no"])
    return "cooperate" if cooperates else "defect"


def first_yes_no(text: str) -> bool | None:
    """The first of these words."""
    return next(iter(all_yes_no(text)), None)


def all_yes_no(text: str) -> list[bool]:
    """Every yes, and every no, in order."""
    return [word.lower() == "yes" for word in re.findall(r"\b(?:yes|no)\b", text, re.IGNORECASE)]


def parse_groups(text: str, items: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Two groups of the items from "Group 1: ... Group 2: ...": each item where it is named first, all of them
    somewhere, no group empty; None otherwise."""
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
