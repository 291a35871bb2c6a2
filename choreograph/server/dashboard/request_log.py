"""Finished and running requests of every tenant, for the dashboard.

All functions run in the engine's thread. Nothing is kept of a finished request but numbers and labels.
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from ...api.message import Message
from ...features.explain import explain
from ...messages.handle import MessageHandle, unwrap_slice
from ...request.request import Purpose, Request, RequestState
from ..reuse.answer_plan import SOURCES

MAX_RECORDS, MAX_WORKFLOWS, MAX_ROWS = 200, 32, 80  # requests and workflows of a tenant, messages of a workflow

MAX_PARENTS = 32  # of an answer that is explained; its cost is quadratic

SESSION = "session"  # reuse mode of calls of the library, which name their own parents

INCOMPLETE = (RequestState.FAILED, RequestState.CANCELLED)


class ContextBar(NamedTuple):
    """Tokens at consecutive positions of one message's context."""

    source: int  # id of the message that the tokens belong to
    start: int  # position of the first token
    length: int  # tokens
    kind: str  # "reused", "moved" (reused at other positions), "computed" or "generated"


class ParentRow(NamedTuple):
    """One parent of an answer; numbers of tokens."""

    source: int  # id of the parent
    reused: int  # whose KV was taken as it is
    repaired: int  # computed again in this context
    computed: int  # encoded for this request
    leaked: int  # seen by the reused ones, but not before them here
    blocked: int  # before the reused ones here, but not seen by them


class MessageRow(NamedTuple):
    """What one message attended to, and itself as the last bars."""

    id: int
    label: str  # agent or stage
    bars: tuple[ContextBar, ...]
    repaired: int  # reused tokens that were computed again
    parents: tuple[ParentRow, ...] = ()  # of an answer


@dataclass(eq=False)
class RequestRecord:
    """One request of a tenant; times are `time.perf_counter()` in seconds."""

    number: int  # in the server
    tenant: str
    workflow: str
    label: str  # agent, stage or kind of request
    reuse: str  # reuse mode, or `SESSION`
    messages: Sequence[Message]  # answers; empty once the request has ended
    submitted: float  # or when the messages it attends to were final
    started: float | None = None  # first step
    first_token: float | None = None
    ended: float | None = None
    generated: int = 0  # tokens
    tokens: dict[str, int] = field(default_factory=dict)  # prompt tokens by source, once the request has ended
    status: str = "running"  # then "finished" or "failed"

    @property
    def is_waiting(self) -> bool:
        return self.ended is None and self.started is None

    @property
    def cached(self) -> int:
        return sum(self.tokens.values()) - self.tokens.get("computed", 0)

    def phases(self, now: float) -> tuple[float, float, float]:
        """Return the seconds of queue, prefill and decode so far."""
        end = now if self.ended is None else self.ended
        started = end if self.started is None else self.started
        first_token = end if self.first_token is None else self.first_token
        return max(0.0, started - self.submitted), max(0.0, first_token - started), max(0.0, end - first_token)

    def observe(self) -> None:
        """Read times and counts of the answers; never runs the engine."""
        requests = [message._request for message in self.messages]
        self.submitted = min((max(r.times.submitted, r.times.ready) for r in requests), default=self.submitted)
        self.started = min((r.times.started for r in requests if r.times.started is not None), default=None)
        self.first_token = min((r.times.first_token for r in requests if r.times.first_token is not None), default=None)
        self.generated = sum(len(r.decode_state.tokens) for r in requests if r.decode_state is not None)


class TenantLog:
    """Requests, message graphs and token counts of one tenant."""

    def __init__(self) -> None:
        self.records: deque[RequestRecord] = deque(maxlen=MAX_RECORDS)
        self.graphs: OrderedDict[str, dict[int, MessageRow]] = OrderedDict()  # by workflow; the latest last
        self.sources: Counter[str] = Counter()  # prompt tokens of all ended requests
        self.num_ended: Counter[str] = Counter()  # requests by status


class RequestLog:
    """Bounded history of the requests of a server."""

    def __init__(self) -> None:
        self._tenants: dict[str, TenantLog] = {}
        self._new_number = count(1).__next__

    def tenant(self, name: str) -> TenantLog:
        """Return what is known of a tenant, up to now."""
        log = self._tenants.setdefault(name, TenantLog())
        for record in log.records:
            if record.messages:
                record.observe()
                if record.reuse == SESSION:
                    self._end_session_call(record)
        return log

    def start(self, tenant: str, workflow: str, label: str, reuse: str, messages: Sequence[Message]) -> RequestRecord:
        """Add a request that was submitted."""
        submitted = min((message._request.times.submitted for message in messages), default=time.perf_counter())
        record = RequestRecord(self._new_number(), tenant, workflow, label, reuse, messages, submitted)
        self._tenants.setdefault(tenant, TenantLog()).records.append(record)
        return record

    def finish(self, record: RequestRecord, tokens: dict[str, int], is_complete: bool) -> None:
        """End a request; its messages may have been released."""
        log = self._tenants[record.tenant]
        record.observe()
        ends = [message._request.times.finished for message in record.messages]
        record.ended = max((end for end in ends if end is not None), default=time.perf_counter())
        record.status = "finished" if is_complete else "failed"
        record.tokens = {source: tokens[source] for source in SOURCES if tokens.get(source)} if is_complete else {}
        log.sources.update(record.tokens)
        log.num_ended[record.status] += 1
        if is_complete:
            self._add_rows(log, record)
        record.messages = ()

    def add_calls(self, tenant: str, workflow: str, calls: Sequence[tuple[str, Message]]) -> None:
        """Add completed calls of a session, as (label, message)."""
        for label, message in calls:
            record = self.start(tenant, workflow, label, SESSION, [message])
            usage = message._request.usage
            tokens = {"remote": usage.cached_tokens, "computed": usage.computed_tokens}
            self.finish(record, tokens, message.error is None)

    def _end_session_call(self, record: RequestRecord) -> None:
        """End the record of a session's call once its message has ended.

        A decode ends with its last token, whose KV may wait for the next request.
        """
        (message,) = record.messages
        request, is_complete = message._request, message._is_finished()
        if is_complete or request.state in INCOMPLETE:
            tokens = {"remote": request.usage.cached_tokens, "computed": request.usage.computed_tokens}
            self.finish(record, tokens, is_complete)

    def _add_rows(self, log: TenantLog, record: RequestRecord) -> None:
        rows = log.graphs.setdefault(record.workflow, {})
        log.graphs.move_to_end(record.workflow)
        known = set(rows)
        for answer in record.messages:
            parents = [unwrap_slice(parent) for parent in answer.parents]
            for message in (*parents, answer):
                if message.id not in rows and _has_kv(message):
                    label = record.label if message is answer else "prompt"
                    rows[message.id] = _row(message, label, known)
            if record.reuse not in ("messages", "auto"):  # each call is a request of its own
                known |= set(rows)
        for old in sorted(rows)[: max(0, len(rows) - MAX_ROWS)]:
            del rows[old]
        while len(log.graphs) > MAX_WORKFLOWS:
            log.graphs.popitem(last=False)


def _has_kv(message: MessageHandle) -> bool:
    """True for a complete message that was computed, not only text."""
    request = message._request
    return (
        request.tokens_final
        and request.position is not None
        and (request.mode == "choreographed" or (request.mode == "prefix" and request.is_decode))
    )


def _is_computed(request: Request) -> bool:
    """True for a prefill of all layers that was not cached."""
    return request.finish_reason == "encoded" and request.layers is None


def _row(message: MessageHandle, label: str, known: set[int]) -> MessageRow:
    """Return the bars of a message.

    Args:
        known: ids of messages of earlier requests, which this one has not computed.
    """
    request = message._request
    num_prompt, footer = len(request.prompt), request.footer
    footer_start = message.position + len(request.tokens) - len(footer)
    own = (message.id, message.position, num_prompt)
    parents = [  # (request, its visible tokens, their position in it, their position here)
        (parent, end - first, _base_position(parent) + first, start) for parent, first, end, start in request.pieces()
    ]
    bars: list[ContextBar] = []
    if request.mode == "prefix":  # all before a position was cached
        for source, start, num_tokens in (*((p.id, start, n) for p, n, _, start in parents), own):
            bars += _split(source, start, num_tokens, request.usage.cached_tokens)
    else:
        for parent, num_tokens, position, start in parents:
            is_new = parent.purpose is Purpose.CONTEXT or (parent.id not in known and _is_computed(parent))
            kind = "computed" if is_new else "reused" if start == position else "moved"
            bars.append(ContextBar(parent.id, start, num_tokens, kind))
        num_computed = request.usage.computed_tokens - request.usage.repaired_tokens - len(footer)
        bars += _split(*own, message.position + max(0, num_prompt - num_computed))  # equal first tokens are copied
    start = message.position + num_prompt
    bars.append(ContextBar(message.id, start, footer_start - start, "generated"))
    bars.append(ContextBar(message.id, footer_start, len(footer), "computed"))
    shown = tuple(bar for bar in bars if bar.length)
    return MessageRow(message.id, label, shown, request.usage.repaired_tokens, tuple(_parent_rows(message, known)))


def _base_position(request: Request) -> int:
    """Return the position of the first token's cached key."""
    owner = request.source_chain[-1]
    return owner.entry.base_position if owner.entry is not None else owner.position or 0


def _parent_rows(message: MessageHandle, known: set[int]) -> Iterator[ParentRow]:
    """Yield the parents of an answer, compared with prefix mode."""
    if message.kind != "decode" or len(message.parents) > MAX_PARENTS:
        return
    for parent, explained in zip(message.parents, explain(message).parents, strict=True):
        request = unwrap_slice(parent)._request
        is_new = request.id not in known and _is_computed(request)
        reused, computed = (0, explained.reused) if is_new else (explained.reused, 0)
        leaked, blocked = (sum(m.num_tokens for m in part) for part in (explained.leaked, explained.blocked))
        computed += explained.computed
        yield ParentRow(request.id, reused, explained.repaired, computed, leaked, blocked)


def _split(source: int, start: int, length: int, limit: int) -> Iterator[ContextBar]:
    """Yield the parts of [start, start + length) before and after `limit`."""
    middle = min(max(limit, start), start + length)
    if middle > start:
        yield ContextBar(source, start, middle - start, "reused")
    if middle < start + length:
        yield ContextBar(source, middle, start + length - middle, "computed")
