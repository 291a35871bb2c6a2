"""The runner: submits calls, runs steps, publishes what they computed. Knows no sessions and no chat.

    batch = scheduler.next(); logits = model(batch, plan); publish(sample(logits))

It is synchronous and driven: nothing runs until somebody reads a value (or calls `step`). One lock guards all
state, so several threads may drive one engine.
"""

import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..config import EngineConfig
from ..errors import CacheFull, CallFailed, ChoreographError, ReleasedMessage, SessionClosed
from ..events import EventLog
from ..kv.encoding import Encoding, content_key
from ..kv.transfers import TransferFailed
from ..models.adapter import Adapter
from ..models.family import Family
from ..ops.measured import open_backend
from ..ops.native import BackendUnavailable
from ..quiet import QuietLock
from ..types import FinishReason, Usage
from .beginning import begin_as_another, copy_beginnings
from .call import Call, State
from .compute import Computer
from .endings import Endings
from .generation import footer_after
from .hearing import Hearing, failure
from .memory import make_store
from .modes import PLACE, Placement, hang, salt_of
from .residence import Residence
from .scheduler import Batch, Scheduler
from .sharing import Sharing

if TYPE_CHECKING:
    from torch import Tensor


class Runner:
    """Everything between submission and publication; `choreograph.Engine` adds sessions and chat."""

    def __init__(self, adapter: Adapter, config: EngineConfig) -> None:
        self.adapter = adapter
        self.family = Family(adapter)
        self.config = config
        self.events = EventLog()
        facts = adapter.facts
        try:
            self.backend, self.backend_note = open_backend(config.backend, facts.heads, facts.dtype, facts.device)
        except BackendUnavailable as reason:
            raise ChoreographError(f"backend={config.backend!r}: {reason}; use backend='auto'") from None
        self.lock = QuietLock()
        sleep = threading.Condition(self.lock).wait  # type: ignore[arg-type] # others may act meanwhile
        self.store = make_store(adapter, config, self.events, sleep)
        self.computer = Computer(self.family, self.store.arena, self.backend)
        self.residence = Residence(self.store, self._rebuild, lambda: bool(self.scheduler.running))
        self.scheduler = Scheduler(
            self.store,
            max_step_tokens=config.scheduler.max_step_tokens,
            max_calls=config.scheduler.max_calls,
            status_aware=config.scheduler.status_aware,
            admit=self._admit,
            fail=lambda call, problem: self.endings.fail(call, problem),
            weights=self.family.weights,
            mend=lambda calls: self.sharing.mend(calls),
        )
        self.sharing = Sharing(self.store, self.family, self.scheduler, self.events)
        self.endings = Endings(self.store, self.scheduler, self.residence, self.events, self.computer.forget)
        self.hearing = Hearing(self.endings.fail)
        self.steps = 0
        self.rows = 0
        self.closed = False
        self.real_time = True  # as everywhere but on a virtual clock
        self.give_turn: Callable[[], bool] | None = None  # set while many programs run together
        self.new_id = itertools.count(1).__next__

    # -- submission ---------------------------------------------------------------------------------------

    def submit(self, *calls: Call, accepted: Callable[[], None] = lambda: None) -> None:
        """Queues validated calls, all or none; costs no computing. What no empty cache could hold is refused; nothing
        refuses them any more where `accepted` is called, and no other thread submits meanwhile.

        Whoever submits delivers the events, once it keeps the calls; so with `release`.
        """
        with self.lock:
            if self.closed:
                raise SessionClosed("the engine is closed: make a new one")
            for call in calls:
                gone = next((p for p in call.parents if p.released), None)
                if gone is not None:
                    raise ReleasedMessage(f"parent {gone.id} was released: keep it until its last use")
                self._refuse_what_never_fits(call)
            accepted()
            for call in calls:
                self._queue(call)

    def _queue(self, call: Call) -> None:
        for parent in call.needs:
            parent.children_waiting += 1
        if call.mode != "choreographed" and not call.is_decode:
            self.endings.end(call, State.DONE, "encoded")  # a text: nothing to compute
        else:
            self.scheduler.waiting.append(call)
        self.events.write("submitted", call=call.id)

    def _refuse_what_never_fits(self, call: Call) -> None:
        if call.mode != "choreographed" and not call.is_decode:
            return
        pages, least = self.store.arena.pages, self._capacity(call, len(call.prompt))
        if call.layers is None and self.store.arena.pages_for(least) > pages:
            size = self.store.arena.page_size
            raise CacheFull(
                f"needs room for {least} tokens; the whole cache holds {pages * size}: "
                "shorten the call (max_tokens counts) or raise CacheConfig.tokens"
            )

    def _capacity(self, call: Call, prompt: int) -> int:
        """The most tokens that the call's encoding can come to have."""
        if call.generation is None:
            return prompt
        room = self.adapter.facts.max_positions - prompt - len(call.footer)
        return prompt + max(1, min(call.generation.limit, room)) + len(call.footer)

    def _admit(self, call: Call) -> None:
        """Places a call and gives it room, or raises. Called by the scheduler, in order of submission."""
        facts = self.adapter.facts
        call.get_ready()
        self.sharing.prepare(call)
        work = PLACE[call.mode](call, self.store, facts)
        seen = sum(s.count for s in work.sights if s.reaches(0))
        if work.ready is not None:
            call.encoding = work.ready
            self.store.hold(work.ready, call.message_holder)
            call.usage = Usage(cached_tokens=seen + len(work.tokens))
            self.events.write("hit", call=call.id, tokens=len(work.tokens), where=work.ready.state)
            self.endings.end(call, State.DONE, "cached")
            return
        if call.generation is not None:
            if call.generation.sampling.repetition_penalty != 1.0:  # the one option that looks at what was seen
                call.generation.prompt = [t for seen in call.seen_tokens() for t in seen] + call.prompt
            room = facts.max_positions - work.start - len(work.tokens) - len(call.footer)
            if call.generation.forced is None:
                call.generation.limit = max(1, min(call.generation.limit, room))
        capacity = self._capacity(call, len(work.tokens))
        self.residence.bring(call.id, work.sights, capacity, band=call.layers is not None)
        call.encoding = self.store.create(
            work.tokens,
            work.start,
            work.sights,
            capacity=capacity,
            holder=call.call_holder,
            model=call.model,
            layers=call.layers,
        )
        try:
            self._equip(call, work, seen)
        except BaseException:  # it waits as before
            self.scheduler.take_back(call)
            raise
        self._start(call)
        if call.mode == "choreographed" and call.is_decode:
            begin_as_another(self.store, call)

    def _rebuild(self, encoding: Encoding) -> None:
        """Computes an encoding again in the pages that it was given, as it was computed first."""
        call = Call.rebuilding(self.new_id(), encoding)
        for sight in encoding.context:
            self.store.hold(sight.encoding, call.call_holder)
        self.store.hold(encoding, call.call_holder)
        self.scheduler.running.append(call)
        self.events.write("rebuilding", call=call.id, encoding=encoding.id, tokens=len(encoding.tokens))

    def _equip(self, call: Call, work: Placement, seen: int) -> None:
        """The call and its message hold what they need, and others can find it."""
        encoding = call.work
        encoding.inputs = self.family.keeps(call.model, self.store.arena.inputs if call.layers is None else ())
        for sight in work.sights:
            self.store.hold(sight.encoding, call.call_holder)
        self.residence.done(call.id)
        call.sights, encoding.group = encoding.context, call.group
        call.usage = Usage(cached_tokens=seen, encoded_tokens=len(encoding.tokens))
        if call.mode == "choreographed":
            self.store.hold(encoding, call.message_holder)
        if work.key is not None:
            self.events.write("miss", call=call.id, tokens=len(work.tokens))
            self.store.publish(encoding, work.key)
        if call.mode == "prefix":
            hang(call, self.store)

    def _start(self, call: Call) -> None:
        call.state = State.RUNNING
        self.scheduler.waiting.remove(call)
        self.scheduler.running.append(call)
        self.endings.parents_served(call)
        size = len(call.work.tokens)
        self.events.write("admitted", call=call.id, encoding=call.work.id, cached=call.usage.cached_tokens, encode=size)

    # -- the step -----------------------------------------------------------------------------------------

    def step(self, *, wait: bool = True) -> bool:
        """Computes one step; False if there was nothing that could run. A step that breaks changes nothing."""
        with self.lock:
            try:
                batch = self._next_batch(wait)
                samples = batch.samples if batch else []
                logits = self._compute(batch, [row for _, row in samples]) if batch else None
                calls = [call for call, _ in samples]
                tokens = (
                    self.computer.pick(logits, calls, go_on=not self.scheduler.ready)
                    if logits is not None and calls
                    else []
                )
            except TransferFailed:  # what it wanted is rebuilt; the step is as if it had not been
                self.scheduler.reset()
                return True
            except BaseException:
                self.scheduler.reset()
                raise
            if batch is not None:
                self.scheduler.commit(batch)
                copy_beginnings(self.store, [take.call for take in batch.takes])
                self._publish(batch, calls, tokens)
                self.hearing.tell()
        self.events.deliver()
        return batch is not None

    def _next_batch(self, wait: bool) -> Batch | None:
        """The next step's rows; by choice, waits for transfers and pins where only they can give room."""
        while True:
            self.settle()
            batch = self.scheduler.next(self.computer.wanted())
            if batch is not None or not (wait and self.scheduler.unfinished and self.store.wait()):
                return batch

    def settle(self) -> None:
        """Takes note of what transfers brought; calls wait again for what they could not bring."""
        for lost in self.store.settle():
            self.scheduler.withdraw_readers(lost)

    def _compute(self, batch: Batch, rows: list[int]) -> "Tensor | None":
        for take in batch.takes:
            take.call.started_at = take.call.started_at or time.perf_counter()
        logits = self.computer(batch, rows)
        self.steps += 1
        self.rows += len(batch.tokens)
        self.events.write("step", rows=len(batch.tokens), calls=len(batch.takes))
        return logits

    def _publish(self, batch: Batch, calls: list[Call], tokens: list[int | None]) -> None:
        """Gives every sampled call its next token and ends the calls that are complete. One that cannot take its token
        fails alone."""
        now = time.perf_counter()
        for call, token in zip(calls, tokens, strict=True):
            try:
                self._accept(call, token, now)
            except Exception as problem:
                self.endings.fail(call, failure(call, "its next token could not be taken,", problem))
        for call in (take.call for take in batch.takes):
            if call.ended or call.encoding is None or not call.encoding.whole:
                continue
            if call.abandoned and call.state is State.RUNNING and call.is_decode:
                self.endings.end(call, State.CANCELLED, "cancelled")
            elif call.state is State.KNOWN or not call.is_decode:
                self.endings.end(call, State.DONE, call.finish_reason or "encoded")

    def _accept(self, call: Call, token: int | None, now: float) -> None:
        if token is None:
            self.endings.fail(call, CallFailed(f"message {call.id}: the model gave NaN instead of logits"))
            return
        generation, encoding = call.generation, call.encoding
        assert generation is not None and encoding is not None
        call.first_token_at = call.first_token_at or now
        self.hearing.note(call)
        reason = generation.accept(token)
        encoding.tokens.append(token)
        self.events.write("token", call=call.id, token=token)
        if reason is not None:
            self._know(call, reason, now)

    def _know(self, call: Call, reason: FinishReason, now: float) -> None:
        """Every token of a decode is chosen. Its last ones are encoded by whichever step comes next."""
        generation, encoding = call.generation, call.encoding
        assert generation is not None and encoding is not None
        call.known_at, call.finish_reason = now, reason
        self.events.write("known", call=call.id)
        call.footer = footer_after(call.footer, generation.tokens, generation.stop_tokens)
        extra = len(call.footer) if call.mode == "choreographed" else 0
        call.usage = Usage(
            cached_tokens=call.usage.cached_tokens,
            encoded_tokens=call.usage.encoded_tokens + extra,
            generated_tokens=len(generation.tokens),
        )
        call.state = State.KNOWN
        if call.mode == "choreographed":
            encoding.tokens += call.footer
            encoding.promised = len(encoding.tokens)
            salt = salt_of(call, self.adapter.facts)
            self.store.publish(encoding, content_key(salt, encoding.tokens, encoding.start, encoding.context))
            return
        encoding.tokens.pop()  # nobody has computed the last token; a later prompt will if it needs it
        if call.mode == "prefix":
            hang(call, self.store)
        self.endings.end(call, State.DONE, reason)

    def release(self, call: Call) -> None:
        """The message is no longer wanted. What calls in flight see of it stays until they end."""
        with self.lock:
            self.endings.release(call)

    # -- driving ------------------------------------------------------------------------------------------

    def run_until(self, call: Call, done: Callable[[], bool]) -> None:
        """Steps until `done()`, or lets others step; raises the call's error, or says why it can never be done."""
        while not done():
            if call.error is not None:
                raise call.error
            if call.state is State.CANCELLED:
                raise ReleasedMessage(
                    f"message {call.id} was released before it was known: read it first, inside its session"
                )
            advance = self.give_turn or self.step  # looked at once: another thread may be ending it
            if not advance() and not done() and call.state not in (State.FAILED, State.CANCELLED):
                raise CallFailed(f"message {call.id} cannot run: nothing can be computed any more")
        if call.error is not None:
            raise call.error

    def drain(self) -> None:
        """Runs until nothing is left to compute."""
        while self.step():
            pass

    def check(self) -> None:
        """The invariants of the arena, the store and the queues."""
        with self.lock:
            self.store.check()
            self.scheduler.check()
