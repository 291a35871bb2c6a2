"""Attention backends and the forward context that model layers call.

A `ForwardContext` is passed through an unmodified transformers model as a keyword argument. Each layer
calls `attend`, which writes the keys and values of the batch into their slots before reading: tokens
can therefore attend to tokens of other requests in the same batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..config import BACKENDS
from . import cpp_backend, reference, torch_sdpa
from .int8_rows import StoredRows, encode
from .metadata import AttentionCall, AttentionMetadata, AttentionSpec


@runtime_checkable
class Backend(Protocol):
    """Attention backend: writes a batch's keys and values, then attends.

    Returns the attention output, (N, H, D).
    """

    name: str

    def __call__(self, call: AttentionCall) -> Tensor: ...


def write(
    slots: Int[Tensor, "N"],
    key: Float[Tensor, "G N D"],
    value: Float[Tensor, "G N D"],
    keys: StoredRows,
    values: StoredRows,
) -> None:
    """Write the keys and values of the batch into their slots."""
    key, value = key.transpose(0, 1), value.transpose(0, 1)
    keys[slots], values[slots] = (encode(key), encode(value)) if keys.dtype == torch.int8 else (key, value)


def to_device(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a device without synchronizing."""
    host_tensor = torch.tensor(numbers, dtype=dtype)
    return host_tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host_tensor.to(device)


class FunctionBackend:
    """Backend built from a cache read function and a cache write function."""

    def __init__(self, name: str, read: Callable[[AttentionCall], Tensor], write: Callable[..., None] = write) -> None:
        self.name = name
        self._read, self._write = read, write

    def __call__(self, call: AttentionCall) -> Tensor:
        self._write(_device_slots(call.metadata, call.keys.device), call.key, call.value, call.keys, call.values)
        return self._read(call)


def _device_slots(metadata: AttentionMetadata, device: torch.device) -> Tensor:
    """Return target slots on a device, (N,) int64, copied once per step."""
    key = f"slots {device}"
    if key not in metadata.cache:
        metadata.cache[key] = torch.from_numpy(metadata.slots).to(device, non_blocking=True)
    return cast(Tensor, metadata.cache[key])


def create_backend(
    name: str, head_dim: int, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None = None
) -> tuple[Backend, str | None]:
    """Create a backend by name.

    Args:
        kv_dtype: of stored keys and values, `dtype` or int8; None for `dtype`.

    Returns:
        The backend, and why `auto` fell back to SDPA (None if it did not).

    Raises:
        BackendUnavailableError: if a backend requested by name is unknown or cannot run here.
    """
    if name not in BACKENDS:
        raise cpp_backend.BackendUnavailableError(f"there is no backend {name!r}: use one of {BACKENDS}")
    if name == "reference":
        return FunctionBackend(name, reference.attend), None
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        return _create_triton_backend(device), None
    reason = None
    if name != "sdpa":
        try:
            return cpp_backend.load_kernel(head_dim, dtype, device, kv_dtype), None
        except cpp_backend.BackendUnavailableError as exc:
            if name == "native":
                raise
            reason = str(exc)
    return FunctionBackend("sdpa", torch_sdpa.attend), reason


def _create_triton_backend(device: torch.device) -> Backend:
    try:
        import triton

        from . import triton_backend
    except ImportError as exc:
        raise cpp_backend.BackendUnavailableError(f"Triton is not installed: {exc}") from None
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise cpp_backend.BackendUnavailableError(
            f"device {device} is no GPU, and Triton's interpreter (TRITON_INTERPRET=1) is off"
        )
    return FunctionBackend("triton", triton_backend.attend, triton_backend.write)


class AttentionHook(Protocol):
    """What gets the queries of a request's tokens after each layer."""

    num_layers: int  # layers that it needs; if a batch has no other rows, the rest are not computed

    def __call__(self, layer: int, query: Tensor, position: int, scale: float, sinks: Tensor | None) -> None:
        """Take the queries (H, N, D) of consecutive tokens, whose keys and values are written.

        Args:
            position: of the first token.
            sinks: (H,).
        """


class HookedRows(NamedTuple):
    """Rows of a batch whose queries a hook gets."""

    hook: AttentionHook
    start: int  # first row
    end: int  # exclusive


@dataclass(eq=False)
class ForwardContext:
    """Inputs of the attention layers for one forward pass."""

    metadata: AttentionMetadata  # of all layers not in `layer_metadata`
    keys: list[Tensor]  # per layer, the pool's tensors; see `StoredRows`
    values: list[Tensor]  # likewise
    specs: Sequence[AttentionSpec]  # per layer
    backend: Backend
    layer_waiters: tuple[Callable[[int], None], ...] = ()  # wait until a layer is loaded; called before it is read
    layer_metadata: Mapping[int, AttentionMetadata] = field(default_factory=dict)  # layers with another context
    saved_hidden: Mapping[int, Tensor] = field(default_factory=dict)  # (S, E) caches of layer inputs
    injected_hidden: Mapping[int, Tensor] = field(default_factory=dict)  # (1, N, E), replace layer inputs
    hooked: Sequence["HookedRows"] = ()  # rows whose queries hooks get after each layer

    @property
    def is_aligned(self) -> bool:
        """True if some token reads with an alignment."""
        plans = (self.metadata, *self.layer_metadata.values())
        return any(metadata.alignment_of is not None for metadata in plans)

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
        cache = self.keys[layer], self.values[layer]
        call = AttentionCall(metadata, query[0], key[0], value[0], *cache, scale, self.specs[layer], sinks)
        output = self.backend(call)[None]
        for rows in self.hooked:  # the keys of this step are written
            rows.hook(layer, query[0, :, rows.start : rows.end], self.metadata.positions[rows.start], scale, sinks)
        return output

    def on_layer_input(self, layer: int, hidden: Float[Tensor, "1 N E"]) -> Float[Tensor, "1 N E"]:
        """Return the injected layer input, or `hidden`, saved where required."""
        if layer in self.injected_hidden:
            return self.injected_hidden[layer]
        if layer in self.saved_hidden:
            self.saved_hidden[layer][_device_slots(self.metadata, hidden.device)] = hidden[0]
        return hidden

    def next_step(self) -> "ForwardContext":
        """Return the context of the following decode step; see `AttentionMetadata.next_step`."""
        return self._with_metadata(AttentionMetadata.next_step)

    def pad_to(self, num_tokens: int) -> "ForwardContext":
        """Pad the batch to `num_tokens` tokens; see `AttentionMetadata.pad_to`."""
        if num_tokens == self.metadata.num_tokens:
            return self
        return self._with_metadata(lambda metadata: metadata.pad_to(num_tokens))

    def _with_metadata(self, change: Callable[[AttentionMetadata], AttentionMetadata]) -> "ForwardContext":
        """Return a copy with changed metadata, shared by the same layers."""
        plans = {id(metadata): metadata for metadata in self.layer_metadata.values()}
        changed = {key: change(metadata) for key, metadata in plans.items()}
        layer_metadata = {layer: changed[id(metadata)] for layer, metadata in self.layer_metadata.items()}
        return replace(self, metadata=change(self.metadata), layer_metadata=layer_metadata)
