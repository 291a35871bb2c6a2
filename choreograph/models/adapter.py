"""A Hugging Face causal language model as the engine sees it: facts, and one forward pass over packed rows.

The step travels through the unmodified model as a keyword argument to an attention function that this module
registers with transformers (`AttentionInterface`). The model's own attention setting is put back after every
pass, so that a model handed over in memory stays usable by its owner.
"""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..errors import ConfigError, ModelError
from ..ops.attend import Step
from ..ops.rope import Rotary
from ..types import BASE
from .depth import Depth
from .families import FAMILIES
from .lora import Loras

ATTENTION = "choreograph"
_TURN = threading.RLock()


@dataclass(frozen=True)
class ModelFacts:
    """What the rest of the program needs to know of a model. max_positions: logical positions 0..max - 1."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    vocab_size: int
    rotary: Rotary
    dtype: torch.dtype
    device: torch.device
    fingerprint: str
    parameters: int

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    step: Any = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The registered attention function: hands one layer to the step."""
    scale = module.head_dim**-0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():
        return torch.ops.choreograph.attend(query, key, value, step, module.layer_idx, scale), None
    return step.attend(module.layer_idx, query, key, value, scale), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)


class Adapter:
    """One model. `forward` is the only way in; `tokenizer` may be None (then token ids alone work)."""

    loras: Loras | None = None
    in_training = False  # its weights are not what its fingerprint says

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, *, name: str | None = None) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.facts = read_facts(model, name or model.config._name_or_path or model.config.model_type)
        self.loras = Loras(model)
        self.compiled: Any = None  # a `models.compiled.CompiledForward`, or nothing

    def quantize(self, kind: str) -> None:
        """Weight-only quantisation in place, through torchao."""
        assert kind == "int8"
        try:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_
        except ImportError:
            raise ConfigError("quantization='int8' needs torchao: pip install 'choreograph[int8]'") from None
        quantize_(self.model, Int8WeightOnlyConfig())
        self.facts = replace(self.facts, fingerprint=f"{self.facts.fingerprint}-{kind}")

    @torch.no_grad()
    def forward(
        self, tokens: list[int], positions: list[int], step: Step, rows: list[int], models: Sequence[str] = ()
    ) -> Float[Tensor, "R V"]:
        """Computes all rows of a step, each by the model that it names; the logits of `rows` only, in float32."""
        self.refuse_in_training()
        with self.hooked(), torch.autocast(self.facts.device.type, enabled=False), self.adapted(models) as changed:
            if self.compiled is not None and not changed and not step.kept:  # graphs are of the base model alone
                logits = self.compiled(tokens, positions, step, rows)
                if logits is not None:
                    return logits
            return self.logits(tokens, positions, step, rows).float()

    @torch.no_grad()
    def run_layers(
        self, first: int, end: int, tokens: list[int], positions: list[int], step: Step, models: Sequence[str] = ()
    ) -> None:
        """Computes some layers alone, from the tokens or from what the step gives into the first of them."""
        self.refuse_in_training()
        device = self.facts.device
        with (
            self.hooked(),
            torch.autocast(device.type, enabled=False),
            self.adapted(models),
            self.depth.only(first, end),
        ):
            self.depth.body(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
                step=step,
            )

    def refuse_in_training(self) -> None:
        if self.in_training:
            raise ModelError("the model is being trained: compute when the training has ended")

    @cached_property
    def depth(self) -> Depth:
        """Its layers one by one."""
        return Depth(self.model)

    def logits(
        self, tokens: list[int], positions: list[int], step: Any, rows: list[int], *, through: Any = None
    ) -> Float[Tensor, "R V"]:
        """One pass of the hooked model, attention being what `step.attend` makes of every layer. through: what wraps
        the model."""
        device = self.facts.device
        return (through or self.model)(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            logits_to_keep=torch.tensor(rows, dtype=torch.long, device=device),
            use_cache=False,
            step=step,
        ).logits[0]

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Engines in several threads take turns: the attention setting is the model's, and models are shared."""
        config = self.model.config
        with _TURN:
            before = config._attn_implementation
            config._attn_implementation = ATTENTION
            try:
                yield
            finally:
                config._attn_implementation = before

    @property
    def models(self) -> tuple[str, ...]:
        """The names that calls may ask for: the base model's, and those of its adapters."""
        return (BASE, *(self.loras.names if self.loras else ()))

    def fingerprint(self, model: str) -> str:
        """Names what computes: nothing that one computed is ever found by another."""
        return self.facts.fingerprint + (self.loras.fingerprint(model) if self.loras else "")

    def adapted(self, models: Sequence[str]) -> AbstractContextManager[bool]:
        """For one pass, the model of every row; tells whether any is an adapter."""
        return self.loras.applied(models) if self.loras is not None and self.loras.names else nullcontext(False)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a message: the generation configuration's, else the tokenizer's."""
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        if ends is None:
            ends = getattr(self.tokenizer, "eos_token_id", None)
        if ends is None:
            return ()
        return tuple(ends) if isinstance(ends, (list, tuple)) else (ends,)

    def arena_tokens(self, asked: int | None) -> int:
        """Slots of the arena: what was asked for, else eight full contexts within a quarter of free memory."""
        if asked is not None:
            return asked
        most = _free_memory(self.facts.device) // 4 // self.facts.kv_bytes_per_token
        return max(256, min(8 * self.facts.max_positions, most))


def read_facts(model: PreTrainedModel, name: str) -> ModelFacts:
    """Reads the facts off a model and its configuration; a model that cannot be served is refused with why."""
    config = model.config.get_text_config()
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ModelError(f"{name}: architecture {config.model_type!r} is not proved; served: {sorted(FAMILIES)}")
    if _has_window(config):
        raise ModelError(f"{name}: sliding-window layers are not served; use a model with full attention")
    heads = config.num_attention_heads
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise ModelError(f"{name}: it is on {device}; only the CPU is served: use device='cpu'")
    weight = next(model.get_input_embeddings().parameters())
    return ModelFacts(
        name=name,
        layers=config.num_hidden_layers,
        query_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        max_positions=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        rotary=_read_rotary(model, family.interleaved, name),
        dtype=weight.dtype,
        device=weight.device,
        fingerprint=_fingerprint(model),
        parameters=sum(p.numel() for p in model.parameters()),
    )


def _has_window(config: Any) -> bool:
    layers = getattr(config, "layer_types", None)
    if layers:
        return "sliding_attention" in layers
    window = getattr(config, "sliding_window", None)
    return window is not None and window < config.max_position_embeddings


def _read_rotary(model: PreTrainedModel, interleaved: bool, name: str) -> Rotary:
    module = next((m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)), None)
    inverse = getattr(module, "inv_freq", None)
    if inverse is None:
        raise ModelError(f"{name}: no rotary embedding found; only rotary models can be placed anywhere")
    kind = getattr(module, "rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ModelError(f"{name}: rope type {kind!r} changes with the length and cannot be placed; freeze it")
    return Rotary(tuple(inverse.double().tolist()), interleaved)


def _fingerprint(model: PreTrainedModel) -> str:
    """Names the weights and the rotary tables: shapes, types, and a sample of every tensor."""
    digest = hashlib.sha256(str(getattr(model.config.get_text_config(), "rope_parameters", None)).encode())
    for name, tensor in (*model.state_dict().items(), *model.named_buffers()):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64]
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as info:
            line = next(line for line in info if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return 4 << 30


def check_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """A type by name ("bfloat16") or as it is; None stays None."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if dtype is None and name is None:
        return None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigError(f"dtype={name!r}: use float32, bfloat16 or float16")
    return dtype


def check_device(name: str | torch.device | None) -> torch.device:
    """A device by name or as it is; None is the CPU, the only one served."""
    try:
        device = torch.device("cpu" if name is None else name)
    except (RuntimeError, TypeError) as problem:
        raise ConfigError(f"device={name!r}: {str(problem).splitlines()[0]}") from None
    if device.type != "cpu":
        raise ConfigError(f"device={name!r}: only the CPU is served; use 'cpu'")
    return device
