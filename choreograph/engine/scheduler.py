"""Which calls compute next. Owns the queues; knows encodings and rows, not models or text.

Calls are admitted in the order of submission, each with all the pages it can ever need, so that a running call
never waits for room and every step makes progress. A row may read rows of the same step (layers write before
they read), so a chain of prefills, or a finished message's last tokens and the header that follows, go in one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import CacheFull, CallFailed, ChoreographError
from ..kv.store import Store
from ..kv.view import context_reads, own_reads
from ..ops.plan import Read
from .call import Call, State


class Take(NamedTuple):
    """Rows row0.. of a batch are tokens token0 <= k < token1 of the call's encoding."""

    call: Call
    row0: int
    token0: int
    token1: int


@dataclass
class Batch:
    """One step's rows: token, logical position and slot of each; what they read; whose last row is sampled."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    takes: list[Take] = field(default_factory=list)

    @property
    def samples(self) -> list[tuple[Call, int]]:
        """(call, row) of every row whose logits choose a token."""
        return [
            (t.call, t.row0 + t.token1 - t.token0 - 1)
            for t in self.takes
            if t.call.state is State.RUNNING
            and t.call.is_decode
            and not t.call.abandoned
            and t.token1 == len(t.call.encoding.tokens)  # type: ignore[union-attr]
        ]


class Scheduler:
    """place: works out a call's placement and room; finish_now: ends a call that needs no computing."""

    def __init__(
        self,
        store: Store,
        *,
        max_step_tokens: int,
        max_calls: int,
        admit: Callable[[Call], None],
        fail: Callable[[Call, ChoreographError], None],
    ) -> None:
        self.waiting: list[Call] = []
        self.running: list[Call] = []
        self._store = store
        self._max_step_tokens = max_step_tokens
        self._max_calls = max_calls
        self._admit = admit
        self._fail = fail

    def next(self) -> Batch | None:
        """The next step's rows, marked as scheduled; None when nothing can run."""
        self._admit_waiting()
        batch = Batch()
        left = self._max_step_tokens
        urgent = sum(1 for call in self.running if _pending(call) == 1 and _is_ready(call))
        for call in self.running:
            pending = _pending(call)
            if not pending or left <= 0 or not _is_ready(call):
                continue
            urgent -= pending == 1
            count = min(pending, max(left - max(urgent, 0), 1))
            _take(batch, call, count)
            left -= count
        return batch if batch.takes else None

    def _admit_waiting(self) -> None:
        """Admits calls in order until one has to wait for room; calls that wait for parents are passed over."""
        for call in list(self.waiting):
            if len(self.running) >= self._max_calls:
                break
            if call.state is not State.WAITING:
                continue
            failed = next((p for p in call.parents if p.state in (State.FAILED, State.CANCELLED)), None)
            if failed is not None:
                self._fail(call, CallFailed(f"parent {failed.id} failed: {failed.error or failed.state.value}"))
            elif self._parents_known(call) and not self._try(call):
                break

    def _parents_known(self, call: Call) -> bool:
        if call.mode != "choreographed":
            return all(p.tokens_known for p in call.parents)
        return all(p.tokens_known and p.encoding is not None for p in call.parents)

    def _try(self, call: Call) -> bool:
        """Admits one call; False if it has to wait until a running one gives room."""
        try:
            self._admit(call)
        except CacheFull as problem:
            if any(not running.ended for running in self.running):
                return False
            self._fail(call, problem)
        except ChoreographError as problem:
            self._fail(call, problem)
        return True

    def commit(self, batch: Batch) -> None:
        for take in batch.takes:
            take.call.encoding.encoded = take.token1  # type: ignore[union-attr]

    def rollback(self, batch: Batch) -> None:
        """Forgets a step that was not computed."""
        for take in batch.takes:
            take.call.encoding.scheduled = take.token0  # type: ignore[union-attr]

    def check(self) -> None:
        assert all(call.state is State.WAITING for call in self.waiting)
        assert all(call.state in (State.RUNNING, State.KNOWN) for call in self.running)
        for call in self.running:
            assert call.encoding is not None and call.encoding.scheduled == call.encoding.encoded
            assert all(sight.encoding.holders for sight in call.sights), "a context is held by nobody"


def _pending(call: Call) -> int:
    return len(call.encoding.tokens) - call.encoding.scheduled  # type: ignore[union-attr]


def _is_ready(call: Call) -> bool:
    """Whether all that it sees is encoded, or will be by this very step."""
    return all(s.encoding.scheduled >= s.first + s.count for s in call.sights)


def _take(batch: Batch, call: Call, count: int) -> None:
    encoding = call.encoding
    assert encoding is not None
    row0, token0 = len(batch.tokens), encoding.scheduled
    token1 = token0 + count
    batch.tokens += encoding.tokens[token0:token1]
    batch.positions += range(encoding.start + token0, encoding.start + token1)
    batch.slots += (encoding.slot(token) for token in range(token0, token1))
    batch.reads += context_reads(call.sights, row0, row0 + count)
    batch.reads += own_reads(encoding, row0, token0, token1)
    batch.takes.append(Take(call, row0, token0, token1))
    encoding.scheduled = token1
