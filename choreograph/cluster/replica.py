"""One replica: an actor that owns an engine."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

from ray import serve

from ..agents import StepGraph
from ..api.engine import Engine
from ..models.info import ModelInfo
from ..outputs import BASE_MODEL, EngineStats
from ..server.api_errors import ApiError, to_api_error
from ..server.app import create_app
from ..server.engine_thread import ChoiceUpdate, load_engine
from ..server.reuse.answer_plan import SourceCounts
from ..server.running_request import GenerationSpec
from ..server.server_config import ServerConfig
from ..server.service import InferenceService
from .cluster_config import TransferMode
from .message_transfer import MessageFetcher, MessageQuery, export_messages, load_stored, run_request
from .routing import RouteRequest
from .sent_messages import SentGroup


@dataclass(frozen=True)
class ReplicaInfo:
    """What the gateway needs of an engine to prepare requests for it."""

    model_info: ModelInfo
    tokenizer: Any
    models: tuple[str, ...]  # the base model, adapters and siblings
    page_size: int  # tokens
    stats: EngineStats
    version: str  # of the models
    layer_reuse: tuple[tuple[str, str], ...]  # (receiver, sender): models that reuse layers of others


@dataclass(frozen=True)
class ReplicaLoad:
    """State of one replica."""

    name: str
    process_id: int
    stats: EngineStats


@dataclass
class ReplicaCall:
    """One request, and what was declared about its workflow."""

    route: RouteRequest
    spec: GenerationSpec
    graph: StepGraph | None = None  # declared one of the workflow
    schema: str | None = None  # PML of the prompt's schema
    version: str | None = None  # of the models that the prompt was made for; None: any


@dataclass(frozen=True)
class ReplicaUpdate:
    """What one step added to the answers of a request."""

    choices: list[ChoiceUpdate]
    counts: SourceCounts  # final in the last update


@dataclass(frozen=True)
class ReplicaError:
    """Error of a request, as data.

    Not every exception can be sent to another process.
    """

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def is_retryable(self) -> bool:
        """True if this replica ends, or has too many requests."""
        return self.status in (429, 503)

    def to_exception(self) -> ApiError:
        error = ApiError(self.status, "", headers=self.headers)
        error.body = self.body
        return error


class _Connection:
    """HTTP request that never ends; the gateway watches the real one."""

    state = SimpleNamespace()
    headers: Mapping[str, str] = MappingProxyType({})

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}


class EngineReplica:
    """Deployment that holds an engine.

    Args:
        open_engine: loads the engine; called in the replica's process.
        threads: of one operation; None: as the machine has cores.
        transfer: when messages are fetched from other replicas instead of computed.
        version: of the models; requests for another one are refused.
    """

    async def __init__(  # type: ignore[misc]
        self,
        open_engine: Callable[[], Engine],
        config: ServerConfig,
        threads: int | None,
        transfer: TransferMode = "auto",
        version: str = "",
    ) -> None:
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        engine = await asyncio.to_thread(load_engine, open_engine)
        self._service: InferenceService = create_app(engine, config).state.service
        self._service.start()
        context = serve.get_replica_context()
        self._name: str = context.replica_id.unique_id
        self._version = version
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        others: Any = handle.options(method_name="export", stream=True)

        async def ask(source: str, query: MessageQuery) -> AsyncGenerator[SentGroup]:
            response = others.remote(query)
            try:
                async for group in response:
                    yield group
            finally:  # also where the reader has ended, or waits no longer
                response.cancel()

        if transfer != "never":  # before it is needed: it reads all weights
            model_set = engine.core.model_set
            self._hashing = asyncio.create_task(asyncio.to_thread(model_set.weights_hash, BASE_MODEL))
        self._fetcher = MessageFetcher(self._service, ask, self._name, transfer)

    async def describe(self) -> ReplicaInfo:
        """Return what replicas have in common, and this one's state."""
        engine = self._service.engine
        page_size, stats = engine.core.config.cache.page_size, (await self.load()).stats
        pairs = engine.other_models.pairs
        return ReplicaInfo(engine.model_info, engine.tokenizer, engine.models, page_size, stats, self._version, pairs)

    async def load(self) -> ReplicaLoad:
        """Return who this replica is and what it does."""
        stats = await self._service.stats()
        return ReplicaLoad(self._name, os.getpid(), stats)

    async def export(self, query: MessageQuery) -> AsyncGenerator[SentGroup]:
        """Yield messages for another replica."""
        async for group in export_messages(self._service, query):
            yield group

    async def generate(self, call: ReplicaCall) -> AsyncIterator[str | ReplicaUpdate | ReplicaError]:
        """Run a request: yield this replica's name, then updates or an error."""
        yield self._name
        try:
            if call.version not in (None, self._version):
                raise ApiError(503, "the model is being updated: retry later", type="service_unavailable")
            if declarations := await asyncio.to_thread(self._undeclared, call):
                await self._service.thread.call(lambda: [declare() for declare in declarations], gather=True)
            await self._fetcher.fetch_missing(call.spec, call.route.sources)
            request: Any = _Connection()
            # a caller that ends early cancels the request
            async with aclosing(run_request(self._service, request, call.spec)) as updates:
                async for running, choices in updates:
                    yield ReplicaUpdate(choices, running.counts)
            ttft = [choice.timing.ttft for choice in choices if choice.timing is not None]
            if ttft and ttft[0] is not None and not running.counts.cached:
                self._fetcher.costs.observe_computing(running.counts.computed, ttft[0])
        except Exception as exc:
            error = to_api_error(exc)
            yield ReplicaError(error.status, error.body, error.headers)

    async def prefetch(self, call: ReplicaCall) -> None:
        """Load what an expected request needs, from replicas and tiers."""
        key, steps, store = call.spec.key, call.spec.steps, self._service.planner.store
        if call.spec.reuse == "exact":  # its fixed part is known here, if its agent ran here
            if steps is not None:
                await self._service.thread.call(lambda: store.agent_sessions.set_steps(key, steps))
            return
        await self._fetcher.fetch_missing(call.spec, call.route.sources)
        await self._service.thread.call(lambda: load_stored(self._service, call.spec))

    def _undeclared(self, call: ReplicaCall) -> list[Callable[[], object]]:
        """Return what declares the graph and schema that this replica lacks.

        It runs in the engine's thread.
        """
        key, store, schemas = call.spec.key, self._service.planner.store, self._service.schemas
        result: list[Callable[[], object]] = []
        known = store.graphs.get((key.tenant, key.workflow))
        if (known and vars(known)) != (call.graph and vars(call.graph)):
            result.append(partial(store.set_graph, key.tenant, key.workflow, call.graph))
        if call.spec.schema_prompt is not None and call.schema is not None:
            tenant, name, _ = call.spec.schema_prompt
            if schemas.sources.get((tenant, name)) != call.schema:
                layout = schemas.prepare(name, call.schema)
                result.append(partial(schemas.put, tenant, name, call.schema, layout))
        return result

    # -- for Ray ------------------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raise if the engine's thread has ended: Ray replaces the replica."""
        if not self._service.thread.is_running:
            raise RuntimeError("the engine has stopped")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the share of the cache that messages and requests reference."""
        stats = (await self.load()).stats
        return {"cache_pressure": stats.num_referenced_pages / max(1, stats.num_pages)}

    async def __del__(self) -> None:
        if hasattr(self, "_service") and self._service.thread.is_running:
            await self._service.stop()
            self._service.engine.close()
