"""Rotary tables that change with the length of what is computed, frozen at one length.

A key that was encoded in a short prompt would not fit a longer one: `dynamic` and `longrope` tables are taken as they
are at the engine's longest context, whatever the length of a step. Outside the engine the model keeps its ways.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import ModelError


class _Table(NamedTuple):
    module: Any
    prefix: str  # of its buffer's name, where layers have tables of their own
    inverse: Tensor


class FrozenRotary:
    """positions: the longest context."""

    def __init__(self, model: PreTrainedModel, positions: int) -> None:
        self._tables = [
            _Table(module, f"{layer}_" if layer else "", _inverse(module, kind, layer, positions))
            for module in model.modules()
            if isinstance(getattr(module, "config", None), type(model.config.get_text_config()))
            for layer, kind in _kinds(module)
            if "dynamic" in kind or kind == "longrope"
        ]

    @property
    def changing(self) -> bool:
        """Whether any table changes with the length."""
        return bool(self._tables)

    @contextmanager
    def applied(self) -> Iterator[None]:
        before = [
            (t.module, t.module.rope_type, getattr(t.module, f"{t.prefix}inv_freq").clone()) for t in self._tables
        ]
        try:
            for table in self._tables:
                kind = table.module.rope_type
                table.module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
                getattr(table.module, f"{table.prefix}inv_freq").copy_(table.inverse)
            yield
        finally:
            for table, (module, kind, inverse) in reversed(list(zip(self._tables, before, strict=True))):
                module.rope_type = kind
                getattr(module, f"{table.prefix}inv_freq").copy_(inverse)


def _kinds(module: Any) -> Iterator[tuple[str | None, str]]:
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, str):
        yield None, kind
    elif isinstance(kind, dict):
        yield from kind.items()


def _inverse(module: Any, kind: str, layer: str | None, positions: int) -> Tensor:
    given = module.config.rope_parameters
    given = given[layer] if layer else given
    most = given.get("original_max_position_embeddings") or module.config.max_position_embeddings
    length = max(positions, most + 1) if kind == "longrope" and positions > most else positions
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ModelError(f"rope type {kind!r} changes with the length in a way that is not known; it is not served")
    options = {} if layer is None else {"layer_type": layer}
    inverse, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, torch.device("cpu"), seq_len=length, **options)
    known = getattr(module, f"{layer}_attention_scaling" if layer else "attention_scaling")
    if abs(scaling - known) > 1e-6:
        raise ModelError(f"rope type {kind!r}: its scores are scaled by {known}, by {scaling} at length {length}")
    return inverse
