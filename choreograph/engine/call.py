"""One `prefill` or `decode` on its way from submission to a finished message. Owns its own state only."""

import time
from dataclasses import dataclass, field
from enum import Enum

from ..errors import ChoreographError
from ..kv.encoding import Encoding, Sight
from ..types import BASE, FinishReason, Mode, Timing, Usage
from .generation import Generation


class State(Enum):
    """WAITING for parents or room; RUNNING; KNOWN: every token is chosen, the last ones not encoded yet."""

    WAITING = "waiting"
    RUNNING = "running"
    KNOWN = "known"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(eq=False)
class Call:
    """prompt: the tokens of a prefill, or the header of a decode. generation is None for a prefill.

    offsets[i] is None where the default rule places parent i; likewise new_offset. `start` and `placed` are
    known once every parent's length is. cuts[i]: the tokens first <= k < last of parent i that are seen; None: all.
    layers: where alone it is computed, beginning from what `source` kept; None: in all.
    """

    id: int
    session: int
    mode: Mode
    salt: str
    prompt: list[int]
    parents: tuple["Call", ...]
    offsets: tuple[int | None, ...]
    new_offset: int | None
    cuts: tuple[tuple[int, int] | None, ...]
    generation: Generation | None = None
    source: "Call | None" = None  # a prefill of what this call will turn out to say, where it says it
    layers: frozenset[int] | None = None
    footer: list[int] = field(default_factory=list)
    state: State = State.WAITING
    start: int | None = None
    placed: tuple[int, ...] = ()
    encoding: Encoding | None = None
    sights: tuple[Sight, ...] = ()
    beginning: Sight | None = None  # what stands for its first tokens until they are copied
    error: ChoreographError | None = None
    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)
    children_waiting: int = 0
    released: bool = False
    abandoned: bool = False
    model: str = BASE  # what computes it
    group: object = None  # whose encoding it makes, for those who advise the cache
    rebuilds: bool = False  # not anybody's call: computes a dropped encoding again
    submitted_at: float = field(default_factory=time.perf_counter)
    ready_at: float = 0.0
    served_at: int = 0
    passed_over: int = 0
    started_at: float | None = None
    first_token_at: float | None = None
    known_at: float | None = None

    @classmethod
    def rebuilding(cls, id: int, encoding: Encoding) -> "Call":
        """A prefill in the pages of an encoding that exists, of what it is and saw."""
        call = cls(id, 0, "choreographed", "", list(encoding.tokens), (), (), None, ())
        call.rebuilds, call.state, call.passed_over = True, State.RUNNING, 1 << 30
        call.model, call.layers = encoding.model, encoding.layers
        call.encoding, call.sights, call.start = encoding, encoding.context, encoding.start
        return call

    @property
    def is_decode(self) -> bool:
        return self.generation is not None

    @property
    def ends_next(self) -> bool:
        """Whether the token that is chosen next is its last one in any case."""
        return self.generation is not None and len(self.generation.tokens) + 1 >= self.generation.limit

    @property
    def views(self) -> "tuple[Call, ...]":
        """The calls whose encodings its readers see: of one that is computed in some layers, `source` in the others."""
        return (self,) if self.layers is None or self.source is None else (self, self.source)

    @property
    def work(self) -> Encoding:
        """What an admitted call is encoding."""
        assert self.encoding is not None
        return self.encoding

    @property
    def tokens_known(self) -> bool:
        """Whether every token of the message is chosen (encoded or not)."""
        if not self.is_decode:
            sound = self.state not in (State.FAILED, State.CANCELLED)
            return sound and (self.source is None or self.source.tokens_known)
        return self.state in (State.KNOWN, State.DONE)

    @property
    def ended(self) -> bool:
        return self.state in (State.DONE, State.FAILED, State.CANCELLED)

    @property
    def tokens(self) -> list[int]:
        """header + generated + footer of a decode so far; the tokens of a prefill."""
        if self.generation is None:
            return self.prompt if self.source is None else self.source.tokens
        return self.prompt + self.generation.tokens + (self.footer if self.tokens_known else [])

    def seen_tokens(self) -> list[list[int]]:
        """What is seen of each parent, once every parent's tokens are known."""
        pairs = zip(self.parents, self.cuts, strict=True)
        return [p.tokens if cut is None else p.tokens[slice(*cut)] for p, cut in pairs]

    @property
    def message_holder(self) -> tuple[str, int]:
        return ("message", self.id)

    @property
    def call_holder(self) -> tuple[str, int]:
        return ("call", self.id)

    @property
    def needs(self) -> tuple["Call", ...]:
        """The calls that have to be known before it can run, and to stay until then."""
        sources = tuple(p.source for p in (*self.parents, self) if p.source is not None)
        return self.parents + sources

    def get_ready(self) -> None:
        """Everything that it needs is known: takes over what it repeats, and finds when it was submitted and every
        decoded ancestor was known; prefills in between count as its work."""
        if self.source is not None:
            self.prompt, self.offsets, self.new_offset = self.source.tokens, self.source.placed, self.source.start
        waits = [p.known_at if p.is_decode else p.ready_at for p in self.needs]
        self.ready_at = max([self.submitted_at, *(w for w in waits if w is not None)])

    @property
    def timing(self) -> Timing:
        start = max(self.submitted_at, self.ready_at)
        return Timing(
            queued=None if self.started_at is None else max(0.0, self.started_at - start),
            ttft=None if self.first_token_at is None else self.first_token_at - start,
            e2e=None if self.known_at is None else max(0.0, self.known_at - start),
        )
