"""Transfer of encoded messages between replicas.

A request names replicas that hold its messages (`RouteRequest.sources`). What is missing here is fetched from
them if that is expected to be faster than computing it. Any failure ends in computing.
"""

import asyncio
import itertools
import logging
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from ..engine.kv_export import KVSnapshot, copy_kv
from ..engine.request import RequestState
from ..kv_cache.tiers import as_bytes, checksum
from ..server.chat_prompt import Segment
from ..server.message_store import IMPORTED, WorkflowKey
from ..server.service import GenerationSpec, InferenceService
from .content_keys import segment_key
from .routing import RouteRequest, TransferMode

MIN_TOKENS = 64  # of messages that are fetched at once in mode "auto"; fewer are computed sooner than asked for

TIMEOUT = 5.0  # seconds that a transfer may take at most

MAX_LOADS = 4  # concurrent loads of a prefetch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MessageQuery:
    """Messages that a replica asks of another one."""

    route: RouteRequest  # pinned to the replica that is asked
    key: WorkflowKey  # of which they are; the answer has no others
    contents: list[str | tuple[int, ...]]  # under which they are stored


@dataclass(frozen=True)
class SentMessage:
    """Keys and values of one message.

    Arrays, since Ray passes them on without a copy.
    """

    content_keys: list[object]  # under which it is stored
    tokens: list[int]
    base_position: int  # of token 0; keys are rotated to it
    model_hash: str
    content_hash: str
    dtype: str  # of torch
    shapes: list[tuple[int, ...]]  # of every array
    arrays: list[np.ndarray]  # bytes of keys and values in turn, of every layer
    checksum: int = 0  # of all of the above

    @classmethod
    def of(cls, content_keys: Sequence[object], tokens: list[int], snapshot: KVSnapshot) -> "SentMessage":
        tensors = [tensor.contiguous() for layer in snapshot.layers for tensor in layer]
        message = cls(
            list(content_keys),
            tokens,
            snapshot.base_position,
            snapshot.model_hash,
            snapshot.content_hash,
            str(tensors[0].dtype).removeprefix("torch."),
            [tuple(tensor.shape) for tensor in tensors],
            [as_bytes(tensor) for tensor in tensors],
        )
        object.__setattr__(message, "checksum", message.compute_checksum())
        return message

    def compute_checksum(self) -> int:
        header = [getattr(self, name) for name in self.__dataclass_fields__ if name not in ("arrays", "checksum")]
        return checksum(itertools.chain([repr(header).encode()], (np.ascontiguousarray(a).data for a in self.arrays)))

    def to_snapshot(self) -> KVSnapshot:
        """Return the keys and values.

        Raises:
            ValueError: if anything differs from what was sent.
        """
        if self.compute_checksum() != self.checksum:
            raise ValueError("the message is damaged, its checksum differs")
        with warnings.catch_warnings(action="ignore"):  # arrays in Ray's store cannot be written; they are only read
            tensors = [
                torch.from_numpy(array).view(getattr(torch, self.dtype)).reshape(shape)
                for array, shape in zip(self.arrays, self.shapes, strict=True)
            ]
        layers = list(zip(tensors[::2], tensors[1::2], strict=True))
        return KVSnapshot(self.base_position, layers, self.model_hash, self.content_hash)


# sends a query to a replica; raises anything where that fails
MessageTransport = Callable[[str, MessageQuery], Awaitable[Sequence[SentMessage]]]


async def export_messages(service: InferenceService, query: MessageQuery) -> list[SentMessage]:
    """Return what this replica has of a query."""
    core, store = service.engine.core, service.planner.store
    await asyncio.to_thread(core.model_set.weights_hash, query.key.model)  # slow the first time

    def copy() -> list[tuple[Sequence[object], list[int], KVSnapshot]]:
        result: list[tuple[Sequence[object], list[int], KVSnapshot]] = []
        for content in query.contents:
            stored = store.find(query.key, (content, 0))
            if stored is None or not stored.message.labels <= query.key.session_key.labels:
                continue
            request = stored.message._request
            if request.state is RequestState.TOKENS_FINAL:  # the KV of its last token waits for the next request's step
                stored.message.wait_encoded()
            if request.tokens_final and request.entry is not None and request.entry.has_data:
                result.append((stored.content_keys, stored.tokens, copy_kv(core, request)))
        return result

    copies = await service.thread.call(copy)
    return await asyncio.to_thread(lambda: [SentMessage.of(*item) for item in copies])


def load_stored(service: InferenceService, spec: GenerationSpec) -> None:
    """Start to load the stored messages of a request from lower tiers.

    Runs in the engine's thread.
    """
    core, store = service.engine.core, service.planner.store
    prefetcher, hashes = core.cache_manager.prefetcher, []
    for segment in dict.fromkeys(segment for prompt in spec.prompts for segment in prompt.segments):
        for content in _contents(segment):
            stored = store.find(spec.key, (content, 0))
            entry = None if stored is None else stored.message._request.entry
            if entry is not None and entry.content_hash is not None:
                hashes.append(entry.content_hash)
    with core.lock:
        prefetcher.update(("step", spec.key, spec.agent), hashes, MAX_LOADS)
        prefetcher.run()


class TransferCosts:
    """Measured seconds of computing and of receiving one token; moving means."""

    def __init__(self) -> None:
        self.computing: float | None = None  # from the submission to the first token, as load makes it
        self.receiving: float | None = None

    def observe_computing(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= MIN_TOKENS:
            self.computing = _mean(self.computing, seconds / num_tokens)

    def observe_receiving(self, num_tokens: int, seconds: float) -> None:
        self.receiving = _mean(self.receiving, seconds / num_tokens)

    def is_worth_fetching(self, num_tokens: int) -> bool:
        """Return whether tokens are expected sooner from another replica than computed."""
        if num_tokens < MIN_TOKENS:
            return False
        if self.receiving is None or self.computing is None or self.receiving < self.computing:
            return True
        self.receiving *= 0.9  # after a while it is measured again
        return False

    def timeout(self, num_tokens: int) -> float:
        """Return after how many seconds a transfer is given up."""
        return TIMEOUT if self.computing is None else min(TIMEOUT, max(0.2, 2 * self.computing * num_tokens))


def _mean(old: float | None, new: float) -> float:
    return new if old is None else 0.7 * old + 0.3 * new


class MessageFetcher:
    """Fetches missing messages of requests before they are submitted.

    Args:
        name: of this replica.
    """

    def __init__(
        self, service: InferenceService, transport: MessageTransport, name: str, mode: TransferMode = "auto"
    ) -> None:
        self._service, self._transport, self._name, self._mode = service, transport, name, mode
        self.costs = TransferCosts()
        self.num_failures = 0  # transfers that ended in computing
        # one request of a workflow at a time: the next one finds what the first has fetched
        self._locks: WeakValueDictionary[WorkflowKey, asyncio.Lock] = WeakValueDictionary()

    async def fetch_missing(self, spec: GenerationSpec, sources: Mapping[int, Sequence[str]]) -> None:
        """Store what this replica lacks of a request and others have."""
        if self._mode == "never" or spec.reuse != "messages" or not sources:
            return
        lock = self._locks.setdefault(spec.key, asyncio.Lock())
        async with lock:
            by_source: dict[str, list[Segment]] = {}
            for segment in await self._service.thread.call(lambda: self._missing(spec)):
                names = [name for name in sources.get(segment_key(spec, segment), ()) if name != self._name]
                if names:
                    by_source.setdefault(names[0], []).append(segment)
            await asyncio.gather(*(self._fetch(spec.key, *item) for item in by_source.items()))

    def _missing(self, spec: GenerationSpec) -> list[Segment]:
        store, segments = self._service.planner.store, dict.fromkeys(s for p in spec.prompts for s in p.segments)
        return [s for s in segments if not any(store.find(spec.key, (content, 0)) for content in _contents(s))]

    async def _fetch(self, key: WorkflowKey, source: str, segments: Sequence[Segment]) -> None:
        """Fetch messages from a replica.

        After any failure they are left to be computed.
        """
        num_tokens, costs = sum(len(segment.tokens) for segment in segments), self.costs
        if self._mode == "auto" and not costs.is_worth_fetching(num_tokens):
            return
        contents = [content for segment in segments for content in _contents(segment)]
        timeout, began = costs.timeout(num_tokens) if self._mode == "auto" else TIMEOUT, time.perf_counter()
        try:
            model_set = self._service.engine.core.model_set
            async with asyncio.timeout(timeout):
                await asyncio.to_thread(model_set.weights_hash, key.model)  # slow the first time
                sent = await self._transport(source, MessageQuery(RouteRequest(pinned=source), key, contents))
                snapshots = await asyncio.to_thread(lambda: [message.to_snapshot() for message in sent])
            num_imported = await self._service.thread.call(lambda: self._store(key, contents, sent, snapshots))
        except Exception as exc:  # the other replica, the network or what came: each of them ends in computing
            self.num_failures += 1
            logger.warning("messages of replica %s are computed here: %s", source, exc or type(exc).__name__)
            if isinstance(exc, TimeoutError):
                costs.observe_receiving(num_tokens, 2 * timeout)
            return
        if num_imported:
            costs.observe_receiving(num_imported, time.perf_counter() - began)

    def _store(
        self, key: WorkflowKey, contents: list[Any], sent: Sequence[SentMessage], snapshots: Sequence[KVSnapshot]
    ) -> int:
        """Store received messages; return the number of their tokens.

        Runs in the engine's thread.
        """
        store, num_tokens = self._service.planner.store, 0
        workflow = store.open(key)
        try:
            for message, snapshot in zip(sent, snapshots, strict=True):
                keys = [name for name in message.content_keys if store.find(key, name) is None]
                if not any((content, 0) in keys for content in contents):
                    continue  # another request has stored it, or it was not asked for
                imported = workflow.session._variants.import_encoded(message.tokens, snapshot)
                if imported is not None:
                    store.add(key, imported, IMPORTED, keys)
                    num_tokens += len(message.tokens)
        finally:
            store.close(key)
        return num_tokens


def _contents(segment: Segment) -> list[str | tuple[int, ...]]:
    """Return the contents under which a message may be stored."""
    return [segment.tokens] if segment.answer_key is None else [segment.answer_key, segment.tokens]
