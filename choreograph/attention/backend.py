"""Attention backends, and the forward context that connects a model's layers to them.

A `ForwardContext` is passed through an unmodified transformers model as a keyword argument. Each layer
calls `attend`, which writes the keys and values of the batch into their slots before reading: tokens
can therefore attend to tokens of other requests in the same batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from . import cpp_backend as native
from . import gathered_sdpa as gathered
from . import reference
from . import torch_sdpa as sdpa
from .metadata import AttentionMetadata, AttentionSpec


@runtime_checkable
class Backend(Protocol):
    """Writes keys and values of a batch into the cache, then computes attention.

    Shapes as in `write` and `reference.attend`.
    """

    name: str

    def __call__(
        self,
        metadata: AttentionMetadata,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


def write(
    slots: Int[Tensor, "N"],
    key: Float[Tensor, "G N D"],
    value: Float[Tensor, "G N D"],
    keys: Float[Tensor, "S G D"],
    values: Float[Tensor, "S G D"],
) -> None:
    """Write the keys and values of the batch into their slots."""
    keys[slots] = key.transpose(0, 1)
    values[slots] = value.transpose(0, 1)


class FunctionBackend:
    """Backend composed of a function that reads the cache and one that writes it."""

    def __init__(self, name: str, read: Callable[..., Tensor], write: Callable[..., None] = write) -> None:
        self.name = name
        self._read, self._write = read, write

    def __call__(
        self,
        metadata: AttentionMetadata,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self._write(_device_slots(metadata, keys.device), key, value, keys, values)
        return self._read(metadata, query, keys, values, scale, spec, sinks)


def _device_slots(metadata: AttentionMetadata, device: torch.device) -> Tensor:
    """Return the target slots on a device, (N,) int64; copied once per step."""
    key = f"slots {device}"
    if key not in metadata.cache:
        metadata.cache[key] = torch.from_numpy(metadata.slots).to(device, non_blocking=True)
    return cast(Tensor, metadata.cache[key])


class CppBackend:
    """Backend with the compiled C++ kernel, which writes and reads in one call."""

    name = "native"

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        self._kernel = native.load_kernel(head_dim, dtype)

    def __call__(
        self,
        metadata: AttentionMetadata,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self._kernel.attend(metadata, query, key, value, keys, values, scale, spec, sinks)


SMALL_BATCH = 16  # maximum query tokens of a small batch


class SizeDispatchBackend:
    """Uses one backend for batches of up to `SMALL_BATCH` tokens, another for larger ones."""

    def __init__(self, small: Backend, large: Backend) -> None:
        self.name = f"{small.name}, {large.name} from {SMALL_BATCH + 1} rows on"
        self._small, self._large = small, large

    def __call__(self, metadata: AttentionMetadata, *args: Any, **kwargs: Any) -> Tensor:
        return (self._small if metadata.num_tokens <= SMALL_BATCH else self._large)(metadata, *args, **kwargs)


def create_backend(name: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Backend, str | None]:
    """Create a backend by name.

    Returns:
        The backend, and why `auto` fell back to SDPA (None if it did not).

    Raises:
        BackendUnavailableError: if a backend requested by name cannot run here.
    """
    if name == "sdpa" and device.type != "cpu":
        return FunctionBackend(name, gathered.attend), None
    if name in ("sdpa", "reference"):
        return FunctionBackend(name, {"sdpa": sdpa, "reference": reference}[name].attend), None
    if name == "flex":
        from . import flex_backend as flex  # imports a compiler, so only on request

        return FunctionBackend(name, flex.attend), None
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        return _create_triton_backend(device), None
    reason = native.unsupported_reason(head_dim, dtype, device)
    if reason is None:
        try:
            return CppBackend(head_dim, dtype), None
        except native.BackendUnavailableError as exc:
            reason = str(exc)
    if name == "native":
        raise native.BackendUnavailableError(reason)
    return FunctionBackend("sdpa", sdpa.attend), reason


def _create_triton_backend(device: torch.device) -> Backend:
    try:
        import triton as compiler

        from . import triton_backend as triton
    except ImportError as exc:
        raise native.BackendUnavailableError(f"Triton is not installed: {exc}") from None
    if device.type != "cuda" and not compiler.knobs.runtime.interpret:
        raise native.BackendUnavailableError(
            f"device {device} is no GPU, and Triton's interpreter (TRITON_INTERPRET=1) is off"
        )
    return FunctionBackend("triton", triton.attend, triton.write)


@dataclass(eq=False)
class ForwardContext:
    """Inputs of the attention layers for one forward pass."""

    metadata: AttentionMetadata  # plan of all layers not in `layer_metadata`
    keys: list[Tensor]  # per layer (S, G, D), the pool's tensors
    values: list[Tensor]  # per layer (S, G, D), the pool's tensors
    specs: Sequence[AttentionSpec]  # per layer
    backend: Backend
    layer_waiters: tuple[Callable[[int], None], ...] = ()  # wait until a layer is loaded; called before it is read
    layer_metadata: Mapping[int, AttentionMetadata] = field(default_factory=dict)  # layers with another context
    saved_hidden: Mapping[int, Tensor] = field(default_factory=dict)  # (S, E) caches of layer inputs
    injected_hidden: Mapping[int, Tensor] = field(default_factory=dict)  # (1, N, E), replace layer inputs

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "1 G N D"],
        value: Float[Tensor, "1 G N D"],
        scale: float,
        sinks: Float[Tensor, "H"] | None = None,
    ) -> Float[Tensor, "1 N H D"]:
        """Wait for the layer's transfers, then write and attend with the backend."""
        for wait_for_layer in self.layer_waiters:
            wait_for_layer(layer)
        metadata = self.layer_metadata.get(layer, self.metadata)
        kv_tensors = self.keys[layer], self.values[layer]
        return self.backend(metadata, query[0], key[0], value[0], *kv_tensors, scale, self.specs[layer], sinks)[None]

    def on_layer_input(self, layer: int, hidden: Float[Tensor, "1 N E"]) -> Float[Tensor, "1 N E"]:
        """Return the layer input to use: the injected one, or `hidden`, saved where required."""
        if layer in self.injected_hidden:
            return self.injected_hidden[layer]
        if layer in self.saved_hidden:
            self.saved_hidden[layer][_device_slots(self.metadata, hidden.device)] = hidden[0]
        return hidden

    def next_step(self) -> "ForwardContext":
        """Return the context of the following decode step; see `AttentionMetadata.next_step`."""
        plans = {id(metadata): metadata for metadata in self.layer_metadata.values()}
        new = {name: metadata.next_step() for name, metadata in plans.items()}
        others = {layer: new[id(metadata)] for layer, metadata in self.layer_metadata.items()}
        return replace(self, metadata=self.metadata.next_step(), layer_metadata=others)

    def pad_to(self, num_tokens: int) -> "ForwardContext":
        """Pad with tokens that write to slot 0 (the null page) and read nothing."""
        if num_tokens == self.metadata.num_tokens:
            return self
        others = {layer: _pad_metadata(metadata, num_tokens) for layer, metadata in self.layer_metadata.items()}
        return replace(self, metadata=_pad_metadata(self.metadata, num_tokens), layer_metadata=others)


def _pad_metadata(metadata: AttentionMetadata, num_tokens: int) -> AttentionMetadata:
    """Pad the plan to `num_tokens` tokens. Cached, so data derived from it is shared."""
    if f"padded {num_tokens}" not in metadata.cache:
        zeros = np.zeros(num_tokens - metadata.num_tokens, dtype=np.int64)
        slots, positions = (np.concatenate([array, zeros]) for array in (metadata.slots, metadata.positions))
        metadata.cache[f"padded {num_tokens}"] = replace(
            metadata, slots=slots, positions=positions, cache={}, num_padding=len(zeros)
        )
    return cast(AttentionMetadata, metadata.cache[f"padded {num_tokens}"])
