"""Learns how soon agents run from what ran: no graph is declared. Pure; knows no cache and no session.

Counts which agent started after which. Expected steps to an agent are the mean first passage times of the Markov chain
with these frequencies: h(a) = 1 + sum over b of P(a, b) h(b), with h = 0 at the agent itself.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
from scipy.stats import kendalltau

from .graph import NEVER, Progress


class LearnedSteps:
    """Transitions of one client's workflow."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self._passage: dict[str, dict[str, float]] | None = None  # from the counts as they are

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(self.counts)

    def saw(self, before: str | None, agent: str) -> None:
        """`agent` started; `before` was the one that started last."""
        self._passage = None
        self.counts.setdefault(agent, Counter())
        if before is not None:
            self.counts.setdefault(before, Counter())[agent] += 1

    def steps(self, progress: Progress) -> dict[str, float]:
        """Expected steps to the next execution: 0 for those that run, infinite for those that never followed."""
        sources = set(progress.running) or ({progress.last} if progress.last else set())
        passage = self.passage()
        result = {}
        for agent in self.counts:
            ways = (passage[source][agent] for source in sources if source in passage)
            result[agent] = 0.0 if agent in progress.running else min(ways, default=NEVER)
        return result

    def passage(self) -> dict[str, dict[str, float]]:
        """Expected steps from one agent to the next start of another (from itself: until it comes round)."""
        if self._passage is None:  # asked with every event, and only a start changes it
            self._passage = self._compute_passage()
        return self._passage

    def _compute_passage(self) -> dict[str, dict[str, float]]:
        names = list(self.counts)
        chances = np.zeros((len(names), len(names)))
        for i, name in enumerate(names):
            total = self.counts[name].total()
            for j, after in enumerate(names):
                chances[i, j] = self.counts[name][after] / total if total else 0.0
        leads = _leads(chances)
        columns = [_passage(chances, leads[:, target], target) for target in range(len(names))]
        times = np.stack(columns, axis=1) if names else chances
        return {a: {b: float(times[i, j]) for j, b in enumerate(names)} for i, a in enumerate(names)}


def _passage(chances: np.ndarray, able: np.ndarray, target: int) -> np.ndarray:
    """Expected steps from every state to `target`, given that it is reached; infinite where it cannot be. able: which
    states lead to it."""
    times = np.full(len(chances), NEVER)
    if not able.any():
        return times
    arrive, onward = chances[able, target], chances[np.ix_(able, able)].copy()
    if able[target]:
        onward[:, np.flatnonzero(able) == target] = 0.0  # what happens behind the target does not matter
    unit = np.eye(len(arrive))
    reach = np.linalg.solve(unit - onward, arrive)  # the chance ever to get there
    given = onward * reach[None, :] / reach[:, None]  # the chain, given that it does
    times[able] = np.linalg.solve(unit - given, np.ones(len(arrive)))
    return times


def _leads(chances: np.ndarray) -> np.ndarray:
    """Which states (rows) lead to which at all: ways of twice as many steps each time."""
    found = chances > 0
    for _ in range(len(chances).bit_length()):
        ways = found.astype(np.float32)
        found = found | (ways @ ways > 0)
    return found


def agreement(declared: Mapping[str, float], learned: Mapping[str, float]) -> dict[str, float]:
    """How close two sets of steps come: mean distance over agents that both give finite steps, the share of agents on
    whose being reachable they agree, and Kendall's tau between the orders in which agents would be evicted."""
    names = [name for name in declared if name in learned]
    both = [n for n in names if declared[n] < NEVER and learned[n] < NEVER]
    same = sum((declared[n] < NEVER) == (learned.get(n, NEVER) < NEVER) for n in declared)
    far = [abs(declared[n] - learned[n]) for n in both]
    a, b = ([one[n] for n in both] for one in (declared, learned))
    constant = len(set(a)) < 2 or len(set(b)) < 2
    return {
        "distance": float(np.mean(far)) if far else 0.0,
        "reachable": same / len(declared) if declared else 1.0,
        "tau": 1.0 if constant else float(kendalltau(a, b).statistic),
    }
