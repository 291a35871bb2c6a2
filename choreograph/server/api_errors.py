"""Errors of the HTTP interface, in OpenAI's form."""

import re
from collections.abc import Mapping
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


def overloaded(max_requests: int) -> ApiError:
    """Return the error of a request that exceeds the queue."""
    return ApiError(
        429,
        f"the server runs {max_requests} requests, its limit: retry later",
        type="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": "1"},
    )


def context_exceeded(num_prompt: int, num_output: int, limit: int) -> ApiError:
    """Return the error of a prompt that is too long."""
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, you requested {num_prompt + num_output} tokens "
        f"({num_prompt} in the prompt, {num_output} in the completion). Please reduce the length of either.",
        param="messages",
        code="context_length_exceeded",
    )


def to_api_error(exc: Exception) -> ApiError:
    """Return the HTTP error of an exception of the engine."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, RequestValidationError):
        return _validation_error(exc)
    if isinstance(exc, (SessionClosedError, LostContextError)):
        return ApiError(503, str(exc), type="service_unavailable", headers={"Retry-After": "5"})
    if isinstance(exc, (InvalidPositionError, CacheFullError)):
        return ApiError(400, str(exc), code="context_length_exceeded")
    if isinstance(exc, ChoreographError) and isinstance(exc, ValueError):
        name = re.match(r"(\w+)\s*[=:]", str(exc)) if isinstance(exc, (SamplingError, InvalidRequestError)) else None
        return ApiError(400, str(exc), param=name and name[1])
    if isinstance(exc.__cause__, InvalidRequestError):  # of a grammar, while it ran
        return ApiError(400, str(exc.__cause__))
    text = str(exc) if isinstance(exc, ChoreographError) else "internal error"
    return ApiError(500, text, type="server_error")


def _validation_error(exc: RequestValidationError) -> ApiError:
    first: Mapping[str, Any] = exc.errors()[0]
    path = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    param = ".".join(path) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['msg']}")
    reason = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"Invalid value for '{param}': {reason}", param=param, code="invalid_value")
