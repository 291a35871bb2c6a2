"""All decoder layers of a step in one call of the library."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...attention.backend import ForwardContext
from ...attention.cpp_backend import CppBackend, metadata_address
from .decoder_layer import LayerOperators
from .library import LayerStep

MAX_ROWS = 256  # tokens up to which the time between calls shows; the library keeps memory for as many


class LayerStack:
    """Forward pass of all decoder layers, called in place of each of them in turn.

    Calls before the last one return their input. The last one computes all layers.
    """

    def __init__(self, modules: Sequence[nn.Module], layers: Sequence[LayerOperators]) -> None:
        self._modules, self._layers = modules, layers
        self._steps = (LayerStep * len(layers))()
        for layer_step, layer in zip(self._steps, layers, strict=True):
            layer_step.layer = layer.address
        self._is_uniform = [layer.layer_index for layer in layers] == [*range(len(layers))]
        self._is_uniform &= len({layer.head_shape for layer in layers}) == 1
        self._rotations: list[tuple[Tensor, Tensor]] = []  # of the layers that were called

    def start(self, step: Any, num_rows: int, captured: frozenset[int]) -> bool:
        """Prepare for a step; return False if layers must be computed one by one.

        Args:
            captured: layers with a hook of their own for `step`.
        """
        if (
            not self._is_uniform
            or num_rows > min(MAX_ROWS, *(layer.max_rows for layer in self._layers))
            or type(step) is not ForwardContext
            or type(step.backend) is not CppBackend
            or any((step.layer_waiters, step.saved_hidden, step.injected_hidden, step.hooked))
            or step.is_aligned
        ):
            return False
        for index, module in enumerate(self._modules):
            if module._forward_hooks or len(module._forward_pre_hooks) > (1 if index in captured else 0):
                return False
        self._rotations.clear()
        return True

    def __call__(
        self, hidden_states: Float[Tensor, "1 N E"], *, position_embeddings: tuple[Tensor, Tensor], step: Any, **_: Any
    ) -> Float[Tensor, "1 N E"]:
        """Take the rotary tables of the next layer; compute all layers if it is the last one."""
        self._rotations.append(position_embeddings)
        if len(self._rotations) < len(self._layers):
            return hidden_states
        tables = {id(pair): tuple(part.contiguous() for part in pair) for pair in self._rotations}
        heads, kv_heads, head_dim = self._layers[0].head_shape
        step.backend.check(head_dim, hidden_states.dtype, step.keys[0])
        for index, (layer_step, pair) in enumerate(zip(self._steps, self._rotations, strict=True)):
            cos, sin = tables[id(pair)]
            layer_step.cos, layer_step.sin, layer_step.rotated = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
            metadata = step.layer_metadata.get(index, step.metadata)
            layer_step.plan = metadata_address(metadata, step.specs[index], heads, kv_heads)
            layer_step.keys, layer_step.values = step.keys[index].data_ptr(), step.values[index].data_ptr()
        out, kernels = hidden_states.clone(memory_format=torch.contiguous_format), self._layers[0].kernels
        address, threads = ctypes.addressof(self._steps), torch.get_num_threads()
        kernels.layers(address, len(self._layers), step.backend.address, out.data_ptr(), out.shape[1], threads)
        return out
