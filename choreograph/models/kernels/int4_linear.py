"""Linear layers with 4-bit weights, for decode steps that read less.

Each group of 32 weights has a float16 scale and minimum, as in the Q4_1 format of GGUF files, so weights that were read
from such a file keep their values but for rounding. On processors with AVX2, a kernel of our own (`int4_linear.cpp`)
multiplies bfloat16 activations by the packed weights; elsewhere and in other dtypes, weights are dequantized for every
product, which is slow.
"""

import ctypes
from collections.abc import Container, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import BFloat16, Float, Float16, UInt8
from platformdirs import user_cache_path
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from ...attention import cpp_backend
from ...attention.cpp_backend import BackendUnavailableError, compile_library, has_avx2
from .fused_projections import FUSABLE, is_fusable

GROUP_SIZE = 32  # weights that share a scale and a minimum
PANEL = 64  # output features that the kernel computes together; as in packed_panels.h
_VALUE_BYTES = PANEL * GROUP_SIZE // 2  # of a group of each feature of a panel
_GROUP_BYTES = _VALUE_BYTES + 2 * 2 * PANEL  # with scales and minimums


@cache
def is_kernel_available() -> bool:
    """Whether the kernel can be built, or is, and runs here."""
    try:
        load_kernel()
    except BackendUnavailableError:
        return False
    return True


@cache
def load_kernel(folder: Path | None = None, *extra_flags: str) -> Any:
    """Return the kernel's function; build it in `folder` if missing.

    Args:
        folder: defaults to the user's cache.
        extra_flags: of the compiler.

    Raises:
        BackendUnavailableError: without AVX2 instructions or a compiler.
    """
    if not has_avx2():
        raise BackendUnavailableError("the processor has no AVX2 instructions")
    attention = Path(cpp_backend.__file__).parent
    own = [Path(__file__).with_name(name) for name in ("int4_linear.cpp", "packed_panels.h")]
    sources = [*own, attention / "cpp_amx.h", attention / "cpp_vector.h"]
    flags = ("-std=c++20", f"-I{attention}", *extra_flags)
    folder = folder or user_cache_path("choreograph") / "native"
    try:
        library = ctypes.CDLL(str(compile_library("int4_linear", sources, flags, folder)))
    except OSError as exc:
        raise BackendUnavailableError(str(exc)) from None
    kernel = library.choreograph_linear_int4
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    kernel.argtypes = (pointer, number, number, pointer, pointer, pointer, number, number, ctypes.c_bool)
    kernel.restype = None
    return kernel


def linear_int4(
    input: BFloat16[Tensor, "*n E"],
    packed: UInt8[Tensor, "P G bytes"],
    bias: BFloat16[Tensor, "F"] | None,
    features: int,
    *,
    is_gated: bool = False,
    kernel: Any = None,
) -> BFloat16[Tensor, "*n out"]:
    """Multiply by a packed weight with the kernel.

    Args:
        features: output features, of the result.
        is_gated: the result is SiLU of the first half of the product times the second; `features`, half of the
            weight's, are a multiple of 64.
        kernel: defaults to that of this processor.
    """
    input = input.contiguous()
    width = input.shape[-1]
    out = input.new_empty((*input.shape[:-1], features))
    (kernel or load_kernel())(
        *(input.data_ptr(), input.numel() // width, width, packed.data_ptr()),
        *(None if bias is None else bias.data_ptr(), out.data_ptr(), features, torch.get_num_threads(), is_gated),
    )
    return out


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


class JointWeight(NamedTuple):
    """Packed weight of all projections with one input, one after the other."""

    packed: Tensor  # (P, G, bytes)
    bias: Tensor | None  # (F,)
    features: int  # F, output features of all projections

    def __deepcopy__(self, memo: object) -> None:
        """Drop the joint weight: a copied model has its own weights."""


class Int4Linear(nn.Linear):
    """Linear layer with a packed 4-bit weight."""

    joint_weight: JointWeight | None  # of which `weight` is a view; one object for all projections of a group

    def __init__(self, layer: nn.Linear, weight: UInt8[Tensor, "P G bytes"], joint_weight: JointWeight) -> None:
        """Take the shape and bias of `layer`; its packed weight is given."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = layer.bias
        self.joint_weight = joint_weight

    def forward(self, input: Tensor) -> Tensor:
        """Multiply by this layer's weight; gradients need it dequantized."""
        is_plain = input.dtype is torch.bfloat16 and input.is_cpu and not input.requires_grad
        has_kernel = is_plain and is_kernel_available()
        return (linear_int4 if has_kernel else linear_dequantized)(input, self.weight, self.bias, self.out_features)


def quantize_layers(model: nn.Module, layers: Container[nn.Module]) -> None:
    """Replace linear layers, whose input features are multiples of 32.

    Weights of projections with one input follow one another in memory, so that one product can compute them all.
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
def _quantize_group(parts: Sequence[nn.Linear]) -> list[Int4Linear]:
    """Quantize layers with one input.

    Their packed weights are views of one tensor if panels end with layers.
    """
    features = [part.out_features for part in parts]
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    if any(count % PANEL for count in features[:-1]):
        return [layer for part in parts for layer in _quantize_group([part])]
    packed = [pack(*quantize(part.weight.detach())) for part in parts]
    joint_weight = JointWeight(torch.cat(packed), torch.cat(biases) if biases else None, sum(features))
    weights = joint_weight.packed.split([len(part) for part in packed])
    if joint_weight.bias is not None:
        for part, bias in zip(parts, joint_weight.bias.split(features), strict=True):
            part.bias.data = bias
    return [Int4Linear(part, weight, joint_weight) for part, weight in zip(parts, weights, strict=True)]
