"""A Hugging Face causal language model as the engine sees it: facts, and one forward pass over packed rows.

The step travels through the unmodified model as a keyword argument to an attention function that this module
registers with transformers (`AttentionInterface`). The model's own attention setting is put back after every
pass, so that a model handed over in memory stays usable by its owner.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from ..attention.backend import ForwardContext, to_device
from ..config import parse_capacity
from ..errors import ConfigError, ModelError
from ..outputs import BASE_MODEL
from ..utils import allow_sigint
from .architectures import SUPPORTED_ARCHITECTURES, Architecture, LegacyAttentionPatch
from .info import (
    ModelInfo,
    check_devices,
    free_memory,
    read_model_info,
    resolve_max_positions,
    sampled_weights_hash,
    weights_hash,
)
from .introspect import AttentionProbe, ProbeResult, analyze, check_no_token_mixing, probe_positions, verify_cache_reuse
from .layers import DecoderLayers
from .lora import LoraManager
from .static_rope import StaticRope
from .tensor_parallel import TP_LABEL, TPGroup, check_heads, tp_group

ATTENTION = "choreograph"

INT4_GROUP_SIZE = 32  # weights that share a scale in four bits

_FORWARD_LOCK = threading.RLock()


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
    """The registered attention function: hands one layer to the step. s_aux: the scores of attention sinks."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():
        return torch.ops.choreograph.attend(query, key, value, step, module.layer_idx, scale, s_aux), None
    if step is None:
        raise ModelError("its layers pass no keyword arguments on to attention")
    if isinstance(step, AttentionProbe):
        step.record_options(module, attention_mask, sliding_window, softcap)
    return step.attend(module.layer_idx, query, key, value, scale, s_aux).contiguous(), None  # some make views of it


AttentionInterface.register(ATTENTION, _attention)  # and no masks: looking for packed texts waits for a GPU


class HFModel:
    """One model. `forward` is the only way in; `tokenizer` may be None (then token ids alone work)."""

    lora_manager: LoraManager | None = None
    tp_group: TPGroup | None = None  # where several processes compute it together
    training_model: Any = None  # what wraps the model while its weights are not what its fingerprint says

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        max_positions: int | None = None,
    ) -> None:
        """positions: fewer than the model has, where tables that change with the length shall be those of a shorter
        one. A model that cannot be served is refused with why."""
        self.model = model.eval()
        self.tokenizer = tokenizer
        name = name or model.config._name_or_path or model.config.model_type
        check_devices(model, name)
        config = model.config.get_text_config()
        self.architecture = SUPPORTED_ARCHITECTURES.get(config.model_type)
        self.attention_patch = (
            LegacyAttentionPatch(model) if self.architecture is not None and self.architecture.needs_patch else None
        )
        self.tp_group = tp_group(model, name)
        if self.attention_patch is not None:
            self.ensure_single_process("a model whose attention is not behind transformers' interface")
        most = resolve_max_positions(model.config, max_positions, name)
        self.static_rope = StaticRope(model, most)
        shape = self._probe_attention(name, most)
        note = f"-{most}" if self.static_rope.is_dynamic else ""
        if self.tp_group is not None:
            check_heads(model, name, shape.query_heads, shape.kv_heads)
            note += f"-{self.tp_group.name}"
        self.model_info = read_model_info(model, shape, name, most, note)
        self.sampled_weights_hash = sampled_weights_hash(model)  # whatever type they are in, or will be
        self.lora_manager = LoraManager(model)
        self.compiled: Any = None  # a `models.compiled.CompiledForward` or `models.graphed.GraphedForward`, or nothing
        if self.architecture is not None:
            _check_positions(self.architecture, self.model_info)
        if (
            self.architecture is None or self.architecture.needs_patch
        ):  # what a bridge does is worked out from the configuration
            verify_cache_reuse(self)

    @torch.no_grad()
    def _probe_attention(self, name: str, max_positions: int) -> ProbeResult:
        probe, back, at = AttentionProbe(), AttentionProbe(), probe_positions(max_positions)
        tokens = [self.model.config.get_text_config().vocab_size // 2] * len(at)
        try:
            with self.attention_hook(), torch.autocast(next(self.model.parameters()).device.type, enabled=False):
                self.logits(tokens, at, probe, [0])
                shape = analyze(self.model, probe, max_positions)
                if self.architecture is None:
                    self.logits(tokens, at[::-1], back, [0])
                    check_no_token_mixing(probe, back)
                return shape
        except Exception as exc:
            kind = self.model.config.get_text_config().model_type
            raise ModelError(f"{name}: architecture {kind!r} cannot be served: {str(exc)[:300]}") from exc

    def quantize(self, scheme: str) -> None:
        """Weight-only quantisation in place, through torchao. int4: in groups of 32; on a CPU torchao keeps the values
        in bytes and makes floating-point numbers of them for every product, which is slow."""
        self.ensure_single_process(f"quantization={scheme!r}")
        try:
            from torchao import quantization as torchao
        except ImportError:
            raise ConfigError(f"quantization={scheme!r} needs torchao: pip install 'choreograph[int8]'") from None
        ways = {
            "int8": torchao.Int8WeightOnlyConfig,
            "int4": lambda: torchao.IntxWeightOnlyConfig(
                getattr(torch, scheme), granularity=torchao.PerGroup(INT4_GROUP_SIZE)
            ),
        }
        step = INT4_GROUP_SIZE if scheme == "int4" else 1
        chosen = [
            module
            for module in self.model.modules()
            if type(module) is torch.nn.Linear and module.in_features % step == 0
        ]
        weights = sum(module.weight.numel() for module in chosen)
        if 2 * weights < self.model_info.parameters:
            raise ConfigError(
                f"quantization={scheme!r}: only {weights:,} of {self.model_info.parameters:,} weights of {self.model_info.name} "
                "are in layers that torchao can quantise; use quantization=None"
            )
        torchao.quantize_(self.model, ways[scheme](), filter_fn=lambda module, path: module in chosen)
        self.model_info = replace(self.model_info, fingerprint=f"{self.model_info.fingerprint}-{scheme}")

    @torch.no_grad()
    def forward(
        self,
        tokens: list[int],
        positions: list[int],
        forward_context: ForwardContext,
        logits_indices: list[int],
        models: Sequence[str] = (),
    ) -> Float[Tensor, "R V"]:
        """Computes all rows of a step, each by the model that it names; the logits of `rows` only, in float32."""
        self.ensure_not_training()
        with (
            self.attention_hook(),
            torch.autocast(self.model_info.device.type, enabled=False),
            self.lora_rows(models) as changed,
        ):
            if (
                self.compiled is not None and not changed and not forward_context.saved_hidden
            ):  # graphs are of the base model alone
                with allow_sigint():
                    logits = self.compiled(tokens, positions, forward_context, logits_indices)
                if logits is not None:
                    return logits
            return self.logits(tokens, positions, forward_context, logits_indices).float()

    def prepare_graph(self, forward_context: ForwardContext) -> None:
        """Works out ahead what a step of the base model will need."""
        if self._can_launch_graph(forward_context):
            self.compiled.prepare(forward_context)

    @torch.no_grad()
    def launch_graph(
        self, tokens: Int[Tensor, " N"], positions: list[int], forward_context: ForwardContext, models: Sequence[str]
    ) -> Float[Tensor, "N V"] | None:
        """As `forward`, of tokens that the device has; None where there is no graph for such a step."""
        self.ensure_not_training()
        if not self._can_launch_graph(forward_context):
            return None
        with (
            self.attention_hook(),
            torch.autocast(self.model_info.device.type, enabled=False),
            self.lora_rows(models) as changed,
        ):
            result: Tensor | None = None if changed else self.compiled.launch(tokens, positions, forward_context)
            return result

    def _can_launch_graph(self, forward_context: ForwardContext) -> bool:
        return hasattr(self.compiled, "launch") and not forward_context.saved_hidden

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
        """Computes some layers alone, from the tokens or from what the step gives into the first of them."""
        self.ensure_not_training()
        device = self.model_info.device
        with (
            self.attention_hook(),
            torch.autocast(device.type, enabled=False),
            self.lora_rows(models),
            self.decoder_layers.restricted_to(start_layer, end_layer),
            allow_sigint(),
        ):
            self.decoder_layers.backbone(
                input_ids=to_device([tokens], torch.long, device),
                position_ids=to_device([positions], torch.long, device),
                use_cache=False,
                step=forward_context,
            )

    def ensure_not_training(self) -> None:
        if self.training_model is not None:
            raise ModelError("the model is being trained: compute when the training has ended")

    @contextmanager
    def base_weights(self) -> Iterator[None]:
        """For one pass, the model as it is served: without what is being trained, and without dropout."""
        if self.training_model is None:
            yield
            return
        with self.training_model.disable_adapter():
            before = self.training_model.training
            self.training_model.eval()
            try:
                yield
            finally:
                self.training_model.train(before)

    def ensure_single_process(self, feature: str) -> None:
        """Raises ConfigError for what needs a whole model."""
        if self.tp_group is not None:
            raise ConfigError(f"{feature} does not go with {TP_LABEL}: use one process")

    @cached_property
    def decoder_layers(self) -> DecoderLayers:
        """Its layers one by one."""
        if self.attention_patch is not None:
            raise ModelError(
                f"{self.model_info.name}: layers of this family do not run one by one; it cannot share encodings"
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
        """One pass of the hooked model, attention being what `step.attend` makes of every layer. through: what wraps
        the model."""
        device = next(self.model.parameters()).device
        with (
            self.attention_patch.applied(forward_context) if self.attention_patch is not None else nullcontext(),
            allow_sigint(),
        ):
            return (model or self.model)(
                input_ids=to_device([tokens], torch.long, device),
                position_ids=to_device([positions], torch.long, device),
                logits_to_keep=to_device(logits_indices, torch.long, device),
                use_cache=False,
                step=forward_context,
            ).logits.squeeze(0)  # not [0], whose gradient is as large again

    @contextmanager
    def attention_hook(self) -> Iterator[None]:
        """Engines in several threads take turns: the attention setting is the model's, and models are shared. A model
        with a bridge keeps its own, which is not used."""
        configs = [] if self.attention_patch is not None else [self.model.config, self.model.config.get_text_config()]
        with _FORWARD_LOCK, self.static_rope.applied():
            before = [config._attn_implementation for config in configs]
            try:
                for config in configs:
                    config._attn_implementation = ATTENTION
                yield
            finally:
                for config, old in zip(configs, before, strict=True):
                    config._attn_implementation = old

    @property
    def models(self) -> tuple[str, ...]:
        """The names that calls may ask for: the base model's, and those of its adapters."""
        return (BASE_MODEL, *(self.lora_manager.names if self.lora_manager else ()))

    def fingerprint(self, model: str) -> str:
        """Names what computes: nothing that one computed is ever found by another."""
        return self.model_info.fingerprint + (self.lora_manager.fingerprint(model) if self.lora_manager else "")

    def weights_hash(self, model: str) -> str:
        """The same for what leaves the engine, where models that differ between two samples may meet."""
        return f"{self.fingerprint(model)}-{self._full_weights_hash}"

    @cached_property
    def _full_weights_hash(self) -> str:
        self.ensure_not_training()
        return weights_hash(self.model)

    def lora_rows(self, models: Sequence[str]) -> AbstractContextManager[bool]:
        """For one pass, the model of every row; tells whether any is an adapter."""
        return (
            self.lora_manager.activate(models)
            if self.lora_manager is not None and self.lora_manager.names
            else nullcontext(False)
        )

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a message: the generation configuration's, else the tokenizer's."""
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        if ends is None:
            ends = getattr(self.tokenizer, "eos_token_id", None)
        if ends is None:
            return ()
        return tuple(ends) if isinstance(ends, (list, tuple)) else (ends,)

    def default_cache_tokens(self, requested: int | str | None) -> int:
        """Slots of the arena: what was asked for, else eight full contexts within a quarter of free memory; of a GPU's,
        which holds nothing else, within half: other models and what steps need come behind."""
        if requested is not None:
            return parse_capacity(requested, self.model_info.kv_bytes_per_token)
        room = self.max_cache_tokens() // 4 if self.model_info.device.type == "cpu" else self.max_cache_tokens() // 2
        size = max(256, min(8 * self.model_info.max_positions, room))
        return size if self.tp_group is None else self.tp_group.all_reduce_min("cache size", size)

    def max_cache_tokens(self) -> int:
        """Tokens that free memory would hold."""
        return free_memory(self.model_info.device) // self.model_info.kv_bytes_per_token


def _check_positions(architecture: Architecture, model_info: ModelInfo) -> None:
    """The table says what has to be found in a model that it names."""
    if model_info.position_encoding not in architecture.position_encodings:
        raise ModelError(
            f"{model_info.name}: its positions were measured to be {model_info.position_encoding!r}, its family's are "
            f"{' or '.join(architecture.position_encodings)}; this version of transformers computes it in another way"
        )
