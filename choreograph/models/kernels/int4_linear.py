"""Linear layers with 4-bit weights, for decode steps that read less.

Each group of 32 weights has a float16 scale and minimum, as in the Q4_1 format of GGUF files, so weights that were read
from such a file keep their values but for rounding. On processors with AVX2, a kernel of our own (`int4_linear.cpp`)
multiplies bfloat16 activations by the packed weights; elsewhere and in other dtypes, weights are dequantized for every
product, which is slow.
"""

from collections.abc import Container
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Float16, UInt8
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from ...attention.cpp_backend import BackendUnavailableError
from .fused_projections import FUSABLE, is_fusable
from .packed_linear import OPERATOR_ARGUMENTS, PANEL, PackedProjection, load_operator, operator_library, register_packed

GROUP_SIZE = 32  # weights that share a scale and a minimum
_VALUE_BYTES = PANEL * GROUP_SIZE // 2  # of a group of each feature of a panel
_GROUP_BYTES = _VALUE_BYTES + 2 * 2 * PANEL  # with scales and minimums

for _suffix in ("", "_gated"):
    operator_library.define(f"linear_int4{_suffix}{OPERATOR_ARGUMENTS}")
register_packed("linear_int4")


@cache
def is_kernel_available() -> bool:
    """Load the kernel behind `torch.ops.choreograph.linear_int4`; build if missing."""
    try:
        load_operator("int4_linear.cpp", "linear_int4")
    except BackendUnavailableError:
        return False
    return True


def quantize(
    weight: Float[Tensor, "F E"],
) -> tuple[UInt8[Tensor, "F G 32"], Float16[Tensor, "F G"], Float16[Tensor, "F G"]]:
    """Round groups of weights to 16 equidistant values, minimum to maximum.

    Returns:
        Values from 0 to 15, scales and minimums; a weight is about scale * value + minimum.
    """
    groups = weight.float().unflatten(1, (-1, GROUP_SIZE))
    minimum, maximum = groups.aminmax(dim=-1)
    minimums = minimum.half()
    scales = ((maximum - minimums.float()) / 15).half()
    steps = torch.where(scales == 0, 1, scales.float())[..., None]
    values = ((groups - minimums.float()[..., None]) / steps).round().clamp(0, 15)
    return values.to(torch.uint8), scales, minimums


def pack(
    values: UInt8[Tensor, "F G 32"], scales: Float16[Tensor, "F G"], minimums: Float16[Tensor, "F G"]
) -> UInt8[Tensor, "P G bytes"]:
    """Arrange a quantized weight in panels, as int4_linear.cpp describes."""
    missing = -len(values) % PANEL
    parts = [
        pad(part, (0, 0, 0, missing)).view(-1, PANEL, part.shape[1]).mT.contiguous().view(torch.uint8)
        for part in (scales, minimums)
    ]
    # (panel, 16 features, feature, group, four pairs, pair, half), of which pairs share a word
    nibbles = pad(values, (0, 0, 0, 0, 0, missing)).view(-1, PANEL // 16, 16, values.shape[1], GROUP_SIZE // 8, 4, 2)
    shifts = torch.arange(0, 16, 4, device=values.device)[:, None]
    words = (nibbles.int() << shifts).sum(-2, dtype=torch.int32).to(torch.uint16).permute(0, 3, 1, 4, 2, 5)
    return torch.cat([*parts, words.contiguous().view(torch.uint8).flatten(2)], -1)


def dequantize(packed: UInt8[Tensor, "P G bytes"], features: int) -> Float[Tensor, "F E"]:
    """Return the float32 weight of a packed one."""
    panels, groups, _ = packed.shape
    scales, minimums = (
        part.contiguous().view(torch.float16).mT.reshape(-1, groups, 1).float()
        for part in packed[..., :-_VALUE_BYTES].chunk(2, -1)
    )
    words = packed[..., -_VALUE_BYTES:].contiguous().view(torch.uint16).int()
    words = words.view(panels, groups, PANEL // 16, GROUP_SIZE // 8, 1, 16, 2)
    shifts = torch.arange(0, 16, 4, device=packed.device)[:, None, None]
    values = ((words >> shifts) & 15).permute(0, 2, 5, 1, 3, 4, 6).reshape(-1, groups, GROUP_SIZE)
    return (scales * values + minimums).flatten(1)[:features]


def linear_dequantized(input: Tensor, packed: Tensor, bias: Tensor | None, features: int) -> Tensor:
    """Multiply by the dequantized weight: the kernel's reference and substitute."""
    return linear(input, dequantize(packed, features).to(input.dtype), bias)


class Int4Linear(nn.Linear):
    """Linear layer with a packed 4-bit weight."""

    packed_projection: PackedProjection  # the group's weight, for graphs

    def __init__(self, layer: nn.Linear, weight: UInt8[Tensor, "P G bytes"]) -> None:
        """Take the shape and bias of `layer`; its packed weight is given."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """Multiply by this layer's weight."""
        out: Tensor = self.packed_projection.operator(input, self.weight, self.bias, self.out_features)
        return out


def quantize_layers(model: nn.Module, layers: Container[nn.Module]) -> None:
    """Replace linear layers, whose input features are multiples of 32.

    Projections with one input share a packed weight that graphs multiply by once.
    """
    for module in list(model.modules()):
        children: dict[str, Any] = {name: child for name, child in module.named_children() if child in layers}
        groups = [names for names in FUSABLE if is_fusable([children.get(name) for name in names])]
        grouped = {name for names in groups for name in names}
        for names in (*groups, *((name,) for name in children if name not in grouped)):
            for name, layer in zip(names, _quantize_group([children[name] for name in names]), strict=True):
                setattr(module, name, layer)


@torch.inference_mode(False)
@torch.no_grad()
def _quantize_group(parts: list[nn.Linear]) -> list[Int4Linear]:
    """Quantize layers with one input.

    Their packed weights are views of one tensor if panels end with layers.
    """
    features = [part.out_features for part in parts]
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    if any(count % PANEL for count in features[:-1]):
        return [layer for part in parts for layer in _quantize_group([part])]
    packed = [pack(*quantize(part.weight.detach())) for part in parts]
    weight = nn.Parameter(torch.cat(packed), requires_grad=False)
    bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
    layers = [Int4Linear(part, view) for part, view in zip(parts, weight.split([len(p) for p in packed]), strict=True)]
    has_kernel = parts[0].weight.dtype is torch.bfloat16 and parts[0].weight.is_cpu and is_kernel_available()
    operator = torch.ops.choreograph.linear_int4 if has_kernel else linear_dequantized
    total = sum(features)
    for layer, end in zip(layers, accumulate(features), strict=True):
        projection = PackedProjection(operator, weight, bias, total, end - layer.out_features, end)
        vars(layer)["packed_projection"] = projection  # no registered parameter: `state_dict()` has each weight once
    return layers
