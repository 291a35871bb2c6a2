"""What tells the attention of one layer from that of another: where positions enter it, and how far it sees."""

from dataclasses import dataclass
from typing import NamedTuple

from .rope import Rotary


class Heads(NamedTuple):
    """The shape of a model's attention: query heads, key-value heads, the size of one."""

    query: int
    groups: int
    width: int


@dataclass(frozen=True)
class Kind:
    """rotary: how positions turn keys, None where they do not. window: a key is seen at a logical distance below it
    only, in either direction. softcap: scores are kept within it by tanh. slopes: of ALiBi, one per query head."""

    rotary: Rotary | None = None
    window: int | None = None
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None

    def __str__(self) -> str:
        parts = [f"rotary on {2 * self.rotary.half} dimensions" if self.rotary else "", "ALiBi" if self.slopes else ""]
        parts += [f"window {self.window}" if self.window else "", f"cap {self.softcap:g}" if self.softcap else ""]
        return ", ".join(part for part in parts if part) or "no positions"

    @property
    def plain(self) -> bool:
        """Whether scores are nothing but products, seen by every row that the plan shows them to."""
        return self.window is None and self.softcap is None and self.slopes is None
