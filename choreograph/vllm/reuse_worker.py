"""Worker's half of the connector: stores and loads keys and values."""

from collections.abc import Mapping
from typing import Any

import torch

from .kv_pages import PageReader, Rotary, UnsupportedCacheError, slots_of
from .step_metadata import LoadOrder, SaveOrder, StepOrders

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 0.1}  # of a rotated key, relative


class ReuseWorker:
    """Entries of one worker: its heads of every layer.

    Args:
        layers: attention layers by name.
        caches: their pages.
        store_device: "cpu" (pinned memory for a GPU) or "device".
    """

    def __init__(
        self, layers: Mapping[str, Any], caches: Mapping[str, torch.Tensor], block_size: int, store_device: str
    ) -> None:
        self._layers = [(layers[name], cache) for name, cache in caches.items()]
        self._block_size, self._rotary = block_size, Rotary.of_vllm()
        layer, cache = self._layers[0]
        if any(other.shape != cache.shape or other.stride() != cache.stride() for _, other in self._layers):
            raise UnsupportedCacheError("layers have pages of different shapes")
        self._reader = PageReader(layer, cache, block_size)
        self._device = cache.device if store_device == "device" else torch.device("cpu")
        self._is_pinned = self._device.type == "cpu" and cache.device.type == "cuda"
        self._entries: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keys, values (L, T, G, D) by uid
        self._is_verified = False
        self._errors: set[int] = set()  # pages of refused requests
        self._received: set[str] = set()
        self._sent: set[str] = set()

    @property
    def stored_uids(self) -> set[int]:
        return set(self._entries)

    @property
    def num_tokens(self) -> int:
        return sum(keys.shape[1] for keys, _ in self._entries.values())

    def before_forward(self, orders: StepOrders) -> None:
        """Carry out what the forward pass of a step depends on."""
        for request_id, saves in orders.final_saves.items():
            for save in saves:
                self._save(save)
            self._sent.add(request_id)
        for uid in orders.drops:
            del self._entries[uid]
        for load in orders.loads:
            self._load(load)
        self._received.update(orders.refused)
        self._errors.update(orders.refused_blocks)

    def after_forward(self, orders: StepOrders) -> None:
        """Store what a step has computed."""
        for save in orders.saves:
            self._save(save)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return the requests whose pages were read, and those that are refused."""
        finished, self._sent, self._received = (self._sent, self._received), set(), set()
        return finished

    def take_errors(self) -> set[int]:
        """Return the pages of refused requests."""
        errors, self._errors = self._errors, set()
        return errors

    def _save(self, order: SaveOrder) -> None:
        layer, cache = self._layers[0]
        shape = (len(self._layers), order.stop - order.start, layer.num_kv_heads, layer.head_size)
        keys, values = (
            torch.empty(shape, dtype=cache.dtype, device=self._device, pin_memory=self._is_pinned) for _ in range(2)
        )
        place = self._reader.locate(order.block_ids, order.start, order.stop, cache.device)
        for i, (_, pages) in enumerate(self._layers):
            k, v = self._reader.read(pages, place)
            keys[i].copy_(k, non_blocking=True)
            values[i].copy_(v, non_blocking=True)
        if not self._is_verified:
            self._verify(order.tokens, keys[0])
        self._entries[order.uid] = keys, values

    def _verify(self, tokens: tuple[int, ...], keys: torch.Tensor) -> None:
        """Check the rotation, once, by a token at two positions.

        Keys of the first layer depend on token and position alone.
        """
        first: dict[int, int] = {}
        for i, token in enumerate(tokens):
            j = first.setdefault(token, i)
            if j == i:
                continue
            if keys.device.type == "cpu" and torch.cuda.is_available():
                torch.cuda.synchronize()
            tables = self._rotary.tables([i - j], keys.device)
            rotated, expected = self._rotary.rotate(keys[j : j + 1], tables).float(), keys[i : i + 1].float()
            error = (rotated - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
            if error > _TOLERANCE[keys.dtype]:
                raise UnsupportedCacheError(
                    f"the key of token {token} at two positions differs by {error:.2g} after rotation: the rotary "
                    "embedding of this model is not understood; start vLLM without the connector"
                )
            self._is_verified = True
            return

    def _load(self, order: LoadOrder) -> None:
        """Write reused tokens into the pages of a request."""
        device = self._layers[0][1].device
        slots = slots_of(order.block_ids, self._block_size, [(p.at, p.at + p.length) for p in order.pieces])
        slots = slots.to(device, non_blocking=True)
        tables = self._rotary.tables([p.shift for p in order.pieces for _ in range(p.length)], device)
        for i, (layer, pages) in enumerate(self._layers):
            keys, values = (
                torch.cat(
                    [
                        self._entries[p.uid][kind][i, p.source : p.source + p.length].to(device, non_blocking=True)
                        for p in order.pieces
                    ]
                )
                for kind in (0, 1)
            )
            layer.impl.do_kv_cache_update(layer, self._rotary.rotate(keys, tables), values, pages, slots)
