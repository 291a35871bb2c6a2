"""Reuse modes: how a prompt becomes decodes of the engine.

exact: prefix mode of the engine. messages: every message of a chat is one message of a choreographed
session, found again by its content. auto: quotes of stored messages are found anywhere in a prompt.
All functions run in the engine's thread.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import Any

from ...agents import Agent
from ...api.engine import Engine
from ...api.message import Message
from ...errors import InvalidRequestError, LeakError
from ...features.layer_variants import prefill_layers
from ...messages.handle import MessageSlice
from ...utils import call_all
from ..openai.chat_prompt import ChatPrompt
from ..server_config import ReuseMode
from .agent_tracking import NO_AGENT, AgentStep
from .answer_plan import Answer, Plan, SourceCounts, decode_prompt
from .context_index import ROOT, extend_lineage, longest
from .exact_reuse import plan_exact
from .message_store import (
    MessageIndex,
    MessageKey,
    MessageStore,
    StoredMessage,
    WorkflowKey,
    find_content,
)
from .span_index import Span, find_spans, gaps_between


def plan_messages(
    store: MessageStore, key: WorkflowKey, prompt: ChatPrompt, answers: Sequence[Answer], step: AgentStep
) -> Plan:
    """Submit a chat whose messages are found by their content."""
    builder = _PlanBuilder(store, key, step, answers, offsets=prompt.offsets)
    occurrences: Counter[object] = Counter()  # a message cannot be at two places of one context
    try:
        for segment in prompt.segments:
            candidates: list[object] = [segment.tokens]
            if segment.answer_key is not None:
                candidates.insert(0, segment.answer_key)
            stored = None
            keys = [(content, occurrences[content]) for content in candidates]
            for content_key in keys:
                stored = stored or builder.find_content(content_key)
            if stored is not None and any(stored.message is parent for parent in builder.parents):
                stored = None
            if stored is not None:
                builder.reuse_message(stored)
            elif (stored := builder.find_of_other_model(keys)) is not None:
                contents = {tuple(stored.tokens), *(key[0] for key in stored.content_keys)}
                builder.reuse_layers(stored, [key for key in keys if key[0] in contents])
            else:
                builder.compute(segment.tokens, [(segment.tokens, occurrences[segment.tokens])])
            for content in candidates:
                occurrences[content] += 1
        return builder.decode(prompt.header, prompt.footer)
    except BaseException:
        builder.abort()
        raise


def plan_auto(
    store: MessageStore, key: WorkflowKey, prompt: ChatPrompt, answers: Sequence[Answer], step: AgentStep
) -> Plan:
    """Submit a prompt whose quotes of stored messages are reused in place."""
    builder = _PlanBuilder(store, key, step, answers, with_spans=True)
    tokens, limit = prompt.tokens, len(prompt.tokens) - 1  # at least one token is computed
    try:
        position = builder.reuse_prefix(tokens, 0, limit)
        spans = builder.find_spans(tokens, position, limit)
        for number, span in enumerate(spans):
            later = {other.key for other in spans[number:]}
            position = builder.reuse_prefix(tokens, position, span.start, later)
            builder.compute(tokens[position : span.start])
            builder.reuse_span(span.key, span.source_start, span.source_start + span.stop - span.start)
            position = span.stop
        position = builder.reuse_prefix(tokens, position, limit)
        if position < (end := min(step.fixed_tokens or 0, limit)):  # a part of its own, which can be marked
            builder.compute(tokens[position:end])
            position = end
        return builder.decode(tokens[position:], [])
    except BaseException:
        builder.abort()
        raise


class _PlanBuilder:
    """Context of a request in choreographed mode, built from left to right."""

    def __init__(
        self,
        store: MessageStore,
        key: WorkflowKey,
        step: AgentStep,
        answers: Sequence[Answer],
        *,
        with_spans: bool = False,
        offsets: Sequence[int | None] = (),
    ) -> None:
        self._store, self._key, self._with_spans = store, key, with_spans
        self._offsets = offsets  # of every part of the context; empty: one after the other
        self._answers = answers  # of equal priority, repair and max_kl
        self.workflow = store.open(key)
        self._indexes, self._forbidden = self.workflow.readable(key.readable), list[MessageIndex]()
        self._guard: dict[str, Any] = {}  # options of calls
        if key.clearance is not None:
            # messages that may not be read are not found; the engine would refuse them
            self._guard = {"labels": key.labels, "clearance": key.readable, "on_leak": "error"}
            if key.on_leak == "error":
                self._forbidden = [i for i in self.workflow.indexes.values() if i not in self._indexes]
        self._budget = self.workflow.session.budget = store.budget(key, answers[0].max_kl, step.agent)
        self._turn, self._fixed_tokens = ExitStack(), step.fixed_tokens or 0
        self._agent: Agent | None = None
        if step.agent is not None and self.workflow.tracker is not None:
            try:
                turn = self.workflow.tracker.agent(step.agent, steps=step.steps)
                self._agent = self._turn.enter_context(turn)
            except BaseException:
                self.abort()
                raise
        self.parents: list[Message | MessageSlice] = []
        self.used: list[tuple[StoredMessage, int, int]] = []  # stored tokens in the context
        self.counts = SourceCounts()
        self._other_keys = store.sender_keys(key, answers[0].repair, answers[0].max_kl)
        self._lineage = ROOT  # of the context so far
        self._is_prefix = True  # every part was encoded after the same parts
        self._may_lose_context = False  # some part was still arriving from another engine when it was used
        self._submitted: list[StoredMessage] = []  # prefills of this request

    def find_content(self, key: object) -> StoredMessage | None:
        """Return the stored message of a content key.

        Raises:
            LeakError: if only messages have it that the request may not read, with on_leak="error".
        """
        stored = find_content(self._indexes, key, allow_partial=bool(self._other_keys))
        if stored is None and find_content(self._forbidden, key):
            self._refuse()
        return stored

    def find_of_other_model(self, content_keys: Iterable[object]) -> StoredMessage | None:
        """Return a stored message whose layers this model reuses."""
        places = itertools.product(self._other_keys, content_keys)
        found = (self._store.find(key, content_key, allow_partial=False) for key, content_key in places)
        return next(filter(None, found), None)

    def find_spans(self, tokens: list[int], start: int, stop: int) -> list[Span[StoredMessage]]:
        """Return quotes of stored messages in tokens[start:stop].

        Raises:
            LeakError: if other parts quote messages that the request may not read, with on_leak="error".
        """
        indexes, is_usable = [index.spans for index in self._indexes], attrgetter("is_usable")
        spans = find_spans(indexes, tokens, start, self.used, stop, is_usable)
        gaps = gaps_between(spans, start, stop)
        forbidden = [index.spans for index in self._forbidden]
        if forbidden and any(find_spans(forbidden, tokens, first, (), last) for first, last in gaps):
            self._refuse()
        return spans

    def _refuse(self) -> None:
        raise LeakError(
            f"clearance: {sorted(self._key.readable)} does not contain the labels of a message that the prompt repeats: "
            "use on_leak='reencode', leave the message out, or raise the clearance"
        )

    def reuse_message(self, stored: StoredMessage) -> None:
        """Append a whole stored message."""
        self._is_prefix &= stored.lineage == self._lineage and self._next_offset is None and not stored.is_partial
        source = "remote" if stored.is_imported else "prefix" if self._is_prefix else "message"
        self._append(stored, 0, len(stored.tokens), source)

    def reuse_layers(self, stored: StoredMessage, content_keys: Sequence[MessageKey]) -> None:
        """Append a message of another model.

        Some of its layers are computed in this context.
        """
        self._store.use(stored)
        message = prefill_layers(
            self.workflow.session, stored.message, self.parents, *self._places(), priority=self._answers[0].priority
        )
        assert isinstance(message, Message)
        self._note_arriving(stored)
        self._submit(message, content_keys, source=stored)
        self._is_prefix = False

    def reuse_prefix(
        self, tokens: list[int], position: int, limit: int, excluded: Collection[StoredMessage] = ()
    ) -> int:
        """Append stored messages that followed the same context.

        Args:
            position: of the next token; the result is the one after these messages.
            excluded: messages that a later part of the context uses.
        """

        def is_usable(stored: StoredMessage) -> bool:
            return stored.is_usable and not stored.is_partial and stored not in excluded

        while position < limit:
            indexes = (index.contexts.followers(self._lineage, tokens[position]) for index in self._indexes)
            found = longest(itertools.chain.from_iterable(indexes), tokens, position, limit, is_usable)
            if found is None:
                break
            self._append(found[0], 0, found[1], "prefix" if self._is_prefix else "message")
            position += found[1]
        return position

    def reuse_span(self, stored: StoredMessage, start: int, stop: int) -> None:
        """Append tokens [start, stop) of a stored message that is quoted."""
        self._is_prefix = False
        self._append(stored, start, stop, "quoted")

    def _append(self, stored: StoredMessage, start: int, stop: int, source: str) -> None:
        self._store.use(stored)
        self._note_arriving(stored)
        is_whole = stop - start == len(stored.tokens)
        self.used.append((stored, start, stop))
        setattr(self.counts, source, getattr(self.counts, source) + stop - start)
        self._extend(stored.message, start, stop, is_whole=is_whole)

    def _note_arriving(self, stored: StoredMessage) -> None:
        self._may_lose_context |= stored.may_lose_context or (stored.is_arriving and bool(self._other_keys))

    @property
    def _next_offset(self) -> int | None:
        return self._offsets[len(self.parents)] if self._offsets else None

    def _extend(self, message: Message, start: int, stop: int, *, is_whole: bool = True) -> None:
        # a client that finds two equal ones would read messages in another's context
        self._lineage = extend_lineage(self._lineage, message.id, start, stop, self._next_offset)
        part = message if is_whole else message[start:stop]
        self.parents.append(part)
        if self._fixed_tokens > 0 and self._agent is not None:
            end = min(stop, start + self._fixed_tokens)
            self._agent.mark_fixed(part if end == stop else message[start:end])
            self._fixed_tokens -= end - start

    def _places(self) -> tuple[Sequence[int | None] | None, int | None]:
        """Return the offsets of the context and of the next part."""
        return self._offsets[: len(self.parents)] or None, self._next_offset

    def compute(self, tokens: Sequence[int], content_keys: Sequence[MessageKey] = ()) -> None:
        """Append new tokens, which later requests can reuse."""
        if not tokens:
            return
        answer = self._answers[0]
        message = self.workflow.session.prefill(
            list(tokens),
            self.parents,
            *self._places(),
            priority=answer.priority,
            repair=answer.repair,
            **self._guard,
        )
        self._submit(message, content_keys)

    def _submit(
        self, message: Message, content_keys: Sequence[MessageKey], source: StoredMessage | None = None
    ) -> None:
        stored = self._keep(message, content_keys, source)
        self._submitted.append(stored)
        self.used.append((stored, 0, len(stored.tokens)))
        self._extend(message, 0, len(stored.tokens))

    def _keep(
        self, message: Message, content_keys: Sequence[MessageKey], source: StoredMessage | None = None
    ) -> StoredMessage:
        return self._store.add(
            self._key,
            message,
            self._lineage,
            content_keys,
            with_spans=self._with_spans,
            source=source,
            may_lose_context=self._may_lose_context,
        )

    def decode(self, header: list[int], footer: list[int]) -> Plan:
        """Submit the answers over the context."""
        answers = self._answers
        messages = decode_prompt(
            self.workflow.session, header, self.parents, footer, answers, self._offsets, self._guard
        )
        self._turn.close()
        self.counts.computed += len(header)
        submitted = [stored.message for stored in self._submitted]
        measure = None if self._budget is None else partial(self._budget.measure, [*submitted, *messages])
        return Plan(messages, self.counts, partial(self._close, messages), measure)

    def _close(self, messages: Sequence[Message], is_complete: bool) -> None:
        """Count the sources of the prompt; keep complete answers and release others."""
        kept: list[Message] = []
        try:
            for stored in self._submitted:
                source = _source_of(stored, is_complete)
                setattr(self.counts, source, getattr(self.counts, source) + len(stored.tokens))
            if not is_complete:
                return
            self.counts.repaired += sum(s.message.usage.repaired_tokens for s in self._submitted)
            self.counts.repaired += sum(message.usage.repaired_tokens for message in messages)
            for message, answer in zip(messages, self._answers, strict=True):
                if message.error is None:
                    index = self.workflow.indexes.get(message.labels, MessageIndex())
                    self._keep(message, [index.unused_key(content) for content in answer.keys_of(message.text)])
                    kept.append(message)
        finally:
            releases = [message.release for message in messages if message not in kept]
            if errors := call_all([*releases, partial(self._store.close, self._key)]):
                raise errors[0]

    def abort(self) -> None:
        """End the request after an error; messages that were submitted stay stored."""
        self._turn.close()
        self._store.close(self._key)


def _source_of(stored: StoredMessage, is_complete: bool) -> str:
    """Return where the tokens of a prefill come from: one of `SOURCES`."""
    if stored.is_partial:
        return "remote" if stored.is_imported else "other_model"
    return "message" if is_complete and stored.message.finish_reason == "cached" else "computed"


class ReusePlanner:
    """Plans requests in the reuse mode that they choose."""

    def __init__(self, engine: Engine, store: MessageStore) -> None:
        self._engine, self.store = engine, store

    def check(self, mode: ReuseMode) -> None:
        """Check that the model supports a reuse mode."""
        if mode != "exact" and not self._engine.model_info.supports_shift:
            name = self._engine.model_info.name
            raise InvalidRequestError(f"reuse={mode!r}: the positions of {name} cannot be moved; use 'exact'")

    def plan(
        self,
        mode: ReuseMode,
        key: WorkflowKey,
        prompt: ChatPrompt,
        answers: Sequence[Answer],
        step: AgentStep = NO_AGENT,
    ) -> Plan:
        """Submit the answers to one prompt."""
        self.store.agent_sessions.expire()
        if mode == "exact":
            return plan_exact(self._engine, self.store, key, prompt, answers, step)
        return (plan_messages if mode == "messages" else plan_auto)(self.store, key, prompt, answers, step)
