"""Quality and cost of layer patterns, and pattern selection (DroidSpeak §4.3, §4.4).

A pattern is the set of layers that the receiver recomputes; it reuses the sender's KV in the others.

profile = Profile.load(Path("profile.json"))
enable_profiled_reuse(engine, profile, "math", times=ServiceTimes(0.001), ttft_slo=2.0, max_loss=0.01)
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import field
from functools import cached_property
from math import inf, isnan
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, FiniteFloat, PositiveInt, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from ..api.engine import Engine
from ..errors import ConfigError, DataError
from ..features.other_models import EngineLoad
from ..layer_pattern import LayerPattern
from ..models.model_set import REMOTE_SUFFIX
from ..outputs import BASE_MODEL
from ..utils import atomic_write_text, describe_validation_error, ensure_dir, require

VERSION = 3  # of the file; earlier ones had other keys

Cost = Annotated[FiniteFloat, Field(ge=0)]

Scores = tuple[FiniteFloat, ...]  # one per input, higher is better

_CONFIG = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, config=_CONFIG)
class PatternScores:
    """Scores of the receiver when it recomputes a pattern's layers."""

    pattern: LayerPattern
    values: Scores


class ParetoPoint(NamedTuple):
    """Layer pattern with its score loss and prefill cost."""

    pattern: LayerPattern
    loss: float  # mean score of the receiver alone minus that of the pattern
    cost: float  # prefill time as a fraction of a full prefill, as `Profile.cost`


@dataclass(frozen=True, config=_CONFIG)
class Profile:
    """Measured scores of a receiver and a sender, one per input.

    All scores are in the order of `inputs`, so that differences are paired.
    """

    receiver: str  # fingerprint
    sender: str  # fingerprint
    layers: PositiveInt  # of the model
    metric: str  # of the scores, one of `profiler.METRICS`
    inputs: Annotated[tuple[str, ...], Field(min_length=1)]  # example ids
    receiver_scores: Scores  # the receiver recomputes all layers
    full_reuse_scores: Scores  # the receiver reuses all layers
    sender_scores: Scores  # the sender alone
    per_layer: tuple[Scores, ...] = ()  # [layer]: the receiver reuses this layer only, as it is served
    # F1 of the generated answers, whatever the metric: the receiver alone, and per layer as above
    receiver_f1: Scores = ()
    per_layer_f1: tuple[Scores, ...] = ()
    ranges: tuple[PatternScores, ...] = ()  # the receiver recomputes one range of layers, or a head and a range
    costs: dict[str, Cost] = field(default_factory=dict)  # measured `cost`, by str(pattern)
    facts: dict[str, Any] = field(default_factory=dict)  # configuration of the measurement
    version: Literal[3] = 3  # VERSION

    @model_validator(mode="after")
    def _check_shapes(self) -> "Profile":
        columns = {"receiver_scores": self.receiver_scores, "full_reuse_scores": self.full_reuse_scores}
        columns["sender_scores"] = self.sender_scores
        columns |= {f"per_layer[{layer}]": values for layer, values in enumerate(self.per_layer)}
        columns |= {"receiver_f1": self.receiver_f1} if self.receiver_f1 or self.per_layer_f1 else {}
        columns |= {f"per_layer_f1[{layer}]": values for layer, values in enumerate(self.per_layer_f1)}
        columns |= {f"ranges, layers {cell.pattern}": cell.values for cell in self.ranges}
        for name, values in columns.items():
            if len(values) != len(self.inputs):
                raise ValueError(f"{name} has {len(values)} scores for {len(self.inputs)} inputs")
        for name, rows in (("per_layer", self.per_layer), ("per_layer_f1", self.per_layer_f1)):
            if len(rows) not in (0, self.layers):
                raise ValueError(f"{name} has {len(rows)} of {self.layers} layers")
        for cell in self.ranges:
            if not cell.pattern.check(self.layers).layers:
                raise ValueError("ranges has a pattern without layers")
        return self

    def _mean_loss(self, values: Sequence[float]) -> float:
        return float(np.mean(np.subtract(self.receiver_scores, values)))

    def critical(self, fraction: float = 0.1) -> list[int]:
        """Return layers whose reuse alone loses over `fraction` of the receiver's F1."""
        limit = (1 - fraction) * mean(self.receiver_f1) if self.receiver_f1 else 0.0
        return [layer for layer, values in enumerate(self.per_layer_f1) if mean(values) < limit]

    def cost(self, pattern: LayerPattern) -> float:
        """Return a pattern's prefill time as a fraction of a full prefill.

        The cost of a pattern without a measured time is interpolated by its number of layers between
        those with one (no layers cost 0); without any, it is the fraction of layers.
        """
        measured = self.costs.get(str(pattern))
        return float(np.interp(len(pattern.layers), *self._cost_curve)) if measured is None else measured

    @cached_property
    def _cost_curve(self) -> tuple[list[int], list[float]]:
        """Numbers of recomputed layers, ascending, and the mean cost of each."""
        costs = defaultdict(list, {0: [0.0], self.layers: [1.0]})
        for cell in self.ranges:
            if (cost := self.costs.get(str(cell.pattern))) is not None:
                costs[len(cell.pattern.layers)].append(cost)
        return sorted(costs), [mean(costs[count]) for count in sorted(costs)]

    @property
    def _scored_points(self) -> list[tuple[ParetoPoint, Scores]]:
        """Full reuse, full recomputation and every measured pattern, cheapest first."""
        scores = [(LayerPattern(), self.full_reuse_scores)]
        scores += [(LayerPattern.from_triplet(0, 0, self.layers), self.receiver_scores)]
        scores += [(cell.pattern, cell.values) for cell in self.ranges]
        points = [(ParetoPoint(p, self._mean_loss(values), self.cost(p)), values) for p, values in scores]
        return sorted(points, key=lambda scored: (scored[0].cost, scored[0].loss))

    def points(self) -> list[ParetoPoint]:
        """Return full reuse, full recomputation and every measured pattern, cheapest first."""
        return [point for point, _ in self._scored_points]

    def pareto_points(self) -> list[ParetoPoint]:
        """Return the Pareto-optimal points in mean loss and cost, cheapest first."""
        return _pareto(self.points())

    def frontier(self, max_loss: float = inf) -> list[ParetoPoint]:
        """Return the cheapest point, and those measurably better than the last one.

        A point that costs more is included if its gain is above zero with 95% confidence: by a
        paired t-test over the inputs, corrected for the number of points (Bonferroni).

        Args:
            max_loss: points with a higher mean loss are left out.
        """
        scored = [(point, values) for point, values in self._scored_points if point.loss <= max_loss]
        best = scored[:1]
        for point, values in scored[1:]:
            if _is_measurably_better(values, best[-1][1], len(scored)):
                best.append((point, values))
        return [point for point, _ in best]

    def cheapest(self, max_loss: float) -> ParetoPoint:
        """Return the cheapest point that loses at most `max_loss`."""
        if isnan(max_loss):
            raise ConfigError(f"max_loss={max_loss}: use a number, the most that may be lost")
        return min((p for p in self.points() if p.loss <= max(max_loss, 0.0)), key=lambda p: (p.cost, p.loss))

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        ensure_dir(path.parent)
        atomic_write_text(path, _PROFILE_JSON.dump_json(self, indent=1).decode() + "\n")

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Read a file that `save` wrote.

        Raises:
            DataError: if it cannot be read, is damaged, or has another version.
        """
        try:
            return _PROFILE_JSON.validate_json(path.read_bytes())
        except OSError as exc:
            raise DataError(f"{path}: cannot be read ({exc.strerror}): check the path") from None
        except ValidationError as exc:
            reason = describe_validation_error(exc)
            raise DataError(f"{path}: no profile of version {VERSION} ({reason}): profile the pair again") from None


_PROFILE_JSON = TypeAdapter(Profile)


def _pareto(points: Iterable[ParetoPoint]) -> list[ParetoPoint]:
    best: list[ParetoPoint] = []
    for point in sorted(points, key=lambda p: (p.cost, p.loss)):
        if not best or point.loss < best[-1].loss:
            best.append(point)
    return best


def _is_measurably_better(values: Scores, others: Scores, num_tests: int) -> bool:
    """Return whether the mean paired gain's corrected interval is above zero."""
    gains = np.subtract(values, others)
    if len(gains) < 2 or gains.mean() <= 0:
        return False
    error = gains.std(ddof=1) / np.sqrt(len(gains))
    return bool(
        error == 0 or require("scipy.stats", "eval").t.sf(gains.mean() / error, len(gains) - 1) < 0.025 / num_tests
    )


class ServiceTimes(NamedTuple):
    """Seconds of a receiver's work in all layers; see `measure_service_times`."""

    per_token: float  # of a prefill
    per_pair: float = 0.0  # (query, key) pair of a prefill: attention is quadratic in the length
    per_step: float = 0.0  # decode step


class LatencyAwareSelector:
    """Selector of the best pattern whose expected TTFT meets the SLO.

    Selects the cheapest pattern if none meets it.

    Args:
        points: patterns to select from, each better than all cheaper ones, as `Profile.frontier`
            returns them; others are left out.
        times: how long the receiver computes.
        ttft_slo: objective for the time to first token in seconds.
        max_loss: patterns with a higher loss are never selected.
    """

    def __init__(
        self,
        points: Iterable[ParetoPoint],
        *,
        times: ServiceTimes,
        ttft_slo: float = inf,
        max_loss: float = inf,
    ) -> None:
        self.points = _pareto(p for p in points if p.loss <= max_loss)[::-1]  # the best one first
        if not self.points:
            raise ConfigError(f"max_loss={max_loss}: no pattern loses so little, use 0 to compute all layers")
        for name, value in (("per_token", times.per_token), ("ttft_slo", ttft_slo)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"{name}={value!r}: use a positive number")
        self._times = times
        self._ttft_slo = ttft_slo

    @property
    def patterns(self) -> tuple[LayerPattern, ...]:
        """All patterns that may be selected, for `Engine.enable_layer_reuse`."""
        return tuple(point.pattern for point in self.points)

    def expected_ttft(self, point: ParetoPoint, load: EngineLoad) -> float:
        """Return the expected TTFT in seconds, with the time already waited.

        The message is computed after all work ahead of it, and not before the hidden states that it
        starts from have arrived; its first token needs the keys and values too. Running decodes take
        a step between two batches of other requests.
        """
        times, transfer = self._times, load.transfer
        start = load.tokens * times.per_token + load.pairs * times.per_pair
        own = point.cost * (load.message_tokens * times.per_token + load.message_pairs * times.per_pair)
        arrival = 0.0
        if transfer is not None and len(point.pattern.layers) < transfer.layers:
            num_bytes = transfer.queued_bytes + transfer.hidden_bytes * len(point.pattern.entry_layers)
            start = max(start, num_bytes / transfer.bytes_per_second)
            num_bytes += transfer.kv_bytes * (transfer.layers - len(point.pattern.layers))
            arrival = num_bytes / transfer.bytes_per_second
        num_turns = load.steps + bool(point.pattern.layers) if load.decodes else 0
        return load.waited + max(start + own, arrival) + (num_turns + 1) * times.per_step

    def __call__(self, load: EngineLoad) -> LayerPattern:
        for point in self.points:
            if self.expected_ttft(point, load) <= self._ttft_slo:
                return point.pattern
        return self.points[-1].pattern


def enable_profiled_reuse(
    engine: Engine,
    profile: Profile,
    receiver: str,
    sender: str = BASE_MODEL,
    *,
    times: ServiceTimes,
    ttft_slo: float = inf,
    max_loss: float = inf,
    capacity: int | None = None,
) -> LatencyAwareSelector:
    """Enable layer reuse with a latency-aware selector over the profile's frontier.

    Args:
        sender: also a model in another process, by the name of its link.

    Raises:
        ConfigError: if the profile was measured on other models.
    """
    for role, name, expected in (("receiver", receiver, profile.receiver), ("sender", sender, profile.sender)):
        if engine.core.model_set.fingerprint(name).removesuffix(REMOTE_SUFFIX) != expected:
            raise ConfigError(f"{role}={name!r} is not the {role} of the profile: profile this pair")
    selector = LatencyAwareSelector(profile.frontier(max_loss), times=times, ttft_slo=ttft_slo, max_loss=max_loss)
    engine.enable_layer_reuse(receiver, sender, selector=selector, patterns=selector.patterns, capacity=capacity)
    return selector
