"""`Engine`, the public way in: models of one family, their cache, sessions over both. Owns nothing that they do not."""

import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from .chat import ChatFormat
from .config import EngineConfig, check_sizes
from .engine.runner import Runner
from .engine.sharing import Choose
from .errors import ConfigError, ModelError
from .events import EventLog
from .models.adapter import Adapter
from .models.facts import ModelFacts, total_memory
from .models.load import EMBEDDED, check_dtype, load
from .models.lora import Lora
from .pattern import Pattern, read_pattern
from .session import Session
from .types import BASE, MODES, Mode, whole_number

Source = str | os.PathLike[str]
Adapters = Mapping[str, Source]
Models = Mapping[str, Source | PreTrainedModel]


class Engine:
    """A model, others of its family beside it, one cache, any number of sessions."""

    def __init__(
        self,
        adapter: Adapter,
        config: EngineConfig | None = None,
        *,
        adapters: Adapters | None = None,
        models: Models | None = None,
    ) -> None:
        config, facts = config or EngineConfig(), adapter.facts
        memory = [total_memory(device) for device in (facts.device, torch.device("cpu"))]
        check_sizes(config.cache, facts.kv_bytes_per_token, *memory)
        self.runner = Runner(adapter, config)
        for name, source in (adapters or {}).items():
            self.add_adapter(name, source)
        for name, model in (models or {}).items():
            self.add_model(name, model)
        self.tokenizer = adapter.tokenizer
        self.chat = ChatFormat(adapter.tokenizer) if adapter.tokenizer is not None else None

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] | PreTrainedModel = EMBEDDED,
        *,
        config: EngineConfig | None = None,
        tokenizer: Any = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        device_map: Any = None,
        tp_plan: Any = None,
        adapters: Adapters | None = None,
        models: Models | None = None,
    ) -> "Engine":
        """Loads a model: a name, a Hub id, a folder, a .gguf file, or a transformers model in memory.

        dtype defaults to bfloat16, or to float32 on processors that are slow in bfloat16 (a model in memory keeps its
        own), device to the CPU; or device_map, as transformers takes it; or tp_plan ("auto"), as transformers takes it,
        to share the model with the other processes that torchrun started. adapters: LoRA adapters by name, each a
        folder that `peft` saved or a Hub id. models: other models of its family by name, each as `model`.
        Raises ModelError for a model that cannot be found, read or served.
        """
        config = EngineConfig() if config is None else config
        if not isinstance(config, EngineConfig):
            raise ConfigError(f"config={config!r}: use EngineConfig(...)")
        if not isinstance(model, (str, os.PathLike, PreTrainedModel)):
            raise ModelError(f"model={model!r}: use a name, a path or a transformers model")
        adapter = load(
            model,
            tokenizer=tokenizer,
            dtype=check_dtype(dtype),
            device=device,
            device_map=device_map,
            tp_plan=tp_plan,
            positions=config.max_positions,
        )
        if config.quantization:
            adapter.quantize(config.quantization)
        if config.compile:
            _compile(adapter, config)
        return cls(adapter, config, adapters=adapters, models=models)

    @property
    def facts(self) -> ModelFacts:
        """What was measured of the base model: shapes, positions, the attention of its layers."""
        return self.runner.adapter.facts

    @property
    def models(self) -> tuple[str, ...]:
        """What sessions and calls may name as their model: "base", the adapters, and other models of the family."""
        return self.runner.family.names

    def add_adapter(self, name: str, source: Source) -> Lora:
        """Serves a LoRA adapter beside the base model. What it encodes is never found by another model."""
        self.runner.adapter.refuse_ranks("a LoRA adapter")
        loras = self.runner.adapter.loras
        assert loras is not None
        with self.runner.lock, self.runner.adapter.hooked():  # nobody begins a step meanwhile
            self.runner.family.check_new(name)
            return loras.add(name, source)

    def add_model(self, name: str, source: Source | PreTrainedModel) -> ModelFacts:
        """Serves another model of the base's family, with weights of its own, in the same cache.

        Raises ModelError for one whose encodings could not stand for the base's: other layers, heads, positions, or
        another tokenizer. It is loaded in the base's type and on its device.
        """
        runner, config = self.runner, self.runner.config
        runner.adapter.refuse_ranks("a second model")
        own = runner.adapter.facts
        runner.family.check_new(name)
        given = isinstance(source, PreTrainedModel)  # in memory: it has no tokenizer of its own, the base's is its
        other = load(source, dtype=None if given else own.dtype, device=own.device, positions=config.max_positions)
        if config.quantization:
            other.quantize(config.quantization)
        if config.compile:
            _compile(other, config)
        with runner.lock:
            runner.family.add(name, other)
        return other.facts

    def remove_adapter(self, name: str) -> None:
        """Serves an adapter no longer, and clears the cache. Raises ConfigError while one of its messages is held."""
        loras = self.runner.adapter.loras
        assert loras is not None
        self._remove(name, loras.remove)

    def remove_model(self, name: str) -> None:
        """Serves a model beside the base no longer, and clears the cache, as `remove_adapter`."""
        self._remove(name, self.runner.family.remove)

    def _remove(self, name: str, remove: Callable[[str], None]) -> None:
        with self.runner.lock:
            if any(call.model == name for call in self.runner.scheduler.waiting) or self.runner.store.holds(name):
                raise ConfigError(f"model {name!r} is in use: release its messages first")
            remove(name)
            self.runner.sharing.forget(name)
            self.clear_cache()  # what it made could be found under another name, and not be built again

    def share(
        self,
        receiver: str,
        sender: str = BASE,
        *,
        pattern: Pattern | Sequence[int] | None = None,
        choose: Choose | None = None,
        patterns: Iterable[Pattern | Sequence[int]] = (),
        tokens: int | None = None,
    ) -> None:
        """Calls of `receiver` with share="partial" compute messages of `sender` again in the pattern's layers alone.

        pattern: a `Pattern`, or its three integers (recompute up to the first, reuse, recompute from the second to the
        third, reuse). Or `choose`, which gets the engine's `Load` and picks one of `patterns` for each message. tokens:
        room for what receivers compute, in those layers alone. What was encoded before this call keeps no inputs to
        begin from: it is computed whole.
        """
        self.runner.adapter.refuse_ranks("sharing encodings between models")
        if (pattern is None) == (choose is None):
            raise ConfigError("give a pattern, or a function that chooses one of several patterns")
        known = [read_pattern(one) for one in ((pattern,) if pattern is not None else tuple(patterns))]
        if not known:
            raise ConfigError("patterns is empty: name all that `choose` may answer")
        runner = self.runner
        with runner.lock, runner.adapter.hooked():  # nobody begins a step meanwhile
            while runner.store.traffic.wait():
                runner.settle()
            runner.sharing.add(receiver, sender, known, choose or (lambda load: known[0]), tokens)

    @property
    def events(self) -> EventLog:
        """What happened in the cache and to the calls: `counts` of every kind, the `recent` ones, `listen`."""
        return self.runner.events

    def session(
        self,
        *,
        mode: Mode = "choreographed",
        seed: int | None = None,
        client_id: str = "default",
        model: str = BASE,
    ) -> Session:
        """A workflow's scope: its messages are released at the end. Clients never see each other's cache.

        model: what computes calls that name none, one of `models`.
        """
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r}: use one of {MODES}")
        number = whole_number(seed)
        if number is None and seed is not None:
            raise ConfigError(f"seed={seed!r}: use a whole number or None")
        if not isinstance(client_id, str):
            raise ConfigError(f"client_id={client_id!r}: use a string")
        ranks = self.runner.adapter.ranks
        if ranks is not None and number is None:
            number = ranks.say("seed", random.getrandbits(63))
        session = Session(self.runner, self.chat, mode=mode, seed=number, client_id=client_id, model=model)
        session.engine = self
        return session

    def step(self) -> bool:
        """Computes one step; False if nothing can run."""
        return self.runner.step()

    def drain(self) -> None:
        """Runs until everything that was submitted is complete."""
        self.runner.drain()

    def clear_cache(self) -> None:
        """Forgets every encoding that no message holds."""
        with self.runner.lock:
            while self.runner.store.traffic.wait():
                self.runner.settle()
            self.runner.store.clear_idle()

    def check(self) -> None:
        """Raises AssertionError where an invariant of the cache or the queues is broken."""
        self.runner.check()

    def warm_up(self) -> None:
        """Compiles every bucket of rows that fits now, so that no later step waits for it; without `compile` does
        nothing. A GPU's graphs of more than usual work are recorded when they are first needed."""
        compiled, arena = self.runner.adapter.compiled, self.runner.store.arena
        if compiled is None:
            return
        most = min(self.facts.max_positions, arena.pages * arena.page_size)
        with self.session() as session:
            for rows in (size for size in compiled.buckets if size <= most):  # a prompt of n tokens: a step of n rows
                session.prefill([0] * rows).result()

    def close(self) -> None:
        """Refuses further calls. Memory goes with the object, files of the disk tier now."""
        self.runner.closed = True
        with self.runner.lock:  # or a file that another thread sends away meanwhile would stay
            self.runner.store.traffic.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _compile(adapter: Adapter, config: EngineConfig) -> None:
    adapter.refuse_ranks("compile=True")
    if adapter.bridge is not None:
        raise ConfigError(f"compile=True: {adapter.facts.name} is of a family that is not compiled; leave it out")
    # both touch private names of torch: only where asked for
    if adapter.facts.device.type == "cuda":
        if config.backend not in ("auto", "triton"):
            raise ConfigError(
                f"compile=True, backend={config.backend!r}: what is recorded on a GPU is 'triton'; use that"
            )
        from .models.graphed import GraphedForward

        adapter.compiled = GraphedForward(adapter, config.compile_rows or (2, 4, 8, 16, 32, 64, 128, 256))
    else:
        from .models.compiled import CompiledForward

        adapter.compiled = CompiledForward(adapter, config.compile_rows or (1, 2, 4, 8, 16))
