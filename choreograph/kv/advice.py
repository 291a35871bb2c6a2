"""What is said about encodings from above, and the facts that a policy sees. Priority comes down as data: names of
encodings, numbers, groups; nothing here knows an agent."""

from collections.abc import Mapping
from typing import NamedTuple

from .encoding import Encoding
from .policy import Facts


class Advice(NamedTuple):
    """What somebody who knows a workflow says: how soon encodings are wanted, by name, and in which groups all others
    vary."""

    steps: Mapping[bytes, float]
    varying: frozenset[object] = frozenset()


class Counsel:
    """The advice of every source. Of several that speak of one encoding, the soonest counts (KVFlow, section 3.1)."""

    def __init__(self) -> None:
        self._advice: dict[object, Advice] = {}
        self._steps: dict[bytes, float] = {}
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
        self._steps = {}
        for one in self._advice.values():
            for key, steps in one.steps.items():
                self._steps[key] = min(steps, self._steps.get(key, steps))
        self._varying = frozenset().union(*(one.varying for one in self._advice.values()))

    def facts(self, e: Encoding) -> Facts:
        steps = None if e.key is None else self._steps.get(e.key)
        varying = steps is None and e.group is not None and e.group in self._varying
        return Facts(e.id, made=e.id, used=e.used_at, uses=e.uses, held=bool(e.holders), steps=steps, varying=varying)
