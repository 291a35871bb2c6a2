"""/v1/chat/completions: preparation of requests, and the encoder of their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request

from ...errors import InvalidRequestError
from ...sampling_params import SamplingParams
from ..reuse.agent_tracking import agent_step
from ..running_request import GenerationSpec
from ..service import InferenceService
from ..structured.constraints import (
    CALL_FORMS,
    Constraint,
    after_reasoning,
    call_constraint,
    choice_constraint,
    grammar_constraint,
    json_constraint,
    regex_constraint,
)
from ..structured.output_parser import THINK_END, THINK_START
from .answer_loop import AnswerEvent, AnswerLoop, AnswerOptions, ParsedAnswer, tool_call_dict
from .chat_prompt import MAX_SEGMENTS
from .choice_encoder import ChoiceEncoder
from .protocol import (
    ChatCompletionRequest,
    NamedToolChoice,
    ResponseFormat,
    StructuredOutputs,
    check_stream_options,
    continues_last,
    tool_dicts,
)
from .scored_prompts import check_prompt_scoring, check_scored_size
from .token_text import PlacedToken, logprob_entry


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


def end_with_grammar(service: InferenceService, sampling: SamplingParams) -> SamplingParams:
    """Let the end of a grammar end the answer, also with `ignore_eos`."""
    end = service.engine.tokenizer.eos_token_id  # allowed where the grammar is complete
    stop_token_ids = (*sampling.stop_token_ids, *([] if end is None else [end]))
    return replace(sampling, ignore_eos=False, stop_token_ids=stop_token_ids)


def prepare(
    service: InferenceService,
    body: ChatCompletionRequest,
    http_request: Request,
    tenant: str,
    *,
    param: str = "messages",
) -> tuple[GenerationSpec, AnswerOptions]:
    """Render the chat and check all options.

    Args:
        param: field that the messages come from, for errors.

    Raises:
        InvalidRequestError, ApiError: if the request cannot be served.
    """
    check_stream_options(body)
    service.token_bytes.load()
    service.renderer.check_size(body.messages, service.max_model_len, param)
    check_prompt_scoring(body)
    key, reuse, agent = service.workflow_key(http_request, tenant, body, body.choreography)
    if body.choreography is not None and body.choreography.prompt_schema is not None:
        raise InvalidRequestError("schema: prompts of a schema go to /v1/completions")
    tools, choice = tool_dicts(body.tools), body.tool_choice
    names = frozenset(tool["function"]["name"] for tool in tools)
    is_required = choice not in (None, "none", "auto")
    if is_required and not tools:
        raise InvalidRequestError("tool_choice: give the tools that may be called")
    constraint = _constraint(service, body, tools)
    tool_form: str | None = service.tool_form if tools and choice != "none" else None
    if is_required:
        tool_form = "llama3_json"  # a call without tags
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
    if len(prompt.offsets) > MAX_SEGMENTS:
        raise InvalidRequestError(f"offsets: {len(prompt.offsets)} messages: give positions to at most {MAX_SEGMENTS}")
    if reuse == "messages" and not prompt.offsets:
        prompt = service.fit_pages(prompt.limit_segments(), max_tokens or 1)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs: needs logprobs=true")
    seed = service.random_seed() if body.seed is None else body.seed
    sampling = body.sampling(max_tokens, (body.top_logprobs or 0) if body.logprobs else None, seed)
    has_opened = prompt.header_text.rstrip().endswith(THINK_START) or THINK_START in continued.rpartition(THINK_END)[2]
    starts_thinking = service.thinks and has_opened
    if constraint is not None:
        constraint = after_reasoning(constraint) if starts_thinking else constraint
        sampling = end_with_grammar(service, sampling)
    single_call = body.parallel_tool_calls is False
    options = AnswerOptions(
        tool_form, names, service.thinks, starts_thinking, single_call, continued, bool(body.return_token_ids)
    )
    spec = GenerationSpec(
        key,
        reuse,
        [prompt],
        sampling,
        body.n or 1,
        constraint=constraint,
        keys_of=options.keys_of,
        **step._asdict(),
        **body.engine_options,
    )
    return spec, options


def _constraint(
    service: InferenceService, body: ChatCompletionRequest, tools: Sequence[Mapping[str, Any]]
) -> Constraint | None:
    """Return the grammar of calls, of text or of either."""
    choice, functions = body.tool_choice, [tool["function"] for tool in tools]
    if isinstance(choice, NamedToolChoice):
        functions = [function for function in functions if function["name"] == choice.function.name]
        if not functions:
            raise InvalidRequestError(f"tool_choice: no tool has the name {choice.function.name!r:.80}")
    constraint = constraint_of(body.response_format, body.structured_outputs)
    if not functions or choice == "none":
        return constraint
    if choice not in (None, "auto"):
        if body.structured_outputs is not None:
            raise InvalidRequestError("tool_choice: a required call has its own grammar; leave out structured_outputs")
        return call_constraint(functions, CALL_FORMS["required"], is_single=True)
    if constraint is None or body.structured_outputs is not None or service.tool_form is None:
        return constraint
    is_single = body.parallel_tool_calls is False
    return call_constraint(functions, CALL_FORMS[service.tool_form], is_single=is_single, answer=constraint)


class ChatEncoder(ChoiceEncoder):
    """Answers of one chat in OpenAI's JSON."""

    def __init__(self, loop: AnswerLoop, body: ChatCompletionRequest) -> None:
        super().__init__(loop, body, "chatcmpl", "chat.completion", "chat.completion.chunk")
        self._num_top, self._has_reasoning = body.top_logprobs or 0, body.include_reasoning is not False

    def whole(self, events: Sequence[tuple[ParsedAnswer, AnswerEvent]]) -> dict[str, Any]:
        """Return the response of a request that does not stream."""
        first = self._loop.answers[0]
        response = self._response([self._choice(answer) for answer in self._loop.answers])
        return {**response, **self._prompt_ids(first), **self._prompt_logprobs(first)}

    def _choice(self, answer: ParsedAnswer) -> dict[str, Any]:
        content = answer.content if answer.content or not answer.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning and self._has_reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = answer.tool_calls
        choice: dict[str, Any] = {"index": answer.index, "message": message, "finish_reason": answer.finish_reason}
        choice["logprobs"] = self._logprobs(answer.tokens) if self._loop.has_logprobs else None
        return choice | ({"token_ids": answer.take_token_ids()} if self._returns_ids else {})

    def start(self) -> str:
        """Return an event of every answer with its role."""
        delta = {"role": "assistant", "content": ""}
        choices = [(answer, _chunk(answer, delta)) for answer in self._loop.answers]
        return "".join(self._event(answer, choice, **self._prompt_ids(answer)) for answer, choice in choices)

    def write(self, answer: ParsedAnswer, event: AnswerEvent, *, is_first: bool) -> str:
        """Return the event of a part of an answer."""
        if event.kind == "reasoning" and not self._has_reasoning:
            return ""
        choice = _chunk(answer, _delta(answer, event))
        if event.kind == "end":
            choice["finish_reason"] = answer.finish_reason
        if event.tokens:
            choice["logprobs"] = self._logprobs(event.tokens)
        if self._returns_ids and (token_ids := answer.take_token_ids()):
            choice["token_ids"] = token_ids
        return self._event(answer, choice)

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        entries = [logprob_entry(token, self._loop.token_bytes, self._num_top) for token in tokens]
        return {"content": entries, "refusal": None}


def _chunk(answer: ParsedAnswer, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": answer.index, "delta": delta, "finish_reason": None, "logprobs": None}


def _delta(answer: ParsedAnswer, event: AnswerEvent) -> dict[str, Any]:
    """Return an event as OpenAI's delta."""
    if event.call is not None:
        return {"tool_calls": [{"index": len(answer.calls) - 1, **tool_call_dict(event.call)}]}
    if event.kind == "end":
        return {}
    return {"reasoning_content" if event.kind == "reasoning" else "content": event.text}
