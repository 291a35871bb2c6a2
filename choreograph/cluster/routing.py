"""Routing policies: which replica a request goes to, without Ray.

`benchmarks/ray_scale.py` runs the same objects on a virtual clock.
"""

import heapq
import itertools
import random
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..errors import ConfigError
from .content_keys import ContentKeys

TransferMode = Literal["auto", "always", "never"]  # when messages are fetched from replicas that hold them

BYTES_PER_KEY = 224  # of a key that one replica has, in the two tables of `MessageAffinity`; tracemalloc measures 223

MAX_SOURCES = 2  # replicas that are named to the one that lacks a message

MAX_REPLICAS_OF_KEY = 64  # that a lookup visits

MAX_RANKED = 8  # replicas that are tried in one round, where the first ones are full


@dataclass
class RouteRequest:
    """What a policy reads of a request."""

    keys: ContentKeys = field(default_factory=dict)  # of its messages, with their tokens, in order
    session: str = ""  # client and workflow
    pinned: str | None = None  # replica that has to run it if it exists
    failed: set[str] = field(default_factory=set)  # replicas that failed it
    learned: list[tuple[str, ContentKeys]] = field(default_factory=list)  # (replica, what it generated) before
    is_movable: bool = False  # replicas may fetch its messages from each other
    sources: dict[int, list[str]] = field(default_factory=dict)  # replicas that have a key, to fetch it from


class RoutingPolicy(ABC):
    """Choice of a replica.

    Replicas are named; a queue is a number of requests, running and waiting.
    """

    @abstractmethod
    def rank(self, request: RouteRequest, queues: Mapping[str, int]) -> list[str]:
        """Return replicas, the best first; all of `queues` or some of them."""

    def on_routed(self, request: RouteRequest, replica: str) -> None:  # noqa: B027
        """Note that a replica computes a request."""

    def on_learned(self, replica: str, keys: ContentKeys) -> None:  # noqa: B027
        """Note what a replica has generated."""

    def sources(self, request: RouteRequest) -> dict[int, list[str]]:
        """Return some replicas that have each key of a request."""
        return {}

    def on_removed(self, replica: str) -> None:  # noqa: B027
        """Forget a replica."""

    @property
    def state_bytes(self) -> int:
        """Memory of what the policy knows, in bytes."""
        return 0


def choose(policy: RoutingPolicy, request: RouteRequest, queues: Mapping[str, int]) -> list[str]:
    """Learn from a request, and rank replicas.

    The first is the pinned one; those that failed the request are left out.
    """
    for name, keys in request.learned:
        policy.on_learned(name, keys)
    request.learned = []
    if request.pinned is not None and request.pinned in queues:
        return [request.pinned]
    usable = {name: queue for name, queue in queues.items() if name not in request.failed} or queues
    return policy.rank(request, usable)


class MessageAffinity(RoutingPolicy):
    """The replica with the least work, this request included.

    Every replica has a digest: the most recent keys that were sent to it, with their tokens. A stale key
    costs a recomputation, never a wrong answer. Work is that of the queue, of this request, and of what a replica was
    given lately, in tokens to compute. The latter is forgotten exponentially, over `horizon` requests of each
    replica.

    Args:
        queue_tokens: tokens that one request in the queue weighs.
        moving: work of a token that can be fetched from another replica; 1 is that of computing it.
        balance: weight of the work that a replica was given lately.
        horizon: requests of each replica after which that is forgotten.
        max_keys: keys of one replica's digest.
        max_tokens: tokens of one replica's digest, such as the size of its cache.
    """

    def __init__(
        self,
        queue_tokens: float = 64.0,
        moving: float = 0.25,
        balance: float = 0.5,
        horizon: int = 256,
        max_keys: int = 4096,
        max_tokens: int = 1 << 20,
    ) -> None:
        if max_keys < 1 or max_tokens < 1 or horizon < 1 or min(queue_tokens, moving, balance) < 0:
            raise ConfigError(
                f"{queue_tokens=}, {moving=}, {balance=}, {horizon=}, {max_keys=}, {max_tokens=}: "
                "use limits of at least 1 and weights >= 0"
            )
        self._queue_tokens, self._moving, self._balance, self._horizon = queue_tokens, moving, balance, horizon
        self._max_keys, self._max_tokens = max_keys, max_tokens
        self._digests: dict[str, OrderedDict[int, int]] = {}  # tokens by key, least recently used first
        self._num_tokens: dict[str, int] = {}  # of each digest
        self._replicas_of: dict[int, dict[str, None]] = {}  # replicas whose digest has a key
        self._work: dict[str, float] = {}  # given to each replica, in units of `_unit` tokens
        self._unit = 1.0  # grows instead of all counts becoming less

    def held(self, request: RouteRequest) -> dict[str, int]:
        """Return the request's tokens that each replica holds, if any.

        What very many replicas hold makes no difference, and is left out.
        """
        result: dict[str, int] = {}
        for key, num_tokens in request.keys.items():
            replicas = self._replicas_of.get(key, ())
            for replica in replicas if len(replicas) <= MAX_REPLICAS_OF_KEY else ():
                result[replica] = result.get(replica, 0) + num_tokens
        return result

    def work(self, replica: str) -> float:
        """Return the tokens that a replica was given lately."""
        return self._work.get(replica, 0.0) / self._unit

    def rank(self, request: RouteRequest, queues: Mapping[str, int]) -> list[str]:
        held, session, held_weight = self.held(request), _hash(request), self._moving if request.is_movable else 1.0
        if new := [name for name in queues if name not in self._work]:
            # they do not get everything at once
            self._work |= dict.fromkeys(new, min(self._work.values(), default=0.0))
        weight = self._balance / self._unit
        load = {name: self._queue_tokens * queue + weight * self._work[name] for name, queue in queues.items()}

        def order(replica: str) -> tuple[float, int, int]:
            cost = load[replica] - held_weight * held.get(replica, 0)
            # equal replicas: a session keeps one of them, and sessions spread over all
            return cost, queues[replica], _rendezvous(session, replica)

        # of the replicas that hold nothing, only these can be first
        candidates = {*heapq.nsmallest(MAX_RANKED, load, key=load.__getitem__), *(held.keys() & load.keys())}
        return heapq.nsmallest(MAX_RANKED, candidates, key=order)

    def on_routed(self, request: RouteRequest, replica: str) -> None:
        known = sum(tokens for key, tokens in request.keys.items() if key in self._replicas_of)
        own: Mapping[int, int] = self._digests.get(replica, {})
        num_held = sum(tokens for key, tokens in request.keys.items() if key in own)
        num_computed: float = sum(request.keys.values()) - known
        num_computed += (self._moving if request.is_movable else 1.0) * (known - num_held)
        self._work[replica] = self._work.get(replica, 0.0) + num_computed * self._unit
        self._unit *= 1 + 1 / (self._horizon * len(self._work))
        if self._unit > 1e100:
            self._work, self._unit = {name: work / self._unit for name, work in self._work.items()}, 1.0
        self._add(replica, request.keys)

    def on_learned(self, replica: str, keys: ContentKeys) -> None:
        if replica in self._digests:  # it may have gone meanwhile
            self._add(replica, keys)

    def sources(self, request: RouteRequest) -> dict[int, list[str]]:
        # the first replicas that a key was sent to have computed it by now
        found = {key: list(itertools.islice(self._replicas_of.get(key, ()), MAX_SOURCES)) for key in request.keys}
        return {key: names for key, names in found.items() if names}

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
        self._work.pop(replica, None)

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
        self._prefixes = MessageAffinity(max_keys=max_keys)

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
