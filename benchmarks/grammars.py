"""Structured outputs: llguidance against xgrammar, by time and by what they enforce.

make bench NAME=grammars
"""

import json
import time
from collections.abc import Callable
from typing import Any

import llguidance
import xgrammar
from llguidance.hf import from_tokenizer
from rich.console import Console
from transformers import AutoTokenizer

from choreograph.models.loader import bundled_gguf, convert_gguf

ITEM = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b", "c"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20, "pattern": "^[a-z]+$"}, "maxItems": 4},
        "when": {"type": "string", "format": "date-time"},
    },
    "required": ["kind", "tags", "when"],
    "additionalProperties": False,
}
LARGE = {
    "type": "object",
    "properties": {f"field_{i}": ITEM for i in range(12)},
    "required": [f"field_{i}" for i in range(12)],
    "additionalProperties": False,
}
VALUE = {f"field_{i}": {"kind": "a", "tags": ["abc", "de"], "when": "2024-01-02T03:04:05Z"} for i in range(12)}

LINKED = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}

# a schema of one keyword, and a text that it forbids
FORBIDDEN: dict[str, tuple[Any, str]] = {
    "format": ({"type": "string", "format": "date-time"}, '"hello"'),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, "4"),
    "allOf": ({"allOf": [A, B]}, '{"a": 1}'),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
        '{"y": 1}',
    ),
    "$ref": ({"$defs": {"n": LINKED}, "$ref": "#/$defs/n"}, '{"v": 1}'),
    "pattern": ({"type": "string", "pattern": "^\\d{3}-\\d{4}$"}, '"12-3"'),
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]"),
    "minProperties": ({"type": "object", "properties": {"a": {"type": "string"}}, "minProperties": 1}, "{}"),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "1.5"),
    "not": ({"not": {"type": "string"}}, '"s"'),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, '["x"]'),
    "dependentRequired": ({"type": "object", "properties": {"a": True}, "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 2}}, '"x"'),
}


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def main() -> None:
    tokenizer, console = AutoTokenizer.from_pretrained(convert_gguf(bundled_gguf())), Console()
    vocab_size = len(tokenizer)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    ll_tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size)

    def xgrammar_matcher(schema: Any) -> Any:
        return xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))

    def llguidance_matcher(schema: Any) -> Any:
        matcher = llguidance.LLMatcher(ll_tokenizer, llguidance.LLMatcher.grammar_from_json_schema(schema), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    bitmask, tokens = xgrammar.allocate_token_bitmask(1, vocab_size), tokenizer(json.dumps(VALUE))["input_ids"]
    for name, make in (("llguidance", llguidance_matcher), ("xgrammar", xgrammar_matcher)):
        compile_seconds, mask_seconds = [], []
        for _ in range(5):
            matcher, seconds = timed(lambda make=make: make(LARGE))
            compile_seconds.append(seconds)
            for token in tokens:
                if name == "llguidance":
                    mask_seconds.append(timed(matcher.compute_bitmask)[1])
                    assert matcher.consume_token(token)
                else:
                    mask_seconds.append(timed(lambda matcher=matcher: matcher.fill_next_token_bitmask(bitmask))[1])
                    assert matcher.accept_token(token)
        compile_ms, mask_us = 1e3 * min(compile_seconds), 1e6 * sum(mask_seconds) / len(mask_seconds)
        console.print(
            f"{name}: compile {compile_ms:.2f} ms, mask {mask_us:.1f} us (mean), {max(mask_seconds):.4f} s (most)"
        )
    for keyword, (schema, text) in FORBIDDEN.items():
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        outcomes = []
        for make, accept in ((llguidance_matcher, "consume_token"), (xgrammar_matcher, "accept_token")):
            try:
                matcher = make(schema)
            except (ValueError, RuntimeError):
                outcomes.append("refused")
                continue
            outcomes.append("ACCEPTED" if all(getattr(matcher, accept)(token) for token in ids) else "enforced")
        console.print(f"{keyword:20} llguidance: {outcomes[0]:10} xgrammar: {outcomes[1]}")


if __name__ == "__main__":
    main()
