"""How calls end, by themselves, by an error or since nobody wants them any more. Owns nothing; acts for the runner."""

import time
from collections.abc import Callable, Iterable

from ..errors import ChoreographError
from ..events import EventLog
from ..kv.encoding import Sight
from ..kv.store import Store
from ..types import FinishReason
from .call import Call, State
from .residence import Residence
from .scheduler import Scheduler


class Endings:
    """idle: called when the last call that ran has ended."""

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        residence: Residence,
        events: EventLog,
        idle: Callable[[], None],
    ) -> None:
        self._store, self._scheduler, self._residence = store, scheduler, residence
        self._events, self._idle = events, idle

    def end(self, call: Call, state: State, reason: FinishReason | None) -> None:
        """The one way out of the queues: trims the encoding and lets go of everything but the message."""
        was = call.state
        call.state, call.finish_reason = state, reason
        self._residence.done(call.id)
        call.known_at = call.known_at or time.perf_counter()
        for queue in (self._scheduler.waiting, self._scheduler.running):
            if call in queue:
                queue.remove(call)
        if not self._scheduler.running:
            self._idle()
        if was is State.WAITING:
            self.parents_served(call)
        self._let_go_of(call, call.sights)
        call.sights = ()
        if call.generation is not None:
            call.generation.prompt = []
        if call.encoding is not None and was is not State.WAITING:
            if call.encoding.whole:
                self._store.trim(call.encoding)
            self._store.let_go(call.encoding, call.call_holder)
        if state in (State.FAILED, State.CANCELLED) and call.encoding is not None:
            self._store.let_go(call.encoding, call.message_holder)
        if call.released and call.encoding is not None and not call.children_waiting:
            self._store.let_go(call.encoding, call.message_holder)
        self._events.write({State.DONE: "finished"}.get(state, state.value), call=call.id)

    def fail(self, call: Call, problem: ChoreographError) -> None:
        call.error = problem
        self.end(call, State.FAILED, None)

    def _let_go_of(self, call: Call, sights: Iterable[Sight]) -> None:
        for sight in sights:
            self._store.let_go(sight.encoding, call.call_holder)

    def parents_served(self, call: Call) -> None:
        """The call has its own hold on what it sees: parents whose release waited for it can go."""
        for parent in call.needs:
            parent.children_waiting -= 1
            if parent.released and not parent.children_waiting:
                self._release_now(parent)

    def release(self, call: Call) -> None:
        """The message is no longer wanted. It goes when no waiting call needs it any more."""
        if call.released:
            return
        call.released = True
        self._events.write("released", call=call.id)
        if not call.children_waiting:
            self._release_now(call)

    def _release_now(self, call: Call) -> None:
        if call.state is State.WAITING:
            self.end(call, State.CANCELLED, "cancelled")
        elif call.state in (State.RUNNING, State.KNOWN):
            self._abandon(call)
        elif call.encoding is not None:
            self._store.let_go(call.encoding, call.message_holder)

    def _abandon(self, call: Call) -> None:
        """Ends a call in flight, but first encodes the tokens that it has where other calls see them."""
        encoding = call.encoding
        assert encoding is not None
        seen = encoding.holders - {call.call_holder, call.message_holder} or encoding.children
        if seen and not encoding.whole:
            call.abandoned = True
            call.finish_reason = call.finish_reason or "cancelled"
        elif call.state is State.KNOWN:
            self.end(call, State.DONE, call.finish_reason)
        else:
            self.end(call, State.CANCELLED, "cancelled")
