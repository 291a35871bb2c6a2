"""`Engine`, the public entry point: models, their KV cache, and sessions."""

import gc
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack, overload

import torch
from transformers import PreTrainedModel

from ..attention.int8_rows import SCALE_BYTES
from ..config import EngineConfig, allocating, as_int, check_capacity, parse_capacity
from ..context.feature import ContextFeature, FeatureSet
from ..core.core import EngineCore
from ..errors import ConfigError, ModelError
from ..events import EventBus
from ..features.agent_tags import AgentTags
from ..features.blocked_turns import BlockedTurns
from ..features.budget import BudgetedRepair
from ..features.guard import Guard, LabelFlow
from ..features.other_models import LostParents, OtherModels, PatternSelector
from ..features.repair.planner import ContextRepair
from ..kv_cache.eviction import policy_name
from ..kv_cache.manager import KVCacheManager
from ..kv_cache.pool import KVPool
from ..kv_cache.tiers import make_tiers
from ..kv_cache.transfer import SyncExecutor
from ..layer_pattern import LayerPattern, parse_layer_pattern
from ..models.hf_model import HFModel
from ..models.info import ModelInfo, total_memory
from ..models.loader import DEFAULT_MODEL, check_dtype, load
from ..models.lora import LoraWeights
from ..models.operators.model_operators import create_operators
from ..namespace import Client
from ..outputs import BASE_MODEL, MODES, EngineStats, Mode
from ..utils import DeferSigintLock
from .call import RESERVED_NAMES, SessionOptions
from .chat import ChatTemplate
from .session import Session

GC_THRESHOLD_BYTES = 1 << 26  # collect garbage before allocating a cache of this size

Source = str | os.PathLike[str]

Adapters = Mapping[str, Source]

Models = Mapping[str, Source | PreTrainedModel]


class Engine:
    """A base model, adapters, sibling models, one KV cache, and sessions."""

    def __init__(
        self,
        hf_model: HFModel,
        config: EngineConfig | None = None,
        *,
        adapters: Adapters | None = None,
        models: Models | None = None,
        features: Iterable[ContextFeature] = (),
    ) -> None:
        config = config or EngineConfig()
        events, lock = EventBus(), DeferSigintLock()
        cache_manager = _create_cache_manager(hf_model, config, events, lock.sleep)
        features, guard, self.other_models = tuple(features), Guard(), OtherModels()
        for name in (name for feature in features for name in (*feature.options, *feature.session_options)):
            if name in RESERVED_NAMES:
                raise ConfigError(f"features: {name!r} is an option of the library: rename it")
        first = AgentTags(), BlockedTurns(), guard, LostParents()
        last = BudgetedRepair(), ContextRepair(), self.other_models, LabelFlow(guard)
        self.core = EngineCore(hf_model, config, cache_manager, events, lock, FeatureSet((*first, *features, *last)))
        for name, source in (adapters or {}).items():
            self.add_adapter(name, source)
        for name, model in (models or {}).items():
            self.add_model(name, model)
        self.tokenizer = hf_model.tokenizer
        self.chat = ChatTemplate(hf_model.tokenizer) if hf_model.tokenizer is not None else None

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] | PreTrainedModel = DEFAULT_MODEL,
        *,
        config: EngineConfig | None = None,
        tokenizer: Any = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        device_map: Any = None,
        tp_plan: Any = None,
        adapters: Adapters | None = None,
        models: Models | None = None,
        layer_reuse: Mapping[str, LayerPattern | Sequence[int]] | None = None,
        features: Iterable[ContextFeature] = (),
    ) -> "Engine":
        """Load a model and create an engine.

        Args:
            model: a name, a Hub id, a folder, a .gguf file, or a transformers model in memory.
            dtype: defaults to bfloat16; to float32 on processors without bfloat16 instructions, unless kernels of our
                own run the model's layers or weights have 4 bits. A model in memory keeps its own.
            device: defaults to the CPU.
            device_map: as in transformers, in place of `device`.
            tp_plan: as in transformers ("auto"): tensor parallelism over the processes of torchrun.
            adapters: LoRA adapters by name, each a folder saved by `peft` or a Hub id.
            models: sibling models of the same architecture by name, each as `model`.
            layer_reuse: pattern of `enable_layer_reuse` for each model that reuses layers of the base.
            features: your own, in the order in which they are called; the library's repair comes after them.

        Raises:
            ModelError: if a model cannot be found, read or served.
        """
        config = EngineConfig() if config is None else config
        if not isinstance(config, EngineConfig):
            raise ConfigError(f"config={config!r}: use EngineConfig(...)")
        if not isinstance(model, (str, os.PathLike, PreTrainedModel)):
            raise ModelError(f"model={model!r}: use a name, a path or a transformers model")
        hf_model = load(
            model,
            tokenizer=tokenizer,
            dtype=check_dtype(dtype),
            device=device,
            device_map=device_map,
            tp_plan=tp_plan,
            max_positions=config.max_model_len,
            uses_operators=config.uses_operators,
            quantization=config.quantization,
        )
        if config.quantization:
            hf_model.quantize(config.quantization)
        if config.uses_operators:
            hf_model.operators = create_operators(hf_model)
        if config.compile:
            _enable_compile(hf_model, config)
        engine = cls(hf_model, config, adapters=adapters, models=models, features=features)
        for receiver, pattern in (layer_reuse or {}).items():
            engine.enable_layer_reuse(receiver, pattern=pattern)
        return engine

    @property
    def model_info(self) -> ModelInfo:
        """Probed properties of the base model: shapes, positions, attention per layer."""
        return self.core.hf_model.model_info

    @property
    def models(self) -> tuple[str, ...]:
        """Names of served models: "base", adapters and sibling models."""
        return self.core.model_set.names

    def add_adapter(self, name: str, source: Source) -> LoraWeights:
        """Serve a LoRA adapter.

        Requests of other models never match its KV entries.
        """
        self.core.hf_model.ensure_single_process("a LoRA adapter")
        loras = self.core.hf_model.lora_manager
        assert loras is not None
        with self.core.lock, self.core.hf_model.attention_hook():  # no step starts meanwhile
            self.core.model_set.check_unused_name(name)
            return loras.add(name, source)

    def add_model(self, name: str, source: Source | PreTrainedModel) -> ModelInfo:
        """Serve another model with its own weights in the same cache.

        It is loaded on the base model's device in the base model's dtype.

        Raises:
            ModelError: if its KV is not interchangeable with the base's: other layers, heads or
                positions, or another tokenizer.
        """
        core, config = self.core, self.core.config
        core.hf_model.ensure_single_process("a second model")
        base_info = core.hf_model.model_info
        core.model_set.check_unused_name(name)
        in_memory = isinstance(source, PreTrainedModel)  # no own tokenizer: uses the base's
        other = load(
            source,
            dtype=None if in_memory else base_info.dtype,
            device=base_info.device,
            max_positions=config.max_model_len,
        )
        if config.quantization:
            other.quantize(config.quantization)
        if config.uses_operators:
            other.operators = create_operators(other)
        if config.compile:
            _enable_compile(other, config)
        with core.lock:
            core.model_set.add(name, other)
        return other.model_info

    def remove_adapter(self, name: str) -> None:
        """Stop serving an adapter and clear the cache.

        Raises:
            ConfigError: if one of its messages is not released.
        """
        loras = self.core.hf_model.lora_manager
        assert loras is not None
        self._remove(name, loras.remove)

    def remove_model(self, name: str) -> None:
        """Stop serving a sibling model and clear the cache, as `remove_adapter`."""
        self._remove(name, self.core.model_set.remove)

    def _remove(self, name: str, remove: Callable[[str], None]) -> None:
        with self.core.lock:
            if any(request.model == name for request in self.core.scheduler.waiting) or self._has_entries_of(name):
                raise ConfigError(f"model {name!r} is in use: release its messages first")
            remove(name)
            self.other_models.remove_model(name)
            self.clear_cache()  # its entries could be found under a reused name

    def _has_entries_of(self, name: str) -> bool:
        """Return whether `name` computed a referenced KV entry or its context.

        Contexts are searched transitively.
        """
        entries = [entry for entry in self.core.cache_manager.entries.values() if entry.owners]
        seen = set(entries)
        for entry in entries:  # grows during iteration
            for read_entry in entry.read_entries:
                if read_entry not in seen:
                    seen.add(read_entry)
                    entries.append(read_entry)
        return any(entry.model == name for entry in entries)

    def enable_layer_reuse(
        self,
        receiver: str,
        sender: str = BASE_MODEL,
        *,
        pattern: LayerPattern | Sequence[int] | None = None,
        selector: PatternSelector | None = None,
        patterns: Iterable[LayerPattern | Sequence[int]] = (),
        capacity: int | None = None,
    ) -> None:
        """Let `receiver` reuse KV of `sender`, recomputing some layers (DroidSpeak §4.2).

        Applies to requests with kv_reuse="partial". Messages computed before this call have no
        cached hidden states to start from: they are recomputed in all layers.

        Args:
            pattern: a `LayerPattern`, or its three integers (head, start, end): recompute [0,
                head), reuse [head, start), recompute [start, end), reuse the rest.
            selector: in place of `pattern`: gets the `EngineLoad` when a message's prefill is
                admitted, returns one of `patterns`.
            patterns: all patterns `selector` may return.
            capacity: size in tokens of the partial-layer pool, for the layers that receivers
                compute.
        """
        self.core.hf_model.ensure_single_process("layer reuse between models")
        if (pattern is None) == (selector is None):
            raise ConfigError("give either pattern=... or selector=... with patterns=...")
        layer_patterns = [parse_layer_pattern(p) for p in ((pattern,) if pattern is not None else tuple(patterns))]
        if not layer_patterns:
            raise ConfigError("patterns=(): list all patterns that `selector` may return")
        core = self.core
        with core.lock, core.hf_model.attention_hook():  # no step starts meanwhile
            while core.cache_manager.offload_manager.wait():
                core.poll_transfers()
            self.other_models.add(receiver, sender, layer_patterns, selector, capacity)

    @property
    def events(self) -> EventBus:
        """Event bus of the engine: `counts` per event, `recent` events, `listen`."""
        return self.core.events

    @overload
    def session(
        self,
        *,
        mode: Mode = "choreographed",
        seed: int | None = None,
        client_id: str | Client = "default",
        model: str = BASE_MODEL,
        **options: Unpack[SessionOptions],
    ) -> Session: ...
    @overload
    def session(self, *, mode: Mode = "choreographed", **options: Any) -> Session: ...
    def session(self, *, mode="choreographed", seed=None, client_id="default", model=BASE_MODEL, **options):
        """Open a session; its messages are released when it closes.

        Args:
            mode: execution mode.
            seed: seed of the session's sampling; None for a random one.
            client_id: sessions of different clients never share KV; a name, or a tenant and its salt.
            model: default model of requests, one of `models`.
            options: defaults of calls, see `SessionOptions`.
        """
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r}: use one of {MODES}")
        number = as_int(seed)
        if number is None and seed is not None:
            raise ConfigError(f"seed={seed!r}: use a whole number or None")
        if not isinstance(client_id, (str, Client)):
            raise ConfigError(f"client_id={client_id!r}: use a string")
        tp_group = self.core.hf_model.tp_group
        if tp_group is not None and number is None:
            number = tp_group.broadcast("seed", random.getrandbits(63))
        session = Session(
            self.core, self.chat, mode=mode, seed=number, client_id=client_id, model=model, options=options
        )
        session.engine = self
        return session

    def step(self) -> bool:
        """Compute one step; return False if nothing can run."""
        return self.core.step()

    def run_until_idle(self) -> None:
        """Run until everything submitted is complete."""
        while self.core.step():
            pass

    def clear_cache(self) -> None:
        """Discard every KV entry that no message references."""
        with self.core.lock:
            while self.core.cache_manager.offload_manager.wait():
                self.core.poll_transfers()
            self.core.cache_manager.evict_unreferenced()

    def stats(self) -> EngineStats:
        """Return the engine's load (queues, KV cache, tiers) and its counters.

        Waits for no other thread: during a step, the numbers may be those of a part of it.
        """
        core = self.core
        copies = [
            copy for entry in list(core.cache_manager.entries.values()) for copy in list(entry.tier_copies.items())
        ]
        return EngineStats(
            num_waiting=len(core.scheduler.waiting),
            num_running=len(core.scheduler.running),
            num_steps=core.num_steps,
            num_batched_tokens=core.num_batched_tokens,
            num_drafted_tokens=core.speculator.num_drafted if core.speculator else 0,
            num_accepted_tokens=core.speculator.num_accepted if core.speculator else 0,
            **core.cache_manager.stats,
            tier_tokens={
                tier.name: sum(copy.tokens for name, copy in copies if name == tier.name)
                for tier in core.cache_manager.offload_manager.tiers
            },
            events=dict(core.events.counts),
        )

    def check(self) -> None:
        """Raise AssertionError if an invariant of cache or queues is broken."""
        self.core.check()

    def warm_up(self) -> None:
        """Capture the CUDA graphs of every batch size that fits the cache.

        Does nothing without `compile`. Graphs of more attention work are captured on first use.
        """
        compiled, pool = self.core.hf_model.compiled, self.core.cache_manager.pool
        if compiled is None:
            return
        max_tokens = min(self.model_info.max_positions, pool.pages * pool.page_size)
        with self.session() as session:
            for num_tokens in compiled.sizes:
                if num_tokens <= max_tokens:
                    session.prefill([0] * num_tokens).result()  # one step

    def close(self) -> None:
        """Refuse further requests and delete the disk tier's files."""
        self.core.closed = True
        with self.core.lock:  # no other thread may be writing a file
            self.core.cache_manager.offload_manager.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _enable_compile(hf_model: HFModel, config: EngineConfig) -> None:
    hf_model.ensure_single_process("compile=True")
    if hf_model.attention_patch is not None:
        raise ConfigError(f"compile=True: {hf_model.model_info.name} is of a family that is not compiled; leave it out")
    if hf_model.model_info.device.type == "cpu":
        raise ConfigError("compile=True: steps on a CPU need no compilation: leave it out")
    if config.backend not in ("auto", "triton"):
        raise ConfigError(f"compile=True, backend={config.backend!r}: use backend='triton' or 'auto'")
    from ..models.compilation.cuda_graph import CudaGraphForward  # uses Triton and private torch APIs

    hf_model.compiled = CudaGraphForward(hf_model, config.compile_sizes or (2, 4, 8, 16, 32, 64, 128, 256))


def _create_cache_manager(
    hf_model: HFModel, config: EngineConfig, events: EventBus, sleep: Callable[[float], object]
) -> KVCacheManager:
    """Create the KV cache of an engine: pool, tiers and transfer executor.

    Raises:
        ConfigError: if the ranks of one model have different options, or the cache does not suit the model or memory.
    """
    model_info, cache, tp_group = hf_model.model_info, config.cache, hf_model.tp_group
    if tp_group is not None:
        # representations are compared: that of a function has an address
        shared_config = replace(config, cache=replace(cache, disk_dir=None, eviction="lru"))
        shared_options = shared_config, policy_name(cache.eviction)
        model_options = model_info.layers, model_info.max_positions, model_info.dtype
        tp_group.ensure_equal("options", (*shared_options, *model_options))
    row_width, dtype = model_info.head_dim, model_info.dtype
    if cache.kv_cache_dtype == "int8":
        if row_width % SCALE_BYTES:
            raise ConfigError(
                f"kv_cache_dtype='int8': the head size {row_width} is no multiple of {SCALE_BYTES}; use 'auto'"
            )
        row_width, dtype = row_width + SCALE_BYTES, torch.int8
    bytes_per_token = 2 * model_info.layers * model_info.kv_heads * row_width * dtype.itemsize
    memory = [total_memory(device) for device in (model_info.device, torch.device("cpu"))]
    check_capacity(cache, bytes_per_token, *memory)
    capacity = None if cache.capacity is None else parse_capacity(cache.capacity, bytes_per_token)
    if capacity is None or capacity * bytes_per_token >= GC_THRESHOLD_BYTES:
        gc.collect()  # unreferenced engines contain reference cycles; free their memory now
    if capacity is None:
        capacity = hf_model.default_cache_tokens(bytes_per_token)
    with allocating("capacity", cache.capacity, capacity * bytes_per_token):
        pool = KVPool(
            pages=capacity // cache.page_size,
            page_size=cache.page_size,
            layers=[(model_info.kv_heads, row_width)] * model_info.layers,
            dtype=dtype,
            device=model_info.device,
            poison_freed_pages=cache.poison_freed_pages,
        )
    shared: dict[str, Any] = (
        {} if tp_group is None else {"executor": SyncExecutor(model_info.device), "clock": tp_group.shared_clock}
    )
    return KVCacheManager(
        pool, eviction=cache.eviction, events=events, tiers=make_tiers(pool, cache), sleep=sleep, **shared
    )
