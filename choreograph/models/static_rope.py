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


class _RopeTable(NamedTuple):
    module: Any
    prefix: str  # of its buffer's name, where layers have tables of their own
    inv_freq: Tensor


class StaticRope:
    """positions: the longest context."""

    def __init__(self, model: PreTrainedModel, max_positions: int) -> None:
        self._tables = [
            _RopeTable(module, f"{layer}_" if layer else "", _compute_inv_freq(module, kind, layer, max_positions))
            for module in model.modules()
            if isinstance(getattr(module, "config", None), type(model.config.get_text_config()))
            for layer, kind in _rope_types(module)
            if "dynamic" in kind or kind == "longrope"
        ]

    @property
    def is_dynamic(self) -> bool:
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
                getattr(table.module, f"{table.prefix}inv_freq").copy_(table.inv_freq)
            yield
        finally:
            for table, (module, kind, inverse) in reversed(list(zip(self._tables, before, strict=True))):
                module.rope_type = kind
                getattr(module, f"{table.prefix}inv_freq").copy_(inverse)


def _rope_types(module: Any) -> Iterator[tuple[str | None, str]]:
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, str):
        yield None, kind
    elif isinstance(kind, dict):
        yield from kind.items()


def _compute_inv_freq(module: Any, rope_type: str, layer_type: str | None, max_positions: int) -> Tensor:
    given = module.config.rope_parameters
    given = given[layer_type] if layer_type else given
    most = given.get("original_max_position_embeddings") or module.config.max_position_embeddings
    length = max(max_positions, most + 1) if rope_type == "longrope" and max_positions > most else max_positions
    if rope_type not in ROPE_INIT_FUNCTIONS:
        raise ModelError(
            f"rope type {rope_type!r} changes with the length in a way that is not known; it is not served"
        )
    options = {} if layer_type is None else {"layer_type": layer_type}
    inverse, scaling = ROPE_INIT_FUNCTIONS[rope_type](module.config, torch.device("cpu"), seq_len=length, **options)
    known = getattr(module, f"{layer_type}_attention_scaling" if layer_type else "attention_scaling")
    if abs(scaling - known) > 1e-6:
        raise ModelError(f"rope type {rope_type!r}: its scores are scaled by {known}, by {scaling} at length {length}")
    return inverse
