"""KV entries from another process through `torch.distributed` (DroidSpeak §4.5).

    sender's process                            receiver's process
    store = ContextStore(engine)                link = RemoteSender(engine, peer=0, name="writer")
    store.store_hidden(session.prefill(text))   engine.enable_layer_reuse("base", "writer", pattern=[0, 4, 12])
    serve(engine, store, peer=1)                link.partial_prefill(session, text, [0, 4, 12])

The receiver names a context by its hash and requests the layers that a pattern reuses. They arrive
layer by layer, overlapping with compute. If the sender is gone, stalls, does not have the context or
answers with other shapes, the receiver computes the context itself and emits `recomputed`.
"""

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.cross_model import LayerPattern, parse_layer_pattern
from ..engine.engine import Engine
from ..engine.kv_export import cancel_reservation, reserve, resident, start_remote_load
from ..engine.message import Message, MessageSlice, unwrap_slice
from ..engine.session import PromptInput, Session
from ..engine.validation import Offsets, check_choreographed
from ..errors import CacheFullError, ConfigError, InvalidRequestError, ModelError, WrongSessionError
from ..kv_cache.tiers import TransferOps
from ..kv_cache.transfer import Transfer
from .context_store import ContextStore, context_hash

MAX_JSON_BYTES = 1 << 20  # of a request or a reply; tensors are sent separately

VERSION = 2  # of the protocol


class ChannelError(Exception):
    """The peer process is gone, timed out, or violated the protocol."""


class Channel:
    """Ordered channel for JSON objects and tensors between two processes.

    Args:
        peer: rank of the other process.
        group: process group that only this channel uses; None: the default group.
        timeout: seconds that one transfer may take; None: as long as the group allows.
    """

    def __init__(self, peer: int, group: Any = None, timeout: float | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("no process group: call torch.distributed.init_process_group(...) first")
        self._peer = peer
        self._group = group
        self._timeout = () if timeout is None else (timedelta(seconds=timeout),)

    def send(self, tensor: Tensor) -> None:
        """Send the bytes of a tensor."""
        self._transfer(dist.isend, tensor.contiguous().view(-1).view(torch.uint8))

    def receive(self, num_bytes: int) -> Tensor:
        """Receive `num_bytes` bytes as a uint8 tensor."""
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self._transfer(dist.irecv, buffer)
        return buffer

    def _transfer(self, operation: Any, buffer: Tensor) -> None:
        try:
            is_done = operation(buffer, self._peer, group=self._group).wait(*self._timeout)
        except RuntimeError as exc:  # gloo raises nothing narrower
            raise ChannelError(str(exc).splitlines()[0]) from exc
        if is_done is False:
            raise ChannelError("timed out")

    def send_json(self, message: Mapping[str, Any]) -> None:
        """Send an object: its byte count as int64, then UTF-8 JSON."""
        raw = json.dumps(message).encode()
        self.send(torch.tensor([len(raw)]))
        self.send(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    def receive_json(self) -> dict[str, Any]:
        """Receive a JSON object; raise ChannelError for anything else."""
        size = int(self.receive(8).view(torch.int64))
        if not 0 < size <= MAX_JSON_BYTES:
            raise ChannelError(f"the peer sent {size} bytes of JSON, the limit is {MAX_JSON_BYTES}")
        try:
            result = json.loads(self.receive(size).numpy().tobytes())
        except (ValueError, RecursionError) as exc:
            raise ChannelError(f"the peer sent no JSON: {exc}") from exc
        if not isinstance(result, dict):
            raise ChannelError(f"the peer sent a {type(result).__name__}, not a JSON object")
        return result


def serve(engine: Engine, store: ContextStore, peer: int, *, group: Any = None, model: str = "base") -> int:
    """Serve one receiver until it disconnects; return the number of contexts sent."""
    engine.core.hf_model.ensure_single_process("sending encodings")
    channel, num_sent = Channel(peer, group), 0
    try:
        while request := channel.receive_json():
            if request.get("ask") == "info":
                channel.send_json(compatibility_info(engine, model))
            else:
                num_sent += _send_context(channel, engine, store, model, request)
    except ChannelError:
        pass
    return num_sent


def _send_context(channel: Channel, engine: Engine, store: ContextStore, model: str, request: Mapping) -> bool:
    """Send the requested layers or an error; return whether layers were sent."""
    core, tensors = engine.core, dict[tuple[int, str], Tensor]()
    try:
        context = store.context(str(request["name"]), model)
        with core.lock, resident(core, context._request) as entry:
            kv_layers = {int(layer) for layer in request["keys"]} - entry.missing_layers
            hidden_layers = {int(layer) for layer in request["inputs"]} & entry.cached_hidden_layers
            start, slots = entry.base_position, torch.tensor(entry.slots)
            for layer in range(engine.model_info.layers):
                for kind, tensor in core.cache_manager.pool.tensors(layer).items():
                    if layer in (hidden_layers if kind == "inputs" else kv_layers):
                        tensors[layer, kind] = tensor[slots].cpu()
    except (InvalidRequestError, CacheFullError, KeyError, TypeError, ValueError, OverflowError) as exc:
        channel.send_json({"missing": str(exc)})
        return False
    shapes = [(layer, kind, list(tensor.shape)) for (layer, kind), tensor in tensors.items()]
    channel.send_json({"start": start, "dtype": str(engine.model_info.dtype), "tensors": shapes})
    for tensor in tensors.values():
        channel.send(tensor)
    return True


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
        "attention_specs": _digest([asdict(spec) for spec in model_info.attention_specs]),
        "tokenizer": None if vocabulary is None else _digest(vocabulary),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


class RemoteSender:
    """Receiver's link to a sender in another process, unusable after a failure.

    Args:
        peer: rank of the sender, which runs `serve`.
        name: name of the sender's model for `Engine.enable_layer_reuse` and in events.
        timeout: seconds that a reply, or a layer, may take.
        group: process group that only this link uses; None: the default group.

    Raises:
        ModelError: if there is no answer, or if the models are not of one family.
    """

    def __init__(
        self, engine: Engine, peer: int, *, name: str = "sender", timeout: float = 5.0, group: Any = None
    ) -> None:
        engine.core.hf_model.ensure_single_process("a sender elsewhere")
        self._engine = engine
        self.name = name
        self.failure_reason: str | None = None  # why the link is not used any more
        self._channel = Channel(peer, group, timeout)
        self._lock = threading.Lock()  # held while a request is sent and answered
        self._transfer: Transfer | None = None  # of the last context
        self._incoming: Iterator[dict[str, Tensor]] = iter(())  # receives the last context layer by layer
        model_set = engine.core.model_set
        if name not in model_set.remote:
            model_set.check_unused_name(name)
        try:
            info = self._send_request({"ask": "info"})
        except ChannelError as exc:
            raise ModelError(f"sender {name!r} does not answer: {exc}") from None
        own = compatibility_info(engine, "base")
        differences = [
            f"{key}: {own[key]} and {info.get(key)}"
            for key in own
            if key != "fingerprint" and own[key] != info.get(key)
        ]
        if differences or not isinstance(info.get("fingerprint"), str):
            self.close()
            raise ModelError(f"sender {name!r} is not of {engine.model_info.name}'s family: {'; '.join(differences)}")
        model_set.remote[name] = f"{info['fingerprint']}@elsewhere"

    def close(self) -> None:
        """Stop the sender's `serve` after receiving all requested tensors."""
        with self._lock:
            try:
                self._drain()
                self._channel.send_json({})
            except ChannelError as exc:
                self.failure_reason = self.failure_reason or str(exc)
            self.failure_reason = self.failure_reason or "closed"

    def __enter__(self) -> "RemoteSender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def partial_prefill(
        self,
        session: Session,
        tokens: PromptInput,
        pattern: LayerPattern | Sequence[int],
        parents: Iterable[Message | MessageSlice] = (),
        offsets: Offsets = None,
        new_offset: int | None = None,
    ) -> Message:
        """Prefill only the pattern's layers, reusing the sender's KV in the others.

        Computes all layers like `Session.prefill` if the sender's context cannot be loaded. Waits for the
        parents, then for one reply of the sender; its layers arrive while the engine computes.
        """
        check_choreographed(session.mode)
        if session._core is not self._engine.core:
            raise WrongSessionError("session of another engine: use a session of the engine that the link was made for")
        pattern = parse_layer_pattern(pattern).check(self._engine.model_info.layers)
        message = session._build_prefill(tokens, parents, offsets, new_offset)
        reused = frozenset(range(self._engine.model_info.layers)) - pattern.layers
        if reused:
            pool = self._engine.core.cache_manager.pool
            if not (pattern.layers <= pool.partial_layers and pattern.entry_layers <= pool.hidden.keys()):
                raise ConfigError(
                    f"pattern {pattern}: call engine.enable_layer_reuse('base', {self.name!r}, pattern=...) first"
                )
            for parent in message.parents:
                unwrap_slice(parent).wait_encoded()
            with self._lock:
                context = self._fetch(session, message, reused, pattern.entry_layers)
            if context is not None:
                return session._variants.attach_remote(context, message, pattern)
        return session._submit([message])[0]

    def _fetch(
        self, session: Session, message: Message, kv_layers: frozenset[int], hidden_layers: frozenset[int]
    ) -> Message | None:
        """Start loading the sender's context; return None if it cannot be loaded."""
        core, context = self._engine.core, session._variants.remote_placeholder(message, self.name)
        entry = reserve(
            core,
            context._request,
            lambda cached: not cached.missing_layers & kv_layers and hidden_layers <= cached.cached_hidden_layers,
        )
        if entry is None and context._request.is_finished:  # an equal entry is in the cache
            return context
        try:
            if entry is None:
                raise ChannelError("the cache has no capacity for it at the moment")
            request = {"name": context_hash(context), "keys": sorted(kv_layers), "inputs": sorted(hidden_layers)}
            reply = self._send_request({"ask": "context", **request})
            self._validate_reply(reply, context.length, kv_layers, hidden_layers)
        except BaseException as exc:
            if entry is not None:
                cancel_reservation(core, context._request, entry)
            if not isinstance(exc, ChannelError):
                raise
            core.events.emit("recomputed", request=message.id, why=f"sender {self.name!r}: {exc}")
            return None
        pool, slots = core.cache_manager.pool, torch.tensor(entry.slots)
        self._incoming = self._receive_layers(reply["tensors"])

        def copy_layer(layer: int) -> None:
            for kind, tensor in next(self._incoming).items():
                pool.tensors(layer)[kind][slots] = tensor.to(pool.keys[0].device)

        start_remote_load(
            core,
            context._request,
            entry,
            reply["start"],
            TransferOps(copy_layer),
            cached_hidden_layers=frozenset(layer for layer, kind, _ in reply["tensors"] if kind == "inputs"),
            missing_layers=frozenset(range(self._engine.model_info.layers)) - kv_layers,
        )
        self._transfer = context._request.entry.transfer
        return context

    def _send_request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._drain()
            self._channel.send_json(request)
            answer = self._channel.receive_json()
        except BaseException as exc:  # also an interrupt: the reply would be taken for the next one
            self.failure_reason = self.failure_reason or str(exc) or repr(exc)
            raise
        if "missing" in answer:
            raise ChannelError(str(answer["missing"])[:200])
        return answer

    def _receive_layers(self, tensors: list[tuple[int, str, list[int]]]) -> Iterator[dict[str, Tensor]]:
        """Receive the reply's tensors by kind, one dict (possibly empty) per layer."""
        dtype = self._engine.model_info.dtype
        try:
            for layer in range(self._engine.model_info.layers):
                shapes = {kind: torch.Size(shape) for number, kind, shape in tensors if number == layer}
                yield {
                    kind: self._channel.receive(shape.numel() * dtype.itemsize).view(dtype).view(shape)
                    for kind, shape in shapes.items()
                }
        except ChannelError as exc:
            self.failure_reason = str(exc)
            raise

    def _drain(self) -> None:
        """Receive the last context's remaining tensors, even if its entry was released."""
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
        if self.failure_reason is not None:
            raise ChannelError(f"the link failed before ({self.failure_reason})")
        for _ in self._incoming:
            pass

    def _validate_reply(
        self, reply: Mapping[str, Any], num_tokens: int, kv_layers: frozenset[int], hidden_layers: frozenset[int]
    ) -> None:
        """Check that the sender announces the requested tensors in order.

        Raises ChannelError for other tensors, another dtype or an invalid start. Inputs may be missing.
        """
        model_info, pool = self._engine.model_info, self._engine.core.cache_manager.pool
        tensors, start = reply.get("tensors"), reply.get("start")
        expected = [
            [layer, kind, [num_tokens, *tensor.shape[1:]]]
            for layer in range(model_info.layers)
            for kind, tensor in pool.tensors(layer).items()
            if layer in (hidden_layers if kind == "inputs" else kv_layers)
        ]
        if not (
            isinstance(tensors, list)
            and tensors == [tensor for tensor in expected if tensor[1] != "inputs" or tensor in tensors]
            and reply.get("dtype") == str(model_info.dtype)
            and isinstance(start, int)
            and 0 <= start < model_info.max_positions
        ):
            self.failure_reason = "it sends other shapes than were requested"
            raise ChannelError(self.failure_reason)
