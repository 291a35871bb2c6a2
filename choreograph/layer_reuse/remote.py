"""KV entries from another process (DroidSpeak §4.5), by default through `torch.distributed`.

    sender's process                            receiver's process
    store = ContextStore(engine)                link = RemoteSender(engine, peer=0, name="writer")
    store.store_hidden(session.prefill(text))   engine.enable_layer_reuse("base", "writer", pattern=[0, 4, 12])
    serve(engine, store, peer=1)                link.partial_prefill(session, text, [0, 4, 12])

The receiver names a context by its hash and requests the layers that a pattern reuses. The hidden states
that the pattern starts from arrive first, so that the receiver computes while the keys and values arrive,
in the order of the layers. If the sender is gone, stalls, does not have the context or answers with other
shapes, the receiver computes the context itself and emits `recomputed`.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..api.call import Call, Offsets, PromptInput
from ..api.engine import Engine
from ..api.message import Message
from ..api.session import Session
from ..attention.int8_rows import encode, to_float
from ..attention.metadata import AttentionSpec
from ..attention.rope import rotate
from ..errors import CacheFullError, ConfigError, InvalidRequestError, ModelError, WrongSessionError
from ..features.layer_variants import submit_remote
from ..features.other_models import TransferLoad
from ..kv_cache.container import Block, EntryInfo, Header
from ..kv_cache.entry import EntryLayers, KVEntry
from ..kv_cache.tiers import TransferOps, tensor_shapes
from ..kv_cache.transfer import Transfer, make_executor
from ..layer_pattern import LayerPattern, parse_layer_pattern
from ..messages.handle import MessageSlice
from ..messages.kv_export import cancel_reservation, reserve, resident, start_remote_load
from ..models.model_set import REMOTE_SUFFIX
from ..outputs import BASE_MODEL
from .context_store import ContextStore, context_hash
from .transport import (
    ChannelError,
    RefusedError,
    Transport,
    as_transport,
    receive_block,
    receive_header,
    send_details,
    send_header,
)

VERSION = 4  # of the protocol


def serve(
    engine: Engine, store: ContextStore, peer: int | Transport, *, group: Any = None, model: str = BASE_MODEL
) -> int:
    """Serve one receiver until it disconnects; return the number of contexts sent.

    Blocks: several receivers need a thread each.

    Args:
        peer: rank of the receiver, or a transport to it.
        model: model of the engine whose contexts are sent.
    """
    engine.core.hf_model.ensure_single_process("sending encodings")
    transport, num_sent = as_transport(peer, group), 0
    try:
        while (request := receive_header(transport)).entries or request.details:
            if request.entries:
                num_sent += _send_context(transport, engine, store, model, request.entries[0])
            else:
                send_details(transport, **compatibility_info(engine, model))()
    except ChannelError:
        pass
    return num_sent


def _send_context(transport: Transport, engine: Engine, store: ContextStore, model: str, wanted: EntryInfo) -> bool:
    """Send the requested layers or an error; return whether layers were sent."""
    core, pool, owner = engine.core, engine.core.cache_manager.pool, ("send", object())
    try:
        context = store.context(wanted.content_hash, model)
        with core.lock, resident(core, context._request) as entry:
            for layer, kind in wanted.shapes:
                if layer not in entry.layers.hidden if kind == "inputs" else layer in entry.layers.missing:
                    raise InvalidRequestError(f"{kind} of layer {layer} are not cached")
            shapes = tensor_shapes(pool, len(entry.tokens))
            info = EntryInfo(
                shapes={key: shapes[key] for key in wanted.shapes},
                base_position=entry.base_position,
                model_hash=core.model_set.fingerprint(model),
                content_hash=wanted.content_hash,
            )
            core.cache_manager.acquire(entry, owner)
    except (InvalidRequestError, CacheFullError, KeyError) as exc:
        send_details(transport, missing=str(exc))()
        return False
    try:
        header, slots = Header([info], pool.keys[0].dtype), torch.tensor(entry.slots)
        send_header(transport, header)()
        for number, block in enumerate(header.blocks):  # copied one by one: the first one leaves at once
            frame = header.seal_frame(number, partial(_gather, pool.tensors(block.layer), slots))
            transport.send(torch.from_numpy(frame))()
    finally:
        with core.lock:
            core.cache_manager.release(entry, owner)
    return True


def _gather(tensors: Mapping[str, Tensor], slots: Tensor, kind: str, target: Tensor) -> None:
    """Copy slots of a tensor to host memory."""
    if tensors[kind].device.type == "cpu":
        torch.index_select(tensors[kind], 0, slots, out=target)
    else:
        target.copy_(tensors[kind][slots])


def compatibility_info(engine: Engine, model: str) -> dict[str, Any]:
    """Return the properties that both processes must share, and the weights' fingerprint."""
    model_info, config = engine.model_info, engine.core.hf_model.model.config.get_text_config()
    vocabulary = None if engine.tokenizer is None else sorted(engine.tokenizer.get_vocab().items(), key=lambda x: x[1])
    names = ("layers", "query_heads", "kv_heads", "head_dim", "vocab_size", "dtype")
    return {
        "version": VERSION,
        "fingerprint": engine.core.model_set.fingerprint(model),  # hashing all weights would exceed the timeout
        "architecture": config.model_type,
        "hidden_size": config.hidden_size,
        **{name: str(getattr(model_info, name)) for name in names},
        "kv_cache_dtype": str(engine.core.cache_manager.pool.keys[0].dtype),
        "attention_specs": _digest([asdict(spec) for spec in model_info.attention_specs]),
        "tokenizer": None if vocabulary is None else _digest(vocabulary),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


class RemoteSender:
    """Receiver's link to a sender in another process, unusable after a failure.

    Contexts are requested when their prefills are admitted and arrive in that order; requests do not wait
    for earlier contexts. Every link has a thread of its own.

    Args:
        peer: rank of the sender, which runs `serve`, or a transport to it.
        name: name of the sender's model for `Engine.enable_layer_reuse` and in events.
        timeout: seconds that a reply, or a tensor, may take; a given transport has its own.
        group: process group that only this link uses; None: the default group.

    Raises:
        ModelError: if there is no answer, or if the models are not of one family.
    """

    def __init__(
        self,
        engine: Engine,
        peer: int | Transport,
        *,
        name: str = "sender",
        timeout: float = 5.0,
        group: Any = None,
    ) -> None:
        engine.core.hf_model.ensure_single_process("a sender elsewhere")
        self._engine = engine
        self.name = name
        self.failure_reason: str | None = None  # why the link is not used any more
        self.bytes_received = 0  # of tensors
        self.seconds_receiving = 0.0  # spent on them, replies included
        self._queued_bytes = 0  # of tensors that were requested and have not arrived
        self._transport = as_transport(peer, group, timeout)
        self._executor = make_executor(engine.model_info.device)
        self._last_transfer: Transfer | None = None
        self._incoming: Iterator[tuple[Header, Block]] = iter(())  # blocks of the last reply
        model_set = engine.core.model_set
        if name not in model_set.remote:
            model_set.check_unused_name(name)
        try:
            with self._record_failure():
                send_details(self._transport, ask="info")()
                info = receive_header(self._transport).details
        except ChannelError as exc:
            raise ModelError(f"sender {name!r} does not answer: {exc}") from None
        own = compatibility_info(engine, BASE_MODEL)
        differences = [
            f"{key}: {own[key]} and {info.get(key)}"
            for key in own
            if key != "fingerprint" and own[key] != info.get(key)
        ]
        if differences or not isinstance(info.get("fingerprint"), str):
            self.close()
            raise ModelError(f"sender {name!r} is not of {engine.model_info.name}'s family: {'; '.join(differences)}")
        model_set.remote[name] = info["fingerprint"] + REMOTE_SUFFIX

    def close(self) -> None:
        """Stop the sender's `serve` after receiving all requested tensors."""
        if self._last_transfer is not None:
            self._last_transfer.wait()
        self._executor.close()
        if self.failure_reason is None:
            try:
                self._drain()
                send_details(self._transport)()
            except ChannelError as exc:
                self.failure_reason = str(exc)
        self.failure_reason = self.failure_reason or "closed"

    def __enter__(self) -> "RemoteSender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def partial_prefill(
        self,
        session: Session,
        tokens: PromptInput,
        pattern: LayerPattern | Sequence[int] | None = None,
        parents: Iterable[Message | MessageSlice] = (),
        offsets: Offsets = None,
        new_offset: int | None = None,
        *,
        model: str | None = None,
    ) -> Message:
        """Prefill only the pattern's layers, reusing the sender's KV in the others.

        Computes all layers like `Session.prefill` if the sender's context cannot be loaded. Returns at once.

        Args:
            pattern: a `LayerPattern` or its three integers; None for that of `Engine.enable_layer_reuse`,
                whose selector chooses when the prefill is admitted.
            model: the receiver, one of the engine's models; None for the session's.
        """
        if session.mode != "choreographed":
            raise InvalidRequestError(f"mode={session.mode!r} has no partial prefill: use mode='choreographed'")
        core, num_layers = self._engine.core, self._engine.model_info.layers
        if session.core is not core:
            raise WrongSessionError("session of another engine: use a session of the engine that the link was made for")
        draft = session.build(Call("prefill", tokens, parents, offsets, new_offset, {"model": model}))
        receiver, pairs = draft.request.model, self._engine.other_models
        pairs.check_pair(receiver, self.name)
        if pattern is None:
            pattern = pairs.fixed_pattern(receiver, self.name, draft.request)
        if pattern is not None:
            pattern, pool = parse_layer_pattern(pattern).check(num_layers), core.cache_manager.pool
            is_partial = len(pattern.layers) < num_layers
            if is_partial and not (
                pattern.layers <= pool.partial_layers and pattern.entry_layers <= pool.hidden.keys()
            ):
                raise ConfigError(
                    f"pattern {pattern}: call engine.enable_layer_reuse({receiver!r}, {self.name!r}, pattern=...) first"
                )
        message = submit_remote(session, draft, self.name, lambda c: _LinkedContext(self, c), pattern)
        assert isinstance(message, Message)
        return message

    # -- the channel ----------------------------------------------------------------------------------------

    def _start_request(
        self, name: str, entry: KVEntry, kv_layers: frozenset[int], hidden_layers: frozenset[int]
    ) -> TransferOps:
        """Request a context; return the operations that receive it into its entry."""
        if self.failure_reason is not None:
            raise ChannelError(f"the link failed before ({self.failure_reason})")
        pool, specs = self._engine.core.cache_manager.pool, self._engine.model_info.attention_specs
        shapes = {
            (layer, kind): shape
            for (layer, kind), shape in tensor_shapes(pool, len(entry.tokens)).items()
            if layer in (hidden_layers if kind == "inputs" else kv_layers)
        }
        fingerprint = self._engine.core.model_set.remote[self.name].removesuffix(REMOTE_SUFFIX)
        wanted = EntryInfo(shapes=shapes, model_hash=fingerprint, content_hash=name)
        header, slots, shift = Header([wanted], pool.keys[0].dtype), torch.tensor(entry.slots), 0
        num_bytes = sum(block.tensor_bytes for block in header.blocks)
        with self._record_failure():
            wait_sent = send_header(self._transport, header)
        self._queued_bytes += num_bytes

        def copy_block() -> None:
            header, block = next(self._incoming)
            info = header.blocks[block.number]
            for kind, rows in zip(info.kinds, block.tensors, strict=True):
                tensor = header.as_tensor(info, kind, rows)
                if shift and kind == "keys":
                    tensor = _rotate(tensor, shift, specs[info.layer])
                pool.tensors(info.layer)[kind][slots] = tensor.to(pool.keys[0].device)

        def prepare() -> None:
            nonlocal shift
            self._drain()
            with self._record_failure():
                wait_sent()
                start = self._receive_reply(wanted, num_bytes)
                shift = entry.base_position - start
                if shift and not self._engine.model_info.supports_shift:
                    raise ChannelError(f"its keys are at position {start}, not {entry.base_position}")
            for _ in hidden_layers:
                copy_block()

        def copy_layer(layer: int) -> None:
            if layer in kv_layers:
                copy_block()

        return TransferOps(copy_layer, prepare, inputs_first=True)

    def _receive_reply(self, wanted: EntryInfo, num_bytes: int) -> int:
        """Receive the header of a reply that has the requested tensors.

        Returns the position of the sender's keys.
        """
        began = time.perf_counter()
        header = receive_header(self._transport)
        self.seconds_receiving += time.perf_counter() - began
        if "missing" in header.details:
            self._queued_bytes -= num_bytes
            raise RefusedError(str(header.details["missing"])[:200])
        model_info, entries = self._engine.model_info, header.entries
        start = entries[0].base_position if entries else 0
        if (
            entries != (wanted.model_copy(update={"base_position": start}),)
            or (header.blocks and header.dtype != self._engine.core.cache_manager.pool.keys[0].dtype)
            or start >= model_info.max_positions
        ):
            raise ChannelError("it sends another model's context, or other shapes than were requested")
        self._incoming = self._receive_blocks(header)
        return start

    def _receive_blocks(self, header: Header) -> Iterator[tuple[Header, Block]]:
        for index, info in enumerate(header.blocks):
            began = time.perf_counter()
            with self._record_failure():
                block = receive_block(self._transport, header, index)
            self.seconds_receiving += time.perf_counter() - began
            self.bytes_received += info.tensor_bytes
            self._queued_bytes -= info.tensor_bytes
            yield header, block

    def _drain(self) -> None:
        """Receive what is left of the last reply: its entry was released."""
        if self.failure_reason is not None:
            raise ChannelError(f"the link failed before ({self.failure_reason})")
        for _ in self._incoming:
            pass

    @contextmanager
    def _record_failure(self) -> Iterator[None]:
        """Stop using the link after any error but a refusal.

        What follows on the channel would be misread.
        """
        try:
            yield
        except RefusedError:
            raise
        except BaseException as exc:  # also an interrupt
            self.failure_reason = self.failure_reason or str(exc) or repr(exc)
            raise


def _rotate(keys: Tensor, shift: int, spec: AttentionSpec) -> Tensor:
    """Move keys, (T, G, D), by `shift` positions."""
    if spec.rope is None:
        return keys
    cos, sin = (torch.from_numpy(values) for values in spec.rope.cos_sin([shift]))
    rotated = rotate(to_float(keys), cos, sin, spec.rope.interleaved)
    return encode(rotated) if keys.dtype == torch.int8 else rotated.to(keys.dtype)


@dataclass(frozen=True)
class _LinkedContext:
    """`RemoteContext` of one message behind a link."""

    link: RemoteSender
    message: Message  # the sender's

    @property
    def load(self) -> TransferLoad:
        link, num_tokens = self.link, self.message.length
        pool, config = link._engine.core.cache_manager.pool, link._engine.core.hf_model.model.config
        kv_bytes = sum(t[0].nbytes for t in (*pool.keys, *pool.values)) // len(pool.keys)
        return TransferLoad(
            queued_bytes=link._queued_bytes,
            bytes_per_second=link.bytes_received / link.seconds_receiving if link.bytes_received else float("inf"),
            kv_bytes=kv_bytes * num_tokens,
            hidden_bytes=config.get_text_config().hidden_size * link._engine.model_info.dtype.itemsize * num_tokens,
            layers=len(pool.keys),
        )

    def fetch(self, pattern: LayerPattern) -> str:
        link, core, request = self.link, self.link._engine.core, self.message._request
        kv_layers = frozenset(range(link._engine.model_info.layers)) - pattern.layers
        hidden_layers = pattern.entry_layers
        entry = reserve(
            core,
            request,
            lambda cached: not cached.layers.missing & kv_layers and hidden_layers <= cached.layers.hidden,
        )
        if entry is None:
            return "" if request.entry is not None else f"sender {link.name!r}: the cache has no capacity for its KV"
        try:
            ops = link._start_request(context_hash(self.message), entry, kv_layers, hidden_layers)
        except BaseException as exc:
            cancel_reservation(core, request, entry)
            if not isinstance(exc, ChannelError):
                raise
            return f"sender {link.name!r}: {exc}"
        layers = EntryLayers(hidden=hidden_layers, missing=pattern.layers)
        start_remote_load(core, request, entry, ops, link._executor, layers)
        link._last_transfer = entry.transfer
        return ""
