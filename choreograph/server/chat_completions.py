"""/v1/chat/completions: preparation of requests, and answers whole or streamed."""

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import Request

from ..errors import InvalidRequestError
from ..outputs import TokenLogprob
from .agent_tracking import agent_step
from .chat_prompt import answer_key
from .engine_thread import ChoiceUpdate
from .event_stream import SSE_END, TextEvents, sse
from .output_parser import THINK_END, THINK_START, FunctionCall, OutputParser
from .protocol import (
    ChatCompletionRequest,
    NamedToolChoice,
    ResponseFormat,
    StructuredOutputs,
    check_stream_options,
    continues_last,
    tool_dicts,
)
from .scored_prompts import check_prompt_scoring, check_scored_size, encode, prompt_logprobs_of
from .service import GenerationSpec, InferenceService, RunningRequest, StreamUsage
from .structured import Constraint, choice_constraint, grammar_constraint, json_constraint, regex_constraint


def constraint_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> Constraint | None:
    """Return the grammar that a request asks for."""
    constraints: list[Constraint] = []
    if response_format is not None and response_format.type == "json_object":
        constraints.append(json_constraint(None))
    elif response_format is not None and response_format.json_schema is not None and response_format.type != "text":
        constraints.append(json_constraint(response_format.json_schema.schema_))
    if structured_outputs is not None:
        outputs = structured_outputs
        if outputs.json_object:
            constraints.append(json_constraint(None))
        elif outputs.json_ is not None:
            constraints.append(json_constraint(outputs.json_))
        elif outputs.regex is not None:
            constraints.append(regex_constraint(outputs.regex))
        elif outputs.choice is not None:
            constraints.append(choice_constraint(outputs.choice))
        elif outputs.grammar is not None:
            constraints.append(grammar_constraint(outputs.grammar))
    if len(constraints) > 1:
        raise InvalidRequestError("structured_outputs: give either response_format or structured_outputs")
    return constraints[0] if constraints else None


@dataclass(frozen=True)
class ParserOptions:
    """How the answers of a request are parsed."""

    tool_form: str | None  # of tool calls; None: no tools
    tool_names: frozenset[str]
    thinks: bool
    starts_thinking: bool
    continued: str = ""  # text of the message that the answer continues
    single_call: bool = False

    def create(self) -> OutputParser:
        return OutputParser(
            self.tool_form,
            self.tool_names,
            thinks=self.thinks,
            starts_thinking=self.starts_thinking,
            single_call=self.single_call,
        )

    def keys_of(self, text: str) -> list[str]:
        """Return what a client may send back of an answer."""
        parser = self.create()
        deltas = parser.feed(text) + parser.finish()
        content = "".join(delta.text for delta in deltas if delta.kind == "content")
        calls = [tool_call_dict(delta.call) for delta in deltas if delta.call is not None]
        contents = (answer_key(self.continued + content, calls), answer_key(self.continued + text, []))
        return list(dict.fromkeys(contents))


def tool_call_dict(call: FunctionCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def prepare(
    service: InferenceService,
    body: ChatCompletionRequest,
    http_request: Request,
    tenant: str,
    *,
    param: str = "messages",
) -> tuple[GenerationSpec, ParserOptions]:
    """Render the chat and check all options.

    Args:
        param: field that the messages come from, for errors.

    Raises:
        InvalidRequestError, ApiError: if the request cannot be served.
    """
    check_stream_options(body)
    service.renderer.check_size(body.messages, service.max_model_len, param)
    check_prompt_scoring(body)
    key, reuse, agent = service.workflow_key(http_request, tenant, body, body.choreography)
    if body.choreography is not None and body.choreography.prompt_schema is not None:
        raise InvalidRequestError("schema: prompts of a schema go to /v1/completions")
    tools, choice = tool_dicts(body.tools), body.tool_choice
    names = frozenset(tool["function"]["name"] for tool in tools)
    if choice not in (None, "none", "auto") and not tools:
        raise InvalidRequestError("tool_choice: give the tools that may be called")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise InvalidRequestError(f"tool_choice: no tool has the name {choice.function.name!r:.80}")
    constraint = constraint_of(body.response_format, body.structured_outputs)
    tool_form: str | None = service.tool_form if tools and choice != "none" else None
    if tools and choice not in (None, "none", "auto"):
        if constraint is not None:
            raise InvalidRequestError("tool_choice: a required call has its own grammar; leave out the other one")
        constraint, tool_form = _call_constraint(tools, choice), "llama3_json"
    continued = body.messages[-1].text if continues_last(body) else ""
    if body.add_generation_prompt is False and not continued:
        raise InvalidRequestError(
            "add_generation_prompt: false requires continue_final_message=true; set it, or leave this out"
        )
    prompt = service.renderer.prompt(
        body.turns,
        () if choice == "none" else tools,
        body.chat_template_kwargs,
        continue_final_message=bool(continued),
        with_segments=True,
        max_tokens=service.max_model_len,
        param=param,
    )
    if body.choreography is not None and (offsets := body.choreography.offsets) is not None:
        if len(offsets) != len(prompt.segments):
            raise InvalidRequestError(
                f"offsets: {len(offsets)} positions for {len(prompt.segments)} messages: give one for each, or null"
            )
        prompt = replace(prompt, offsets=tuple(offsets))
    requested = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    check_scored_size(service, body, [prompt])
    step = agent_step(agent, body.choreography, [prompt])
    max_tokens = service.max_tokens(requested, [prompt], param)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs: needs logprobs=true")
    seed = service.random_seed() if body.seed is None else body.seed
    sampling = body.sampling(max_tokens, (body.top_logprobs or 0) if body.logprobs else None, seed)
    has_opened = prompt.header_text.rstrip().endswith(THINK_START) or THINK_START in continued.rpartition(THINK_END)[2]
    starts_thinking = service.thinks and has_opened
    single_call = body.parallel_tool_calls is False
    parser_options = ParserOptions(tool_form, names, service.thinks, starts_thinking, continued, single_call)
    spec = GenerationSpec(
        key,
        reuse,
        [prompt],
        sampling,
        body.n or 1,
        agent,
        constraint,
        service.end_of_thinking if starts_thinking else None,
        parser_options.keys_of,
        body.priority or 0,
        body.repair,
        body.max_kl,
        steps=step.steps,
        fixed_tokens=step.fixed_tokens,
    )
    return spec, parser_options


def _call_constraint(tools: list[Mapping[str, Any]], choice: Any) -> Constraint:
    """Return the grammar of one call of the allowed tools."""
    functions = [tool["function"] for tool in tools]
    if isinstance(choice, NamedToolChoice):
        functions = [function for function in functions if function["name"] == choice.function.name]
    calls: list[dict[str, Any]] = []
    definitions: dict[str, dict[str, Any]] = {}  # of all functions: references start at the root of the grammar
    for function in functions:
        arguments = dict(function.get("parameters") or {"type": "object"})
        for key in ("$defs", "definitions"):
            own = arguments.pop(key, None)
            for name, schema in own.items() if isinstance(own, dict) else ():
                if definitions.setdefault(key, {}).setdefault(name, schema) != schema:
                    raise InvalidRequestError(f"tools: {key}/{name:.80} differs between functions: rename one")
        if (reference := _undefined_reference(function.get("parameters"))) is not None:
            name = function["name"]
            raise InvalidRequestError(f"tools: {reference!r} in {name:.80} is not supported: move the schema to $defs")
        properties = {"name": {"const": function["name"]}, "arguments": arguments}
        required = ["name", "arguments"]
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    return json_constraint({**definitions, **(calls[0] if len(calls) == 1 else {"anyOf": calls})})


def _undefined_reference(schema: Any) -> str | None:
    """Return a reference to anything but a definition, or None."""
    if isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            if not reference.startswith(("#/$defs/", "#/definitions/")):
                return reference
        schema = list(schema.values())
    parts = schema if isinstance(schema, list) else ()
    return next(filter(None, map(_undefined_reference, parts)), None)


@dataclass
class ChoiceState:
    """Parsed answer so far."""

    parser: OutputParser
    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # not sent yet
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def feed(self, update: ChoiceUpdate) -> list[dict[str, Any]]:
        """Parse an update; return OpenAI's deltas."""
        is_last = update.finish_reason is not None
        deltas = self.parser.feed(update.text) + (self.parser.finish() if is_last else [])
        self.token_ids += update.token_ids
        result: list[dict[str, Any]] = []
        for delta in deltas:
            if delta.call is not None:
                call = tool_call_dict(delta.call)
                result.append({"tool_calls": [{"index": len(self.tool_calls), **call}]})
                self.tool_calls.append(call)
            elif delta.kind == "reasoning":
                self.reasoning += delta.text
                result.append({"reasoning_content": delta.text})
            else:
                self.content += delta.text
                result.append({"content": delta.text})
        if is_last:
            self.finish_reason = "tool_calls" if self.tool_calls else update.finish_reason
        return result


class ChatAnswer:
    """Answer of one chat request, whole or streamed."""

    def __init__(
        self,
        service: InferenceService,
        body: ChatCompletionRequest,
        running: RunningRequest,
        parser_options: ParserOptions,
    ) -> None:
        self._service, self._body, self._running = service, body, running
        self._choices = [ChoiceState(parser_options.create()) for _ in range(running.num_choices)]
        self._has_logprobs, self._top = bool(body.logprobs), body.top_logprobs or 0
        self._prompt_ids = {"prompt_token_ids": running.spec.prompts[0].tokens} if body.return_token_ids else {}
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
        running.name_response(self._head["id"], body.model)

    async def whole(self) -> dict[str, Any]:
        """Return the response of a request that does not stream."""
        async for updates in self._running.updates():
            for update in updates:
                choice = self._choices[update.index]
                choice.logprobs += self._logprobs(update.logprobs)
                choice.feed(update)
                self._running.finish_reasons[update.index] = choice.finish_reason
        choices = []
        for index, choice in enumerate(self._choices):
            content = choice.content if choice.content or not choice.tool_calls else None
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if choice.reasoning and self._body.include_reasoning is not False:
                message["reasoning_content"] = choice.reasoning
            if choice.tool_calls:
                message["tool_calls"] = choice.tool_calls
            entry: dict[str, Any] = {"index": index, "message": message, "finish_reason": choice.finish_reason}
            entry["logprobs"] = {"content": choice.logprobs, "refusal": None} if self._has_logprobs else None
            if self._body.return_token_ids:
                entry["token_ids"] = choice.token_ids
            choices.append(entry)
        usage = self._running.usage()
        scores = partial(prompt_logprobs_of, self._body, self._running, self._text_of)
        fields = self._prompt_ids | await encode(self._service, self._running, scores)
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage, **fields}

    async def events(self) -> AsyncIterator[str]:
        """Yield the server-sent events of a streamed request."""
        usage = StreamUsage(self._running, self._body.stream_options)
        is_plain = not (self._has_logprobs or self._body.return_token_ids or usage.is_continuous)
        text_events = TextEvents(lambda index, text: self._chunk(index, {"content": text}, usage.fields(index)))
        is_first = True
        async for updates in self._running.updates():
            events = []
            if is_first:
                for index in range(len(self._choices)):
                    first = {**usage.fields(index), **self._prompt_ids}
                    events.append(self._chunk(index, {"role": "assistant", "content": ""}, first))
                is_first = False
            for update in updates:
                choice = self._choices[update.index]
                if is_plain and update.finish_reason is None and choice.parser.is_transparent:
                    if update.text:
                        events.append(text_events.event(update.index, update.text))
                    continue
                usage.add(update)
                choice.logprobs += self._logprobs(update.logprobs)
                for delta in choice.feed(update):
                    if "reasoning_content" in delta and self._body.include_reasoning is False:
                        continue
                    events.append(self._chunk(update.index, delta, usage.fields(update.index)))
                if choice.finish_reason is not None:
                    self._running.finish_reasons[update.index] = choice.finish_reason
                    events.append(self._chunk(update.index, {}, usage.fields(update.index), choice.finish_reason))
            if events:
                yield "".join(events)
        if usage.is_included:
            yield sse({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._running.usage()})
        yield SSE_END

    def _chunk(
        self, index: int, delta: Mapping[str, Any], fields: Mapping[str, Any], finish_reason: str | None = None
    ) -> str:
        choice, state = {"index": index, "delta": delta, "finish_reason": finish_reason}, self._choices[index]
        choice["logprobs"] = None
        if self._has_logprobs and state.logprobs:
            choice["logprobs"] = {"content": state.logprobs, "refusal": None}
            state.logprobs = []
        if self._body.return_token_ids and state.token_ids:
            choice["token_ids"], state.token_ids = state.token_ids, []
        return sse({**self._head, "object": "chat.completion.chunk", "choices": [choice], **fields})

    def _text_of(self, token: int) -> str:
        text: str = token_logprob(self._service.engine.tokenizer, token, 0.0)["token"]
        return text

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        keeps_special = self._body.skip_special_tokens is False
        return logprob_entries(self._service.engine.tokenizer, logprobs, self._top, keeps_special)


def logprob_entries(
    tokenizer: Any, logprobs: Sequence[TokenLogprob], num_top: int, keeps_special: bool = False
) -> list[dict[str, Any]]:
    """Return log-probabilities in OpenAI's form, of special tokens if they are kept."""
    result = []
    for item in logprobs:
        if not (keeps_special or tokenizer.decode([item.token], skip_special_tokens=True)):
            continue
        top = sorted(item.top.items(), key=lambda pair: -pair[1])[:num_top]
        entry = token_logprob(tokenizer, item.token, item.logprob)
        result.append({**entry, "top_logprobs": [token_logprob(tokenizer, *pair) for pair in top]})
    return result


def token_logprob(tokenizer: Any, token: int, logprob: float) -> dict[str, Any]:
    """Return one token and its log-probability."""
    text = tokenizer.decode([token])
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode("utf-8", "replace"))}
