"""What a pair of models was found to lose by sharing, pattern by pattern (DroidSpeak, section 4.3). Measures nothing.

A profile holds one value of quality an input, so that differences are paired and anything can be asked of it later:
which layers are critical, the heat map of stretches, the frontier of quality against computing.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite, isnan
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from ..engine.cross_model import LayerPattern
from ..errors import ConfigError, DataError
from ..evaluation.statistics import Estimate, difference

VERSION = 1

_JSON_KEYS = {  # of fields, in files
    "receiver_scores": "own",
    "full_reuse_scores": "reused",
    "sender_scores": "sent",
    "per_layer": "single",
    "ranges": "stretches",
    "top_layers": "scattered",
}


@dataclass(frozen=True)
class PatternScores:
    """A pattern and the quality of every input under it; higher is better."""

    pattern: LayerPattern
    values: tuple[float, ...]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


class ParetoPoint(NamedTuple):
    """A pattern on the frontier. loss: of mean quality against the receiver's own. cost: as `Profile.cost`."""

    pattern: LayerPattern
    loss: float
    cost: float


@dataclass(frozen=True)
class Profile:
    """receiver, sender: fingerprints. own: the receiver alone; reused: with all of the sender's encoding; sent: the
    sender alone. single[l]: with the sender's keys and values of layer l only. stretches: the heat map, recomputed
    from a begin to an end. scattered: the same numbers of layers, the most critical ones wherever they are.

    costs: measured time of a pattern over that of a full prefill, by the pattern's name.
    """

    receiver: str
    sender: str
    layers: int
    metric: str
    inputs: tuple[str, ...]
    receiver_scores: tuple[float, ...]
    full_reuse_scores: tuple[float, ...]
    sender_scores: tuple[float, ...]
    per_layer: tuple[tuple[float, ...], ...] = ()
    ranges: tuple[PatternScores, ...] = ()
    top_layers: tuple[PatternScores, ...] = ()
    costs: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    # -- what it says -------------------------------------------------------------------------------------

    def loss(self, values: Sequence[float]) -> Estimate:
        """How much less than the receiver's own, over the inputs in pairs."""
        return difference(self.receiver_scores, values)

    def sensitivity(self) -> list[Estimate]:
        """Figure 7: the loss from reusing one layer alone, layer by layer."""
        return [self.loss(values) for values in self.per_layer]

    def critical(self, fraction: float = 0.1) -> list[int]:
        """The layers whose reuse alone costs more than a share of the receiver's quality."""
        most = fraction * abs(sum(self.receiver_scores) / len(self.receiver_scores))
        return [layer for layer, one in enumerate(self.sensitivity()) if one.value > most]

    def cost(self, pattern: LayerPattern) -> float:
        """Time of a pattern over that of computing everything. One that was not timed costs what its number of layers
        does between those that were (none cost nothing), so that all stand on one scale: the share of layers in a
        profile without times."""
        known = self.costs.get(str(pattern))
        return float(np.interp(len(pattern.layers), *self._cost_curve)) if known is None else known

    @cached_property
    def _cost_curve(self) -> tuple[list[int], list[float]]:
        """Numbers of layers, rising, and what each costs."""
        timed = defaultdict(list, {0: [0.0], self.layers: [1.0]})
        for cell in (*self.ranges, *self.top_layers):
            if (cost := self.costs.get(str(cell.pattern))) is not None:
                timed[len(cell.pattern.layers)].append(cost)
        return sorted(timed), [mean(timed[count]) for count in sorted(timed)]

    def points(self) -> list[ParetoPoint]:
        """Every pattern that was measured, with reusing and computing everything."""
        ends = [
            PatternScores(LayerPattern(), self.full_reuse_scores),
            PatternScores(LayerPattern.from_triplet(0, 0, self.layers), self.receiver_scores),
        ]
        return [ParetoPoint(c.pattern, self.loss(c.values).value, self.cost(c.pattern)) for c in (*ends, *self.ranges)]

    def frontier(self) -> list[ParetoPoint]:
        """The patterns that no other beats in both loss and cost, the cheapest first."""
        best: list[ParetoPoint] = []
        for point in sorted(self.points(), key=lambda p: (p.cost, p.loss)):
            if not best or point.loss < best[-1].loss:
                best.append(point)
        return best

    def cheapest(self, max_loss: float) -> ParetoPoint:
        """The cheapest pattern that loses at most this much. Raises ConfigError for what is no number."""
        if isnan(max_loss):
            raise ConfigError(f"max_loss={max_loss}: use a number, the most that may be lost")
        return min((p for p in self.points() if p.loss <= max(max_loss, 0.0)), key=lambda p: (p.cost, p.loss))

    def transfer_loss(self, other: "Profile") -> list[tuple[ParetoPoint, float]]:
        """Figure 17: this profile's frontier, and what its patterns lose by another profile."""
        theirs = {p.pattern: p.loss for p in other.points()}
        return [(point, theirs[point.pattern]) for point in self.frontier() if point.pattern in theirs]

    # -- to and from files --------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        result = {_JSON_KEYS.get(name, name): getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("stretches", "scattered"):
            result[name] = [{"layers": c.pattern.ranges, "values": c.values} for c in result[name]]
        return {"version": VERSION, **result}

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Profile":
        """Raises DataError for what is no profile of this version."""
        if not isinstance(data, Mapping) or data.get("version") != VERSION:
            raise DataError(f"no profile of version {VERSION}: profile the pair again")
        try:
            given = {k: v for k, v in data.items() if k != "version"}
            for name in ("stretches", "scattered"):
                given[name] = tuple(
                    PatternScores(LayerPattern(tuple((int(a), int(b)) for a, b in c["layers"])), tuple(c["values"]))
                    for c in given[name]
                )
            for name in ("inputs", "own", "reused", "sent"):
                given[name] = tuple(given[name])
            given["single"] = tuple(tuple(values) for values in given["single"])
            names = {key: name for name, key in _JSON_KEYS.items()}
            profile = cls(**{names.get(key, key): value for key, value in given.items()})
            profile._validate()
        except DataError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise DataError(f"a damaged profile: {exc!r}") from exc
        return profile

    def _validate(self) -> None:
        """Every column has a number for every input, of which there is one at least; no pattern has other layers."""
        if not self.inputs or type(self.layers) is not int or self.layers < 1:
            raise DataError(
                f"a damaged profile: {len(self.inputs)} inputs, layers={self.layers!r}: profile the pair anew"
            )
        columns = {_JSON_KEYS[n]: getattr(self, n) for n in ("receiver_scores", "full_reuse_scores", "sender_scores")}
        columns |= {f"single, layer {layer}": values for layer, values in enumerate(self.per_layer)}
        columns |= {f"layers {cell.pattern}": cell.values for cell in (*self.ranges, *self.top_layers)}
        for name, values in columns.items():
            if len(values) != len(self.inputs) or not all(map(_is_number, values)):
                raise DataError(
                    f"a damaged profile: {name} is {str(values)[:80]}, not {len(self.inputs)} numbers, one an input: "
                    "profile the pair anew"
                )
        if len(self.per_layer) not in (0, self.layers):
            raise DataError(
                f"a damaged profile: {len(self.per_layer)} single layers of {self.layers}: profile the pair anew"
            )
        for cell in (*self.ranges, *self.top_layers):
            if not cell.pattern.check(self.layers).layers:
                raise DataError("a damaged profile: a pattern without layers: profile the pair anew")
        for name, cost in self.costs.items():
            if not _is_number(cost) or cost < 0:
                raise DataError(
                    f"a damaged profile: the cost of {name} is {cost!r}, not a number from 0 on: time it anew"
                )

    @classmethod
    def load(cls, path: Path) -> "Profile":
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except DataError as exc:
            raise DataError(f"{path}: {exc}") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as exc:
            raise DataError(f"{path}: no profile ({exc})") from None
