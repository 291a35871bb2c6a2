"""/v1/completions: prompts of text or token ids, several at once."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import Request

from ...errors import InvalidRequestError
from ..api_errors import context_exceeded
from ..reuse.agent_tracking import agent_step
from ..running_request import GenerationSpec, RunningRequest
from ..service import InferenceService
from .answer_loop import AnswerLoop, ParsedAnswer, ParserOptions, StreamUsage
from .chat_completions import constraint_of, end_with_grammar
from .chat_prompt import ChatPrompt
from .event_stream import SSE_END, TextEvents, sse
from .protocol import CompletionRequest, check_stream_options
from .scored_prompts import check_prompt_scoring, check_scored_size, echoed_tokens, encode, prompt_logprobs_of
from .token_text import PlacedToken, completion_logprobs, label

MAX_PROMPTS = 128


def prepare_completion(
    service: InferenceService, body: CompletionRequest, http_request: Request, tenant: str
) -> GenerationSpec:
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
            raise context_exceeded(len(tokens), body.max_tokens or 1, service.max_model_len, "prompt")
        text = prompt if isinstance(prompt, str) else service.engine.tokenizer.decode(prompt) if body.echo else ""
        prompts.append(ChatPrompt(list(tokens), header=list(tokens), header_text=text if body.echo else ""))
    check_scored_size(service, body, prompts, body.n or 1)
    step = agent_step(agent, body.choreography, prompts)
    if schema_prompt is not None and step.fixed_tokens is not None:
        raise InvalidRequestError("fixed_tokens: the schema names the fixed parts; leave it out")
    max_tokens = service.max_tokens(body.max_tokens, prompts, "prompt")
    seed = service.random_seed() if body.seed is None else body.seed
    sampling = body.sampling(max_tokens, body.logprobs, seed)
    constraint = constraint_of(body.response_format, body.structured_outputs)
    if constraint is not None:
        sampling = end_with_grammar(service, sampling)
    if reuse == "messages":
        reuse = "auto"  # a prompt has no messages
    return GenerationSpec(
        key,
        reuse,
        prompts,
        sampling,
        body.n or 1,
        agent,
        constraint,
        priority=body.priority or 0,
        repair=body.repair,
        max_kl=body.max_kl,
        schema_prompt=schema_prompt,
        scores_every_answer=bool(body.stream),  # they begin at different times
        steps=step.steps,
        fixed_tokens=step.fixed_tokens,
    )


class CompletionAnswer:
    """Answer of one completion request, whole or streamed."""

    def __init__(self, service: InferenceService, body: CompletionRequest, running: RunningRequest) -> None:
        self._service, self._body = service, body
        self._loop = AnswerLoop(
            service,
            running,
            ParserOptions(),
            has_logprobs=body.logprobs is not None,
            keeps_end=bool(body.echo) and body.logprobs is not None,  # scored texts count their last token
            returns_ids=bool(body.return_token_ids),
        )
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self._head["model"] = body.model
        running.name_response(self._head["id"], body.model)

    def _echoed(self, answer: ParsedAnswer) -> str:
        return self._loop.prompt_of(answer).header_text

    def _text_of(self, token: int) -> str:
        return label(self._loop.token_bytes.of(token))

    def _prompt_ids(self, answer: ParsedAnswer) -> dict[str, Any]:
        return {"prompt_token_ids": self._loop.prompt_of(answer).tokens} if self._body.return_token_ids else {}

    async def whole(self) -> dict[str, Any]:
        """Return the response of a request that does not stream."""
        await self._loop.complete()
        running = self._loop.running
        choices = []
        for answer in self._loop.answers:
            text = self._echoed(answer) + answer.content
            write = partial(self._choice, answer, text, answer.tokens, answer.finish_reason, is_first=True)
            scores = partial(prompt_logprobs_of, self._body, running, self._text_of, answer.index)
            choices.append(await encode(self._service, running, write) | await encode(self._service, running, scores))
        return {**self._head, "choices": choices, "usage": self._loop.usage()}

    async def events(self) -> AsyncIterator[str]:
        """Yield the server-sent events of a streamed request."""
        body, loop, started = self._body, self._loop, set[int]()
        usage = StreamUsage(loop, body.stream_options)
        is_plain = body.logprobs is None and not body.return_token_ids and not usage.is_continuous

        def chunk(
            answer: ParsedAnswer, text: str, tokens: Sequence[PlacedToken] = (), reason: str | None = None
        ) -> str:
            choice = self._choice(answer, text, tokens, reason, is_first=answer.index not in started)
            return sse({**self._head, "choices": [choice], **usage.fields(answer)})

        text_events = TextEvents(lambda index, text: chunk(loop.answers[index], text))
        async for events in loop.steps():
            chunks = []
            for answer, event in events:
                is_first = answer.index not in started
                text = self._echoed(answer) + event.text if is_first else event.text
                reason = answer.finish_reason if event.kind == "end" else None
                if is_plain and event.kind != "end":
                    chunks.append(text_events.event(answer.index, text))
                else:
                    write = partial(chunk, answer, text, event.tokens, reason)
                    chunks.append(await encode(self._service, loop.running, write) if is_first else write())
                started.add(answer.index)
            if chunks:
                yield "".join(chunks)
        if usage.is_included:
            yield sse({**self._head, "choices": [], "usage": loop.usage()})
        yield SSE_END

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
            is_first: the part has what belongs to the prompt.
        """
        body, token_bytes = self._body, self._loop.token_bytes
        choice: dict[str, Any] = {"index": answer.index, "text": text, "finish_reason": finish_reason, "logprobs": None}
        if body.logprobs is not None:
            start = len(self._echoed(answer))
            choice["logprobs"] = completion_logprobs(tokens, token_bytes, body.logprobs, start)
            if is_first and body.echo:
                echoed = echoed_tokens(body, self._loop.running, answer.index, token_bytes)
                fields = completion_logprobs(echoed, token_bytes, body.logprobs)
                fields["token_logprobs"][0] = fields["top_logprobs"][0] = None  # nothing predicts it
                choice["logprobs"] = {name: fields[name] + values for name, values in choice["logprobs"].items()}
        if body.return_token_ids:
            choice["token_ids"] = answer.take_token_ids()
        return choice | self._prompt_ids(answer) if is_first else choice
