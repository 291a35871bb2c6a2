"""Normalization of math answers, and equality as a human would judge."""

import re
import threading
import unicodedata
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from ...utils import require

PARSE_TIMEOUT = COMPARE_TIMEOUT = 2  # seconds for one expression, for one comparison

_CHARACTERS = str.maketrans(
    {c: " " + unicodedata.normalize("NFKC", c).replace("⁄", "/") for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
    | {"−": "-", "–": "-", "÷": "/", "’": "'", "²": "^2", "³": "^3", "√": "sqrt ", "°": r"^\circ "}
    | {"×": r"\times ", "·": r"\cdot ", "≈": r"\approx ", "π": r"\pi ", "θ": r"\theta ", "∞": r"\infty "}
    | {"∅": r"\emptyset ", "±": r"\pm ", "∪": r"\cup ", "≤": r"\le ", "≥": r"\ge "}
)

_SMALL_NUMBERS = {
    word: number
    for words, step in (
        ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen", 1),
        ("zero ten twenty thirty forty fifty sixty seventy eighty ninety", 10),
    )
    for number, word in zip(range(0, 100, step), words.split(), strict=False)
} | {"seventeen": 17, "eighteen": 18, "nineteen": 19}
_MAGNITUDES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SHORT_MAGNITUDES = {"k": "thousand", "m": "million", "mn": "million", "b": "billion", "bn": "billion"}
_PARTS = {
    "half": 2,
    "halve": 2,
    "third": 3,
    "quarter": 4,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "eighth": 8,
    "tenth": 10,
}
_CURRENCIES = {"$": "dollars", "€": "euros", "£": "pounds sterling", "¥": "yen"}

_SMALL, _LARGE = "|".join(sorted(_SMALL_NUMBERS, key=len, reverse=True)), "|".join(_MAGNITUDES)
_NUMBER_WORDS = re.compile(
    rf"(?<![\w\\])(?:(?:{_SMALL})|an?(?=[ ](?:{_LARGE})))(?:(?:[ -]+|(?<=d)[ ]and[ ])(?:{_SMALL}|{_LARGE}))*(?![\w'])",
    re.I,
)
_MAGNITUDE = re.compile(
    rf"(?<![\w.])(?P<value>\d+(?:\.\d+)?|\\frac\{{(?P<over>\d+)\}}\{{(?P<under>\d+)\}})\s*(?P<word>{_LARGE})s?\b", re.I
)
_PART = re.compile(
    rf"(?<![\w\\.])(\d+|an?)[ -]({'|'.join(_PARTS)})s?\b(?:\s+(?:of\s+)?an?\b)?|^(half)\b(?:\s+an?\b)?", re.I
)
_MIXED = re.compile(
    r"(?<![\w.^/}])(\d+)(?:\s+(?:and\s+)?(\d+)\s*/\s*(\d+)(?![\d/])|\s*(?:and\s+)?\\frac\{(\d+)\}\{(\d+)\})"
)
_DOTS = r"\s*(?:\.{3,}|\\[lc]?dots)"
_REPEATING = re.compile(
    r"(?<![\d.])(?P<whole>\d*)\.(?P<first>\d*?)(?:\\(?:overline|bar|dot)\s*\{?(?P<a>\d+)\}?|\((?P<b>\d+)\)"
    rf"|(?P<c>\d)(?P=c){{2,}}{_DOTS}|(?P<d>\d{{2,}}?)(?P=d)+{_DOTS}|(?P<e>\d)\s*\(?(?:repeating|recurring)\)?)"
)
_MONEY = re.compile(
    rf"^(-?)\s*(?:US)?\\?([$€£¥])\s*(-?[\d.,]*\d)(?![\d.,]*[\w^\\/]|\s*[-+*=])(\s*(?:{_LARGE}))?(.*)$"
    rf"|^(-?)\\?([$€£¥])\s*(-?[\d.,]*\d)\s*({'|'.join(_SHORT_MAGNITUDES)})\b(.*)$",
    re.IGNORECASE | re.DOTALL,
)

_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])|(?<=,)\s*\\!\s*|\\!", ""),
        (r"(?<=\d)(?:\{,\}|\\[,;: ]|~|')(?=\d{3}(?!\d))", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"(?<![\w.,])(?<!\d )(\d{1,3})((?: \d{3})+)(?![\w/]| \d)", lambda m: m[0].replace(" ", "")),
        (r"\\([%#&])", r"\1"),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\varnothing|\\\{\s*\\\}|^\{\s*\}$|^(?i:(?:the )?empty set)$", r"\\emptyset"),
        (r"\\leq?(?:slant)?(?![a-z])|<=", r"\\le "),
        (r"\\geq?(?:slant)?(?![a-z])|>=", r"\\ge "),
        (r"(?<![\\a-zA-Z])(?i:infinity|infty|inf)(?![a-zA-Z])|(?<=[-+ ,])oo\b", r"\\infty "),
        (r"(?<![\\a-zA-Z])(pi|theta|alpha|beta|sqrt|sin|cos|tan|ln|log)(?![a-zA-Z])", r"\\\1 "),
        (r"\\sqrt\s*\(([^()]*)\)|\\sqrt\s+(\d+)", lambda m: rf"\sqrt{{{m[1] or m[2]}}}"),
        (r"\^\{?\s*\\circ\s*\}?(?=\s*(?:,|and\b|or\b))", ""),
        (r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)\s*(?=$|[CF]\b|[cC]els|[fF]ahr)", " degrees "),
        (r"\bdeg(?:rees?)?\s+(?:C|[cC]elsius)\b", "celsius"),
        (r"\bdeg(?:rees?)?\s+(?:F|[fF]ahrenheit)\b", "fahrenheit"),
        (r"(?<=[)\]])\s*(?:U|or)\s*(?=[(\[])", r" \\cup "),
        (rf"(?i:\bhalf an? )(?=(?i:{_LARGE})\b)", "0.5 "),
        (r"\*\*", "^"),
        (r"\s*([_^])\s*", r"\1"),
        (r"\b[pP]er\s*cent\b|\bpct\b|\bpercentage points?\b", "%"),
        (r"(?<=\d)\s*x\s*10\^", r"\\times 10^"),
        (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]\+?(-?\d+)\b", r"\1\\times 10^{\2}"),
        (r"^(?i:negative|minus)\s+", "-"),
        (r"(?<=[\d}])\s+\([A-Za-z][A-Za-z -]+\)", ""),  # 4 (four)
    )
]

_TEXT_MACRO = re.compile(r"\\(?:text|mbox|math|operatorname)(?:rm|bf|it|sf|tt|normal|up)?\s*\{([^{}]*)\}")
_DELIMITED = re.compile(
    r"(?:\$\$?((?:\\\$|[^$])+)\$\$?|\\\((.+)\\\)|\\\[(.+)\\\]|\\f?box(?:ed)?\s*\{(.+)\}|\*\*(.+)\*\*)\.?", re.DOTALL
)
_HEDGE = re.compile(
    r"^(?:(?:approximately|about|roughly|around|nearly|almost|exactly|only|simply|just|approx|equal to|therefore|thus|hence|"
    r"indeed|still|actually|then|now|clearly)(?![\w-])[.,]?|[≈~]|\\approx(?![a-z]))\s*",
    re.IGNORECASE,
)

_OPTION = re.compile(
    r"(?:(?i:the\s+)?(?i:option|choice|answer)\s*\(?(?P<a>[A-J])\)?|\((?P<b>[A-Ja-j])\)|(?P<c>[A-J])[.):])"
    r"(?:[.:)]?\s+(?P<text>\S.*))?[.:)]?",
    re.DOTALL,
)
_TIME = re.compile(
    r"(?:at\s+)?(\d{1,2})(?:[:.](\d{2}))?\s*(?:([ap])\.?\s?m\b\.?|in the (morning|afternoon|evening))|(?:12 )?(noon|midnight)",
    re.IGNORECASE,
)
_HOUR = re.compile(r"(\d{1,2})(?::00)?")
_RATIO = re.compile(r"\s*[-\w.{}/\\]+(?:\s*:\s*[-\w.{}/\\]+)+\s*")
_FRACTION = re.compile(r"\\frac\{([^{}]+)\}\{([^{}]+)\}|([^/]+)/([^/]+)")
_WORD = re.compile(r"(?<![\w\\])[^\W\d_]{3,}(?!\w)")
_FUNCTION = re.compile(r"sin|cos|tan|cot|sec|csc|log|exp|sqrt|max|min|gcd|lcm|mod|det|xyz", re.IGNORECASE)

_UNITS = {  # name: dimension and size
    name: (dimension, Fraction(size))
    for dimension, units in {
        "length": {"mm millimeter millimetre": "1/1000", "cm centimeter centimetre": "1/100", "m meter metre": "1",
                   "km kilometer kilometre": "1000", "in inch inches inche": "127/5000", "ft foot feet": "381/1250",
                   "yd yard": "1143/1250", "mi mile": "201168/125"},
        "mass": {"mg milligram": "1/1000", "g gm gram": "1", "kg kilogram kilo": "1000", "tonne": "1000000",
                 "oz ounce": "45359237/1600000", "lb pound": "45359237/100000"},
        "time": {"ms millisecond": "1/1000", "s sec second": "1", "min minute": "60", "h hr hour": "3600",
                 "day": "86400", "week": "604800"},
        "calendar": {"month": "1", "yr year": "12", "decade": "120", "century": "1200"},
        "volume": {"ml milliliter millilitre": "1/1000", "l liter litre": "1"},
        "US volume": {"tsp teaspoon": "1", "tbsp tablespoon": "3", "cup": "48", "pint": "96", "quart": "192", "gallon": "768"},
        "dollar": {"cent": "1/100", "dollar usd buck": "1"},
        "euro": {"euro eur": "1"}, "yen": {"yen": "1"}, "celsius": {"celsius": "1"}, "fahrenheit": {"fahrenheit": "1"},
        "percent": {"%": "1"},
    }.items()
    for names, size in units.items()
    for name in names.split()
}  # fmt: skip
_SPEEDS = {"mph": "mile per hour", "kph": "km per hour", "kmh": "km per hour", "fps": "foot per second"}
_QUANTITY = re.compile(
    r"(?P<number>(?:[^A-Za-z\\%]|\\[A-Za-z]+)*(?:[\d)}\]]|\\pi))(?P<unit>\s*[A-Za-z%][-A-Za-z .,%/^{}\d']*)"
)
_NO_UNIT = re.compile(
    r"\s*(?:(?![NJWVKAF]\b)[a-zA-Z]|[x-z]{2,3}|or|and|mod|choose|plus|minus|times|to|base|squared|cubed)(?![A-Za-z])|[A-Za-z]{1,3}[\d^(]"
)
_COMPOUND = re.compile(r"(\d+(?:\.\d+)?|\\frac\{\d+\}\{0*[1-9]\d*\})\s*([A-Za-z]+)[.,]?\s*(?:and\s+)?")


class Quantity(NamedTuple):
    """An expression and its unit."""

    number: str
    dimensions: dict[str, int] | None = None  # exponents; None without a known unit
    size: Fraction = Fraction(1)  # of the unit


def plain(answer: str) -> str:
    """Return an answer without markup, with numbers in digits or `\\frac`."""
    text = unicodedata.normalize("NFKC", answer.translate(_CHARACTERS)).strip(" \t\n`\"'")
    if re.search(r"\d{1000}", text):  # no number that can be converted
        return text
    while (match := _DELIMITED.fullmatch(text)) and _is_balanced(inner := next(filter(None, match.groups()))):
        text = inner.strip()
    while (spread := _TEXT_MACRO.sub(r" \1 ", text)) != text:
        text = spread
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _money_in_words(without_hedge(text.strip())).replace("$", "")
    if text.strip()[:1] not in ("(", "[", "\\"):
        text = without_thousands(text)
    text = _REPEATING.sub(_repeating_fraction, text).strip(" \t\n*").rstrip(".,;: ")
    text = _PART.sub(_part_of_one, _NUMBER_WORDS.sub(_number_of_words, text))
    text = _MIXED.sub(_improper_fraction, text)
    while (expanded := _MAGNITUDE.sub(_expanded_magnitude, text)) != text:
        text = expanded
    return " ".join(text.split())


def without_hedge(text: str) -> str:
    """Remove leading hedges: return 3.14 for "approximately 3.14"."""
    return _HEDGE.sub("", _HEDGE.sub("", text))


def expand_magnitudes(text: str) -> str:
    """Return 5000000 for "5 million"; return texts without a magnitude unchanged."""
    return plain(text) if _MAGNITUDE.search(text) else text


def without_thousands(text: str) -> str:
    """Remove thousands separators: return 5000 for 5,000."""
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)


def normalize_answer(answer: str) -> str:
    """Return an answer in lower case, without unit, spaces and markup."""
    bare = re.sub(r"^[a-zA-Z]\s*=(?!=)", "", plain(answer))
    return re.sub(r"\s", "", _quantity(bare).number).lower()


def math_equal(reference: str, answer: str) -> bool:
    """Return whether a human would judge two answers to be equal.

    A unit that only one answer names is ignored. A decimal approximation does not equal its fraction.
    A comparison that times out returns False; timeouts use alarms, which only the main thread can set.
    """
    a, b = plain(reference), plain(answer)
    if a.casefold() == b.casefold():
        return True
    options = [_OPTION.fullmatch(side) for side in (a, b)]
    if any(options):
        return _same_option(options, a, b)
    times = [_minutes(side) for side in (a, b)]
    if None not in times or any(_TIME.fullmatch(side) for side in (a, b)):
        return times[0] == times[1]
    a, b = (
        re.sub(
            r"(?<=\d) to (?=\d)|(?<=\d):00(?= o'clock$)|\s*o'clock$", lambda m: ":00" if "clock" in m[0] else ":", side
        )
        for side in (a, b)
    )
    hours = [_HOUR.fullmatch(side) for side in (a, b)]
    if hours[0] and hours[1] and ":" in a + b:  # 10 and 10:00, of 10 o'clock
        return int(hours[0][1]) == int(hours[1][1])
    if any(map(_RATIO.fullmatch, (a, b))):
        return _same_ratio(a, b)
    return _same_quantity(*(_quantity(side, other) for side, other in ((a, b), (b, a))))


def _is_balanced(text: str) -> bool:
    depths = [0]
    for character in text:
        depths.append(depths[-1] + (character == "{") - (character == "}"))
    return min(depths) == depths[-1] == 0


def _money_in_words(text: str) -> str:
    """Return "-5 million dollars" for "-$5 million" and "-$5M"."""
    match = _MONEY.match(text)
    if match is None:
        return text
    sign, symbol, value, magnitude, rest = match.groups()[:5] if match[2] else match.groups()[5:]
    magnitude = _SHORT_MAGNITUDES.get((magnitude or "").lower(), magnitude or "")
    unit = "" if re.match(r"\s*\$?\s*(?:dollar|euro|pound|yen)", rest) else f" {_CURRENCIES[symbol]}"
    return f"{sign}{value} {magnitude.strip()}".strip() + unit + rest


def _latex(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _number_of_words(match: re.Match[str]) -> str:
    total = part = 0
    for word in re.findall("[a-z]+", match[0].lower()):
        if word in _SMALL_NUMBERS:
            part += _SMALL_NUMBERS[word]
        elif word in ("a", "an"):
            part += 1
        elif word in ("hundred", "dozen"):
            part *= _MAGNITUDES[word]
        elif word != "and":
            total, part = total + part * _MAGNITUDES[word], 0
    return str(total + part)


def _expanded_magnitude(match: re.Match[str]) -> str:
    value = Fraction(int(match["over"]), int(match["under"]) or 1) if match["over"] else Fraction(match["value"])
    return _latex(value * _MAGNITUDES[match["word"].lower()])


def _part_of_one(match: re.Match[str]) -> str:
    """Convert `2 thirds` to a fraction, but not `7 thirds` (possibly pieces)."""
    count = 1 if match[3] or match[1].lower() in ("a", "an") else int(match[1])
    whole = _PARTS[(match[2] or match[3]).lower()]
    return _latex(Fraction(count, whole)) if count < whole else match[0]


def _improper_fraction(match: re.Match[str]) -> str:
    whole, over, under = (int(digits) for digits in match.groups() if digits)
    return _latex(Fraction(whole * under + over, under)) if over < under else match[0]


def _repeating_fraction(match: re.Match[str]) -> str:
    first, period = match["first"], next(match[name] for name in "abcde" if match[name])
    value = int(match["whole"] + first + period or 0) - int(match["whole"] + first or 0)
    return _latex(Fraction(value, (10 ** len(period) - 1) * 10 ** len(first)))


def _same_option(options: list[re.Match[str] | None], a: str, b: str) -> bool:
    """Compare multiple-choice options by letter, or one with a letter or text."""
    letters = [(option["a"] or option["b"] or option["c"]).casefold() for option in options if option]
    if len(letters) == 2:
        return letters[0] == letters[1]
    option, other = (options[0], b) if options[0] else (options[1], a)
    text = option["text"] if option else None
    return other.casefold() == letters[0] or (text is not None and math_equal(text, other))


def _minutes(text: str) -> int | None:
    """Return minutes since midnight; None if not a time or ambiguous (5:30)."""
    if bare := re.fullmatch(r"(\d{2}):(\d{2})", text):
        return int(bare[1]) * 60 + int(bare[2]) if bare[1] == "00" or 13 <= int(bare[1]) < 24 else None
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    if match[5]:
        return 720 if match[5].lower() == "noon" else 0
    is_morning = (match[3] or match[4]).lower() in ("a", "morning")
    return (int(match[1]) % 12 + (0 if is_morning else 12)) * 60 + int(match[2] or 0)


def _same_ratio(a: str, b: str) -> bool:
    """Compare ratios such as 1:2 term by term; accept fractions too."""
    sides = []
    for side in (a, b):
        fraction = _FRACTION.fullmatch(side)
        sides.append([term for term in fraction.groups() if term] if fraction else side.split(":"))
    return len(sides[0]) == len(sides[1]) and all(
        _same_expression(x.strip(), y.strip()) for x, y in zip(*sides, strict=True)
    )


def _quantity(text: str, other: str = "=") -> Quantity:
    """Split an answer into expression and unit.

    Drops a leading `x =` unless `other` contains an equals sign.
    """
    if "=" not in other:
        text = re.sub(r"^[a-zA-Z]\w?\s*=\s*(?=[^=]+$)", "", text)
    if based := re.fullmatch(r"([\dA-Fa-f]+)(?:_\{?(\d+)\}?|\s+base\s+(\d+))", text):
        return Quantity(based[1], {f"base {based[2] or based[3]}": 1})
    parts = _COMPOUND.findall(text)
    if len(parts) > 1 and not _COMPOUND.sub("", text):
        units = [unit for _, name in parts if (unit := _known_unit(name))]
        if len(units) == len(parts) and len({dimension for dimension, _ in units}) == 1:
            dimension, size = units[-1]
            total = sum((_fraction(part[0]) * unit[1] for part, unit in zip(parts, units, strict=True)), Fraction(0))
            return Quantity(_latex(total / size), {dimension: 1}, size)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return Quantity(text)
    number, words = match["number"].strip(), match["unit"]
    known = _unit(words.lower())
    is_attached = not words[0].isspace()  # 5cm has a unit, 5t and 5m are products
    is_product = (
        known is None or (len(words) == 1 and words != "%") if is_attached else known is None and _NO_UNIT.match(words)
    )
    return Quantity(text) if is_product else Quantity(number, *(known or ()))


def _fraction(number: str) -> Fraction:
    return Fraction(number) if number[0] != "\\" else Fraction(*map(int, re.findall(r"\d+", number)))


def _known_unit(name: str) -> tuple[str, Fraction] | None:
    name = name.lower()
    return _UNITS.get(name) or _UNITS.get(name.removesuffix("s")) if len(name) > 1 or name in _UNITS else None


def _unit(words: str) -> tuple[dict[str, int], Fraction] | None:
    """Return a unit's dimensions and size, ignoring words that follow it."""
    if "pounds sterling" in words:
        return {"sterling": 1}, Fraction(1)
    for name, text in _SPEEDS.items():
        words = re.sub(rf"\b{name}\b", text, words)
    dimensions: Counter[str] = Counter()
    size, sign, power = Fraction(1), 1, 1
    tokens = re.findall(r"[a-z]+|%|/|\^\{?-?\d\}?", words)
    if tokens[0] == "in" and tokens[1:] and not tokens[1].startswith("^"):
        return None
    for index, token in enumerate(tokens):
        if token in ("square", "sq", "cubic", "cu"):
            power = 2 if token.startswith("sq") else 3
        elif token in ("per", "/") or (dimensions and token in ("a", "an")):
            sign = -1
        elif token[0] == "^":
            continue
        elif unit := _known_unit(token):
            following = tokens[index + 1] if index + 1 < len(tokens) else ""
            exponent = sign * (int(following.strip("^{}")) if following.startswith("^") else power)
            dimensions[unit[0]] += exponent
            size *= unit[1] ** exponent
            power = 1
        else:
            break
    return (dict(dimensions), size) if dimensions else None


def _same_quantity(a: Quantity, b: Quantity) -> bool:
    percents = [side.dimensions == {"percent": 1} for side in (a, b)]
    if percents[0] != percents[1] and None in (a.dimensions, b.dimensions):
        percent, other = (a, b) if percents[0] else (b, a)
        scaled = rf"({percent.number})/100"
        return _same_expression(percent.number, other.number) or _same_expression(scaled, other.number)
    if None in (a.dimensions, b.dimensions) or a[1:] == b[1:]:
        return _same_expression(a.number, b.number)
    if a.dimensions != b.dimensions:
        return False
    return _same_expression(*(rf"({side.number})\cdot {_latex(side.size)}" for side in (a, b)))


def _same_expression(a: str, b: str) -> bool:
    """Compare words without case and articles, and everything else with math-verify."""
    a, b = (re.sub(r",?\s+(?:and|or)\s+", ", ", side) for side in (a, b))
    if a.casefold() == b.casefold():
        return True
    if any(not _FUNCTION.fullmatch(word) for side in (a, b) for word in _WORD.findall(side)):
        first, second = (
            sorted(re.sub(r"^\s*(?:the|an?)\s|[\s.'\"-]", "", item) for item in side.casefold().split(","))
            for side in (a, b)
        )
        return first == second
    math_verify = require("math_verify", "eval")
    from latex2sympy2_extended import NormalizationConfig

    is_main = threading.current_thread() is threading.main_thread()
    parse_limit, compare_limit = (PARSE_TIMEOUT, COMPARE_TIMEOUT) if is_main else (None, None)
    notation = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")  # not its units: it reads 5t as 5
    targets = [math_verify.LatexExtractionConfig(normalization_config=notation), math_verify.ExprExtractionConfig()]
    sides = [math_verify.parse(f"${side}$", targets, parsing_timeout=parse_limit) for side in (a, b)]
    return all(sides) and bool(
        math_verify.verify(*sides, float_rounding=12, allow_set_relation_comp=True, timeout_seconds=compare_limit)
    )
