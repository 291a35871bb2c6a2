"""Patterns of layers that one model computes and reuses from another (DroidSpeak §4.2)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True)
class LayerPattern:
    """Ranges of layers that the receiver recomputes.

    All other layers are reused from the sender. A range that starts at layer 0 is computed from the
    tokens, any other from the sender's hidden states at its first layer (the E cache at a
    *transition*). `LayerPattern.from_triplet` takes the paper's three integers.
    """

    ranges: tuple[tuple[int, int], ...] = ()  # [first, end), ascending

    def __post_init__(self) -> None:
        end = -1
        for first, last in self.ranges:
            if not 0 <= first < last or first <= end:
                raise ConfigError(f"ranges={self.ranges!r}: use ascending ranges [first, end) with gaps between them")
            end = last

    @classmethod
    def from_triplet(cls, head: int, start: int, end: int) -> "LayerPattern":
        """Recompute [0, head), reuse [head, start), recompute [start, end), reuse the rest."""
        if not 0 <= head <= start <= end:
            raise ConfigError(f"pattern {head}, {start}, {end}: use 0 <= head <= start <= end")
        return cls.from_layers({*range(head), *range(start, end)})

    @classmethod
    def from_layers(cls, layers: Iterable[int]) -> "LayerPattern":
        """Create a pattern from the recomputed layers, in any order."""
        ranges: list[tuple[int, int]] = []
        for layer in sorted(set(layers)):
            if ranges and ranges[-1][1] == layer:
                ranges[-1] = (ranges[-1][0], layer + 1)
            else:
                ranges.append((layer, layer + 1))
        return cls(tuple(ranges))

    @property
    def layers(self) -> frozenset[int]:
        """Layers that are recomputed."""
        return frozenset(layer for first, end in self.ranges for layer in range(first, end))

    @property
    def entry_layers(self) -> frozenset[int]:
        """Layers whose input hidden states the sender has to cache."""
        return frozenset(first for first, _ in self.ranges if first)

    def check(self, num_layers: int) -> "LayerPattern":
        """Return the pattern if the model has all its layers.

        Raises:
            ConfigError: if the model has fewer layers.
        """
        if self.ranges and self.ranges[-1][1] > num_layers:
            raise ConfigError(f"pattern {self}: the model has layers 0 to {num_layers - 1}")
        return self

    def __str__(self) -> str:
        return ",".join(f"{first}-{end}" for first, end in self.ranges) or "none"


def parse_layer_pattern(pattern: LayerPattern | Sequence[int]) -> LayerPattern:
    """Convert three integers to a pattern; return a pattern unchanged."""
    if isinstance(pattern, LayerPattern):
        return pattern
    numbers = tuple(pattern) if isinstance(pattern, Sequence) and not isinstance(pattern, str) else ()
    if len(numbers) != 3 or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        raise ConfigError(f"pattern={pattern!r}: use a LayerPattern, or three integers: head, start, end")
    return LayerPattern.from_triplet(*numbers)
