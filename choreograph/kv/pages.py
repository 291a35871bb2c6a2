"""A range of numbered pages: which are free, in which runs, and who counts on the others. Knows no tensors."""

import bisect
from collections.abc import Iterable, Sequence

from ..errors import CacheFull


class Pages:
    """Pages first .. first + count - 1."""

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count
        self._starts = [first] if count else []  # free runs of pages, by first page
        self._lengths = {first: count} if count else {}
        self._free = count
        self._owners = [0] * count

    @property
    def free(self) -> int:
        return self._free

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def owned(self) -> list[int]:
        return [self.first + i for i, owners in enumerate(self._owners) if owners]

    def add(self, count: int) -> None:
        """More pages behind the last one."""
        end = self.end
        self.count += count
        self._owners += [0] * count
        if count:
            self._give_back(end, count)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one owner each: one run where a run is long enough, else the longest runs."""
        if count > self._free:
            raise CacheFull(f"needs {count} pages, {self._free} free")
        taken: list[int] = []
        while len(taken) < count:
            taken += self._take(count - len(taken))
        for page in taken:
            self._owners[page - self.first] = 1
        return taken

    def _take(self, count: int) -> list[int]:
        """Up to `count` pages of the first run that holds them all, or of the longest run."""
        start = next((s for s in self._starts if self._lengths[s] >= count), None)
        if start is None:
            start = max(self._starts, key=self._lengths.__getitem__)
        length = self._lengths.pop(start)
        self._starts.remove(start)
        taken = min(count, length)
        if taken < length:
            bisect.insort(self._starts, start + taken)
            self._lengths[start + taken] = length - taken
        self._free -= taken
        return list(range(start, start + taken))

    def retain(self, pages: Iterable[int]) -> None:
        """One more owner for each page."""
        for page in pages:
            assert self._owners[page - self.first] > 0, f"page {page} is free"
            self._owners[page - self.first] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """One owner less for each page; returns those that have none now, which are free again."""
        freed = []
        for page in pages:
            assert self._owners[page - self.first] > 0, f"page {page} is free"
            self._owners[page - self.first] -= 1
            if not self._owners[page - self.first]:
                freed.append(page)
        for first, length in page_runs(sorted(freed)):
            self._give_back(first, length)
        return freed

    def _give_back(self, first: int, length: int) -> None:
        self._free += length
        at = bisect.bisect(self._starts, first)
        if at < len(self._starts) and self._starts[at] == first + length:
            length += self._lengths.pop(self._starts.pop(at))
        if at and self._starts[at - 1] + self._lengths[self._starts[at - 1]] == first:
            self._lengths[self._starts[at - 1]] += length
        else:
            self._starts.insert(at, first)
            self._lengths[first] = length

    def check(self) -> None:
        """Every page is free or owned, never both; free runs are apart and in order."""
        free: set[int] = set()
        for start in self._starts:
            run = range(start, start + self._lengths[start])
            assert len(run) and not free & set(run) and start - 1 not in free, "free runs touch or overlap"
            free |= set(run)
        assert self._starts == sorted(self._lengths), "free runs out of order"
        assert len(free) == self._free, "free count is off"
        assert all(self.first <= page < self.end for page in free)
        for page in range(self.first, self.end):
            assert (self._owners[page - self.first] > 0) != (page in free), f"page {page} is both or neither"


def page_runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """(first, length) of each stretch of consecutive numbers, in the order given."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs
