"""Page allocator, and the tensors of the paged KV cache."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ..attention.int8_rows import StoredRows
from ..errors import CacheFullError


class FreeRuns:
    """Runs of consecutive free pages, found in O(log pages)."""

    def __init__(self) -> None:
        self.length_at: dict[int, int] = {}  # by first page
        self._start_of: dict[int, int] = {}  # first page by end page, exclusive
        self._size = 1  # leaves of the tree
        self._tree = [0, 0]  # maximum length below each node; the leaf of page p is node `_size + p`

    def add(self, start: int, length: int) -> None:
        """Add free pages, merged with the runs next to them."""
        end = start + length
        if (before := self._start_of.get(start)) is not None:
            start = before
            self.remove(before)
        if end in self.length_at:
            end += self.remove(end)
        self._set(start, end - start)
        self._start_of[end] = start

    def remove(self, start: int) -> int:
        """Remove the run that starts at a page; return its length."""
        length = self.length_at[start]
        del self._start_of[start + length]
        self._set(start, 0)
        return length

    def longest(self) -> int:
        """Return the first page of the first longest run."""
        return self.first_of(self._tree[1])

    def first_of(self, length: int) -> int:
        """Return where the first run of `length` starts, else the longest."""
        tree, node = self._tree, 1
        length = min(length, tree[1])
        while node < self._size:
            node *= 2
            node += tree[node] < length
        return node - self._size

    def _set(self, start: int, length: int) -> None:
        if length:
            self.length_at[start] = length
        else:
            del self.length_at[start]
        while start >= self._size:
            self._tree = _double(self._tree)
            self._size *= 2
        tree, node = self._tree, self._size + start
        tree[node] = length
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])


def _double(tree: list[int]) -> list[int]:
    """Return a tree of maxima with twice as many leaves."""
    leaves = tree[len(tree) // 2 :] + [0] * (len(tree) // 2)
    result = [0] * len(leaves) + leaves
    for node in range(len(leaves) - 1, 0, -1):
        result[node] = max(result[2 * node], result[2 * node + 1])
    return result


class PageAllocator:
    """Allocator of the pages in [first, end)."""

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count
        self.num_free = count
        self.allocated: set[int] = set()
        self._free_runs = FreeRuns()
        if count:
            self._free_runs.add(first, count)

    @property
    def end(self) -> int:
        return self.first + self.count

    def grow(self, count: int) -> None:
        """Append `count` free pages."""
        if count:
            self._free_runs.add(self.end, count)
        self.num_free += count
        self.count += count

    def allocate(self, count: int, *, after: int | None = None, room: int = 0) -> list[int]:
        """Allocate `count` pages.

        Takes the first free run that is long enough, else the longest runs.

        Args:
            after: last page of an entry that grows; the pages that follow it are taken if free.
            room: pages by which the entry may grow later. As many are left free between it and the
                entry before it, if the longest run has them, so that both can grow in one run.

        Raises:
            CacheFullError: if fewer pages are free.
        """
        if count > self.num_free:
            raise CacheFullError(f"needs {count} pages, {self.num_free} free")
        pages: list[int] = []
        while len(pages) < count:
            missing = count - len(pages)
            start, offset = self._choose_run(missing, after if not pages else None, room)
            length = self._free_runs.remove(start)
            num_taken = min(missing, length - offset)
            first = start + offset
            for run in ((start, offset), (first + num_taken, length - offset - num_taken)):
                if run[1]:
                    self._free_runs.add(*run)
            pages += range(first, first + num_taken)
        self.num_free -= count
        self.allocated.update(pages)
        return pages

    def _choose_run(self, count: int, after: int | None, room: int) -> tuple[int, int]:
        """Return the first page of a free run and an offset."""
        runs = self._free_runs
        if after is not None and after + 1 in runs.length_at:
            return after + 1, 0
        if room:
            longest = runs.longest()
            if (length := runs.length_at[longest]) > count:
                # no entry is before the first page
                return longest, 0 if longest == self.first else min(room, (length - count) // 2)
        return runs.first_of(count), 0

    def release(self, pages: Sequence[int]) -> None:
        """Free allocated pages."""
        for page in pages:
            assert page in self.allocated, f"page {page} is free"
            self.allocated.remove(page)
        for run in consecutive_runs(sorted(pages)):
            self._free_runs.add(*run)
        self.num_free += len(pages)

    def check(self) -> None:
        """Check that pages are free or allocated, and free runs merged."""
        runs = sorted(self._free_runs.length_at.items())
        free = [page for first, length in runs for page in range(first, first + length)]
        assert self.num_free == len(free), "wrong free count"
        assert sorted([*free, *self.allocated]) == [*range(self.first, self.end)], "a page is both or neither"
        assert runs == consecutive_runs(free), "free runs touch or are out of order"


def consecutive_runs(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Return (first, length) of each run of consecutive numbers, in input order."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


LayerKeyValues = tuple[Shaped[Tensor, "T G D"], Shaped[Tensor, "T G D"]]  # keys and values of T tokens in one layer


class KVPool:
    """Paged KV cache: a main pool and an optional partial-layer pool.

    `keys[l]` and `values[l]` are the `StoredRows` of layer l, `hidden[l]` is the (S, E) input of layer
    l where it is cached. Page 0 is the null page: padding tokens write to it, and it is never
    allocated. Pages after the main pool exist only in `partial_layers`.

    Args:
        pages: Pages of the main pool, without the null page.
        page_size: Slots per page.
        layers: (key-value heads, width of a row) of each layer.
        dtype: Of keys and values.
        poison_freed_pages: Fill unused and freed pages with NaN, for tests.
        pinned: Use page-locked host memory, for copies from and to a GPU.
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
        self.pages = pages
        self.page_size = page_size
        self.poison_freed_pages = poison_freed_pages
        self._pinned = pinned

        def empty(heads: int, width: int) -> StoredRows:
            shape = ((pages + 1) * page_size, heads, width)
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)

        self.keys: list[StoredRows] = [empty(*heads_and_width) for heads_and_width in layers]
        self.values: list[StoredRows] = [empty(*heads_and_width) for heads_and_width in layers]
        self.hidden: dict[int, Float[Tensor, "S E"]] = {}
        self.partial_layers: frozenset[int] = frozenset()
        self._main, self._partial = PageAllocator(1, pages), PageAllocator(pages + 1, 0)
        if poison_freed_pages:
            self._poison(range(pages + 1), [*self.keys, *self.values])

    @property
    def free_pages(self) -> int:
        return self._main.num_free

    def num_free(self, partial: bool) -> int:
        """Return the free pages of the main or partial-layer pool."""
        return (self._partial if partial else self._main).num_free

    def num_pages(self, partial: bool) -> int:
        return (self._partial if partial else self._main).count

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all layers, including cached layer inputs."""
        tensors = [*self.keys, *self.values, *self.hidden.values()]
        return sum(t[0].numel() * t.element_size() for t in tensors)

    def num_pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def enable_hidden_cache(self, layers: Iterable[int], hidden_size: int, dtype: torch.dtype) -> None:
        """Allocate tensors that cache these layers' inputs in the main pool."""
        device = self.keys[0].device
        for layer in set(layers) - self.hidden.keys():
            shape = ((self.pages + 1) * self.page_size, hidden_size)
            self.hidden[layer] = torch.empty(shape, dtype=dtype, device=device, pin_memory=self._pinned)
            if self.poison_freed_pages:
                _fill_with_nan(self.hidden[layer])

    def grow_partial_pool(self, layers: Iterable[int], pages: int) -> None:
        """Grow the partial-layer pool to at least `pages` pages.

        Keeps its content, and adds `layers` to its layers.
        """
        partial_layers, num_new = self.partial_layers | set(layers), max(0, pages - self._partial.count)
        slots = (self._partial.end + num_new) * self.page_size
        for layer in partial_layers:
            for tensors in (self.keys, self.values):
                if len(tensors[layer]) < slots:
                    tensors[layer] = self._reallocated(tensors[layer], slots)
        self.partial_layers = partial_layers  # only after their memory is allocated
        self._partial.grow(num_new)

    def _reallocated(self, tensor: Shaped[Tensor, "S G D"], slots: int) -> Shaped[Tensor, "R G D"]:
        """Return a copy with `slots` slots.

        Only allocated pages are copied: memory of untouched pages is not committed until written.
        """
        grown = tensor.new_empty((slots, *tensor.shape[1:]))
        if self.poison_freed_pages:
            _fill_with_nan(grown)
        for first, length in consecutive_runs(sorted(self._main.allocated | self._partial.allocated)):
            copied = slice(first * self.page_size, min((first + length) * self.page_size, len(tensor)))
            grown[copied] = tensor[copied]
        return grown

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """Return a layer's tensors by name: keys, values and any cached inputs.

        All have the dtype of the keys; of inputs in another dtype, the bytes are viewed.
        """
        keys, values = self.keys[layer], self.values[layer]
        inputs = {"inputs": self.hidden[layer].view(keys.dtype)} if layer in self.hidden else {}
        return {"keys": keys, "values": values} | inputs

    def allocate(self, count: int, *, partial: bool = False, after: int | None = None, room: int = 0) -> list[int]:
        """Allocate `count` pages; see `PageAllocator.allocate`."""
        return (self._partial if partial else self._main).allocate(count, after=after, room=room)

    def release(self, pages: Sequence[int]) -> None:
        """Free pages of either pool."""
        main, partial = [page for page in pages if page <= self.pages], [page for page in pages if page > self.pages]
        self._main.release(main)
        self._partial.release(partial)
        if self.poison_freed_pages:
            self._poison(main, [*self.keys, *self.values, *self.hidden.values()])
            self._poison(partial, [tensors[i] for tensors in (self.keys, self.values) for i in self.partial_layers])

    def copy_slots(self, slots: list[int], target_slots: list[int]) -> None:
        """Copy all cached tensors from `slots` to `target_slots`."""
        device = self.keys[0].device
        old, new = torch.tensor(slots, device=device), torch.tensor(target_slots, device=device)
        for tensor in (*self.keys, *self.values, *self.hidden.values()):
            tensor[new] = tensor[old]

    def export_slots(self, slots: list[int]) -> list[LayerKeyValues]:
        """Copy the keys and values of slots to host memory."""
        return [self.export_layer(layer, slots) for layer in range(len(self.keys))]

    def export_layer(self, layer: int, slots: list[int]) -> LayerKeyValues:
        index = torch.tensor(slots, dtype=torch.long, device=self.keys[0].device)
        return self.keys[layer][index].cpu(), self.values[layer][index].cpu()

    def export_inputs(self, layer: int, slots: list[int]) -> Tensor:
        """Copy the cached inputs of a layer, as in `tensors`, to host memory."""
        index = torch.tensor(slots, dtype=torch.long, device=self.keys[0].device)
        return self.tensors(layer)["inputs"][index].cpu()

    def import_slots(self, slots: list[int], layers: list[LayerKeyValues]) -> None:
        """Write the result of `export_slots` into other slots."""
        index = torch.tensor(slots, dtype=torch.long, device=self.keys[0].device)
        for keys, values, (new_keys, new_values) in zip(self.keys, self.values, layers, strict=True):
            keys[index], values[index] = new_keys.to(keys.device), new_values.to(values.device)

    def _poison(self, pages: Iterable[int], tensors: Iterable[Tensor]) -> None:
        slots = [page * self.page_size + i for page in pages for i in range(self.page_size)]
        for tensor in tensors if slots else ():
            _fill_with_nan(tensor, slots)

    def check(self) -> None:
        """Check both allocators, and that page 0 cannot be allocated."""
        self._main.check()
        self._partial.check()
        assert (self._main.first, self._main.count) == (1, self.pages), "page 0 must stay reserved as the null page"


def _fill_with_nan(tensor: Tensor, slots: list[int] | slice = slice(None)) -> None:
    tensor[slots] = -1 if tensor.dtype == torch.int8 else float("nan")  # a scale whose bits are all set is NaN
