"""Owns the memory of token slots, layer by layer, and which pages of it are free. Knows nothing of messages.

A slot holds one token's keys and values in every layer. Runs of slots are contiguous in each layer's tensor
(slot, head, dimension), so an encoding in one run is read, and later moved, as one piece. Behind the slots that all
layers have may lie a band: slots that some layers have alone, for encodings that are computed in those only.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from .pages import Pages, page_runs

Layer = tuple[Float[Tensor, "T G D"], Float[Tensor, "T G D"]]  # keys and values of some tokens in one layer


class Arena:
    """keys[l], values[l]: (S, G, D) of layer l. Page 0 is a bin for padding rows and is never allocated.

    inputs[l]: (S, E), what came into layer l, for the layers where that is kept.
    """

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
        self._pinned = pinned
        slots = (pages + 1) * page_size
        shapes = [(slots, heads, width) for heads, width in layers]

        def empty(shape: tuple[int, int, int]) -> Float[Tensor, "S G D"]:
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)

        self.keys: list[Float[Tensor, "S G D"]] = [empty(shape) for shape in shapes]
        self.values: list[Float[Tensor, "S G D"]] = [empty(shape) for shape in shapes]
        self.inputs: dict[int, Float[Tensor, "S E"]] = {}
        self.band_layers: frozenset[int] = frozenset()
        self._main, self._band = Pages(1, pages), Pages(pages + 1, 0)
        if poison:
            self._poison(range(pages + 1))

    @property
    def free_pages(self) -> int:
        return self._main.free

    def free(self, band: bool) -> int:
        """Free pages, of those that all layers have or of the band."""
        return (self._band if band else self._main).free

    def size(self, band: bool) -> int:
        return (self._band if band else self._main).count

    @property
    def bytes_per_token(self) -> int:
        """Of a token in all layers, with what is kept beside keys and values."""
        tensors = (t for layer in range(len(self.keys)) for t in self.tensors(layer).values())
        return sum(t[0].numel() * t.element_size() for t in tensors)

    @property
    def band_bytes_per_token(self) -> int:
        keys = (self.keys[layer] for layer in self.band_layers)
        return sum(2 * k[0].numel() * k.element_size() for k in keys)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    # -- what is beside the pages that all layers have -----------------------------------------------------

    def keep_inputs(self, layers: Iterable[int], width: int) -> None:
        """From now on there is room for what comes into these layers, of all tokens."""
        like = self.keys[0]
        for layer in set(layers) - self.inputs.keys():
            shape = ((self.pages + 1) * self.page_size, width)
            self.inputs[layer] = torch.empty(shape, dtype=like.dtype, device=like.device, pin_memory=self._pinned)
            if self.poison:
                self.inputs[layer].fill_(float("nan"))

    def widen(self, layers: Iterable[int], pages: int) -> None:
        """Gives these layers a band of at least `pages` pages. Those that have one keep what is in it."""
        banded, more = self.band_layers | set(layers), max(0, pages - self._band.count)
        slots = (self._band.end + more) * self.page_size
        for layer in banded:
            for tensors in (self.keys, self.values):
                if len(tensors[layer]) < slots:
                    tensors[layer] = self._grown(tensors[layer], slots)
        self.band_layers = banded  # the pages are there when their memory is
        self._band.add(more)

    def _grown(self, old: Float[Tensor, "S G D"], slots: int) -> Float[Tensor, "R G D"]:
        """With more slots behind. Only pages that somebody owns are copied: the others may never have been touched, and
        take no memory until they are."""
        grown = old.new_empty((slots, *old.shape[1:]))
        if self.poison:
            grown.fill_(float("nan"))
        for first, length in page_runs([*self._main.owned, *self._band.owned]):
            here = slice(first * self.page_size, min((first + length) * self.page_size, len(old)))
            grown[here] = old[here]
        return grown

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """Everything that is kept of a layer, by name."""
        found = {"keys": self.keys[layer], "values": self.values[layer]}
        return found | ({"inputs": self.inputs[layer]} if layer in self.inputs else {})

    # -- pages --------------------------------------------------------------------------------------------

    def allocate(self, count: int, *, band: bool = False) -> list[int]:
        """`count` pages with one owner each: one run where a run is long enough, else the longest runs."""
        return (self._band if band else self._main).allocate(count)

    def retain(self, pages: Iterable[int]) -> None:
        """One more owner for each page."""
        for range_, some in self._split(pages):
            range_.retain(some)

    def release(self, pages: Iterable[int]) -> None:
        """One owner less for each page; a page without owners is free again."""
        for range_, some in self._split(pages):
            freed = range_.release(some)
            if self.poison:
                self._poison(freed, self.band_layers if range_ is self._band else None)

    def _split(self, pages: Iterable[int]) -> Iterator[tuple[Pages, list[int]]]:
        pages = list(pages)
        yield self._main, [page for page in pages if page <= self.pages]
        yield self._band, [page for page in pages if page > self.pages]

    # -- content ------------------------------------------------------------------------------------------

    def copy(self, slots: list[int], to: list[int]) -> None:
        """All that is kept of some slots into others."""
        device = self.keys[0].device
        old, new = torch.tensor(slots, device=device), torch.tensor(to, device=device)
        for layer in range(len(self.keys)):
            for tensor in self.tensors(layer).values():
                tensor[new] = tensor[old]

    def read(self, slots: list[int]) -> list[Layer]:
        """Copies of keys and values, layer by layer, in host memory."""
        return [self.read_layer(layer, slots) for layer in range(len(self.keys))]

    def read_layer(self, layer: int, slots: list[int]) -> Layer:
        at = torch.tensor(slots, dtype=torch.long, device=self.keys[0].device)
        return self.keys[layer][at].cpu(), self.values[layer][at].cpu()

    def write(self, slots: list[int], layers: list[Layer]) -> None:
        """What `read` gave, into other slots."""
        at = torch.tensor(slots, dtype=torch.long, device=self.keys[0].device)
        for keys, values, (k, v) in zip(self.keys, self.values, layers, strict=True):
            keys[at], values[at] = k.to(keys.device), v.to(values.device)

    def _poison(self, pages: Iterable[int], layers: Iterable[int] | None = None) -> None:
        slots = [p * self.page_size + i for p in pages for i in range(self.page_size)]
        if not slots:
            return
        for layer in range(len(self.keys)) if layers is None else layers:
            for name, tensor in self.tensors(layer).items():
                if layers is None or name != "inputs":  # a band has none
                    tensor[slots] = float("nan")

    def check(self) -> None:
        """Every page is free or owned, never both; free runs are apart and in order."""
        self._main.check()
        self._band.check()
        assert (self._main.first, self._main.count) == (1, self.pages), "page 0 is nobody's"
