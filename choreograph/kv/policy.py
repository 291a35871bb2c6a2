"""Which encodings leave the device first: pure functions from facts to an order. Knows no pages and no model.

Add one by writing the function and naming it in ORDERS; `CacheConfig(eviction=...)` takes the name.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple


class Facts(NamedTuple):
    """What a policy may know of an encoding that is not in use.

    made, used: rising counters. uses: how often it was wanted. held: a message still names it.
    steps: how soon an agent needs it (KVFlow's steps-to-execution), None where nobody said. varying: a part of an
    agent's prompt that changes every time, and that nobody expects to be seen again.
    """

    id: int
    made: int
    used: int
    uses: int = 0
    held: bool = False
    steps: float | None = None
    varying: bool = False


Order = Callable[[Iterable[Facts]], list[int]]


def least_recently_used(facts: Iterable[Facts]) -> list[int]:
    """What nobody holds goes before what a message names."""
    return _sorted(facts, lambda one: (one.held, one.used))


def least_frequently_used(facts: Iterable[Facts]) -> list[int]:
    return _sorted(facts, lambda one: (one.held, one.uses, one.used))


def first_in_first_out(facts: Iterable[Facts]) -> list[int]:
    return _sorted(facts, lambda one: (one.held, one.made))


def by_workflow(facts: Iterable[Facts]) -> list[int]:
    """KVFlow, section 3.1: varying parts first, then fixed parts by falling steps-to-execution. What nobody knows
    anything about goes between those that never run again and those that do, least recently used first."""

    def rank(one: Facts) -> tuple[float | int, ...]:
        if one.varying:
            return (0, 0, one.used)
        if one.steps is None:
            return (2, one.held, one.used)
        if one.steps == float("inf"):
            return (1, 0, one.used)
        return (3, -one.steps, one.used)

    return _sorted(facts, rank)


def _sorted(facts: Iterable[Facts], rank: Callable[[Facts], tuple[float | int, ...]]) -> list[int]:
    return [one.id for one in sorted(facts, key=lambda one: (*rank(one), one.id))]


ORDERS: dict[str, Order] = {
    "workflow": by_workflow,
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "fifo": first_in_first_out,
}
