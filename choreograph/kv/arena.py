"""Owns pages of token slots for all layers and who counts on them. Knows nothing of messages.

A slot holds one token's keys and values in every layer. Runs of slots are contiguous in each layer's tensor
(slot, head, dimension), so an encoding in one run is read, and later moved, as one piece.
"""

import bisect
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import CacheFull

Layer = tuple[Float[Tensor, "T G D"], Float[Tensor, "T G D"]]  # keys and values of some tokens in one layer


class Arena:
    """keys[l], values[l]: (S, G, D) of layer l. Page 0 is a bin for padding rows and is never allocated."""

    def __init__(
        self,
        *,
        pages: int,
        page_size: int,
        layers: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
        poison: bool = False,
        pinned: bool = False,
    ) -> None:
        """layers: (key-value heads, head size) of each layer. pinned: page-locked, for copies from and to a GPU."""
        self.pages = pages
        self.page_size = page_size
        self.poison = poison
        slots = (pages + 1) * page_size
        shapes = [(slots, heads, width) for heads, width in layers]

        def empty(shape: tuple[int, int, int]) -> Float[Tensor, "S G D"]:
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)

        self.keys: list[Float[Tensor, "S G D"]] = [empty(shape) for shape in shapes]
        self.values: list[Float[Tensor, "S G D"]] = [empty(shape) for shape in shapes]
        self._starts = [1]  # free runs of pages, by first page
        self._lengths = {1: pages}
        self._free = pages
        self._owners = [0] * (pages + 1)
        if poison:
            self._poison(range(pages + 1))

    @property
    def free_pages(self) -> int:
        return self._free

    @property
    def bytes_per_token(self) -> int:
        return sum(2 * k.shape[1] * k.shape[2] * k.element_size() for k in self.keys)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one owner each: one run where a run is long enough, else the longest runs."""
        if count > self._free:
            raise CacheFull(f"needs {count} pages, {self._free} free")
        taken: list[int] = []
        while len(taken) < count:
            taken += self._take(count - len(taken))
        for page in taken:
            self._owners[page] = 1
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
            assert self._owners[page] > 0, f"page {page} is free"
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner less for each page; a page without owners is free again."""
        freed = []
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is free"
            self._owners[page] -= 1
            if not self._owners[page]:
                freed.append(page)
        if self.poison:
            self._poison(freed)
        for first, length in page_runs(sorted(freed)):
            self._give_back(first, length)

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

    def copy(self, slots: list[int], to: list[int]) -> None:
        """Keys and values of some slots into others."""
        device = self.keys[0].device
        old, new = torch.tensor(slots, device=device), torch.tensor(to, device=device)
        for tensor in (*self.keys, *self.values):
            tensor[new] = tensor[old]

    def read(self, slots: list[int]) -> list[Layer]:
        """Copies of keys and values, layer by layer, in host memory."""
        at = torch.tensor(slots, dtype=torch.long, device=self.keys[0].device)
        pairs = zip(self.keys, self.values, strict=True)
        return [(keys[at].cpu(), values[at].cpu()) for keys, values in pairs]

    def write(self, slots: list[int], layers: list[Layer]) -> None:
        """What `read` gave, into other slots."""
        at = torch.tensor(slots, dtype=torch.long, device=self.keys[0].device)
        for keys, values, (k, v) in zip(self.keys, self.values, layers, strict=True):
            keys[at], values[at] = k.to(keys.device), v.to(values.device)

    def _poison(self, pages: Iterable[int]) -> None:
        slots = [p * self.page_size + i for p in pages for i in range(self.page_size)]
        if slots:
            for tensor in (*self.keys, *self.values):
                tensor[slots] = float("nan")

    def check(self) -> None:
        """Every page is free or owned, never both; free runs are apart and in order."""
        free: set[int] = set()
        for start in self._starts:
            run = range(start, start + self._lengths[start])
            assert len(run) and not free & set(run) and start - 1 not in free, "free runs touch or overlap"
            free |= set(run)
        assert self._starts == sorted(self._lengths), "free runs out of order"
        assert len(free) == self._free, "free count is off"
        assert 0 not in free and max(free, default=0) <= self.pages
        for page in range(1, self.pages + 1):
            assert (self._owners[page] > 0) != (page in free), f"page {page} is both or neither"


def page_runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """(first, length) of each stretch of consecutive numbers, in the order given."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs
