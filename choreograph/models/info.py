"""What the rest of the program needs to know of a model: measured, or read off its configuration and weights."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.metadata import AttentionSpec, HeadShape
from ..errors import ConfigError, ModelError
from .introspect import ProbeResult
from .tensor_parallel import local_shard

DEFAULT_MAX_POSITIONS = 2048  # positions of a model that names no limit


@dataclass(frozen=True)
class ModelInfo:
    """max_positions: logical positions 0..max - 1. Of a model that several processes share, heads and parameters are
    those of this one."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    vocab_size: int
    attention_specs: tuple[AttentionSpec, ...]  # the attention of every layer
    supports_shift: bool  # whether what was encoded at one place can be seen at another
    dtype: torch.dtype
    device: torch.device
    fingerprint: str
    parameters: int

    @property
    def head_shape(self) -> HeadShape:
        return HeadShape(self.query_heads, self.kv_heads, self.head_dim)

    @property
    def position_encoding(self) -> str:
        """How tokens are told apart: "rotary", "alibi", "learned", or "none"."""
        if not self.supports_shift:
            return "learned"
        if any(kind.rope is not None for kind in self.attention_specs):
            return "rotary"
        return "alibi" if any(kind.alibi_slopes for kind in self.attention_specs) else "none"

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


def read_model_info(
    model: PreTrainedModel, probe_result: ProbeResult, name: str, max_positions: int, fingerprint_suffix: str
) -> ModelInfo:
    """What was measured, and what the configuration says beside it."""
    weight = next(model.get_input_embeddings().parameters())
    return ModelInfo(
        name=name,
        layers=len(probe_result.attention_specs),
        query_heads=probe_result.query_heads,
        kv_heads=probe_result.kv_heads,
        head_dim=probe_result.head_dim,
        max_positions=max_positions,
        vocab_size=model.config.get_text_config().vocab_size,
        attention_specs=probe_result.attention_specs,
        supports_shift=probe_result.supports_shift,
        dtype=weight.dtype,
        device=weight.device,
        fingerprint=_fingerprint(model, probe_result.attention_specs) + fingerprint_suffix,
        parameters=sum(local_shard(p).numel() for p in model.parameters()),
    )


def resolve_max_positions(config: Any, requested: int | None, name: str) -> int:
    """How many positions there are: what the configuration says, or fewer if that is asked for."""
    config = config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions")
    known = next((most for one in names if isinstance(most := getattr(config, one, None), int)), DEFAULT_MAX_POSITIONS)
    if requested is not None and requested > known:
        raise ConfigError(f"max_model_len={requested}: {name} has {known}; use None, or at most as many")
    return requested or known


def check_devices(model: PreTrainedModel, name: str) -> None:
    """A model is served where all of it is: on the CPU, or on one GPU."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or {device.type for device in devices} - {"cpu", "cuda"}:
        shown = ", ".join(sorted(map(str, devices)))
        raise ModelError(
            f"{name}: it is on {shown}; a process serves the CPU or one GPU: use device='cpu' or 'cuda', or tp_plan"
        )


def _fingerprint(model: PreTrainedModel, attention_specs: Sequence[AttentionSpec]) -> str:
    """Names the weights, the rotary tables and what else shapes attention: types, sizes, a sample of every tensor."""
    digest = hashlib.sha256(str(getattr(model.config.get_text_config(), "rope_parameters", None)).encode())
    if not all(kind.is_plain for kind in attention_specs):
        digest.update(
            str([(kind.sliding_window, kind.logit_softcap, kind.alibi_slopes) for kind in attention_specs]).encode()
        )
    for name, tensor in (*model.state_dict().items(), *model.named_buffers()):
        flat = local_shard(tensor).detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64]
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def sampled_weights_hash(model: PreTrainedModel) -> str:
    """Names the weights in whatever type they are: a sample of every parameter, as bfloat16 rounds it. float16 rounds
    what it is given otherwise, and is told apart where it was not the type to begin with."""
    digest = hashlib.sha256()
    for name, tensor in model.named_parameters():
        flat = local_shard(tensor).detach().reshape(-1)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(flat[:: max(1, flat.numel() // 64)][:64].to(torch.bfloat16).float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def total_memory(device: torch.device) -> int:
    """Bytes, free or not; no limit where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 62


def weights_hash(model: PreTrainedModel) -> str:
    """Names the weights to the last bit, in every process: types, sizes and bytes of all that a checkpoint holds; what
    is tied counts once."""
    digest, seen = hashlib.sha256(), set[tuple[int, torch.Size]]()
    weights = ((name, one) for name, one in model.state_dict().items() if isinstance(one, torch.Tensor))
    for name, tensor in ((name, part) for name, one in weights for part in _inner_tensors(local_shard(one).detach())):
        if (place := (tensor.data_ptr(), tensor.shape)) not in seen:
            seen.add(place)
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that one of a type of its own, as quantised weights are, consists of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _inner_tensors(getattr(tensor, name))


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as info:
            line = next(line for line in info if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return 4 << 30
