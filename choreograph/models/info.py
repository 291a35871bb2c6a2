"""Properties of a model that the engine needs, hashes of its weights, and memory of its device."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from ..attention.metadata import AttentionSpec, HeadShape
from ..errors import ConfigError
from .tensor_parallel import local_shard

DEFAULT_MAX_POSITIONS = 2048  # of a model whose configuration names no limit


@dataclass(frozen=True)
class ModelInfo:
    """Shapes and attention of a model; with tensor parallelism, of this rank's part."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int  # positions are 0 <= p < max_positions
    vocab_size: int
    attention_specs: tuple[AttentionSpec, ...]  # per layer; layers with equal attention share the object
    supports_shift: bool  # True if keys can be rotated to another position
    dtype: torch.dtype
    device: torch.device
    fingerprint: str  # samples the weights, and names everything else that changes the KV
    parameters: int  # number of weights

    @property
    def head_shape(self) -> HeadShape:
        return HeadShape(self.query_heads, self.kv_heads, self.head_dim)

    @property
    def position_encoding(self) -> str:
        """How positions enter the model: "rotary", "alibi", "learned" or "none"."""
        if not self.supports_shift:
            return "learned"
        if any(spec.rope is not None for spec in self.attention_specs):
            return "rotary"
        return "alibi" if any(spec.alibi_slopes for spec in self.attention_specs) else "none"

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


def resolve_max_positions(config: Any, requested: int | None, name: str) -> int:
    """Return the number of positions: `requested`, or the configuration's limit.

    Raises:
        ConfigError: if more positions are requested than the model has.
    """
    config = config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions")
    limits = (getattr(config, option, None) for option in names)
    limit = next((value for value in limits if isinstance(value, int)), DEFAULT_MAX_POSITIONS)
    if requested is not None and requested > limit:
        raise ConfigError(f"max_model_len={requested}: {name} has {limit}; use None, or at most as many")
    return requested or limit


def fingerprint(model: PreTrainedModel, attention_specs: tuple[AttentionSpec, ...]) -> str:
    """Hash a sample of every tensor, the RoPE options and the attention specs."""
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
    """Hash names, shapes, dtypes and bytes of all weights; tied weights count once."""
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
    """Return the available memory in bytes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def total_memory(device: torch.device) -> int:
    """Return the memory of a device in bytes."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total
