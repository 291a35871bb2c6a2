"""Encodings from a model in another process (DroidSpeak, section 4.5), through `torch.distributed`.

    sender's process                          receiver's process
    store = ContextStore(engine)              link = Link(engine, peer=0, name="writer")
    store.store_e(session.prefill(text))      engine.enable_layer_reuse("base", "writer", pattern=[0, 4, 12])
    serve(engine, store, peer=1)              seen = link.partial_prefill(session, text, [0, 4, 12])

The receiver names a context by its content and asks for the layers that a pattern reuses; they arrive layer by layer
while other layers compute. What does not arrive (a sender that is gone, stalls, does not know the context or answers
with something else) is computed by the receiver itself, and an event says so.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from ..engine.placement import resolve_offsets
from ..engine.session import PromptInput, Session
from ..engine.validation import Offsets, check_choreographed
from ..errors import CacheFullError, ConfigError, InvalidRequestError, ModelError, WrongSessionError
from ..kv_cache.tiers import TransferOps
from ..kv_cache.transfer import Transfer
from .context_store import ContextStore, context_hash, context_hash_of

MAX_MESSAGE_BYTES = 1 << 20  # bytes of a request or an answer; tensors are not part of either

VERSION = 1


class ChannelError(Exception):
    """The other side did not do what was agreed."""


def message_tag(request_id: int, number: int) -> int:
    return request_id % (1 << 16) * (1 << 14) + number


class Channel:
    """JSON objects and tensors between two processes of a group. seconds: how long one of them may take to come.

    Everything carries the number of its request, so what nobody fetched of one is never taken for the next.
    """

    def __init__(self, peer: int, group: Any = None, timeout: float | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("no process group: call torch.distributed.init_process_group(...) first")
        self._peer = peer
        self._group = group
        self._timeout = None if timeout is None else timedelta(seconds=timeout)
        self._request_id = 0
        self._num_sent = self._num_received = 0  # of this request

    def next_request(self) -> None:
        """The next request."""
        self._request_id += 1
        self._num_sent = self._num_received = 0

    def send(self, tensor: Tensor) -> None:
        raw, tag = tensor.contiguous().view(-1).view(torch.uint8), message_tag(self._request_id, self._num_sent)
        self._num_sent += 1
        self._await(lambda: dist.isend(raw, self._peer, group=self._group, tag=tag))

    def receive(self, num_bytes: int) -> Tensor:
        """So many bytes."""
        buffer, tag = torch.zeros(num_bytes, dtype=torch.uint8), message_tag(self._request_id, self._num_received)
        self._num_received += 1
        self._await(lambda: dist.irecv(buffer, self._peer, group=self._group, tag=tag))
        return buffer

    def _await(self, start_transfer: Callable[[], Any]) -> None:
        """A peer that is gone is noticed when a transfer begins or when it is waited for, as it happens."""
        try:
            work = start_transfer()
            done = work.wait() if self._timeout is None else work.wait(self._timeout)
        except RuntimeError as exc:  # the library raises nothing narrower
            raise ChannelError(str(exc).splitlines()[0]) from exc
        if done is False:
            raise ChannelError("timed out")

    def send_json(self, message: Mapping[str, Any]) -> None:
        raw = json.dumps(message).encode()
        self.send(torch.tensor([len(raw)], dtype=torch.int64))
        self.send(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    def recv_json(self) -> dict[str, Any]:
        size = int(self.receive(8).view(torch.int64).item())
        if not 0 < size <= MAX_MESSAGE_BYTES:
            raise ChannelError(f"a message of {size} bytes")
        try:
            result = json.loads(self.receive(size).numpy().tobytes())
        except (ValueError, RecursionError) as exc:
            raise ChannelError(f"not JSON: {exc}") from exc
        if not isinstance(result, dict):
            raise ChannelError(f"{type(result).__name__}, not an object")
        return result


# -- the sender's side ----------------------------------------------------------------------------------------


def serve(engine: Engine, store: ContextStore, peer: int, *, group: Any = None, model: str = "base") -> int:
    """Answers one receiver until it says that it is done, or is gone; returns how many contexts were sent. Waits for a
    question as long as the process group does."""
    engine.core.hf_model.ensure_single_process("sending encodings")
    wire, sent = Channel(peer, group), 0
    while True:
        try:
            wire.next_request()
            request = wire.recv_json()
            if request.get("ask") == "facts":
                wire.send_json(compatibility_info(engine, model))
            elif request.get("ask") == "context":
                sent += _send_context(wire, engine, store, model, request)
            else:
                return sent
        except ChannelError:
            return sent


def _send_context(
    channel: Channel, engine: Engine, store: ContextStore, model: str, request: Mapping[str, Any]
) -> bool:
    try:
        keys, inputs = ({int(layer) for layer in request[name]} for name in ("keys", "inputs"))
        message = store.context(str(request["name"]), model)
        start, tensors = _read_layers(engine, message, keys, inputs)
    except (InvalidRequestError, CacheFullError, KeyError, TypeError, ValueError, OverflowError) as exc:
        channel.send_json({"missing": str(exc)})
        return False
    sizes = [[layer, kind, list(tensor.shape)] for layer, kind, tensor in tensors]
    channel.send_json(
        {"tokens": message.length, "start": start, "dtype": str(engine.model_info.dtype), "tensors": sizes}
    )
    for _, _, tensor in tensors:
        channel.send(tensor)
    return True


def _read_layers(
    engine: Engine, message: Message, kv_layers: set[int], hidden_layers: set[int]
) -> tuple[int, list[tuple[int, str, Tensor]]]:
    """Where a context's home is; keys and values of some layers, and inputs of some, as far as they were kept."""
    runner = engine.core
    with runner.lock, resident(runner, message._request) as entry:
        pool, slots = runner.cache_manager.pool, torch.tensor(entry.slots)
        return entry.base_position, [
            (layer, kind, tensor[slots].cpu())
            for layer in range(len(pool.keys))
            for kind, tensor in pool.tensors(layer).items()
            if layer
            in (hidden_layers & entry.cached_hidden_layers if kind == "inputs" else kv_layers - entry.missing_layers)
        ]


def compatibility_info(engine: Engine, model: str) -> dict[str, Any]:
    """What has to be equal on both sides, and the name of the weights."""
    model_info, config = engine.model_info, engine.core.hf_model.model.config.get_text_config()
    tokenizer = engine.tokenizer
    vocabulary = None if tokenizer is None else sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return {
        "version": VERSION,
        "fingerprint": engine.core.model_set.fingerprint(
            model
        ),  # a checksum of all weights takes longer than an answer may
        "architecture": config.model_type,
        "layers": model_info.layers,
        "key-value heads": model_info.kv_heads,
        "query heads": model_info.query_heads,
        "head size": model_info.head_dim,
        "hidden size": config.hidden_size,
        "vocabulary": model_info.vocab_size,
        "type": str(model_info.dtype),
        "attention of the layers": _digest([asdict(kind) for kind in model_info.attention_specs]),
        "tokenizer": None if vocabulary is None else _digest(vocabulary),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


# -- the receiver's side --------------------------------------------------------------------------------------


class RemoteSender:
    """A sender in another process. One that has failed once is not asked again: what it says could be anything.

    name: how `Engine.enable_layer_reuse` and events call its model. seconds: how long an answer, or a layer, may take.
    """

    def __init__(
        self, engine: Engine, peer: int, *, name: str = "sender", timeout: float = 5.0, group: Any = None
    ) -> None:
        """Raises ModelError where there is no answer, or where the models are not of one family."""
        engine.core.hf_model.ensure_single_process("a sender elsewhere")
        self._engine = engine
        self.name = name
        self.failure_reason: str | None = None
        self._channel = Channel(peer, group, timeout)
        self._lock = threading.Lock()
        self._in_flight: Transfer | None = None
        self._unread_sizes: list[int] = []  # bytes of every tensor that is still to come
        family = engine.core.model_set
        if name not in family.remote:
            family.check_unused_name(name)
        self._channel.next_request()
        try:
            self._channel.send_json({"ask": "facts"})
            theirs = self._channel.recv_json()
        except ChannelError as exc:
            raise ModelError(f"sender {name!r} does not answer: {exc}") from None
        mine = compatibility_info(engine, "base")
        result = [
            f"{k}: {mine[k]} and {theirs.get(k)}" for k in mine if k != "fingerprint" and mine[k] != theirs.get(k)
        ]
        if result or not isinstance(theirs.get("fingerprint"), str):
            self.close()  # or it waits for another question
            raise ModelError(f"sender {name!r} is not of {engine.model_info.name}'s family: {'; '.join(result)}")
        family.remote[name] = f"{theirs['fingerprint']}@elsewhere"

    def close(self) -> None:
        """Tells the sender that nothing more is wanted, when all that was asked for has come."""
        with self._lock:
            try:
                self._next_request()
                self._channel.send_json({"ask": "nothing"})
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
        """`Session.prefill` by the engine's own model, which computes the pattern's layers alone where the sender has
        encoded the same context. Costs one question to the sender; the layers come while others compute. Completes the
        parents first."""
        check_choreographed(session.mode)
        if session._core is not self._engine.core:
            raise WrongSessionError("a session of another engine: use one of the engine that the link was made for")
        pattern = parse_layer_pattern(pattern).check(self._engine.model_info.layers)
        pool, plain = (
            self._engine.core.cache_manager.pool,
            session._build_prefill(tokens, parents, offsets, new_offset),
        )
        everything = frozenset(range(self._engine.model_info.layers))
        if pattern.layers == everything:
            return session._submit([plain])[0]
        if not (pattern.layers <= pool.partial_layers and pattern.entry_layers <= pool.hidden.keys()):
            raise ConfigError(
                f"pattern {pattern}: call engine.enable_layer_reuse('base', {self.name!r}, pattern=...) first"
            )
        for parent in plain.parents:  # what comes is hung behind what is there
            unwrap_slice(parent).wait_encoded()
        with self._lock:
            context = self._fetch(session, plain, everything - pattern.layers, pattern.entry_layers)
        if context is None:
            return session._submit([plain])[0]
        return session._variants.attach_remote(context, plain, pattern)

    def _fetch(
        self, session: Session, message: Message, kv_layers: frozenset[int], hidden_layers: frozenset[int]
    ) -> Message | None:
        """The context as the sender encoded it, its layers on their way; None where there is nothing to wait for."""
        runner, context = self._engine.core, session._variants.remote_placeholder(message, self.name)
        entry = reserve(
            runner,
            context._request,
            lambda known: not known.missing_layers & kv_layers and hidden_layers <= known.cached_hidden_layers,
        )
        if entry is None:
            if not context._request.is_finished:
                self._emit_fallback(message, "there is no room for it now")
            return context if context._request.is_finished else None
        try:
            requested = {
                "ask": "context",
                "name": _pending_context_hash(message),
                "keys": sorted(kv_layers),
                "inputs": sorted(hidden_layers),
            }
            answer = self._send_request(requested)
            expected = self._validate_reply(answer, len(message._request.prompt), kv_layers, hidden_layers)
        except BaseException as exc:
            cancel_reservation(runner, context._request, entry)
            if not isinstance(exc, ChannelError):
                raise
            self._emit_fallback(message, str(exc))
            return None
        come = frozenset(layer for layer, kind in expected if kind == "inputs")
        absent = frozenset(range(self._engine.model_info.layers)) - kv_layers
        work = TransferOps(self._make_layer_loader(expected, torch.tensor(entry.slots)))
        start_remote_load(
            runner,
            context._request,
            entry,
            int(answer["start"]),
            work,
            cached_hidden_layers=come,
            missing_layers=absent,
        )
        self._in_flight = context._request.entry.transfer
        return context

    def _emit_fallback(self, message: Message, reason: str) -> None:
        self._engine.core.events.emit("recomputed", call=message.id, why=f"sender {self.name!r}: {reason}")

    def _send_request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._next_request()
            self._channel.send_json(request)
            answer = self._channel.recv_json()
        except ChannelError as exc:
            self.failure_reason = self.failure_reason or str(exc)
            raise
        if "missing" in answer:
            raise ChannelError(str(answer["missing"])[:200])
        return answer

    def _next_request(self) -> None:
        """When all of the last one has come: there is one wire. What nobody waits for now is read and forgotten."""
        if self._in_flight is not None:
            self._in_flight.wait()
            self._in_flight = None
        if self.failure_reason is not None:
            raise ChannelError(f"it failed before ({self.failure_reason})")
        while self._unread_sizes:
            self._channel.receive(self._unread_sizes.pop(0))
        self._channel.next_request()

    def _validate_reply(
        self, answer: Mapping[str, Any], num_tokens: int, kv_layers: frozenset[int], hidden_layers: frozenset[int]
    ) -> dict[tuple[int, str], tuple[int, ...]]:
        """What will come, in order: layer and kind, shape. Anything but what was asked for breaks the link."""
        model_info, pool = self._engine.model_info, self._engine.core.cache_manager.pool
        expected = {
            (layer, kind): (num_tokens, *tensor.shape[1:])
            for layer in range(model_info.layers)
            for kind, tensor in pool.tensors(layer).items()
            if layer in (hidden_layers if kind == "inputs" else kv_layers)
        }
        try:
            given = {(int(layer), str(kind)): tuple(map(int, shape)) for layer, kind, shape in answer["tensors"]}
            sound = (
                len(given) == len(answer["tensors"])
                and answer["tokens"] == num_tokens
                and answer["dtype"] == str(model_info.dtype)
            )
            sound &= isinstance(answer["start"], int) and 0 <= answer["start"] < model_info.max_positions
        except (KeyError, TypeError, ValueError, OverflowError):
            given, sound = {}, False
        some = {what: shape for what, shape in expected.items() if what[1] != "inputs"}
        if (
            not sound
            or not some.items() <= given.items() <= expected.items()
            or list(given) != sorted(given, key=_tensor_order)
        ):
            self.failure_reason = "it sends other shapes than were asked for"
            raise ChannelError(self.failure_reason)
        return given

    def _make_layer_loader(
        self, expected: Mapping[tuple[int, str], tuple[int, ...]], slots: Tensor
    ) -> Callable[[int], None]:
        pool, size = self._engine.core.cache_manager.pool, self._engine.model_info.dtype.itemsize
        self._unread_sizes = [torch.Size(shape).numel() * size for shape in expected.values()]

        def copy_layer(layer: int) -> None:
            try:
                for (at, kind), shape in expected.items():
                    if at == layer:
                        raw = self._channel.receive(self._unread_sizes[0])
                        self._unread_sizes.pop(0)
                        target = pool.tensors(layer)[kind]
                        target[slots] = raw.view(target.dtype).view(shape).to(target.device)
            except ChannelError as exc:
                self.failure_reason = str(exc)
                raise

        return copy_layer


def _pending_context_hash(message: Message) -> str:
    """The name of a context whose call is not submitted yet."""
    lengths = [parent.length for parent in message.parents]
    placed, start = resolve_offsets(lengths, message._request.offsets, message._request.new_offset)
    places = zip(message.parents, placed, strict=True)
    fixed = None if message._core.hf_model.model_info.supports_shift else start
    return context_hash_of(
        message._request.prompt, [(context_hash(unwrap_slice(p)), p, at - start) for p, at in places], fixed
    )


def _tensor_order(tensor_id: tuple[int, str]) -> tuple[int, int]:
    return tensor_id[0], ("keys", "values", "inputs").index(tensor_id[1])
