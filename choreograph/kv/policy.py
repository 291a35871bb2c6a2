"""Which idle encodings go first: pure functions from facts to an order. Knows no pages and no model."""

from collections.abc import Callable, Iterable
from typing import NamedTuple


class IdleFacts(NamedTuple):
    """An encoding that nobody holds: when it was made and last used (both rising counters)."""

    id: int
    made: int
    used: int


def least_recently_used(idle: Iterable[IdleFacts]) -> list[int]:
    return [one.id for one in sorted(idle, key=lambda one: (one.used, one.id))]


def first_in_first_out(idle: Iterable[IdleFacts]) -> list[int]:
    return [one.id for one in sorted(idle, key=lambda one: (one.made, one.id))]


ORDERS: dict[str, Callable[[Iterable[IdleFacts]], list[int]]] = {
    "lru": least_recently_used,
    "fifo": first_in_first_out,
}
