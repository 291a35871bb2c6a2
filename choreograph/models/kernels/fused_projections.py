"""Fused q/k/v and gate/up projections for compiled graphs.

A step of few tokens is bound by reading weights, and three small matmuls read them more slowly than one
large one. The weights of such projections are concatenated in place (parameters become views), so eager
execution and `state_dict()` are unchanged. While a model is traced, each projection is a slice of the
fused matmul, which a graph pass deduplicates (`model_graph`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

FUSABLE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # children of a module, called with the same input

FusionGroup = tuple[nn.Linear, ...]


class FusedWeight(NamedTuple):
    """Fused projection weight, and the output slice of one part."""

    weight: Tensor  # (F, E)
    bias: Tensor | None  # (F,)
    start: int  # first output feature of the part
    end: int  # exclusive

    def __deepcopy__(self, memo: object) -> None:
        """Drop the fused weight: a copied model has its own, unfused weights."""


def fuse(model: nn.Module) -> list[FusionGroup]:
    """Concatenate the weights of projections with the same input; return the groups."""
    groups: list[FusionGroup] = []
    parameters = (p for _, p in model.named_parameters(remove_duplicate=False) if not p.is_meta)
    storage_counts = Counter(map(_storage_ptr, parameters))
    for module in model.modules():
        for names in FUSABLE:
            group: Any = tuple(getattr(module, name, None) for name in names)
            if not is_fusable(group):
                continue
            own_counts = Counter(_storage_ptr(p) for part in group for p in (part.weight, part.bias) if p is not None)
            if any(storage_counts[storage] != count for storage, count in own_counts.items()):
                continue  # other parameters share the memory
            try:
                _fuse_group(group)
            except torch.OutOfMemoryError:  # fusion is optional
                return groups
            groups.append(group)
    return groups


def fused_forward(part: Any, input: Float[Tensor, "*n E"]) -> Float[Tensor, "*n F"]:
    """Compute a projection as a slice of its fused matmul."""
    fused: FusedWeight = part.fused_weight
    return linear(input, fused.weight, fused.bias)[..., fused.start : fused.end]


@contextmanager
def fused_for_tracing(
    groups: Iterable[FusionGroup], forward: Callable[[Any, Tensor], Tensor] = fused_forward
) -> Iterator[None]:
    """Compute each projection as a slice of its fused matmul while tracing.

    Applies inside the block, where a graph is traced or captured. Weights replaced since `fuse` are fused
    again. A group that cannot be fused any more stays unfused, and graphs compiled from it fail.
    """
    fused: list[nn.Linear] = []
    for group in groups:
        if is_fusable(group):
            _fuse_group(group)
            fused += group
        else:
            unfuse([group])
    with forwards_for_tracing([(part, forward) for part in fused]):
        yield


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


def unfuse(groups: Iterable[FusionGroup]) -> None:
    """Drop the fused weights without moving the parameters."""
    for group in groups:
        for part in group:
            vars(part).pop("fused_weight", None)


def is_fusable(group: Sequence[Any]) -> bool:
    """Check for plain linear layers of equal input size, dtype and device."""
    if not all(type(part) is nn.Linear for part in group):
        return False
    weights = [part.weight for part in group]
    biases = [part.bias for part in group if part.bias is not None]
    return (
        all(type(p) is nn.Parameter and type(p.data) is Tensor for p in (*weights, *biases))
        and not any(p.is_inference() or p.is_meta for p in (*weights, *biases))
        and len({(p.shape[1], p.dtype, p.device) for p in weights}) == 1
        and len(biases) in (0, len(group))
    )


def _storage_ptr(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _fuse_group(group: FusionGroup) -> None:
    weight = _concat_in_place([part.weight for part in group])
    bias = None if group[0].bias is None else _concat_in_place([part.bias for part in group])
    start = 0
    for part in group:
        fused = FusedWeight(weight, bias, start, start + len(part.weight))
        vars(part)["fused_weight"], start = fused, fused.end  # no registered parameter: `state_dict()` is unchanged


@torch.inference_mode(False)
@torch.no_grad()
def _concat_in_place(tensors: Sequence[Float[Tensor, "f *E"]]) -> nn.Parameter:
    """Concatenate tensors into one parameter and make them views of it.

    Tensors that are already adjacent in memory are not moved. The result is a parameter because the
    compiler takes only the shapes of parameters as static.
    """
    first, end = tensors[0], tensors[0].data_ptr()
    for part in tensors:
        if part.data_ptr() != end or _storage_ptr(part) != _storage_ptr(first) or not part.is_contiguous():
            break
        end += part.numel() * part.element_size()
    else:
        fused = first.detach().as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
        return nn.Parameter(fused, requires_grad=False)
    fused = torch.cat([part.detach() for part in tensors])
    for part, view in zip(tensors, fused.split([len(part) for part in tensors]), strict=True):
        part.data = view
    if fused.is_cuda:
        torch.cuda.empty_cache()  # the parts' memory is of sizes that are not allocated again
    return nn.Parameter(fused, requires_grad=False)
