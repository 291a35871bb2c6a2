"""Estimates with 95% intervals, deterministic: means, ratios and paired differences.

Values are in the order of the examples, so that two conditions pair up by position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..utils import require

NUM_RESAMPLES = 9999
NUM_QUANTILES = 2000  # of a confidence distribution


@dataclass(frozen=True)
class Estimate:
    """A value with its interval."""

    value: float
    low: float
    high: float
    n: int  # number of values or pairs
    p: float | None = None  # p-value of no difference; None where none is tested


def mean(values: Sequence[float]) -> Estimate:
    """Estimate a mean: Clopper-Pearson for zeros and ones, else a bootstrap."""
    (data,) = _columns(values)
    if np.isin(data, (0, 1)).all():
        proportion = require("statsmodels.stats.proportion", "eval")
        low, high = proportion.proportion_confint(int(data.sum()), len(data), method="beta")
        return Estimate(float(data.mean()), float(low), float(high), len(data))
    return bootstrap(np.mean, data)


def difference(after: Sequence[float], before: Sequence[float]) -> Estimate:
    """Estimate a paired difference: McNemar for zeros and ones, else a bootstrap."""
    new, old = _columns(after, before)
    if np.isin([new, old], (0, 1)).all():
        return matched_pairs(int(((new == 1) & (old == 0)).sum()), int(((new == 0) & (old == 1)).sum()), len(new))
    return bootstrap(np.mean, new - old)


def matched_pairs(gained: int, lost: int, n: int) -> Estimate:
    """Estimate (gained - lost) / n of matched pairs, with McNemar's p.

    The interval melds those of two exact binomials: how many pairs differ, and in which direction
    (Fay and Lumbard 2021). It contains zero exactly if p does not reject zero, up to the grid of
    quantiles.
    """
    tables = require("statsmodels.stats.contingency_tables", "eval")
    stats = require("scipy.stats", "eval")
    differ, points = gained + lost, (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES

    def confidence(yes: int, no: int, upper: bool) -> np.ndarray:
        """Return quantiles of the Clopper-Pearson confidence distribution of a share."""
        a, b = (yes + 1, no) if upper else (yes, no + 1)
        return stats.beta.ppf(points, a, b) if a and b else np.full_like(points, float(b == 0))

    def melded(upper: bool) -> np.ndarray:
        """Return quantiles of rate * (2 share - 1)."""
        direction = 2 * confidence(gained, lost, upper) - 1
        rates = {side: confidence(differ, n - differ, side) for side in (False, True)}
        positive = direction >= 0  # grows with the rate, a negative one shrinks
        products = np.outer(direction[positive], rates[upper]), np.outer(direction[~positive], rates[not upper])
        return np.concatenate(products, axis=None)

    p = float(tables.mcnemar([[0, gained], [lost, n - differ]], exact=True).pvalue) if differ else 1.0
    low, high = (float(np.quantile(melded(upper), 0.975 if upper else 0.025)) for upper in (False, True))
    return Estimate((gained - lost) / n, low, high, n, min(1.0, p))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Estimate the ratio of two sums by a bootstrap over pairs."""
    columns = _columns(numerators, denominators)
    return bootstrap(lambda a, b, axis=-1: np.sum(a, axis=axis) / np.sum(b, axis=axis), *columns, method="percentile")


def bootstrap(statistic: Callable[..., Any], *columns: np.ndarray, method: str = "BCa") -> Estimate:
    """Estimate a statistic of rows; constant columns have a zero-width interval."""
    value, n = float(statistic(*columns)), len(columns[0])
    if n < 2 or all(np.ptp(column) == 0 for column in columns):
        return Estimate(value, value, value, n)
    options = {"n_resamples": NUM_RESAMPLES, "batch": 1000, "method": method, "rng": np.random.default_rng(0)}
    stats = require("scipy.stats", "eval")
    low, high = stats.bootstrap(columns, statistic, paired=True, vectorized=True, **options).confidence_interval
    return Estimate(value, float(low), float(high), n)


def _columns(*columns: Sequence[float]) -> list[np.ndarray]:
    """Return float arrays; raise ValueError for empty columns or different lengths."""
    lengths = [len(column) for column in columns]
    if not all(lengths):
        raise ValueError(f"{min(lengths)} values: an estimate needs one or more")
    if len(set(lengths)) > 1:
        raise ValueError(f"{lengths} values: pairs need as many of each")
    return [np.asarray(column, dtype=float) for column in columns]
