"""Options of a repair, and its strategies by name."""

from dataclasses import dataclass
from typing import Literal

from ...errors import ConfigError
from .align import parse_alignment, select_nothing
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
    "align": Strategy(select_nothing, aligns=True),
}


@dataclass(frozen=True)
class Repair:
    """Share of the context to recompute, the strategy that selects it, and how the rest is attended to.

    Args:
        share: share of the tokens of every parent, from 0 (reuse as it is) to 1 (the result of
            prefix mode).
        strategy: key of `REPAIR_STRATEGIES`: "first", "unseen", "deviation" or "attention"; "align", which computes
            nothing; or a `Strategy` of your own.
        alignment: of attention to reused tokens that are not recomputed and do not know what precedes them: temperature
            and scale (`Alignment`), or "calibrated" for the model's own. None: ordinary attention, or "calibrated" with
            "align".
    """

    share: float
    strategy: str | Strategy = "first"
    alignment: tuple[float, float] | Literal["calibrated"] | None = None

    def __post_init__(self) -> None:
        is_number = isinstance(self.share, int | float) and not isinstance(self.share, bool)
        if not is_number or not 0 <= self.share <= 1:
            raise ConfigError(f"repair share={self.share!r}: use a number from 0 to 1")
        if not isinstance(self.strategy, Strategy) and self.strategy not in REPAIR_STRATEGIES:
            raise ConfigError(
                f"repair strategy={self.strategy!r}: use one of {list(REPAIR_STRATEGIES)}, or a Strategy of your own"
            )
        alignment = self.alignment
        if self.selection.aligns:
            if self.share:
                raise ConfigError(
                    f"repair share={self.share!r}: strategy 'align' computes nothing: use 0, or another strategy with "
                    "alignment='calibrated'"
                )
            alignment = alignment or "calibrated"
        if alignment is not None and alignment != "calibrated":
            alignment = parse_alignment(alignment)
        object.__setattr__(self, "alignment", alignment)

    @property
    def selection(self) -> Strategy:
        """The strategy itself."""
        return self.strategy if isinstance(self.strategy, Strategy) else REPAIR_STRATEGIES[self.strategy]

    @property
    def changes(self) -> bool:
        """False for reuse as it is."""
        return self.share > 0 or self.alignment is not None

    @classmethod
    def parse(cls, value: "float | Repair") -> "Repair":
        """Convert the `repair` argument of a call."""
        return value if isinstance(value, Repair) else cls(value)
