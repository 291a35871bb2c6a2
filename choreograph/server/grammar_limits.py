"""Limits of grammars, checked before llguidance compiles them.

llguidance compiles definitions recursively and computes with doubles: without these limits, a long chain of
references ends the process, and large integers are changed.
"""

import json
import re
from typing import Any
from urllib.parse import unquote

MAX_LEVELS = 1000  # of nesting, over all definitions that are used; compiling takes about 5 KB of stack each

MAX_INTEGER = 1 << 53  # larger ones are no doubles

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # of names to schemas
_ANNOTATIONS = ("default", "example", "examples")

_QUOTED = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*'
)  # strings, regular expressions, comments of Lark
_INLINE_JSON = re.compile(r"%json\s*")


def check_schema(root: Any) -> None:
    """Check numbers and nesting of a schema.

    Raises:
        ValueError: if a number would change or definitions nest too deep.
    """
    _check_numbers(root)
    _check_levels(count_levels(root))


def check_lark(grammar: str) -> None:
    """Check nesting of a Lark grammar, and the schemas in it.

    Raises:
        ValueError: if rules nest too deep, or a schema is refused.
    """
    num_levels, decoder = 0, json.JSONDecoder()
    for match in _INLINE_JSON.finditer(grammar):
        try:
            schema, _ = decoder.raw_decode(grammar, match.end())
        except (ValueError, RecursionError):
            raise ValueError("%json: write a JSON Schema behind it") from None
        _check_numbers(schema)
        num_levels += count_levels(schema)
    rules = _QUOTED.sub('""', grammar).split(":")
    _check_levels(num_levels + sum(1 + _bracket_depth(rule) for rule in rules))


def _check_levels(num_levels: int) -> None:
    if num_levels > MAX_LEVELS:
        raise ValueError(f"its definitions nest {num_levels} levels in total: use at most {MAX_LEVELS}")


def _bracket_depth(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "([") - (char in ")]")
        deepest = max(deepest, depth)
    return deepest


def count_levels(root: Any) -> int:
    """Return the levels of nesting, over all definitions that are used."""
    targets, total = [root], 0
    known = {""}
    for target in targets:  # grows
        depth, parts = 0, [target]
        while parts:
            depth += 1
            children: list[Any] = []
            for part in parts:
                if isinstance(part, dict) and isinstance(reference := part.get("$ref"), str) and reference not in known:
                    known.add(reference)
                    targets.append(resolve(root, reference))
                children += _parts_of(part)
            parts = children
        total += depth
    return total


def _parts_of(schema: Any) -> list[Any]:
    """Return the schemas that are one level below a schema."""
    values = schema if isinstance(schema, list) else []
    if isinstance(schema, dict):
        # definitions are counted where they are used
        skipped = ("$defs", "definitions", *_ANNOTATIONS)
        values = [value for key, value in schema.items() if key not in skipped and key not in _MAPS]
        maps = [value for key, value in schema.items() if key not in skipped and key in _MAPS]
        values += [part for value in maps if isinstance(value, dict) for part in value.values()]
    lists = [part for value in values if isinstance(value, list) for part in value]
    return [part for part in (*values, *lists) if isinstance(part, dict)]


def _check_numbers(schema: Any) -> None:
    """Check constants and bounds of a schema and its parts."""
    if isinstance(schema, list):
        for part in schema:
            _check_numbers(part)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in ("const", "enum"):
            _check_constant(key, value)
        elif key in _BOUNDS and isinstance(value, (int, float)) and abs(value) > MAX_INTEGER:
            raise ValueError(f"{key}: {_shorten(value)} is not exact: use at most 2**53, or leave it out")
        elif key in _MAPS and isinstance(value, dict):
            for part in value.values():
                _check_numbers(part)
        elif key not in _ANNOTATIONS:
            _check_numbers(value)


def _check_constant(key: str, value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ValueError(f"{key}: {_shorten(value)} is not exact: use an integer of at most 2**53, or a string")
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _check_constant(key, part)


def _shorten(value: float) -> str:
    text = f"{value:g}" if isinstance(value, float) else hex(value) if abs(value) >= 1 << 200 else str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def resolve(root: Any, reference: str) -> Any:
    """Return the schema of a reference within the document; True for others."""
    if reference != "#" and not reference.startswith("#/"):
        return True
    value = root
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return True
    return value
