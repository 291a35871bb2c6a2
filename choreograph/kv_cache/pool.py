"""Page allocator with reference counts, and the tensors of the paged KV cache."""

import bisect
from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import CacheFullError


class PageAllocator:
    """Allocator of the pages first <= page < first + count, with reference counts."""

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count
        self._starts = [first] if count else []  # first pages of the free runs, sorted
        self._lengths = {first: count} if count else {}
        self._num_free = count
        self._ref_counts = [0] * count

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def allocated(self) -> list[int]:
        return [self.first + i for i, owners in enumerate(self._ref_counts) if owners]

    def grow(self, count: int) -> None:
        """Append `count` free pages."""
        end = self.end
        self.count += count
        self._ref_counts += [0] * count
        if count:
            self._free_run(end, count)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages with one reference each.

        Takes the first free run that is long enough, else the longest runs.

        Raises:
            CacheFullError: if fewer pages are free.
        """
        if count > self._num_free:
            raise CacheFullError(f"needs {count} pages, {self._num_free} free")
        allocated: list[int] = []
        while len(allocated) < count:
            allocated += self._take_run(count - len(allocated))
        for page in allocated:
            self._ref_counts[page - self.first] = 1
        return allocated

    def _take_run(self, count: int) -> list[int]:
        """Take up to `count` pages from the first run that is long enough, or from the longest."""
        start = next((s for s in self._starts if self._lengths[s] >= count), None)
        if start is None:
            start = max(self._starts, key=self._lengths.__getitem__)
        length = self._lengths.pop(start)
        self._starts.remove(start)
        allocated = min(count, length)
        if allocated < length:
            bisect.insort(self._starts, start + allocated)
            self._lengths[start + allocated] = length - allocated
        self._num_free -= allocated
        return list(range(start, start + allocated))

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            assert self._ref_counts[page - self.first] > 0, f"page {page} is free"
            self._ref_counts[page - self.first] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Remove a reference from each page; return the pages freed by that."""
        freed = []
        for page in pages:
            assert self._ref_counts[page - self.first] > 0, f"page {page} is free"
            self._ref_counts[page - self.first] -= 1
            if not self._ref_counts[page - self.first]:
                freed.append(page)
        for first, length in consecutive_runs(sorted(freed)):
            self._free_run(first, length)
        return freed

    def _free_run(self, first: int, length: int) -> None:
        """Add a free run and merge it with its neighbors."""
        self._num_free += length
        at = bisect.bisect(self._starts, first)
        if at < len(self._starts) and self._starts[at] == first + length:
            length += self._lengths.pop(self._starts.pop(at))
        if at and self._starts[at - 1] + self._lengths[self._starts[at - 1]] == first:
            self._lengths[self._starts[at - 1]] += length
        else:
            self._starts.insert(at, first)
            self._lengths[first] = length

    def check(self) -> None:
        """Check that every page is free or referenced, and that free runs are sorted and merged."""
        free: set[int] = set()
        for start in self._starts:
            run = range(start, start + self._lengths[start])
            assert len(run) and not free & set(run) and start - 1 not in free, "free runs touch or overlap"
            free |= set(run)
        assert self._starts == sorted(self._lengths), "free runs out of order"
        assert len(free) == self._num_free, "wrong free count"
        assert all(self.first <= page < self.end for page in free)
        for page in range(self.first, self.end):
            assert (self._ref_counts[page - self.first] > 0) != (page in free), f"page {page} is both or neither"


def consecutive_runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, length) of each run of consecutive numbers, in input order."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


LayerKeyValues = tuple[Float[Tensor, "T G D"], Float[Tensor, "T G D"]]  # keys and values of T tokens in one layer


class KVPool:
    """Paged KV cache: a main pool of all layers and an optional partial-layer pool.

    `keys[l]` and `values[l]` are (S, G, D) tensors of layer l, `hidden[l]` is the (S, E) input of
    layer l where it is cached. Page 0 is the null page: padding tokens write to it, and it is never
    allocated. Pages after the main pool exist only in `partial_layers`.
    """

    def __init__(
        self,
        *,
        pages: int,
        page_size: int,
        layers: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
        poison_freed_pages: bool = False,
        pinned: bool = False,
    ) -> None:
        """Allocate the tensors.

        Args:
            pages: Pages of the main pool, without the null page.
            page_size: Slots per page.
            layers: (key-value heads, head dimension) of each layer.
            poison_freed_pages: Fill unused and freed pages with NaN, for tests.
            pinned: Use page-locked host memory, for copies from and to a GPU.
        """
        self.pages = pages
        self.page_size = page_size
        self.poison_freed_pages = poison_freed_pages
        self._pinned = pinned
        slots = (pages + 1) * page_size
        shapes = [(slots, heads, width) for heads, width in layers]

        def empty(shape: tuple[int, int, int]) -> Float[Tensor, "S G D"]:
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)

        self.keys: list[Float[Tensor, "S G D"]] = [empty(shape) for shape in shapes]
        self.values: list[Float[Tensor, "S G D"]] = [empty(shape) for shape in shapes]
        self.hidden: dict[int, Float[Tensor, "S E"]] = {}
        self.partial_layers: frozenset[int] = frozenset()
        self._main, self._partial = PageAllocator(1, pages), PageAllocator(pages + 1, 0)
        if poison_freed_pages:
            self._poison(range(pages + 1))

    @property
    def free_pages(self) -> int:
        return self._main.num_free

    def num_free(self, partial: bool) -> int:
        """Return the free pages of the main pool, or of the partial-layer pool."""
        return (self._partial if partial else self._main).num_free

    def num_pages(self, partial: bool) -> int:
        return (self._partial if partial else self._main).count

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all layers, including cached layer inputs."""
        tensors = (t for layer in range(len(self.keys)) for t in self.tensors(layer).values())
        return sum(t[0].numel() * t.element_size() for t in tensors)

    @property
    def partial_bytes_per_token(self) -> int:
        keys = (self.keys[layer] for layer in self.partial_layers)
        return sum(2 * k[0].numel() * k.element_size() for k in keys)

    def num_pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    # -- cached layer inputs and the partial-layer pool ----------------------------------------------------

    def enable_hidden_cache(self, layers: Iterable[int], hidden_size: int) -> None:
        """Allocate tensors that cache the inputs of these layers for all slots of the main pool."""
        like = self.keys[0]
        for layer in set(layers) - self.hidden.keys():
            shape = ((self.pages + 1) * self.page_size, hidden_size)
            self.hidden[layer] = torch.empty(shape, dtype=like.dtype, device=like.device, pin_memory=self._pinned)
            if self.poison_freed_pages:
                self.hidden[layer].fill_(float("nan"))

    def grow_partial_pool(self, layers: Iterable[int], pages: int) -> None:
        """Grow the partial-layer pool to at least `pages` pages, keeping its content.

        `layers` are added to its layers.
        """
        all_partial, more = self.partial_layers | set(layers), max(0, pages - self._partial.count)
        slots = (self._partial.end + more) * self.page_size
        for layer in all_partial:
            for tensors in (self.keys, self.values):
                if len(tensors[layer]) < slots:
                    tensors[layer] = self._reallocated(tensors[layer], slots)
        self.partial_layers = all_partial  # only after their memory is allocated
        self._partial.grow(more)

    def _reallocated(self, tensor: Float[Tensor, "S G D"], slots: int) -> Float[Tensor, "R G D"]:
        """Return a copy with `slots` slots.

        Only allocated pages are copied: memory of untouched pages is not committed until written.
        """
        grown = tensor.new_empty((slots, *tensor.shape[1:]))
        if self.poison_freed_pages:
            grown.fill_(float("nan"))
        for first, length in consecutive_runs([*self._main.allocated, *self._partial.allocated]):
            copied = slice(first * self.page_size, min((first + length) * self.page_size, len(tensor)))
            grown[copied] = tensor[copied]
        return grown

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """Return the cached tensors of a layer by name: keys, values and, if cached, inputs."""
        result = {"keys": self.keys[layer], "values": self.values[layer]}
        return result | ({"inputs": self.hidden[layer]} if layer in self.hidden else {})

    # -- pages --------------------------------------------------------------------------------------------

    def allocate(self, count: int, *, partial: bool = False) -> list[int]:
        """Allocate `count` pages with one reference each; see `PageAllocator.allocate`."""
        return (self._partial if partial else self._main).allocate(count)

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each page."""
        for range_, subset in self._by_region(pages):
            range_.retain(subset)

    def release(self, pages: Iterable[int]) -> None:
        """Remove a reference from each page; pages without references become free."""
        for range_, subset in self._by_region(pages):
            freed = range_.release(subset)
            if self.poison_freed_pages:
                self._poison(freed, self.partial_layers if range_ is self._partial else None)

    def _by_region(self, pages: Iterable[int]) -> Iterator[tuple[PageAllocator, list[int]]]:
        pages = list(pages)
        yield self._main, [page for page in pages if page <= self.pages]
        yield self._partial, [page for page in pages if page > self.pages]

    # -- content ------------------------------------------------------------------------------------------

    def copy_slots(self, slots: list[int], target_slots: list[int]) -> None:
        """Copy all cached tensors from `slots` to `target_slots`."""
        device = self.keys[0].device
        old, new = torch.tensor(slots, device=device), torch.tensor(target_slots, device=device)
        for layer in range(len(self.keys)):
            for tensor in self.tensors(layer).values():
                tensor[new] = tensor[old]

    def export_slots(self, slots: list[int]) -> list[LayerKeyValues]:
        """Copy the keys and values of some slots to host memory, layer by layer."""
        return [self.export_layer(layer, slots) for layer in range(len(self.keys))]

    def export_layer(self, layer: int, slots: list[int]) -> LayerKeyValues:
        at = torch.tensor(slots, dtype=torch.long, device=self.keys[0].device)
        return self.keys[layer][at].cpu(), self.values[layer][at].cpu()

    def import_slots(self, slots: list[int], layers: list[LayerKeyValues]) -> None:
        """Write the result of `export_slots` into other slots."""
        at = torch.tensor(slots, dtype=torch.long, device=self.keys[0].device)
        for keys, values, (k, v) in zip(self.keys, self.values, layers, strict=True):
            keys[at], values[at] = k.to(keys.device), v.to(values.device)

    def _poison(self, pages: Iterable[int], layers: Iterable[int] | None = None) -> None:
        slots = [p * self.page_size + i for p in pages for i in range(self.page_size)]
        if not slots:
            return
        for layer in range(len(self.keys)) if layers is None else layers:
            for name, tensor in self.tensors(layer).items():
                if layers is None or name != "inputs":  # the partial-layer pool caches none
                    tensor[slots] = float("nan")

    def check(self) -> None:
        """Check both allocators, and that page 0 cannot be allocated."""
        self._main.check()
        self._partial.check()
        assert (self._main.first, self._main.count) == (1, self.pages), "page 0 must stay reserved as the null page"
