"""Supported architectures, and attention patches for models without transformers' attention interface.

A patch replaces the forward method of the model's attention modules for one pass: it computes what the
module does around attention, and passes queries, keys and values to the forward context.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import ModelError


def _falcon(
    module: Any, forward_context: Any, hidden: Tensor, *, alibi: Any, position_embeddings: Any, **_: Any
) -> Any:
    groups = module.num_kv_heads if module.new_decoder_architecture else module.num_heads
    if module.multi_query and not module.new_decoder_architecture:
        groups = 1
    fused = module.query_key_value(hidden).unflatten(-1, (groups, module.num_heads // groups + 2, module.head_dim))
    parts = fused[:, :, :, :-2].flatten(2, 3), fused[:, :, :, -2], fused[:, :, :, -1]
    query, key, value = (part.transpose(1, 2) for part in parts)
    if alibi is None:
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    out = forward_context.attend(module.layer_idx, query, key, value, module.inv_norm_factor)
    return module.dense(out.flatten(2)), None


def _mpt(module: Any, forward_context: Any, hidden: Tensor, **_: Any) -> Any:
    fused = module.Wqkv(hidden)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (
        part.unflatten(-1, (module.n_heads, module.head_dim)).transpose(1, 2) for part in fused.chunk(3, dim=2)
    )
    out = forward_context.attend(module.layer_idx, query, key, value, module.softmax_scale)
    return module.out_proj(out.flatten(2)), None


def _bloom(module: Any, forward_context: Any, hidden: Tensor, residual: Tensor, **_: Any) -> Any:
    from transformers.models.bloom.modeling_bloom import dropout_add

    fused = module.query_key_value(hidden).unflatten(-1, (module.num_heads, 3, module.head_dim))
    query, key, value = (fused[..., part, :].transpose(1, 2) for part in range(3))
    out = module.dense(forward_context.attend(module.layer_idx, query, key, value, module.inv_norm_factor).flatten(2))
    return dropout_add(out, residual, module.hidden_dropout, module.training), None


_LEGACY_ATTENTION: dict[str, tuple[str, Callable[..., Any]]] = {  # module name and attention function by model type
    "falcon": ("self_attention", _falcon),
    "mpt": ("attn", _mpt),
    "bloom": ("self_attention", _bloom),
}


class LegacyAttentionPatch:
    """Patch of the forward methods of one model's attention modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        name, self._attention = _LEGACY_ATTENTION[model.config.model_type]
        self._modules = [module for path, module in model.named_modules() if path.rpartition(".")[2] == name]

    @contextmanager
    def applied(self, forward_context: Any) -> Iterator[None]:
        """Compute attention through `forward_context` inside the block."""
        for module in self._modules:
            module.forward = partial(self._attention, module, forward_context)
        try:
            yield
        finally:
            for module in self._modules:
                del module.forward


def alibi_slopes(model: PreTrainedModel) -> tuple[float, ...] | None:
    """Return each head's ALiBi score decrease per position; None without ALiBi."""
    config = model.config
    heads = getattr(config, "num_attention_heads", 0)
    if config.model_type == "bloom":
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi

        bias = bloom_alibi(torch.ones(1, 2), heads, torch.float32)[:, 0]
    elif config.model_type == "mpt" and config.attn_config.alibi:
        from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

        bias = build_mpt_alibi_tensor(heads, 2, config.attn_config.alibi_bias_max)[:, 0]
    elif config.model_type == "falcon" and config.alibi:
        from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi

        bias = falcon_alibi(torch.ones(1, 2), heads, torch.float32)[:, 0] * (config.hidden_size // heads) ** -0.5
    else:
        return None
    return tuple((bias[:, 1] - bias[:, 0]).tolist())


DEFAULT_TEST = "tests/models/test_architectures.py"


class Architecture(NamedTuple):
    """Supported architecture, by transformers' `model_type`."""

    notes: str = ""  # printed by `choreograph models`
    position_encodings: tuple[Literal["rotary", "alibi", "learned"], ...] = ("rotary",)
    needs_patch: bool = False  # True if its attention needs a `LegacyAttentionPatch`
    test: str = DEFAULT_TEST  # file of the test that runs it


SUPPORTED_ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("scaled rotary (llama3, linear, yarn)"),
    "mistral": Architecture("sliding window"),
    "mixtral": Architecture("mixture of experts, sliding window"),
    "qwen2": Architecture("key biases, windows on upper layers"),
    "qwen3": Architecture("query and key norms"),
    "qwen3_moe": Architecture("query and key norms, mixture of experts"),
    "phi": Architecture("partial rotary, parallel blocks"),
    "phi3": Architecture("joint projections, long-rope, sliding window"),
    "gemma2": Architecture("capped scores, alternating windows"),
    "gemma3_text": Architecture("two rotary bases, windows on five of six layers"),
    "olmo2": Architecture("norms after the blocks"),
    "granite": Architecture("scaled residuals and scores"),
    "smollm3": Architecture("some layers without rotary"),
    "gpt_neox": Architecture("partial rotary, joint projections"),
    "gpt_oss": Architecture("attention sinks, alternating windows, yarn, mixture of experts"),
    "falcon": Architecture("multi-query or grouped, rotary or ALiBi", ("rotary", "alibi"), needs_patch=True),
    "mpt": Architecture("ALiBi", ("alibi",), needs_patch=True),
    "bloom": Architecture("ALiBi", ("alibi",), needs_patch=True),
    "gpt2": Architecture("learned positions: messages stay where they were encoded", ("learned",)),
    "opt": Architecture("learned positions: messages stay where they were encoded", ("learned",)),
}


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
    """Compute RoPE frequencies for a length; refuse length-dependent score scales."""
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
