"""Server-sent events, and the response that streams them."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from json.encoder import encode_basestring_ascii
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Send

from ..api_errors import to_api_error

SSE_END = "data: [DONE]\n\n"

_PLACEHOLDER = "\0text\0"


def sse(data: Mapping[str, Any], event: str | None = None) -> str:
    """Return a server-sent event."""
    prefix = f"event: {event}\n" if event else ""
    return f"{prefix}data: {json.dumps(data)}\n\n"


class TextEvents:
    """Events that differ in one text: the rest is serialized once.

    Args:
        event: returns the event of an answer's index and a text.
    """

    def __init__(self, event: Callable[[int, str], str]) -> None:
        self._event = event
        self._parts: dict[int, tuple[str, str]] = {}  # before and after the text, by answer

    def event(self, index: int, text: str) -> str:
        parts = self._parts.get(index)
        if parts is None:
            start, _, end = self._event(index, _PLACEHOLDER).rpartition(json.dumps(_PLACEHOLDER))
            parts = self._parts[index] = start, end
        return f"{parts[0]}{encode_basestring_ascii(text)}{parts[1]}"


class EventStream(StreamingResponse):
    """Streaming response of server-sent events; an error becomes the last event.

    Args:
        first: event that was waited for, so that errors before it have a status of their own.
        events: the events after it.
    """

    def __init__(self, first: str, events: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._first, self._events = first, events

    async def stream_response(self, send: Send) -> None:
        """Send all events; called by the base class."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await send({"type": "http.response.body", "body": self._first.encode(), "more_body": True})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        except Exception as exc:
            event = sse(to_api_error(exc).body, "error")
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        finally:
            close: Callable[[], Any] | None = getattr(self._events, "aclose", None)
            if close is not None:
                await close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def stream_events(events: AsyncIterator[str]) -> EventStream:
    """Return a streaming response, or raise what precedes its first event."""
    return EventStream(await anext(events), events)
