"""Attention of families that predate the attention interface: for one pass, their modules compute with a step.

Each function does what the family's own module does around its attention, and hands queries, keys and values to the
step. Knows their modules' names, and nothing of what a step is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.bloom.modeling_bloom import dropout_add
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

AttentionFunction = Callable[..., tuple[Tensor, None]]


def _falcon(
    module: Any, forward_context: Any, hidden: Tensor, *, alibi: Any, position_embeddings: Any, **_: Any
) -> Any:
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
    out = forward_context.attend(module.layer_idx, query, key, value, module.inv_norm_factor)
    return module.dense(out.reshape(batch, rows, -1)), None


def _mpt(module: Any, forward_context: Any, hidden: Tensor, **_: Any) -> Any:
    joint = module.Wqkv(hidden)
    if module.clip_qkv:
        joint = joint.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (
        part.unflatten(-1, (module.n_heads, module.head_dim)).transpose(1, 2) for part in joint.chunk(3, dim=2)
    )
    out = forward_context.attend(module.layer_idx, query, key, value, module.softmax_scale)
    return module.out_proj(out.flatten(2)), None


def _bloom(module: Any, forward_context: Any, hidden: Tensor, residual: Tensor, **_: Any) -> Any:
    joint = module.query_key_value(hidden).unflatten(-1, (module.num_heads, 3, module.head_dim))
    query, key, value = (joint[..., part, :].transpose(1, 2) for part in range(3))
    out = module.dense(forward_context.attend(module.layer_idx, query, key, value, module.inv_norm_factor).flatten(2))
    return dropout_add(out, residual, module.hidden_dropout, module.training), None


_LEGACY_ATTENTION: dict[str, tuple[str, AttentionFunction]] = {
    "falcon": ("self_attention", _falcon),
    "mpt": ("attn", _mpt),
    "bloom": ("self_attention", _bloom),
}


class LegacyAttentionPatch:
    """The attention modules of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        name, self._attention = _LEGACY_ATTENTION[model.config.model_type]
        self._modules = [m for path, m in model.named_modules() if path.rpartition(".")[2] == name]

    @contextmanager
    def applied(self, forward_context: Any) -> Iterator[None]:
        """Inside the block the model's attention is that of the step."""
        for module in self._modules:
            module.forward = partial(self._attention, module, forward_context)
        try:
            yield
        finally:
            for module in self._modules:
                del module.forward


def alibi_slopes(model: PreTrainedModel) -> tuple[float, ...] | None:
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


DEFAULT_TEST = "tests/models/test_architectures.py"

PositionEncoding = Literal["rotary", "alibi", "learned"]


class Architecture(NamedTuple):
    """positions: how tokens are told apart. what: what is special, for people. bridge: its attention predates the
    interface and is computed by a function of `bridges`. proof: the test that runs this family."""

    notes: str = ""
    position_encodings: tuple[PositionEncoding, ...] = ("rotary",)
    needs_patch: bool = False
    test: str = DEFAULT_TEST


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
    "olmo2": Architecture("norms behind the blocks"),
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
