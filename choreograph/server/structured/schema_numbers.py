"""Numbers of schemas that llguidance would change: it computes with doubles."""

import json
import re
from typing import Any

MAX_INTEGER = 1 << 53  # larger ones are no doubles

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # of names to schemas
_ANNOTATIONS = ("default", "example", "examples")

_INLINE_SCHEMA = re.compile(r"%json\s*")


def check_inline_schemas(grammar: str) -> None:
    """Check the schemas in a Lark grammar.

    Raises:
        ValueError: if a number is not exact, or what follows `%json` is no JSON.
    """
    decoder = json.JSONDecoder()
    for match in _INLINE_SCHEMA.finditer(grammar):
        try:
            schema, _ = decoder.raw_decode(grammar, match.end())
        except (ValueError, RecursionError):
            raise ValueError("%json: write a JSON Schema behind it") from None
        check_numbers(schema)


def check_numbers(schema: Any) -> None:
    """Check constants and bounds of a schema and its parts.

    Raises:
        ValueError: if a number is not exact.
    """
    if isinstance(schema, list):
        for part in schema:
            check_numbers(part)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in ("const", "enum"):
            _check_constant(key, value)
        elif key in _BOUNDS and isinstance(value, (int, float)) and abs(value) > MAX_INTEGER:
            raise ValueError(f"{key}: {_shorten(value)} is not exact: use at most 2**53, or leave it out")
        elif key in _MAPS and isinstance(value, dict):
            for part in value.values():
                check_numbers(part)
        elif key not in _ANNOTATIONS:
            check_numbers(value)


def _check_constant(key: str, value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ValueError(f"{key}: {_shorten(value)} is not exact: use an integer of at most 2**53, or a string")
    if isinstance(value, float) and float(f"{value:.15g}") != value:
        raise ValueError(f"{key}: {value!r} is not exact: use at most 15 digits, or a string")
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _check_constant(key, part)


def _shorten(value: float) -> str:
    text = f"{value:g}" if isinstance(value, float) else hex(value) if abs(value) >= 1 << 200 else str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
