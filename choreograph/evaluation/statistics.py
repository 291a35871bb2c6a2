"""How sure a figure is: intervals of means, of ratios, of paired differences. Pure; SciPy and statsmodels compute.

Every function takes values in the order of the examples, so that two conditions pair up by position. All intervals
are 95% unless told, and all random draws have a fixed seed: the same values give the same interval.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.proportion import proportion_confint

NUM_RESAMPLES = 9999

NUM_QUANTILES = 2000


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval; p is that of the hypothesis of no difference, where there is one."""

    value: float
    low: float
    high: float
    n: int
    p: float | None = None


def mean(values: Sequence[float]) -> Estimate:
    """A mean; Clopper-Pearson where every value is 0 or 1, a bootstrap otherwise."""
    data = _array(values)
    if np.isin(data, (0, 1)).all():
        low, high = proportion_confint(int(data.sum()), len(data), method="beta")
        return Estimate(float(data.mean()), float(low), float(high), len(data))
    return bootstrap(np.mean, data)


def difference(after: Sequence[float], before: Sequence[float]) -> Estimate:
    """Mean of after - before over pairs: exact McNemar where all are 0 or 1, a paired bootstrap otherwise."""
    new, old = _array(after), _array(before)
    _same_length(new, old)
    if np.isin(new, (0, 1)).all() and np.isin(old, (0, 1)).all():
        return matched_pairs(int(((new == 1) & (old == 0)).sum()), int(((new == 0) & (old == 1)).sum()), len(new))
    return bootstrap(lambda x, axis=-1: np.mean(x, axis=axis), new - old)


def matched_pairs(gained: int, lost: int, n: int, level: float = 0.95) -> Estimate:
    """(gained - lost) / n for n matched pairs of yes and no, with McNemar's exact p.

    The interval melds those of two exact binomials, how many pairs differ and in which direction (Fay and Lumbard
    2021): it holds zero exactly when p says so, up to the grid of quantiles on which it is computed.
    """
    differ, tail = gained + lost, (1 - level) / 2
    table = [[0, gained], [lost, n - differ]]
    p = float(mcnemar(table, exact=True).pvalue) if differ else 1.0
    low = _melded(gained, lost, n, upper=False)
    high = _melded(gained, lost, n, upper=True)
    return Estimate(
        (gained - lost) / n,
        float(np.quantile(low, tail, overwrite_input=True)),
        float(np.quantile(high, 1 - tail, overwrite_input=True)),
        n,
        min(1.0, p),
    )


def _melded(gained: int, lost: int, n: int, *, upper: bool) -> np.ndarray:
    """Quantiles of rate * (2 share - 1) under the upper or lower confidence distributions of rate and share."""
    points = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    differ = gained + lost
    share = _confidence(points, gained, lost, upper)
    rates = {side: _confidence(points, differ, n - differ, side) for side in (False, True)}
    direction = 2 * share - 1
    up = direction >= 0  # a positive direction grows with the rate, a negative one shrinks
    return np.concatenate([np.outer(direction[up], rates[upper]), np.outer(direction[~up], rates[not upper])])


def _confidence(points: np.ndarray, yes: int, no: int, upper: bool) -> np.ndarray:
    """Quantiles of the Clopper-Pearson confidence distribution of a share; a point mass at its end."""
    a, b = (yes + 1, no) if upper else (yes, no + 1)
    if a == 0 or b == 0:
        return np.full_like(points, 1.0 if b == 0 else 0.0)
    return stats.beta.ppf(points, a, b)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Sum of above over sum of below, pairs drawn together: how many times as much the whole set took."""
    return bootstrap(
        lambda a, b, axis=-1: np.sum(a, axis=axis) / np.sum(b, axis=axis),
        _array(numerators),
        _array(denominators),
        method="percentile",
    )


def correlation(x: Sequence[float], y: Sequence[float]) -> Estimate:
    """Pearson's r with its interval and p."""
    result: Any = stats.pearsonr(_array(x), _array(y))
    low, high = result.confidence_interval(0.95)
    return Estimate(float(result.statistic), float(low), float(high), len(x), float(result.pvalue))


def bootstrap(statistic: Callable[..., Any], *columns: np.ndarray, method: str = "BCa") -> Estimate:
    """A statistic of rows with its bootstrap interval; values that are all equal have an interval of no width."""
    value = float(statistic(*columns))
    n = len(columns[0])
    _same_length(*columns)
    if n < 2 or all(np.ptp(c) == 0 for c in columns):
        return Estimate(value, value, value, n)
    result = stats.bootstrap(
        columns,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=NUM_RESAMPLES,
        batch=1000,
        method=method,
        rng=np.random.default_rng(0),
    )
    low, high = result.confidence_interval
    return Estimate(value, float(low), float(high), n)


def _array(values: Sequence[float]) -> np.ndarray:
    data = np.asarray(values, dtype=float)
    if data.ndim != 1 or not len(data):
        raise ValueError(f"{len(data)} values: a figure needs one or more")
    return data


def _same_length(*columns: np.ndarray) -> None:
    if len({len(c) for c in columns}) != 1:
        raise ValueError(f"{[len(c) for c in columns]} values: pairs need as many of each")
