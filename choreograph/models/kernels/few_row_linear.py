"""Linear layers of few rows on a GPU, fused with their surroundings.

A step of few tokens is bound by reading weights, and in every kernel between two products the memory idles. In
graphs of few rows, the kernel of a product also adds the residual, gates, and does both halves of an RMS norm: what
computes a hidden state also multiplies it by the next norm's weight and sums its squares, and the product that reads
it divides its rows by their root mean square at the end.

While a model is traced, its linear layers, norms and SiLU activations are operators of this module;
`fuse_operators` then merges them where the graph's data flow allows it.
"""

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ..compilation.model_graph import Node, deduplicate
from .fused_projections import FusedWeight, FusionGroup, forwards_for_tracing, fused_for_tracing

MAX_FEW_ROWS = 16  # rows of the kernel's tile


class Tiling(NamedTuple):
    """Tile of the kernel, and how it is launched."""

    cols: int  # output features
    depth: int  # input features per iteration
    num_warps: int
    num_stages: int  # tiles of the weight in flight


_ATEN, _OWN = torch.ops.aten, torch.ops.choreograph
_library = torch.library.Library("choreograph", "FRAGMENT")
_library.define(
    "few_row_linear(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, Tensor? squares, float eps) -> Tensor"
)
_library.define("few_row_gated(Tensor input, Tensor weight, Tensor? bias, Tensor? squares, float eps) -> Tensor")
_library.define(
    "few_row_residual(Tensor input, Tensor weight, Tensor? bias, Tensor residual, Tensor norm_weight)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define("rms_norm(Tensor input, Tensor weight, float eps) -> Tensor")
_library.define("silu(Tensor input) -> Tensor")


@triton.jit
def linear_kernel(
    input, weight, bias, residual, norm_weight, squares, out, scaled_out, squares_out,
    num_rows, num_outputs, num_squares, eps,
    K: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NORMED: tl.constexpr,
    SCALED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, SQUARES_PAD: tl.constexpr,
):  # fmt: skip
    """Multiply COLS rows of the weight with ROWS rows of the input.

    GATED: the weight has the gate's rows first, then those of the other factor. NORMED: the input is to be divided
    by its root mean square. SCALED: also write the output times a norm's weight, and the sums of its squares.
    """
    n = tl.program_id(0) * COLS + tl.arange(0, COLS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    row_mask, col_mask = m < num_rows, n < num_outputs
    weight_rows = weight + n.to(tl.int64)[:, None] * K
    input_rows = input + m[:, None] * K
    acc = tl.zeros([COLS, ROWS], tl.float32)
    if GATED:
        other_rows = weight_rows + num_outputs.to(tl.int64) * K
        other = tl.zeros([COLS, ROWS], tl.float32)
    for start in range(0, K, DEPTH):
        depth = start + k
        if K % DEPTH == 0:
            x_mask, w_mask = row_mask[:, None], col_mask[:, None]
        else:
            x_mask, w_mask = row_mask[:, None] & (depth < K)[None, :], col_mask[:, None] & (depth < K)[None, :]
        x = tl.trans(tl.load(input_rows + depth[None, :], mask=x_mask, other=0.0))
        w = tl.load(weight_rows + depth[None, :], mask=w_mask, other=0.0, eviction_policy="evict_first")
        acc += tl.dot(w, x)
        if GATED:
            w = tl.load(other_rows + depth[None, :], mask=w_mask, other=0.0, eviction_policy="evict_first")
            other += tl.dot(w, x)
    if NORMED:
        s = tl.arange(0, SQUARES_PAD)
        mask_s = (s < num_squares)[:, None] & row_mask[None, :]
        mean = tl.sum(tl.load(squares + s[:, None] * num_rows + m[None, :], mask=mask_s, other=0.0), 0) / K
        scale = tl.rsqrt(mean + eps)[None, :]
        acc *= scale
        if GATED:
            other *= scale
    if BIAS:
        acc += tl.load(bias + n, mask=col_mask, other=0.0).to(tl.float32)[:, None]
        if GATED:
            other += tl.load(bias + num_outputs + n, mask=col_mask, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * other
    place, mask = m[None, :] * num_outputs + n[:, None], row_mask[None, :] & col_mask[:, None]
    if RESIDUAL:
        acc += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    result = acc.to(out.dtype.element_ty)
    tl.store(out + place, result, mask=mask)
    if SCALED:
        rounded = tl.where(mask, result.to(tl.float32), 0.0)
        factor = tl.load(norm_weight + n, mask=col_mask, other=0.0).to(tl.float32)[:, None]
        tl.store(scaled_out + place, (rounded * factor).to(out.dtype.element_ty), mask=mask)
        tl.store(squares_out + tl.program_id(0) * num_rows + m, tl.sum(rounded * rounded, 0), mask=row_mask)


def tiling(num_outputs: int) -> Tiling:
    """Return the tile of the kernel by the number of output features."""
    return Tiling(128, 128, 8, 3) if num_outputs > 8192 else Tiling(64, 128, 4, 6)


def launch(
    input: Float[Tensor, "*n K"],
    weight: Float[Tensor, "F K"],
    bias: Float[Tensor, "F"] | None = None,
    residual: Float[Tensor, "*n out"] | None = None,
    squares: Float[Tensor, "P rows"] | None = None,
    eps: float = 0.0,
    *,
    gated: bool = False,
    norm_weight: Float[Tensor, "out"] | None = None,
) -> tuple[Float[Tensor, "*n out"], Float[Tensor, "*n out"], Float[Tensor, "Q rows"]]:
    """Launch the kernel.

    Args:
        squares: sums of the squares of the input before it was multiplied by a norm's weight, to be added up; the
            input is divided by its root mean square.
        gated: the output is SiLU of the first half of the product times the second.
        norm_weight: multiplies the second output.

    Returns:
        The output, and with `norm_weight` the output times it and sums of the output's squares; else both are empty.
    """
    input, width = input.contiguous(), input.shape[-1]
    num_rows, num_outputs = input.numel() // width, len(weight) // (2 if gated else 1)
    tile, is_scaled = tiling(num_outputs), norm_weight is not None
    num_programs = triton.cdiv(num_outputs, tile.cols)
    out = input.new_empty(*input.shape[:-1], num_outputs)
    scaled = torch.empty_like(out) if is_scaled else out[:0]
    sums = input.new_empty(num_programs if is_scaled else 0, num_rows, dtype=torch.float32)
    linear_kernel[num_programs, triton.cdiv(num_rows, MAX_FEW_ROWS)](
        *(input, weight, weight if bias is None else bias, out if residual is None else residual.contiguous()),
        *(out if norm_weight is None else norm_weight, out if squares is None else squares, out, scaled, sums),
        *(num_rows, num_outputs, 0 if squares is None else len(squares), eps),
        K=width,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        NORMED=squares is not None,
        SCALED=is_scaled,
        ROWS=MAX_FEW_ROWS,
        COLS=tile.cols,
        DEPTH=tile.depth,
        SQUARES_PAD=1 if squares is None else triton.next_power_of_2(len(squares)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out, scaled, sums


def reference(
    input: Float[Tensor, "*n K"],
    weight: Float[Tensor, "F K"],
    bias: Float[Tensor, "F"] | None = None,
    residual: Float[Tensor, "*n out"] | None = None,
    squares: Float[Tensor, "P rows"] | None = None,
    eps: float = 0.0,
    *,
    gated: bool = False,
    norm_weight: Float[Tensor, "out"] | None = None,
) -> tuple[Float[Tensor, "*n out"], Float[Tensor, "*n out"], Float[Tensor, "Q rows"]]:
    """Compute what `launch` computes from PyTorch's operators."""
    result = functional.linear(input, weight)
    if squares is not None:
        scale = torch.rsqrt(squares.sum(0) / input.shape[-1] + eps).view(*input.shape[:-1], 1)
        result = (result.float() * scale).to(result.dtype)
    if bias is not None:
        result = result + bias
    if gated:
        gate, other = result.chunk(2, dim=-1)
        result = functional.silu(gate) * other
    if residual is not None:
        result = residual + result
    rows = result.reshape(-1, result.shape[-1]).float()
    if norm_weight is None:
        return result, result[:0], rows.new_zeros(0, len(rows))
    sums = rows.new_zeros(triton.cdiv(result.shape[-1], tiling(result.shape[-1]).cols), len(rows))
    sums[0] = rows.square().sum(1)
    return result, result * norm_weight, sums


def _output_shapes(input: Tensor, num_outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs of the right shapes, for tracing."""
    out = input.new_empty(*input.shape[:-1], num_outputs)
    num_rows, num_programs = input.numel() // input.shape[-1], triton.cdiv(num_outputs, tiling(num_outputs).cols)
    return out, torch.empty_like(out), input.new_empty(num_programs, num_rows, dtype=torch.float32)


def _register() -> None:
    for device, compute in (("CUDA", launch), ("CPU", reference)):
        implementations = {
            "few_row_linear": lambda *args, _compute=compute: _compute(*args)[0],
            "few_row_gated": lambda x, weight, bias, squares, eps, _compute=compute: _compute(
                x, weight, bias, None, squares, eps, gated=True
            )[0],
            "few_row_residual": lambda x, weight, bias, residual, norm_weight, _compute=compute: _compute(
                x, weight, bias, residual, norm_weight=norm_weight
            ),
            "rms_norm": lambda x, weight, eps: functional.rms_norm(x, weight.shape, weight, eps),
            "silu": lambda x: functional.silu(x).contiguous(),
        }
        for name, function in implementations.items():
            _library.impl(name, function, device)
    shapes: dict[str, Callable[..., Any]] = {
        "few_row_linear": lambda x, weight, *_: _output_shapes(x, len(weight))[0],
        "few_row_gated": lambda x, weight, *_: _output_shapes(x, len(weight) // 2)[0],
        "few_row_residual": lambda x, weight, *_: _output_shapes(x, len(weight)),
        "rms_norm": lambda x, *_: x.new_empty(x.shape),
        "silu": lambda x: x.new_empty(x.shape),
    }
    for name, function in shapes.items():
        torch.library.register_fake(f"choreograph::{name}", function, lib=_library)


_register()


@contextmanager
def few_rows_for_tracing(model: nn.Module, groups: Iterable[FusionGroup]) -> Iterator[None]:
    """Replace layers by operators that `fuse_operators` can merge.

    Applies inside the block, where a graph is traced or captured.
    """
    groups = tuple(groups)
    with fused_for_tracing(groups, _fused_forward):
        # a part of a fused projection has its forward method already
        others = [module for module in model.modules() if "forward" not in vars(module)]
        found = [(module, next((f for is_kind, f in FORWARDS if is_kind(module)), None)) for module in others]
        with forwards_for_tracing([(module, forward) for module, forward in found if forward is not None]):
            yield


def _fused_forward(part: Any, input: Float[Tensor, "*n E"]) -> Float[Tensor, "*n F"]:
    fused: FusedWeight = part.fused_weight
    result = _OWN.few_row_linear(input, fused.weight, fused.bias, None, None, 0.0)
    return result[..., fused.start : fused.end]


def _linear_forward(layer: nn.Linear, input: Float[Tensor, "*n E"]) -> Float[Tensor, "*n F"]:
    result: Tensor = _OWN.few_row_linear(input, layer.weight, layer.bias, None, None, 0.0)
    return result


def _norm_forward(norm: Any, input: Float[Tensor, "*n E"]) -> Float[Tensor, "*n E"]:
    result: Tensor = _OWN.rms_norm(input, norm.weight, _eps(norm))
    return result


def _eps(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


def is_rms_norm(module: Any) -> bool:
    """Whether a module is an RMS norm: its name and a sample."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.ndim != 1 or not _eps(module):
        return False
    sample = torch.linspace(-2, 3, 2 * len(weight), device=weight.device, dtype=weight.dtype).view(2, -1)
    expected = functional.rms_norm(sample.float(), weight.shape, weight.float(), _eps(module))
    return torch.allclose(module(sample).float(), expected, rtol=2e-2, atol=2e-2)


def is_silu(module: nn.Module) -> bool:
    """Whether a module is the activation that `_fuse_gating` looks for."""
    return type(module).__name__ in ("SiLU", "SiLUActivation")


def _silu_forward(_: nn.Module, input: Tensor) -> Tensor:
    result: Tensor = _OWN.silu(input)
    return result


FORWARDS = (
    (lambda module: type(module) is nn.Linear and type(module.weight.data) is Tensor, _linear_forward),
    (is_rms_norm, _norm_forward),
    (is_silu, _silu_forward),
)


def fuse_operators(graph: torch.fx.Graph) -> None:
    """Merge norms, gating and residuals into the products that surround them.

    Equal products, such as those of a fused projection, are computed once.
    """
    deduplicate(graph, _OWN.few_row_linear.default)
    nodes: list[Node] = list(graph.nodes)
    for node in nodes:
        if node.target is _ATEN.slice.Tensor and _is_whole(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for target, fuse in (
        (_OWN.silu.default, _fuse_gating),
        (_OWN.few_row_linear.default, _fuse_residual),
        (_OWN.rms_norm.default, _fuse_norm),
    ):
        for node in list(graph.nodes):
            if node.target is target:
                fuse(graph, node)


def _fuse_gating(graph: torch.fx.Graph, silu: Node) -> None:
    """Merge `silu(product[..., :F]) * product[..., F:]`, if nothing else reads the product."""
    (gate,), users = silu.args, list(silu.users)
    if len(users) != 1 or users[0].target is not _ATEN.mul.Tensor or not _is_half(gate, first=True):
        return
    (times,), product = users, gate.args[0]
    other: Node = next((arg for arg in times.args if arg is not silu), None)
    parts = {silu: gate, times: other}
    if (
        not _is_half(other, first=False)
        or other.args[0] is not product
        or product.target is not _OWN.few_row_linear.default
        or set(product.users) != {gate, other}
        or any(list(part.users) != [user] for user, part in parts.items())
    ):
        return
    with graph.inserting_before(times):
        fused = graph.call_function(_OWN.few_row_gated.default, (*product.args[:3], None, 0.0))
    _replace_node(graph, times, fused, erased=(silu, gate, other, product))


def _fuse_norm(graph: torch.fx.Graph, norm: Node) -> None:
    """Merge a norm into the products before and after it."""
    (hidden, norm_weight, eps), users = norm.args, list(norm.users)
    readers = {_OWN.few_row_linear.default, _OWN.few_row_gated.default}
    if (
        hidden.target is not _OWN.few_row_linear.default
        or hidden.args[3] is None
        or hidden.args[4] is not None
        or not all(user.target in readers and user.args[0] is norm for user in users)
    ):
        return
    input, weight, bias, residual, _, _ = hidden.args
    with graph.inserting_before(hidden):
        fused = graph.call_function(_OWN.few_row_residual.default, (input, weight, bias, residual, norm_weight))
        values = _output_shapes(input.meta["val"], hidden.meta["val"].shape[-1])
        fused.meta["val"] = values
        out, scaled, squares = (graph.call_function(operator.getitem, (fused, i)) for i in range(3))
        for node, value in zip((out, scaled, squares), values, strict=True):
            node.meta["val"] = value
    for user in users:
        user.args = (scaled, *user.args[1:-2], squares, eps)
    graph.erase_node(norm)
    _replace_node(graph, hidden, out)


def _fuse_residual(graph: torch.fx.Graph, product: Node) -> None:
    users = list(product.users)
    if len(users) != 1 or users[0].target is not _ATEN.add.Tensor or users[0].kwargs:
        return
    residual = next((arg for arg in users[0].args if arg is not product), None)
    if not isinstance(residual, torch.fx.Node) or residual.meta["val"].shape != product.meta["val"].shape:
        return
    with graph.inserting_before(users[0]):
        fused = graph.call_function(product.target, (*product.args[:3], residual, *product.args[4:]))
    _replace_node(graph, users[0], fused, erased=(product,))


def _replace_node(graph: torch.fx.Graph, old: Node, new: Node, erased: Sequence[Node] = ()) -> None:
    """Replace a node; also erase nodes that only it has read."""
    new.meta.update(old.meta)
    old.replace_all_uses_with(new)
    for node in (old, *erased):
        graph.erase_node(node)


def _is_half(node: Any, *, first: bool) -> bool:
    """Whether a node is one half of its input's last dimension."""
    if getattr(node, "target", None) is not _ATEN.slice.Tensor:
        return False
    source, dim, start, end = (*node.args, *(None,) * 4)[:4]
    size, rank = source.meta["val"].shape[-1], source.meta["val"].ndim
    bounds = (start or 0, min(size if end is None else end, size))
    return dim in (-1, rank - 1) and bounds == ((0, size // 2) if first else (size // 2, size))


def _is_whole(node: Node) -> bool:
    """Whether a slice is all of its input."""
    _, _, start, end, step = (*node.args, *(None,) * 4)[:5]
    return not start and (end is None or (isinstance(end, int) and end == sys.maxsize)) and step in (None, 1)
