"""What is done with encodings beside computing them: shared, kept on the device, copied out and in again."""

import itertools
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from ..errors import BadPosition, CacheFull, CallError, ReleasedMessage, RoomLater, SessionClosed
from ..kv.arena import Layer
from ..kv.encoding import Encoding, Sight, work_name
from ..kv.tiers import Work, checksum, raw
from ..types import Usage
from .call import Call, State
from .modes import PLACE, Placement
from .runner import Runner


class Copy(NamedTuple):
    """Keys and values of a message, layer by layer, in host memory. start: the home that the keys are rotated to,
    which need not be where the message stands: equal work is shared wherever it is placed. maker: what computed it.
    name: of its tokens and what they saw, the same in every process and for every client. checksum: of start and
    layers; without one nobody can say that they are what was copied out.
    """

    start: int
    layers: list[Layer]
    maker: str
    name: str
    checksum: int | None = None


def share(runner: Runner, call: Call, encoding: Encoding) -> None:
    """Ends a call, never queued, with an encoding that exists."""
    with runner.lock:
        if runner.closed:
            raise SessionClosed("the engine is closed: make a new one")
        call.encoding, call.state = encoding, State.RUNNING
        runner.store.hold(encoding, call.message_holder)
        call.usage = Usage(cached_tokens=len(call.prompt))
        runner.endings.end(call, State.DONE, "cached")


def copy_out(runner: Runner, call: Call) -> Copy:
    """A copy of what a message holds, whose encoding was computed before."""
    if call.mode != "choreographed":
        raise CallError(f"message {call.id} was computed in {call.mode} mode, where encodings belong to whole prompts")
    if call.layers is not None:
        raise CallError(f"message {call.id} was computed in some layers only: copy what it was made from")
    runner.family.identity(call.model)  # the first time, it reads all weights: nobody else waits for that
    with runner.lock, on_device(runner, call) as encoding:
        maker = runner.family.identity(encoding.model)
        name = _name(runner, encoding.tokens, encoding.start, encoding.context, encoding.model)
        start, layers = encoding.start, runner.store.arena.read(encoding.slots)
    return Copy(start, layers, maker, name, _checksum(start, layers))


@contextmanager
def on_device(runner: Runner, call: Call) -> Iterator[Encoding]:
    """Steps until all of a message is on the device, and keeps it there inside the block.

    What it saw is held as by a message: a call that waits may take its room, but what was made again for it is known.
    """
    name = -call.id
    with runner.lock:
        encoding = _held(call)
        holds = [(encoding, ("call", name)), *((sight.encoding, ("message", name)) for sight in encoding.context)]
        for one, holder in holds:
            runner.store.hold(one, holder)
        try:
            try:
                _bring(runner, call, name)
            finally:  # what was gathered, a step that broke would leave held
                runner.residence.done(name)
            yield encoding
        finally:
            for one, holder in holds:
                runner.store.let_go(one, holder)


def _bring(runner: Runner, call: Call, name: int) -> None:
    """Steps until all of what a message holds is on the device. name: of whoever gathers it."""
    while not (encoding := _held(call)).whole:
        try:
            runner.residence.bring(name, [Sight(encoding, 0, len(encoding.tokens), encoding.start)])
        except CacheFull:
            hopeless = not runner.store.busy  # asked before the step, which takes note of what has ended
            if not runner.step(wait=False):
                if hopeless:
                    raise
                _wait(runner)
        else:
            if not runner.step(wait=False):
                _wait(runner)


def _held(call: Call) -> Encoding:
    """What a message holds; others may have released it while this thread waited."""
    if call.encoding is None or call.released:
        raise ReleasedMessage(f"message {call.id} has no encoding: keep it until then")
    return call.encoding


def _wait(runner: Runner) -> None:
    runner.store.wait()
    runner.settle()


def pin(runner: Runner, call: Call, owner: str | None, seconds: float | None) -> None:
    """Keeps a message on the device for an owner within its session."""
    with runner.lock, on_device(runner, call) as encoding:
        runner.store.pins.pin(encoding, (call.session, owner, call.id), seconds)


def unpin(runner: Runner, call: Call, owner: str | None) -> None:
    with runner.lock:
        if call.encoding is not None:
            runner.store.pins.unpin(call.encoding, (call.session, owner, call.id))


def unpin_all(runner: Runner, session: int) -> None:
    """Ends every pin that was made through a session."""
    with runner.lock:
        runner.store.pins.unpin_where(lambda owner: isinstance(owner, tuple) and owner[0] == session)


def copy_in(runner: Runner, call: Call, copy: Copy, *, check: bool) -> bool:
    """Ends a prefill, never queued, whose encoding was computed before; False if there is no room for it now. check:
    whether to read all of the copy for damage."""
    runner.family.identity(call.model)
    with runner.lock:
        _check_copy(runner, call, copy)
    if check:  # nobody else waits for that
        _check_content(copy)
    with runner.lock:
        encoding = reserve(runner, call)
        if encoding is None:
            return call.ended
        with _given_up_if_it_breaks(runner, call, encoding):
            if copy.start != encoding.start and not runner.adapter.facts.movable:
                raise BadPosition(
                    f"the copy was encoded at {copy.start}, and learned positions keep it from {encoding.start}"
                )
            runner.store.arena.write(encoding.slots, copy.layers)
            encoding.scheduled = encoding.encoded = len(encoding.tokens)
            runner.events.write("restored", call=call.id, tokens=len(encoding.tokens))
            _take_over(runner, call, encoding, copy.start)
    return True


def _check_copy(runner: Runner, call: Call, copy: object) -> None:
    """It is a copy of this very work: of its model, its tokens, and what they see."""
    if not isinstance(copy, Copy):
        raise CallError(f"copy is of type {type(copy).__name__}: use what Message.copy_out gave")
    _check_fields(copy)
    if copy.maker != runner.family.identity(call.model):
        raise CallError(f"the copy was computed by another model than {call.model!r}: name the one that made it")
    work, arena = _place(runner, call), runner.store.arena
    given = [tuple(tuple(tensor.shape) for tensor in layer) for layer in copy.layers]
    wanted = [
        ((len(work.tokens), *keys.shape[1:]), (len(work.tokens), *values.shape[1:]))
        for keys, values in zip(arena.keys, arena.values, strict=True)
    ]
    if given != wanted:
        raise CallError(
            f"the copy has keys and values {given[:1]} in {len(given)} layers, these {len(work.tokens)} tokens have "
            f"{wanted[:1]} in {len(wanted)}: give the tokens that it was made of"
        )
    kinds, own = {tensor.dtype for layer in copy.layers for tensor in layer}, arena.keys[0].dtype
    if kinds != {own}:
        raise CallError(f"the copy is in {sorted(map(str, kinds))}, the cache in {own}: use what Message.copy_out gave")
    name = _name(runner, work.tokens, work.start, work.sights, call.model)
    if copy.name != name:
        raise CallError(
            f"the copy is of work {copy.name[:12]}, these tokens and parents are {name[:12]}: "
            "give the tokens, parents and offsets that it was made of"
        )


def _check_fields(copy: Copy) -> None:
    """Of the kinds that copy_out gives: it may have been made or changed by hand."""
    kinds = {
        "start": type(copy.start) is int and 0 <= copy.start < 1 << 31,
        "layers": isinstance(copy.layers, (list, tuple)) and all(map(_is_layer, copy.layers)),
        "maker": isinstance(copy.maker, str),
        "name": isinstance(copy.name, str),
        "checksum": copy.checksum is None or isinstance(copy.checksum, int),
    }
    for field, sound in kinds.items():
        if not sound:
            raise CallError(f"copy.{field} is {reprlib.repr(getattr(copy, field))}: use what Message.copy_out gave")


def _check_content(copy: Copy) -> None:
    if copy.checksum is None:
        raise CallError(
            "the copy has no checksum, an older version or a hand made it: make a new one with Message.copy_out, or "
            "vouch for it with check=False"
        )
    if copy.checksum != _checksum(copy.start, copy.layers):
        raise CallError("the copy is damaged, its checksum is another than when it was copied out: make a new one")


def _checksum(start: int, layers: list[Layer]) -> int:
    content = (raw(tensor.cpu().contiguous()).data for layer in layers for tensor in layer)
    return checksum(itertools.chain([str(start).encode()], content))


def _is_layer(layer: object) -> bool:
    return isinstance(layer, (list, tuple)) and len(layer) == 2 and all(isinstance(one, Tensor) for one in layer)


def _name(runner: Runner, tokens: list[int], start: int, context: Iterable[Sight], model: str) -> str:
    return work_name(tokens, start, context, model, runner.family.identity)


def _place(runner: Runner, call: Call) -> Placement:
    """Where a prefill that was never queued stands, and what it sees."""
    if any(parent.encoding is None for parent in call.parents):
        raise CallError("a copy is taken back behind complete parents: read them first")
    call.get_ready()
    return PLACE[call.mode](call, runner.store, runner.adapter.facts)


def receive(
    runner: Runner,
    call: Call,
    encoding: Encoding,
    start: int,
    work: Work,
    *,
    inputs: frozenset[int],
    absent: frozenset[int],
) -> None:
    """Ends a prefill whose encoding, which was reserved, comes from elsewhere while others compute. start: its home
    there. inputs, absent: what comes beside keys and values, and the layers of which those do not come."""
    with runner.lock, _given_up_if_it_breaks(runner, call, encoding):
        encoding.inputs, encoding.absent, encoding.rebuildable = inputs, absent, False
        runner.store.traffic.receive(encoding, work)
        _take_over(runner, call, encoding, start)


def reserve(runner: Runner, call: Call, enough: Callable[[Encoding], bool] = lambda known: True) -> Encoding | None:
    """Room for a prefill, never queued, that others have computed: held by its message, found by nobody. None if there
    is no room now, or if the very work is known and `enough`, which ends the call."""
    with runner.lock:
        work = _place(runner, call)
        assert work.key is not None, "only choreographed prefills are copied in"
        if work.ready is not None and not work.ready.lost and enough(work.ready):
            share(runner, call, work.ready)
            return None
        while True:
            try:
                encoding = runner.store.create(
                    work.tokens,
                    work.start,
                    work.sights,
                    capacity=len(work.tokens),
                    holder=call.message_holder,
                    model=call.model,
                )
            except RoomLater:
                _wait(runner)
            except CacheFull:
                return None
            else:
                encoding.key = work.key
                return encoding


def _take_over(runner: Runner, call: Call, encoding: Encoding, start: int) -> None:
    """The reserved encoding is the call's, with its home at `start`."""
    moved = start - encoding.start
    encoding.context = tuple(sight._replace(start=sight.start + moved) for sight in encoding.context)
    encoding.start = start
    assert encoding.key is not None
    runner.store.publish(encoding, encoding.key)
    share(runner, call, encoding)


@contextmanager
def _given_up_if_it_breaks(runner: Runner, call: Call, encoding: Encoding) -> Iterator[None]:
    """What was reserved is held no longer where the block raises."""
    try:
        yield
    except BaseException:
        give_up(runner, call, encoding)
        raise


def give_up(runner: Runner, call: Call, encoding: Encoding) -> None:
    """What was reserved is not needed."""
    with runner.lock:
        runner.store.let_go(encoding, call.message_holder)
