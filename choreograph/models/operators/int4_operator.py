"""Linear layers with 4-bit weights, with the norm before and the gating or residual behind."""

import ctypes
import math

import torch
from torch import Tensor

from ..kernels.int4_linear import PANEL, JointWeight, linear_int4, load_kernel
from .library import LinearOperator, load_kernels


class Int4Operator(LinearOperator):
    """`LinearOperator` of `Int4Linear` layers, in bfloat16."""

    def _init_kernels(self) -> None:
        self._kernels = load_kernels(torch.bfloat16)
        self._struct.int4 = ctypes.cast(load_kernel(), ctypes.c_void_p)

    def refresh(self) -> None:
        """Read the addresses of the parameters again."""
        if self._norm is not None:
            self._norm.refresh()
        joint, features = self._layers[0].joint_weight, sum(layer.out_features for layer in self._layers)
        self.max_rows = 0
        if joint is not None and joint.features == features and self._is_part_of(joint):
            part, self.max_rows = self._parts[0], math.inf  # one product computes all layers
            part.weight, part.features = joint.packed.data_ptr(), joint.features
            part.bias = None if joint.bias is None else joint.bias.data_ptr()

    def _is_part_of(self, joint: JointWeight) -> bool:
        """Return whether weights and biases are where the joint weight has them."""
        first, start = joint.packed.data_ptr(), 0
        for layer in self._layers:
            is_moved = layer.weight.data_ptr() != first + start // PANEL * joint.packed[0].nbytes
            if joint.bias is not None:
                is_moved |= layer.bias.data_ptr() != joint.bias[start:].data_ptr()
            if is_moved:
                return False
            start += layer.out_features
        return True

    def _multiply(self, x: Tensor) -> Tensor:
        """Return the outputs of all layers, each by a product of its own."""
        parts = [linear_int4(x, part.weight, part.bias, part.out_features) for part in self._layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
