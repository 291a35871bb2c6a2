"""Which calls compute next. Owns the queues; knows encodings and rows, not models or text.

Calls are admitted in the order of submission, each with all the pages it can ever need, so that a running call
never waits for room and every step makes progress. A row may read rows of the same step (layers write before
they read), so a chain of prefills, or a finished message's last tokens and the header that follows, go in one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import CacheFull, CallFailed, ChoreographError, NeverFits
from ..kv.encoding import Encoding, Sight
from ..kv.store import Store
from ..kv.view import context_reads, own_reads
from ..ops.plan import Read
from .call import Call, State

Pass = tuple[str, frozenset[int] | None]  # weights, and the layers that are computed
PATIENCE = 8  # steps for which a prompt that nobody can use yet may be left behind


class Take(NamedTuple):
    """Rows row0.. of a batch are tokens token0 <= k < token1 of the call's encoding."""

    call: Call
    row0: int
    token0: int
    token1: int


@dataclass
class Batch:
    """One step's rows: token, logical position, slot and model of each; what they read; whose last row is sampled."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    takes: list[Take] = field(default_factory=list)
    arrivals: tuple[Callable[[int], None], ...] = ()  # waits, layer by layer, for what is still being loaded

    @property
    def samples(self) -> list[tuple[Call, int]]:
        """(call, row) of every row whose logits choose a token."""
        return [
            (call, row0 + token1 - token0 - 1)
            for call, row0, token0, token1 in self.takes
            if call.state is State.RUNNING
            and call.generation is not None
            and not call.abandoned
            and token1 == len(call.work.tokens)
        ]

    @property
    def layers(self) -> frozenset[int] | None:
        """Where alone its rows are computed, which is the same for all of them; None: in all layers."""
        return self.takes[0].call.work.layers

    @property
    def sights(self) -> Iterator[Sight]:
        return (sight for take in self.takes for sight in take.call.sights)

    def reads(self, layer: int = 0) -> Iterator[Read]:
        """What the rows read in a layer."""
        for call, row0, token0, token1 in self.takes:
            yield from context_reads(call.sights, row0, row0 + token1 - token0, layer)
            yield from own_reads(call.work, row0, token0, token1, call.beginning.count if call.beginning else 0)


class Scheduler:
    """admit: places a call and gives it room, or raises; fail: ends a call with an error. weights: what two models
    must have the same of to compute in one pass. mend: sees to what waiting calls need and is lost."""

    def __init__(
        self,
        store: Store,
        *,
        max_step_tokens: int,
        max_calls: int,
        status_aware: bool,
        admit: Callable[[Call], None],
        fail: Callable[[Call, ChoreographError], None],
        weights: Callable[[str], str],
        mend: Callable[[Sequence[Call]], None],
    ) -> None:
        self.waiting: list[Call] = []
        self.running: list[Call] = []
        self._blocked: Call | None = None  # the next call in order, if it waits for room
        self._store = store
        self._max_step_tokens = max_step_tokens
        self._max_calls = max_calls
        self._status_aware = status_aware
        self._admit = admit
        self._fail = fail
        self._weights = weights
        self._mend = mend
        self._served: dict[Pass, int] = {}  # the last step of each kind of pass
        self._step = 0

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def able(self) -> int:
        """How many calls run or wait for room alone; the others wait for parents."""
        return len(self.running) + sum(self._parents_known(call) for call in self.waiting)

    @property
    def ready(self) -> bool:
        """Whether any running call could compute in a step now."""
        hasten = not self._status_aware
        return any(_pending(call) and _is_ready(call, hasten) for call in self.running)

    @property
    def short(self) -> bool:
        """Whether the next call in order waits for room."""
        return self._blocked in self.waiting

    def next(self, begun: Sequence[Call] = ()) -> Batch | None:
        """The next step's rows, marked as scheduled; None when nothing can run. begun: calls of one pass whose next row
        is being computed already; where there are any, the step is theirs alone.

        Status-aware (KVFlow, section 3.2): calls whose context is being loaded are passed over for those that are
        ready. If none is, or by choice, they run at once, each layer waiting for its load.
        """
        self._admit_waiting()
        self._step += 1
        if begun:  # nothing that they see is loading any more
            return self._first([list(begun)], hasten=True)
        passes = self._passes(self._order())
        batch = self._first(passes, hasten=not self._status_aware)
        if batch is None and self._status_aware and self._store.traffic.loads:
            batch = self._first(passes, hasten=True)
        return batch

    def _passes(self, order: list[Call]) -> list[list[Call]]:
        """The calls that one pass could compute together: the same weights, the same layers. Those of the kind that
        waited longest come first."""
        kinds: dict[Pass, list[Call]] = {}
        for call in order:
            kinds.setdefault((self._weights(call.model), call.work.layers), []).append(call)
        return [kinds[kind] for kind in sorted(kinds, key=lambda kind: self._served.get(kind, 0))]

    def _first(self, passes: list[list[Call]], *, hasten: bool) -> Batch | None:
        """A batch of the first pass that has anything to compute."""
        for calls in passes:
            batch = self._pack(calls, hasten=hasten)
            if batch.takes:
                self._served[self._weights(calls[0].model), calls[0].work.layers] = self._step
                return batch
        return None

    def _pack(self, order: list[Call], *, hasten: bool) -> Batch:
        batch, left, before = Batch(), self._max_step_tokens, -1
        while before < len(batch.takes) < len(order):  # once more, as long as what was taken makes others ready
            before = len(batch.takes)
            for call in order:
                work, pending = call.work, _pending(call)
                if not pending or left <= 0 or work.scheduled > work.encoded or not _is_ready(call, hasten):
                    continue
                count = min(pending, left)
                _take(batch, call, count)
                call.served_at = self._step
                left -= count
        if self._store.traffic.loads:
            loading = {s.encoding.moving for s in batch.sights if s.encoding.state == "loading"}
            batch.arrivals = self._store.traffic.arrivals(t for t in loading if t is not None)
        return batch

    def _order(self) -> list[Call]:
        """Single rows first, those that waited longest before others; then prompts as they came.

        A prompt that no running decode sees yet stays behind while somebody waits for a first token (for at most
        PATIENCE steps): it costs the same later, when it delays nobody.
        """
        single = sorted((c for c in self.running if _pending(c) == 1), key=lambda c: c.served_at)
        prompts = [c for c in self.running if _pending(c) > 1]
        if not prompts:
            return single
        wanted: set[int] = set()
        for call in reversed(self.running):
            if call.is_decode or call.work.id in wanted:
                wanted.update(sight.encoding.id for sight in call.sights)
        ahead = [c for c in prompts if c.is_decode or c.work.id in wanted or c.passed_over >= PATIENCE]
        if any(c.is_decode and c.first_token_at is None for c in self.running):
            for call in prompts:
                call.passed_over += call not in ahead
            prompts = ahead
        return [*single, *(prompts or ahead)]

    def _admit_waiting(self) -> None:
        """Admits calls in order until one has to wait for room; calls that wait for parents are passed over."""
        self._blocked = None
        self._mend(self.waiting)
        for call in list(self.waiting):
            if len(self.running) >= self._max_calls:
                break
            if call.state is not State.WAITING:
                continue
            failed = next((p for p in call.needs if p.state in (State.FAILED, State.CANCELLED)), None)
            if failed is not None:
                self._fail(call, CallFailed(f"parent {failed.id} failed: {failed.error or failed.state.value}"))
            elif self._parents_known(call) and not self._try(call):
                self._blocked = call
                break

    def _parents_known(self, call: Call) -> bool:
        if call.source is not None and not (call.source.tokens_known and call.source.start is not None):
            return False
        if call.mode != "choreographed":
            return all(p.tokens_known for p in call.parents)
        return all(p.tokens_known and all(v.encoding is not None for v in p.views) for p in call.parents)

    def _try(self, call: Call) -> bool:
        """Admits one call; False if it has to wait until a running one gives room."""
        try:
            self._admit(call)
        except CacheFull as problem:
            never = isinstance(problem, NeverFits)
            if not never and (self._store.busy or any(not running.ended for running in self.running)):
                return False
            self._fail(call, problem)
        except ChoreographError as problem:
            self._fail(call, problem)
        return True

    def withdraw_readers(self, lost: Encoding) -> None:
        """Calls that see what could not be loaded wait again, and with them those that see what they were to compute.
        None of them has computed anything: what they see was never there."""
        gone, more = {lost.id}, True
        while more:
            readers = [c for c in self.running if gone & {s.encoding.id for s in c.sights}]
            for call in readers:
                gone.add(call.work.id)
                self._withdraw(call)
            more = bool(readers)

    def _withdraw(self, call: Call) -> None:
        encoding = call.work
        some = encoding.layers is not None  # its first tokens needed nothing of what was to come later
        assert some or call.beginning is not None or not encoding.encoded, "a call has computed without what it sees"
        self.running.remove(call)
        self.take_back(call)
        if call.rebuilds:
            call.state = State.CANCELLED
            return
        self.wait_again(call)

    def take_back(self, call: Call) -> None:
        """Lets go of all that a call was given. Nothing of its encoding was computed, or nothing that counts."""
        encoding = call.work
        encoding.holders -= {call.call_holder, call.message_holder}
        self._store.drop(encoding)
        for sight in (*call.sights, *encoding.context):
            self._store.let_go(sight.encoding, call.call_holder)
        call.encoding, call.sights, call.beginning = None, (), None

    def wait_again(self, call: Call) -> None:
        """A call that was admitted, and has no encoding any more, takes its place among those that wait."""
        call.state, call.encoding = State.WAITING, None
        for parent in call.needs:
            parent.children_waiting += 1
        later = next((i for i, other in enumerate(self.waiting) if other.id > call.id), len(self.waiting))
        self.waiting.insert(later, call)

    def commit(self, batch: Batch) -> None:
        for take in batch.takes:
            take.call.work.encoded = take.token1

    def reset(self) -> None:
        """Forgets a step that was not computed."""
        for call in self.running:
            call.work.scheduled = call.work.encoded

    def check(self) -> None:
        assert all(call.state is State.WAITING for call in self.waiting)
        assert all(call.state in (State.RUNNING, State.KNOWN) for call in self.running)
        for call in self.running:
            assert call.work.scheduled == call.work.encoded
            assert _pending(call), "a running call has nothing to compute"
            assert all(sight.encoding.holders for sight in call.sights), "a context is held by nobody"


def _pending(call: Call) -> int:
    work = call.work
    return len(work.tokens) - work.scheduled


def _is_ready(call: Call, hasten: bool) -> bool:
    """Whether all that it sees is encoded, or will be by this very step; `hasten`: or is being loaded. What it begins
    from, in the middle of the layers, has to be there."""
    lender = call.work.lender
    if lender is not None and not (lender.whole or (hasten and lender.state == "loading")):
        return False
    for encoding, first, count, *_ in call.sights:
        if encoding.scheduled < first + count and not (hasten and encoding.state == "loading"):
            return False
    return True


def _take(batch: Batch, call: Call, count: int) -> None:
    encoding = call.work
    row0, token0 = len(batch.tokens), encoding.scheduled
    token1 = token0 + count
    batch.tokens += encoding.tokens[token0:token1]
    batch.positions += range(encoding.start + token0, encoding.start + token1)
    batch.slots += [encoding.slot(token) for token in range(token0, token1)]
    batch.models += [encoding.model] * count
    batch.takes.append(Take(call, row0, token0, token1))
    encoding.scheduled = token1
