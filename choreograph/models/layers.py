"""The layers of a model one by one: what comes into some of them is kept, and a stretch of them runs alone.

The model itself is not changed: a hook before a layer sees what comes into it, and a stretch is the model's own forward
pass over a list of layers that holds only those.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import ModelError


class DecoderLayers:
    """The decoder layers of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        count = model.config.get_text_config().num_hidden_layers
        self.backbone: Any = model.base_model
        lists = [
            (path, module)
            for path, module in self.backbone.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == count and not any(map(str.isdigit, path.split(".")))
        ]
        if len(lists) != 1:
            raise ModelError(f"{type(model).__name__}: its {count} layers are not one list; it cannot share encodings")
        path, self.layers = lists[0]
        owner, _, self._name = path.rpartition(".")
        self._owner: Any = self.backbone.get_submodule(owner)
        self.captured: frozenset[int] = frozenset()

    def capture(self, layers: Iterable[int]) -> None:
        """From now on a step may keep what comes into these layers, or give something else in its place."""
        for layer in set(layers) - self.captured:
            self.layers[layer].register_forward_pre_hook(_make_hook(layer), with_kwargs=True)
            self.captured |= {layer}

    @contextmanager
    def restricted_to(self, start_layer: int, end_layer: int) -> Iterator[None]:
        """Inside the block the model has no other layers than these. What it looks up by a layer's number (which rotary
        table is whose) is cut alike."""
        config = self.backbone.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        try:
            setattr(self._owner, self._name, self.layers[start_layer:end_layer])
            if kinds is not None:
                config.layer_types = kinds[start_layer:end_layer]
            yield
        finally:
            setattr(self._owner, self._name, self.layers)
            if kinds is not None:
                config.layer_types = kinds


def _make_hook(layer: int) -> Any:
    def hook(
        module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        step = named.get("step")
        if step is not None and not torch.compiler.is_compiling():  # graphs are for steps that keep nothing
            if given:
                given = (_on_layer_input(step, layer, given[0]), *given[1:])
            else:
                named = named | {"hidden_states": _on_layer_input(step, layer, named["hidden_states"])}
        return given, named

    return hook


def _on_layer_input(forward_context: Any, layer: int, hidden: Tensor) -> Tensor:
    enter = getattr(forward_context, "on_layer_input", None)  # a step that computes gradients keeps nothing
    return hidden if enter is None else enter(layer, hidden)
