"""Decoder layers of the Llama type, run through a few operators on CPUs.

A layer of these families is: a norm, query, key and value projections (perhaps with norms of the heads), rotation,
attention, an output projection, and a gated MLP behind another norm; in Gemma, norms follow both blocks too. The
weights stay the model's own parameters: nothing is copied, and adapters, training and saving see the same model. The
layers' own forward methods are the oracle of these operators, and run wherever the operators do not apply.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from ...attention.metadata import HeadShape
from ..kernels.int4_linear import Int4Linear, is_kernel_available
from ..lora import LoraManager
from .int4_operator import Int4Operator
from .library import GELU, PLAIN, SILU, Layer, LinearOperator, NormOperator, finish

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")  # transformers' `model_type`

_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
_LAYER_MODULES = {*_NORMS, *_GEMMA_NORMS, "self_attn", "mlp", "resid_attn_dropout", "resid_mlp_dropout"}
_ATTENTION_MODULES = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"}
_MLP_MODULES = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"}


class UnrecognizedLayerError(Exception):
    """Error for a layer that the operators do not cover."""


class Projection:
    """Linear layers with one input, and the adapters of a step.

    Args:
        paths: module paths of the layers, by which adapters name them.
    """

    def __init__(
        self,
        layers: Sequence[nn.Linear],
        paths: Sequence[str],
        lora: LoraManager | None,
        norm: NormOperator | None = None,
        mode: int = PLAIN,
    ) -> None:
        operator: Any = Int4Operator if isinstance(layers[0], Int4Linear) else LinearOperator
        self.fused: LinearOperator = operator(layers, norm, mode)
        self._product = self.fused if norm is None and mode == PLAIN else operator(layers)
        self._layers, self.paths, self._lora, self._norm, self._mode = layers, paths, lora, norm, mode

    def refresh(self) -> None:
        """Read the addresses of the parameters again."""
        self.fused.refresh()
        if self._product is not self.fused:
            self._product.refresh()

    def __call__(self, x: Float[Tensor, "1 N E"], residual: Float[Tensor, "1 N F"] | None = None) -> Tensor:
        """Return the output, (1, N, F), added to `residual` if there is one."""
        if self._lora is None or not self._lora.changes_any(self.paths):
            return self.fused(x, residual)
        x = x if self._norm is None else self._norm(x)
        out, start = self._product(x), 0
        for layer, path in zip(self._layers, self.paths, strict=True):
            self._lora.apply(path, x, out[..., start : start + layer.out_features])
            start += layer.out_features
        return finish(out, self._mode, residual)


class LayerOperators:
    """Forward pass of one decoder layer.

    Raises:
        UnrecognizedLayerError: if the layer has other parts.
    """

    def __init__(self, layer: nn.Module, path: str, lora: LoraManager | None) -> None:
        attention, mlp = _part(layer, "self_attn"), _part(layer, "mlp")
        _check_modules(layer, _LAYER_MODULES)
        _check_modules(attention, _ATTENTION_MODULES)
        _check_modules(mlp, _MLP_MODULES)
        modules = dict(layer.named_children())
        is_gemma = _GEMMA_NORMS[0] in modules
        norms = [recognize_norm(_part(layer, name)) for name in (*_NORMS, *(_GEMMA_NORMS if is_gemma else ()))]
        self._post_norms = (norms[1], norms[3]) if is_gemma else None

        def project(parent: Any, name: str, fused: str, parts: Sequence[str], **options: Any) -> Projection:
            names = (fused,) if hasattr(parent, fused) else parts
            linears = [check_linear(_part(parent, part)) for part in names]
            return Projection(linears, [f"{path}.{name}.{part}" for part in names], lora, **options)

        self._qkv = project(attention, "self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj"), norm=norms[0])
        self._output = project(attention, "self_attn", "o_proj", ())
        mode = _activation_mode(getattr(mlp, "act_fn", None) or _part(mlp, "activation_fn"))
        self._gated = project(
            mlp, "mlp", "gate_up_proj", ("gate_proj", "up_proj"), norm=norms[2 if is_gemma else 1], mode=mode
        )
        self._down = project(mlp, "mlp", "down_proj", ())
        self._projections = self._qkv, self._output, self._gated, self._down
        self._lora, self._paths = lora, [name for projection in self._projections for name in projection.paths]
        self.layer_index, self._scale, head_dim = (
            _part(attention, name) for name in ("layer_idx", "scaling", "head_dim")
        )
        num_heads = self._output.fused.in_features // head_dim
        num_kv_heads = (self._qkv.fused.features // head_dim - num_heads) // 2
        self._head_counts = num_heads, num_kv_heads, num_kv_heads  # of queries, keys and values
        self.head_shape = HeadShape(num_heads, num_kv_heads, head_dim)
        head_norms = [
            recognize_norm(getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)
        ]
        if head_norms and any(len(getattr(attention, name).weight) != head_dim for name in ("q_norm", "k_norm")):
            raise UnrecognizedLayerError("its query and key norms are not of single heads")
        self._norms, self.kernels = [*norms, *head_norms], norms[0].kernels
        self.struct = Layer(
            *(projection.fused.address for projection in self._projections),
            *((norms[1].address, norms[3].address) if is_gemma else (None, None)),
            *([norm.address for norm in head_norms] or (None, None)),
            *(num_heads, num_kv_heads, head_dim, self._scale),
        )
        self.address = ctypes.addressof(self.struct)
        self.refresh()

    def refresh(self) -> None:
        """Read the addresses of the parameters again."""
        operators: list[Projection | NormOperator] = [*self._projections, *self._norms]
        for operator in operators:
            operator.refresh()
        self.max_rows = min(projection.fused.max_rows for projection in self._projections)

    def __call__(
        self, hidden_states: Float[Tensor, "1 N E"], *, position_embeddings: tuple[Tensor, Tensor], step: Any, **_: Any
    ) -> Float[Tensor, "1 N E"]:
        """Compute the layer; attention through `step.attend`."""
        hidden, rows, threads = hidden_states.contiguous(), hidden_states.shape[1], torch.get_num_threads()
        cos, sin = (part.contiguous() for part in position_embeddings)
        rotation = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        is_fused = rows <= self.max_rows and (self._lora is None or not self._lora.changes_any(self._paths))
        if is_fused:
            joint = hidden.new_empty(1, rows, self._qkv.fused.features)
            self.kernels.before_attention(self.address, hidden.data_ptr(), rows, *rotation, joint.data_ptr(), threads)
        else:
            joint = self._qkv(hidden)
            self.kernels.rotate(self.address, joint.data_ptr(), rows, *rotation, threads)
        by_head = joint.view(1, rows, -1, self.struct.head_dim).transpose(1, 2)
        query, key, value = by_head.split_with_sizes(self._head_counts, 1)
        attended = step.attend(self.layer_index, query, key, value, self._scale, None).flatten(2)
        if not is_fused:
            return self._finish(attended, hidden)
        attended, out = attended.contiguous(), torch.empty_like(hidden)
        self.kernels.after_attention(
            self.address, attended.data_ptr(), hidden.data_ptr(), rows, out.data_ptr(), threads
        )
        return out

    def _finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """Compute what follows attention, one projection after the other."""
        if self._post_norms is None:
            hidden = self._output(attended, hidden)
            return self._down(self._gated(hidden), hidden)
        attention_norm, mlp_norm = self._post_norms
        hidden = attention_norm(self._output(attended), hidden)
        return mlp_norm(self._down(self._gated(hidden)), hidden)


def recognize_norm(module: Any) -> NormOperator:
    """Return the operator of an RMS norm.

    Whether its factors are the weights or 1 + weights is measured on a sample.

    Raises:
        UnrecognizedLayerError: if it computes something else.
    """
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or type(weight) is not nn.Parameter or weight.ndim != 1 or not eps:
        raise UnrecognizedLayerError(f"{type(module).__name__} is no RMS norm that is known")
    sample = torch.linspace(-2, 3, 2 * len(weight)).view(2, -1).to(weight.dtype)
    expected = module(sample).float()
    for adds_one in (False, True):
        operator = NormOperator(module, float(eps), adds_one)
        if torch.allclose(operator(sample).float(), expected, rtol=1e-2, atol=1e-5):
            return operator
    raise UnrecognizedLayerError(f"{type(module).__name__} computes something else than an RMS norm")


def _activation_mode(activation: Callable[[Tensor], Tensor]) -> int:
    sample = torch.linspace(-4, 4, 65)
    for mode, expected in ((SILU, silu(sample)), (GELU, gelu(sample, approximate="tanh"))):
        if torch.allclose(activation(sample), expected, atol=1e-5):
            return mode
    raise UnrecognizedLayerError(f"its activation {type(activation).__name__} is neither SiLU nor GELU with tanh")


def _part(parent: nn.Module, name: str) -> Any:
    module = getattr(parent, name, None)
    if module is None:
        raise UnrecognizedLayerError(f"{type(parent).__name__} has no {name}")
    return module


def _check_modules(parent: nn.Module, known: set[str]) -> None:
    unknown = {name for name, _ in parent.named_children()} - known
    if unknown:
        raise UnrecognizedLayerError(f"{type(parent).__name__} has other parts: {', '.join(sorted(unknown))}")


def check_linear(layer: Any) -> nn.Linear:
    """Return a linear layer whose weight the operators read.

    Raises:
        UnrecognizedLayerError: if it is something else.
    """
    if isinstance(layer, Int4Linear) and is_kernel_available():
        return layer
    parameters = [layer.weight, layer.bias] if type(layer) is nn.Linear else []
    if not parameters or any(
        p is not None and (type(p) is not nn.Parameter or type(p.data) is not Tensor or not p.is_contiguous())
        for p in parameters
    ):
        raise UnrecognizedLayerError(f"{type(layer).__name__} is no plain linear layer")
    return layer


def check_plain(module: Any, dtype: torch.dtype) -> None:
    """Check that a module computes with parameters of one dtype, and nothing beside its class's forward method.

    Hooks of the module itself run around its operator, those of its parts would not.

    Raises:
        UnrecognizedLayerError: if it does not.
    """
    parts = [] if module is None else list(module.modules())
    for part in parts:
        name, hooks = type(part).__name__, (part._forward_hooks, part._forward_pre_hooks)
        if "forward" in vars(part) or (part is not module and any(hooks)):
            raise UnrecognizedLayerError(f"{name} has a forward method or hooks of its own")
        for parameter in part._parameters.values():
            is_packed = isinstance(part, Int4Linear) and parameter is part.weight and dtype == torch.bfloat16
            if parameter is not None and parameter.dtype != dtype and not is_packed:
                raise UnrecognizedLayerError(f"{name} has parameters in {parameter.dtype}, the model is in {dtype}")
