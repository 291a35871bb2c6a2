"""Requests, and the sampling state and output of decodes."""

import sys
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch
from jaxtyping import Bool

from ..errors import ChoreographError, RequestFailedError
from ..execution.prompt_scoring import PromptScorer
from ..kv_cache.entry import KVEntry, KVSlice, entries_of
from ..namespace import Namespace
from ..outputs import BASE_MODEL, FinishReason, Mode, Timing, TokenLogprob, Usage
from ..sampling_params import SamplingParams
from ..stop_strings import ROOT
from .detokenizer import Detokenizer
from .penalties import Penalties

if TYPE_CHECKING:
    from ..attention.backend import QueryObserver
    from ..features.cross_model import RemoteContext
    from ..features.repair.strategy import Repair

UNIFORM_BATCH = 16  # random numbers drawn at once


class TokenMask(Protocol):
    """Restriction of the next token of one decode, for structured outputs."""

    def allowed(self) -> Bool[torch.Tensor, " V"]:
        """Return the tokens that may come next, on the host."""

    def advance(self, token: int) -> None:
        """Append a token; may start computing the next mask meanwhile."""


@dataclass
class DecodeState:
    """Sampling state and generated output of one decode."""

    sampling: SamplingParams
    # header tokens; context tokens before them if the repetition penalty needs them
    prompt: list[int]
    stop_tokens: frozenset[int]  # token ids that end the message
    generator: torch.Generator
    forced_tokens: list[int] | None = None  # taken in order instead of sampling
    is_chat_turn: bool = False  # the footer is the template's: it replaces a generated stop token
    max_new_tokens: int = 0  # tokens
    is_unlimited: bool = False  # the message may use the whole cache (`max_tokens=None`)
    detokenizer: Detokenizer | None = None
    prompt_scorer: PromptScorer | None = None  # of `SamplingParams.prompt_logprobs`
    tokens: list[int] = field(default_factory=list)  # generated so far, the stop token included
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""  # generated text, truncated at a stop string
    next_logprob: TokenLogprob | None = None  # of the token about to be appended
    # receives float32 (V,) for every token
    on_logprobs: Callable[[torch.Tensor], None] | None = None
    pending_logprobs: torch.Tensor | None = None  # (V,) float32, not delivered yet
    token_mask: TokenMask | None = None  # tokens that may be sampled next; None: all
    penalties: Penalties = field(default_factory=Penalties)
    num_drafted: int = 0  # last ones of `tokens`, which may be rejected
    stop_state: int = ROOT  # of the stop strings' automaton, after the text
    num_stable_chars: int = 0  # of the text, without stop strings: no later text changes them
    needs_host_sampling: bool = False  # the last token could not be sampled on the device
    _uniforms: list[float] = field(default_factory=list)  # drawn but unused, the next one last

    def __post_init__(self) -> None:
        self.is_unlimited = self.sampling.max_tokens is None and self.forced_tokens is None
        limit = sys.maxsize if self.sampling.max_tokens is None else self.sampling.max_tokens
        self.max_new_tokens = len(self.forced_tokens) if self.forced_tokens is not None else limit

    def release_sampling(self) -> None:
        """Drop what only the sampling of further tokens needs."""
        self.prompt, self.penalties = [], Penalties()

    @property
    def stop_allowed(self) -> bool:
        """True if the message may end with the next token (`min_tokens`)."""
        return len(self.tokens) >= self.sampling.min_tokens

    def next_uniform(self) -> float:
        """Return the uniform number in [0, 1) for the next token.

        Idempotent: `append` consumes the number, so a step can be retried.
        """
        if not self._uniforms:  # drawn in a batch: the same sequence as one by one
            self._uniforms = torch.rand(UNIFORM_BATCH, generator=self.generator, dtype=torch.float64).tolist()[::-1]
        return self._uniforms[-1]

    def after(self, tokens: list[int]) -> "DecodeState":
        """Return a state to sample the token after `tokens` from."""
        while len(self._uniforms) <= len(tokens) and not self.sampling.greedy:  # the same sequence as one by one
            drawn = torch.rand(UNIFORM_BATCH, generator=self.generator, dtype=torch.float64)
            self._uniforms = drawn.tolist()[::-1] + self._uniforms
        state = copy(self)
        state.num_drafted = len(tokens)
        state.tokens, state._uniforms = self.tokens + tokens, self._uniforms[: -len(tokens)]
        return state

    def append(self, token: int) -> FinishReason | None:
        """Append the next token.

        Returns the finish reason if it ends the message, else None.
        """
        stop_allowed = self.stop_allowed
        self.tokens.append(token)
        if self.token_mask is not None:
            self.token_mask.advance(token)
        if self.next_logprob is not None:
            self.logprobs.append(self.next_logprob)
        self.next_logprob = self.pending_logprobs = None
        del self._uniforms[-1:]
        is_last = len(self.tokens) >= self.max_new_tokens
        stop = token in self.stop_tokens and (is_last if self.forced_tokens is not None else stop_allowed)
        piece = self.detokenizer.step(token) if self.detokenizer is not None and not stop else ""
        has_stop_string = self._append_text(piece, stop_allowed and (is_last or self.forced_tokens is None))
        if not (stop or has_stop_string or is_last):
            return None
        if not has_stop_string:
            self.flush_text()
        if stop or (has_stop_string and self.forced_tokens is None):
            return "stop"
        return "length" if self.forced_tokens is None else "forced"

    def flush_text(self) -> None:
        """Append text that waited for the rest of a character."""
        if self.detokenizer is not None:
            self.text += self.detokenizer.flush()

    def _append_text(self, piece: str, can_stop: bool) -> bool:
        """Append text up to a stop string; return whether one ends it.

        Only a stop string that ends in the piece counts: `min_tokens` excluded earlier ones.
        """
        automaton, text = self.sampling.stop_automaton, self.text + piece
        end: int | None = None
        if automaton is not None:
            self.stop_state, start = automaton.read(self.stop_state, piece)
            end = len(self.text) + start if can_stop and start is not None else None
        self.text = text[:end]  # assigned once: other threads must not read text that a stop string removes
        if automaton is not None and end is None:
            self.num_stable_chars = len(text) - automaton.num_held(self.stop_state)
        return end is not None

    @property
    def stable_text(self) -> str:
        """Text that no stop string can truncate anymore."""
        return self.text[: self.num_stable_chars] if self.sampling.stop else self.text


class RequestState(Enum):
    """Life cycle of a request; the last three states are final."""

    WAITING = "waiting"  # for parents or capacity
    RUNNING = "running"  # admitted, with a KV entry
    TOKENS_FINAL = "generated"  # all tokens sampled; KV of the last ones is computed by a later step
    DONE = "done"  # all tokens sampled, no computation left
    FAILED = "failed"  # `error` is set
    CANCELLED = "cancelled"  # released before all tokens were final


@dataclass(eq=False)
class Request:
    """One prefill or decode."""

    id: int
    session_id: int
    mode: Mode
    namespace: Namespace  # separates the cache by model, client and labels
    prompt: list[int]  # tokens of a prefill, or the header of a decode
    parents: tuple["Request", ...]
    offsets: tuple[int | None, ...]  # position of each parent; None: right after the previous one
    new_offset: int | None  # position of the first own token; None: after the last parent
    # [start, end) of the visible tokens of each parent; None: all
    parent_slices: tuple[tuple[int, int] | None, ...]
    decode_state: DecodeState | None = None  # None for a prefill
    source: "Request | None" = None  # request, often of another model, whose tokens this one prefills again
    keeps_positions: bool = True  # at the positions of `source`
    # partial prefill: only these layers, from the hidden states of `source`; None: all
    computed_layers: frozenset[int] | None = None
    # sender whose pair with `model` has a selector: it sets `computed_layers` when the request is admitted
    selects_from: str | None = None
    remote: "RemoteContext | None" = None  # of a `source` in another process: loads its KV
    footer: list[int] = field(default_factory=list)  # tokens appended after the generated ones
    state: RequestState = RequestState.WAITING
    position: int | None = None  # set once the lengths of all parents are final
    parent_positions: tuple[int, ...] = ()  # likewise
    entry: KVEntry = None  # type: ignore[assignment]  # set when the request is admitted
    context: tuple[KVSlice, ...] = ()  # slices this request attends to
    error: ChoreographError | None = None
    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)
    drops_stop: bool = False  # the last generated token is not part of the message: the footer ends it
    num_waiting_dependents: int = 0  # waiting requests that keep this one from being released
    released: bool = False
    cancel_when_computed: bool = False
    priority: int = 0  # the lowest number is served first
    sequence: int = 0  # ascends in order of submission, which ids may not
    num_passed_over: int = 0  # later requests admitted while this one waited for capacity
    skips_prefix: bool = False  # prefix mode: compute the whole prompt, for lack of memory next to cached entries
    model: str = BASE_MODEL  # model or adapter that computes it
    weights_group: str = BASE_MODEL  # requests of one group share a batch; adapters are in their base's
    is_part_of_answer: bool = False  # encoded by the call that returns the answer, for whose usage it is not cached
    agent_key: object = None  # agent the KV entry belongs to, for eviction hints
    is_recompute: bool = False  # internal: recomputes a discarded entry
    scoring: "Request | None" = None  # internal: computes the prompt to score the context, before `repair` is planned
    repair: "Repair | None" = None  # share of the context to recompute; None once that is planned
    is_repair: bool = False  # internal: recomputes a part of another request's context
    # internal: called after each layer with that of the rows that are computed; its KV is shared with no request
    observer: "QueryObserver | None" = None
    text_labels: frozenset[str] = frozenset()  # of the tokens
    labels: frozenset[str] = frozenset()  # of the keys and values: `text_labels` and those of everything it attends to
    # request and first token whose text this one repeats: of a repair or of an imported message
    origin: "tuple[Request, int] | None" = None
    repaired_positions: tuple[int, ...] = ()  # `parent_positions` of a request whose parents were replaced
    # seconds of time.perf_counter(), as the times below
    submit_time: float = field(default_factory=time.perf_counter)
    ready_time: float = 0.0
    last_scheduled_step: int = 0
    num_skipped_steps: int = 0
    start_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None

    @classmethod
    def for_recompute(cls, id: int, entry: KVEntry, weights_group: str) -> "Request":
        """Create a prefill that recomputes an existing entry in its own pages."""
        request = cls(id, 0, "choreographed", Namespace(), list(entry.tokens), (), (), None, ())
        request.is_recompute, request.state, request.num_skipped_steps = True, RequestState.RUNNING, 1 << 30
        request.model, request.weights_group, request.computed_layers = (
            entry.model,
            weights_group,
            entry.layers.computed,
        )
        request.entry, request.context, request.position = entry, entry.context, entry.base_position
        return request

    @property
    def is_decode(self) -> bool:
        return self.decode_state is not None

    @property
    def computes_all_rows(self) -> bool:
        """True if no own token may be copied: its row is used."""
        is_scored = self.decode_state is not None and self.decode_state.prompt_scorer is not None
        return is_scored or self.observer is not None

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
        num_own, is_unlimited = num_prompt_tokens + len(self.footer), self.decode_state.is_unlimited
        max_tokens = num_own + max(1, min(self.decode_state.max_new_tokens, max_positions - num_own))
        return num_own + 1 if is_unlimited else max_tokens, max_tokens

    @property
    def order(self) -> tuple[int, int, bool, int]:
        """Sort key; prefills of a repair come before its request."""
        return self.priority, self.sequence, not self.is_repair, self.id

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

        A partial prefill owns the computed layers, its `source` the others.
        """
        if self.computed_layers is None or self.source is None:
            return (self,)
        return (self, *self.source.source_chain)

    @property
    def tokens_final(self) -> bool:
        """True if every token is known, even before its KV is computed."""
        if not self.is_decode:
            is_valid = self.state not in (RequestState.FAILED, RequestState.CANCELLED)
            return is_valid and (self.source is None or self.source.tokens_final)
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
        if self.decode_state is None:
            return self.prompt if self.source is None else self.source.tokens
        generated = self.decode_state.tokens[:-1] if self.drops_stop else self.decode_state.tokens
        return self.prompt + generated + (self.footer if self.tokens_final else [])

    def join_footer(self) -> None:
        """Remove a stop token that the footer starts with or replaces.

        The footer of a chat turn replaces any stop token: the turn ends as its template writes it.
        """
        assert self.decode_state is not None
        last = self.decode_state.tokens[-1] if self.decode_state.tokens else None
        if last not in self.decode_state.stop_tokens:
            return
        if self.footer and self.footer[0] == last:
            self.footer = self.footer[1:]
        else:
            self.drops_stop = self.decode_state.is_chat_turn

    def count_own_context(self) -> int:
        """Count the context tokens that were encoded for this answer."""
        parents = zip(self.parents, self.parent_tokens(), strict=True)
        return sum(len(ids) for parent, ids in parents if parent.is_part_of_answer and parent.usage.computed_tokens)

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
            max_generated = max_positions - len(self.footer)
            decode_state.max_new_tokens = min(decode_state.max_new_tokens, max(1, max_generated))

    def admission_usage(self, num_context_tokens: int) -> Usage:
        """Return the usage of a request that has been admitted.

        A repair is paid for by the first request that reads it.
        """
        repairs = [] if self.is_repair else [parent for parent in self.parents if parent.is_repair]
        num_repaired = sum(repair.usage.computed_tokens for repair in repairs)
        return Usage(
            cached_tokens=num_context_tokens - num_repaired,
            computed_tokens=len(self.entry.tokens) + num_repaired,
            repaired_tokens=num_repaired,
        )

    def parent_tokens(self) -> list[list[int]]:
        """Return the visible tokens of each parent; all must be final."""
        pairs = zip(self.parents, self.parent_slices, strict=True)
        return [p.tokens if token_range is None else p.tokens[slice(*token_range)] for p, token_range in pairs]

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
            if request.source is not None:
                result += (request.source,)
        return result

    @property
    def dependencies_ready(self) -> bool:
        """True if all tokens the request depends on are final."""
        source = self.source
        if source is not None:
            if not source.tokens_final:
                return False
            reads_entry = self.computed_layers is not None or self.selects_from is not None
            if source.remote is None and (source.position is None or (reads_entry and source.entry is None)):
                return False  # it waits for capacity
        needs_entries = self.mode == "choreographed"
        return all(
            parent.tokens_final and (not needs_entries or all(p.entry is not None for p in parent.source_chain))
            for parent in self.parents
        )

    def resolve_dependencies(self) -> None:
        """Copy tokens and placement from `source` and set `ready_time`.

        Called when all dependencies are final. `ready_time` is the start of TTFT: the maximum of
        the submit time and the finish times of decoded ancestors. Prefills after those count as
        work of this request.
        """
        if self.source is not None and self.source.remote is None:
            self.prompt = self.source.tokens
            if self.keeps_positions:
                self.offsets, self.new_offset = self.source.parent_positions, self.source.position
        finish_times = [p.finish_time if p.is_decode else p.ready_time for p in self.dependencies]
        # a repair replaces parents: what was known of the earlier ones stays
        self.ready_time = max([self.submit_time, self.ready_time, *(t for t in finish_times if t is not None)])

    @property
    def timing(self) -> Timing:
        """Queue time, TTFT and end-to-end time in seconds."""
        start = max(self.submit_time, self.ready_time)
        return Timing(
            queue_time=None if self.start_time is None else max(0.0, self.start_time - start),
            ttft=None if self.first_token_time is None else self.first_token_time - start,
            e2e=None if self.finish_time is None else max(0.0, self.finish_time - start),
        )


def has_inputs(request: Request) -> bool:
    """True unless a partial prefill's hidden states are still being loaded."""
    source = request.entry.layers.hidden_source
    return source is None or source.transfer is None or source.transfer.has_inputs


def wrap_error(request: Request, description: str, exc: Exception) -> RequestFailedError:
    """Return the error of a failed request, with `exc` as its cause."""
    error = RequestFailedError(f"message {request.id}: {description} {type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error
