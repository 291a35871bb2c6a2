"""Messages on their way between replicas: parts of a container, and how they arrive in a KV entry."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..kv_cache.container import Block, EntryInfo, Header
from ..kv_cache.entry import KVEntry
from ..kv_cache.pool import KVPool
from ..kv_cache.tiers import TransferOps, layer_writer
from ..messages.kv_export import KVSnapshot
from ..server.reuse.message_store import MessageKey, StoredMessage

TIMEOUT = 5.0  # seconds that a transfer may take at most


class SentGroup(NamedTuple):
    """Some blocks of a container that has the messages of a query as entries.

    Ray passes the arrays of blocks on without a copy.
    """

    header: bytes  # only in the first group
    blocks: list[Block]  # in the order of the header; hidden states only in the first group


def describe(stored: StoredMessage, snapshot: KVSnapshot) -> EntryInfo:
    """Return a message without its layers, as it is sent."""
    return snapshot.describe(tokens=stored.tokens, details={"content_keys": stored.content_keys})


@dataclass(eq=False)
class ArrivingMessage:
    """Layers of one message that arrive in a KV entry."""

    number: int  # of its entry
    header: Header
    inputs: dict[int, np.ndarray] = field(default_factory=dict)  # by layer; they come before all layers
    layers: "list[Future[Block]]" = field(init=False)

    def __post_init__(self) -> None:
        self.layers = [Future() for layer, kind in self.info.shapes if kind == "keys"]

    @property
    def info(self) -> EntryInfo:
        return self.header.entries[self.number]

    @property
    def content_keys(self) -> list[MessageKey]:
        """Keys under which the message is stored."""
        keys = self.info.details["content_keys"]
        return [(tuple(content) if isinstance(content, list) else content, number) for content, number in keys]

    @property
    def num_arrived(self) -> int:
        """Number of layers that are here."""
        return sum(layer.done() for layer in self.layers)

    def end(self) -> None:
        """Let the load of a layer that has not arrived fail."""
        for number, layer in enumerate(self.layers):
            if not layer.done():
                layer.set_exception(ConnectionError(f"layer {number} did not arrive: its message is computed here"))

    @property
    def snapshot(self) -> KVSnapshot:
        """What arrives, with tensors that have no content."""
        info, dtype = self.info, self.header.dtype
        layers: Any = [
            tuple(torch.empty(info.shapes[layer, kind], dtype=dtype, device="meta") for kind in ("keys", "values"))
            for layer in range(len(self.layers))
        ]
        return KVSnapshot(info.base_position, layers, info.model_hash, info.content_hash)

    def load(self, pool: KVPool, entry: KVEntry) -> TransferOps:
        """Return the operations that copy the layers into an entry.

        Hidden states come first.
        """
        write = layer_writer(pool, entry.pages, len(entry.tokens))
        inputs = {
            layer: states
            for layer, states in self.inputs.items()
            if layer in pool.hidden and states.shape[1] == pool.hidden[layer][0].nbytes
        }
        entry.layers = entry.layers._replace(hidden=frozenset(inputs))

        def copy_inputs() -> None:
            for layer, states in inputs.items():
                write(layer, ["inputs"], [states])

        def copy_layer(layer: int) -> None:
            block = self.layers[layer].result(2 * TIMEOUT)  # `end` is called before
            write(layer, ["keys", "values"], block.tensors)

        return TransferOps(copy_layer, copy_inputs, inputs_first=True)
