"""The plan of one step: which rows read which runs of slots, at which shift, up to where. Knows no messages.

A step computes N rows (tokens), each with a slot of its own. A `Read` says that consecutive rows of one call
read one run of slots. The plan gathers reads of the same run, so that a backend can load it once for all its
readers; that is what makes a context shared by many calls cost one pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np

from .rope import Rotary


class Read(NamedTuple):
    """Rows row0 <= r < row1 read the slots from `lo` on: the first `limit + step * (r - row0)` of them.

    step is 0 for a context that all rows see whole, 1 for the rows' own tokens (each sees one more than the
    row before it). `shift` is logical minus home position; `position` is where the first slot stands.
    """

    lo: int
    row0: int
    row1: int
    shift: int
    limit: int
    step: int
    position: int

    @property
    def last(self) -> int:
        """How many slots the last row sees."""
        return self.limit + self.step * (self.row1 - 1 - self.row0)


@dataclass(frozen=True, eq=False)
class Plan:
    """slots: (N,) where each row's own key and value go. positions: (N,) where each row stands. segments: (S, 3) lo,
    hi, first reader. readers: (E, 6) row0, row1, index into `shifts`, limit, step, position. shifts[0] is always 0.
    padding: rows at the end that read nothing. memo: what was worked out for it, by name; what knows how goes on with
    it when it is `advanced`."""

    slots: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    readers: np.ndarray
    shifts: list[int]
    memo: dict[str, object] = field(default_factory=dict)
    padding: int = 0

    @property
    def rows(self) -> int:
        return len(self.slots)

    def advanced(self) -> "Plan":
        """The plan of the step behind this one, where every row is a token of a call of its own and the next token goes
        into the slot behind: the same reads, one more of each row's own run."""
        readers, segments, more = self.readers.copy(), self.segments.copy(), np.ones(self.rows, dtype=np.int64)
        more[self.rows - self.padding :] = 0
        own = np.flatnonzero(readers[:, 4] == 1)
        readers[own, 3] += 1
        segments[np.searchsorted(segments[:, 2], own, side="right") - 1, 1] += 1
        memo = {name: goes_on() for name, known in self.memo.items() if (goes_on := getattr(known, "advanced", None))}
        memo = {name: known for name, known in memo.items() if known is not None}
        return Plan(self.slots + more, self.positions + more, segments, readers, self.shifts, memo, self.padding)

    def segment_readers(self, index: int) -> np.ndarray:
        first = self.segments[index, 2]
        end = self.segments[index + 1, 2] if index + 1 < len(self.segments) else len(self.readers)
        return self.readers[first:end]

    def turns(self, rotary: Rotary | None) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of every shift, of no pair where nothing turns; worked out once for all layers of a kind."""
        key = f"turns {id(rotary)}"
        if key not in self.memo:
            nothing = np.zeros((len(self.shifts), 0), dtype=np.float32)
            cos, sin = (nothing, nothing) if rotary is None else rotary.table(self.shifts)
            self.memo[key] = _Turns(cos, sin, rotary)
        return cast(_Turns, self.memo[key])[:2]

    def check(self) -> None:
        """The invariants every backend relies on."""
        assert self.shifts[0] == 0 and len(self.positions) == self.rows
        for index, (lo, hi, _) in enumerate(self.segments):
            seen: set[int] = set()
            for row0, row1, shift, limit, step, _ in self.segment_readers(index):
                assert 0 <= row0 < row1 <= self.rows and step in (0, 1) and limit >= 0
                assert limit + step * (row1 - 1 - row0) <= hi - lo
                assert 0 <= shift < len(self.shifts)
                rows = set(range(row0, row1))
                assert not rows & seen, "a row reads a run of slots at one placement only"
                seen |= rows


class _Turns(NamedTuple):
    """rotary: kept, so that no other one gets its name."""

    cos: np.ndarray
    sin: np.ndarray
    rotary: Rotary | None

    def advanced(self) -> "_Turns":
        return self


def make_plan(slots: list[int], reads: Iterable[Read], positions: list[int]) -> Plan:
    """Gathers reads by the run that they read; rows must rise. Pure: the same reads give the same plan."""
    shifts: dict[int, int] = {0: 0}
    segments: list[tuple[int, int, int]] = []
    readers: list[tuple[int, ...]] = []
    for run in _runs(reads):
        segments.append((run[0].lo, run[0].lo + max(read.last for read in run), len(readers)))
        for read in run:
            index = shifts.setdefault(read.shift, len(shifts))
            readers.append((read.row0, read.row1, index, read.limit, read.step, read.position))
    return Plan(
        slots=np.asarray(slots, dtype=np.int64),
        positions=np.asarray(positions, dtype=np.int64),
        segments=np.asarray(segments, dtype=np.int32).reshape(-1, 3),
        readers=np.asarray(readers, dtype=np.int32).reshape(-1, 6),
        shifts=list(shifts),
    )


def _runs(reads: Iterable[Read]) -> list[list[Read]]:
    """The readers of each run. A row that reads one run at two placements (two messages of equal content share
    an encoding) makes the run stand twice, since a segment shows a row one placement."""
    runs: dict[tuple[int, int], list[Read]] = {}
    for read in reads:
        copy = 0
        while (read.lo, copy) in runs and runs[read.lo, copy][-1].row1 > read.row0:
            copy += 1
        if read.last > 0:
            runs.setdefault((read.lo, copy), []).append(read)
    return [_joined(runs[name]) for name in sorted(runs)]


def _joined(run: list[Read]) -> list[Read]:
    """Neighbouring rows that read the whole run in the same way become one reader."""
    joined = [run[0]]
    for read in run[1:]:
        last = joined[-1]
        same = (read.shift, read.limit, read.step) == (last.shift, last.limit, 0)
        if same and last.step == 0 and read.row0 == last.row1:
            joined[-1] = last._replace(row1=read.row1)
        else:
            joined.append(read)
    return joined
