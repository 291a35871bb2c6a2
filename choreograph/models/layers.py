"""Capture inputs of decoder layers, or run a range of layers.

The model is unchanged: a pre-forward hook passes a layer's input to the forward context, and a range
of layers is the model's own forward pass over a list that holds only those.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import ModelError


class DecoderLayers:
    """Decoder layers of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        count = model.config.get_text_config().num_hidden_layers
        self.backbone: Any = model.base_model
        paths = [
            path
            for path, module in self.backbone.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == count and not any(map(str.isdigit, path.split(".")))
        ]
        if len(paths) != 1:
            raise ModelError(
                f"{type(model).__name__}: its {count} layers are not one list; it cannot take part in layer reuse"
            )
        owner, _, self._name = paths[0].rpartition(".")
        self._owner: Any = self.backbone.get_submodule(owner)
        self.layers: Any = self.backbone.get_submodule(paths[0])
        self.captured: frozenset[int] = frozenset()  # layers whose inputs a forward context gets

    def capture(self, layers: Iterable[int]) -> None:
        """Let forward contexts save or replace the inputs of these layers."""
        for layer in set(layers) - self.captured:
            self.layers[layer].register_forward_pre_hook(partial(_on_layer_input, layer), with_kwargs=True)
            self.captured |= {layer}

    @contextmanager
    def restricted_to(self, start_layer: int, end_layer: int) -> Iterator[None]:
        """Reduce the model to layers [start_layer, end_layer) inside the block."""
        config = self.backbone.config.get_text_config()
        layer_types = getattr(config, "layer_types", None)  # looked up by layer index in the reduced list
        try:
            setattr(self._owner, self._name, self.layers[start_layer:end_layer])
            if layer_types is not None:
                config.layer_types = layer_types[start_layer:end_layer]
            yield
        finally:
            setattr(self._owner, self._name, self.layers)
            if layer_types is not None:
                config.layer_types = layer_types


def _on_layer_input(
    layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass a layer's input through the forward context, except in compiled graphs."""
    on_layer_input = getattr(kwargs.get("step"), "on_layer_input", None)  # training's context has none
    if on_layer_input is None or torch.compiler.is_compiling():
        return args, kwargs
    if args:
        return (on_layer_input(layer, args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": on_layer_input(layer, kwargs["hidden_states"])}
