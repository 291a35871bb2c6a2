"""Linear layers over packed bfloat16 weights, for compiled graphs on CPUs.

A decode step of few tokens is bound by reading weights. oneDNN's products of few rows read them more slowly than
the memory allows (`make bench NAME=linear`), so graphs call a kernel of our own (`packed_linear.cpp`), once per
projection or group of projections with the same input. It uses bfloat16 dot products (AVX-512), or float32 arithmetic
on processors that have AVX2 alone. The weights are packed once per model and shared by all graphs. Since they are
inputs of the graphs and not constants in them, the graphs are cached on disk.
"""

import ctypes
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import BFloat16
from platformdirs import user_cache_path
from torch import Tensor, nn
from torch.nn.functional import pad

from ...attention.cpp_backend import BackendUnavailableError, compile_library, has_avx2
from ..compilation.graph_passes import GATED_OPERATORS, MERGEABLE_OPERATORS, ROW_OPERATORS, forwards_for_tracing
from .fused_projections import FUSABLE, is_fusable

PANEL = 64  # output features that the kernel computes together; as in packed_linear.cpp

CPP_20 = "-std=c++20"

operator_library = torch.library.Library("choreograph", "FRAGMENT")
OPERATOR_ARGUMENTS = "(Tensor input, Tensor packed, Tensor? bias, int features) -> Tensor"  # features: of the output
for _suffix in ("", "_gated"):  # SiLU of the first half of the weight's output features times the second half
    operator_library.define(f"linear{_suffix}{OPERATOR_ARGUMENTS}")


class PackedProjection(NamedTuple):
    """Packed weight of layers with one input; output slice of one."""

    operator: Any  # (input, packed, bias, features) -> output
    packed: nn.Parameter  # panels of 64 output features; here (P, E / 2, 64, 2), with pairs of input features
    bias: nn.Parameter | None  # (F,)
    features: int  # output features of all layers
    start: int  # first output feature of the layer
    end: int  # exclusive

    def __deepcopy__(self, memo: object) -> None:
        """Drop the packed weight: a copied model has its own weights."""


@cache
def load_kernel() -> None:
    """Load the kernel behind `torch.ops.choreograph.linear`; build if missing.

    Raises:
        BackendUnavailableError: without AVX2 instructions or a compiler.
    """
    load_operator("packed_linear.cpp", "linear")


def load_operator(source: str, name: str) -> None:
    """Register the kernel `choreograph_<name>` of a file as an operator.

    Raises:
        BackendUnavailableError: without AVX2 instructions or a compiler.
    """
    if not has_avx2():
        raise BackendUnavailableError("the processor has no AVX2 instructions")
    path, folder = Path(__file__).with_name(source), user_cache_path("choreograph") / "native"
    sources = [path, *(path.with_name(f"packed_{header}.h") for header in ("panels", "operator"))]
    try:
        ctypes.CDLL(str(compile_library(path.stem, sources, _operator_flags(), folder)))
        return  # registered while it was loaded
    except (BackendUnavailableError, OSError):  # another version of PyTorch's headers
        pass
    try:
        kernel = kernel_of(ctypes.CDLL(str(compile_library(path.stem, sources[:2], (CPP_20,), folder))), name)
    except OSError as exc:
        raise BackendUnavailableError(str(exc)) from None
    for suffix in ("", "_gated"):
        operator_library.impl(f"{name}{suffix}", partial(call_packed, kernel, bool(suffix)), "CPU")


def kernel_of(library: ctypes.CDLL, name: str) -> Any:
    """Return the function of a kernel, for `call_packed`."""
    kernel = getattr(library, f"choreograph_{name}")
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    kernel.argtypes = (pointer, number, number, pointer, pointer, pointer, number, number, ctypes.c_bool)
    return kernel


def _operator_flags() -> tuple[str, ...]:
    torch_folder = Path(torch.__file__).parent
    headers, libraries = torch_folder / "include", torch_folder / "lib"
    # PyTorch's library is loaded already, and only named here
    return (CPP_20, "-DWITH_OPERATOR", f"-I{headers}", f"-L{libraries}", "-Wl,--no-as-needed", "-ltorch_cpu")


def pack(weight: BFloat16[Tensor, "F E"]) -> BFloat16[Tensor, "P half 64 2"]:
    """Arrange a weight in panels; the last one is padded."""
    features, width = weight.shape
    if features % PANEL:
        weight = pad(weight, (0, 0, 0, -features % PANEL))
    if not weight.is_contiguous() or weight.storage_offset() % 2:
        weight = weight.clone(memory_format=torch.contiguous_format)
    pairs = weight.view(torch.int32).view(-1, PANEL, width // 2)  # faster to copy than single elements
    return pairs.transpose(1, 2).contiguous().view(weight.dtype).view(-1, width // 2, PANEL, 2)


def call_packed(
    kernel: Any, is_gated: bool, input: Tensor, packed: Tensor, bias: Tensor | None, features: int
) -> Tensor:
    """Run a kernel over packed weights from Python."""
    input = input.contiguous()
    width = input.shape[-1]
    out = input.new_empty((*input.shape[:-1], features))
    kernel(
        *(input.data_ptr(), input.numel() // width, width, packed.data_ptr()),
        *(None if bias is None else bias.data_ptr(), out.data_ptr(), features, torch.get_num_threads(), is_gated),
    )
    return out


def packed_output(input: Tensor, packed: Tensor, bias: Tensor | None, features: int) -> Tensor:
    """Return an output of the right shape, for tracing."""
    return input.new_empty((*input.shape[:-1], features))


def gated_product(name: str, input: Any, packed: Any, bias: Any, features: int) -> tuple[Any, tuple[Any, ...]] | None:
    """Return a gated product's operator and arguments.

    None if its factors do not end with panels.
    """
    if features % (2 * PANEL):
        return None
    return getattr(torch.ops.choreograph, f"{name}_gated").default, (input, packed, bias, features // 2)


def register_packed(name: str) -> None:
    """Let graphs trace and merge a product and a gated one."""
    for suffix in ("", "_gated"):
        torch.library.register_fake(f"choreograph::{name}{suffix}", packed_output, lib=operator_library)
        ROW_OPERATORS.add(getattr(torch.ops.choreograph, f"{name}{suffix}").default)
    product = getattr(torch.ops.choreograph, name).default
    MERGEABLE_OPERATORS.add(product)
    GATED_OPERATORS[product] = lambda *args: gated_product(name, *args)


register_packed("linear")


def pack_model(model: nn.Module) -> list[nn.Linear]:
    """Pack the weights of all supported linear layers; return the layers.

    Layers of other types, such as quantized ones, and layers with an odd number of input features are left out.
    Nothing is packed if they hold less than half of the weights: a frozen graph is faster then.
    """
    groups: list[tuple[Any, ...]] = []
    for module in model.modules():
        for names in FUSABLE:
            group = tuple(getattr(module, name, None) for name in names)
            if is_fusable(group):
                groups.append(group)
    grouped = {part for group in groups for part in group}
    groups += [(module,) for module in model.modules() if type(module) is nn.Linear and module not in grouped]
    groups = [group for group in groups if all(is_packable(part) for part in group)]
    num_packable = sum(part.weight.numel() for group in groups for part in group)
    if 2 * num_packable < sum(parameter.numel() for parameter in model.parameters()):
        return []
    for group in groups:
        _pack_group(group)
    return [part for group in groups for part in group]


def is_packable(layer: nn.Linear) -> bool:
    """Check for plain bfloat16 weights in the processor's memory."""
    parameters = [parameter for parameter in (layer.weight, layer.bias) if parameter is not None]
    return layer.in_features % 2 == 0 and all(
        type(parameter) is nn.Parameter
        and type(parameter.data) is Tensor
        and parameter.dtype is torch.bfloat16
        and parameter.device.type == "cpu"
        for parameter in parameters
    )


@torch.inference_mode(False)
@torch.no_grad()
def _pack_group(group: tuple[nn.Linear, ...]) -> None:
    # parameters, because the compiler takes only the shapes of parameters as static
    weights = [part.weight.detach() for part in group]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    biases = [part.bias.detach() for part in group if part.bias is not None]
    packed = nn.Parameter(pack(weight), requires_grad=False)
    bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
    operator, start = torch.ops.choreograph.linear, 0
    for part in group:
        end = start + part.out_features
        vars(part)["packed_projection"] = PackedProjection(operator, packed, bias, len(weight), start, end)
        start = end  # no registered parameter: `state_dict()` is unchanged


def packed_for_tracing(layers: list[nn.Linear]) -> AbstractContextManager[None]:
    """Trace each layer as a call of the kernel inside the block."""
    return forwards_for_tracing([(layer, _packed_forward) for layer in layers])


def _packed_forward(layer: Any, input: Tensor) -> Tensor:
    packed: PackedProjection = layer.packed_projection
    out: Tensor = packed.operator(input, packed.packed, packed.bias, packed.features)
    return out if packed.end - packed.start == packed.features else out[..., packed.start : packed.end]
