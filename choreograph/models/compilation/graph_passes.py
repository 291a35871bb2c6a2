"""Changes of compiled graphs before inductor lowers them."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_arg
from torch.nn import functional

# Operators that are merged if their arguments are equal; packed weights add those that multiply by them.
_ATEN = torch.ops.aten
MERGEABLE_OPERATORS = {op.default for op in (_ATEN.mm, _ATEN.addmm, _ATEN.permute, _ATEN.t, _ATEN.view, _ATEN.reshape)}

# Maps the operator of a product to a function that returns the gated operator and its arguments, or None. The gated
# product is SiLU of the first half of the output features times the second half.
GATED_OPERATORS: dict[Any, Callable[..., tuple[Any, tuple[Any, ...]] | None]] = {}

# Operators that compute each token independently, of tensors (1, N, ...) and weights; packed weights add theirs.
ROW_OPERATORS: set[Any] = {
    *(getattr(_ATEN, name).Tensor for name in ("add", "sub", "mul", "div")),
    *(getattr(_ATEN, name).default for name in ("neg", "exp", "rsqrt", "sigmoid", "tanh", "gelu", "relu")),
    *(_ATEN.pow.Tensor_Scalar, _ATEN.mean.dim, torch.ops.prims.convert_element_type.default),
}

Node = Any  # torch.fx.Node; the types of its arguments would need a check at every use

_OWN = torch.ops.choreograph
_library = torch.library.Library("choreograph", "FRAGMENT")
for _name, _function in (("cos", torch.cos), ("sin", torch.sin), ("silu", functional.silu)):
    _library.define(f"{_name}(Tensor input) -> Tensor")
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, lambda x, _compute=_function: _compute(x).contiguous(), _device)
    torch.library.register_fake(f"choreograph::{_name}", lambda x: x.new_empty(x.shape), lib=_library)


def deduplication_pass(
    then: Callable[[torch.fx.Graph], None] | None = None, *, graph_name: str = ""
) -> Callable[[torch.fx.Graph], None]:
    """Return a pass that computes each of some operations once.

    Args:
        then: changes the graph further.
        graph_name: inductor finds cached graphs of this name only. Its own key has no sizes of dynamic dimensions,
            although it chooses by those of the first step whether loops run in threads.
    """

    def deduplicate_then(graph: torch.fx.Graph) -> None:
        _deduplicate(graph)
        assert then is not None
        then(graph)

    change = _deduplicate if then is None else deduplicate_then
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass
    except ImportError:  # a private module: inductor takes plain functions too, but does not cache their graphs
        return change
    sources = {__file__, *(function.__code__.co_filename for function in (then, *GATED_OPERATORS.values()) if function)}

    class DeduplicationPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            change(graph)

        def uuid(self) -> Any:
            operators = [*MERGEABLE_OPERATORS, *GATED_OPERATORS, *ROW_OPERATORS]  # other modules add some
            digest = hashlib.sha256("\n".join([graph_name, *sorted(map(str, operators))]).encode())
            for source in sorted(sources):
                digest.update(Path(source).read_bytes())
            return digest.digest()

    return DeduplicationPass()


def _deduplicate(graph: torch.fx.Graph) -> None:
    """Merge equal products and views of their inputs.

    On a CPU, sines and cosines become operators that are not fused. Inductor would compute the rotary tables again for
    each head of each layer.
    """
    tables = {_ATEN.cos.default: _OWN.cos.default, _ATEN.sin.default: _OWN.sin.default}
    first_nodes: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in MERGEABLE_OPERATORS:
            first = first_nodes.setdefault((node.target, str(node.args), str(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
        elif node.target in tables and isinstance(value := node.meta.get("val"), Tensor) and value.is_cpu:
            node.target = tables[node.target]  # an operator that is not fused


def is_silu(module: nn.Module) -> bool:
    """Whether a module is the activation that `fuse_gating` looks for."""
    return type(module).__name__ in ("SiLU", "SiLUActivation")


def silu_forward(_: nn.Module, input: Tensor) -> Tensor:
    """Compute SiLU as one operator, which `fuse_gating` finds."""
    result: Tensor = _OWN.silu(input)
    return result


@contextmanager
def forwards_for_tracing(forwards: Sequence[tuple[nn.Module, Callable[..., Tensor]]]) -> Iterator[None]:
    """Replace the forward methods of modules inside the block."""
    for module, forward in forwards:
        module.forward = MethodType(forward, module)
    try:
        yield
    finally:
        for module, _ in forwards:
            vars(module).pop("forward", None)


def fuse_gating(graph: torch.fx.Graph) -> None:
    """Merge `silu(product[..., :F]) * product[..., F:]`, if nothing else reads the product."""
    for node in list(graph.nodes):
        if node.target is _OWN.silu.default:
            _fuse_gating(graph, node)


def fuse_packed(graph: torch.fx.Graph) -> None:
    """Merge gated products, and select tokens early.

    Other activations are left to inductor, which fuses them with what surrounds them.
    """
    fuse_gating(graph)
    for node in list(graph.nodes):
        if node.target is _OWN.silu.default:
            with graph.inserting_before(node):
                factor = graph.call_function(_ATEN.sigmoid.default, node.args)
                factor.meta["val"] = node.meta["val"]
                product = graph.call_function(_ATEN.mul.Tensor, (*node.args, factor))
            replace_node(graph, node, product)
    select_rows_early(graph)


def select_rows_early(graph: torch.fx.Graph) -> None:
    """After the last attention, compute only tokens whose logits are needed.

    Their selection before the output layer moves up to what is computed for all tokens: the attention and the residual.
    """
    selection: Node = next((node for node in reversed(graph.nodes) if _is_row_selection(node)), None)
    if selection is None:
        return
    source, (_, rows) = selection.args
    if _is_by_row(rows) or len(source.meta["val"].shape) != 3:
        return
    num_tokens = str(source.meta["val"].shape[1])  # a symbol, whose comparison would make it a number
    early: dict[Node, Node] = {}  # by node, what computes its selected rows
    for node in reversed(graph.nodes):
        if _is_by_row(node) and node.users and all(user in early or user is selection for user in node.users):
            early[node] = node

    if source not in early:  # others read it
        return

    def select(argument: Node) -> Node:
        if argument in early:
            return early[argument]
        shape: Sequence[Any] = getattr(argument.meta["val"], "shape", ())
        if len(shape) < 3 or str(shape[1]) != num_tokens:
            return argument  # a weight, or the same for all tokens
        with graph.inserting_before(selection):
            early[argument] = _call(graph, _ATEN.index.Tensor, (argument, [None, rows]))
        return early[argument]

    in_order = list(reversed(early))
    for node in in_order:
        args = map_arg(node.args, select)
        with graph.inserting_before(selection):
            early[node] = _call(graph, node.target, args, node.kwargs)
    replace_node(graph, selection, early[source], erased=in_order[::-1])


def _is_row_selection(node: Node) -> bool:
    """Whether a node selects tokens of a tensor (1, N, ...)."""
    return node.target is _ATEN.index.Tensor and len(node.args[1]) == 2 and node.args[1][0] is None


def _is_by_row(node: Node) -> bool:
    """Whether a node computes each token by itself."""
    return node.target in ROW_OPERATORS and (node.target is not _ATEN.mean.dim or list(node.args[1]) == [-1])


def _call(graph: torch.fx.Graph, target: Any, args: Any, kwargs: Any = None) -> Node:
    """Add a node with the shape of its output."""
    node = graph.call_function(target, args, kwargs)
    values, keywords = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    node.meta["val"] = target(*values, **keywords)
    return node


def _fuse_gating(graph: torch.fx.Graph, silu: Node) -> None:
    (gate,), users = silu.args, list(silu.users)
    if len(users) != 1 or users[0].target is not _ATEN.mul.Tensor or not _is_half(gate, first=True):
        return
    (times,), product = users, gate.args[0]
    other: Node = next((arg for arg in times.args if arg is not silu), None)
    parts = {silu: gate, times: other}
    if (
        not _is_half(other, first=False)
        or other.args[0] is not product
        or product.target not in GATED_OPERATORS
        or set(product.users) != {gate, other}
        or any(list(part.users) != [user] for user, part in parts.items())
    ):
        return
    gated = GATED_OPERATORS[product.target](*product.args)
    if gated is not None:
        with graph.inserting_before(times):
            fused = graph.call_function(*gated)
        replace_node(graph, times, fused, erased=(silu, gate, other, product))


def _is_half(node: Any, *, first: bool) -> bool:
    """Whether a node is one half of its input's last dimension."""
    if getattr(node, "target", None) is not _ATEN.slice.Tensor:
        return False
    source, dim, start, end = (*node.args, *(None,) * 4)[:4]
    size, rank = source.meta["val"].shape[-1], source.meta["val"].ndim
    bounds = (start or 0, min(size if end is None else end, size))
    return dim in (-1, rank - 1) and bounds == ((0, size // 2) if first else (size // 2, size))


def replace_node(graph: torch.fx.Graph, old: Node, new: Node, erased: Sequence[Node] = ()) -> None:
    """Replace a node; also erase nodes that only it has read."""
    new.meta.update(old.meta)
    old.replace_all_uses_with(new)
    for node in (old, *erased):
        graph.erase_node(node)
