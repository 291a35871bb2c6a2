"""/v1/responses: items in place of messages, and responses that later requests continue."""

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from ...errors import InvalidRequestError
from ..api_errors import ApiError, explain_validation
from ..structured.output_parser import FunctionCall
from .answer_loop import AnswerEvent, AnswerLoop, ParsedAnswer
from .event_stream import sse
from .protocol import ChatCompletionRequest, ResponsesRequest
from .token_text import logprob_entry

# fields of a chat that mean the same here
SHARED_FIELDS = ChatCompletionRequest.model_fields.keys() & ResponsesRequest.model_fields.keys() - {
    *("stream", "stream_options", "return_token_ids", "tools", "tool_choice", "top_logprobs")
}

INCLUDE_LOGPROBS = "message.output_text.logprobs"

# fields of a chat that have another name here
FIELD_NAMES = {"messages": "input", "response_format": "text"}


@dataclass(frozen=True)
class StoredResponse:
    """Response that a later request can continue."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]  # of the chat up to its answer, without instructions
    num_bytes: int  # of the request and its answer


@dataclass
class _TenantResponses:
    """Responses of one tenant, the oldest first."""

    by_id: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def pop(self, response_id: str) -> None:
        self.num_bytes -= self.by_id.pop(response_id).num_bytes


class ResponseStore:
    """Stored responses by tenant and id; a tenant's oldest are dropped.

    Args:
        max_responses: of one tenant.
        max_bytes: of one tenant's requests and answers.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._tenants: dict[str, _TenantResponses] = {}

    def add(self, tenant: str, stored: StoredResponse) -> None:
        responses = self._tenants.setdefault(tenant, _TenantResponses())
        responses.by_id[stored.response["id"]] = stored
        responses.num_bytes += stored.num_bytes
        while len(responses.by_id) > self._max_responses or responses.num_bytes > self._max_bytes:
            responses.pop(next(iter(responses.by_id)))

    def get(self, tenant: str, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a response, or raise an ApiError of status 404."""
        responses = self._tenants.get(tenant)
        stored = None if responses is None else responses.by_id.get(response_id)
        if stored is None:
            raise ApiError(404, f"Response with id '{response_id}' not found.", param=param, code="not_found")
        return stored

    def remove(self, tenant: str, response_id: str) -> None:
        self.get(tenant, response_id)
        self._tenants[tenant].pop(response_id)


def to_chat(
    body: ResponsesRequest, previous: StoredResponse | None
) -> tuple[ChatCompletionRequest, list[dict[str, Any]]]:
    """Return the chat request, and its messages without instructions."""
    if body.background:
        raise InvalidRequestError("background: responses are computed at once; leave it out")
    if body.conversation is not None or body.prompt is not None:
        raise InvalidRequestError("conversation: the server stores responses; use previous_response_id")
    messages = [*(previous.messages if previous else []), *_messages_of(body.input)]
    if not messages:
        raise InvalidRequestError("input: is empty: give at least one item")
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    options: dict[str, Any] = {name: getattr(body, name) for name in SHARED_FIELDS}
    options |= {
        "messages": instructions + messages,
        "tools": [_tool_of(tool) for tool in body.tools or ()] or None,
        "tool_choice": _choice_of(body.tool_choice),
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _format_of(body.text),
        "logprobs": bool(body.top_logprobs) or INCLUDE_LOGPROBS in (body.include or ()),
        "top_logprobs": body.top_logprobs,
    }
    try:
        return ChatCompletionRequest.model_validate(options), messages
    except ValidationError as exc:
        path, kind, reason = explain_validation(exc.errors(), options)
        name = FIELD_NAMES.get(str(path[0]), path[0])
        problem = f"{path[-1]} is missing" if kind == "missing" else reason
        raise InvalidRequestError(f"{name}: {problem}") from None


def _messages_of(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return chat messages of input items, with calls in assistant messages."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message" and "role" in item:
            _append_message(messages, item["role"], item.get("content"))
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind != "reasoning":  # reasoning of earlier answers is not part of a prompt
            raise InvalidRequestError(
                f"input: item of type {kind!r:.60}: use messages, function calls and their outputs"
            )
    return messages


def _append_message(messages: list[dict[str, Any]], role: Any, content: Any) -> None:
    """Append a message.

    A text of the assistant behind its calls belongs to the same answer.
    """
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("tool_calls"):
        parts = [part for text in (last["content"], content) for part in _parts(text)]
        messages[-1] = last | {"content": parts}
    else:
        messages.append({"role": role, "content": content})


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [] if content is None else [{"type": "output_text", "text": content}]


def _tool_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequestError(f"tools: type {tool.get('type')!r:.60}: the server calls functions alone")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice_of(choice: Any) -> Any:
    if isinstance(choice, dict):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format_of(text: Mapping[str, Any] | None) -> Any:
    form = (text or {}).get("format")
    if not isinstance(form, dict) or form.get("type") in (None, "text"):
        return None
    if form["type"] == "json_schema":
        return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
    return {"type": form["type"]}


class ResponseEncoder:
    """The answer of one responses request as a list of output items.

    Items are in the order in which the model wrote them: reasoning, texts and calls.

    Args:
        messages: of the chat, without instructions.
        keep: called with the complete response, for later requests; None: it is not stored.
        num_bytes: of the request.
    """

    is_plain = False

    def __init__(
        self,
        loop: AnswerLoop,
        body: ResponsesRequest,
        messages: list[dict[str, Any]],
        keep: Callable[[StoredResponse], object] | None = None,
        num_bytes: int = 0,
    ) -> None:
        self.id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._loop, self._body, self._answer = loop, body, loop.answers[0]
        self._messages, self._keep, self._num_bytes = messages, keep, num_bytes
        self._num_top = body.top_logprobs or 0
        self._output: list[dict[str, Any]] = []  # items; the last one may be open
        self._is_open = False
        self._num_events = 0

    def whole(self, events: Sequence[tuple[ParsedAnswer, AnswerEvent]]) -> dict[str, Any]:
        """Return the complete response."""
        for _, event in events:
            self._write(event)
        return self._complete()

    def start(self) -> str:
        """Return the events of a response without output."""
        created = self._response("in_progress", [], None)
        return "".join(self._event(f"response.{kind}", response=created) for kind in ("created", "in_progress"))

    def write(self, answer: ParsedAnswer, event: AnswerEvent, *, is_first: bool) -> str:
        """Append a part of the answer to the output; return its events."""
        return "".join(self._write(event))

    def end(self) -> str:
        """Return the event of the complete response."""
        response = self._complete()
        return self._event(f"response.{response['status']}", response=response)

    def _response(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        body = self._body
        is_cut = status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _complete(self) -> dict[str, Any]:
        """Return the complete response, after storing it."""
        usage = self._loop.usage()
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
            "choreography": usage["choreography"],
        }
        response = self._response("incomplete" if self._is_cut else "completed", self._output, counts)
        if self._keep is not None:
            answer = self._answer
            message: dict[str, Any] = {"role": "assistant", "content": answer.content}
            if answer.calls:
                message["tool_calls"] = answer.tool_calls
            num_chars = len(answer.content) + len(answer.reasoning) + sum(len(call.arguments) for call in answer.calls)
            num_bytes = self._num_bytes + 4 * num_chars
            self._keep(StoredResponse(response, [*self._messages, message], num_bytes))
        return response

    @property
    def _is_cut(self) -> bool:
        return self._answer.finish_reason == "length"

    def _event(self, kind: str, **data: Any) -> str:
        self._num_events += 1
        return sse({"type": kind, "sequence_number": self._num_events - 1, **data}, kind)

    # -- the output, and its events -------------------------------------------------------------------------

    def _write(self, event: AnswerEvent) -> list[str]:
        """Append an event of the answer to the output; return its events."""
        if event.call is not None:
            return [*self._close(), *self._write_call(event.call)]
        if event.kind == "end":
            # an answer without text has an empty one, unless it is a call
            opened = [] if self._answer.calls or self._answer.content else [*self._close(), *self._open("message")]
            return [*opened, *self._close()]
        kind = "reasoning" if event.kind == "reasoning" else "message"
        events = []
        if not (self._is_open and self._output[-1]["type"] == kind):
            events = [*self._close(), *self._open(kind)]
        part = self._output[-1]["content"][0]
        part["text"] += event.text
        fields: dict[str, Any] = {"delta": event.text}
        if kind == "message":
            entries = [logprob_entry(token, self._loop.token_bytes, self._num_top) for token in event.tokens]
            part["logprobs"] += entries
            fields["logprobs"] = entries
        return [*events, self._event(f"response.{part['type']}.delta", **self._place, **fields)]

    @property
    def _place(self) -> dict[str, Any]:
        """Fields that say where an event of the last item's text belongs."""
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}

    def _open(self, kind: str) -> list[str]:
        """Start an item with an empty text."""
        item: dict[str, Any] = {"id": f"rs_{uuid.uuid4().hex}", "type": kind, "summary": [], "status": "in_progress"}
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            item = {"id": f"msg_{uuid.uuid4().hex}", "type": kind, "role": "assistant", "status": "in_progress"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._output.append(item | {"content": []})
        self._is_open = True
        events = [
            self._event("response.output_item.added", output_index=len(self._output) - 1, item=self._output[-1]),
            self._event("response.content_part.added", **self._place, part=part),
        ]
        self._output[-1]["content"].append(part)
        return events

    def _close(self) -> list[str]:
        """End the text of the last item, if it is open."""
        if not self._is_open:
            return []
        self._is_open, item = False, self._output[-1]
        item["status"] = "incomplete" if self._is_cut else "completed"
        part = item["content"][0]
        text = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            self._event(f"response.{part['type']}.done", **self._place, **text),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=len(self._output) - 1, item=item),
        ]

    def _write_call(self, call: FunctionCall) -> list[str]:
        """Append a call, which is announced without its arguments."""
        item = {
            "id": f"fc_{call.id.removeprefix('call_')}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
        }
        index = len(self._output)
        place = {"item_id": item["id"], "output_index": index}
        done = item | {"status": "completed", "arguments": call.arguments}
        self._output.append(done)
        kind = "response.function_call_arguments"
        return [
            self._event("response.output_item.added", output_index=index, item=item),
            self._event(f"{kind}.delta", **place, delta=call.arguments),
            self._event(f"{kind}.done", **place, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=index, item=done),
        ]
