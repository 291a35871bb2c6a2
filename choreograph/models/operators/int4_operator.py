"""Linear layers with 4-bit weights, with the norm before and the gating or residual behind."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import BFloat16
from torch import Tensor

from ..kernels.int4_linear import PANEL, linear_int4
from .library import PLAIN, SILU, NormOperator, finish


class Int4Operator:
    """Counterpart of `LinearOperator` for `Int4Linear` layers, in bfloat16."""

    def __init__(self, layers: Sequence[Any], norm: NormOperator | None = None, mode: int = PLAIN) -> None:
        self._layers, self._norm, self._mode = layers, norm, mode
        num_outputs = sum(layer.out_features for layer in layers)
        self.features = num_outputs if mode == PLAIN else num_outputs // 2
        self.in_features = layers[0].in_features

    def refresh(self) -> None:
        """Read the address of the norm's weight again; others are read in each call."""
        if self._norm is not None:
            self._norm.refresh()

    def __call__(
        self, x: BFloat16[Tensor, "*n E"], residual: BFloat16[Tensor, "*n F"] | None = None
    ) -> BFloat16[Tensor, "*n F"]:
        """Return the output, added to `residual` if there is one."""
        x = x if self._norm is None else self._norm(x)
        joint, parts = self._layers[0].joint_weight, self._layers
        is_joint = joint is not None and parts[0].weight.data_ptr() == joint.packed.data_ptr()
        if not is_joint or joint.features != sum(part.out_features for part in parts):
            out = torch.cat([linear_int4(x, part.weight, part.bias, part.out_features) for part in parts], -1)
        elif self._mode == SILU and joint.features % (2 * PANEL) == 0:
            return linear_int4(x, joint.packed, joint.bias, self.features, is_gated=True)
        else:
            out = linear_int4(x, joint.packed, joint.bias, joint.features)
        return finish(out, self._mode, residual)
