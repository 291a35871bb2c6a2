"""/v1/completions: prompts of text or token ids, several at once."""

import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import Request

from ..errors import InvalidRequestError
from ..outputs import TokenLogprob
from .agent_tracking import agent_step
from .chat_completions import constraint_of, token_logprob
from .chat_prompt import ChatPrompt
from .engine_thread import ChoiceUpdate
from .event_stream import SSE_END, TextEvents, sse
from .protocol import CompletionRequest, check_stream_options
from .scored_prompts import (
    check_prompt_scoring,
    check_scored_size,
    echoed_logprobs,
    encode,
    num_added_characters,
    prompt_logprobs_of,
)
from .service import GenerationSpec, InferenceService, RunningRequest, StreamUsage

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
        prompts.append(ChatPrompt(list(tokens), header=list(tokens)))
    check_scored_size(service, body, prompts, body.n or 1)
    step = agent_step(agent, body.choreography, prompts)
    if schema_prompt is not None and step.fixed_tokens is not None:
        raise InvalidRequestError("fixed_tokens: the schema names the fixed parts; leave it out")
    max_tokens = service.max_tokens(body.max_tokens, prompts, "prompt")
    seed = service.random_seed() if body.seed is None else body.seed
    sampling = body.sampling(max_tokens, body.logprobs, seed)
    constraint = constraint_of(body.response_format, body.structured_outputs)
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
        self._service, self._tokenizer, self._body, self._running = service, service.engine.tokenizer, body, running
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self._head["model"] = body.model
        running.name_response(self._head["id"], body.model)
        # characters sent of every answer; less than none for a token that the echoed text does not contain
        self._offsets = [-self._num_added_characters(index) for index in range(running.num_choices)]
        self._has_scores = set[int]()  # answers whose prompt's log-probabilities were sent

    def _echoed(self, index: int) -> str:
        if not self._body.echo:
            return ""
        prompt = self._body.prompts[index // self._running.spec.num_answers]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _text_of(self, token: int) -> str:
        text: str = token_logprob(self._tokenizer, token, 0.0)["token"]
        return text

    def _num_added_characters(self, index: int) -> int:
        number = index // self._running.spec.num_answers
        if not self._body.echo or self._body.logprobs is None:
            return 0
        first_token = self._running.spec.prompts[number].tokens[0]
        return num_added_characters(self._tokenizer, self._body.prompts[number], first_token)

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": self._running.spec.prompts[index // self._running.spec.num_answers].tokens}

    async def whole(self) -> dict[str, Any]:
        """Return the response of a request that does not stream."""
        choices = []
        for index, updates in enumerate(await self._running.complete()):
            text = self._echoed(index) + "".join(update.text for update in updates)
            logprobs = [item for update in updates for item in update.logprobs]
            choice = {"index": index, "text": text, "finish_reason": updates[-1].finish_reason}
            choice["logprobs"] = await encode(self._service, self._running, partial(self._logprobs, index, logprobs))
            if self._body.return_token_ids:
                choice["token_ids"] = [token for update in updates for token in update.token_ids]
            scores = partial(prompt_logprobs_of, self._body, self._running, self._text_of, index)
            choice |= await encode(self._service, self._running, scores)
            choices.append(choice | self._prompt_ids(index))
        return {**self._head, "choices": choices, "usage": self._running.usage()}

    async def events(self) -> AsyncIterator[str]:
        """Yield the server-sent events of a streamed request."""
        body, echoed = self._body, set[int]()
        usage = StreamUsage(self._running, body.stream_options)

        def event(update: ChoiceUpdate, text: str, is_first: bool = False) -> str:
            choice = self._choice(update, text) | (self._prompt_ids(update.index) if is_first else {})
            return sse({**self._head, "choices": [choice], **usage.fields(update.index)})

        is_plain = body.logprobs is None and not body.return_token_ids and not usage.is_continuous
        text_events = TextEvents(lambda index, text: event(ChoiceUpdate(index, text, [], []), text))
        async for updates in self._running.updates():
            events = []
            for update in updates:
                is_first = update.index not in echoed
                text = self._echoed(update.index) + update.text if is_first else update.text
                echoed.add(update.index)
                usage.add(update)
                if is_plain and text and update.finish_reason is None:
                    events.append(text_events.event(update.index, text))
                elif text or not is_plain or update.finish_reason is not None:
                    write = partial(event, update, text, is_first)
                    events.append(await encode(self._service, self._running, write) if is_first else write())
            if events:
                yield "".join(events)
        if usage.is_included:
            yield sse({**self._head, "choices": [], "usage": self._running.usage()})
        yield SSE_END

    def _choice(self, update: ChoiceUpdate, text: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": update.index, "text": text, "finish_reason": update.finish_reason}
        choice["logprobs"] = self._logprobs(update.index, update.logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = update.token_ids
        return choice

    def _logprobs(self, index: int, logprobs: list[TokenLogprob]) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        echoed = [] if index in self._has_scores else echoed_logprobs(self._body, self._running, index)
        self._has_scores.add(index)
        for item in [*echoed, *logprobs]:
            text = self._tokenizer.decode([item.token])
            result["tokens"].append(text)
            result["token_logprobs"].append(max(item.logprob, -9999.0))
            top = {self._tokenizer.decode([token]): max(value, -9999.0) for token, value in item.top.items()}
            result["top_logprobs"].append(top | {text: max(item.logprob, -9999.0)})
            result["text_offset"].append(max(0, self._offsets[index]))
            self._offsets[index] += len(text)
        if echoed:
            result["token_logprobs"][0] = result["top_logprobs"][0] = None
        return result
