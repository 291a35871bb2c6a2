"""Parsers of generated text: final answers, votes, decisions, lists.

They return None if nothing matches.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from .answers import expand_magnitudes, normalize_answer
from .remarks import without_aside, without_explanation, without_lead

_BOX = re.compile(r"\\boxed\s*\{")

_STATED_ANSWER = re.compile(
    r"(?:answer|result|(?:correct|right|best) (?:option|choice))\b[^\n]{0,40}?"
    r"(?:\b(?:is|equals)\b|\b(?:would|should|must|will) be\b|\bcomes (?:out )?to\b|:|=)\s*:?\s*\**\s*(?=(?P<value>[^\n]*))",
    re.IGNORECASE,
)

_COMMENT = re.compile(r"(?:correct|right|wrong|clear|reasonable|obvious|plausible)\b", re.IGNORECASE)  # on an answer

_FORMULA = re.compile(  # dollar signs by pandoc's rules: amounts of money in "$2 = $18"
    r"\$(?=[^\s$])([^$\n]*?(?<=\S))\$(?!\d)|\$\s([^$\n]+)\s\$(?!\s*\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]"
)

_REMARKS = [  # after an answer
    (re.compile(pattern, re.DOTALL), replacement)
    for pattern, replacement in (
        (
            r"(?<![ap]\.m)(?<!\b[DMJS]r)(?<!\bMs)(?<!\bMrs)(?<!\bSt)(?<!\bNo)(?<!\.\.)[.!?]\s+(?=[A-Z*(\\$]).*$",
            "",
        ),  # another sentence
        (r"(?<=[\w}%$])\s+\([A-Za-z≈=][^()]+\)", ""),  # 4 (four)
        (r"(?<=\S)(?:,|;|\s+[-–—]+)?\s+(?:because|since|which|whereas|given that|due to)\b.*$", ""),
        (
            r"^([^(\[{]*?[\d}$][^(\[{]*?),?(?:\s+and)?\s+(?:as|so|if|when|where|while|but|not|after|for|in all|in (?=\d)|in total"
            r"|altogether|overall|rounded|to the nearest|therefore|thus|hence|once)\b.*$",
            r"\1",
        ),
        (r"(?<=[\d}$%])\s+[-–—]+\s+(?=[A-Za-z]{2}).*$", ""),
        (r"^([^(\[{]*?\d[^(\[{]*?)[,;]\s+(?!(?:or|and)\b)[A-Za-z]{2,}.*$", r"\1"),  # 18 dollars, it is
        (r"^(?:[-+*/×÷().$\d\s^{}]|\\times|\\cdot|\\frac)*[\d})]\s*=\s*(?=\$?-?[\d\\])", ""),  # 3 + 4 = 7
    )
]

_OPTION = re.compile(
    r"(?:\\(?:text|math)[a-z]*\{\s*)?\(([A-Ja-j])\)|(?:(?i:option|choice)\s+\(?)?([A-J])"
    r"(?=[).:,;*]|$|\s+(?:[-–—(]|because\b|since\b|as\b|which\b|(?:and\s+|but\s+)?not\b|(?:and\s+)?(?:I|it|this|that)\s+[a-z]))|(?i:option|choice)\s+([A-J])\b"
)

_LAST_OPTION = re.compile(r"(?:^|\s)\(([A-J])\)\W*$")

_UNDECIDED = re.compile(
    r"(?:cooperat|defect)\w*(?:\s+or\s+(?:to\s+)?(?:cooperat|defect|not\b)|(?:\s+and\s+|\s*/\s*)(?:cooperat|defect))"
    r"|\bnor\s+(?:to\s+)?(?:cooperat|defect)",
    re.IGNORECASE,
)

_CONDITION = re.compile(  # up to the clause that follows, or the end of the sentence
    r"\b(?:if|when(?:ever)?|unless|because|since|whether|as long as|although|even though|though|while|given that|assuming)\s+\w+.*?"
    r"(?=[,;:]|\bthen\b|\bso\b|\bI\b|$)",
    re.IGNORECASE | re.DOTALL,
)

_DECISION = re.compile(
    r"(?P<no>(?:\b(?:not|never|cannot|refuse|avoid|against|instead\s+of|no\s+longer|unwise|foolish|a\s+mistake|no\s+reason)"
    r"|n['’]t)\s+(?:\w+\s+){0,2})?\b(?P<verb>co-?operat|defect)",
    re.IGNORECASE,
)

_OWN_DECISION = re.compile(  # I will not defect; therefore defect
    r"(?:\bI(?:['’](?:ll|m|d))?|\b(?:so|therefore|thus|hence)\b,?(?:\s+\w+)?)\s+(?:(?:I(?:['’](?:ll|m|d))?|will|would|shall|must|should|have|am|going|"
    r"choose|chose|decide|decided|prefer|want|plan|intend|to|always|still|therefore|also|just|do|can|could|better|simply)\s+)*"
    r"(?:(?:not|never|cannot|against|no longer|won['’]t|don['’]t|can['’]t|refuse|to|wouldn['’]t)\s+)*(?:co-?operat|defect)(?:e|ing)?\b",
    re.IGNORECASE,
)

_PREFERENCE = re.compile(
    r"\b(?:co-?operat|defect)(?:e|ing|ion)\s+(?:is|seems|would be)\s+(?:the\s+)?(?:better|best|safer|safest|wiser)\b",
    re.IGNORECASE,
)

_NUMBER = re.compile(
    r"\d{1,2}(?::\d{2})?\s*[ap]\.?m\b\.?|\d+(?::\d+)+|-?\$?\d+ \d+/\d+|-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?"
    r"(?:\s*(?:hundred|thousand|million|billion|trillion)\b)?"
)

_PUNCTUATION = " \t\n,;:!*`\"'“”‘’«»"

_PERIODIC = re.compile(r"\.\d+\.{3}$")  # 0.333...

_GROUP = r"(?:group|set|list|team|part|category|story)"

_SECOND_GROUP, _THIRD_GROUP = (
    re.compile(
        rf"\b{_GROUP}\s*(?:number\s*|no\.?\s*|#\s*)?(?:{numbers})\b"
        rf"|\b(?:the\s+)?(?:{ordinals})(?:\s+(?:{_GROUP}|one)\b|[*_]*\s*:)",
        re.IGNORECASE,
    )
    for numbers, ordinals in (("2|two|b|ii", "second|2nd|other"), ("3|three|c|iii", "third|3rd"))
)

_SECOND_ITEM = re.compile(  # 2. or B: in a list of two
    r"^\W*(?:2|B|II)\s*[*_]*\s*[.):\-](?!\d)(?![\s\S]*^\W*(?:3|C|III)\s*[*_]*\s*[.):\-])"
    r"|(?<=[,;.|\s])\(?(?:2|B)[):](?!\d)(?![\s\S]*\b(?:3|C)[):])",
    re.IGNORECASE | re.MULTILINE,
)


def boxed(text: str) -> str | None:
    r"""Return the last complete \boxed{...} content, which may contain balanced braces."""
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
    """Extract the final answer of a solution.

    Tries the boxed answer, then the text after "the answer is", then the last expression or number.

    Args:
        is_complete: False for a truncated text, whose last expression is an intermediate step.
    """
    text = re.sub(r"(\\\[|\$\$)\s*([^$]*?)\s*(\\\]|\$\$)", r"\1\2\3", text)  # one line for formulas of several lines
    in_box = boxed(text)
    result = (
        (in_box and without_aside(in_box)) or _stated_answer(text) or (_last_expression(text) if is_complete else None)
    )
    return result if result and re.search(r"[^\W_]", result) else None  # a letter or a digit


def _stated_answer(text: str) -> str | None:
    values = map(_without_remarks, reversed([match["value"] for match in _STATED_ANSWER.finditer(text)]))
    return next((value for value in values if value and not _COMMENT.match(value)), None)


def _without_remarks(value: str) -> str:
    """Strip hedges, reasons and other remarks from a stated answer."""
    value = value.strip(_PUNCTUATION)
    if _FORMULA.match(value):
        value = _FORMULA.sub(lambda formula: next(filter(None, formula.groups())).strip(), value)
    value = value.split(r"\boxed{")[-1].removeprefix(r"\(").removeprefix(r"\[").strip()
    value = without_lead(value)
    if option := _OPTION.match(value):
        return next(filter(None, option.groups()))
    value = without_explanation(_REMARKS[1][0].sub("", _REMARKS[0][0].sub("", value)))
    for pattern, replacement in _REMARKS[2:]:
        value = pattern.sub(replacement, value)
    value = expand_magnitudes(value.strip("$? ")).strip(_PUNCTUATION)
    return value if _PERIODIC.search(value) else value.rstrip(".").strip(_PUNCTUATION)


def _last_expression(text: str) -> str | None:
    """Return the last line's final formula or option, else the last number."""
    last = (text.strip().splitlines() or [""])[-1]
    formulas = [next(filter(None, groups)).strip().rstrip(".,;") for groups in _FORMULA.findall(last)]
    if formulas:
        return formulas[-1]
    if option := _LAST_OPTION.search(last):
        return option[1]
    numbers = _NUMBER.findall(text)
    return expand_magnitudes(re.sub(r"[$,]|\.$", "", numbers[-1])) if numbers else None


def majority(answers: Iterable[str | None]) -> str | None:
    """Return the most frequent normalized answer; ties go to the earliest."""
    counted = Counter(normalize_answer(a) for a in answers if a is not None)
    return max(counted, key=lambda a: counted[a], default=None)


def first_choice(text: str, max_number: int) -> int | None:
    """Return the first number from 1 to `max_number`."""
    return next((n for n in map(int, re.findall(r"\d{1,9}", text)) if 1 <= n <= max_number), None)


def first_decision(text: str) -> str | None:
    """Return the decision in a text, "cooperate" or "defect".

    A negated verb counts as the other decision; "to cooperate or to defect" returns None. Conditional
    clauses and reasons are ignored. Decisions after "I" or "so" take precedence.
    """
    sentences = [(sentence, _CONDITION.sub(" ", sentence)) for sentence in re.split(r"(?<=[.!?])\s+|\n", text)]
    decided = [(sentence, clauses) for sentence, clauses in sentences if not _UNDECIDED.search(clauses)]
    unconditional = [
        match for sentence, clauses in decided if sentence == clauses and (match := _own_decision(clauses))
    ]
    others = (_own_decision(clauses) or _DECISION.search(clauses) for _, clauses in decided)
    result = next(filter(None, [*unconditional, *others]), None)
    if result is None:
        return None
    return "cooperate" if (result["verb"].lower() != "defect") != bool(result["no"]) else "defect"


def _own_decision(clauses: str) -> re.Match[str] | None:
    own = [match[0] for pattern in (_PREFERENCE, _OWN_DECISION) for match in pattern.finditer(clauses)]
    return _DECISION.search(own[-1]) if own else None


def first_yes_no(text: str) -> bool | None:
    """Return True if the first of these words is "yes"."""
    return next(iter(all_yes_no(text)), None)


def all_yes_no(text: str) -> list[bool]:
    """Return True for every "yes" and False for every "no", in order."""
    return [word.lower() == "yes" for word in re.findall(r"\b(?:yes|no)\b", text, re.IGNORECASE)]


def parse_groups(text: str, items: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Assign each item to the first of two groups that names it.

    The text is the continuation of "Group 1:". The second group begins at a heading (Group 2, B:,
    2.) and ends before a third one, or the groups are two paragraphs, lines, parts of a line or columns.

    Returns None unless every item is named and no group is empty.
    """
    divisions = (_divide(parts, items) for parts in _possible_groups(text))
    return next(filter(None, divisions), None)


def _possible_groups(text: str) -> Iterator[Sequence[str]]:
    for mark in _SECOND_GROUP.finditer(text):
        third = _THIRD_GROUP.search(text, mark.end())
        yield text[: mark.start()], text[mark.end() : third.start() if third else None]
    yield re.split(r"\n\s*\n", text)
    for mark in _SECOND_ITEM.finditer(text):
        yield text[: mark.start()], text[mark.end() :]
    rows = (line.strip().strip("|").split("|") for line in text.splitlines() if "|" in line)
    yield ["\n".join(column) for column in zip(*rows, strict=False)]
    yield text.splitlines()
    yield re.split(r"[;|]|\]\s*,\s*\[|\}\s*,\s*\{|\)\s*,\s*\(", text)


def _divide(parts: Sequence[str], items: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Return the items named by each part, if exactly two name any."""
    named: list[list[str]] = []
    missing = set(items)
    for part in parts:
        names = []
        for item in sorted(missing, key=len, reverse=True):  # "ice cream" before "ice"
            part, count = re.subn(rf"\b{re.escape(item)}(?:e?s|\w?(?:ing|ed))?\b", "\0", part, flags=re.IGNORECASE)
            if count:
                names.append(item)
        missing.difference_update(names)
        if names:
            named.append([item for item in items if item in names])
    return (named[0], named[1]) if len(named) == 2 and not missing else None
