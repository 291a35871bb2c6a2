"""Attention of families that predate the attention interface: for one pass, their modules compute with a step.

Each function does what the family's own module does around its attention, and hands queries, keys and values to the
step. Knows their modules' names, and nothing of what a step is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.bloom.modeling_bloom import dropout_add
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

Attention = Callable[..., tuple[Tensor, None]]


def _falcon(module: Any, step: Any, hidden: Tensor, *, alibi: Any, position_embeddings: Any, **_: Any) -> Any:
    (batch, rows, _width), size = hidden.shape, module.head_dim
    joint = module.query_key_value(hidden)
    if module.new_decoder_architecture or not module.multi_query:
        groups = module.num_kv_heads if module.new_decoder_architecture else module.num_heads
        joint = joint.view(batch, rows, groups, module.num_heads // groups + 2, size)
        query, key, value = joint[:, :, :, :-2].flatten(2, 3), joint[:, :, :, -2], joint[:, :, :, -1]
    else:
        joint = joint.view(batch, rows, module.num_heads + 2, size)
        query, key, value = joint[:, :, :-2], joint[:, :, [-2]], joint[:, :, [-1]]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if alibi is None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    out = step.attend(module.layer_idx, query, key, value, module.inv_norm_factor)
    return module.dense(out.reshape(batch, rows, -1)), None


def _mpt(module: Any, step: Any, hidden: Tensor, **_: Any) -> Any:
    joint = module.Wqkv(hidden)
    if module.clip_qkv:
        joint = joint.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (
        part.unflatten(-1, (module.n_heads, module.head_dim)).transpose(1, 2) for part in joint.chunk(3, dim=2)
    )
    out = step.attend(module.layer_idx, query, key, value, module.softmax_scale)
    return module.out_proj(out.flatten(2)), None


def _bloom(module: Any, step: Any, hidden: Tensor, residual: Tensor, **_: Any) -> Any:
    joint = module.query_key_value(hidden).unflatten(-1, (module.num_heads, 3, module.head_dim))
    query, key, value = (joint[..., part, :].transpose(1, 2) for part in range(3))
    out = module.dense(step.attend(module.layer_idx, query, key, value, module.inv_norm_factor).flatten(2))
    return dropout_add(out, residual, module.hidden_dropout, module.training), None


_ATTENTION: dict[str, tuple[str, Attention]] = {
    "falcon": ("self_attention", _falcon),
    "mpt": ("attn", _mpt),
    "bloom": ("self_attention", _bloom),
}


class Bridge:
    """The attention modules of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        name, self._attention = _ATTENTION[model.config.model_type]
        self._modules = [m for path, m in model.named_modules() if path.rpartition(".")[2] == name]

    @contextmanager
    def carrying(self, step: Any) -> Iterator[None]:
        """Inside the block the model's attention is that of the step."""
        for module in self._modules:
            module.forward = partial(self._attention, module, step)
        try:
            yield
        finally:
            for module in self._modules:
                del module.forward


def slopes_of(model: PreTrainedModel) -> tuple[float, ...] | None:
    """By how much a score falls with every position of distance, for each head; None without ALiBi."""
    config = model.config
    heads = getattr(config, "num_attention_heads", 0)
    if config.model_type == "bloom":
        bias = bloom_alibi(torch.ones(1, 2), heads, torch.float32)[:, 0]
    elif config.model_type == "mpt" and config.attn_config.alibi:
        bias = build_mpt_alibi_tensor(heads, 2, config.attn_config.alibi_bias_max)[:, 0]
    elif config.model_type == "falcon" and config.alibi:
        bias = falcon_alibi(torch.ones(1, 2), heads, torch.float32)[:, 0] * (config.hidden_size // heads) ** -0.5
    else:
        return None
    return tuple((bias[:, 1] - bias[:, 0]).tolist())
