"""Transfer of encoded messages between replicas.

A request names replicas that hold its messages (`RouteRequest.sources`). What is missing here is fetched from
them if that is expected to be faster than computing it. Layers arrive in groups: a request is submitted when the
first one is here, and its steps wait for each layer. Any failure ends in computing.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request

from ..errors import LostContextError
from ..kv_cache.container import Header
from ..messages.kv_export import KVSnapshot, copy_kv, seal_block, try_copy_kv
from ..request.request import RequestState
from ..server.engine_thread import ChoiceUpdate
from ..server.openai.chat_prompt import Segment
from ..server.reuse.message_store import StoredMessage, WorkflowKey
from ..server.running_request import GenerationSpec, RunningRequest
from ..server.service import InferenceService
from .cluster_config import TransferMode
from .content_keys import segment_key
from .routing import RouteRequest
from .sent_messages import TIMEOUT, ArrivingMessage, SentGroup, describe

MIN_TOKENS = 64  # of messages that are fetched at once in mode "auto"; fewer are computed sooner than asked for

MAX_LOADS = 4  # concurrent loads of a prefetch

GROUP_BYTES = 1 << 20  # of layers that are sent at once; at least one layer

MAX_RESTARTS = 3  # of a request whose messages do not arrive

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MessageQuery:
    """Messages that a replica asks of another one."""

    route: RouteRequest  # pinned to the replica that is asked
    key: WorkflowKey  # of which they are; the answer has no others
    contents: list[str | tuple[int, ...]]  # under which they are stored
    group_bytes: int = GROUP_BYTES


# sends a query to a replica and yields what comes; raises anything where that fails
MessageTransport = Callable[[str, MessageQuery], AsyncGenerator[SentGroup]]


async def export_messages(service: InferenceService, query: MessageQuery) -> AsyncGenerator[SentGroup]:
    """Yield what this replica has of a query, in groups of layers.

    Does not wait for the running step, unless a message is not complete in CPU memory.
    """
    core, store = service.engine.core, service.planner.store

    def find(content: str | tuple[int, ...]) -> StoredMessage | None:
        stored = store.find(query.key, (content, 0), allow_partial=False)
        if stored is None:
            return None
        return stored if stored.message.labels <= query.key.session_key.labels else None

    def try_copy() -> list[tuple[StoredMessage, KVSnapshot | None]]:
        core.model_set.weights_hash(query.key.model)  # slow the first time
        found = dict.fromkeys(stored for stored in map(find, query.contents) if stored is not None)
        return [(stored, try_copy_kv(core, stored.message._request)) for stored in found]

    def copy(stored: StoredMessage) -> KVSnapshot | None:
        request = stored.message._request
        if request.released:
            return None
        if request.state is RequestState.TOKENS_FINAL:  # the KV of its last token waits for the next request's step
            stored.message.wait_encoded()
        has_data = request.tokens_final and request.entry is not None and request.entry.has_data
        return copy_kv(core, request, with_inputs=True) if has_data else None

    copies = await asyncio.to_thread(try_copy)
    if any(snapshot is None for _, snapshot in copies):
        tried = copies
        copies = await service.thread.call(lambda: [(stored, snapshot or copy(stored)) for stored, snapshot in tried])
    copied = {stored: snapshot for stored, snapshot in copies if snapshot is not None}
    snapshots = [*copied.values()]

    def build_header() -> Header:
        dtype = snapshots[0].layers[0][0].dtype if snapshots else None
        return Header([describe(stored, snapshot) for stored, snapshot in copied.items()], dtype)

    def group(indices: range) -> SentGroup:
        return SentGroup(b"" if indices.start else header.raw, [seal_block(header, i, snapshots) for i in indices])

    header = await asyncio.to_thread(build_header)
    num_layers = len(snapshots[0].layers) if snapshots else 1
    num_bytes = sum(tensor.nbytes for snapshot in snapshots for layer in snapshot.layers for tensor in layer)
    size = max(1, query.group_bytes * num_layers // max(1, num_bytes)) * len(snapshots)  # blocks
    num_inputs = sum(len(snapshot.inputs) for snapshot in snapshots)
    start, end = 0, min(num_inputs + size, len(header.blocks))  # hidden states come in the first group
    while True:
        yield await asyncio.to_thread(group, range(start, end))
        if end == len(header.blocks):
            return
        start, end = end, min(end + size, len(header.blocks))


def _verify(group: SentGroup, header: Header | None, origin: str) -> Header:
    """Verify a group of blocks; return their header, which the first group has."""
    if header is None:
        header = Header.parse(group.header, origin, "its messages are computed here")
    for block in group.blocks:
        header.verify(block)
    return header


def load_stored(service: InferenceService, spec: GenerationSpec) -> None:
    """Start to load the stored messages of a request from lower tiers.

    Runs in the engine's thread.
    """
    core, store = service.engine.core, service.planner.store
    prefetcher, hashes = core.prefetcher, []
    senders = store.sender_keys(spec.key, spec.repair, service.max_kl_of(spec))
    for segment in dict.fromkeys(segment for prompt in spec.prompts for segment in prompt.segments):
        if (stored := store.find_usable(spec.key, senders, _contents(segment))) is not None:
            hashes += [entry.content_hash for entry in stored.entries if entry.content_hash is not None]
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
    """Fetches missing messages of requests.

    Args:
        name: of this replica.
        group_bytes: of layers that are sent at once.
    """

    def __init__(
        self,
        service: InferenceService,
        transport: MessageTransport,
        name: str,
        mode: TransferMode = "auto",
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        self._service, self._transport, self._name, self._mode = service, transport, name, mode
        self._group_bytes = group_bytes
        self._tasks: set[asyncio.Task[None]] = set()  # transfers that run
        self.costs = TransferCosts()
        self.num_failures = 0  # transfers that ended in computing
        # messages on their way; set when their first layers are here, or after a failure
        self._started: dict[tuple[WorkflowKey, int], asyncio.Event] = {}

    async def fetch_missing(self, spec: GenerationSpec, sources: Mapping[int, Sequence[str]]) -> None:
        """Store what this replica lacks of a request and others have.

        Returns when its first layers are here.
        """
        if self._mode == "never" or spec.reuse != "messages" or not sources:
            return
        events: dict[asyncio.Event, None] = {}
        by_source: dict[tuple[str, WorkflowKey], list[Segment]] = {}
        for segment in dict.fromkeys(segment for prompt in spec.prompts for segment in prompt.segments):
            place = self._place_of(spec, segment, sources)
            if isinstance(place, asyncio.Event):
                events[place] = None
            elif place is not None:
                by_source.setdefault(place, []).append(segment)
        for (source, key), segments in by_source.items():
            keys = [(key, segment_key(spec, segment, key.model)) for segment in segments]
            events[started := asyncio.Event()] = None
            self._started |= dict.fromkeys(keys, started)
            task = asyncio.create_task(self._fetch(key, source, segments, started))
            self._tasks.add(task)
            task.add_done_callback(partial(self._end, keys))
        for started in events:
            await started.wait()

    def _end(self, keys: Iterable[tuple[WorkflowKey, int]], task: asyncio.Task[None]) -> None:
        """Forget a transfer and the messages that it has brought."""
        self._tasks.discard(task)
        for key in keys:
            self._started.pop(key, None)

    def _place_of(
        self, spec: GenerationSpec, segment: Segment, sources: Mapping[int, Sequence[str]]
    ) -> asyncio.Event | tuple[str, WorkflowKey] | None:
        """Return the replica and key to fetch a message by.

        The event of its arrival if it is on its way; None if it is here, or nowhere. Messages of models whose layers
        the request's model reuses are preferred: what it has computed from them itself is in some layers only, and is
        not sent.
        """
        store = self._service.planner.store
        senders = store.sender_keys(spec.key, spec.repair, self._service.max_kl_of(spec))
        if store.find_usable(spec.key, senders, _contents(segment)) is not None:
            return None
        for key in (*senders, spec.key):
            content_key = segment_key(spec, segment, key.model)
            if on_its_way := self._started.get((key, content_key)):  # another request fetches it
                return on_its_way
            if names := [name for name in sources.get(content_key, ()) if name != self._name]:
                return names[0], key
        return None

    async def _fetch(self, key: WorkflowKey, source: str, segments: Sequence[Segment], started: asyncio.Event) -> None:
        """Fetch messages from a replica.

        After any failure they are left to be computed.

        Args:
            started: set when the messages are stored and their first layers are here, or after a failure.
        """
        num_tokens, costs = sum(len(segment.tokens) for segment in segments), self.costs
        if self._mode == "auto" and not costs.is_worth_fetching(num_tokens):
            started.set()
            return
        contents = [content for segment in segments for content in _contents(segment)]
        now = asyncio.get_running_loop().time
        timeout, began = costs.timeout(num_tokens) if self._mode == "auto" else TIMEOUT, now()
        query = MessageQuery(RouteRequest(pinned=source), key, contents, self._group_bytes)
        arriving: list[ArrivingMessage] = []
        header: Header | None = None
        try:
            async with asyncio.timeout(timeout) as deadline, aclosing(self._transport(source, query)) as groups:
                await asyncio.to_thread(self._service.engine.core.model_set.weights_hash, key.model)  # slow at first
                num_imported = 0
                async for group in groups:
                    is_first = header is None
                    header = await asyncio.to_thread(_verify, group, header, f"what replica {source} sent")
                    if is_first:
                        arriving = [ArrivingMessage(number, header) for number in range(len(header.entries))]
                    layers = []
                    for block in group.blocks:
                        info = header.blocks[block.number]
                        if "inputs" in info.kinds:
                            arriving[info.entry].inputs[info.layer] = block.tensors[0]
                        else:
                            layers.append((info, block))
                    if is_first:
                        # waits for the running step, as a request that computes the messages would
                        store, before = partial(self._store, key, contents, arriving), now()
                        deadline.reschedule(None)
                        num_imported = await self._service.thread.call(store, gather=True)
                        began += now() - before
                        deadline.reschedule(began + timeout)
                    for info, block in layers:
                        layer = arriving[info.entry].layers[info.layer]
                        if not layer.done():  # it may arrive twice, and is the same by its checksum
                            layer.set_result(block)
                    started.set()
                    if not num_imported:
                        return
                num_arrived = sum(message.num_arrived for message in arriving)
                if header is None or num_arrived < (num_layers := sum(len(message.layers) for message in arriving)):
                    what = "nothing" if header is None else f"{num_arrived} of {num_layers} layers"
                    raise ConnectionError(f"{what} arrived: the messages are computed here")
        except Exception as exc:  # the other replica, the network or what came: each of them ends in computing
            self.num_failures += 1
            logger.warning("messages of replica %s are computed here: %s", source, str(exc) or type(exc).__name__)
            if isinstance(exc, TimeoutError):
                costs.observe_receiving(num_tokens, timeout)  # at least
        else:
            costs.observe_receiving(num_imported, now() - began)
        finally:
            for message in arriving:
                message.end()
            started.set()

    def _store(self, key: WorkflowKey, contents: list[Any], arriving: Sequence[ArrivingMessage]) -> int:
        """Store messages that are arriving; return the number of their tokens.

        Runs in the engine's thread.
        """
        store, num_tokens = self._service.planner.store, 0
        workflow = store.open(key)
        try:
            for item in arriving:
                tokens = item.info.tokens
                if tokens is None:
                    raise item.header.error("has a message without tokens")
                keys = [name for name in item.content_keys if store.find(key, name, allow_partial=False) is None]
                if not any((content, 0) in keys for content in contents):
                    continue  # another request has stored it, or it was not asked for
                imported = workflow.session.import_encoded(tokens, item.snapshot, item.load)
                if imported is not None:
                    store.add(key, imported, None, keys)
                    num_tokens += len(tokens)
        finally:
            store.close(key)
        return num_tokens


async def run_request(
    service: InferenceService, request: Request, spec: GenerationSpec
) -> AsyncGenerator[tuple[RunningRequest, list[ChoiceUpdate]]]:
    """Submit a request and yield its updates.

    It is submitted again where messages that it found do not arrive: they are computed then, in its context. No token
    was sent before, since the first one needs all layers, unless there are several prompts.
    """
    for num_left in reversed(range(MAX_RESTARTS + 1)):
        running, has_started = service.submit(request, spec), False
        try:
            async with aclosing(running.updates()) as updates:
                async for choices in updates:
                    has_started = True
                    yield running, choices
            return
        except LostContextError:
            if has_started or not num_left:
                raise


def _contents(segment: Segment) -> list[str | tuple[int, ...]]:
    """Return the contents under which a message may be stored."""
    return [segment.tokens] if segment.answer_key is None else [segment.answer_key, segment.tokens]
