"""/v1/completions: prompts of text or token ids, several at once."""

from collections.abc import Sequence
from typing import Any

from fastapi import Request

from ...errors import InvalidRequestError
from ..reuse.agent_tracking import agent_step
from ..running_request import GenerationSpec
from ..service import InferenceService
from .answer_loop import AnswerEvent, AnswerLoop, AnswerOptions, ParsedAnswer
from .chat_completions import constraint_of, end_with_grammar
from .chat_prompt import ChatPrompt
from .choice_encoder import ChoiceEncoder
from .protocol import CompletionRequest, check_stream_options
from .scored_prompts import check_prompt_scoring, check_scored_size, echoed_tokens
from .token_text import PlacedToken, completion_logprobs

MAX_PROMPTS = 128


def prepare(
    service: InferenceService, body: CompletionRequest, http_request: Request, tenant: str
) -> tuple[GenerationSpec, AnswerOptions]:
    """Tokenize the prompts and check all options.

    Raises:
        InvalidRequestError, ApiError: if the request cannot be served.
    """
    check_stream_options(body)
    check_prompt_scoring(body)
    service.token_bytes.load()
    key, reuse, agent = service.workflow_key(http_request, tenant, body, body.choreography)
    if body.suffix:
        raise InvalidRequestError("suffix: the model does not insert text; leave it out")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError(f"best_of={body.best_of}: use the value of n, or leave it out")
    if not 1 <= len(body.prompts) <= MAX_PROMPTS:
        raise InvalidRequestError(f"prompt: {len(body.prompts)} prompts: use 1 to {MAX_PROMPTS}")
    prompts, schema_prompt = [], None
    schema_name = body.choreography.prompt_schema if body.choreography else None
    if schema_name is not None:
        if not isinstance(body.prompt, str) or body.echo or any(body.salt) or key.readable:
            raise InvalidRequestError(
                "prompt: with a schema use one PML text, without echo, cache_salt, extra_key and labels"
            )
        schema_prompt = tenant, schema_name, body.prompt
        prompts.append(service.schemas.tokenize(*schema_prompt))
    for prompt in body.prompts if schema_prompt is None else ():
        tokens = (
            prompt
            if isinstance(prompt, list)
            else service.renderer.tokenize(prompt, opening=body.add_special_tokens, max_tokens=service.max_model_len)
        )
        if not tokens:
            raise InvalidRequestError("prompt: is empty: give at least one token")
        if len(tokens) > service.max_model_len:  # before the next one is tokenized
            raise service.too_long(len(tokens), body.max_tokens, "prompt")
        text = prompt if isinstance(prompt, str) else service.engine.tokenizer.decode(prompt) if body.echo else ""
        prompts.append(ChatPrompt(list(tokens), header=list(tokens), header_text=text if body.echo else ""))
    check_scored_size(service, body, prompts, body.n or 1)
    step = agent_step(agent, body.choreography, prompts)
    if schema_prompt is not None and step.fixed_tokens is not None:
        raise InvalidRequestError("fixed_tokens: the schema names the fixed parts; leave it out")
    max_tokens = service.max_tokens(body.max_tokens, prompts, "prompt")
    seed = service.random_seed() if body.seed is None else body.seed
    sampling = body.sampling(max_tokens, body.logprobs, seed)
    # scored texts count their last token
    options = AnswerOptions(
        returns_ids=bool(body.return_token_ids), keeps_end=bool(body.echo) and body.logprobs is not None
    )
    constraint = constraint_of(body.response_format, body.structured_outputs)
    if constraint is not None:
        sampling = end_with_grammar(service, sampling)
    if reuse == "messages":
        reuse = "auto"  # a prompt has no messages
    spec = GenerationSpec(
        key,
        reuse,
        prompts,
        sampling,
        body.n or 1,
        constraint=constraint,
        schema_prompt=schema_prompt,
        scores_every_answer=bool(body.stream),  # they begin at different times
        **step._asdict(),
        **body.engine_options,
    )
    return spec, options


class CompletionEncoder(ChoiceEncoder):
    """Answers of one completion request in OpenAI's JSON."""

    def __init__(self, loop: AnswerLoop, body: CompletionRequest) -> None:
        super().__init__(loop, body, "cmpl", "text_completion", "text_completion")
        self._body = body

    def whole(self, events: Sequence[tuple[ParsedAnswer, AnswerEvent]]) -> dict[str, Any]:
        """Return the response of a request that does not stream."""
        choices = []
        for answer in self._loop.answers:
            choice = self._choice(answer, answer.content, answer.tokens, answer.finish_reason, is_first=True)
            choices.append(choice | self._prompt_logprobs(answer))
        return self._response(choices)

    def start(self) -> str:
        """Return nothing: the events of an answer start with its text."""
        return ""

    def write(self, answer: ParsedAnswer, event: AnswerEvent, *, is_first: bool) -> str:
        """Return the event of a part of an answer."""
        reason = answer.finish_reason if event.kind == "end" else None
        return self._event(answer, self._choice(answer, event.text, event.tokens, reason, is_first=is_first))

    def _choice(
        self,
        answer: ParsedAnswer,
        text: str,
        tokens: Sequence[PlacedToken],
        finish_reason: str | None,
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        """Return a part of an answer.

        Args:
            is_first: the part starts with what belongs to the prompt.
        """
        body, token_bytes = self._body, self._loop.token_bytes
        echoed = self._loop.prompt_of(answer).header_text
        choice: dict[str, Any] = {"index": answer.index, "text": echoed + text if is_first else text}
        choice |= {"finish_reason": finish_reason, "logprobs": None}
        if body.logprobs is not None:
            choice["logprobs"] = completion_logprobs(tokens, token_bytes, body.logprobs, len(echoed))
            if is_first and body.echo:
                placed = echoed_tokens(body, self._loop.running, answer.index, token_bytes)
                fields = completion_logprobs(placed, token_bytes, body.logprobs)
                fields["token_logprobs"][0] = fields["top_logprobs"][0] = None  # nothing predicts it
                choice["logprobs"] = {name: fields[name] + values for name, values in choice["logprobs"].items()}
        if self._returns_ids:
            choice["token_ids"] = answer.take_token_ids()
        return choice | self._prompt_ids(answer) if is_first else choice
