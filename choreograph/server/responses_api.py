"""/v1/responses: items in place of messages, and responses that later requests continue."""

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic import ValidationError

from ..errors import InvalidRequestError
from .api_errors import explain_validation
from .chat_completions import ChoiceState, ParserOptions, logprob_entries
from .engine_thread import ChoiceUpdate
from .event_stream import sse
from .protocol import ChatCompletionRequest, ResponsesRequest
from .response_store import StoredResponse
from .service import RunningRequest

SHARED_FIELDS = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "structured_outputs", "choreography",
    "cache_salt", "extra_key", "priority", "session_id", "chat_template_kwargs", "skip_special_tokens",
    "parallel_tool_calls",
)  # fmt: skip

INCLUDE_LOGPROBS = "message.output_text.logprobs"

# fields of a chat that have another name here
FIELD_NAMES = {"messages": "input", "response_format": "text"}


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
            messages.append({"role": item["role"], "content": item.get("content")})
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


class ResponseAnswer:
    """Answer of one responses request, whole or streamed."""

    def __init__(
        self,
        body: ResponsesRequest,
        running: RunningRequest,
        parser_options: ParserOptions,
        messages: list[dict[str, Any]],
        tokenizer: Any,
    ) -> None:
        self._body, self._running, self._messages, self._tokenizer = body, running, messages, tokenizer
        self._logprobs: list[dict[str, Any]] = []  # of the content
        self._pending_logprobs: list[dict[str, Any]] = []  # of tokens that no delta has yet
        self._choice = ChoiceState(parser_options.create())
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        running.name_response(self._id, body.model)
        self._message_id, self._reasoning_id = f"msg_{uuid.uuid4().hex}", f"rs_{uuid.uuid4().hex}"

    def _response(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        body = self._body
        is_cut = status == "incomplete"
        return {
            "id": self._id,
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

    def stored(self, response: dict[str, Any], num_bytes: int) -> StoredResponse:
        """Return what a later request needs to continue this response.

        Args:
            num_bytes: of the request.
        """
        answer: dict[str, Any] = {"role": "assistant", "content": self._choice.content}
        if self._choice.tool_calls:
            answer["tool_calls"] = self._choice.tool_calls
        num_chars = len(self._choice.content) + len(self._choice.reasoning)
        return StoredResponse(response, [*self._messages, answer], num_bytes + 4 * num_chars)

    async def whole(self) -> dict[str, Any]:
        """Return the complete response."""
        async for updates in self._running.updates():
            for update in updates:
                self._feed(update)
        return self._complete()

    def _feed(self, update: ChoiceUpdate) -> list[dict[str, Any]]:
        """Parse an update; return deltas, those of content with their log-probabilities."""
        deltas = self._choice.feed(update)
        self._running.finish_reasons[update.index] = self._choice.finish_reason
        self._pending_logprobs += logprob_entries(self._tokenizer, update.logprobs, self._body.top_logprobs or 0)
        contents = [delta for delta in deltas if "content" in delta]
        for delta in contents:
            delta["logprobs"] = self._pending_logprobs if delta is contents[-1] else []
            self._logprobs += delta["logprobs"]
        if deltas:
            self._pending_logprobs = []
        return deltas

    def _complete(self) -> dict[str, Any]:
        output = self._output("completed")
        usage = self._running.usage()
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "choreography": usage["choreography"],
        }
        return self._response("incomplete" if self._choice.finish_reason == "length" else "completed", output, counts)

    def _output(self, status: str) -> list[dict[str, Any]]:
        choice, output = self._choice, list[dict[str, Any]]()
        if choice.reasoning:
            text = {"type": "reasoning_text", "text": choice.reasoning}
            output.append({"id": self._reasoning_id, "type": "reasoning", "summary": [], "content": [text]})
        if choice.content or not choice.tool_calls:
            output.append(self._message_item(status, choice.content))
        output += [_call_item(call, status) for call in choice.tool_calls]
        return output

    def _message_item(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_text_part(text, self._logprobs)]
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    async def events(self, on_complete: Any) -> AsyncIterator[str]:
        """Yield the server-sent events of a streamed response.

        Args:
            on_complete: called with the complete response before its last event.
        """
        number = 0

        def event(kind: str, **data: Any) -> str:
            nonlocal number
            number += 1
            return sse({"type": kind, "sequence_number": number - 1, **data}, kind)

        created = self._response("in_progress", [], None)
        is_open, index = False, 0  # of the message
        place: dict[str, Any] = {}
        is_first = True
        async for updates in self._running.updates():
            if is_first:
                yield event("response.created", response=created)
                yield event("response.in_progress", response=created)
                is_first = False
            for update in updates:
                for delta in self._feed(update):
                    if "content" in delta:
                        if not is_open:
                            is_open = True
                            index = int(bool(self._choice.reasoning))
                            place = {"item_id": self._message_id, "output_index": index, "content_index": 0}
                            item = self._message_item("in_progress", None)
                            yield event("response.output_item.added", output_index=index, item=item)
                            yield event("response.content_part.added", **place, part=_text_part("", []))
                        fields = {"delta": delta["content"], "logprobs": delta["logprobs"]}
                        yield event("response.output_text.delta", **place, **fields)
        response = self._complete()
        if is_open:
            text = self._choice.content
            yield event("response.output_text.done", **place, text=text, logprobs=self._logprobs)
            yield event("response.content_part.done", **place, part=_text_part(text, self._logprobs))
        for index, item in enumerate(response["output"]):
            if item["type"] != "message" or not is_open:
                yield event("response.output_item.added", output_index=index, item=item)
            if item["type"] == "function_call":
                ids = {"item_id": item["id"], "output_index": index}
                yield event("response.function_call_arguments.delta", **ids, delta=item["arguments"])
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield event("response.function_call_arguments.done", **ids, **done)
            yield event("response.output_item.done", output_index=index, item=item)
        on_complete(response)
        yield event(f"response.{response['status']}", response=response)


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _call_item(call: Mapping[str, Any], status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{call['id'].removeprefix('call_')}",
        "type": "function_call",
        "status": status,
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
    }
