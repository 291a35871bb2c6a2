"""Routing policies: which replica a request goes to, without Ray.

`benchmarks/ray_scale.py` runs the same objects on a virtual clock.
"""

import heapq
import random
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import ConfigError
from .content_keys import ContentKeys

BYTES_PER_KEY = 224  # of a key that one replica has, in the two tables of `MessageAffinity`; tracemalloc measures 223

MAX_RANKED = 8  # replicas that are tried in one round, where the first ones are full


@dataclass
class RouteRequest:
    """What a policy reads of a request."""

    keys: ContentKeys = field(default_factory=dict)  # of its messages, with their tokens, in order
    session: str = ""  # client and workflow
    pinned: str | None = None  # replica that has to run it if it exists
    failed: set[str] = field(default_factory=set)  # replicas that failed it
    learned: list[tuple[str, ContentKeys]] = field(default_factory=list)  # (replica, what it generated) before


class RoutingPolicy(ABC):
    """Choice of a replica.

    Replicas are named; a queue is a number of requests, running and waiting.
    """

    @abstractmethod
    def rank(self, request: RouteRequest, queues: Mapping[str, int]) -> list[str]:
        """Return replicas, the best first; all of `queues` or some of them."""

    def on_routed(self, request: RouteRequest, replica: str) -> None:  # noqa: B027
        """Note that a replica computes a request."""

    def on_removed(self, replica: str) -> None:  # noqa: B027
        """Forget a replica."""

    @property
    def state_bytes(self) -> int:
        """Memory of what the policy knows, in bytes."""
        return 0


def choose(policy: RoutingPolicy, request: RouteRequest, queues: Mapping[str, int]) -> list[str]:
    """Rank replicas: the pinned one, and without those that failed the request."""
    if request.pinned is not None and request.pinned in queues:
        return [request.pinned]
    usable = {name: queue for name, queue in queues.items() if name not in request.failed} or queues
    return policy.rank(request, usable)


class MessageAffinity(RoutingPolicy):
    """The replica that holds most of the request's tokens, against its queue.

    Every replica has a digest: the most recent keys that were sent to it, with their tokens. A stale key
    costs a recomputation, never a wrong answer.

    Args:
        queue_tokens: tokens that one request in the queue weighs.
        max_keys: keys of one replica's digest.
        max_tokens: tokens of one replica's digest, such as the size of its cache.
    """

    def __init__(self, queue_tokens: float = 256.0, max_keys: int = 4096, max_tokens: int = 1 << 20) -> None:
        if max_keys < 1 or max_tokens < 1 or queue_tokens < 0:
            raise ConfigError(
                f"{queue_tokens=}, {max_keys=}, {max_tokens=}: use limits of at least 1 and a weight >= 0"
            )
        self._queue_tokens, self._max_keys, self._max_tokens = queue_tokens, max_keys, max_tokens
        self._digests: dict[str, OrderedDict[int, int]] = {}  # tokens by key, least recently used first
        self._num_tokens: dict[str, int] = {}  # of each digest
        self._replicas_of: dict[int, dict[str, None]] = {}  # replicas whose digest has a key

    def held(self, request: RouteRequest) -> dict[str, int]:
        """Return the request's tokens that each replica holds, if any."""
        result: dict[str, int] = {}
        for key, num_tokens in request.keys.items():
            for replica in self._replicas_of.get(key, ()):
                result[replica] = result.get(replica, 0) + num_tokens
        return result

    def rank(self, request: RouteRequest, queues: Mapping[str, int]) -> list[str]:
        held, session = self.held(request), _hash(request)

        def order(replica: str) -> tuple[float, int, int]:
            score = held.get(replica, 0) - self._queue_tokens * queues[replica]
            # equal replicas: a session keeps one of them, and sessions spread over all
            return -score, queues[replica], _rendezvous(session, replica)

        shortest = min(queues.values())  # of the replicas that hold nothing, only these can be first
        candidates = [name for name, queue in queues.items() if queue == shortest or name in held]
        return heapq.nsmallest(MAX_RANKED, candidates, key=order)

    def on_routed(self, request: RouteRequest, replica: str) -> None:
        for other, keys in request.learned:
            if other in self._digests:  # it may have gone meanwhile
                self._add(other, keys)
        self._add(replica, request.keys)

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

    @property
    def state_bytes(self) -> int:
        return BYTES_PER_KEY * sum(map(len, self._digests.values()))

    def check(self) -> None:
        """Raise AssertionError if the two tables disagree or a limit is exceeded."""
        pairs = {(key, replica) for replica, digest in self._digests.items() for key in digest}
        assert pairs == {(key, name) for key, names in self._replicas_of.items() for name in names}, "tables differ"
        for replica, digest in self._digests.items():
            assert len(digest) <= self._max_keys, "too many keys"
            assert self._num_tokens[replica] == sum(digest.values()), "wrong token count"
            assert self._num_tokens[replica] <= self._max_tokens or len(digest) == 1, "too many tokens"


def _hash(request: RouteRequest) -> int:
    return zlib.crc32(request.session.encode("utf-8", "surrogatepass"))


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
        self._imbalance, self._min_match = imbalance, min_match
        self._prefixes = MessageAffinity(0.0, max_keys)

    @staticmethod
    def _chained(request: RouteRequest) -> RouteRequest:
        """Return the request with keys of whole prefixes."""
        keys, chain = ContentKeys(), 0
        for key, num_tokens in request.keys.items():
            chain = hash((chain, key))
            keys[chain] = num_tokens
        return RouteRequest(keys, request.session)

    def rank(self, request: RouteRequest, queues: Mapping[str, int]) -> list[str]:
        by_queue = sorted(queues, key=lambda name: (queues[name], _rendezvous(_hash(request), name)))
        if queues[by_queue[-1]] - queues[by_queue[0]] > self._imbalance:
            return by_queue
        chained = self._chained(request)
        held, total = self._prefixes.held(chained), sum(chained.keys.values())
        if max((held.get(name, 0) for name in queues), default=0) < self._min_match * max(1, total):
            return by_queue
        return sorted(by_queue, key=lambda name: -held.get(name, 0))

    def on_routed(self, request: RouteRequest, replica: str) -> None:
        self._prefixes.on_routed(self._chained(request), replica)

    def on_removed(self, replica: str) -> None:
        self._prefixes.on_removed(replica)

    @property
    def state_bytes(self) -> int:
        return self._prefixes.state_bytes


class PowerOfTwo(RoutingPolicy):
    """The shorter queue of two random replicas."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def rank(self, request: RouteRequest, queues: Mapping[str, int]) -> list[str]:
        names = list(queues)
        return sorted(self._random.sample(names, min(2, len(names))), key=lambda name: queues[name])


class RoundRobin(RoutingPolicy):
    """One replica after the other."""

    def __init__(self) -> None:
        self._next = 0

    def rank(self, request: RouteRequest, queues: Mapping[str, int]) -> list[str]:
        names = sorted(queues)
        start, self._next = self._next % len(names), self._next + 1
        return names[start:] + names[:start]


class SessionAffinity(RoutingPolicy):
    """One replica a session, by rendezvous hashing."""

    def rank(self, request: RouteRequest, queues: Mapping[str, int]) -> list[str]:
        return sorted(queues, key=lambda name: _rendezvous(_hash(request), name))


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
