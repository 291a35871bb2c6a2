"""The best that any eviction could have done: Belady's offline optimum over a recorded sequence of uses. Pure."""

from collections.abc import Hashable, Sequence
from math import inf


def belady_hits(accesses: Sequence[Hashable], capacity: int) -> int:
    """How many of the uses could have found what they use, with room for `room` equal things at a time.

    What is used has to be there while it is used; of the others, the one wanted last goes (Belady, 1966).
    """
    if capacity < 1:
        raise ValueError(f"room={capacity}: what is used needs a place")
    following: list[float] = [inf] * len(accesses)
    last: dict[Hashable, int] = {}
    for at in range(len(accesses) - 1, -1, -1):
        following[at] = last.get(accesses[at], inf)
        last[accesses[at]] = at
    expected: dict[Hashable, float] = {}  # what is there, and when it is used next
    hits = 0
    for at, one in enumerate(accesses):
        hits += one in expected
        expected.pop(one, None)
        if len(expected) == capacity:
            del expected[max(expected, key=expected.__getitem__)]
        expected[one] = following[at]
    return hits
