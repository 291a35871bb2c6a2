"""Small steps through `torch.compile`: one graph for each bucket of rows, attention as one opaque operator.

The model is not changed: the graph is what transformers' own forward traces to, with weights folded in and
prepacked (inductor freezing). A step is padded to the next bucket; padding rows write into the arena's bin page
and read nothing. Every process waits for the compiler: graphs with packed weights do not go into its cache on disk,
what C++ makes of them does.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

from ..attention.backend import ForwardContext
from .hf_model import HFModel

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from .cuda_graph import StaticForwardContext

COMPILE_OPTIONS: dict[str, Any] = {
    "guard_filter_fn": torch.compiler.skip_all_guards_unsafe
}  # every bucket has fixed shapes of its own

# Freezing folds and prepacks the weights; concatenation makes one product of the projections that share an input.
# Both are read while tracing: given as options of torch.compile they come too late.
INDUCTOR_OPTIONS = {"freezing": True, "cpp.enable_concat_linear": True}


class OpaqueContext(OpaqueBase):
    """A step as a black box that a graph hands to the attention operator."""

    def __init__(self, forward_context: "ForwardContext | StaticForwardContext | None") -> None:
        self.forward_context = forward_context

    def __reduce__(self) -> tuple[type, tuple[None]]:
        """What a graph's cache key sees of a step: nothing, since every step runs the same graph."""
        return OpaqueContext, (None,)


register_opaque_type(OpaqueContext, typ="reference")

_library = torch.library.Library("choreograph", "DEF")

_library.define(
    "attend(Tensor query, Tensor key, Tensor value, "
    f"{torch._library.opaque_object.get_opaque_type_name(OpaqueContext)} step, int layer, float scale, "
    "Tensor? sinks) -> Tensor"
)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, step: OpaqueContext, layer: int, scale: float, sinks: Tensor | None
) -> Tensor:
    assert step.forward_context is not None
    return step.forward_context.attend(layer, query, key, value, scale, sinks)


def _attend_shape(
    query: Tensor, key: Tensor, value: Tensor, step: Any, layer: int, scale: float, sinks: Tensor | None
) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


_library.impl("attend", _attend, "CPU")

_library.impl("attend", _attend, "CUDA")

torch.library.register_fake("choreograph::attend", _attend_shape, lib=_library)


class CompiledForward:
    """`adapter.forward` for steps of up to the largest bucket; None for larger ones, which run eagerly."""

    def __init__(self, hf_model: HFModel, sizes: tuple[int, ...]) -> None:
        self._hf_model = hf_model
        self.sizes = sizes
        self._graphs: dict[int, Any] = {}

    def __call__(
        self, tokens: list[int], positions: list[int], forward_context: ForwardContext, logits_indices: list[int]
    ) -> Tensor | None:
        count = next((size for size in self.sizes if size >= len(tokens)), None)
        if count is None:
            return None
        padding = [0] * (count - len(tokens))
        device = self._hf_model.model_info.device
        arguments = (
            torch.tensor([tokens + padding], device=device),
            torch.tensor([positions + padding], device=device),
            OpaqueContext(forward_context.pad_to(count)),
        )
        graph = self._graphs.get(count)
        if graph is not None:
            return graph(*arguments)[0, logits_indices].float()
        graph = self._compile(count)
        with _tracing():
            logits = graph(*arguments)[0, logits_indices].float()
        self._graphs[count] = graph
        return logits

    def _compile(self, num_tokens: int) -> Any:
        """Traced and compiled by its first call."""
        return compile_model(self._hf_model, f"forward_{num_tokens}")


@contextmanager
def _tracing() -> Iterator[None]:
    """In float32 the compiler takes MKL's products unless those of float32 may be rounded. Where registers hold eight
    numbers oneDNN's take half the time of them for 2 to 8 rows, so there it is told that they may, while it compiles
    alone: such processors cannot round, and what runs is told nothing."""
    products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = products.fp32_precision
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        products.fp32_precision = "tf32"
    try:
        with torch._inductor.config.patch(INDUCTOR_OPTIONS), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*FX graph cache copying.*")
            yield
    finally:
        products.fp32_precision = before


def compile_model(
    hf_model: HFModel, name: str, *, dynamic: bool = False, graph_pass: "CustomGraphPass | None" = None
) -> Any:
    """The model as one graph, of any number of rows where it is `dynamic`. name: its own, for dynamo keeps one list of
    graphs per code object. once: a pass over the graph."""
    model = hf_model.model

    def forward(ids: Tensor, positions: Tensor, step: OpaqueContext) -> Tensor:
        return model(input_ids=ids, position_ids=positions, use_cache=False, step=step).logits

    forward.__code__ = forward.__code__.replace(co_name=name)
    options = COMPILE_OPTIONS if graph_pass is None else COMPILE_OPTIONS | {"post_grad_custom_pre_pass": graph_pass}
    return torch.compile(forward, fullgraph=True, dynamic=dynamic, options=options)
