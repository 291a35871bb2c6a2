"""Which pattern serves a context just now (DroidSpeak, section 4.4): careful while there is time, quick under load.

choice = Choice(profile.frontier(), loss=0.01, objective=2.0, seconds=0.001)
engine.share("math", choose=choice, patterns=choice.patterns)
"""

from collections.abc import Iterable

from ..core import Engine
from ..engine.sharing import Load
from ..errors import ConfigError
from ..pattern import Pattern
from ..types import BASE
from .profile import Point, Profile


class Choice:
    """Takes, of the patterns that lose at most `loss`, the most careful one whose first token should come within
    `objective` seconds, or else the cheapest. seconds: a full prefill's, for one token."""

    def __init__(
        self,
        points: Iterable[Point],
        *,
        seconds: float,
        objective: float = float("inf"),
        loss: float = float("inf"),
    ) -> None:
        self.points = sorted((p for p in points if p.loss <= loss), key=lambda p: (p.loss, p.cost))
        if not self.points:
            raise ConfigError(f"loss={loss}: no pattern loses so little; the least is computing everything")
        for name, value in (("seconds", seconds), ("objective", objective)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"{name}={value!r}: use a positive number")
        self._seconds = seconds
        self._objective = objective

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """All that it may answer: what `Engine.share` wants to know."""
        return tuple(point.pattern for point in self.points)

    def expected(self, point: Point, load: Load) -> float:
        """Seconds until the first token: what is queued has to be computed first, in the layers chosen for it."""
        return (load.tokens + load.own * point.cost) * self._seconds

    def __call__(self, load: Load) -> Pattern:
        for point in self.points:
            if self.expected(point, load) <= self._objective:
                return point.pattern
        return min(self.points, key=lambda p: p.cost).pattern


def share_by(
    engine: Engine,
    profile: Profile,
    receiver: str,
    sender: str = BASE,
    *,
    seconds: float,
    objective: float = float("inf"),
    loss: float = float("inf"),
    tokens: int | None = None,
) -> Choice:
    """`Engine.share` as a profile and the load say. Raises ConfigError for a profile of other models."""
    family = engine.runner.family
    for role, name, known in (("receiver", receiver, profile.receiver), ("sender", sender, profile.sender)):
        if family.fingerprint(name) != known:
            raise ConfigError(f"{role}={name!r} is not the {role} of the profile: profile this pair")
    choice = Choice(profile.frontier(), seconds=seconds, objective=objective, loss=loss)
    engine.share(receiver, sender, choose=choice, patterns=choice.patterns, tokens=tokens)
    return choice
