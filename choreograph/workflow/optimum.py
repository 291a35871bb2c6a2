"""The best that any eviction could have done: Belady's offline optimum over a recorded sequence of uses. Pure."""

from collections.abc import Hashable, Sequence
from math import inf


def optimum(uses: Sequence[Hashable], room: int) -> int:
    """How many of the uses could have found what they use, with room for `room` equal things at a time.

    What is used has to be there while it is used; of the others, the one wanted last goes (Belady, 1966).
    """
    if room < 1:
        raise ValueError(f"room={room}: what is used needs a place")
    following: list[float] = [inf] * len(uses)
    last: dict[Hashable, int] = {}
    for at in range(len(uses) - 1, -1, -1):
        following[at] = last.get(uses[at], inf)
        last[uses[at]] = at
    wanted: dict[Hashable, float] = {}  # what is there, and when it is used next
    hits = 0
    for at, one in enumerate(uses):
        hits += one in wanted
        wanted.pop(one, None)
        if len(wanted) == room:
            del wanted[max(wanted, key=wanted.__getitem__)]
        wanted[one] = following[at]
    return hits
