"""Estimates with 95% intervals, deterministic: means, ratios and paired differences.

Values are in the order of the examples, so that two conditions pair up by position. Where examples share
units, such as two pairs with a common question, intervals resample the units.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from ...utils import require

NUM_RESAMPLES = 9999
NUM_QUANTILES = 2000  # of a confidence distribution

Units = Sequence[Collection[str]]  # of each value: what it may share with others; empty: nothing


@dataclass(frozen=True)
class Estimate:
    """A value with its interval."""

    value: float
    low: float
    high: float
    n: int  # number of values or pairs
    p: float | None = None  # p-value of no difference; None where none is tested


def mean(values: Sequence[float], units: Units = ()) -> Estimate:
    """Estimate a mean: Clopper-Pearson for zeros and ones, else a bootstrap.

    With shared units, the shares of zeros and ones have the effective number of values (Korn and
    Graubard 1998).
    """
    (data,) = _columns(values)
    incidence = _incidence(units, len(data))
    if np.isin(data, (0, 1)).all():
        proportion = require("statsmodels.stats.proportion", "eval")
        n = len(data) if incidence is None else _effective_number(data, incidence)
        low, high = proportion.proportion_confint(data.mean() * n, n, method="beta")
        return Estimate(float(data.mean()), float(low), float(high), len(data))
    return bootstrap(np.mean, data) if incidence is None else bootstrap_units(data, incidence)


def difference(after: Sequence[float], before: Sequence[float], units: Units = ()) -> Estimate:
    """Estimate a paired difference: McNemar for zeros and ones, else a bootstrap.

    With shared units, McNemar's test has the effective number of pairs, and the bootstrap draws units.
    """
    new, old = _columns(after, before)
    incidence = _incidence(units, len(new))
    if not np.isin([new, old], (0, 1)).all():
        return bootstrap(np.mean, new - old) if incidence is None else bootstrap_units(new - old, incidence)
    gained, lost = int((new > old).sum()), int((new < old).sum())
    if incidence is None:
        return matched_pairs(gained, lost, len(new))
    share = _effective_number(new - old, incidence) / len(new)
    pairs = matched_pairs(*(round(share * count) for count in (gained, lost, len(new))))
    value = float((new - old).mean())
    return replace(pairs, value=value, low=min(pairs.low, value), high=max(pairs.high, value), n=len(new))


@cache  # tables ask for the same counts again, and a grid of quantiles is slow
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


def ratio(numerators: Sequence[float], denominators: Sequence[float], units: Units = ()) -> Estimate:
    """Estimate the ratio of two sums by a bootstrap over pairs.

    With shared units, it is a bootstrap of the units, of the linearized ratio.
    """
    columns = _columns(numerators, denominators)
    if (incidence := _incidence(units, len(columns[0]))) is not None:
        value = columns[0].sum() / columns[1].sum()
        return bootstrap_units(value + (columns[0] - value * columns[1]) / columns[1].mean(), incidence)
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


def bootstrap_units(data: np.ndarray, incidence: np.ndarray) -> Estimate:
    """Estimate a mean by resampling the units of the rows.

    Deviations are scaled to the variance that counts every two rows with a common unit (Aronow et al.
    2015), as drawing units weighs the noise of a row once for each of its units.

    Args:
        incidence: [rows, units], 1 where a row has a unit.
    """
    value, n = float(data.mean()), len(data)
    sums = incidence.T @ (data - value)  # of each unit
    drawn = float((sums**2).sum() - sums.sum() ** 2 / len(sums))
    if drawn <= 1e-12 * n:
        return bootstrap(np.mean, data)
    scale = np.sqrt(_dyadic_variance(data, incidence) / drawn)
    rng = np.random.default_rng(0)
    counts = rng.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=NUM_RESAMPLES)
    means = value + scale * ((counts - 1) @ sums) / n
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(value, float(low), float(high), n)


def _dyadic_variance(data: np.ndarray, incidence: np.ndarray) -> float:
    """Return the sum of products of deviations of connected rows.

    Not less than the sum of squares, which is that of independent rows.
    """
    deviations = data - data.mean()
    shares = incidence @ incidence.T > 0
    return max(float(deviations @ shares @ deviations), float(deviations @ deviations))


def _effective_number(data: np.ndarray, incidence: np.ndarray) -> float:
    """Return the number of independent values with equal variance.

    For equal values it is the number of rows that can have no unit in common.
    """
    deviations = data - data.mean()
    if not deviations.any():
        return max(1.0, incidence.shape[1] // incidence.sum(axis=1).max())
    return len(data) * float(deviations @ deviations) / _dyadic_variance(data, incidence)


def _incidence(units: Units, n: int) -> np.ndarray | None:
    """Return [rows, units], or None if nothing is shared."""
    if not units:
        return None
    if len(units) != n:
        raise ValueError(f"units of {len(units)} rows for {n} values: give those of each")
    names = sorted({unit for row in units for unit in row})
    if len(names) == sum(len(set(row)) for row in units):
        return None
    columns = {name: column for column, name in enumerate(names)}
    result = np.zeros((n, len(names)))
    for index, row in enumerate(units):
        result[index, [columns[unit] for unit in row]] = 1
    return result


def _columns(*columns: Sequence[float]) -> list[np.ndarray]:
    """Return float arrays; raise ValueError for empty columns or different lengths."""
    lengths = [len(column) for column in columns]
    if not all(lengths):
        raise ValueError(f"{min(lengths)} values: an estimate needs one or more")
    if len(set(lengths)) > 1:
        raise ValueError(f"{lengths} values: pairs need as many of each")
    return [np.asarray(column, dtype=float) for column in columns]
