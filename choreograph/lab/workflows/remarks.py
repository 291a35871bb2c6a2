"""Removal of what follows an answer: doubts, explanations, markup.

A value is read up to the first separator after which something else than a value follows.
"""

import re

from .answers import plain, without_hedge

MAX_CHARS = 4000  # of an answer with its remarks; the rest is not read

_SPEAKER = r"(?:I|we|you|it|this|that|he|she|they|there|these|those|one)(?:['’](?:s|m|d|ll|re|ve))?"

_LEAD = re.compile(  # before an answer
    r"(?:(?:I|we)(?:['’]\w+)?\s+(?:(?:am|are|would|will|strongly|really)\s+)*(?:think|believe|guess|suppose|say|sure|assume|reckon|feel"
    r"|conclude|find|found|get|got|hope)|probably|likely|perhaps|maybe|possibly|presumably|certainly|surely|definitely"
    r"|obviously|of course|hopefully|in my (?:opinion|view)|number|no\.|that(?=\s+(?:it|this|is)\b))\b"
    r"[\s,:]*(?:(?:that|it|it['’]?s|is)\b[\s,:]*)*|#\s*(?=\d)",
    re.IGNORECASE,
)

_ASIDE = re.compile(  # after an answer of any kind
    rf"(?:and\s+|but\s+|or\s+)?(?:{_SPEAKER}\s+\w+|I['’]\w+|because|since|which|whereas|although|though|however|unless|as\b|if\b"
    r"|so\b|not\b|but\b|right|correct|exactly|hopefully|probably|perhaps|maybe|likely|possibly|presumably|obviously|clearly"
    r"|certainly|surely|definitely|indeed|naturally|therefore|thus|hence|finally|assuming|given that|of course|after all"
    r"|in my (?:opinion|view)|in other words|in short|for sure|no doubt|without (?:a )?doubt|to be \w+|at least|at most|that is"
    r"|i\.e|e\.g|namely|meaning|or so)\b",
    re.IGNORECASE,
)

_CLAUSE = re.compile(  # after a number, without a separator
    rf"\s+(?:(?:and|but)\s+)?(?:{_SPEAKER}\s+(?:is|was|am|are|do|did|has|have|had|will|would|can|could|should|must|might|may|think|believe"
    r"|guess|suppose|hope|assume|reckon|say|said|know|checked|found|got|get|feel)|(?:I|it|that)['’]\w+|in my (?:opinion|view)"
    r"|for sure|of course|or so|to be (?:exact|precise|sure|sent)|no doubt|hopefully|probably|presumably)\b.*$",
    re.DOTALL,
)

_SEPARATOR = re.compile(
    r"[,;:](?=\s)|\s+[-–]+(?=\s)|\s*—+\s*|\s+(?:=>|->|→|\||//|#)(?=\s)|\s*(?:\.{3,}|…)\s*(?=[A-Za-z])|(?<=\d)[!?.](?=\s+[a-z]{2})"
)

_VALUE = re.compile(  # start of a further item of a list
    r"(?:(?:and|or)\s+)?(?:[-+±−]?\s*(?:\\?[$€£¥])?\s*\.?\d|\$(?=[^\s$])|\\(?!text|mbox)[a-zA-Z]|[(\[{](?![A-Za-z]{2})|[-+−]?\d*[b-zB-HJ-Z](?![A-Za-z'’])"
    r"|[aAI]\s*[=<>≤≥^])"
)

_RATIO_TERM = re.compile(r"\d[\d.,/]*(?!\w)(?!\s*[-+*/=×^])")

_TAG = re.compile(r"</?(?:answer|final_answer|b|i|em|strong|p|br|span|div|li|code|u|sub|sup)\s*/?>", re.IGNORECASE)

_CLOCK = re.compile(r"(?:\\text\{\s*|\s|-|~|(?<=\d)){1,3}o(?:\s*['’`´]\s*|\s)?clock\b\}?", re.IGNORECASE)

_MARKS = re.compile(r"(?:[\s\U0001F000-\U0001FAFF\u2600-\u27BF\uFE0F]|[:;]-?[)D(](?=\s|$)|\\\\$|(?<=\s)[/|<>~]+$)+$")

_WRAPPED = re.compile(r"[(\[]\s*([^()\[\],;]*\d[^()\[\],;]*)[)\]]")

_NOTE = re.compile(r"(?<=[\w}%$])\s+\[[A-Za-z][^\[\]]*\]")

_SPELLED = re.compile(r"([A-Za-z][A-Za-z -]*)\s+\(-?\d[\d.,/]*\)")

_VERDICT = re.compile(r"(?:yes|no|true|false|none|neither|both|never|always|impossible|undefined)$", re.IGNORECASE)

_EQUATION = re.compile(r"([-−]?(?:\\?\$)?\d[\d,]*(?:\.\d+)?)\s*=\s*[-−+*/×÷().\d\s$,]*[-−+*/×÷(][-−+*/×÷().\d\s$,]*")


def without_lead(value: str) -> str:
    """Remove what precedes an answer, such as "I think"."""
    while True:
        rest = re.sub(r"^(?:[\s,:]|\.{2,}|…)+", "", value)
        lead = _LEAD.match(rest)
        rest = without_hedge(rest[lead.end() :] if lead else rest)
        if rest in (value, ""):
            return value
        value = rest


def without_explanation(value: str) -> str:
    """Return an answer without the explanation that follows it.

    Commas between numbers make a list ("7, 8"), and a colon between numbers a ratio ("3 : 2").
    """
    value = " ".join(_TAG.sub(" ", value[:MAX_CHARS]).split())
    value = _NOTE.sub("", re.sub(r"(?<![\w)])\*\*|\*\*(?![\w(])", "", value))
    if (spelled := _SPELLED.fullmatch(value)) and _is_number(plain(spelled[1])):  # seven (7)
        value = spelled[1]
    for separator in _SEPARATOR.finditer(value):
        head, tail = value[: separator.start()].strip(' *_`"“”'), value[separator.end() :].lstrip(' *_`"“”')
        if head and tail and _is_outside(head) and not _continues(head, separator[0].strip(), tail):
            is_periodic = separator[0].lstrip().startswith((".", "…")) and re.search(r"\.\d+$", head)
            value = f"{head}..." if is_periodic else head
            break
    if _is_number(value):
        value = _CLAUSE.sub("", value)
    else:
        value = re.sub(r"\s+(?:and\s+)?I\s+(?:think|believe|guess|suppose|am|would|hope)\b.*$", "", value)
    if (equation := _EQUATION.fullmatch(value)) and equation[0].count("=") == 1:
        value = equation[1]
    return unwrapped(value)


def without_aside(value: str) -> str:
    """Return the content of a box without "I think" and the like."""
    for separator in re.finditer(r"[,;:]\s+", value[:MAX_CHARS]):
        if _is_outside(value[: separator.start()]) and _ASIDE.match(value, separator.end()):
            value = value[: separator.start()]
            break
    return unwrapped(value)


def unwrapped(value: str) -> str:
    """Remove markup, unbalanced brackets and "o'clock" around a value."""
    value = _CLOCK.sub("", _MARKS.sub("", " ".join(value.split()))).strip("*_ ")
    if value.endswith(".") and not value.endswith(".."):
        value = value[:-1].rstrip("*_ ")
    for opening, closing in ("()", "[]"):
        if opening not in value and closing not in value:
            continue
        # of an interval such as [0, 1) both are there
        if value.endswith(closing) and not set("([{") & set(value):
            value = value[:-1].rstrip()
        elif value.startswith(opening) and not set(")]}") & set(value):
            value = value[1:].lstrip()
    return match[1].strip() if (match := _WRAPPED.fullmatch(value)) else value


def _is_outside(head: str) -> bool:
    """Return whether all brackets are closed."""
    return sum((c in "([{") - (c in ")]}") for c in head) <= 0


def _is_number(text: str) -> bool:
    return bool(re.search(r"[\d}π∞]|\\[a-z]", text))


def _continues(head: str, separator: str, tail: str) -> bool:
    """Return whether what follows a separator belongs to the value."""
    item = _SEPARATOR.split(tail, maxsplit=1)[0]
    if separator in (",", ";"):
        if _ASIDE.match(item):
            return False
        return bool(_VALUE.match(item)) or not _is_number(head)
    if separator == ":":
        if _is_number(head):
            return bool(re.search(r"\d$", head) and _RATIO_TERM.match(tail))
        return (
            not _VERDICT.match(head) and not re.search(r"\d", plain(head)) and bool(re.search(r"\d", tail))
        )  # a label; else an explanation
    if separator[:1] in "-–—":
        is_text = not _is_number(head) and separator not in "–—" and not _ASIDE.match(item)
        return is_text or bool(_VALUE.match(item))
    return not _is_number(head)
