"""Changes of compiled graphs before inductor lowers them."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# What is merged where arguments are equal; packed weights add the operators that multiply by them.
_ATEN = torch.ops.aten
MERGEABLE_OPERATORS = {op.default for op in (_ATEN.mm, _ATEN.addmm, _ATEN.permute, _ATEN.t, _ATEN.view, _ATEN.reshape)}

_library = torch.library.Library("choreograph", "FRAGMENT")
for _name, _function in (("cos", torch.cos), ("sin", torch.sin)):
    _library.define(f"{_name}(Tensor angles) -> Tensor")
    _library.impl(_name, lambda angles, _compute=_function: _compute(angles), "CPU")
    torch.library.register_fake(f"choreograph::{_name}", torch.empty_like, lib=_library)


def deduplication_pass(then: Callable[[torch.fx.Graph], None] | None = None) -> Callable[[torch.fx.Graph], None]:
    """Return a pass that computes each of some operations once.

    `then` changes the graph further.
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
    sources = {__file__, then.__code__.co_filename} if then is not None else {__file__}

    class DeduplicationPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            change(graph)

        def uuid(self) -> Any:
            return hashlib.sha256(b"".join(Path(source).read_bytes() for source in sorted(sources))).digest()

    return DeduplicationPass()


def _deduplicate(graph: torch.fx.Graph) -> None:
    """Merge equal products and views of their inputs.

    On a CPU, sines and cosines become operators that are not fused. Inductor would compute the rotary tables again for
    each head of each layer.
    """
    own = torch.ops.choreograph
    tables = {_ATEN.cos.default: own.cos.default, _ATEN.sin.default: own.sin.default}
    first_nodes: dict[Any, torch.fx.Node] = {}
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
