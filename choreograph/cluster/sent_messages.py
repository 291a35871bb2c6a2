"""Messages on their way between replicas.

What is sent, and how it arrives in a KV entry.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..kv_cache.entry import KVEntry
from ..kv_cache.pool import KVPool
from ..kv_cache.tiers import TransferOps, checksum, write_layer
from ..messages.kv_export import KVSnapshot
from ..server.reuse.message_store import MessageKey

TIMEOUT = 5.0  # seconds that a transfer may take at most


class SentLayer(NamedTuple):
    """Keys and values of one layer of a message.

    Arrays of bytes, (T, bytes of a token), since Ray passes them on without a copy.
    """

    message: int  # number among those of a query
    layer: int
    keys: np.ndarray
    values: np.ndarray
    checksum: int  # of the message's, and of the above


class SentInputs(NamedTuple):
    """Hidden states before one layer of a message.

    A model of the same family computes the layer from them.
    """

    message: int  # number among those of a query
    layer: int
    states: np.ndarray  # bytes, (T, bytes of a token)
    checksum: int  # of the message's, and of the above


@dataclass(frozen=True)
class SentMessage:
    """One message, without its layers."""

    content_keys: list[MessageKey]  # under which it is stored
    tokens: list[int]
    base_position: int  # of token 0; keys are rotated to it
    model_hash: str
    content_hash: str
    dtype: str  # of torch
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]  # of keys and values, of every layer
    input_shapes: dict[int, tuple[int, ...]]  # of the hidden states that are sent, by layer
    checksum: int = 0  # of all of the above

    @classmethod
    def of(cls, content_keys: Sequence[MessageKey], tokens: list[int], snapshot: KVSnapshot) -> "SentMessage":
        message = cls(
            list(content_keys),
            tokens,
            snapshot.base_position,
            snapshot.model_hash,
            snapshot.content_hash,
            str(snapshot.layers[0][0].dtype).removeprefix("torch."),
            [(tuple(keys.shape), tuple(values.shape)) for keys, values in snapshot.layers],
            {layer: tuple(states.shape) for layer, states in sorted(snapshot.inputs.items())},
        )
        object.__setattr__(message, "checksum", message.compute_checksum())
        return message

    def compute_checksum(self) -> int:
        header = [getattr(self, name) for name in self.__dataclass_fields__ if name != "checksum"]
        return checksum([repr(header).encode()])

    def layer_checksum(self, layer: int, *tensors: np.ndarray) -> int:
        """Return the checksum of keys and values, or of hidden states."""
        header = repr((self.checksum, layer, len(tensors))).encode()
        return checksum([header, *(np.ascontiguousarray(tensor).data for tensor in tensors)])


class SentGroup(NamedTuple):
    """Some layers of all messages of a query."""

    messages: list[SentMessage]  # only in the first group
    inputs: list[SentInputs]  # only in the first group
    layers: list[SentLayer]


@dataclass(eq=False)
class ArrivingMessage:
    """Layers of one message that arrive in a KV entry.

    Raises:
        ValueError: if anything differs from what was sent.
    """

    message: SentMessage
    inputs: dict[int, np.ndarray] = field(default_factory=dict)  # by layer; they come before all layers
    layers: "list[Future[SentLayer]]" = field(init=False)

    def __post_init__(self) -> None:
        if self.message.compute_checksum() != self.message.checksum:
            raise ValueError("the message is damaged, its checksum differs")
        self.layers = [Future() for _ in self.message.shapes]

    def verify(self, sent: SentLayer | SentInputs) -> None:
        """Raise ValueError unless a layer is what was sent."""
        if isinstance(sent, SentInputs):
            shapes, tensors = [self.message.input_shapes[sent.layer]], [sent.states]
        else:
            shapes, tensors = [*self.message.shapes[sent.layer]], [sent.keys, sent.values]
        size = getattr(torch, self.message.dtype).itemsize
        expected = [(length, math.prod(shape) * size) for length, *shape in shapes]
        if [tensor.shape for tensor in tensors] != expected:
            raise ValueError(f"layer {sent.layer} is truncated: {tensors[0].shape} are not {expected[0]} bytes")
        if self.message.layer_checksum(sent.layer, *tensors) != sent.checksum:
            raise ValueError(f"layer {sent.layer} is damaged, its checksum differs")

    @property
    def is_complete(self) -> bool:
        return all(layer.done() for layer in self.layers)

    def end(self) -> None:
        """Let the load of a layer that has not arrived fail."""
        for layer in self.layers:
            if not layer.done():
                layer.set_exception(ConnectionError("it did not arrive"))

    @property
    def snapshot(self) -> KVSnapshot:
        """What arrives, with tensors that have no content."""
        message, dtype = self.message, getattr(torch, self.message.dtype)
        layers: Any = [
            tuple(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes) for shapes in message.shapes
        ]
        return KVSnapshot(message.base_position, layers, message.model_hash, message.content_hash)

    def load(self, pool: KVPool, entry: KVEntry) -> TransferOps:
        """Return the operations that copy the layers into an entry.

        Hidden states come first.
        """
        inputs = {
            layer: states
            for layer, states in self.inputs.items()
            if layer in pool.hidden and states.shape[1] == pool.hidden[layer][0].nbytes
        }
        entry.layers = entry.layers._replace(hidden=frozenset(inputs))

        def copy_inputs() -> None:
            for layer, states in inputs.items():
                write_layer(pool, layer, entry.pages, len(entry.tokens), {"inputs": states})

        def copy_layer(layer: int) -> None:
            sent = self.layers[layer].result(2 * TIMEOUT)  # `end` is called before
            write_layer(pool, layer, entry.pages, len(entry.tokens), {"keys": sent.keys, "values": sent.values})

        return TransferOps(copy_layer, copy_inputs, inputs_first=True)
