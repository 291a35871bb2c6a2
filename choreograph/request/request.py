"""Requests: what a call asks for, and how far it is."""

import time
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from ..attention.backend import AttentionHook
from ..attention.metadata import Alignment
from ..errors import ChoreographError, RequestFailedError
from ..kv_cache.entry import KVEntry, KVSlice, TokenRuns, entries_of
from ..namespace import Namespace
from ..outputs import BASE_MODEL, FinishReason, Mode, Timing, Usage
from .decode_state import DecodeState

Extension = TypeVar("Extension")

NO_USAGE = Usage()


class RequestState(Enum):
    """Life cycle of a request; the last three states are final."""

    WAITING = "waiting"  # for parents or capacity
    RUNNING = "running"  # admitted, with a KV entry
    TOKENS_FINAL = "generated"  # all tokens sampled; KV of the last ones is computed by a later step
    DONE = "done"  # all tokens sampled, no computation left
    FAILED = "failed"  # `error` is set
    CANCELLED = "cancelled"  # released before all tokens were final


class Purpose(Enum):
    """Why a request exists."""

    CALL = "call"  # a call of a session
    ANSWER_CONTEXT = "answer context"  # a call too: the answer that it is encoded for pays for its tokens
    CONTEXT = "context"  # internal: a part of another request's context, which it replaces and which pays for it
    RECOMPUTE = "recompute"  # internal: computes a discarded entry again


@dataclass(slots=True)
class Reencoding:
    """Tokens of another request, often of another model, that are prefilled again."""

    source: "Request"
    keeps_positions: bool = True  # of `source`: own and those of the parents
    layers: frozenset[int] | None = None  # computed, from the hidden states of `source`; None: all
    needs_entry: bool = False  # the request waits until `source` has an entry
    is_placed: bool = False  # the positions were taken over


@dataclass(slots=True)
class RequestTimes:
    """Times of `time.perf_counter()`, in seconds."""

    submitted: float = field(default_factory=time.perf_counter)
    ready: float = 0.0  # the tokens of all parents are final
    started: float | None = None  # first step
    first_token: float | None = None
    finished: float | None = None

    @property
    def timing(self) -> Timing:
        """Queue time, TTFT and end-to-end time in seconds."""
        start = max(self.submitted, self.ready)
        return Timing(
            queue_time=None if self.started is None else max(0.0, self.started - start),
            ttft=None if self.first_token is None else self.first_token - start,
            e2e=None if self.finished is None else max(0.0, self.finished - start),
        )


@dataclass(slots=True)
class SchedulingState:
    """What the scheduler remembers of a request between steps."""

    last_step: int = 0  # that computed tokens of it
    num_skipped_steps: int = 0  # in which its prompt was deferred
    num_passed_over: int = 0  # later requests admitted while this one waited for capacity
    skips_prefix: bool = False  # prefix mode: compute the whole prompt, for lack of memory next to cached entries


@dataclass(eq=False)
class Request:
    """One prefill or decode."""

    id: int
    session_id: int
    mode: Mode
    namespace: Namespace  # separates the cache by model, client and labels
    prompt: list[int]  # tokens of a prefill, or the header of a decode
    parents: tuple["Request", ...]
    # [start, end) of the visible tokens of each parent; None: all
    parent_slices: tuple[tuple[int, int] | None, ...]
    offsets: tuple[int | None, ...]  # position of each parent; None: right after the previous one
    new_offset: int | None  # position of the first own token; None: after the last parent
    alignments: tuple[Alignment | None, ...] = ()  # of attention to each parent; empty: none
    runs: TokenRuns | None = None  # where the positions of a prefill's tokens are not consecutive
    decode_state: DecodeState | None = None  # None for a prefill
    reencoding: Reencoding | None = None  # None: `prompt` has the tokens
    model: str = BASE_MODEL  # model or adapter that computes it
    weights_group: str = BASE_MODEL  # requests of one group share a batch; adapters are in their base's
    priority: int = 0  # the lowest number is served first
    sequence: int = 0  # ascends in order of submission, which ids may not
    purpose: Purpose = Purpose.CALL
    # called after each layer with that of the rows that are computed; its KV is shared with no request
    hook: AttentionHook | None = None
    state: RequestState = RequestState.WAITING
    position: int | None = None  # set once the lengths of all parents are final
    parent_positions: tuple[int, ...] = ()  # likewise; of the parents that the call has named
    entry: KVEntry = None  # type: ignore[assignment]  # set when the request is admitted
    context: tuple[KVSlice, ...] = ()  # slices this request attends to
    error: ChoreographError | None = None
    finish_reason: FinishReason | None = None
    usage: Usage = NO_USAGE
    num_waiting_dependents: int = 0  # waiting requests that keep this one from being released
    released: bool = False
    cancel_when_computed: bool = False
    scheduling: SchedulingState = field(default_factory=SchedulingState)
    times: RequestTimes = field(default_factory=RequestTimes)
    extensions: dict[type, Any] = field(default_factory=dict)  # state of features, by its type

    @classmethod
    def for_recompute(cls, id: int, entry: KVEntry, weights_group: str) -> "Request":
        """Create a prefill that recomputes an existing entry in its own pages."""
        request = cls(id, 0, "choreographed", Namespace(), list(entry.tokens), (), (), (), None)
        request.purpose, request.state, request.scheduling.num_skipped_steps = (
            Purpose.RECOMPUTE,
            RequestState.RUNNING,
            1 << 30,
        )
        request.model, request.weights_group = entry.model, weights_group
        request.entry, request.context, request.position = entry, entry.context, entry.base_position
        return request

    def for_context(
        self,
        id: int,
        tokens: list[int],
        parents: tuple["Request", ...],
        parent_slices: tuple[tuple[int, int] | None, ...],
    ) -> "Request":
        """Create a prefill of tokens that this request will attend to.

        The parents follow each other without gaps, unless its offsets are set. It is kept for its readers only.
        """
        return Request(
            id=id,
            session_id=self.session_id,
            mode="choreographed",
            namespace=self.namespace,
            prompt=tokens,
            parents=parents,
            parent_slices=parent_slices,
            offsets=(None,) * len(parents),
            new_offset=None,
            model=self.model,
            weights_group=self.weights_group,
            purpose=Purpose.CONTEXT,
            priority=self.priority,
            sequence=self.sequence,
            times=RequestTimes(self.times.submitted),
            released=True,
        )

    def extension(self, kind: type[Extension]) -> Extension | None:
        """Return the state of a feature, if the request has one."""
        return self.extensions.get(kind)

    def extend(self, state: object) -> None:
        """Set the state of a feature."""
        self.extensions[type(state)] = state

    @property
    def is_decode(self) -> bool:
        return self.decode_state is not None

    @property
    def layers(self) -> frozenset[int] | None:
        """Layers that are computed; None for all."""
        return None if self.reencoding is None else self.reencoding.layers

    @property
    def footer(self) -> list[int]:
        """Tokens appended after the generated ones."""
        return [] if self.decode_state is None else self.decode_state.footer

    @property
    def computes_all_rows(self) -> bool:
        """True if no own token may be copied: its row is used, or its position may differ."""
        is_scored = self.decode_state is not None and self.decode_state.prompt_scorer is not None
        return is_scored or self.hook is not None or self.runs is not None

    @property
    def is_text_only(self) -> bool:
        """True if the request computes nothing.

        That is a prefill outside of choreographed mode: decodes include its text.
        """
        return self.mode != "choreographed" and self.decode_state is None

    def token_limits(self, num_prompt_tokens: int, max_positions: int) -> tuple[int, int]:
        """Return the required and the maximum length of the KV entry.

        The first must fit into an empty cache. They differ for a decode without a limit: a prompt and one token must fit.
        """
        if self.decode_state is None:
            return num_prompt_tokens, num_prompt_tokens
        num_own, is_unlimited = num_prompt_tokens + len(self.decode_state.footer), self.decode_state.is_unlimited
        max_tokens = num_own + max(1, min(self.decode_state.max_new_tokens, max_positions - num_own))
        return num_own + 1 if is_unlimited else max_tokens, max_tokens

    @property
    def order(self) -> tuple[int, int, bool, int]:
        """Sort key; prefills of a request's context come before it."""
        return self.priority, self.sequence, self.purpose is not Purpose.CONTEXT, self.id

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return 0 if self.decode_state is None else len(self.decode_state.tokens)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are not scheduled yet."""
        return len(self.entry.tokens) - self.entry.num_scheduled_tokens

    @property
    def finishes_next_step(self) -> bool:
        """True if the next token reaches the token limit."""
        return self.decode_state is not None and len(self.decode_state.tokens) + 1 >= self.decode_state.max_new_tokens

    @property
    def source_chain(self) -> "tuple[Request, ...]":
        """Requests that own the KV entries of this message.

        A partial prefill owns the computed layers, its source the others.
        """
        if self.reencoding is None or self.reencoding.layers is None:
            return (self,)
        return (self, *self.reencoding.source.source_chain)

    @property
    def tokens_final(self) -> bool:
        """True if every token is known, even before its KV is computed."""
        if not self.is_decode:
            is_valid = self.state not in (RequestState.FAILED, RequestState.CANCELLED)
            return is_valid and (self.reencoding is None or self.reencoding.source.tokens_final)
        return self.state in (RequestState.TOKENS_FINAL, RequestState.DONE)

    @property
    def current_usage(self) -> Usage:
        """Usage so far, including tokens of an unfinished or cancelled decode."""
        if self.decode_state is None:
            return self.usage
        return replace(self.usage, completion_tokens=len(self.decode_state.tokens))

    @property
    def is_finished(self) -> bool:
        return self.state in (RequestState.DONE, RequestState.FAILED, RequestState.CANCELLED)

    @property
    def tokens(self) -> list[int]:
        """Tokens of a prefill; header, generated and footer of a decode."""
        state = self.decode_state
        if state is None:
            return self.prompt if self.reencoding is None else self.reencoding.source.tokens
        generated = state.tokens[:-1] if state.drops_stop else state.tokens
        return self.prompt + generated + (state.footer if self.tokens_final else [])

    def count_own_context(self) -> int:
        """Count the context tokens that were encoded for this answer."""
        if not any(map(_is_paid_by_answer, self.parents)):
            return 0
        parents = zip(self.parents, self.parent_tokens(), strict=True)
        return sum(len(ids) for parent, ids in parents if _is_paid_by_answer(parent))

    def start_generation(self, max_positions: int) -> None:
        """Complete the sampling state of a decode whose parents are final.

        Args:
            max_positions: positions left for generated tokens and footer.
        """
        decode_state = self.decode_state
        assert decode_state is not None
        # the only sampling option that depends on context tokens
        if decode_state.sampling.repetition_penalty != 1.0:
            decode_state.prompt = [t for tokens in self.parent_tokens() for t in tokens] + self.prompt
        if decode_state.forced_tokens is None:
            max_generated = max_positions - len(decode_state.footer)
            decode_state.max_new_tokens = min(decode_state.max_new_tokens, max(1, max_generated))

    def admission_usage(self, num_context_tokens: int) -> Usage:
        """Return the usage of a request that has been admitted.

        A prefill of its context is paid for by the first request that reads it.
        """
        prefills = [] if self.purpose is Purpose.CONTEXT else [p for p in self.parents if p.purpose is Purpose.CONTEXT]
        num_replaced = sum(prefill.usage.computed_tokens for prefill in prefills)
        return Usage(
            cached_tokens=num_context_tokens - num_replaced,
            computed_tokens=len(self.entry.tokens) + num_replaced,
            repaired_tokens=num_replaced,
        )

    def parent_tokens(self) -> list[list[int]]:
        """Return the visible tokens of each parent; all must be final."""
        pairs = zip(self.parents, self.parent_slices, strict=True)
        return [p.tokens if token_range is None else p.tokens[slice(*token_range)] for p, token_range in pairs]

    def pieces(self) -> "list[tuple[Request, int, int, int]]":
        """Return the runs of the context in order: parent, tokens [start, end), position of the first one."""
        spans = [part or (0, len(p.tokens)) for p, part in zip(self.parents, self.parent_slices, strict=True)]
        pieces, begin = [], 0
        offsets = self.offsets if self.mode == "choreographed" else (None,) * len(spans)  # else concatenated
        for parent, (start, end), offset in zip(self.parents, spans, offsets, strict=True):
            begin, runs = begin if offset is None else offset, parent.runs
            for first, last in ((start, end),) if runs is None else runs.split(start, end):
                moved = first - start if runs is None else runs.position(first) - runs.position(start)
                pieces.append((parent, first, last, begin + moved))
            begin += end - start
        return sorted(pieces, key=lambda piece: piece[3]) if any(parent.runs for parent in self.parents) else pieces

    @property
    def read_entries(self) -> list[KVEntry]:
        """KV entries that must be on the device while it runs."""
        return entries_of(self.context, None if self.entry is None else self.entry.layers.hidden_source)

    @property
    def message_owner(self) -> tuple[str, int]:
        return ("message", self.id)

    @property
    def request_owner(self) -> tuple[str, int]:
        return ("call", self.id)

    @property
    def dependencies(self) -> tuple["Request", ...]:
        """Requests whose tokens must be final before this one is admitted."""
        result = self.parents
        for request in (*self.parents, self):
            if request.reencoding is not None:
                result += (request.reencoding.source,)
        return result

    @property
    def dependencies_ready(self) -> bool:
        """True if all tokens the request depends on are final."""
        copy = self.reencoding
        if copy is not None:
            if not copy.source.tokens_final:
                return False
            if copy.keeps_positions and copy.source.position is None:
                return False
            if copy.needs_entry and copy.source.entry is None:
                return False  # it waits for capacity
        needs_entries = self.mode == "choreographed"
        return all(
            parent.tokens_final and (not needs_entries or all(p.entry is not None for p in parent.source_chain))
            for parent in self.parents
        )

    def resolve_dependencies(self) -> None:
        """Copy tokens and placement of what it re-encodes, and set `times.ready`.

        Called when all dependencies are final. `times.ready` is the start of TTFT: the maximum of
        the submit time and the finish times of decoded ancestors. Prefills after those count as
        work of this request.
        """
        copy = self.reencoding
        if copy is not None:
            self.prompt = copy.source.tokens
            if copy.keeps_positions and not copy.is_placed:
                self.offsets, self.new_offset = copy.source.parent_positions, copy.source.position
                copy.is_placed = True
        finish_times = [p.times.finished if p.is_decode else p.times.ready for p in self.dependencies]
        # where parents were replaced, what was known of the earlier ones stays
        self.times.ready = max([self.times.submitted, self.times.ready, *(t for t in finish_times if t is not None)])

    @property
    def timing(self) -> Timing:
        """Queue time, TTFT and end-to-end time in seconds."""
        return self.times.timing


def _is_paid_by_answer(request: Request) -> bool:
    return request.purpose is Purpose.ANSWER_CONTEXT and request.usage.computed_tokens > 0


def has_inputs(request: Request) -> bool:
    """True unless a partial prefill's hidden states are still being loaded."""
    source = request.entry.layers.hidden_source
    return source is None or source.transfer is None or source.transfer.has_inputs


def wrap_error(request: Request, description: str, exc: Exception) -> RequestFailedError:
    """Return the error of a failed request, with `exc` as its cause."""
    error = RequestFailedError(f"message {request.id}: {description} {type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error
