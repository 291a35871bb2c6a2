"""C++ operators of decoder layers, compiled on demand, and their Python signatures."""

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from platformdirs import user_cache_path
from torch import Tensor, nn
from torch.nn.functional import linear

from ...attention import cpp_backend
from ...attention.cpp_backend import BackendUnavailableError, compile_library

DTYPES = {torch.float32: "float", torch.bfloat16: "bf16"}
# Tokens up to which kernels of our own are faster than PyTorch's in float32.
MAX_OWN_ROWS = 64
PLAIN, SILU, GELU = range(3)  # what a linear operator does behind the product; as in operators.cpp

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {  # as in operators.cpp
    "linear": (_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG),
    "norm": (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG),
    "gate": (_LONG, _POINTER, _LONG, _LONG, _POINTER, _LONG),
    "rotate": (_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG),
    "before_attention": (_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _LONG),
    "after_attention": (_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _LONG),
    "layers": (_POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG),
}


class _Part(ctypes.Structure):
    """Weight and bias of a linear layer (C++ `Part`)."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("features", _LONG))


class _Norm(ctypes.Structure):
    """RMS norm (C++ `Norm`)."""

    _fields_ = (("weight", _POINTER), ("eps", ctypes.c_float), ("adds_one", ctypes.c_int32))


class _Linear(ctypes.Structure):
    """Linear layers with one input (C++ `Linear`)."""

    _fields_ = (
        *(("parts", _POINTER), ("count", _LONG), ("norm", _POINTER)),
        *((name, _LONG) for name in ("mode", "in_features", "features")),
        ("int4", _POINTER),
    )


class Layer(ctypes.Structure):
    """Decoder layer (C++ `Layer`): addresses of its operators, numbers of heads, their size, scale of scores."""

    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "output", "gated", "down")),
        *((name, _POINTER) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, _LONG) for name in ("heads", "kv_heads", "head_dim")),
        ("scale", ctypes.c_float),
    )


class LayerStep(ctypes.Structure):
    """Inputs of a layer in one step (C++ `LayerStep`)."""

    _fields_ = (
        *((name, _POINTER) for name in ("layer", "cos", "sin")),
        ("rotated", _LONG),
        *((name, _POINTER) for name in ("plan", "keys", "values")),
    )


class Kernels(NamedTuple):
    """Functions of the library for one dtype."""

    linear: Any
    norm: Any
    gate: Any
    rotate: Any
    before_attention: Any
    after_attention: Any
    layers: Any


@cache
def load_kernels(dtype: torch.dtype) -> Kernels:
    """Load the operators of a dtype; build the library if missing.

    Raises:
        BackendUnavailableError: if the dtype is not supported, or the library cannot be built or loaded.
    """
    if dtype not in DTYPES:
        raise BackendUnavailableError(f"type {dtype} is not float32 or bfloat16")
    try:
        return kernels_of(build(user_cache_path("choreograph") / "native"), dtype)
    except OSError as exc:
        raise BackendUnavailableError(str(exc)) from None


def build(folder: Path, *extra_flags: str) -> Path:
    """Compile the library into `folder`, if missing; return its path."""
    attention = Path(cpp_backend.__file__).parent
    own = [Path(__file__).with_name(name) for name in ("operators.cpp", "amx_products.h", "packed_products.h")]
    sources = [*own, attention / "cpp_amx.h", attention / "cpp_vector.h"]
    return compile_library("operators", sources, (f"-I{attention}", *extra_flags), folder)


def kernels_of(path: Path, dtype: torch.dtype) -> Kernels:
    """Return the functions of a library for one dtype."""
    library, functions = ctypes.CDLL(str(path)), []
    for name, argtypes in _ARGUMENTS.items():
        function = library[f"choreograph_{name}_{DTYPES[dtype]}"]
        function.argtypes, function.restype = argtypes, None
        functions.append(function)
    return Kernels(*functions)


class NormOperator:
    """RMS norm of the last dimension.

    Args:
        adds_one: factors are 1 + weight, as in Gemma's norms.
    """

    def __init__(self, module: nn.Module, eps: float, adds_one: bool) -> None:
        self._module = module
        self._struct = _Norm(None, eps, adds_one)
        self.address = ctypes.addressof(self._struct)
        weight: Any = module.weight
        self.kernels = load_kernels(weight.dtype)
        self.refresh()

    def refresh(self) -> None:
        """Read the addresses of the parameters again."""
        weight = self._module._parameters["weight"]
        assert weight is not None
        self._struct.weight = weight.data_ptr()

    def __call__(self, x: Float[Tensor, "*n E"], residual: Float[Tensor, "*n E"] | None = None) -> Tensor:
        """Return the norm of x, added to `residual` if there is one."""
        x, width = x.contiguous(), x.shape[-1]
        residual = None if residual is None else residual.contiguous()
        out = torch.empty_like(x)
        residual_ptr = None if residual is None else residual.data_ptr()
        rows = x.numel() // width
        self.kernels.norm(
            self.address, x.data_ptr(), rows, width, residual_ptr, out.data_ptr(), torch.get_num_threads()
        )
        return out


class LinearOperator:
    """Linear layers with one input, with the norm before and the gating or residual behind.

    Args:
        layers: their outputs are concatenated, or combined as `mode` says.
        norm: of the input.
        mode: PLAIN; SILU and GELU apply the activation to the first half of the output features, and multiply it by the
            second half.

    `max_rows` is the number of rows up to which the kernel computes the product; beyond, PyTorch does.
    """

    max_rows: float

    def __init__(self, layers: Sequence[nn.Linear], norm: NormOperator | None = None, mode: int = PLAIN) -> None:
        self._layers: Sequence[Any] = layers
        self._norm, self._mode = norm, mode
        features = [layer.out_features for layer in layers]
        if mode != PLAIN and len(features) == 1:  # a joint projection
            features = [features[0] // 2] * 2
        self.features = sum(features) if mode == PLAIN else features[0]  # of the output
        self.in_features = layers[0].in_features
        self._parts = (_Part * len(features))(*(_Part(None, None, count) for count in features))
        norm_address = None if norm is None else norm.address
        self._struct = _Linear(
            ctypes.addressof(self._parts), len(features), norm_address, mode, self.in_features, self.features, None
        )
        self.address = ctypes.addressof(self._struct)
        self._init_kernels()
        self.refresh()

    def _init_kernels(self) -> None:
        dtype = self._layers[0].weight.dtype
        self._kernels, self.max_rows = load_kernels(dtype), MAX_OWN_ROWS if dtype == torch.float32 else math.inf

    def refresh(self) -> None:
        """Read the addresses of the parameters again."""
        weights = [layer._parameters["weight"] for layer in self._layers]
        biases = [layer._parameters["bias"] for layer in self._layers]
        for part, weight, bias in zip(self._parts, weights, biases, strict=False):
            assert weight is not None
            part.weight, part.bias = weight.data_ptr(), None if bias is None else bias.data_ptr()
        if len(self._parts) > len(weights):
            first, second = self._parts
            assert weights[0] is not None
            size = weights[0].element_size() * first.features
            second.weight = first.weight + size * self.in_features
            second.bias = None if first.bias is None else first.bias + size
        if self._norm is not None:
            self._norm.refresh()

    def __call__(
        self, x: Float[Tensor, "*n E"], residual: Float[Tensor, "*n F"] | None = None
    ) -> Float[Tensor, "*n F"]:
        """Return the output, added to `residual` if there is one."""
        x = x.contiguous()
        rows = x.numel() // self.in_features
        if rows > self.max_rows:
            x = x if self._norm is None else self._norm(x)
            return finish(self._multiply(x), self._mode, residual)
        residual = None if residual is None else residual.contiguous()
        out = x.new_empty(*x.shape[:-1], self.features)
        residual_ptr = None if residual is None else residual.data_ptr()
        self._kernels.linear(self.address, x.data_ptr(), rows, residual_ptr, out.data_ptr(), torch.get_num_threads())
        return out

    def _multiply(self, x: Tensor) -> Tensor:
        """Return the outputs of all layers, as PyTorch computes them."""
        parts = [linear(x, layer.weight, layer.bias) for layer in self._layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def finish(out: Float[Tensor, "*n P"], mode: int, residual: Float[Tensor, "*n F"] | None) -> Float[Tensor, "*n F"]:
    """Apply what follows a product: gating, or the addition of a residual in place."""
    if mode != PLAIN:
        return gate(out, mode)
    return out if residual is None else out.add_(residual)


def gate(x: Float[Tensor, "*n 2F"], mode: int) -> Float[Tensor, "*n F"]:
    """Multiply the activation of the first half of the features by the second half."""
    x, width = x.contiguous(), x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    num_rows = out.numel() // width
    load_kernels(x.dtype).gate(mode, x.data_ptr(), num_rows, width, out.data_ptr(), torch.get_num_threads())
    return out
