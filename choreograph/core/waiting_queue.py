"""Queue of waiting requests whose cost does not grow with its length.

An admission pass visits only requests that may be ready: one that waits for parents is parked with
them until one of them changes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter

from ..request.request import Request


class WaitingQueue:
    """Waiting requests, in order of `Request.order`.

    Every place of a request in the heap or with a parent has a number; it is valid while that is the
    request's number. So a request is removed or moved without searching.
    """

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._new_number = count(1).__next__
        self.numbers: dict[Request, int] = {}  # of the valid place of every waiting request
        self._heap: list[tuple[tuple[int, int, bool, int], int, Request]] = []  # may be ready: order, number
        # taken from the heap by the current pass, or added since its start
        self._visited: list[tuple[int, Request]] = []
        self._parked: dict[Request, list[tuple[int, Request]]] = {}  # by parent
        for request in requests:
            self.add(request)

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, request: object) -> bool:
        return request in self.numbers

    def __iter__(self) -> Iterator[Request]:
        """Iterate over a copy, in order; O(n log n)."""
        return iter(sorted(self.numbers, key=attrgetter("order")))

    def add(self, request: Request) -> None:
        """Add a request, or move one whose order has changed.

        The current pass does not visit it.
        """
        number = self.numbers[request] = self._new_number()
        self._visited.append((number, request))

    def discard(self, request: Request) -> None:
        self.numbers.pop(request, None)

    def start_pass(self) -> None:
        """Let `next_candidate` begin with the first request that may be ready."""
        visited, self._visited = self._visited, []
        for number, request in visited:
            if self.numbers.get(request) == number:
                heappush(self._heap, (request.order, number, request))

    def next_candidate(self) -> Request | None:
        """Return the next request of the pass; None after the last."""
        while self._heap:
            _, number, request = heappop(self._heap)
            if self.numbers.get(request) == number:
                self._visited.append((number, request))
                return request
        return None

    def park(self, request: Request) -> None:
        """Skip a request until a parent changes.

        A request that depends on another model's message is visited by every pass.
        """
        if request.reencoding is not None or any(parent.reencoding is not None for parent in request.parents):
            return
        number = self.numbers[request] = self._new_number()
        for parent in request.parents:
            if not parent.is_finished:
                self._parked.setdefault(parent, []).append((number, request))

    def wake(self, parent: Request) -> None:
        """Visit the requests parked with a parent again, from this pass on."""
        for number, request in self._parked.pop(parent, ()):
            if self.numbers.get(request) == number:
                number = self.numbers[request] = self._new_number()
                heappush(self._heap, (request.order, number, request))

    def check(self) -> None:
        """Check that every request is visited or waits for a parent."""
        visited = {number for _, number, _ in self._heap} | {number for number, _ in self._visited}
        parked = {number for requests in self._parked.values() for number, _ in requests}
        for request, number in self.numbers.items():
            assert number in visited or number in parked, f"request {request.id} would never be visited"
            assert number in visited or not request.dependencies_ready, f"request {request.id} is parked but ready"
        assert not any(parent.is_finished for parent in self._parked), "a finished parent did not wake its readers"


@dataclass
class Queues:
    """Requests of one engine that are not finished."""

    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    running: list[Request] = field(default_factory=list)
    current: Request | None = None  # being admitted or packed: the cause of an exception
    is_probing: bool = False  # only a part of the requests is queued: none ends for lack of memory
