"""`Engine`, the public way in: one model, its cache, and sessions over both. Owns nothing that they do not."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from .chat import ChatFormat
from .config import EngineConfig
from .engine.runner import Runner
from .errors import ConfigError, ModelError
from .events import EventLog
from .models.adapter import Adapter, ModelFacts, check_dtype
from .models.load import EMBEDDED, load
from .models.lora import Lora
from .session import Session
from .types import BASE, MODES, Mode

Adapters = Mapping[str, str | os.PathLike[str]]


class Engine:
    """One model, one cache, any number of sessions."""

    def __init__(
        self, adapter: Adapter, config: EngineConfig | None = None, *, adapters: Adapters | None = None
    ) -> None:
        self.runner = Runner(adapter, config or EngineConfig())
        for name, source in (adapters or {}).items():
            self.add_adapter(name, source)
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
        adapters: Adapters | None = None,
    ) -> "Engine":
        """Loads a model: a name, a Hub id, a folder, a .gguf file, or a transformers model in memory.

        dtype defaults to bfloat16 (a model in memory keeps its own), device to the first GPU or the CPU. adapters:
        LoRA adapters by name, each a folder that `peft` saved or a Hub id.
        Raises ModelError for a model that cannot be found, read or served.
        """
        config = EngineConfig() if config is None else config
        if not isinstance(config, EngineConfig):
            raise ConfigError(f"config={config!r}: use EngineConfig(...)")
        if not isinstance(model, (str, os.PathLike, PreTrainedModel)):
            raise ModelError(f"model={model!r}: use a name, a path or a transformers model")
        adapter = load(model, tokenizer=tokenizer, dtype=check_dtype(dtype), device=device)
        if config.quantization:
            adapter.quantize(config.quantization)
        if config.compile:
            from .models.compiled import CompiledForward  # touches private names of torch: only where asked for

            adapter.compiled = CompiledForward(adapter, config.compile_rows)
        return cls(adapter, config, adapters=adapters)

    @property
    def facts(self) -> ModelFacts:
        return self.runner.adapter.facts

    @property
    def models(self) -> tuple[str, ...]:
        """What sessions and calls may name as their model: "base" and the adapters."""
        return self.runner.adapter.models

    def add_adapter(self, name: str, source: str | os.PathLike[str]) -> Lora:
        """Serves a LoRA adapter beside the base model. What it encodes is never found by another model."""
        loras = self.runner.adapter.loras
        assert loras is not None
        with self.runner.lock, self.runner.adapter.hooked():  # nobody computes meanwhile
            return loras.add(name, source)

    def remove_adapter(self, name: str) -> None:
        """Serves an adapter no longer, and clears the cache. Raises ConfigError while one of its messages is held."""
        loras = self.runner.adapter.loras
        assert loras is not None
        with self.runner.lock:
            if any(call.model == name for call in self.runner.scheduler.waiting) or self.runner.store.holds(name):
                raise ConfigError(f"adapter {name!r} is in use: release its messages first")
            loras.remove(name)
            self.clear_cache()  # what it made could be found under another name, and not be built again

    @property
    def events(self) -> EventLog:
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

        model: what computes calls that name none, "base" or an adapter.
        """
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r}: use one of {MODES}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ConfigError(f"seed={seed!r}: use a whole number or None")
        if not isinstance(client_id, str):
            raise ConfigError(f"client_id={client_id!r}: use a string")
        session = Session(self.runner, self.chat, mode=mode, seed=seed, client_id=client_id, model=model)
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
        """Compiles every bucket of rows now, so that no later step waits for it; without `compile` does nothing."""
        if not self.runner.config.compile:
            return
        with self.session() as session:
            for rows in self.runner.config.compile_rows:  # a prompt of n tokens alone is a step of n rows
                session.prefill([0] * rows).result()

    def close(self) -> None:
        """Refuses further calls. Memory goes with the object, files of the disk tier now."""
        self.runner.closed = True
        self.runner.store.traffic.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
