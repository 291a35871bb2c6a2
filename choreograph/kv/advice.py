"""What is said about encodings from above, and the facts that a policy sees. Priority comes down as data: names of
encodings, numbers, groups; nothing here knows an agent."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from .encoding import Encoding
from .policy import Facts


class Advice(NamedTuple):
    """What somebody who knows a workflow says, of encodings by name: how soon they are wanted; how soon those are that
    vary, as long as a message names them; and in which groups all others vary."""

    steps: Mapping[bytes, float]
    while_held: Mapping[bytes, float] = MappingProxyType({})
    varying: frozenset[object] = frozenset()


class Counsel:
    """The advice of every source. Of several that speak of one encoding, the soonest counts (KVFlow, section 3.1)."""

    def __init__(self) -> None:
        self._advice: dict[object, Advice] = {}
        self._steps: dict[bytes, float] = {}
        self._while_held: dict[bytes, float] = {}
        self._varying: frozenset[object] = frozenset()

    @property
    def sources(self) -> int:
        return len(self._advice)

    def take(self, source: object, advice: Advice | None) -> None:
        """A source's advice in place of its last; None takes it back."""
        if advice is None:
            self._advice.pop(source, None)
        else:
            self._advice[source] = advice
        self._steps = _soonest(one.steps for one in self._advice.values())
        self._while_held = _soonest(one.while_held for one in self._advice.values())
        self._varying = frozenset().union(*(one.varying for one in self._advice.values()))

    def facts(self, e: Encoding) -> Facts:
        steps = None if e.key is None else self._steps.get(e.key, self._while_held.get(e.key) if e.holders else None)
        varying = steps is None and e.group is not None and e.group in self._varying
        return Facts(e.id, made=e.id, used=e.used_at, uses=e.uses, held=bool(e.holders), steps=steps, varying=varying)

    def as_soon(self, e: Encoding, other: Encoding) -> bool:
        """Whether an encoding is known to be wanted as soon as another, or sooner."""
        steps, others = self.facts(e).steps, self.facts(other).steps
        return steps is not None and others is not None and steps <= others


def _soonest(some: Iterable[Mapping[bytes, float]]) -> dict[bytes, float]:
    found: dict[bytes, float] = {}
    for one in some:
        for key, steps in one.items():
            found[key] = min(steps, found.get(key, steps))
    return found
