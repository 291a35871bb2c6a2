"""Encodings that a call takes over instead of computing them: shared, copied out to host memory, copied in again."""

from typing import NamedTuple

from ..errors import CacheFull, CallError, ReleasedMessage, SessionClosed
from ..kv.arena import Layer
from ..kv.encoding import Encoding
from ..types import Usage
from .call import Call, State
from .modes import PLACE
from .runner import Runner


class Copy(NamedTuple):
    """Keys and values of a message, layer by layer, in host memory. start: the home that the keys are rotated to,
    which need not be where the message stands: equal work is shared wherever it is placed.
    """

    start: int
    layers: list[Layer]


def share(runner: Runner, call: Call, encoding: Encoding) -> None:
    """Ends a call, never queued, with an encoding that exists."""
    with runner.lock:
        if runner.closed:
            raise SessionClosed("the engine is closed: make a new one")
        call.encoding, call.state = encoding, State.RUNNING
        runner.store.hold(encoding, call.message_holder)
        call.usage = Usage(cached_tokens=len(call.prompt))
        runner.end(call, State.DONE, "cached")
    runner.events.deliver()


def copy_out(runner: Runner, call: Call) -> Copy:
    """A copy of what a message holds, which has to be whole."""
    with runner.lock:
        encoding = call.encoding
        if encoding is None or call.released or not encoding.whole:
            raise ReleasedMessage(f"message {call.id} has no encoding to copy: keep it until then")
        return Copy(encoding.start, runner.store.arena.read(encoding.slots))


def copy_in(runner: Runner, call: Call, copy: Copy) -> bool:
    """Ends a prefill, never queued, whose encoding was computed before; False if there is no room for it now."""
    with runner.lock:
        if any(parent.encoding is None for parent in call.parents):
            raise CallError("a copy is taken back behind complete parents: read them first")
        call.find_ready_time()
        work = PLACE[call.mode](call, runner.store, runner.adapter.facts.max_positions)
        if work.ready is not None:
            share(runner, call, work.ready)
            return True
        assert work.key is not None, "only choreographed prefills are copied in"
        count, moved = len(work.tokens), copy.start - work.start
        context = [sight._replace(start=sight.start + moved) for sight in work.sights]
        try:
            encoding = runner.store.create(work.tokens, copy.start, context, capacity=count, holder=call.message_holder)
        except CacheFull:
            return False
        try:
            runner.store.arena.write(encoding.slots, copy.layers)
        except BaseException:
            runner.store.let_go(encoding, call.message_holder)
            raise
        encoding.scheduled = encoding.encoded = count
        runner.store.publish(encoding, work.key)
        runner.events.write("restored", call=call.id, tokens=count)
        share(runner, call, encoding)
    return True
