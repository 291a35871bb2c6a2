"""Structured outputs: grammars compiled by llguidance to masks of the next token."""

import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple
from urllib.parse import unquote

import torch
from jaxtyping import Bool
from torch import Tensor

from ...errors import InvalidRequestError
from ...request.decode_state import TokenMask
from ...utils import require
from .grammar_check import CHECKER, PARSER_LIMITS, GrammarChecker, large_stacks
from .grammar_tokenizer import tokenizer_options
from .output_parser import CALL_END, CALL_START, THINK_END
from .schema_numbers import check_inline_schemas, check_numbers

NUM_MASK_THREADS = 2  # a mask that takes long delays no other one

MASK_SECONDS = 1.0  # that the engine waits for a mask

MAX_CHOICES = 1024  # as many as the parser follows at once

MAX_GRAMMAR_CHARS = 1 << 18  # of one grammar or schema

MAX_VISITS = 20_000  # of parts of a schema, to find out whether a value of it ends

# separators as most models write them; free whitespace lets small models fill an answer with it
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class CallForm(NamedTuple):
    """How a model writes a call."""

    key: str  # of the arguments
    start: str = ""  # before its JSON
    end: str = ""
    separator: str = ""  # between calls


# forms by the name of their parser; calls that are required have no tags
CALL_FORMS = {
    "hermes": CallForm("arguments", f"{CALL_START}\n", f"\n{CALL_END}", "\n"),
    "llama3_json": CallForm("parameters", separator="; "),
    "required": CallForm("arguments"),
}


class Constraint(NamedTuple):
    """Grammar of an answer, in the form that llguidance compiles."""

    kind: str  # json_object, json, regex, choice, grammar or tools, for error messages
    grammar: str


def json_constraint(schema: Mapping[str, Any] | bool | str | None) -> Constraint:
    """Allow JSON of a schema; any object for None.

    An object has no other properties than its schema lists, unless that allows them explicitly.

    Raises:
        InvalidRequestError: if the schema is none, has a keyword that cannot be enforced, or admits no finite value.
    """
    llguidance = require("llguidance", "serve")
    kind = "json_object" if schema is None else "json"
    try:
        value = json.loads(schema) if isinstance(schema, str) else {"type": "object"} if schema is None else schema
        value = _close_objects(value)
        check_numbers(value)
        text = json.dumps(value, allow_nan=False)
        if not isinstance(value, (dict, bool)) or len(text) > MAX_GRAMMAR_CHARS:
            raise ValueError(f"use a JSON Schema of at most {MAX_GRAMMAR_CHARS} characters")
        constraint = _checked(Constraint(kind, llguidance.LLMatcher.grammar_from_json_schema(text, JSON_STYLE)))
        _check_ends(value)
        return constraint
    except (ValueError, RecursionError) as exc:
        reason = str(exc).removeprefix(f"{kind}: ")  # of an InvalidRequestError
        raise InvalidRequestError(f"{kind}: {reason}") from None


def _check_ends(root: Any) -> None:
    """Raise ValueError for a schema without finite values, as {"$ref": "#"}.

    A reference ends if its schema has a value whose references end: a least fixed point.
    """
    references, finite, num_visits = set[str](), set[str](), 0

    def ends(schema: Any) -> bool:
        nonlocal num_visits
        num_visits += 1
        if not isinstance(schema, dict) or num_visits > MAX_VISITS or ("$id" in schema and schema is not root):
            return schema is not False
        if isinstance(reference := schema.get("$ref"), str):
            references.add(reference)
            if reference not in finite:
                return False
        if not all(ends(part) for part in _list_in(schema, "allOf")):
            return False
        if any(parts and not any(map(ends, parts)) for parts in (_list_in(schema, "anyOf"), _list_in(schema, "oneOf"))):
            return False
        types = schema.get("type")
        types = [types] if isinstance(types, str) else _list_in(schema, "type")
        if not types or schema.keys() & {"const", "enum"} or any(kind not in ("object", "array") for kind in types):
            return True
        return ("object" in types and object_ends(schema)) or ("array" in types and array_ends(schema))

    def object_ends(schema: dict[str, Any]) -> bool:
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        other = "patternProperties" in schema or schema.get("additionalProperties", True)
        return all(ends(known.get(name, other)) for name in _list_in(schema, "required") if isinstance(name, str))

    def array_ends(schema: dict[str, Any]) -> bool:
        first, least = _list_in(schema, "prefixItems"), schema.get("minItems", 0)
        least = least if isinstance(least, int) else 0
        return all(map(ends, first[:least])) and (least <= len(first) or ends(schema.get("items", True)))

    while not ends(root):
        size = len(references), len(finite)
        finite.update([reference for reference in references - finite if ends(_resolve(root, reference))])
        if size == (len(references), len(finite)):
            raise ValueError(
                "the schema admits no finite value: check for recursion without an alternative and required properties not listed"
            )


def _list_in(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _resolve(root: Any, reference: str) -> Any:
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


def _close_objects(schema: Any) -> Any:
    """Disallow unlisted properties, as xgrammar does by default.

    Without this, a small model goes on with new properties until the token limit. Parts of `allOf`
    stay open, since each lists some properties of one object.
    """
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
            result[key] = {name: _close_objects(part) for name, part in value.items()}
        elif key in ("anyOf", "oneOf", "prefixItems") and isinstance(value, list):
            result[key] = [_close_objects(part) for part in value]
        elif key in ("items", "additionalProperties"):
            result[key] = _close_objects(value)
    if "properties" in schema and not schema.keys() & {"additionalProperties", "patternProperties", "allOf", "$ref"}:
        result["additionalProperties"] = False
    return result


def regex_constraint(pattern: str) -> Constraint:
    """Allow text that a regular expression matches as a whole."""
    llguidance = require("llguidance", "serve")
    return _checked(Constraint("regex", llguidance.LLMatcher.grammar_from_regex(pattern)))


def choice_constraint(choices: Sequence[str]) -> Constraint:
    """Allow one of several texts."""
    if len(choices) > MAX_CHOICES:
        raise InvalidRequestError(f"choice: {len(choices):,} texts: use at most {MAX_CHOICES:,}")
    if not choices or not all(choices):
        raise InvalidRequestError(f"choice={list(choices)!r:.60}: use one or more texts that are not empty")
    alternatives = " | ".join(json.dumps(choice) for choice in choices)
    return _joined("choice", f"start: {alternatives}")


def grammar_constraint(grammar: str) -> Constraint:
    """Allow text of a grammar in Lark's syntax or GBNF."""
    llguidance = require("llguidance", "serve")
    try:
        lark = llguidance.gbnf_to_lark.any_to_lark(grammar) if "::=" in grammar else grammar
        check_inline_schemas(lark)
    except Exception as exc:  # the converter raises what its parser meets
        raise InvalidRequestError(f"grammar: {_one_line(str(exc))}") from None
    return _joined("grammar", lark)


def call_constraint(
    functions: Sequence[Mapping[str, Any]], form: CallForm, *, is_single: bool, answer: Constraint | None = None
) -> Constraint:
    """Allow calls of functions, or instead an answer of another grammar.

    Each function's arguments are a grammar of their own: `$ref` starts at the root of its parameters.

    Args:
        is_single: one call at most.

    Raises:
        InvalidRequestError: if the parameters of a function are no schema that can be enforced.
    """
    if sum(len(json.dumps(function.get("parameters"))) for function in functions) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"tools: use parameters of at most {MAX_GRAMMAR_CHARS} characters together")
    calls, parts = list[str](), list[dict[str, Any]]()
    for number, function in enumerate(functions):
        try:
            arguments = json_constraint(_arguments_schema(function.get("parameters")))
        except InvalidRequestError as exc:
            reason = str(exc).removeprefix("json: ")
            raise InvalidRequestError(f"tools: parameters of {function['name']:.80}: {reason}") from None
        parts += _named(arguments, f"arguments{number}")
        name = json.dumps(function["name"], ensure_ascii=False)
        # lexemes as those of JSON: longer ones would win over an answer that starts with the same characters
        lexemes = [form.start, "{", '"name"', ": ", name, ", ", f'"{form.key}"', ": "]
        start = " ".join(json.dumps(lexeme) for lexeme in lexemes if lexeme)
        calls.append(f"{start} @arguments{number} {json.dumps('}')} {json.dumps(form.end)}")
    call, alternative = f"({' | '.join(calls)})", ""
    if not is_single:
        call += f" ({json.dumps(form.separator)} {call})*"
    if answer is not None:
        parts += _named(answer, "answer")
        alternative = " | @answer"
    return _joined("tools", f"start: {call}{alternative}", parts)


def after_reasoning(constraint: Constraint) -> Constraint:
    """Allow any reasoning, and then an answer of a grammar."""
    lark = f"start: reasoning /\\n*/ @answer\nreasoning[suffix={json.dumps(THINK_END)}]: /(?s:.*)/"
    return _joined(constraint.kind, lark, _named(constraint, "answer"))


def _arguments_schema(parameters: Any) -> Any:
    """Return the schema of a call's arguments: without properties, there are none."""
    is_open = isinstance(parameters, dict) and parameters.keys() - {"type", "title", "description", "$schema", "strict"}
    return parameters if is_open else {"type": "object", "properties": {}, "additionalProperties": False}


def _named(constraint: Constraint, name: str) -> list[dict[str, Any]]:
    """Return the grammars of a constraint under a name."""
    first, *others = json.loads(constraint.grammar)["grammars"]
    return [{**first, "name": name}, *others]


def _joined(kind: str, lark: str, parts: Sequence[dict[str, Any]] = ()) -> Constraint:
    """Return the constraint of a Lark grammar with references by @name."""
    return _checked(Constraint(kind, json.dumps({"grammars": [{"lark_grammar": lark}, *parts]})))


def _checked(constraint: Constraint) -> Constraint:
    if len(constraint.grammar) > 2 * MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"{constraint.kind}: use at most {MAX_GRAMMAR_CHARS} characters")
    if error := CHECKER.validate(constraint.grammar):
        raise InvalidRequestError(f"{constraint.kind}: {_one_line(error)}")
    return constraint


def _one_line(error: str) -> str:
    """Return llguidance's error without its excerpts of the grammar."""
    first, *lines = error.strip().splitlines() or ["unknown error"]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join([first, *causes])[:300]


class GrammarCompiler:
    """Matchers of grammars over one tokenizer, with a thread that computes masks.

    Raises:
        InvalidRequestError: if grammars cannot be compiled for the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._llguidance = require("llguidance", "serve")
        self._limits = self._llguidance.LLParserLimits(**PARSER_LIMITS)
        options = tokenizer_options(tokenizer, vocab_size)
        try:
            self._tokenizer = self._llguidance.LLTokenizer(**options)
        except ValueError as exc:
            raise InvalidRequestError(
                f"structured_outputs: grammars do not work with the model's tokenizer ({str(exc)[:200]}): leave it out"
            ) from exc
        self._checker = GrammarChecker(tokenizer=options)
        self._vocab_size = vocab_size
        self._executor, self._compiler = (
            ThreadPoolExecutor(NUM_MASK_THREADS, "grammar-mask"),
            ThreadPoolExecutor(1, "grammar"),
        )
        with large_stacks():
            barrier = threading.Barrier(NUM_MASK_THREADS)
            starts = [self._executor.submit(barrier.wait) for _ in range(NUM_MASK_THREADS)]
            for start in (*starts, self._compiler.submit(int)):  # each starts a thread
                start.result()

    def masks(self, constraint: Constraint, count: int) -> "list[TokenMask]":
        """Return a mask for each answer, whose first values are being computed."""
        if error := self._checker.validate(constraint.grammar):
            raise InvalidRequestError(f"{constraint.kind}: {_one_line(error)}")
        matchers = self._compiler.submit(self._matchers, constraint, count).result()
        return [GrammarMask(constraint.kind, matcher, self._vocab_size, self._executor) for matcher in matchers]

    def _matchers(self, constraint: Constraint, count: int) -> list[Any]:
        matcher = self._llguidance.LLMatcher(self._tokenizer, constraint.grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequestError(f"{constraint.kind}: {_one_line(matcher.get_error())}")
        return [matcher, *(matcher.deep_copy() for _ in range(count - 1))]

    def close(self) -> None:
        self._checker.close()
        for executor in (self._executor, self._compiler):
            executor.shutdown(wait=False, cancel_futures=True)


class GrammarMask:
    """Mask of one answer: the tokens that its grammar allows next.

    A mask is computed in another thread as soon as the token before it is known, while the model
    runs. When the grammar is complete and cannot continue, only the end of the sequence is allowed.
    """

    def __init__(self, kind: str, matcher: Any, vocab_size: int, executor: ThreadPoolExecutor) -> None:
        self._kind, self._matcher, self._vocab_size, self._executor = kind, matcher, vocab_size, executor
        self._next: Future[Tensor] = executor.submit(self._compute)

    def allowed(self) -> Bool[Tensor, " V"]:
        """Return the allowed tokens; see `TokenMask`.

        Raises:
            InvalidRequestError: if they take so long to compute that other requests would wait.
        """
        self._wait()
        return self._next.result()

    def _wait(self) -> None:
        """Wait until no thread uses the matcher."""
        if not wait([self._next], MASK_SECONDS).done:
            raise InvalidRequestError(
                f"{self._kind}: the next tokens take longer than {MASK_SECONDS:g} s to compute: use a simpler one"
            )

    def advance(self, token: int) -> None:
        """Append a token; see `TokenMask`.

        The tokens of an answer that continues elsewhere are appended without asking what is allowed.
        """
        self._wait()
        if self._matcher.is_stopped():
            return  # the token that ends the answer
        if not self._matcher.consume_token(token):
            reason = _one_line(self._matcher.get_error())
            raise InvalidRequestError(f"token {token} does not follow the grammar: {reason}")
        self._next = self._executor.submit(self._compute)

    def _compute(self) -> Tensor:
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        mask = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten()[: self._vocab_size]
        if self._matcher.is_error() or not mask.any():  # after an error, the mask would end the answer
            raise InvalidRequestError(f"{self._kind}: no token is allowed: {_one_line(self._matcher.get_error())}")
        return torch.nn.functional.pad(mask, (0, self._vocab_size - len(mask)))
