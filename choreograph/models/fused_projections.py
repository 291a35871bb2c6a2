"""Projections of one input as one product of matrices, in what a compiler makes of a model. Owns no arithmetic.

A step of few rows takes as long as its weights are read, and three small matrices are read more slowly than one large
one. So the weights of such projections are put behind each other in memory, where a model goes on to use each of them.
While it is traced every projection is a part of the large product, which the compiler is told to compute once.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.nn.functional import linear

FUSABLE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # of one module, and called with the same tensor

aten = torch.ops.aten

VIEW_OPS = {aten.permute.default, aten.t.default, aten.view.default, aten.reshape.default, aten._unsafe_view.default}

DEDUP_OPS = frozenset({aten.mm.default, aten.addmm.default} | VIEW_OPS)  # and what stands in front of them

FusionGroup = tuple[nn.Linear, ...]


class FusedWeight(NamedTuple):
    """The large product, and which rows of its weight are one projection's: begin <= i < end."""

    weight: Tensor
    bias: Tensor | None
    start: int
    end: int

    def __deepcopy__(self, memo: object) -> None:
        """A copied model's weights lie elsewhere, apart."""


class FusedLinearSlice(nn.Linear):
    """What a projection is while it is traced."""

    fused_weight: FusedWeight

    def forward(self, input: Float[Tensor, "*n E"]) -> Float[Tensor, "*n F"]:
        return linear(input, self.fused_weight.weight, self.fused_weight.bias)[
            ..., self.fused_weight.start : self.fused_weight.end
        ]


def fuse(model: nn.Module) -> list[FusionGroup]:
    """Puts the weights of projections that read alike behind each other, once. Gives what goes together."""
    groups: list[FusionGroup] = []
    sharing = Counter(_storage_ptr(p) for _, p in model.named_parameters(remove_duplicate=False) if not p.is_meta)
    for module in model.modules():
        for names in FUSABLE:
            group: Any = tuple(getattr(module, name, None) for name in names)
            if not _fusable(group) or not _owns_storage(group, sharing):
                continue
            try:
                _fuse_group(group)
            except torch.OutOfMemoryError:  # it is a gain, no need
                return groups
            groups.append(group)
    return groups


@contextmanager
def fused_for_tracing(groups: Iterable[FusionGroup]) -> Iterator[None]:
    """For a compiler that looks at the model meanwhile, or for what it made. Weights that have come into the model
    since are joined; what fits no longer is left alone, and what was compiled of it fails."""
    swapped: list[nn.Linear] = []
    try:
        for group in groups:
            if _fusable(group):
                _fuse_group(group)
                swapped += group
            else:
                unfuse([group])
        for part in swapped:
            part.__class__ = FusedLinearSlice
        yield
    finally:
        for part in swapped:
            part.__class__ = nn.Linear


def unfuse(groups: Iterable[FusionGroup]) -> None:
    """Forgets the large products. The weights stay where they are."""
    for group in groups:
        for one in group:
            one.__dict__.pop("fused_weight", None)


class DedupMatmulPass(CustomGraphPass):
    """Equal products of a graph are computed once."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        known = dict[Any, torch.fx.Node]()
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in DEDUP_OPS:
                continue
            first = known.setdefault((node.target, str(node.args), str(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _fusable(group: Sequence[Any]) -> bool:
    """Whether these are linear layers as torch makes them, of one input size, type and device."""
    if not all(type(one) is nn.Linear for one in group):
        return False
    weights = [one.weight for one in group]
    biases = [one.bias for one in group if one.bias is not None]
    if not all(type(p) is nn.Parameter and type(p.data) is Tensor for p in (*weights, *biases)):
        return False
    if any(p.is_inference() or p.is_meta for p in (*weights, *biases)):
        return False
    return len({(p.shape[1], p.dtype, p.device) for p in weights}) == 1 and len(biases) in (0, len(group))


def _owns_storage(group: FusionGroup, storage_counts: Counter[int]) -> bool:
    """Whether nothing else of the model lies in the memory of their weights."""
    own = Counter(_storage_ptr(p) for one in group for p in (one.weight, one.bias) if p is not None)
    return all(storage_counts[place] == count for place, count in own.items())


def _storage_ptr(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _fuse_group(group: FusionGroup) -> None:
    weight = _concat_in_place([one.weight for one in group])
    bias = None if group[0].bias is None else _concat_in_place([one.bias for one in group])
    begin = 0
    for one in group:
        joint = FusedWeight(weight, bias, begin, begin + len(one.weight))
        one.__dict__["fused_weight"], begin = joint, joint.end  # no parameters of its own


@torch.inference_mode(False)
@torch.no_grad()
def _concat_in_place(tensors: Sequence[Float[Tensor, "f *E"]]) -> Float[Tensor, "F *E"]:
    """One tensor of which these are the parts, in order. Where they lie otherwise, they are put there."""
    first, end = tensors[0], tensors[0].data_ptr()
    for part in tensors:
        if part.data_ptr() != end or _storage_ptr(part) != _storage_ptr(first) or not part.is_contiguous():
            break
        end += part.numel() * part.element_size()
    else:
        return _mark_static(first.detach().as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride()))
    made = torch.cat([part.detach() for part in tensors])
    for part, own in zip(tensors, made.split([len(part) for part in tensors]), strict=True):
        part.data = own
    if made.is_cuda:
        torch.cuda.empty_cache()  # what the parts took is of no size that comes again
    return _mark_static(made)


def _mark_static(tensor: Tensor) -> Tensor:
    """As parameters are, for a compiler that takes other sizes to be any."""
    torch._dynamo.mark_static(tensor)
    return tensor
