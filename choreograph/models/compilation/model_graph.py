"""Graphs of a model by `torch.compile`, which CUDA graphs record.

The model is unchanged: the graph is what transformers' own forward traces to. Attention is one opaque operator. It
gets its forward context from a context variable, so graphs have only tensors as inputs.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Node = Any  # torch.fx.Node; the types of its arguments would need a check at every use

# Operators that are merged if their arguments are equal.
_ATEN = torch.ops.aten
MERGEABLE_OPERATORS = {op.default for op in (_ATEN.mm, _ATEN.addmm, _ATEN.permute, _ATEN.t, _ATEN.view, _ATEN.reshape)}

_FORWARD_CONTEXT: ContextVar[Any] = ContextVar("forward_context")  # of the graph that runs in this thread

_library = torch.library.Library("choreograph", "FRAGMENT")
_library.define("attend(Tensor query, Tensor key, Tensor value, int layer, float scale, Tensor? sinks) -> Tensor")


def _attend(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, sinks: Tensor | None) -> Tensor:
    result: Tensor = _FORWARD_CONTEXT.get().attend(layer, query, key, value, scale, sinks)
    return result


def _attend_shape(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, sinks: Tensor | None) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


_library.impl("attend", _attend, "CPU")
_library.impl("attend", _attend, "CUDA")
torch.library.register_fake("choreograph::attend", _attend_shape, lib=_library)


@contextmanager
def use_forward_context(forward_context: Any) -> Iterator[None]:
    """Let compiled graphs attend through `forward_context` inside the block."""
    token = _FORWARD_CONTEXT.set(forward_context)
    try:
        yield
    finally:
        _FORWARD_CONTEXT.reset(token)


def compile_model(model: Any, name: str, change: Callable[[torch.fx.Graph], None]) -> Any:
    """Compile a transformers model into one graph for any number of tokens.

    The graph maps (1, N) token ids and positions to (1, N, V) logits.

    Args:
        name: distinct name of the code object; dynamo keeps one list of graphs per code object.
        change: changes the graph before it is lowered.
    """

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return logits

    forward.__code__ = forward.__code__.replace(co_name=name)
    # No guards: nothing that a graph depends on changes after it is traced.
    options: dict[str, Any] = {
        "guard_filter_fn": lambda guards: [False for _ in guards],
        "post_grad_custom_pre_pass": cacheable_pass(change),
    }
    return torch.compile(forward, fullgraph=True, dynamic=True, options=options)


def cacheable_pass(change: Callable[[torch.fx.Graph], None]) -> Callable[[torch.fx.Graph], None]:
    """Return a pass whose graphs inductor caches on disk, by the source of the change."""
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass
    except ImportError:  # a private module: inductor takes plain functions too, but does not cache their graphs
        return change

    class GraphPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            change(graph)

        def uuid(self) -> Any:
            digest = hashlib.sha256(change.__name__.encode())
            for source in (__file__, change.__code__.co_filename):
                digest.update(Path(source).read_bytes())
            return digest.digest()

    return GraphPass()


def deduplicate(graph: torch.fx.Graph, *others: Any) -> None:
    """Merge equal products and views of their inputs.

    Args:
        others: further operators to merge.
    """
    first_nodes: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and (node.target in MERGEABLE_OPERATORS or node.target in others):
            first = first_nodes.setdefault((node.target, str(node.args), str(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
