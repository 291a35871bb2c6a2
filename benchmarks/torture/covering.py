"""Covering arrays: few rows in which every pair of levels of two factors occurs."""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Factors = Mapping[str, Sequence[Any]]  # levels of each factor
Row = dict[str, Any]  # a level of each factor

CANDIDATES = 6  # rows of which the best is taken


def covering_rows(factors: Factors, draws: random.Random) -> list[Row]:
    """Return rows in which every pair of levels occurs, built greedily (AETG, Cohen et al. 1997)."""
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    places = {name: place for place, name in enumerate(names)}

    def pair_of(one: tuple[str, int], other: tuple[str, int]) -> tuple[tuple[str, int], tuple[str, int]]:
        return (one, other) if places[one[0]] < places[other[0]] else (other, one)

    def extend(start: dict[str, int]) -> dict[str, int]:
        row, order = dict(start), [name for name in names if name not in start]
        draws.shuffle(order)
        for name in order:
            levels = draws.sample(range(len(factors[name])), len(factors[name]))
            row[name] = max(levels, key=lambda i: sum(pair_of((name, i), item) in missing for item in row.items()))
        return row

    def gain(row: dict[str, int]) -> int:
        return sum(pair in missing for pair in combinations(row.items(), 2))

    rows = []
    while missing:
        first = draws.choice(sorted(missing))
        extended = [{name: row[name] for name in names} for row in (extend(dict(first)) for _ in range(CANDIDATES))]
        best = max(extended, key=gain)
        missing -= set(combinations(best.items(), 2))
        rows.append({name: factors[name][level] for name, level in best.items()})
    return rows


def random_row(factors: Factors, draws: random.Random) -> Row:
    """Return a level of each factor, drawn alike."""
    return {name: draws.choice(levels) for name, levels in factors.items()}
