"""Linear layers of small steps on a GPU: one kernel with norm, activation and residual.

A step of few tokens is bound by reading weights, and in every kernel between two products the memory idles. In
graphs of few rows, the RMS norm before a product, the gating after it and the residual are computed by the product's
kernel: an RMS norm divides a row by one number, which commutes with the product.

While a model is traced, its linear layers, norms and SiLU activations are operators of this module;
`fuse_operators` then merges them where the graph's data flow allows it.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from .fused_projections import FusedWeight, FusionGroup, fused_for_tracing
from .graph_passes import MERGEABLE_OPERATORS

MAX_FEW_ROWS = 16  # rows of the kernel's tile

Tiling = tuple[int, int, int, int]  # output features, input features, warps, stages

_ATEN, _OWN = torch.ops.aten, torch.ops.choreograph
_library = torch.library.Library("choreograph", "FRAGMENT")
_library.define(
    "few_row_linear(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, Tensor? norm_weight, float eps)"
    " -> Tensor"
)
_library.define("few_row_gated(Tensor input, Tensor weight, Tensor? bias, Tensor? norm_weight, float eps) -> Tensor")
_library.define("rms_norm(Tensor input, Tensor weight, float eps) -> Tensor")
_library.define("silu(Tensor input) -> Tensor")


@triton.jit
def linear_kernel(
    input, weight, bias, residual, norm_weight, out, num_rows, num_outputs, eps,
    K: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows with COLS rows of the weight.

    GATED: the weight has the gate's rows first, then those of the other factor.
    """
    n = tl.program_id(0) * COLS + tl.arange(0, COLS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    row_mask, col_mask = m < num_rows, n < num_outputs
    weight_rows = weight + n.to(tl.int64)[:, None] * K
    input_rows = input + m[:, None] * K
    acc = tl.zeros([ROWS, COLS], tl.float32)
    if GATED:
        other_rows = weight_rows + num_outputs.to(tl.int64) * K
        other = tl.zeros([ROWS, COLS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, K, DEPTH):
        depth = start + k
        if K % DEPTH == 0:
            x_mask, w_mask = row_mask[:, None], col_mask[:, None]
        else:
            x_mask, w_mask = row_mask[:, None] & (depth < K)[None, :], col_mask[:, None] & (depth < K)[None, :]
        x = tl.load(input_rows + depth[None, :], mask=x_mask, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            factor = tl.load(norm_weight + depth, mask=depth < K, other=0.0).to(tl.float32)
            x = (wide * factor[None, :]).to(x.dtype)
        w = tl.load(weight_rows + depth[None, :], mask=w_mask, other=0.0, eviction_policy="evict_first")
        acc += tl.dot(x, tl.trans(w))
        if GATED:
            w = tl.load(other_rows + depth[None, :], mask=w_mask, other=0.0, eviction_policy="evict_first")
            other += tl.dot(x, tl.trans(w))
    if NORM:
        scale = tl.rsqrt(squares / K + eps)[:, None]
        acc *= scale
        if GATED:
            other *= scale
    if BIAS:
        acc += tl.load(bias + n, mask=col_mask, other=0.0).to(tl.float32)[None, :]
        if GATED:
            other += tl.load(bias + num_outputs + n, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * other
    place, mask = m[:, None] * num_outputs + n[None, :], row_mask[:, None] & col_mask[None, :]
    if RESIDUAL:
        acc += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


def tiling(num_outputs: int, gated: bool) -> Tiling:
    """Return the tile of the kernel by the number of output features."""
    if gated:
        return 32, 128, 4, 4
    return (64, 128, 4, 4) if num_outputs >= 32768 else (32, 256, 4, 4)


def launch(
    input: Float[Tensor, "*n K"],
    weight: Float[Tensor, "F K"],
    bias: Float[Tensor, "F"] | None,
    residual: Float[Tensor, "*n out"] | None,
    norm_weight: Float[Tensor, "K"] | None,
    eps: float,
    gated: bool,
) -> Float[Tensor, "*n out"]:
    """Launch the kernel. If `gated`, the output has half of the weight's features."""
    input, width = input.contiguous(), input.shape[-1]
    num_rows, num_outputs = input.numel() // width, len(weight) // (2 if gated else 1)
    out = input.new_empty(*input.shape[:-1], num_outputs)
    cols, depth, warps, stages = tiling(num_outputs, gated)
    linear_kernel[triton.cdiv(num_outputs, cols), triton.cdiv(num_rows, MAX_FEW_ROWS)](
        *(input, weight, weight if bias is None else bias, input if residual is None else residual.contiguous()),
        *(input if norm_weight is None else norm_weight, out, num_rows, num_outputs, eps),
        K=width,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        NORM=norm_weight is not None,
        ROWS=MAX_FEW_ROWS,
        COLS=cols,
        DEPTH=depth,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def reference(
    input: Float[Tensor, "*n K"],
    weight: Float[Tensor, "F K"],
    bias: Float[Tensor, "F"] | None,
    residual: Float[Tensor, "*n out"] | None,
    norm_weight: Float[Tensor, "K"] | None,
    eps: float,
    gated: bool,
) -> Float[Tensor, "*n out"]:
    """Compute what `launch` computes from PyTorch's operators."""
    if norm_weight is not None:
        input = functional.rms_norm(input, norm_weight.shape, norm_weight, eps)
    result = functional.linear(input, weight, bias)
    if gated:
        gate, other = result.chunk(2, dim=-1)
        result = functional.silu(gate) * other
    return result if residual is None else residual + result


def _register() -> None:
    for device, compute in (("CUDA", launch), ("CPU", reference)):
        _library.impl("few_row_linear", lambda *args, _compute=compute: _compute(*args, False), device)
        _library.impl(
            "few_row_gated",
            lambda x, weight, bias, norm_weight, eps, _compute=compute: _compute(
                x, weight, bias, None, norm_weight, eps, True
            ),
            device,
        )
        _library.impl("rms_norm", lambda x, weight, eps: functional.rms_norm(x, weight.shape, weight, eps), device)
        _library.impl("silu", lambda x: functional.silu(x).contiguous(), device)
    for name, halves in (("few_row_linear", 1), ("few_row_gated", 2)):
        torch.library.register_fake(
            f"choreograph::{name}",
            lambda x, weight, *_, _halves=halves: x.new_empty(*x.shape[:-1], len(weight) // _halves),
            lib=_library,
        )
    for name in ("rms_norm", "silu"):
        torch.library.register_fake(f"choreograph::{name}", lambda x, *_: x.new_empty(x.shape), lib=_library)


_register()
MERGEABLE_OPERATORS.add(_OWN.few_row_linear.default)


@contextmanager
def few_rows_for_tracing(model: nn.Module, groups: Iterable[FusionGroup]) -> Iterator[None]:
    """Replace layers by operators that `fuse_operators` can merge.

    Applies inside the block, where a graph is traced or captured.
    """
    groups = tuple(groups)
    patched: list[nn.Module] = []
    with fused_for_tracing(groups, _fused_forward):
        for module in model.modules():
            if "forward" in vars(module):
                continue  # part of a fused projection
            forward = next((f for is_supported, f in FORWARDS if is_supported(module)), None)
            if forward is not None:
                module.forward = MethodType(forward, module)  # type: ignore[method-assign]
                patched.append(module)
        try:
            yield
        finally:
            for module in patched:
                del module.forward


def _fused_forward(part: Any, input: Float[Tensor, "*n E"]) -> Float[Tensor, "*n F"]:
    fused: FusedWeight = part.fused_weight
    result = _OWN.few_row_linear(input, fused.weight, fused.bias, None, None, 0.0)
    return result[..., fused.start : fused.end]  # type: ignore[no-any-return]


def _linear_forward(layer: nn.Linear, input: Float[Tensor, "*n E"]) -> Float[Tensor, "*n F"]:
    result: Tensor = _OWN.few_row_linear(input, layer.weight, layer.bias, None, None, 0.0)
    return result


def _norm_forward(norm: Any, input: Float[Tensor, "*n E"]) -> Float[Tensor, "*n E"]:
    result: Tensor = _OWN.rms_norm(input, norm.weight, _eps(norm))
    return result


def _silu_forward(_: nn.Module, input: Float[Tensor, "*n E"]) -> Float[Tensor, "*n E"]:
    result: Tensor = _OWN.silu(input)
    return result


def _eps(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


def is_rms_norm(module: Any) -> bool:
    """Whether a module computes an RMS norm times its weight: by its name, then by a sample."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.ndim != 1 or not _eps(module):
        return False
    sample = torch.linspace(-2, 3, 2 * len(weight), device=weight.device, dtype=weight.dtype).view(2, -1)
    expected = functional.rms_norm(sample.float(), weight.shape, weight.float(), _eps(module))
    return torch.allclose(module(sample).float(), expected, rtol=2e-2, atol=2e-2)


FORWARDS = (
    (lambda module: type(module) is nn.Linear and type(module.weight.data) is Tensor, _linear_forward),
    (is_rms_norm, _norm_forward),
    (lambda module: type(module).__name__ in ("SiLU", "SiLUActivation"), _silu_forward),
)


def fuse_operators(graph: torch.fx.Graph) -> None:
    """Merge norms, gating and residuals into the products that they surround."""
    for node in list(graph.nodes):
        if node.target is _ATEN.slice.Tensor and _is_whole(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.target is _OWN.rms_norm.default:
            _fuse_norm(graph, node)
    for node in list(graph.nodes):
        if node.target is _OWN.silu.default:
            _fuse_gating(graph, node)
    for node in list(graph.nodes):
        if node.target is _OWN.few_row_linear.default:
            _fuse_residual(graph, node)


def _fuse_norm(graph: torch.fx.Graph, norm: torch.fx.Node) -> None:
    input, weight, eps = norm.args
    products = list(norm.users)
    if not all(user.target is _OWN.few_row_linear.default and user.args[0] is norm for user in products):
        return
    for product in products:
        product.args = (input, *product.args[1:4], weight, eps)
    graph.erase_node(norm)


def _fuse_gating(graph: torch.fx.Graph, silu: torch.fx.Node) -> None:
    """Merge `silu(product[..., :F]) * product[..., F:]`, if nothing else reads the product."""
    (gate,), users = silu.args, list(silu.users)
    if len(users) != 1 or users[0].target is not _ATEN.mul.Tensor or not _is_half(gate, first=True):
        return
    (times,), product = users, gate.args[0]
    other = next((arg for arg in times.args if arg is not silu), None)
    parts = {silu: gate, times: other}
    if (
        not _is_half(other, first=False)
        or other.args[0] is not product
        or product.target is not _OWN.few_row_linear.default
        or set(product.users) != {gate, other}
        or any(list(part.users) != [user] for user, part in parts.items())
    ):
        return
    input, weight, bias, _, norm_weight, eps = product.args
    with graph.inserting_before(times):
        fused = graph.call_function(_OWN.few_row_gated.default, (input, weight, bias, norm_weight, eps))
    _replace(graph, times, fused, erased=(silu, gate, other, product))


def _fuse_residual(graph: torch.fx.Graph, product: torch.fx.Node) -> None:
    users = list(product.users)
    if len(users) != 1 or users[0].target is not _ATEN.add.Tensor or users[0].kwargs:
        return
    residual = next((arg for arg in users[0].args if arg is not product), None)
    if not isinstance(residual, torch.fx.Node) or residual.meta["val"].shape != product.meta["val"].shape:
        return
    with graph.inserting_before(users[0]):
        fused = graph.call_function(product.target, (*product.args[:3], residual, *product.args[4:]))
    _replace(graph, users[0], fused, erased=(product,))


def _is_whole(node: torch.fx.Node) -> bool:
    """Whether a slice is all of its input, like that of the rows whose logits are kept."""
    _, _, start, end, step = (*node.args, *(None,) * 4)[:5]
    return not start and (end is None or (isinstance(end, int) and end == sys.maxsize)) and step in (None, 1)


def _is_half(node: Any, *, first: bool) -> bool:
    """Whether a node is one half of its input's last dimension."""
    if not isinstance(node, torch.fx.Node) or node.target is not _ATEN.slice.Tensor:
        return False
    source, dim, start, end = (*node.args, *(None,) * 4)[:4]
    size, rank = source.meta["val"].shape[-1], source.meta["val"].ndim
    bounds = (start or 0, min(size if end is None else end, size))
    return dim in (-1, rank - 1) and bounds == ((0, size // 2) if first else (size // 2, size))


def _replace(graph: torch.fx.Graph, old: torch.fx.Node, new: torch.fx.Node, erased: tuple[torch.fx.Node, ...]) -> None:
    """Put `new` in the place of `old`; erase nodes that only `old` has read."""
    new.meta.update(old.meta)
    old.replace_all_uses_with(new)
    for node in (old, *erased):
        graph.erase_node(node)
