"""Errors of the HTTP interface, in OpenAI's form."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from ..errors import (
    CacheFullError,
    ChoreographError,
    InvalidPositionError,
    InvalidRequestError,
    LostContextError,
    SamplingError,
    SessionClosedError,
)

MAX_MESSAGE_CHARS = 2000
CLIENT_CLOSED_REQUEST = 499  # status of a request whose client left, as nginx logs it


class ApiError(Exception):
    """Error with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        message = message.encode("utf-8", "replace").decode()[:MAX_MESSAGE_CHARS]
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def overloaded(limit: int, what: str = "requests") -> ApiError:
    """Return the error of a request that exceeds a tenant's share."""
    return ApiError(
        429,
        f"{limit} {what} of this key are running or waiting, its share: retry later",
        type="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": "1"},
    )


def context_exceeded(limit: int, param: str, sent: str) -> ApiError:
    """Return the error of a field whose prompt is too long.

    Args:
        sent: what the client did, with its size.
    """
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, you {sent}. Please reduce the length.",
        param=param,
        code="context_length_exceeded",
    )


def hide_ids(text: str, names: Mapping[int, str]) -> str:
    """Replace the engine's ids of messages in an error by the server's.

    Ids of other messages are left out: they count the work of all tenants.
    """

    def replace(match: re.Match[str]) -> str:
        name = names.get(int(match[2]))
        return match[1] if name is None else f"{match[1]} {name}"

    return re.sub(r"(?<![\w'\"])(message|parent|KV entry) (\d{1,18})\b", replace, text)


def to_api_error(exc: Exception, names: Mapping[int, str] | None = None) -> ApiError:
    """Return the HTTP error of an exception of the engine.

    Args:
        names: ids of messages in the server, by those of the engine; None: the client knows none.
    """
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, RequestValidationError):
        return _validation_error(exc)
    repeats_request = isinstance(exc, (InvalidRequestError, SamplingError))
    text = str(exc) if repeats_request and names is None else hide_ids(str(exc), names or {})
    if isinstance(exc, (SessionClosedError, LostContextError)):
        return ApiError(503, text, type="service_unavailable", headers={"Retry-After": "5"})
    if isinstance(exc, (InvalidPositionError, CacheFullError)):
        return ApiError(400, text, code="context_length_exceeded")
    if isinstance(exc, ChoreographError) and isinstance(exc, ValueError):
        name = (
            re.match(r"(\w+(?:\[\d+\])?)\s*[=:]", str(exc))
            if isinstance(exc, (SamplingError, InvalidRequestError))
            else None
        )
        return ApiError(400, text, param=name and name[1])
    if isinstance(exc.__cause__, InvalidRequestError):  # of a grammar, while it ran
        return ApiError(400, str(exc.__cause__))
    return ApiError(500, text if isinstance(exc, ChoreographError) else "internal error", type="server_error")


def _validation_error(exc: RequestValidationError) -> ApiError:
    first: Mapping[str, Any] = exc.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['msg']}")
    if first["loc"] == ("body",) and first["type"] != "value_error":
        return ApiError(400, "The body must be a JSON object, of content type application/json.", code="invalid_value")
    where, *names = first["loc"]
    errors = [{**error, "loc": error["loc"][1:]} for error in exc.errors()]
    path, kind, reason = explain_validation(errors, exc.body if where == "body" else dict.fromkeys(names))
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:] or None
    if kind == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    message = reason if param is None else f"Invalid value for '{param}': {reason}"
    return ApiError(400, message, param=param, code="invalid_value")


def explain_validation(errors: Sequence[Any], body: Any) -> tuple[list[int | str], str, str]:
    """Return path, type and reason of a body's first invalid value.

    pydantic reports a value of several types once for each, with the type in the path. What is not in the body is no
    part of the path; of one value, the deepest error is the most specific.
    """
    paths = [_path_in(body, error) for error in errors]
    path = max((path for path in paths if path[: len(paths[0])] == paths[0]), key=len)
    same = [error for error, other in zip(errors, paths, strict=True) if other == path]
    reasons = list(dict.fromkeys(_reason(error) for error in same))
    others = [reason.removeprefix("Input should be ") for reason in reasons[1:]]
    return path, same[0]["type"], " or ".join([*reasons[:1], *others])


def _path_in(value: Any, error: Mapping[str, Any]) -> list[int | str]:
    """Return the location of an error without the names of types."""
    path: list[int | str] = []
    for part in error["loc"]:
        is_key = isinstance(value, dict) and part in value
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_key or is_index:
            value = value[part]
            path.append(part)
    return [*path, error["loc"][-1]] if error["type"] == "missing" else path


def _reason(error: Mapping[str, Any]) -> str:
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "Input should be an object"
    return str(error["msg"]).removeprefix("Value error, ")
