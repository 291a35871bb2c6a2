"""Which layers a model computes again of what another model encoded (DroidSpeak, section 4.2). Values; no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True)
class Pattern:
    """Stretches of layers, first <= layer < end, that the receiver computes; all others are the sender's.

    A stretch from layer 0 begins with the tokens, every other one with what came into its first layer when the sender
    computed it: the sender's E cache at a *transition*. `Pattern.of` takes the paper's three integers.
    """

    stretches: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        end = -1
        for first, last in self.stretches:
            if not 0 <= first < last or first <= end:
                raise ConfigError(f"stretches={self.stretches!r}: use first < end, in order and apart")
            end = last

    @classmethod
    def of(cls, head: int, begin: int, end: int) -> "Pattern":
        """Recompute [0, head), reuse [head, begin), recompute [begin, end), reuse the rest."""
        if not 0 <= head <= begin <= end:
            raise ConfigError(f"pattern {head}, {begin}, {end}: use 0 <= head <= begin <= end")
        return cls.of_layers({*range(head), *range(begin, end)})

    @classmethod
    def of_layers(cls, layers: Iterable[int]) -> "Pattern":
        """The layers that are computed, in any order."""
        stretches: list[tuple[int, int]] = []
        for layer in sorted(set(layers)):
            if stretches and stretches[-1][1] == layer:
                stretches[-1] = (stretches[-1][0], layer + 1)
            else:
                stretches.append((layer, layer + 1))
        return cls(tuple(stretches))

    @property
    def layers(self) -> frozenset[int]:
        """The layers that are computed."""
        return frozenset(layer for first, end in self.stretches for layer in range(first, end))

    @property
    def transitions(self) -> frozenset[int]:
        """The layers where computing begins anew, from what the sender kept."""
        return frozenset(first for first, _ in self.stretches if first)

    @property
    def boundaries(self) -> tuple[int, int, int] | None:
        """The three integers of `of`; None for a pattern of more transitions than one."""
        rest = [stretch for stretch in self.stretches if stretch[0]]
        if len(rest) > 1:
            return None
        head = self.stretches[0][1] if self.stretches and not self.stretches[0][0] else 0
        return (head, *rest[0]) if rest else (head, head, head)

    def check(self, layers: int) -> "Pattern":
        """Raises ConfigError where it names layers that a model does not have."""
        if self.stretches and self.stretches[-1][1] > layers:
            raise ConfigError(f"pattern {self}: the model has layers 0 to {layers - 1}")
        return self

    def __str__(self) -> str:
        return ",".join(f"{first}-{end}" for first, end in self.stretches) or "none"


def read_pattern(given: "Pattern | Sequence[int]") -> Pattern:
    """A pattern as it is, or by its three boundaries."""
    if isinstance(given, Pattern):
        return given
    numbers = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    if len(numbers) != 3 or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        raise ConfigError(f"pattern={given!r}: use a Pattern, or three integers: head, begin, end")
    return Pattern.of(*numbers)
