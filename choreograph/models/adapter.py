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

from ..config import budget
from ..errors import ConfigError, ModelError
from ..ops.attend import Step
from ..ops.crossing import sent
from ..quiet import interruptible
from ..types import BASE
from .bridges import Bridge
from .check import check_itself
from .depth import Depth
from .facts import ModelFacts, check_devices, free_memory, positions_of, read_facts, weights_checksum, weights_digest
from .families import FAMILIES, Family
from .frozen import FrozenRotary
from .lora import Loras
from .parallel import NEVER, Ranks, check_heads, ranks_of
from .probe import Probe, Shape, check_alone, measured, places

ATTENTION = "choreograph"
GROUP = 32  # weights that share a scale in four bits
_TURN = threading.RLock()


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
    if isinstance(step, Probe):
        step.note(module, attention_mask, sliding_window, softcap)
    return step.attend(module.layer_idx, query, key, value, scale, s_aux).contiguous(), None  # some make views of it


AttentionInterface.register(ATTENTION, _attention)  # and no masks: looking for packed texts waits for a GPU


class Adapter:
    """One model. `forward` is the only way in; `tokenizer` may be None (then token ids alone work)."""

    loras: Loras | None = None
    ranks: Ranks | None = None  # where several processes compute it together
    in_training: Any = None  # what wraps the model while its weights are not what its fingerprint says

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any = None, *, name: str | None = None, positions: int | None = None
    ) -> None:
        """positions: fewer than the model has, where tables that change with the length shall be those of a shorter
        one. A model that cannot be served is refused with why."""
        self.model = model.eval()
        self.tokenizer = tokenizer
        name = name or model.config._name_or_path or model.config.model_type
        check_devices(model, name)
        config = model.config.get_text_config()
        self.family = FAMILIES.get(config.model_type)
        self.bridge = Bridge(model) if self.family is not None and self.family.bridge else None
        self.ranks = ranks_of(model, name)
        if self.bridge is not None:
            self.refuse_ranks("a model whose attention is not behind transformers' interface")
        most = positions_of(model.config, positions, name)
        self.frozen = FrozenRotary(model, most)
        shape = self._measure(name, most)
        note = f"-{most}" if self.frozen.changing else ""
        if self.ranks is not None:
            check_heads(model, name, shape.query_heads, shape.kv_heads)
            note += f"-{self.ranks.name}"
        self.facts = read_facts(model, shape, name, most, note)
        self.weights = weights_digest(model)  # whatever type they are in, or will be
        self.loras = Loras(model)
        self.compiled: Any = None  # a `models.compiled.CompiledForward` or `models.graphed.GraphedForward`, or nothing
        if self.family is not None:
            _check_family(self.family, self.facts)
        if self.family is None or self.family.bridge:  # what a bridge does is worked out from the configuration
            check_itself(self)

    @torch.no_grad()
    def _measure(self, name: str, positions: int) -> Shape:
        probe, back, at = Probe(), Probe(), places(positions)
        tokens = [self.model.config.get_text_config().vocab_size // 2] * len(at)
        try:
            with self.hooked(), torch.autocast(next(self.model.parameters()).device.type, enabled=False):
                self.logits(tokens, at, probe, [0])
                shape = measured(self.model, probe, positions)
                if self.family is None:
                    self.logits(tokens, at[::-1], back, [0])
                    check_alone(probe, back)
                return shape
        except Exception as problem:
            kind = self.model.config.get_text_config().model_type
            raise ModelError(f"{name}: architecture {kind!r} cannot be served: {str(problem)[:300]}") from problem

    def quantize(self, kind: str) -> None:
        """Weight-only quantisation in place, through torchao. int4: in groups of 32; on a CPU torchao keeps the values
        in bytes and makes floating-point numbers of them for every product, which is slow."""
        self.refuse_ranks(f"quantization={kind!r}")
        try:
            from torchao import quantization as torchao
        except ImportError:
            raise ConfigError(f"quantization={kind!r} needs torchao: pip install 'choreograph[int8]'") from None
        ways = {
            "int8": torchao.Int8WeightOnlyConfig,
            "int4": lambda: torchao.IntxWeightOnlyConfig(getattr(torch, kind), granularity=torchao.PerGroup(GROUP)),
        }
        step = GROUP if kind == "int4" else 1
        chosen = [
            module
            for module in self.model.modules()
            if type(module) is torch.nn.Linear and module.in_features % step == 0
        ]
        weights = sum(module.weight.numel() for module in chosen)
        if 2 * weights < self.facts.parameters:
            raise ConfigError(
                f"quantization={kind!r}: only {weights:,} of {self.facts.parameters:,} weights of {self.facts.name} "
                "are in layers that torchao can quantise; use quantization=None"
            )
        torchao.quantize_(self.model, ways[kind](), filter_fn=lambda module, path: module in chosen)
        self.facts = replace(self.facts, fingerprint=f"{self.facts.fingerprint}-{kind}")

    @torch.no_grad()
    def forward(
        self, tokens: list[int], positions: list[int], step: Step, rows: list[int], models: Sequence[str] = ()
    ) -> Float[Tensor, "R V"]:
        """Computes all rows of a step, each by the model that it names; the logits of `rows` only, in float32."""
        self.refuse_in_training()
        with self.hooked(), torch.autocast(self.facts.device.type, enabled=False), self.adapted(models) as changed:
            if self.compiled is not None and not changed and not step.kept:  # graphs are of the base model alone
                with interruptible():
                    logits = self.compiled(tokens, positions, step, rows)
                if logits is not None:
                    return logits
            return self.logits(tokens, positions, step, rows).float()

    def prepare(self, step: Step) -> None:
        """Works out ahead what a step of the base model will need."""
        if self._goes_ahead(step):
            self.compiled.prepare(step)

    @torch.no_grad()
    def begin(
        self, tokens: Int[Tensor, " N"], positions: list[int], step: Step, models: Sequence[str]
    ) -> Float[Tensor, "N V"] | None:
        """As `forward`, of tokens that the device has; None where there is no graph for such a step."""
        self.refuse_in_training()
        if not self._goes_ahead(step):
            return None
        with self.hooked(), torch.autocast(self.facts.device.type, enabled=False), self.adapted(models) as changed:
            found: Tensor | None = None if changed else self.compiled.begin(tokens, positions, step)
            return found

    def _goes_ahead(self, step: Step) -> bool:
        return hasattr(self.compiled, "begin") and not step.kept

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
            interruptible(),
        ):
            self.depth.body(
                input_ids=sent([tokens], torch.long, device),
                position_ids=sent([positions], torch.long, device),
                use_cache=False,
                step=step,
            )

    def refuse_in_training(self) -> None:
        if self.in_training is not None:
            raise ModelError("the model is being trained: compute when the training has ended")

    @contextmanager
    def untrained(self) -> Iterator[None]:
        """For one pass, the model as it is served: without what is being trained, and without dropout."""
        if self.in_training is None:
            yield
            return
        with self.in_training.disable_adapter():
            before = self.in_training.training
            self.in_training.eval()
            try:
                yield
            finally:
                self.in_training.train(before)

    def refuse_ranks(self, what: str) -> None:
        """Raises ConfigError for what needs a whole model."""
        if self.ranks is not None:
            raise ConfigError(f"{what} does not go with {NEVER}: use one process")

    @cached_property
    def depth(self) -> Depth:
        """Its layers one by one."""
        if self.bridge is not None:
            raise ModelError(
                f"{self.facts.name}: layers of this family do not run one by one; it cannot share encodings"
            )
        return Depth(self.model)

    def logits(
        self, tokens: list[int], positions: list[int], step: Any, rows: list[int], *, through: Any = None
    ) -> Float[Tensor, "R V"]:
        """One pass of the hooked model, attention being what `step.attend` makes of every layer. through: what wraps
        the model."""
        device = next(self.model.parameters()).device
        with self.bridge.carrying(step) if self.bridge is not None else nullcontext(), interruptible():
            return (through or self.model)(
                input_ids=sent([tokens], torch.long, device),
                position_ids=sent([positions], torch.long, device),
                logits_to_keep=sent(rows, torch.long, device),
                use_cache=False,
                step=step,
            ).logits.squeeze(0)  # not [0], whose gradient is as large again

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Engines in several threads take turns: the attention setting is the model's, and models are shared. A model
        with a bridge keeps its own, which is not used."""
        configs = [] if self.bridge is not None else [self.model.config, self.model.config.get_text_config()]
        with _TURN, self.frozen.applied():
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
        return (BASE, *(self.loras.names if self.loras else ()))

    def fingerprint(self, model: str) -> str:
        """Names what computes: nothing that one computed is ever found by another."""
        return self.facts.fingerprint + (self.loras.fingerprint(model) if self.loras else "")

    def identity(self, model: str) -> str:
        """The same for what leaves the engine, where models that differ between two samples may meet."""
        return f"{self.fingerprint(model)}-{self._checksum}"

    @cached_property
    def _checksum(self) -> str:
        self.refuse_in_training()
        return weights_checksum(self.model)

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

    def arena_tokens(self, asked: int | str | None) -> int:
        """Slots of the arena: what was asked for, else eight full contexts within a quarter of free memory; of a GPU's,
        which holds nothing else, within half: other models and what steps need come behind."""
        if asked is not None:
            return budget(asked, self.facts.kv_bytes_per_token)
        room = self.room() // 4 if self.facts.device.type == "cpu" else self.room() // 2
        size = max(256, min(8 * self.facts.max_positions, room))
        return size if self.ranks is None else self.ranks.least("cache size", size)

    def room(self) -> int:
        """Tokens that free memory would hold."""
        return free_memory(self.facts.device) // self.facts.kv_bytes_per_token


def _check_family(family: Family, facts: ModelFacts) -> None:
    """The table says what has to be found in a model that it names."""
    if facts.positions not in family.positions:
        raise ModelError(
            f"{facts.name}: its positions were measured to be {facts.positions!r}, its family's are "
            f"{' or '.join(family.positions)}; this version of transformers computes it in another way"
        )
