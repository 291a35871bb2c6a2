"""Options of a repair, and its strategies by name."""

from dataclasses import dataclass

from ...errors import ConfigError
from .attention import select_attended
from .deviation import select_deviating
from .first import select_first
from .strategy import Strategy
from .unseen import select_unseen

REPAIR_STRATEGIES = {
    "first": Strategy(select_first),
    "unseen": Strategy(select_unseen),
    "deviation": Strategy(select_deviating, reads_kv=True),
    "attention": Strategy(select_attended, reads_prompt=True),
}


@dataclass(frozen=True)
class Repair:
    """Share of the context to recompute, and the strategy that selects it.

    Args:
        share: share of the tokens of every parent, from 0 (reuse as it is) to 1 (the result of
            prefix mode).
        strategy: key of `REPAIR_STRATEGIES`: "first", "unseen", "deviation" or "attention"; or a `Strategy` of
            your own.
    """

    share: float
    strategy: str | Strategy = "first"

    def __post_init__(self) -> None:
        is_number = isinstance(self.share, int | float) and not isinstance(self.share, bool)
        if not is_number or not 0 <= self.share <= 1:
            raise ConfigError(f"repair share={self.share!r}: use a number from 0 to 1")
        if not isinstance(self.strategy, Strategy) and self.strategy not in REPAIR_STRATEGIES:
            raise ConfigError(
                f"repair strategy={self.strategy!r}: use one of {list(REPAIR_STRATEGIES)}, or a Strategy of your own"
            )

    @property
    def selection(self) -> Strategy:
        """The strategy itself."""
        return self.strategy if isinstance(self.strategy, Strategy) else REPAIR_STRATEGIES[self.strategy]

    @classmethod
    def parse(cls, value: "float | Repair") -> "Repair":
        """Convert the `repair` argument of a call."""
        return value if isinstance(value, Repair) else cls(value)
