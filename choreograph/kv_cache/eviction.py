"""Eviction policies.

Call path (`manager.py`): `KVCacheManager.allocate_entry` and `grow` call `reclaim` when the device has
too few free pages. `reclaim` cuts unused entries into pieces of one priority (`splits.split_unused`)
and calls `_evict`; `evict_entry` offloads an entry or frees its pages. `Prefetcher` evicts in the same order
for the entry that it loads, and `_reclaim_tier` evicts copies from the host and disk tiers.

Candidates: on the device, complete entries that are not in use and have no running transfer.
Running requests and pins exclude an entry before the policy is called. The policy of
`CacheConfig(eviction=...)` orders the candidates (`EvictionOrder`).

A policy is a pure function that returns the IDs of all its candidates, first to evict first. A user
gives a function of their own as `CacheConfig(eviction=function)`. To add one with a name, write the
function here, add it to `EVICTION_POLICIES` below and its name to `EvictionPolicyName` in
`config.py`. CONTRIBUTING.md lists the tests and the documentation to extend.
"""

import math
import reprlib
import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple


class EvictionCandidate(NamedTuple):
    """Inputs of an eviction policy for one entry not in use."""

    id: int  # entry ID
    created: int  # increasing counter
    last_access: int  # increasing counter
    hits: int = 0  # references taken since creation
    referenced: bool = False  # a message still references it
    steps_to_execution: float | None = None  # until needed (KVFlow §3.1); None: no hint
    ephemeral: bool = False  # part of an agent's prompt that changes on every run


EvictionPolicy = Callable[[Iterable[EvictionCandidate]], list[int]]


def least_recently_used(candidates: Iterable[EvictionCandidate]) -> list[int]:
    """Order by last access, unreferenced entries first."""
    return _sorted(candidates, lambda item: (item.referenced, item.last_access))


def least_frequently_used(candidates: Iterable[EvictionCandidate]) -> list[int]:
    """Order by references taken since creation, unreferenced entries first."""
    return _sorted(candidates, lambda item: (item.referenced, item.hits, item.last_access))


def first_in_first_out(candidates: Iterable[EvictionCandidate]) -> list[int]:
    """Order by creation, unreferenced entries first."""
    return _sorted(candidates, lambda item: (item.referenced, item.created))


def workflow_aware(candidates: Iterable[EvictionCandidate]) -> list[int]:
    """Order by steps-to-execution (KVFlow §3.1).

    Ephemeral entries first, then those of agents that never run again, entries without hints (least
    recently used first), and fixed prefixes by decreasing steps-to-execution.
    """

    def rank(item: EvictionCandidate) -> tuple[float, ...]:
        if item.ephemeral:
            return (0, 0, item.last_access)
        if item.steps_to_execution is None:
            return (2, item.referenced, item.last_access)
        if item.steps_to_execution == math.inf:
            return (1, 0, item.last_access)
        return (3, -item.steps_to_execution, item.last_access)

    return _sorted(candidates, rank)


def _sorted(
    candidates: Iterable[EvictionCandidate], rank: Callable[[EvictionCandidate], tuple[float, ...]]
) -> list[int]:
    return [item.id for item in sorted(candidates, key=lambda item: (*rank(item), item.id))]


EVICTION_POLICIES: dict[str, EvictionPolicy] = {
    "workflow": workflow_aware,
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "fifo": first_in_first_out,
}


def policy_name(policy: str | EvictionPolicy) -> str:
    """Return the name of a policy, the same in every process."""
    if isinstance(policy, str):
        return policy
    named = policy if hasattr(policy, "__qualname__") else type(policy)
    return f"{named.__module__}.{named.__qualname__}"


class EvictionOrder:
    """Order of eviction by a policy, which may be a user's function.

    If that raises, or does not return every ID once, it is not called again: a warning names it, and
    entries are evicted in order `lru`. No request fails, since none is the cause.
    """

    def __init__(self, policy: str | EvictionPolicy) -> None:
        self.name = policy_name(policy)
        self._policy = EVICTION_POLICIES[policy] if isinstance(policy, str) else policy

    def __call__(self, candidates: Iterable[EvictionCandidate]) -> list[int]:
        """Return the IDs of all candidates, first to evict first."""
        if self.name in EVICTION_POLICIES:
            return self._policy(candidates)
        candidates = list(candidates)
        try:
            order = list(self._policy(list(candidates)))
            if sorted(order) == sorted(candidate.id for candidate in candidates):
                return order
            problem = f"returned {reprlib.repr(order)}, not the id of each of the {len(candidates)} candidates once"
        except Exception as exc:
            problem = f"raised {exc!r}"
        name, self.name, self._policy = self.name, "lru", least_recently_used
        warnings.warn(
            f"eviction policy {name} {problem}: entries are evicted in order 'lru' from now on; correct the "
            "function that is given as CacheConfig(eviction=...)",
            RuntimeWarning,
            stacklevel=2,
        )
        return self._policy(candidates)
