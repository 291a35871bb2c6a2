"""RoPE tables that depend on the sequence length, fixed at one length.

A key rotated for a short prompt would not match a longer one. `dynamic` and `longrope` tables are
therefore those of the engine's maximum length for every batch; outside of the engine the model keeps
its own behavior.
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
    buffer_name: str  # of the module's frequency table
    inv_freq: Tensor  # (half_dim,) float32


class StaticRope:
    """Length-dependent RoPE tables of a model, computed for `max_positions`."""

    def __init__(self, model: PreTrainedModel, max_positions: int) -> None:
        self._tables = []
        config_class = type(model.config.get_text_config())
        for module in model.modules():
            types: Any = getattr(module, "rope_type", None)
            if types is None or not isinstance(getattr(module, "config", None), config_class):
                continue
            for layer_type, rope_type in types.items() if isinstance(types, dict) else [(None, types)]:
                if "dynamic" in rope_type or rope_type == "longrope":
                    name = f"{layer_type}_inv_freq" if layer_type else "inv_freq"
                    inv_freq = _compute_inv_freq(module, rope_type, layer_type, max_positions)
                    self._tables.append(_RopeTable(module, name, inv_freq))
        self.is_dynamic = bool(self._tables)  # True if a table depends on the length

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the fixed tables inside the block."""
        saved = [
            (table, table.module.rope_type, getattr(table.module, table.buffer_name).clone()) for table in self._tables
        ]
        try:
            for table, rope_type, _ in saved:
                default = dict.fromkeys(rope_type, "default") if isinstance(rope_type, dict) else "default"
                table.module.rope_type = default
                getattr(table.module, table.buffer_name).copy_(table.inv_freq)
            yield
        finally:
            for table, rope_type, inv_freq in reversed(saved):
                table.module.rope_type = rope_type
                getattr(table.module, table.buffer_name).copy_(inv_freq)


def _compute_inv_freq(module: Any, rope_type: str, layer_type: str | None, max_positions: int) -> Tensor:
    """Return the frequency table of a length; refuse one whose score scale depends on the length."""
    if rope_type not in ROPE_INIT_FUNCTIONS:
        raise ModelError(
            f"rope type {rope_type!r} changes with the length in a way that is not known; it is not served"
        )
    layer_options = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](
        module.config, torch.device("cpu"), seq_len=max_positions, **layer_options
    )
    expected = getattr(module, f"{layer_type}_attention_scaling" if layer_type else "attention_scaling")
    if abs(scaling - expected) > 1e-6:
        raise ModelError(
            f"rope type {rope_type!r}: its scores are scaled by {expected}, by {scaling} at length {max_positions}"
        )
    return inv_freq
