"""Requests of the HTTP interface, with OpenAI's and vLLM's field names."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from ...api.call import SAMPLING_FIELDS
from ...errors import InvalidRequestError
from ...features.guard import OnLeak
from ...sampling_params import SamplingParams
from ..request_body import MAX_NAME_CHARS, MAX_TOP_LOGPROBS, Items, LabelNames
from ..server_config import ReuseMode
from .chat_messages import BodyPart, ChatMessages, as_turn


class _Body(BaseModel):
    """Body in which unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


AgentName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]

Steps = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class ChoreographyOptions(_Body):
    """Reuse of messages that are not a prefix."""

    reuse: ReuseMode | None = None  # None: the server's default
    workflow: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None  # requests of one workflow share messages
    agent: AgentName | None = None  # whose turn it is: for reports, and for eviction by steps
    # to the next execution of every agent, None for never; None: those of the declared graph, or learned ones
    steps: Annotated[dict[AgentName, Steps | None], Field(max_length=256)] | None = None
    fixed_messages: Annotated[int, Field(strict=True, ge=1)] | None = (
        None  # first ones, equal in every turn of the agent
    )
    fixed_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None  # the same, of the rendered prompt
    repair: Annotated[float, Field(ge=0, le=1)] | None = None  # share of reused tokens to compute again
    # divergence from prefix mode to stay within, nats a token; None: the server's default
    max_kl: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    labels: LabelNames = Field(default_factory=list)
    clearance: LabelNames | None = None  # other labels whose messages may be reused
    on_leak: OnLeak | None = None  # of messages with other labels; None: encode their text again
    # of every message, its first position; None: after the message before it
    offsets: Items[Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None] | None = None
    # of /v1/completions: the prompt is PML and imports modules of this schema
    prompt_schema: Annotated[str | None, Field(alias="schema", max_length=MAX_NAME_CHARS)] = None


class StreamOptions(BodyPart):
    """Options of streamed answers."""

    include_usage: bool | None = False  # end with a chunk of token counts
    continuous_usage_stats: bool | None = False  # with include_usage, cumulative counts in every chunk


class FunctionDefinition(BodyPart):
    """Function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(BodyPart):
    """Tool that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(BodyPart):
    """Name of a function."""

    name: str


class NamedToolChoice(BodyPart):
    """Tool that the model has to call."""

    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class JsonSchemaFormat(BodyPart):
    """JSON Schema of an answer."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, JsonValue] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BodyPart):
    """Form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("json_schema: give an object with a schema")
        return self


class StructuredOutputs(BodyPart):
    """Grammar of an answer; exactly one of the fields."""

    json_: dict[str, JsonValue] | bool | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Items[str] | None = None
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
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
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
    # likeliest tokens to report with each token of the prompt
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
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
    rid: str | Items[str] | None = None
    session_id: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None  # workflow of requests that name none
    session_params: JsonValue = None
    nvext: JsonValue = None
    vllm_xargs: JsonValue = None
    kv_transfer_params: JsonValue = None
    mm_processor_kwargs: JsonValue = None

    @property
    def salt(self) -> tuple[str, str]:
        """What separates the cache within a tenant."""
        return self.cache_salt or "", self.extra_key or ""

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options that the engine takes as they are; None for the server's."""
        choreography = self.choreography or ChoreographyOptions()
        return {"priority": self.priority or 0, "repair": choreography.repair, "max_kl": choreography.max_kl}

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Likeliest tokens to find for each prompt token; None: no scores."""
        return self.prompt_logprobs

    def sampling(self, max_tokens: int | None, logprobs: int | None, seed: int) -> SamplingParams:
        """Return the sampling parameters of one answer.

        Raises:
            SamplingError: if a parameter is out of range.
        """
        options: dict[str, Any] = {name: getattr(self, name, None) for name in SAMPLING_FIELDS}
        options = {name: value for name, value in options.items() if value is not None}
        options["stop"] = tuple(text for text in _as_list(options.pop("stop", ())) if text)
        if "logit_bias" in options:
            options["logit_bias"] = {_token_id(token): bias for token, bias in options["logit_bias"].items()}
        options |= {"max_tokens": max_tokens, "logprobs": logprobs, "seed": seed}
        return SamplingParams(**options | {"prompt_logprobs": self.num_prompt_logprobs})


def _as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _token_id(text: str) -> int | str:
    """Return a token id; other keys unchanged, which `SamplingParams` rejects."""
    return int(text) if text.isdecimal() and len(text) < 20 else text


class ChatCompletionRequest(_GenerationBody):
    """Body of /v1/chat/completions."""

    messages: Annotated[ChatMessages, Field(min_length=1)]
    n: Annotated[int, Field(ge=1)] | None = 1
    # 0: the prompt is scored (`prompt_logprobs`), and nothing generated
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream_options: StreamOptions | None = None
    tools: Items[Tool] | None = None
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
    modalities: Items[str] | None = None
    prediction: JsonValue = None

    @property
    def turns(self) -> list[dict[str, Any]]:
        """Messages as chat templates read them."""
        return [as_turn(message) for message in self.messages]


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


class SchemaRequest(_Body):
    """Body of PUT /v1/schemas/{name}."""

    pml: str  # a schema in Prompt Markup Language


class CompletionRequest(_GenerationBody):
    """Body of /v1/completions."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    n: Annotated[int, Field(ge=1)] | None = 1
    best_of: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = 16  # 0: the prompt is scored or echoed, and nothing generated
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = False
    suffix: str | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool = True

    @property
    def num_prompt_logprobs(self) -> int | None:
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((n for n in counts if n is not None), default=0 if self.echo and self.max_tokens == 0 else None)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts of the request."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts: Any = [self.prompt] if self.prompt and isinstance(self.prompt[0], int) else self.prompt
        return list(prompts)


class ResponsesRequest(_GenerationBody):
    """Body of /v1/responses."""

    input: str | Items[dict[str, JsonValue]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Items[dict[str, JsonValue]] | None = None
    tool_choice: JsonValue = None
    text: dict[str, JsonValue] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Items[str] | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    # accepted with their default alone
    prompt_logprobs: None = None
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
    messages: ChatMessages | None = None
    tools: Items[Tool] | None = None
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
    tokens: Items[int]


def tool_dicts(tools: list[Tool] | None) -> list[Mapping[str, Any]]:
    """Return tool definitions as chat templates read them."""
    return [tool.model_dump(exclude_none=True) for tool in tools or ()]
