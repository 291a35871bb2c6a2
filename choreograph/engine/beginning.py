"""Headers that are encoded once: a decode takes over the first tokens of another one over the same context.

For one step it reads them where the other has them (in the very step, perhaps, that computes them); then it gets
copies of its own, so that an encoding is always one thing.
"""

from collections.abc import Iterable

from ..kv.store import Store
from ..types import Usage
from .call import Call


def begin_as_another(store: Store, call: Call) -> None:
    """Of a decode that was just admitted: leaves out the tokens that another has begun with."""
    encoding = call.work
    found = store.beginnings.find(call.salt, call.prompt, encoding.start, encoding.context)
    store.beginnings.add(call.salt, encoding)
    if found is None:
        return
    store.hold(found.encoding, call.call_holder)
    call.beginning, call.sights = found, (*call.sights, found)
    encoding.scheduled = encoding.encoded = found.count
    encoding.borrows = True
    encoding.inputs &= found.encoding.inputs
    call.usage = Usage(call.usage.cached_tokens + found.count, call.usage.encoded_tokens - found.count)


def copy_beginnings(store: Store, calls: Iterable[Call]) -> None:
    """After a step: what was read in place of a call's first tokens is there now, and copied."""
    borrowing = [(call, call.beginning) for call in calls if call.beginning is not None]
    if not borrowing:
        return
    slots = [sight.encoding.slot(token) for _, sight in borrowing for token in range(sight.count)]
    store.arena.copy(slots, [call.work.slot(token) for call, sight in borrowing for token in range(sight.count)])
    for call, sight in borrowing:
        store.let_go(sight.encoding, call.call_holder)
        call.beginning, call.sights, call.work.borrows = None, call.work.context, False
