"""Linear layers with 4-bit weights, with the norm before and the gating or residual behind."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import BFloat16
from torch import Tensor

from ..kernels.int4_linear import PANEL, JointWeight, linear_int4
from .library import PLAIN, SILU, NormOperator, finish


class Int4Operator:
    """Counterpart of `LinearOperator` for `Int4Linear` layers, in bfloat16."""

    def __init__(self, layers: Sequence[Any], norm: NormOperator | None = None, mode: int = PLAIN) -> None:
        self._layers, self._norm, self._mode = layers, norm, mode
        num_outputs = sum(layer.out_features for layer in layers)
        self.features = num_outputs if mode == PLAIN else num_outputs // 2
        self.in_features = layers[0].in_features
        self.refresh()

    def refresh(self) -> None:
        """Find out again whether one product with all weights computes all layers, and read the norm's address."""
        if self._norm is not None:
            self._norm.refresh()
        joint, features = self._layers[0].joint_weight, sum(layer.out_features for layer in self._layers)
        self._joint = joint if joint is not None and joint.features == features and self._is_part_of(joint) else None

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

    def __call__(
        self, x: BFloat16[Tensor, "*n E"], residual: BFloat16[Tensor, "*n F"] | None = None
    ) -> BFloat16[Tensor, "*n F"]:
        """Return the output, added to `residual` if there is one."""
        x, joint = x if self._norm is None else self._norm(x), self._joint
        if joint is None:
            out = torch.cat([linear_int4(x, part.weight, part.bias, part.out_features) for part in self._layers], -1)
        elif self._mode == SILU and joint.features % (2 * PANEL) == 0:
            return linear_int4(x, joint.packed, joint.bias, self.features, is_gated=True)
        else:
            out = linear_int4(x, joint.packed, joint.bias, joint.features)
        return finish(out, self._mode, residual)
