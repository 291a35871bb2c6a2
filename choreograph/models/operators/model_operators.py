"""A model's forward pass with operators in place of its decoder layers, last norm and output layer.

Everything else is the model's own: embedding, rotary tables, order of layers, caps of logits. Operators are checked
against the modules that they replace when a model is loaded.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...attention.cpp_backend import BackendUnavailableError
from ...errors import ModelError
from .decoder_layer import (
    FAMILIES,
    LayerOperators,
    Projection,
    UnrecognizedLayerError,
    check_linear,
    check_plain,
    recognize_norm,
)
from .layer_stack import LayerStack
from .library import NormOperator

if TYPE_CHECKING:
    from ..hf_model import HFModel

_log = logging.getLogger("choreograph")

CHECKED_ROWS = (1, 5, 40, 80)  # tokens of the steps that operators are checked with


class ModelOperators:
    """Operators of one model.

    Raises:
        UnrecognizedLayerError: if a layer has other parts, or an operator differs from its module.
        BackendUnavailableError: if the operators cannot be built here.
    """

    def __init__(self, hf_model: "HFModel") -> None:
        model, layers = hf_model.model, hf_model.decoder_layers
        norm: Any = getattr(layers.backbone, "norm", None)
        head: Any = model.get_output_embeddings()
        for module in (*layers.layers, norm, head):
            check_plain(module, hf_model.model_info.dtype)
        paths = {module: path for path, module in model.named_modules()}
        layer_operators = [LayerOperators(layer, paths[layer], hf_model.lora_manager) for layer in layers.layers]
        self._operators: list[tuple[nn.Module, LayerOperators | NormOperator | Projection]] = [
            *zip(layers.layers, layer_operators, strict=True)
        ]
        self._layers, self._stack = layers, LayerStack([*layers.layers], layer_operators)
        self._operators.append((norm, recognize_norm(norm)))
        self._operators.append((head, Projection([check_linear(head)], [paths[head]], None)))
        owners = [owner for module, _ in self._operators for owner in module.modules()]
        parts = [(owner._modules, name, part) for owner in owners for name, part in owner._modules.items()]
        self._owners, self._names, self._parts = (list(column) for column in zip(*parts, strict=True))
        self._parameters: list[tuple[Any, str, torch.Size]] = [
            (owner._parameters, name, parameter.shape)
            for owner in owners
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self._name, self._dtype = hf_model.model_info.name, hf_model.model_info.dtype
        self._addresses = self._read_addresses()
        self._is_outdated = False  # True after the owner changed parts of the model
        self._check(hf_model)

    @contextmanager
    def applied(self, step: Any = None, num_rows: int = 0) -> Iterator[None]:
        """Run the operators in place of their modules inside the block.

        Args:
            step: forward context of a pass over all layers without adapters, which may take one call.
            num_rows: tokens of the pass.
        """
        operators: list[tuple[nn.Module, Any]] = []
        if not self._has_changed():
            operators = [pair for pair in self._operators if "forward" not in vars(pair[0])]
        if len(operators) == len(self._operators) and self._stack.start(step, num_rows, self._layers.captured):
            num_layers = len(self._layers.layers)
            operators = [*((layer, self._stack) for layer, _ in operators[:num_layers]), *operators[num_layers:]]
        try:
            for module, operator in operators:
                vars(module)["forward"] = operator
            yield
        finally:
            for module, _ in operators:
                vars(module).pop("forward", None)

    def _has_changed(self) -> bool:
        """Return whether the owner changed the model; read addresses of parameters again that moved."""
        if self._is_outdated:
            return True
        if list(map(dict.get, self._owners, self._names)) != self._parts:
            self._is_outdated = True
        elif (addresses := self._read_addresses()) != self._addresses:
            kinds = {self._dtype, torch.uint8}  # the latter: weights of 4 bits
            for parameters, name, shape in self._parameters:
                parameter = parameters[name]
                is_same = parameter.shape == shape and parameter.dtype in kinds and parameter.device.type == "cpu"
                self._is_outdated |= not is_same or not parameter.is_contiguous()
            if not self._is_outdated:
                for _, operator in self._operators:
                    operator.refresh()
                self._addresses = addresses
        if self._is_outdated:
            _log.warning(
                "%s: its layers run as transformers computes them, which is slower, because they were changed: "
                "create the engine again to use operators",
                self._name,
            )
        return self._is_outdated

    def _read_addresses(self) -> list[int]:
        return [parameters[name].data_ptr() for parameters, name, _ in self._parameters]

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # kernels read what PyTorch's products return, of the model's dtype
    def _check(self, hf_model: "HFModel") -> None:
        """Compare each operator with its module, on the inputs of a forward pass of random tokens."""
        info, calls = hf_model.model_info, dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any], Tensor]]()
        num_tokens = min(CHECKED_ROWS[-1], info.max_positions)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, info.vocab_size, (num_tokens,), generator=generator).tolist()
        positions = list(range(num_tokens))
        with ExitStack() as hooks, hf_model.attention_hook():
            for module, _ in self._operators:

                def record(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
                    calls[module] = args, kwargs, output

                handle = module.register_forward_hook(record, with_kwargs=True)
                hooks.callback(handle.remove)
            hf_model.logits(tokens, positions, TokenMixer(), positions)
        for module, operator in self._operators:
            if module not in calls:
                raise UnrecognizedLayerError(f"{type(module).__name__} is not called in a forward pass")
            args, kwargs, expected = calls[module]
            for rows in CHECKED_ROWS:
                part = _first_rows((args, kwargs), num_tokens, rows)
                _compare(module, operator(*part[0], **part[1]), args[0][:, :rows], expected[:, :rows])


class TokenMixer:
    """Forward context in which each token attends to itself alone."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        share = query.shape[1] // key.shape[1]
        keys, values = (part.repeat_interleave(share, 1) for part in (key, value))
        mixed = (query * scale + keys / 2) * (1 + layer / 8) + values.flip(-1)  # different in every argument
        return mixed.transpose(1, 2).contiguous()


def create_operators(hf_model: "HFModel") -> ModelOperators | None:
    """Create the operators of a model, or return None.

    Logs a warning where the model is of a family that they cover and they do not apply.
    """
    info = hf_model.model_info
    is_covered = hf_model.model.config.get_text_config().model_type in FAMILIES
    if not is_covered or info.device.type != "cpu" or hf_model.tp_group is not None:
        return None
    try:
        return ModelOperators(hf_model)
    except (UnrecognizedLayerError, BackendUnavailableError, ModelError) as exc:
        _log.warning(
            "%s: its layers run as transformers computes them, which is slower: %s (backend='sdpa' does so without this "
            "warning)",
            info.name,
            exc,
        )
        return None


def _first_rows(value: Any, num_tokens: int, rows: int) -> Any:
    """Return arguments of a module for the first `rows` of `num_tokens` tokens."""
    if isinstance(value, dict):
        return {key: _first_rows(item, num_tokens, rows) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_first_rows(item, num_tokens, rows) for item in value)
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == num_tokens:
        return value[:, :rows]
    return value


def _compare(module: nn.Module, result: Tensor, input: Tensor, expected: Tensor) -> None:
    """Raise UnrecognizedLayerError if an operator's result is not its module's.

    Errors are relative to what the module changes: the residual stream can be a thousand times larger.
    """
    change = expected.float() - input.float() if input.shape == expected.shape else expected.float()
    error = ((result.float() - expected.float()).norm(dim=-1) / change.norm(dim=-1).clamp(min=1e-20)).max()
    if result.shape != expected.shape or not error <= (1e-3 if expected.dtype == torch.float32 else 0.05):
        raise UnrecognizedLayerError(
            f"{type(module).__name__} computes something else than its operators (a relative error of {float(error):.2g})"
        )
