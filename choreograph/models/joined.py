"""Projections of one input as one product of matrices, in what a compiler makes of a model. Owns no arithmetic.

A step of few rows takes as long as its weights are read, and three small matrices are read more slowly than one large
one. So the weights of such projections are put behind each other in memory, where a model goes on to use each of them.
While it is traced every projection is a part of the large product, which the compiler is told to compute once.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.nn.functional import linear

ALIKE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # of one module, and called with the same tensor

PRODUCTS = {  # and what stands in front of them
    *(
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.permute.default,
        torch.ops.aten.t.default,
    ),
    *(torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default),
}


class Part(nn.Linear):
    """What a projection is while it is traced."""

    joint: tuple[Tensor, Tensor | None]
    begin: int

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, *self.joint)[..., self.begin : self.begin + self.out_features]


def join(model: nn.Module) -> list[nn.Linear]:
    """Puts the weights of projections that read alike behind each other, once. Gives these projections."""
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found: list[nn.Linear] = []
    for module in model.modules():
        for names in ALIKE:
            group = [getattr(module, name, None) for name in names]
            if not all(_is_plain(one, uses) for one in group) or not _go_together(group):  # type: ignore[arg-type]
                continue
            _join(group)  # type: ignore[arg-type]
            found += group  # type: ignore[arg-type]
    return found


@contextmanager
def as_one(parts: Sequence[nn.Linear]) -> Iterator[None]:
    """For a compiler that looks at the model meanwhile."""
    try:
        for part in parts:
            part.__class__ = Part
        yield
    finally:
        for part in parts:
            part.__class__ = nn.Linear


class Once(CustomGraphPass):
    """Equal products of a graph are computed once."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        known = dict[Any, torch.fx.Node]()
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in PRODUCTS:
                continue
            first = known.setdefault((node.target, str(node.args), str(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _is_plain(module: Any, uses: Counter[int]) -> bool:
    """Whether it is a linear layer as torch makes it, with weights of its own."""
    if type(module) is not nn.Linear:
        return False
    own = [p for p in (module.weight, module.bias) if p is not None]
    return all(type(p) is nn.Parameter and type(p.data) is Tensor and uses[id(p)] == 1 for p in own)


def _go_together(group: Sequence[nn.Linear]) -> bool:
    return len({(one.in_features, one.weight.dtype, one.weight.device, one.bias is None) for one in group}) == 1


def _join(group: Sequence[nn.Linear]) -> None:
    weight = _joint([one.weight for one in group])
    bias = None if group[0].bias is None else _joint([one.bias for one in group])
    begin = 0
    for one in group:
        one.__dict__["joint"], one.__dict__["begin"] = (weight, bias), begin  # no parameters of its own
        begin += one.out_features


@torch.no_grad()
def _joint(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of which these are parts from now on, in order; the one that they are parts of already."""
    first, storage, end = parts[0], parts[0].untyped_storage().data_ptr(), parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage or not part.is_contiguous():
            break
        end += part.numel() * part.element_size()
    else:
        return _known(first.detach().as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride()))
    made = torch.cat([part.detach() for part in parts])
    for part, own in zip(parts, made.split([len(part) for part in parts]), strict=True):
        part.data = own
    if made.is_cuda:
        torch.cuda.empty_cache()  # what the parts took is of no size that comes again
    return _known(made)


def _known(joint: Tensor) -> Tensor:
    """Of a size that a compiler may rely on, as on those of parameters."""
    torch._dynamo.mark_static(joint)
    return joint
