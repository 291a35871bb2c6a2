"""Hugging Face causal language model with a batched forward pass.

The forward context is passed through the unmodified model as the keyword argument `step` to an attention
function registered with transformers (`AttentionInterface`). The model's own attention setting is
restored after every forward pass, so the caller can keep using a model passed in memory.
"""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from ..attention.backend import ForwardContext, to_device
from ..errors import ConfigError, ModelError
from ..outputs import BASE_MODEL
from ..utils import allow_sigint
from .architectures import SUPPORTED_ARCHITECTURES, LegacyAttentionPatch, StaticRope
from .info import ModelInfo, free_memory, resolve_max_positions, sampled_weights_hash, weights_hash
from .introspect import PROBE_POSITIONS, AttentionProbe, analyze, check_no_token_mixing, verify_cache_reuse
from .layers import DecoderLayers
from .lora import LoraManager, LoraWeights
from .template_sandbox import render_messages
from .tensor_parallel import TP_LABEL, TPGroup, check_heads, tp_group

_log = logging.getLogger("choreograph")

ATTENTION = "choreograph"  # name of the attention function in transformers' registry

_SETTING = "_attn_implementation_internal"  # where transformers' property `_attn_implementation` keeps its value
_FORWARD_LOCK = threading.RLock()  # the attention setting belongs to the model, which several engines can share


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    step: Any = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute one layer's attention through the forward context.

    Args:
        step: the forward context; None while a graph is traced.
        s_aux: attention sink scores, (H,).
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():
        return torch.ops.choreograph.attend(query, key, value, module.layer_idx, scale, s_aux), None
    if step is None:
        raise ModelError("its layers pass no keyword arguments on to attention")
    if isinstance(step, AttentionProbe):
        step.record_options(module, attention_mask, sliding_window, softcap)
    out = step.attend(module.layer_idx, query, key, value, scale, s_aux)
    return out.contiguous(), None  # some models make views of it


# No mask function is registered: transformers would look for packed sequences, which synchronizes with the GPU.
AttentionInterface.register(ATTENTION, _attention)


def _end_of_turn(tokenizer: Any) -> int | None:
    """Return the chat template's special end-of-turn token, or None."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    marker, question = "choreograph-answer", {"role": "user", "content": "choreograph-question"}
    turns = [question, {"role": "assistant", "content": marker}, question]
    for count in (3, 2):  # some templates end a turn by the next one, or only accept complete conversations
        try:
            text = render_messages(tokenizer, turns[:count]).text
        except Exception:  # a template raises what it likes
            continue
        rest = text.partition(marker)[2].lstrip()
        ids = tokenizer(rest, add_special_tokens=False)["input_ids"] if rest else []
        added = getattr(tokenizer, "added_tokens_decoder", {}).get(ids[0]) if ids else None
        if added is not None and added.special:
            return int(ids[0])
    return None


def find_eos_token_ids(tokenizer: Any, *configs: Any) -> list[int]:
    """Return the tokens that end a message, perhaps repeated."""
    named: list[int] = []
    for place in (*configs, tokenizer):
        ids = getattr(place, "eos_token_id", None)
        named += ids if isinstance(ids, (list, tuple)) else [ids] if ids is not None else []
    return named + [token for token in [_end_of_turn(tokenizer)] if token is not None]


class HFModel:
    """Hugging Face model and its tokenizer, with a batched `forward`.

    `tokenizer` is None for a model that is used with token ids only.
    """

    lora_manager: LoraManager | None = None
    adapters: Mapping[str, LoraWeights] = MappingProxyType({})  # of `lora_manager`, by name
    tp_group: TPGroup | None = None  # ranks that share the model; None with one process
    training_model: Any = None  # wrapper that trains the model; None while the weights match the fingerprint
    compiled: Any = None  # `CudaGraphForward`, or None
    operators: Any = None  # `ModelOperators` on a CPU; None where the layers run as transformers computes them

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        max_positions: int | None = None,
    ) -> None:
        """Probe the model and check that it can be served.

        Args:
            max_positions: limit below the model's own; length-dependent RoPE tables are computed for this length.

        Raises:
            ModelError: if the engine does not support the model.
        """
        self.model = model.eval()
        self.tokenizer = tokenizer
        name = name or model.config._name_or_path or model.config.model_type
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1 or {device.type for device in devices} - {"cpu", "cuda"}:
            raise ModelError(
                f"{name}: it is on {', '.join(sorted(map(str, devices)))}; a process serves the CPU or one GPU: "
                "use device='cpu' or 'cuda', or tp_plan"
            )
        architecture = SUPPORTED_ARCHITECTURES.get(model.config.get_text_config().model_type)
        needs_patch = architecture is not None and architecture.needs_patch
        self.architecture, self.attention_patch = architecture, LegacyAttentionPatch(model) if needs_patch else None
        self.tp_group = tp_group(model, name)
        if needs_patch:
            self.ensure_single_process("a model without transformers' attention interface")
        max_positions = resolve_max_positions(model.config, max_positions, name)
        self.static_rope = StaticRope(model, max_positions)
        model_info = self._probe_attention(name, max_positions)
        suffix = f"-{max_positions}" if self.static_rope.is_dynamic else ""
        if self.tp_group is not None:
            check_heads(model, name, model_info.query_heads, model_info.kv_heads)
            suffix += f"-{self.tp_group.name}"
        self.model_info = replace(model_info, fingerprint=model_info.fingerprint + suffix)
        self.sampled_weights_hash = sampled_weights_hash(model)  # does not change with quantization
        self.lora_manager = LoraManager(model)
        self.adapters = self.lora_manager.adapters
        if architecture is not None and model_info.position_encoding not in architecture.position_encodings:
            raise ModelError(
                f"{name}: its positions were measured to be {model_info.position_encoding!r}, its family's are "
                f"{' or '.join(architecture.position_encodings)}; this version of transformers, or its "
                "configuration, computes it in another way: get its files again"
            )
        if architecture is None or needs_patch:  # a patch depends on the configuration
            verify_cache_reuse(self)

    @torch.no_grad()
    def _probe_attention(self, name: str, max_positions: int) -> ModelInfo:
        config = self.model.config.get_text_config()
        positions = [position for position in PROBE_POSITIONS if position < max_positions]
        tokens = [config.vocab_size // 2] * len(positions)
        probe, reversed_probe = AttentionProbe(), AttentionProbe()
        try:
            with self.attention_hook(), torch.autocast(next(self.model.parameters()).device.type, enabled=False):
                self.logits(tokens, positions, probe, [0])
                model_info = analyze(self.model, probe, name, max_positions)
                if self.architecture is None:
                    self.logits(tokens, positions[::-1], reversed_probe, [0])
                    check_no_token_mixing(probe, reversed_probe)
                return model_info
        except Exception as exc:
            reason = str(exc)[:300]
            raise ModelError(
                f"{name}: architecture {config.model_type!r} cannot be served: {reason}; use a model of docs/models.md"
            ) from exc

    def quantize(self, scheme: str) -> None:
        """Quantize the weights in place.

        Args:
            scheme: "int4" in groups of 32 weights (`int4_linear`).
        """
        from .kernels.int4_linear import GROUP_SIZE, quantize_layers

        self.ensure_single_process(f"quantization={scheme!r}")
        linears = [
            module
            for module in self.model.modules()
            if type(module) is torch.nn.Linear and module.in_features % GROUP_SIZE == 0
        ]
        num_weights, info = sum(module.weight.numel() for module in linears), self.model_info
        if 2 * num_weights < info.parameters:
            raise ConfigError(
                f"quantization={scheme!r}: only {num_weights:,} of {info.parameters:,} weights of {info.name} are in "
                "linear layers of a supported shape; use quantization=None"
            )
        quantize_layers(self.model, set(linears))
        self.model_info = replace(info, fingerprint=f"{info.fingerprint}-{scheme}")

    @torch.no_grad()
    def forward(
        self,
        tokens: list[int],
        positions: list[int],
        forward_context: ForwardContext,
        logits_indices: list[int],
        models: Sequence[str] = (),
    ) -> Float[Tensor, "R V"]:
        """Run the model over a batch; return float32 logits of `logits_indices`.

        Args:
            models: adapter of each token, or "base"; empty if all are "base".
        """
        if self.training_model is not None:
            self.ensure_not_training()
        lora = self.lora_rows(models) if self.adapters else nullcontext(False)
        autocast = torch.autocast(self.model_info.device.type, enabled=False)
        with self.attention_hook(), lora as has_adapters, autocast, allow_sigint():
            if self.compiled is not None and not has_adapters and not forward_context.saved_hidden:
                logits = self.compiled(tokens, positions, forward_context, logits_indices)
                if logits is not None:
                    return logits
            step = None if has_adapters else forward_context
            with self._fast_layers(step, len(tokens)):
                return self.logits(tokens, positions, forward_context, logits_indices).float()

    def _fast_layers(self, step: ForwardContext | None = None, num_rows: int = 0) -> AbstractContextManager[None]:
        """Run operators in place of layers inside the block, if there are any; see `ModelOperators.applied`."""
        if self.operators is None:
            return nullcontext()
        result: AbstractContextManager[None] = self.operators.applied(step, num_rows)
        return result

    def prepare_graph(self, forward_context: ForwardContext) -> None:
        """Prepare CUDA graph inputs for a step of the base model."""
        if hasattr(self.compiled, "launch") and not forward_context.saved_hidden:
            self.compiled.prepare(forward_context)

    @torch.no_grad()
    def launch_graph(
        self, tokens: Int[Tensor, " N"], positions: list[int], forward_context: ForwardContext, models: Sequence[str]
    ) -> Float[Tensor, "N V"] | None:
        """Replay a CUDA graph over device tokens; None if no graph fits."""
        self.ensure_not_training()
        autocast = torch.autocast(self.model_info.device.type, enabled=False)
        with self.attention_hook(), autocast, self.lora_rows(models) as has_adapters:
            if has_adapters or forward_context.saved_hidden or not hasattr(self.compiled, "launch"):
                return None
            result: Tensor | None = self.compiled.launch(tokens, positions, forward_context)
            return result

    @torch.no_grad()
    def forward_layers(
        self,
        start_layer: int,
        end_layer: int,
        tokens: list[int],
        positions: list[int],
        forward_context: ForwardContext,
        models: Sequence[str] = (),
    ) -> None:
        """Run layers [start_layer, end_layer) on tokens or injected hidden states."""
        self.ensure_not_training()
        layers, device = self.decoder_layers, self.model_info.device
        with (
            self.attention_hook(),
            self._fast_layers(),
            torch.autocast(device.type, enabled=False),
            self.lora_rows(models),
            layers.restricted_to(start_layer, end_layer),
            allow_sigint(),
        ):
            layers.backbone(
                input_ids=to_device([tokens], torch.long, device),
                position_ids=to_device([positions], torch.long, device),
                use_cache=False,
                step=forward_context,
            )

    @contextmanager
    def base_weights(self) -> Iterator[None]:
        """Disable the trained adapter and dropout inside the block."""
        if self.training_model is None:
            yield
            return
        with self.training_model.disable_adapter():
            was_training = self.training_model.training
            self.training_model.eval()
            try:
                yield
            finally:
                self.training_model.train(was_training)

    def ensure_not_training(self) -> None:
        if self.training_model is not None:
            raise ModelError("the model is being trained: compute when the training has ended")

    def ensure_single_process(self, feature: str) -> None:
        """Raise ConfigError for a feature that needs all heads in one process."""
        if self.tp_group is not None:
            raise ConfigError(f"{feature} does not go with {TP_LABEL}: use one process")

    @cached_property
    def can_run_layers(self) -> bool:
        """True if a part of the layers can run: one process has them, and the family's run one by one."""
        try:
            return self.tp_group is None and self.decoder_layers is not None
        except ModelError:
            return False

    @cached_property
    def decoder_layers(self) -> DecoderLayers:
        """Access to single decoder layers."""
        if self.attention_patch is not None:
            raise ModelError(
                f"{self.model_info.name}: layers of this family do not run one by one; it cannot take part in layer reuse"
            )
        return DecoderLayers(self.model)

    def logits(
        self,
        tokens: list[int],
        positions: list[int],
        forward_context: Any,
        logits_indices: list[int],
        *,
        model: Any = None,
    ) -> Float[Tensor, "R V"]:
        """Run the hooked model; `forward_context.attend` computes each layer's attention.

        Args:
            model: wrapper to call in place of the model.
        """
        count, numbers = len(tokens), [*tokens, *positions, *logits_indices]
        inputs = to_device(numbers, torch.long, next(self.model.parameters()).device)
        with self.attention_patch.applied(forward_context) if self.attention_patch is not None else nullcontext():
            output = (model or self.model)(
                input_ids=inputs[None, :count],
                position_ids=inputs[None, count : 2 * count],
                logits_to_keep=inputs[2 * count :],
                use_cache=False,
                step=forward_context,
            )
        return output.logits.squeeze(0)  # not [0]: its gradient would take the same memory again

    @contextmanager
    def attention_hook(self) -> Iterator[None]:
        """Set the model's attention to `ATTENTION` inside the block.

        One thread at a time runs such a block. A model with a `LegacyAttentionPatch` keeps its unused setting.
        """
        configs = [] if self.attention_patch is not None else [self.model.config, self.model.config.get_text_config()]
        rope = self.static_rope.applied() if self.static_rope.is_dynamic else nullcontext()
        with _FORWARD_LOCK, rope:
            previous = [vars(config).get(_SETTING) or config._attn_implementation for config in configs]
            try:
                for config in configs:
                    _set_attention(config, ATTENTION)
                yield
            finally:
                for config, implementation in zip(configs, previous, strict=True):
                    _set_attention(config, implementation)

    def lora_rows(self, models: Sequence[str]) -> AbstractContextManager[bool]:
        """Activate each token's adapter inside the block; yield True if any."""
        return self.lora_manager.activate(models) if self.lora_manager and self.adapters else nullcontext(False)

    def fingerprint(self, model: str) -> str:
        """Return the KV cache key of the base model or an adapter."""
        return self.model_info.fingerprint + (self.adapters[model].fingerprint if model != BASE_MODEL else "")

    def weights_hash(self, model: str) -> str:
        """Return `fingerprint` plus a hash of all weights, for exported KV."""
        return f"{self.fingerprint(model)}-{self._full_weights_hash}"

    @cached_property
    def _full_weights_hash(self) -> str:
        self.ensure_not_training()
        return weights_hash(self.model)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids of all tokens that end a message, without duplicates.

        Sources: the generation configuration, the model's configuration, the tokenizer, and the end-of-turn
        token of the chat template.
        """
        configs = self.model.generation_config, self.model.config, self.model.config.get_text_config()
        named = find_eos_token_ids(self.tokenizer, *configs)
        vocab_size = self.model_info.vocab_size
        invalid = sorted({token for token in named if not 0 <= token < vocab_size})
        if invalid:
            _log.warning(
                "%s: eos_token_id %s is not in the vocabulary of %s, and ignored",
                self.model_info.name,
                invalid,
                vocab_size,
            )
        return tuple(dict.fromkeys(token for token in named if token not in invalid))

    def default_cache_tokens(self, bytes_per_token: int) -> int:
        """Return the default KV cache capacity in tokens of so many bytes.

        Eight full contexts, but at most a quarter of the free host memory or half of the free GPU memory. The
        rest is for further models and activations.
        """
        limit = self.max_cache_tokens(bytes_per_token) // (4 if self.model_info.device.type == "cpu" else 2)
        size = max(256, min(8 * self.model_info.max_positions, limit))
        return size if self.tp_group is None else min(self.tp_group.all_gather("cache size", size))

    def max_cache_tokens(self, bytes_per_token: int) -> int:
        """Return the number of tokens of so many bytes in the KV cache that fit in free memory."""
        return free_memory(self.model_info.device) // bytes_per_token


def _set_attention(config: Any, implementation: str) -> None:
    """Set the attention of a configuration and of those inside it."""
    if _SETTING in vars(config) and not type(config).sub_configs:
        vars(config)[_SETTING] = (
            implementation  # what the property does, which takes longer than a step's other lookups
        )
    else:
        config._attn_implementation = implementation
