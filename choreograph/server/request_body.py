"""Checks of every body, path and header, once, before it is read.

Bodies are bounded by counts that cost microseconds, then parsed in a worker thread. What passes is JSON of a bounded
size whose texts have a UTF-8 form.
"""

import json
import math
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, NoReturn, TypeVar
from urllib.parse import unquote_to_bytes

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.requests import ClientDisconnect

from .api_errors import CLIENT_CLOSED_REQUEST, ApiError, context_exceeded, to_api_error

MAX_CONTAINERS = 1 << 16  # objects and lists of one body
MAX_VALUES = 1 << 20  # members and elements of one body, such as token ids
MAX_MEMBERS = 1 << 17  # of all objects of one body
CONTEXT_FIELDS = ("messages", "input", "tools", "prompt", "tokens")  # lists whose items each take a token at least

MAX_KEYS = 1 << 13  # of one object
MAX_DEPTH = 128  # of nested objects and lists

MAX_NAME_CHARS = 256  # of workflows, agents and labels, also in headers
OPTION_HEADERS = re.compile("x-choreography-.*|x-claude-code-session-id|thread-id|x-session-id|x-dynamo-session-id")

MAX_LABELS = 64  # of one request, session or call

MAX_TOP_LOGPROBS = 20

T = TypeVar("T")

# the first invalid item is the error: a million of them would each take the interpreter's lock for a microsecond
Items = Annotated[list[T], Field(fail_fast=True)]

LabelNames = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]], Field(fail_fast=True, max_length=MAX_LABELS)
]

_CHUNK = 1 << 20  # bytes that are counted at once

_INVALID = re.compile("[\0\ud800-\udfff]")

_ESCAPES = re.compile(rb"\\u(?:[dD][89a-fA-F]|0000)")  # of surrogates and of NUL


def parse_body(body: bytes) -> Any:
    """Parse JSON of bounded size, all of whose texts are valid Unicode.

    Raises:
        ApiError: of status 400, with the name of the field.
    """
    _check_counts(body)
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant, parse_float=_finite_float)
    except UnicodeDecodeError as exc:
        raise ApiError(400, f"The body is not UTF-8 at byte {exc.start}: encode it so.", code="invalid_value") from None
    except RecursionError:
        _refuse_size(f"nests deeper than {MAX_DEPTH} levels", "flatten it")
    except json.JSONDecodeError as exc:
        raise ApiError(400, f"The body is not valid JSON: {exc.msg} at character {exc.pos}.") from None
    except ValueError as exc:
        reason = "a number has too many digits" if "digits" in str(exc) else exc
        raise ApiError(400, f"The body is not valid JSON: {reason}.") from None
    if _ESCAPES.search(body) or body.count(b"[") + body.count(b"{") > MAX_DEPTH or body.count(b":") > MAX_KEYS:
        _check_values(value)
    return value


def _check_counts(body: bytes) -> None:
    """Refuse a body of too many parts.

    Brackets, colons and commas inside texts count too: no text that fits into a context has as many.
    """
    num_containers = num_values = num_members = 0
    for start in range(0, len(body), _CHUNK):
        chunk = body[start : start + _CHUNK]
        num_containers += chunk.count(b"{") + chunk.count(b"[")
        num_values += chunk.count(b",")
        num_members += chunk.count(b":")
        if num_containers > MAX_CONTAINERS:
            _refuse_size(f"has more than {MAX_CONTAINERS} objects and lists", "send fewer messages or items")
        if num_members > MAX_MEMBERS:
            _refuse_size(f"has more than {MAX_MEMBERS} members of objects", "send fewer messages or fields")
        if num_values > MAX_VALUES:
            _refuse_size(f"has more than {MAX_VALUES} values", "send a shorter prompt")


def _check_values(root: Any) -> None:
    """Check texts, keys and depth of a parsed body, without recursion."""
    stack: list[Iterator[tuple[str, Any]]] = [iter([("", root)])]
    path: list[str] = []
    while stack:
        try:
            name, value = next(stack[-1])
        except StopIteration:
            stack.pop()
            del path[-1:]
            continue
        if isinstance(value, str):
            check_text(value, "".join([*path, name]).lstrip(".") or None)
        elif isinstance(value, (dict, list)):
            path.append(name)
            if len(path) > MAX_DEPTH:
                _refuse_size(f"nests deeper than {MAX_DEPTH} levels", "flatten it")
            stack.append(_members(value, path) if isinstance(value, dict) else _elements(value))


def _members(value: dict[str, Any], path: list[str]) -> Iterator[tuple[str, Any]]:
    where = "".join(path).lstrip(".") or None
    if len(value) > MAX_KEYS:
        raise ApiError(
            400,
            f"{where or 'The body'} has {len(value)} keys: use at most {MAX_KEYS}",
            param=where,
            code="invalid_value",
        )
    for key, member in value.items():
        check_text(key, where)
        yield f".{key}", member


def _elements(value: list[Any]) -> Iterator[tuple[str, Any]]:
    # numbers alone need no check, and there may be a million
    return ((f"[{index}]", item) for index, item in enumerate(value) if isinstance(item, (str, dict, list)))


def walk(root: Any) -> Iterator[tuple[int, Any]]:
    """Yield every value of parsed JSON with its depth, without recursion."""
    stack = [(0, root)]
    while stack:
        depth, value = stack.pop()
        yield depth, value
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        stack += [(depth + 1, child) for child in children]


def check_text(text: str, param: str | None) -> None:
    """Refuse a text with unpaired surrogates or NUL.

    Args:
        param: name of the field, for the error.
    """
    match = _INVALID.search(text)
    if match is None:
        return
    where = f"Invalid value for '{param}'" if param else "Invalid text"
    character = f"U+{ord(match[0]):04X} at character {match.start()}"
    problem = f"the character {character}: leave it out"
    if match[0] != "\0":
        problem = f"an unpaired surrogate {character}: send whole characters"
    raise ApiError(400, f"{where}: {problem}", param=param, code="invalid_value")


def check_path(raw_path: bytes) -> None:
    """Refuse a path whose names are not UTF-8, or have NUL."""
    path = unquote_to_bytes(raw_path)
    try:
        check_text(path.decode(), "path")
    except UnicodeDecodeError:
        raise ApiError(
            400, "The path is not UTF-8: percent-encode it so.", param="path", code="invalid_value"
        ) from None


def check_headers(request: Request) -> None:
    """Refuse too long names in headers."""
    for name, value in request.headers.items():
        if OPTION_HEADERS.fullmatch(name) and len(value) > MAX_NAME_CHARS:
            raise ApiError(
                400,
                f"{name} has {len(value)} characters: use at most {MAX_NAME_CHARS}",
                param=name,
                code="invalid_value",
            )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _refuse_size(reason: str, fix: str) -> NoReturn:
    raise ApiError(400, f"The body {reason}: {fix}.", code="request_too_large")


class CheckedRequest(Request):
    """Request whose body was parsed and validated."""

    _value: Any = None

    async def json(self) -> Any:
        """Return the model of the body, which FastAPI takes as it is."""
        return self._value


def _read_body(body: bytes, field: Any, max_items: int) -> Any:
    """Parse and validate a body.

    Args:
        field: of FastAPI, whose type the body has.
        max_items: of a list, such as messages or token ids.
    """
    parsed = parse_body(body)
    for name, items in parsed.items() if isinstance(parsed, dict) else ():
        if name in CONTEXT_FIELDS and isinstance(items, list) and len(items) > max_items:
            raise context_exceeded(max_items, name, f"sent {len(items):,} items, which have more")
    value, errors = field.validate(parsed, {}, loc=("body",))
    if errors:
        raise to_api_error(RequestValidationError(errors, body=parsed))
    return value


# authenticates a request: returns its tenant
Authenticate = Callable[[Request], str]
# runs work of a number of bytes for a tenant
RunWork = Callable[[str, int, Callable[[], Any]], Awaitable[Any]]


def checked_route(authenticate: Authenticate, run: RunWork, max_items: int) -> type[APIRoute]:
    """Return the class of routes that check what enters.

    Clients without a key are refused before their body is read.

    Args:
        max_items: tokens of the context, and so messages of a chat.
    """

    class CheckedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Any]:
            handler, field = super().get_route_handler(), self.body_field
            if field is None:
                return handler

            async def handle(request: Request) -> Response:
                request = CheckedRequest(request.scope, request.receive)
                tenant = authenticate(request)
                check_headers(request)
                try:
                    body = await request.body()
                except ClientDisconnect:
                    return Response(status_code=CLIENT_CLOSED_REQUEST)  # goes nowhere
                if body and "json" in request.headers.get("content-type", "").lower():
                    request._value = await run(tenant, len(body), lambda: _read_body(body, field, max_items))
                response: Response = await handler(request)
                return response

            return handle

    return CheckedRoute
