"""One view of an engine's internals, for tests that `engine.stats()` and `engine.check()` do not serve.

Tests name no attribute of the core, of a request or of a session's private parts themselves: a change of the internal
structure changes this file only.
"""

from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from choreograph import Engine, Message
from choreograph.agents import Workflow
from choreograph.core.core import EngineCore
from choreograph.core.scheduler import Scheduler
from choreograph.execution.model_runner import ModelRunner
from choreograph.features.agent_tags import agent_key_of
from choreograph.features.guard import labels_of
from choreograph.features.other_models import OtherModels
from choreograph.features.repair.planner import ContextRepair
from choreograph.kv_cache.entry import KVEntry
from choreograph.kv_cache.manager import KVCacheManager
from choreograph.kv_cache.pool import KVPool
from choreograph.models.hf_model import HFModel
from choreograph.request.decode_state import DecodeState
from choreograph.request.request import Request


@singledispatch
def inspect(subject: Any) -> Any:
    """Return the view of an engine or a message."""
    raise TypeError(f"{subject!r} has no view: give an Engine or a Message")


@dataclass(frozen=True)
class EngineView:
    """Parts of an engine; attributes may be replaced with `monkeypatch.setattr(inspect(engine).runner, ...)`."""

    core: EngineCore  # for functions that take it, and to replace its methods

    @property
    def lock(self) -> Any:
        """Held during a step."""
        return self.core.lock

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def queues(self) -> Any:
        """Waiting and running requests; a test may put another waiting queue in it."""
        return self.core.queues

    @property
    def waiting(self) -> Any:
        """Queue of requests that are not admitted."""
        return self.core.scheduler.waiting

    @property
    def running(self) -> list[Request]:
        """Admitted requests."""
        return self.core.scheduler.running

    @property
    def num_unfinished(self) -> int:
        """Waiting and running requests."""
        return self.core.scheduler.num_unfinished

    @property
    def lifecycle(self) -> Any:
        """Owner of `release(request)`, and of how requests finish and fail."""
        return self.core

    @property
    def context_loader(self) -> Any:
        """Makes contexts resident before a request is admitted."""
        return self.core.context_loader

    @property
    def is_closed(self) -> bool:
        return self.core.closed

    @property
    def cache_manager(self) -> KVCacheManager:
        return self.core.cache_manager

    @property
    def entries(self) -> dict[int, KVEntry]:
        """Entries of the cache, by id."""
        return self.core.cache_manager.entries

    @property
    def pool(self) -> KVPool:
        return self.core.cache_manager.pool

    @property
    def pins(self) -> Any:
        return self.core.cache_manager.pins

    @property
    def prefetcher(self) -> Any:
        """Loads what agents need next."""
        return self.core.prefetcher

    @property
    def hints(self) -> Any:
        """Eviction hints of agents."""
        return self.core.cache_manager.hints

    @property
    def num_hint_sources(self) -> int:
        """Workflows that give eviction hints."""
        return len(self.core.cache_manager.hints._hints)

    @property
    def prefix_tree(self) -> Any:
        """Prefix tree of all namespaces."""
        return self.core.cache_manager.prefix_tree

    @property
    def offload_manager(self) -> Any:
        """Tiers, and the executor of transfers to and from them."""
        return self.core.cache_manager.offload_manager

    @property
    def runner(self) -> ModelRunner:
        return self.core.model_runner

    @property
    def overlap_scheduler(self) -> Any:
        """Launches a step before the tokens of the one before are known."""
        return self.core.model_runner._overlap_scheduler

    @property
    def backend(self) -> Any:
        """Attention backend."""
        return self.core.backend

    @property
    def backend_fallback_reason(self) -> Any:
        """Why `backend="auto"` did not choose the compiled kernels; None if it did."""
        return self.core.backend_fallback_reason

    @property
    def speculator(self) -> Any:
        """Drafts tokens of decodes; None without `draft_tokens`."""
        return self.core.speculator

    @property
    def hf_model(self) -> HFModel:
        """Base model, as the runner calls it."""
        return self.core.hf_model

    @property
    def model(self) -> Any:
        """Base model of transformers."""
        return self.core.hf_model.model

    @property
    def compiled(self) -> Any:
        """Compiled forward pass, or None."""
        return self.core.hf_model.compiled

    @property
    def model_set(self) -> Any:
        """All served models."""
        return self.core.model_set

    @property
    def layer_reuse_pairs(self) -> tuple[tuple[str, str], ...]:
        """(receiver, sender) of `Engine.enable_layer_reuse`."""
        return self.core.features.get(OtherModels).pairs

    @property
    def repair_planner(self) -> Any:
        return self.core.features.get(ContextRepair)

    def new_request_id(self) -> int:
        """Return the id that the next request would have had."""
        return self.core.new_id()

    def step(self, *, wait: bool = False) -> bool:
        """Compute one step; with `wait`, block while only a transfer can free capacity."""
        return self.core.step(wait=wait)

    def poll_transfers(self) -> None:
        """Process completed transfers."""
        self.core.poll_transfers()


@dataclass(frozen=True)
class MessageView:
    """The request of a message, and facts of it."""

    request: Request

    @property
    def entry(self) -> KVEntry:
        return self.request.entry

    @property
    def decode_state(self) -> DecodeState | None:
        return self.request.decode_state

    @property
    def generated(self) -> list[int]:
        """Tokens generated so far, without waiting for others."""
        assert self.request.decode_state is not None
        return self.request.decode_state.tokens

    @property
    def tokens(self) -> list[int]:
        """Tokens so far, without waiting for others."""
        return self.request.tokens

    @property
    def state(self) -> Any:
        return self.request.state

    @property
    def namespace(self) -> Any:
        """Identity of the cache that it reads and writes."""
        return self.request.namespace

    @property
    def mode(self) -> str:
        return self.request.mode

    @property
    def parents(self) -> tuple[Request, ...]:
        """Requests that it attends to, after features replaced them."""
        return self.request.parents

    @property
    def source_entry(self) -> KVEntry:
        """Entry that a partial prefill starts from."""
        assert self.request.reencoding is not None
        return self.request.reencoding.source.entry

    @property
    def text_labels(self) -> frozenset[str]:
        return labels_of(self.request).text

    @property
    def agent_key(self) -> Any:
        """Agent that the entry belongs to, for eviction hints."""
        return agent_key_of(self.request)

    @property
    def is_finished(self) -> bool:
        return self.request.is_finished

    @property
    def is_released(self) -> bool:
        return self.request.released

    @property
    def submit_time(self) -> float:
        return self.request.times.submitted

    @property
    def ready_time(self) -> float:
        return self.request.times.ready

    @property
    def first_token_time(self) -> float | None:
        return self.request.times.first_token

    @property
    def finish_time(self) -> float | None:
        return self.request.times.finished


@inspect.register
def _(subject: Engine) -> EngineView:
    return EngineView(subject.core)


@inspect.register
def _(subject: Message) -> MessageView:
    return MessageView(subject._request)


def fixed_prefix_hashes(workflow: Workflow, agent: str) -> list[bytes]:
    """Return the hashes of an agent's fixed messages, or of its prompt's start."""
    return list(workflow._fixed[agent].resolve()) if agent in workflow._fixed else []
