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

ALIKE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # of one module, and called with the same tensor
aten = torch.ops.aten
SHAPING = {aten.permute.default, aten.t.default, aten.view.default, aten.reshape.default, aten._unsafe_view.default}
PRODUCTS = frozenset({aten.mm.default, aten.addmm.default} | SHAPING)  # and what stands in front of them

Group = tuple[nn.Linear, ...]


class Joint(NamedTuple):
    """The large product, and which rows of its weight are one projection's: begin <= i < end."""

    weight: Tensor
    bias: Tensor | None
    begin: int
    end: int

    def __deepcopy__(self, memo: object) -> None:
        """A copied model's weights lie elsewhere, apart."""


class Part(nn.Linear):
    """What a projection is while it is traced."""

    joint: Joint

    def forward(self, input: Float[Tensor, "*n E"]) -> Float[Tensor, "*n F"]:
        return linear(input, self.joint.weight, self.joint.bias)[..., self.joint.begin : self.joint.end]


def join(model: nn.Module) -> list[Group]:
    """Puts the weights of projections that read alike behind each other, once. Gives what goes together."""
    groups: list[Group] = []
    sharing = Counter(_storage(p) for _, p in model.named_parameters(remove_duplicate=False) if not p.is_meta)
    for module in model.modules():
        for names in ALIKE:
            group: Any = tuple(getattr(module, name, None) for name in names)
            if not _fits(group) or not _own_all(group, sharing):
                continue
            try:
                _join(group)
            except torch.OutOfMemoryError:  # it is a gain, no need
                return groups
            groups.append(group)
    return groups


@contextmanager
def as_one(groups: Iterable[Group]) -> Iterator[None]:
    """For a compiler that looks at the model meanwhile, or for what it made. Weights that have come into the model
    since are joined; what fits no longer is left alone, and what was compiled of it fails."""
    swapped: list[nn.Linear] = []
    try:
        for group in groups:
            if _fits(group):
                _join(group)
                swapped += group
            else:
                leave([group])
        for part in swapped:
            part.__class__ = Part
        yield
    finally:
        for part in swapped:
            part.__class__ = nn.Linear


def leave(groups: Iterable[Group]) -> None:
    """Forgets the large products. The weights stay where they are."""
    for group in groups:
        for one in group:
            one.__dict__.pop("joint", None)


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


def _fits(group: Sequence[Any]) -> bool:
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


def _own_all(group: Group, sharing: Counter[int]) -> bool:
    """Whether nothing else of the model lies in the memory of their weights."""
    own = Counter(_storage(p) for one in group for p in (one.weight, one.bias) if p is not None)
    return all(sharing[place] == count for place, count in own.items())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _join(group: Group) -> None:
    weight = _joint([one.weight for one in group])
    bias = None if group[0].bias is None else _joint([one.bias for one in group])
    begin = 0
    for one in group:
        joint = Joint(weight, bias, begin, begin + len(one.weight))
        one.__dict__["joint"], begin = joint, joint.end  # no parameters of its own


@torch.inference_mode(False)
@torch.no_grad()
def _joint(parts: Sequence[Float[Tensor, "f *E"]]) -> Float[Tensor, "F *E"]:
    """One tensor of which these are the parts, in order. Where they lie otherwise, they are put there."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or _storage(part) != _storage(first) or not part.is_contiguous():
            break
        end += part.numel() * part.element_size()
    else:
        return _of_fixed_size(first.detach().as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride()))
    made = torch.cat([part.detach() for part in parts])
    for part, own in zip(parts, made.split([len(part) for part in parts]), strict=True):
        part.data = own
    if made.is_cuda:
        torch.cuda.empty_cache()  # what the parts took is of no size that comes again
    return _of_fixed_size(made)


def _of_fixed_size(joint: Tensor) -> Tensor:
    """As parameters are, for a compiler that takes other sizes to be any."""
    torch._dynamo.mark_static(joint)
    return joint
