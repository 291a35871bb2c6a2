"""Routing policies: which replica a request goes to, without Ray.

`benchmarks/ray_scale.py` runs the same objects on a virtual clock.
"""

import bisect
import heapq
import itertools
import math
import random
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import ConfigError
from ..namespace import Namespace
from .content_keys import ContentKeys

BYTES_PER_KEY = 224  # of a key that one replica has, in the two tables of `MessageAffinity`; tracemalloc measures 223

MAX_SOURCES = 2  # replicas that are named to the one that lacks a message

MAX_REPLICAS_OF_KEY = 64  # that a lookup visits

LOAD_PER_HELD_TOKEN = 4.0  # by which a load may exceed the least and still count as equal, up to `slack`

MAX_RANKED = 8  # replicas that are tried in one round, where the first ones are full


@dataclass
class RouteRequest:
    """What a policy reads of a request."""

    keys: ContentKeys = field(default_factory=dict)  # of its messages, with their tokens, in order
    session: Namespace = field(default_factory=Namespace)  # client, and session or workflow
    pinned: str | None = None  # replica that has to run it if it exists
    failed: set[str] = field(default_factory=set)  # replicas that failed it
    learned: list[tuple[str, ContentKeys]] = field(default_factory=list)  # (replica, what it generated) before
    is_movable: bool = False  # replicas may fetch its messages from each other
    sources: dict[int, list[str]] = field(default_factory=dict)  # replicas that have a key, to fetch it from
    # by key: keys of the same message in models whose layers the request's model reuses
    alternatives: Mapping[int, Sequence[int]] = field(default_factory=dict)


class RoutingPolicy(ABC):
    """Choice of a replica.

    Replicas are named. Every change of a queue is noted, so that a decision does not read all of them.
    """

    def __init__(self) -> None:
        self.queues: dict[str, int] = {}  # requests of each replica, running and waiting

    @abstractmethod
    def rank(self, request: RouteRequest) -> list[str]:
        """Return some or all replicas, the best first.

        Those that failed the request are only returned if all have.
        """

    def set_queue(self, replica: str, length: int) -> None:
        """Note the number of requests of a replica, which may be new."""
        self.queues[replica] = length

    def on_routed(self, request: RouteRequest, replica: str) -> None:  # noqa: B027
        """Note that a replica computes a request."""

    def on_learned(self, replica: str, keys: ContentKeys) -> None:  # noqa: B027
        """Note what a replica has generated."""

    def sources(self, request: RouteRequest) -> dict[int, list[str]]:
        """Return some replicas that have each key of a request."""
        return {}

    def on_removed(self, replica: str) -> None:
        """Forget a replica."""
        self.queues.pop(replica, None)

    @property
    def state_bytes(self) -> int:
        """Memory of what the policy knows, in bytes."""
        return 0


def choose(policy: RoutingPolicy, request: RouteRequest) -> list[str]:
    """Learn from a request, and rank replicas.

    The first is the pinned one; those that failed the request are left out.
    """
    for name, keys in request.learned:
        policy.on_learned(name, keys)
    request.learned = []
    if request.pinned is not None and request.pinned in policy.queues:
        return [request.pinned]
    return policy.rank(request)


def _without_failed(names: Iterable[str], request: RouteRequest) -> list[str]:
    names = list(names)
    return [name for name in names if name not in request.failed] or names if request.failed else names


class QueueIndex:
    """Replicas by the length of their queue, then sorted by work."""

    def __init__(self) -> None:
        self._sorted: dict[int, list[tuple[float, str]]] = {}  # (work, replica) of each length
        self._place: dict[str, tuple[int, float]] = {}  # length and work of each replica

    def set(self, replica: str, length: int, work: float) -> None:
        """Add a replica or move it; O(log replicas)."""
        if self._place.get(replica) == (length, work):
            return
        self.remove(replica)
        self._place[replica] = length, work
        bisect.insort(self._sorted.setdefault(length, []), (work, replica))

    def remove(self, replica: str) -> None:
        if (place := self._place.pop(replica, None)) is not None:
            length, work = place
            names = self._sorted[length]
            del names[bisect.bisect_left(names, (work, replica))]
            if not names:
                del self._sorted[length]

    def least(self, num_failed: int) -> Iterator[tuple[int, float, str]]:
        """Yield (length, work, replica): those with least work of each length.

        Args:
            num_failed: replicas that may be of no use; each length yields more than that, if it has more.
        """
        each = num_failed + max(1, MAX_RANKED // max(1, len(self._sorted)))
        for length, names in self._sorted.items():
            for work, replica in names[:each]:
                yield length, work, replica

    @property
    def spread(self) -> int:
        """Difference between the longest and the shortest queue."""
        return max(self._sorted, default=0) - min(self._sorted, default=0)


class MessageAffinity(RoutingPolicy):
    """The replica with the least work, this request included.

    Every replica has a digest: the most recent keys that were sent to it, with their tokens. A stale key
    costs a recomputation, never a wrong answer. Work is that of the queue, of this request, and of what a replica was
    given lately, in tokens to compute. The latter is forgotten exponentially, over `horizon` requests of each
    replica. Loads that exceed the least by at most `slack` are equal if the replica holds a quarter as many tokens:
    of such replicas, the one that holds most is first. If no replica runs anything, all loads are equal.

    Args:
        queue_tokens: tokens that one request in the queue weighs.
        moving: work of a token that can be fetched from another replica; 1 is that of computing it.
        balance: weight of the work that a replica was given lately.
        horizon: requests of each replica after which that is forgotten.
        slack: tokens of load that make no difference where a replica holds more than others; about one step.
        max_keys: keys of one replica's digest.
        max_tokens: tokens of one replica's digest, such as the size of its cache.
    """

    def __init__(
        self,
        queue_tokens: float = 64.0,
        moving: float = 0.25,
        balance: float = 1.0,
        horizon: int = 256,
        slack: float = 1024.0,
        max_keys: int = 4096,
        max_tokens: int = 1 << 20,
    ) -> None:
        super().__init__()
        if max_keys < 1 or max_tokens < 1 or horizon < 1 or min(queue_tokens, moving, balance, slack) < 0:
            raise ConfigError(
                f"{queue_tokens=}, {moving=}, {balance=}, {horizon=}, {slack=}, {max_keys=}, {max_tokens=}: "
                "use limits of at least 1 and weights >= 0"
            )
        self._queue_tokens, self._moving, self._balance, self._horizon = queue_tokens, moving, balance, horizon
        self._slack, self._max_keys, self._max_tokens = slack, max_keys, max_tokens
        self._digests: dict[str, OrderedDict[int, int]] = {}  # tokens by key, least recently used first
        self._num_tokens: dict[str, int] = {}  # of each digest
        self._replicas_of: dict[int, dict[str, None]] = {}  # replicas whose digest has a key
        self._work: dict[str, float] = {}  # given to each replica, in units of `_unit` tokens
        self._unit = 1.0  # grows instead of all counts becoming less
        self._num_queued = 0  # requests of all replicas
        self._num_asked = 0  # requests whose sources were named
        self.index = QueueIndex()  # by queue and work

    def held(self, request: RouteRequest) -> dict[str, int]:
        """Return the request's tokens that each replica holds, if any.

        What very many replicas hold makes no difference, and is left out.
        """
        result: dict[str, int] = {}
        for key, num_tokens in request.keys.items():
            replicas: Collection[str] = self._replicas_of.get(key, ())
            if others := request.alternatives.get(key):
                replicas = {*replicas}.union(*(self._replicas_of.get(other, ()) for other in others))
            for replica in replicas if len(replicas) <= MAX_REPLICAS_OF_KEY else ():
                result[replica] = result.get(replica, 0) + num_tokens
        return result

    def work(self, replica: str) -> float:
        """Return the tokens that a replica was given lately."""
        return self._work.get(replica, 0.0) / self._unit

    def set_queue(self, replica: str, length: int) -> None:
        if replica not in self._work:  # a new one does not get everything at once
            self._work[replica] = min(self._work.values(), default=0.0)
        self._num_queued += length - self.queues.get(replica, 0)
        super().set_queue(replica, length)
        self.index.set(replica, length, self._work[replica])

    def rank(self, request: RouteRequest) -> list[str]:
        held, session, held_weight = self.held(request), _hash(request), self._moving if request.is_movable else 1.0
        queues, weight = self.queues, self._balance / self._unit
        # of the replicas that hold nothing, only these can be first
        load = {
            name: self._queue_tokens * length + weight * work
            for length, work, name in self.index.least(len(request.failed))
        }
        least = min(load.values(), default=0.0)
        load |= {name: self._queue_tokens * queues[name] + weight * self._work[name] for name in held}
        names = _without_failed(load, request)

        def order(replica: str) -> tuple[float, float, int, int]:
            own, own_held = load[replica], held.get(replica, 0)
            slack = min(self._slack, LOAD_PER_HELD_TOKEN * own_held) if self._num_queued else math.inf
            cost = (own if own > least + slack else least) - held_weight * own_held
            # equal replicas: a session keeps one of them, and sessions spread over all
            return cost, own, queues[replica], _rendezvous(session, replica)

        return heapq.nsmallest(MAX_RANKED, names, key=order)

    def on_routed(self, request: RouteRequest, replica: str) -> None:
        if replica not in self.queues:  # it may have gone meanwhile
            return
        own: Mapping[int, int] = self._digests.get(replica, {})
        keys = dict(request.keys)  # that the replica has afterwards
        num_computed, moving = 0.0, self._moving if request.is_movable else 1.0
        for key, num_tokens in request.keys.items():
            same = [*request.alternatives.get(key, ()), key]  # in the order in which they are fetched
            held = [other for other in same if other in own]
            known = next((other for other in same if other in self._replicas_of), None)
            if not held:
                num_computed += num_tokens * (1.0 if known is None else moving)
                if known is not None and request.is_movable:  # it is fetched
                    held = [known]
            keys |= dict.fromkeys(held, num_tokens)
        self._work[replica] += num_computed * self._unit
        self.index.set(replica, self.queues[replica], self._work[replica])
        self._unit *= 1 + 1 / (self._horizon * len(self._work))
        if self._unit > 1e100:
            self._work, self._unit = {name: work / self._unit for name, work in self._work.items()}, 1.0
            for name, work in self._work.items():
                self.index.set(name, self.queues[name], work)
        self._add(replica, keys)

    def on_learned(self, replica: str, keys: ContentKeys) -> None:
        if replica in self._digests:  # it may have gone meanwhile
            self._add(replica, keys)

    def sources(self, request: RouteRequest) -> dict[int, list[str]]:
        # the first half of those that a key was sent to has computed it by now; they are asked in turn
        self._num_asked += 1
        result: dict[int, list[str]] = {}
        for key in itertools.chain(request.keys, *request.alternatives.values()):
            names = list(itertools.islice(self._replicas_of.get(key, ()), MAX_REPLICAS_OF_KEY))
            names = names[: (len(names) + 1) // 2]
            if names:
                result[key] = [names[(self._num_asked + i) % len(names)] for i in range(min(MAX_SOURCES, len(names)))]
        return result

    def _add(self, replica: str, keys: ContentKeys) -> None:
        digest = self._digests.setdefault(replica, OrderedDict())
        num_tokens = self._num_tokens.get(replica, 0)
        for key, key_tokens in keys.items():
            num_tokens += key_tokens - digest.pop(key, 0)
            digest[key] = key_tokens
            self._replicas_of.setdefault(key, {})[replica] = None
        while len(digest) > self._max_keys or (num_tokens > self._max_tokens and len(digest) > 1):
            key, key_tokens = digest.popitem(last=False)
            num_tokens -= key_tokens
            self._discard(key, replica)
        self._num_tokens[replica] = num_tokens

    def _discard(self, key: int, replica: str) -> None:
        replicas = self._replicas_of[key]
        del replicas[replica]
        if not replicas:
            del self._replicas_of[key]

    def on_removed(self, replica: str) -> None:
        for key in self._digests.pop(replica, ()):
            self._discard(key, replica)
        self._num_tokens.pop(replica, None)
        self._work.pop(replica, None)
        self._num_queued -= self.queues.get(replica, 0)
        self.index.remove(replica)
        super().on_removed(replica)

    @property
    def state_bytes(self) -> int:
        return BYTES_PER_KEY * sum(map(len, self._digests.values()))

    def check(self) -> None:
        """Raise AssertionError if the tables disagree or a limit is exceeded."""
        places = {(length, self._work[name], name) for name, length in self.queues.items()}
        assert places == set(self.index.least(len(places))), "the index differs"
        assert self._num_queued == sum(self.queues.values()), "wrong number of requests"
        pairs = {(key, replica) for replica, digest in self._digests.items() for key in digest}
        assert pairs == {(key, name) for key, names in self._replicas_of.items() for name in names}, "tables differ"
        for replica, digest in self._digests.items():
            assert len(digest) <= self._max_keys, "too many keys"
            assert self._num_tokens[replica] == sum(digest.values()), "wrong token count"
            assert self._num_tokens[replica] <= self._max_tokens or len(digest) == 1, "too many tokens"


def _hash(request: RouteRequest) -> int:
    return int.from_bytes(request.session.digest[:4], "little")


def _rendezvous(session: int, replica: str) -> int:
    """Return a hash of both.

    CRC-32 alone is linear, which loads some replicas with many sessions.
    """
    value = (session ^ zlib.crc32(replica.encode())) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return (value ^ value >> 29) * 0xBF58476D1CE4E5B9 >> 32 & 0xFFFFFFFF


class PrefixAffinity(RoutingPolicy):
    """The replica with the longest common prefix, unless queues differ much.

    The rule of Ray's own prefix-affinity router.

    Args:
        imbalance: difference of queues above which the shortest queue is chosen.
        min_match: share of the request's tokens below which the shortest queue is chosen.
    """

    def __init__(self, imbalance: int = 4, min_match: float = 0.1, max_keys: int = 4096) -> None:
        super().__init__()
        self._imbalance, self._min_match = imbalance, min_match
        self._prefixes = MessageAffinity(max_keys=max_keys)

    @staticmethod
    def _chained(request: RouteRequest) -> RouteRequest:
        """Return the request with keys of whole prefixes."""
        keys, chain = ContentKeys(), 0
        for key, num_tokens in request.keys.items():
            chain = hash((chain, key))
            keys[chain] = num_tokens
        return RouteRequest(keys, request.session)

    def set_queue(self, replica: str, length: int) -> None:
        super().set_queue(replica, length)
        self._prefixes.set_queue(replica, length)

    def rank(self, request: RouteRequest) -> list[str]:
        index = self._prefixes.index
        by_queue = [name for _, _, name in sorted(index.least(len(request.failed)))]
        if index.spread > self._imbalance:
            return _without_failed(by_queue, request)
        chained = self._chained(request)
        held, total = self._prefixes.held(chained), sum(chained.keys.values())
        if max(held.values(), default=0) < self._min_match * max(1, total):
            held = {}
        names = _without_failed(dict.fromkeys([*by_queue, *held]), request)
        return sorted(names, key=lambda name: (-held.get(name, 0), self.queues[name]))

    def on_routed(self, request: RouteRequest, replica: str) -> None:
        self._prefixes.on_routed(self._chained(request), replica)

    def on_removed(self, replica: str) -> None:
        super().on_removed(replica)
        self._prefixes.on_removed(replica)

    @property
    def state_bytes(self) -> int:
        return self._prefixes.state_bytes


class PowerOfTwo(RoutingPolicy):
    """The shorter queue of two random replicas."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def rank(self, request: RouteRequest) -> list[str]:
        names = _without_failed(self.queues, request)
        return sorted(self._random.sample(names, min(2, len(names))), key=self.queues.__getitem__)


class RoundRobin(RoutingPolicy):
    """One replica after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def rank(self, request: RouteRequest) -> list[str]:
        names = _without_failed(self.queues, request)
        start, self._next = self._next % len(names), self._next + 1
        return names[start:] + names[:start]


class SessionAffinity(RoutingPolicy):
    """One replica a session, by rendezvous hashing."""

    def rank(self, request: RouteRequest) -> list[str]:
        names, session = _without_failed(self.queues, request), _hash(request)
        return heapq.nsmallest(MAX_RANKED, names, key=lambda name: _rendezvous(session, name))


POLICIES: Mapping[str, type[RoutingPolicy]] = {
    "message": MessageAffinity,
    "prefix": PrefixAffinity,
    "power-of-two": PowerOfTwo,
    "round-robin": RoundRobin,
    "session": SessionAffinity,
}


def create_policy(name: str, **options: float) -> RoutingPolicy:
    """Create a policy by name."""
    if name not in POLICIES:
        raise ConfigError(f"router={name!r}: use one of {sorted(POLICIES)}")
    return POLICIES[name](**options)
