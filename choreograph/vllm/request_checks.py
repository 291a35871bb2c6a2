"""ASGI middleware of vLLM's server that refuses wrong reuse.

vllm serve ... --middleware choreograph.vllm.RequestChecks

Without it the engine refuses the same requests, but vLLM answers with status 500 and writes the reason into its log.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .reuse_params import FIELD, RefusedRequestError, parse_params

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class RequestChecks:
    """Answers requests with wrong `kv_transfer_params` with status 400."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        if FIELD.encode() in body and (reason := _refusal(body)) is not None:
            error = {"message": reason, "type": "BadRequestError", "param": "kv_transfer_params", "code": 400}
            content = json.dumps({"error": error}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
            await send({"type": "http.response.start", "status": 400, "headers": headers})
            await send({"type": "http.response.body", "body": content})
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)


def _refusal(body: bytes) -> str | None:
    """Return why a request is refused; None if it is not."""
    try:
        request = json.loads(body)
        params = request["kv_transfer_params"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    try:
        reuse = parse_params(params)
    except RefusedRequestError as exc:
        return str(exc)
    if reuse.is_explicit and (request.get("prompt_logprobs") is not None or request.get("echo")):
        return (
            f"prompt_logprobs and echo: vLLM computes such a prompt anew, so kv_transfer_params.{FIELD} has no effect"
        )
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) and reuse.end >= len(prompt):
        return (
            f"kv_transfer_params.{FIELD}.spans: they end at {reuse.end}; the last of {len(prompt)} tokens is computed"
        )
    return None
