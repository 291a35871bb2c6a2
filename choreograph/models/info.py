"""Model properties, hashes of weights, and device memory."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..attention.metadata import AttentionSpec, HeadShape
from ..errors import ConfigError, ModelError
from .tensor_parallel import local_shard

DEFAULT_MAX_POSITIONS = 2048  # of a model whose configuration names no limit

SCALED_CONTEXTS = ("linear", "dynamic", "yarn")  # types of rotary embedding that extend the context by a factor


@dataclass(frozen=True)
class ModelInfo:
    """Shapes and attention of a model, or of this rank's shard."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int  # positions are 0 <= p < max_positions
    vocab_size: int  # rows of the embedding; a tokenizer can have more tokens
    attention_specs: tuple[AttentionSpec, ...]  # per layer; layers with equal attention share the object
    supports_shift: bool  # True if keys can be rotated to another position
    dtype: torch.dtype
    device: torch.device
    fingerprint: str  # KV cache key: sampled weights, and all else that changes the KV
    parameters: int  # number of weights

    @property
    def head_shape(self) -> HeadShape:
        return HeadShape(self.query_heads, self.kv_heads, self.head_dim)

    @property
    def position_encoding(self) -> str:
        """Position encoding: "rotary", "alibi", "learned" or "none"."""
        if not self.supports_shift:
            return "learned"
        if any(spec.rope is not None for spec in self.attention_specs):
            return "rotary"
        return "alibi" if any(spec.alibi_slopes for spec in self.attention_specs) else "none"

    @property
    def dtype_name(self) -> str:
        """Name of the dtype, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


_OFF: tuple[Any, ...] = (None, False, 0, [])
_ONE = (None, 1)
_CONFIG_FIELDS: dict[str, tuple[Any, ...]] = {  # fields of some families that change the values, and neutral values
    **dict.fromkeys(
        ("sliding_window", "attention_chunk_size", "clip_qkv", "alibi", "parallel_attn", "use_qk_norm"), _OFF
    ),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attn_temperature_tuning"), _OFF),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qk_layernorm", "no_rope_layers", "num_experts"), _OFF),
    **dict.fromkeys(
        ("num_local_experts", "attention_multiplier", "query_pre_attn_scalar", "quantization_config"), _OFF
    ),
    **dict.fromkeys(("logit_scale", "logits_scaling", "residual_multiplier", "embedding_multiplier"), _ONE),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "mscale", "embedding_scale"), _ONE),
}
_GENERATION_FIELDS: dict[str, tuple[Any, ...]] = {  # options of `generate` that no request takes over
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"), _OFF),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "no_repeat_ngram_size"), _OFF),
    **dict.fromkeys(("repetition_penalty", "guidance_scale", "encoder_repetition_penalty"), _ONE),
}
_ROPE_OPTIONS = {  # that transformers reads, and those that change nothing
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "short_factor"),
    *("long_factor", "low_freq_factor", "high_freq_factor", "short_mscale", "long_mscale", "mrope_section"),
    *("mrope_interleaved", "finetuned", "llama_4_scaling_beta"),
}


def check_rope(config: Any, name: str) -> None:
    """Raise ModelError for a RoPE type or option unknown to transformers."""
    text_config = config.get_text_config()
    parameters = getattr(text_config, "rope_parameters", None) or {}
    for rope in [value for value in parameters.values() if isinstance(value, dict)] or [parameters]:
        rope_type = rope.get("rope_type", "default")
        own = {"alpha"} if text_config.model_type.startswith("hunyuan") else set()
        odd = sorted(key for key in rope.keys() - _ROPE_OPTIONS - own if rope[key] is not None)
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            raise ModelError(f"model {name!r}: rope_type={rope_type!r} is not known: {sorted(ROPE_INIT_FUNCTIONS)} are")
        if odd:
            raise ModelError(f"model {name!r}: options of its rotary embedding are not known: {', '.join(odd)}")


def ignored_fields(model: PreTrainedModel) -> list[str]:
    """Return non-neutral configuration fields that this model's family ignores, as "name=value"."""
    config = model.config.get_text_config()
    known = type(config)().to_dict()
    fields = {name: value for name, value in config.to_dict().items() if name not in known}
    pairs = [(fields, _CONFIG_FIELDS), (vars(model.generation_config or object), _GENERATION_FIELDS)]
    return [
        f"{name}={values[name]!r}"
        for values, table in pairs
        for name, neutral in table.items()
        if name in values and values[name] not in neutral
    ]


def resolve_max_positions(config: Any, requested: int | None, name: str) -> int:
    """Return the number of positions: `requested`, or the configuration's limit.

    Scaled RoPE extends the limit as in vLLM: to its factor times the original length.

    Raises:
        ConfigError: if more positions are requested than the model has.
    """
    config = config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions")
    limits = (getattr(config, option, None) for option in names)
    limit = next((value for value in limits if isinstance(value, int)), DEFAULT_MAX_POSITIONS)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in SCALED_CONTEXTS:  # others name the scaled length, those of single layers too
        own = rope.get("original_max_position_embeddings") or limit
        limit = max(limit, int(own * (rope.get("factor") or 1)))
    if requested is not None and requested > limit:
        raise ConfigError(f"max_model_len={requested}: {name} has {limit}; use None, or at most as many")
    return requested or limit


def fingerprint(model: PreTrainedModel, attention_specs: tuple[AttentionSpec, ...]) -> str:
    """Hash sampled elements of all tensors, RoPE options and attention specs."""
    digest = hashlib.sha256(str(getattr(model.config.get_text_config(), "rope_parameters", None)).encode())
    if not all(spec.is_plain for spec in attention_specs):
        options = [(spec.sliding_window, spec.logit_softcap, spec.alibi_slopes) for spec in attention_specs]
        digest.update(str(options).encode())
    for name, tensor in (*model.state_dict().items(), *model.named_buffers()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(_sample(tensor).float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def sampled_weights_hash(model: PreTrainedModel) -> str:
    """Hash a sample of every parameter, rounded to bfloat16.

    Equal for a model in float32 and in bfloat16; float16 rounds differently and gets another hash.
    """
    digest = hashlib.sha256()
    for name, tensor in model.named_parameters():
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(_sample(tensor).to(torch.bfloat16).float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return up to 64 evenly spaced elements, (n,)."""
    flat = local_shard(tensor).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 64)][:64]


def weights_hash(model: PreTrainedModel) -> str:
    """Hash every weight's name, shape, dtype and bytes; tied weights once."""
    digest, hashed = hashlib.sha256(), set[tuple[int, torch.Size]]()
    for name, weight in model.state_dict().items():
        for tensor in _inner_tensors(local_shard(weight).detach()) if isinstance(weight, torch.Tensor) else ():
            if (storage := (tensor.data_ptr(), tensor.shape)) not in hashed:
                hashed.add(storage)
                digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
                digest.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a tensor subclass (quantized weights) consists of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _inner_tensors(getattr(tensor, name))


def free_memory(device: torch.device) -> int:
    """Return the available memory of a device in bytes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def total_memory(device: torch.device) -> int:
    """Return the memory of a device in bytes."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total
