"""Requests of the HTTP interface, with OpenAI's and vLLM's field names."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationInfo, field_validator, model_validator

from ..engine.labels import OnLeak
from ..errors import InvalidRequestError
from ..sampling_params import SamplingParams
from .server_config import ReuseMode

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "skip_special_tokens",
)

MAX_TOP_LOGPROBS = 20

MAX_ARGUMENT_DEPTH = 64  # of nested values in the arguments of a call; deeper ones stay text

REASONING_PARTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")


class _Body(BaseModel):
    """Body in which unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class _Part(BaseModel):
    """Part of a body in which fields of newer clients are ignored."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)


LabelNames = list[Annotated[str, Field(min_length=1, max_length=256)]]


class ChoreographyOptions(_Body):
    """Reuse of messages that are not a prefix."""

    reuse: ReuseMode | None = None  # None: the server's default
    workflow: Annotated[str, Field(max_length=256)] | None = None  # requests of one workflow share messages
    agent: Annotated[str, Field(max_length=256)] | None = None  # name of the caller, for reports
    repair: Annotated[float, Field(ge=0, le=1)] | None = None  # share of reused tokens to compute again
    # divergence from prefix mode to stay within, nats a token; None: the server's default
    max_kl: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    labels: LabelNames = Field(default_factory=list, max_length=64)
    clearance: Annotated[LabelNames, Field(max_length=64)] | None = None  # other labels whose messages may be reused
    on_leak: OnLeak | None = None  # of messages with other labels; None: encode their text again
    # of every message, its first position; None: after the message before it
    offsets: list[Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None] | None = None
    # of /v1/completions: the prompt is PML and imports modules of this schema
    prompt_schema: Annotated[str | None, Field(alias="schema", max_length=256)] = None


class StreamOptions(_Part):
    """Options of streamed answers."""

    include_usage: bool | None = False  # end with a chunk of token counts
    continuous_usage_stats: bool | None = False  # with include_usage, cumulative counts in every chunk


class TextPart(_Part):
    """Part of a message's content; only text is accepted."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(_Part):
    """Function and arguments of a call."""

    name: str
    arguments: str | dict[str, JsonValue] | None = "{}"


class ToolCall(_Part):
    """Call of a tool in an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Part):
    """Message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """Text of the content."""
        if not isinstance(self.content, list):
            return self.content or ""
        return "".join(part.text or part.refusal or "" for part in self.content)

    @field_validator("content", mode="before")
    @classmethod
    def _drop_reasoning(cls, content: object, info: ValidationInfo) -> object:
        """Leave out the reasoning of earlier answers, as clients store what other servers gave them."""
        if info.data.get("role") != "assistant" or not isinstance(content, list):
            return content
        is_reasoning = (isinstance(part, dict) and part.get("type") in REASONING_PARTS for part in content)
        # an empty text keeps the places of the other parts, which errors name
        return [{"type": "text"} if left_out else part for left_out, part in zip(is_reasoning, content, strict=True)]

    @field_validator("content")
    @classmethod
    def _check_parts(cls, content: object) -> object:
        for part in content if isinstance(content, list) else ():
            if part.type not in ("text", "input_text", "output_text", "refusal", "summary_text"):
                raise ValueError(f"content part of type {part.type!r}: the model reads text alone")
        return content


class FunctionDefinition(_Part):
    """Function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(_Part):
    """Tool that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(_Part):
    """Name of a function."""

    name: str


class NamedToolChoice(_Part):
    """Tool that the model has to call."""

    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class JsonSchemaFormat(_Part):
    """JSON Schema of an answer."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, JsonValue] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Part):
    """Form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("json_schema: give an object with a schema")
        return self


class StructuredOutputs(_Part):
    """Grammar of an answer; exactly one of the fields."""

    json_: dict[str, JsonValue] | bool | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "StructuredOutputs":
        values = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in values) != 1:
            raise ValueError("give exactly one of json, json_object, regex, choice and grammar")
        return self


class _GenerationBody(_Body):
    """Fields that all requests for answers have."""

    model: str
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    structured_outputs: StructuredOutputs | None = None
    choreography: ChoreographyOptions | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None  # separates the cache within a tenant
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None  # lower numbers first
    extra_key: Annotated[str, Field(max_length=1024)] | None = None  # SGLang's name of the salt
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    # of vLLM and SGLang, accepted with their default alone
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    return_tokens_as_token_ids: Literal[False] | None = None
    bad_words: Annotated[list[str], Field(max_length=0)] | None = None
    allowed_token_ids: None = None
    logprob_token_ids: None = None
    prompt_logprobs: None = None
    truncate_prompt_tokens: None = None
    thinking_token_budget: None = None
    input_ids: None = None
    # accepted for clients of other servers, without effect
    length_penalty: float | None = None  # of a beam search
    user: str | None = None
    metadata: dict[str, JsonValue] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: JsonValue = None
    request_id: str | None = None
    rid: str | list[str] | None = None
    session_id: str | None = None
    session_params: JsonValue = None
    nvext: JsonValue = None
    vllm_xargs: JsonValue = None
    kv_transfer_params: JsonValue = None
    mm_processor_kwargs: JsonValue = None

    @property
    def salt(self) -> str:
        """What separates the cache within a tenant."""
        return json.dumps([self.cache_salt, self.extra_key]) if self.extra_key else self.cache_salt or ""

    @property
    def repair(self) -> float | None:
        """Share of reused tokens to compute again; None for none."""
        return None if self.choreography is None else self.choreography.repair

    @property
    def max_kl(self) -> float | None:
        """Divergence to stay within, nats a token; None for the server's."""
        return None if self.choreography is None else self.choreography.max_kl

    def sampling(self, max_tokens: int | None, logprobs: int | None, seed: int) -> SamplingParams:
        """Return the sampling parameters of one answer.

        Raises:
            SamplingError: if a parameter is out of range.
        """
        options: dict[str, Any] = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        options = {name: value for name, value in options.items() if value is not None}
        options["stop"] = tuple(text for text in _as_list(options.pop("stop", ())) if text)
        if "logit_bias" in options:
            options["logit_bias"] = {_token_id(token): bias for token, bias in options["logit_bias"].items()}
        return SamplingParams(**options | {"max_tokens": max_tokens, "logprobs": logprobs, "seed": seed})


def _as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _token_id(text: str) -> int | str:
    """Return a token id; other keys unchanged, which `SamplingParams` rejects."""
    return int(text) if text.isdecimal() and len(text) < 20 else text


class ChatCompletionRequest(_GenerationBody):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    n: Annotated[int, Field(ge=1)] | None = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # instead of a new answer
    include_reasoning: bool | None = True
    # accepted with their default alone
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    chat_template: None = None
    documents: None = None
    parallel_tool_calls: bool | None = None  # False: one call an answer
    # accepted without effect
    store: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    prediction: JsonValue = None

    @property
    def turns(self) -> list[dict[str, Any]]:
        """Messages as chat templates read them."""
        return [as_turn(message) for message in self.messages]


def as_turn(message: ChatMessage) -> dict[str, Any]:
    """Return a message as chat templates read it."""
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    turn: dict[str, Any] = {"role": role, "content": message.text}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": parse_arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            turn[name] = getattr(message, name)
    return turn


def check_stream_options(body: "ChatCompletionRequest | CompletionRequest") -> None:
    """Raise an error for `stream_options` without `stream`."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options: requires stream=true; set it, or leave stream_options out")


def continues_last(body: "ChatCompletionRequest | TokenizeRequest") -> bool:
    """Return whether the last message is continued, instead of a new answer.

    Raises:
        InvalidRequestError: if the chat cannot be continued.
    """
    if not body.continue_final_message:
        return False
    if body.add_generation_prompt:
        raise InvalidRequestError("continue_final_message: set add_generation_prompt to false, or leave it out")
    last = body.messages[-1] if body.messages else None
    if last is None or last.role != "assistant" or not last.text.strip() or last.tool_calls:
        raise InvalidRequestError("continue_final_message: end with a text of the assistant, or leave it out")
    return True


def parse_arguments(arguments: Any) -> Any:
    """Return the arguments of a call, as an object if possible.

    Clients send no arguments in several forms. What is not JSON, or nested too deeply for templates, stays text.
    """
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments, parse_constant=_refuse_number, parse_float=_finite_float)
    except (ValueError, RecursionError):
        return arguments
    return arguments if _is_deep(value) else value


def _refuse_number(text: str) -> float:
    raise ValueError(text)  # NaN and Infinity


def _finite_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_ARGUMENT_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


class SchemaRequest(_Body):
    """Body of PUT /v1/schemas/{name}."""

    pml: str  # a schema in Prompt Markup Language


class CompletionRequest(_GenerationBody):
    """Body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    n: Annotated[int, Field(ge=1)] | None = 1
    best_of: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = False
    suffix: str | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts of the request."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts: Any = [self.prompt] if self.prompt and isinstance(self.prompt[0], int) else self.prompt
        return list(prompts)


class ResponsesRequest(_GenerationBody):
    """Body of /v1/responses."""

    input: str | list[dict[str, JsonValue]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, JsonValue]] | None = None
    tool_choice: JsonValue = None
    text: dict[str, JsonValue] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    # accepted with their default alone
    include_reasoning: Literal[True] | None = None
    enable_response_messages: Literal[False] | None = None
    parallel_tool_calls: bool | None = None  # False: one call an answer
    # accepted without effect
    reasoning: dict[str, JsonValue] | None = None
    truncation: str | None = None
    background: bool | None = None
    max_tool_calls: int | None = None
    stream_options: StreamOptions | None = None
    conversation: JsonValue = None
    prompt: JsonValue = None


class TokenizeRequest(_Body):
    """Body of /tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = False
    chat_template_kwargs: dict[str, JsonValue] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(_Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[int]


def tool_dicts(tools: list[Tool] | None) -> list[Mapping[str, Any]]:
    """Return tool definitions as chat templates read them."""
    return [tool.model_dump(exclude_none=True) for tool in tools or ()]
