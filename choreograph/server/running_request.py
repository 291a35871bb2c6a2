"""One request in the engine: its specification, updates and end."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from fastapi import Request
from jaxtyping import Bool
from torch import Tensor

from ..api.message import Message
from ..errors import RequestFailedError
from ..outputs import TokenLogprob
from ..request.decode_state import TokenMask
from ..sampling_params import SamplingParams
from ..utils import call_all
from .api_errors import CLIENT_CLOSED_REQUEST, ApiError
from .dashboard.request_log import RequestRecord
from .engine_thread import ChoiceUpdate, Generation
from .openai.chat_prompt import ChatPrompt
from .reuse.agent_tracking import AgentStep
from .reuse.answer_plan import Answer, Plan, SourceCounts
from .reuse.message_store import WorkflowKey
from .reuse.schema_store import SchemaPrompt
from .server_config import ReuseMode
from .structured.constraints import Constraint
from .tracing import RequestSpan

if TYPE_CHECKING:
    from .service import InferenceService


@dataclass(frozen=True)
class SentAnswer:
    """What a client has received of one answer."""

    token_ids: Sequence[int] = ()  # in order
    num_chars: int = 0  # of their text
    is_complete: bool = False


class ForcedPrefix:
    """`TokenMask` that allows the sent tokens first, then what `mask` allows.

    A forced token takes its number of the random generator, and penalties and stop strings see it,
    as if it had been sampled: the tokens after it are those that the first engine would have sampled.
    """

    def __init__(self, tokens: Sequence[int], vocab_size: int, mask: TokenMask | None = None) -> None:
        self._tokens, self._vocab_size, self._mask = tokens, vocab_size, mask
        self._position = 0

    def allowed(self) -> Bool[Tensor, " V"]:
        if self._position < len(self._tokens):
            result = torch.zeros(self._vocab_size, dtype=torch.bool)
            result[self._tokens[self._position]] = True
            return result
        return torch.ones(self._vocab_size, dtype=torch.bool) if self._mask is None else self._mask.allowed()

    def advance(self, token: int) -> None:
        self._position += 1
        if self._mask is not None:
            self._mask.advance(token)


@dataclass(frozen=True)
class GenerationSpec:
    """Everything that a request asks of the engine."""

    key: WorkflowKey
    reuse: ReuseMode
    prompts: Sequence[ChatPrompt]
    sampling: SamplingParams  # of the first answer; later ones count up its seed
    num_answers: int = 1  # of each prompt
    agent: str | None = None
    constraint: Constraint | None = None
    keys_of: Callable[[str], list[str]] = lambda text: []  # what a client sends back of an answer
    priority: int = 0  # requests with a lower number are admitted first
    repair: float | None = None  # share of reused tokens to compute again, 0 to 1
    max_kl: float | None = None  # divergence to stay within, nats a token; None: the server's
    schema_prompt: tuple[str, str, str] | None = None  # tenant, schema name and PML of the only prompt
    scores_every_answer: bool = False  # `prompt_logprobs` in all answers, not only in the first one of each prompt
    steps: Mapping[str, float | None] | None = None  # to the next execution of every agent, as its client knows them
    fixed_tokens: int | None = None  # of the prompts' start that every turn of the agent has; None: inferred
    sent: Sequence[SentAnswer] = ()  # what an earlier engine generated of every answer; empty: nothing


class RunningRequest:
    """One request in the engine."""

    def __init__(self, service: "InferenceService", request: Request, spec: GenerationSpec) -> None:
        self._service, self._request, self.spec = service, request, spec
        self._plans: list[Plan] = []
        self.num_choices = spec.num_answers * len(spec.prompts)
        self.num_generated = [0] * self.num_choices  # tokens of every answer
        self._record: RequestRecord | None = None  # in the log of the dashboard
        self.finish_reasons: list[str | None] = [None] * self.num_choices
        self.span: RequestSpan | None = getattr(request.state, "span", None)
        if self.span is not None:
            self.span.set(
                {
                    "gen_ai.workflow.name": spec.key.workflow,
                    "gen_ai.agent.name": spec.agent,
                    "choreograph.reuse": spec.reuse,
                }
            )
        self._has_disconnected = False
        self._prompt_scores: dict[int, list[TokenLogprob | None]] = {}  # by answer
        num_sent = [(answer.num_chars, len(answer.token_ids)) for answer in spec.sent]
        self._generation = Generation(self._submit, self._close, num_sent=num_sent)
        self._masks: list[TokenMask] = []  # of every answer, if the request has a grammar
        self._schema_prompt: SchemaPrompt | None = None
        self._preparation: asyncio.Task[None] | None = None
        self._start()

    def _start(self) -> None:
        if self.spec.constraint is None and self.spec.schema_prompt is None:
            self._service.thread.submit(self._generation)
        else:
            self._preparation = asyncio.create_task(self._prepare_and_submit())

    async def _prepare_and_submit(self) -> None:
        try:
            num_bytes = 0 if self.spec.constraint is None else len(self.spec.constraint.grammar)
            await self._service.pool.run(self.spec.key.tenant, num_bytes, self._prepare)
            self._service.thread.submit(self._generation)
        except Exception as exc:
            self._generation.updates.put_nowait(exc)

    def _prepare(self) -> None:
        """Compile the grammar and resolve the prompt of a schema.

        Runs in a worker thread.
        """
        spec, service = self.spec, self._service
        if spec.schema_prompt is not None:
            self._schema_prompt = service.schemas.resolve(*spec.schema_prompt)
        if spec.constraint is not None:
            compiler = service.compiler()
            self._masks = compiler.masks(spec.constraint, self.num_choices)

    def _cancel(self) -> None:
        if self._preparation is not None:
            self._preparation.cancel()
        self._service.thread.cancel(self._generation)

    @property
    def counts(self) -> SourceCounts:
        """Prompt tokens by source, once the request is complete."""
        plans = [plan.counts for plan in self._plans]
        return SourceCounts(*(sum(getattr(counts, item.name) for counts in plans) for item in fields(SourceCounts)))

    def name_response(self, response_id: object, model: str) -> None:
        """Set the id and model of the answer in the request's span."""
        if self.span is not None:
            self.span.set({"gen_ai.response.id": response_id, "gen_ai.response.model": model})

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's token counts, and ours."""
        counts, spec = self.counts, self.spec
        num_generated = sum(self.num_generated)
        return {
            "prompt_tokens": counts.total,
            "completion_tokens": num_generated,
            "total_tokens": counts.total + num_generated,
            "prompt_tokens_details": {"cached_tokens": counts.cached},
            "choreography": {
                "reuse": spec.reuse,
                "workflow": spec.key.workflow,
                "agent": spec.agent,
                **counts.fields(),
            },
        }

    def prompt_scores(self, index: int) -> list[TokenLogprob | None]:
        """Return the scores of an answer's prompt, after its first update."""
        first_of_prompt = index - index % self.spec.num_answers
        return self._prompt_scores[index if self.spec.scores_every_answer else first_of_prompt]

    async def updates(self) -> AsyncGenerator[list[ChoiceUpdate]]:
        """Yield updates until every answer is complete.

        A caller that stops, a client that disconnects and the time limit cancel the request.
        """
        num_open, limit = self.num_choices, self._service.config.request_timeout
        too_long = ApiError(408, f"the request took longer than {limit:g} s", type="timeout", code="timeout")
        timer = asyncio.get_running_loop().call_later(limit, self._generation.updates.put_nowait, too_long)
        watcher = asyncio.create_task(self._watch_connection())
        error: BaseException | None = None
        try:
            while num_open:
                updates = await self._generation.updates.get()
                if isinstance(updates, Exception):
                    raise updates
                for update in updates:
                    self.num_generated[update.index] += len(update.token_ids)
                    if update.prompt_logprobs is not None:
                        self._prompt_scores[update.index] = update.prompt_logprobs
                    if self.span is not None and update.token_ids:
                        self.span.first_token()
                    if update.finish_reason is not None and update.timing is not None:
                        num_open -= 1
                        self.finish_reasons[update.index] = update.finish_reason
                        if self.span is not None:
                            self.span.timing = self.span.timing or update.timing
                        num_tokens = self.num_generated[update.index]
                        self._service.metrics.observe_answer(update.finish_reason, num_tokens, update.timing)
                yield updates
            for plan in self._plans:
                self._service.metrics.observe_prompt(plan.counts)
        except BaseException as exc:
            has_left = self._has_disconnected and isinstance(exc, Exception)
            error = asyncio.CancelledError() if has_left else exc
            if not isinstance(error, Exception):  # failures are counted by their status
                self._service.metrics.observe_aborted(num_open)
            if has_left:
                raise ApiError(CLIENT_CLOSED_REQUEST, "the client left") from exc
            raise
        finally:
            timer.cancel()
            watcher.cancel()
            if num_open:
                self._cancel()
            if self.span is not None:
                counts = None if num_open else self.counts  # complete with the last answer
                self.span.end(error, counts, sum(self.num_generated), self.finish_reasons)

    async def _watch_connection(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._has_disconnected = True
        if self._preparation is not None and not self._preparation.done():
            self._generation.updates.put_nowait(RequestFailedError("the request was cancelled"))
        self._cancel()

    # -- in the engine's thread -----------------------------------------------------------------------------

    def _submit(self) -> list[Message]:
        spec, service, seed = self.spec, self._service, self.spec.sampling.seed or 0
        max_kl = service.max_kl_of(spec)
        messages: list[Message] = []
        for prompt in spec.prompts:
            answers = []
            for number in range(spec.num_answers):
                sampling = spec.sampling.with_seed(seed + number)
                if number and not spec.scores_every_answer:
                    sampling = sampling.without_prompt_logprobs()
                index = len(messages) + number
                mask = self._masks[index] if self._masks else None
                if spec.sent:
                    sent = spec.sent[index].token_ids
                    mask = ForcedPrefix(sent, service.engine.model_info.vocab_size, mask)
                answers.append(Answer(sampling, mask, spec.keys_of, spec.priority, spec.repair, max_kl))
            if self._schema_prompt is not None:
                plan = service.schemas.plan(self._schema_prompt, prompt, answers)
            else:
                step = AgentStep(spec.agent, spec.steps, spec.fixed_tokens)
                plan = service.planner.plan(spec.reuse, spec.key, prompt, answers, step)
            self._plans.append(plan)
            messages += plan.messages
        if service.log is not None:
            label = spec.agent or "request"
            self._record = service.log.start(spec.key.tenant, spec.key.workflow, label, spec.reuse, messages)
        return messages

    def _close(self, is_complete: bool) -> None:
        errors = call_all(partial(plan.close, is_complete) for plan in self._plans)
        for message in self._generation.messages:
            message.drop_prompt_logprobs()  # some messages are stored
        for plan in self._plans:
            if is_complete and plan.measure is not None:
                self._service.thread.defer(plan.measure)
        if self._record is not None and self._service.log is not None:
            self._service.log.finish(self._record, vars(self.counts), is_complete)
        if errors:
            raise errors[0]
