"""Which pattern serves a context just now (DroidSpeak, section 4.4): careful while there is time, quick under load.

choice = Choice(profile.frontier(), loss=0.01, objective=2.0, seconds=0.001)
engine.enable_layer_reuse("math", choose=choice, patterns=choice.patterns)
"""

from collections.abc import Iterable

from ..engine.cross_model import EngineLoad, LayerPattern
from ..engine.engine import Engine
from ..errors import ConfigError
from ..outputs import BASE_MODEL
from .profile import ParetoPoint, Profile


class LatencyAwareSelector:
    """Takes, of the patterns that lose at most `loss`, the most careful one whose first token should come within
    `objective` seconds, or else the cheapest. seconds: a full prefill's, for one token."""

    def __init__(
        self,
        points: Iterable[ParetoPoint],
        *,
        seconds_per_token: float,
        ttft_slo: float = float("inf"),
        max_loss: float = float("inf"),
    ) -> None:
        self.points = sorted((p for p in points if p.loss <= max_loss), key=lambda p: (p.loss, p.cost))
        if not self.points:
            raise ConfigError(f"max_loss={max_loss}: no pattern loses so little; the least is computing everything")
        for name, value in (("seconds_per_token", seconds_per_token), ("ttft_slo", ttft_slo)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"{name}={value!r}: use a positive number")
        self._seconds_per_token = seconds_per_token
        self._ttft_slo = ttft_slo

    @property
    def patterns(self) -> tuple[LayerPattern, ...]:
        """All that it may answer: what `Engine.enable_layer_reuse` wants to know."""
        return tuple(point.pattern for point in self.points)

    def expected_ttft(self, point: ParetoPoint, load: EngineLoad) -> float:
        """Seconds until the first token: what is queued has to be computed first, in the layers chosen for it."""
        return (load.tokens + load.message_tokens * point.cost) * self._seconds_per_token

    def __call__(self, load: EngineLoad) -> LayerPattern:
        for point in self.points:
            if self.expected_ttft(point, load) <= self._ttft_slo:
                return point.pattern
        return min(self.points, key=lambda p: p.cost).pattern


def enable_profiled_reuse(
    engine: Engine,
    profile: Profile,
    receiver: str,
    sender: str = BASE_MODEL,
    *,
    seconds_per_token: float,
    ttft_slo: float = float("inf"),
    max_loss: float = float("inf"),
    capacity: int | None = None,
) -> LatencyAwareSelector:
    """`Engine.enable_layer_reuse` as a profile and the load say. Raises ConfigError for a profile of other models."""
    family = engine.core.model_set
    for role, name, known in (("receiver", receiver, profile.receiver), ("sender", sender, profile.sender)):
        if family.fingerprint(name) != known:
            raise ConfigError(f"{role}={name!r} is not the {role} of the profile: profile this pair")
    choice = LatencyAwareSelector(
        profile.frontier(), seconds_per_token=seconds_per_token, ttft_slo=ttft_slo, max_loss=max_loss
    )
    engine.enable_layer_reuse(receiver, sender, selector=choice, patterns=choice.patterns, capacity=capacity)
    return choice
