"""Answers of a vLLM server, as clients of the proxy get them."""

import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.types import Send

from .upstream_store import PromptPlan, UpstreamEntry

# of one connection, or set again
HOP_HEADERS = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect"),
    )
)

# Inside a JSON string, the quotation mark before the colon would be escaped.
_TOKEN_IDS = re.compile(rb'("(?:prompt_)?token_ids": ?)\[[0-9, ]*\]')

_END = b"\n\n"  # of a server-sent event


class Reply:
    """Answer to a client, as messages of ASGI."""

    def __init__(self, send: Send) -> None:
        self._send, self.has_started = send, False

    async def start(self, answer: httpx.Response, *, is_raw: bool = False, num_bytes: int | str | None = None) -> None:
        """Send status and headers of a server's answer.

        Args:
            is_raw: the body is sent as it came.
            num_bytes: of the body, if known.
        """
        self.has_started = True
        excluded = HOP_HEADERS if is_raw else HOP_HEADERS | {b"content-encoding"}
        headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in excluded]
        if num_bytes is not None:
            headers.append((b"content-length", str(num_bytes).encode()))
        await self._send({"type": "http.response.start", "status": answer.status_code, "headers": headers})

    async def relay(self, answer: httpx.Response) -> None:
        """Send a server's answer as it is."""
        await self.start(answer, is_raw=True, num_bytes=answer.headers.get("content-length"))
        async for chunk in answer.aiter_raw():
            await self.write(chunk)
        await self.end()

    async def write(self, data: bytes) -> None:
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def read_events(answer: httpx.Response) -> AsyncIterator[tuple[bytes, dict[str, Any]]]:
    """Yield server-sent events and their values.

    The value of the last event, `[DONE]`, is empty.
    """
    buffer = b""
    async for chunk in answer.aiter_bytes():
        *events, buffer = (buffer + chunk).split(_END)
        for event in events:
            yield event + _END, _value_of(event)
    if buffer:
        yield buffer, _value_of(buffer)


def _value_of(event: bytes) -> dict[str, Any]:
    try:
        value = json.loads(event.removeprefix(b"data:"))
    except ValueError:  # [DONE], or a comment
        return {}
    return value if isinstance(value, dict) else {}


class AnswerRecord:
    """Tokens that were generated, and what became of the plan.

    Args:
        hides_ids: the client did not ask for token ids.
    """

    def __init__(self, plan: PromptPlan, num_answers: int, workflow: str, *, hides_ids: bool) -> None:
        self._plan, self._num_answers, self._workflow, self._hides_ids = plan, num_answers, workflow, hides_ids
        self._ids: dict[int, list[int]] = defaultdict(list)  # of every answer
        self._is_finished, self._num_taken = False, 0
        self._has_other_prompt = False  # the server rendered the chat otherwise than /tokenize
        self.is_generating = False  # something was generated, so that no error of the plan can follow
        self.error: str | None = None

    def observe(self, value: dict[str, Any]) -> None:
        """Note an answer, or a part of it."""
        if "error" in value:
            self.error = json.dumps(value["error"])[:500]
        for choice in value.get("choices") or ():
            delta = choice.get("delta") or {}
            prompt_ids = choice.get("prompt_token_ids") or value.get("prompt_token_ids")
            self._has_other_prompt |= prompt_ids is not None and prompt_ids != self._plan.tokens
            self._ids[choice.get("index", 0)] += choice.get("token_ids") or ()
            reason = choice.get("finish_reason")
            if reason == "error":
                self.error = "finish_reason: error"
            is_part = (
                choice.get("token_ids") or choice.get("text") or any(delta[name] for name in delta if name != "role")
            )
            self.is_generating |= bool(reason or is_part)
            self._is_finished |= reason is not None

    def take_entries(self) -> list[UpstreamEntry]:
        """Return the entries that the server has stored since the last call."""
        if self._has_other_prompt or not self.is_generating or self.error is not None:
            return []
        stored = [part.entry for part in self._plan.computed]
        last = stored.pop()
        if self._is_finished:
            answer = self._ids[0][:-1] if self._num_answers == 1 else []  # the last token has no keys and values
            stored.append(UpstreamEntry(last.tokens + answer, last.lineage, last.name))
        new, self._num_taken = stored[self._num_taken :], len(stored)
        return new

    def unknown_names(self) -> list[str]:
        """Return the names of entries that may not be stored as planned."""
        is_as_planned = self.error is None and not self._has_other_prompt
        return [part.entry.name for part in self._plan.computed[self._num_taken if is_as_planned else 0 :]]

    def cleaned(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return a whole answer as the client expects it."""
        self._report(value)
        for item in (value, *value.get("choices", ())) if self._hides_ids else ():
            item.update(dict.fromkeys({"token_ids", "prompt_token_ids"} & item.keys()))
        return value | {"kv_transfer_params": None}

    def cleaned_event(self, event: bytes, value: dict[str, Any]) -> bytes:
        """Return an event of a stream as the client expects it.

        Nothing is left of one with token ids alone.
        """
        if value.get("usage"):
            self._report(value)
            event = b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + _END
        if not self._hides_ids:
            return event
        choices = value.get("choices") or ()
        has_ids_alone = choices and all(
            choice.get("delta") == {} and choice.get("finish_reason") is None and choice.get("logprobs") is None
            for choice in choices
        )
        return b"" if has_ids_alone else _TOKEN_IDS.sub(rb"\1null", event)

    def _report(self, value: dict[str, Any]) -> None:
        """Add the prompt's tokens by source to the usage of an answer."""
        usage, counts = value.get("usage"), self._plan.counts()
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            num_cached = max(details.get("cached_tokens") or 0, sum(counts.values()) - counts["computed_tokens"])
            usage["prompt_tokens_details"] = details | {"cached_tokens": num_cached}
            usage["choreography"] = {"reuse": "auto", "workflow": self._workflow, **counts}
