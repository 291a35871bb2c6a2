"""Encodings from a model in another process (DroidSpeak, section 4.5), through `torch.distributed`.

    sender's process                          receiver's process
    store = ContextStore(engine)              link = Link(engine, peer=0, name="writer")
    store.store_e(session.prefill(text))      engine.share("base", "writer", pattern=[0, 4, 12])
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

from ..arguments import check_shares
from ..core import Engine
from ..engine.copies import give_up, on_device, receive, reserve
from ..engine.modes import resolve_offsets
from ..errors import CacheFull, CallError, ConfigError, ForeignMessage, ModelError
from ..kv.tiers import Work
from ..kv.transfers import Transfer
from ..message import Message, Part, whole
from ..pattern import Pattern, read_pattern
from ..session import Offsets, Session, Text
from .storage import ContextStore, content_name, name_of

LONGEST = 1 << 20  # bytes of a request or an answer; tensors are not part of either
VERSION = 1


class Broken(Exception):
    """The other side did not do what was agreed."""


def tag_of(request: int, number: int) -> int:
    return request % (1 << 16) * (1 << 14) + number


class Wire:
    """JSON objects and tensors between two processes of a group. seconds: how long one of them may take to come.

    Everything carries the number of its request, so what nobody fetched of one is never taken for the next.
    """

    def __init__(self, peer: int, group: Any = None, seconds: float | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("no process group: call torch.distributed.init_process_group(...) first")
        self._peer = peer
        self._group = group
        self._limit = None if seconds is None else timedelta(seconds=seconds)
        self._request = 0
        self._sent = self._heard = 0  # of this request

    def begin(self) -> None:
        """The next request."""
        self._request += 1
        self._sent = self._heard = 0

    def send(self, tensor: Tensor) -> None:
        raw, tag = tensor.contiguous().view(-1).view(torch.uint8), tag_of(self._request, self._sent)
        self._sent += 1
        self._through(lambda: dist.isend(raw, self._peer, group=self._group, tag=tag))

    def receive(self, size: int) -> Tensor:
        """So many bytes."""
        buffer, tag = torch.zeros(size, dtype=torch.uint8), tag_of(self._request, self._heard)
        self._heard += 1
        self._through(lambda: dist.irecv(buffer, self._peer, group=self._group, tag=tag))
        return buffer

    def _through(self, begin: Callable[[], Any]) -> None:
        """A peer that is gone is noticed when a transfer begins or when it is waited for, as it happens."""
        try:
            work = begin()
            done = work.wait() if self._limit is None else work.wait(self._limit)
        except RuntimeError as problem:  # the library raises nothing narrower
            raise Broken(str(problem).splitlines()[0]) from problem
        if done is False:
            raise Broken("timed out")

    def say(self, message: Mapping[str, Any]) -> None:
        raw = json.dumps(message).encode()
        self.send(torch.tensor([len(raw)], dtype=torch.int64))
        self.send(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    def hear(self) -> dict[str, Any]:
        size = int(self.receive(8).view(torch.int64).item())
        if not 0 < size <= LONGEST:
            raise Broken(f"a message of {size} bytes")
        try:
            found = json.loads(self.receive(size).numpy().tobytes())
        except (ValueError, RecursionError) as problem:
            raise Broken(f"not JSON: {problem}") from problem
        if not isinstance(found, dict):
            raise Broken(f"{type(found).__name__}, not an object")
        return found


# -- the sender's side ----------------------------------------------------------------------------------------


def serve(engine: Engine, store: ContextStore, peer: int, *, group: Any = None, model: str = "base") -> int:
    """Answers one receiver until it says that it is done, or is gone; returns how many contexts were sent. Waits for a
    question as long as the process group does."""
    engine.runner.adapter.refuse_ranks("sending encodings")
    wire, sent = Wire(peer, group), 0
    while True:
        try:
            wire.begin()
            request = wire.hear()
            if request.get("ask") == "facts":
                wire.say(facts_of(engine, model))
            elif request.get("ask") == "context":
                sent += _send_context(wire, engine, store, model, request)
            else:
                return sent
        except Broken:
            return sent


def _send_context(wire: Wire, engine: Engine, store: ContextStore, model: str, request: Mapping[str, Any]) -> bool:
    try:
        keys, inputs = ({int(layer) for layer in request[name]} for name in ("keys", "inputs"))
        message = store.context(str(request["name"]), model)
        start, tensors = _layers_of(engine, message, keys, inputs)
    except (CallError, CacheFull, KeyError, TypeError, ValueError, OverflowError) as problem:
        wire.say({"missing": str(problem)})
        return False
    sizes = [[layer, kind, list(tensor.shape)] for layer, kind, tensor in tensors]
    wire.say({"tokens": message.length, "start": start, "dtype": str(engine.facts.dtype), "tensors": sizes})
    for _, _, tensor in tensors:
        wire.send(tensor)
    return True


def _layers_of(
    engine: Engine, message: Message, keys: set[int], inputs: set[int]
) -> tuple[int, list[tuple[int, str, Tensor]]]:
    """Where a context's home is; keys and values of some layers, and inputs of some, as far as they were kept."""
    runner = engine.runner
    with runner.lock, on_device(runner, message._call) as encoding:
        arena, slots = runner.store.arena, torch.tensor(encoding.slots)
        return encoding.start, [
            (layer, kind, tensor[slots].cpu())
            for layer in range(len(arena.keys))
            for kind, tensor in arena.tensors(layer).items()
            if layer in (inputs & encoding.inputs if kind == "inputs" else keys - encoding.absent)
        ]


def facts_of(engine: Engine, model: str) -> dict[str, Any]:
    """What has to be equal on both sides, and the name of the weights."""
    facts, config = engine.facts, engine.runner.adapter.model.config.get_text_config()
    tokenizer = engine.tokenizer
    vocabulary = None if tokenizer is None else sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return {
        "version": VERSION,
        "fingerprint": engine.runner.family.fingerprint(
            model
        ),  # a checksum of all weights takes longer than an answer may
        "architecture": config.model_type,
        "layers": facts.layers,
        "key-value heads": facts.kv_heads,
        "query heads": facts.query_heads,
        "head size": facts.head_dim,
        "hidden size": config.hidden_size,
        "vocabulary": facts.vocab_size,
        "type": str(facts.dtype),
        "attention of the layers": _digest([asdict(kind) for kind in facts.kinds]),
        "tokenizer": None if vocabulary is None else _digest(vocabulary),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


# -- the receiver's side --------------------------------------------------------------------------------------


class Link:
    """A sender in another process. One that has failed once is not asked again: what it says could be anything.

    name: how `Engine.share` and events call its model. seconds: how long an answer, or a layer, may take.
    """

    def __init__(
        self, engine: Engine, peer: int, *, name: str = "sender", seconds: float = 5.0, group: Any = None
    ) -> None:
        """Raises ModelError where there is no answer, or where the models are not of one family."""
        engine.runner.adapter.refuse_ranks("a sender elsewhere")
        self._engine = engine
        self.name = name
        self.broken: str | None = None
        self._wire = Wire(peer, group, seconds)
        self._turn = threading.Lock()
        self._coming: Transfer | None = None
        self._left: list[int] = []  # bytes of every tensor that is still to come
        family = engine.runner.family
        if name not in family.elsewhere:
            family.check_new(name)
        self._wire.begin()
        try:
            self._wire.say({"ask": "facts"})
            theirs = self._wire.hear()
        except Broken as problem:
            raise ModelError(f"sender {name!r} does not answer: {problem}") from None
        mine = facts_of(engine, "base")
        found = [f"{k}: {mine[k]} and {theirs.get(k)}" for k in mine if k != "fingerprint" and mine[k] != theirs.get(k)]
        if found or not isinstance(theirs.get("fingerprint"), str):
            self.close()  # or it waits for another question
            raise ModelError(f"sender {name!r} is not of {engine.facts.name}'s family: {'; '.join(found)}")
        family.elsewhere[name] = f"{theirs['fingerprint']}@elsewhere"

    def close(self) -> None:
        """Tells the sender that nothing more is wanted, when all that was asked for has come."""
        with self._turn:
            try:
                self._next_request()
                self._wire.say({"ask": "nothing"})
            except Broken as problem:
                self.broken = self.broken or str(problem)
            self.broken = self.broken or "closed"

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def partial_prefill(
        self,
        session: Session,
        tokens: Text,
        pattern: Pattern | Sequence[int],
        parents: Iterable[Message | Part] = (),
        offsets: Offsets = None,
        new_offset: int | None = None,
    ) -> Message:
        """`Session.prefill` by the engine's own model, which computes the pattern's layers alone where the sender has
        encoded the same context. Costs one question to the sender; the layers come while others compute. Completes the
        parents first."""
        check_shares(session.mode)
        if session._runner is not self._engine.runner:
            raise ForeignMessage("a session of another engine: use one of the engine that the link was made for")
        pattern = read_pattern(pattern).check(self._engine.facts.layers)
        arena, plain = self._engine.runner.store.arena, session._prefill_call(tokens, parents, offsets, new_offset)
        everything = frozenset(range(self._engine.facts.layers))
        if pattern.layers == everything:
            return session._submit([plain])[0]
        if not (pattern.layers <= arena.band_layers and pattern.transitions <= arena.inputs.keys()):
            raise ConfigError(f"pattern {pattern}: call engine.share('base', {self.name!r}, pattern=...) first")
        for parent in plain.parents:  # what comes is hung behind what is there
            whole(parent).encode()
        with self._turn:
            context = self._fetch(session, plain, everything - pattern.layers, pattern.transitions)
        if context is None:
            return session._submit([plain])[0]
        return session.versions.among(context, plain, pattern)

    def _fetch(self, session: Session, plain: Message, keys: frozenset[int], inputs: frozenset[int]) -> Message | None:
        """The context as the sender encoded it, its layers on their way; None where there is nothing to wait for."""
        runner, context = self._engine.runner, session.versions.elsewhere(plain, self.name)
        encoding = reserve(runner, context._call, lambda known: not known.absent & keys and inputs <= known.inputs)
        if encoding is None:
            if not context._call.ended:
                self._say_why(plain, "there is no room for it now")
            return context if context._call.ended else None
        try:
            asked = {"ask": "context", "name": _name(plain), "keys": sorted(keys), "inputs": sorted(inputs)}
            answer = self._ask(asked)
            expected = self._expected(answer, len(plain._call.prompt), keys, inputs)
        except BaseException as problem:
            give_up(runner, context._call, encoding)
            if not isinstance(problem, Broken):
                raise
            self._say_why(plain, str(problem))
            return None
        come = frozenset(layer for layer, kind in expected if kind == "inputs")
        absent = frozenset(range(self._engine.facts.layers)) - keys
        work = Work(self._receiver(expected, torch.tensor(encoding.slots)))
        receive(runner, context._call, encoding, int(answer["start"]), work, inputs=come, absent=absent)
        self._coming = context._call.work.moving
        return context

    def _say_why(self, plain: Message, why: str) -> None:
        self._engine.runner.events.write("recomputed", call=plain.id, why=f"sender {self.name!r}: {why}")

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._next_request()
            self._wire.say(request)
            answer = self._wire.hear()
        except Broken as problem:
            self.broken = self.broken or str(problem)
            raise
        if "missing" in answer:
            raise Broken(str(answer["missing"])[:200])
        return answer

    def _next_request(self) -> None:
        """When all of the last one has come: there is one wire. What nobody waits for now is read and forgotten."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        if self.broken is not None:
            raise Broken(f"it failed before ({self.broken})")
        while self._left:
            self._wire.receive(self._left.pop(0))
        self._wire.begin()

    def _expected(
        self, answer: Mapping[str, Any], tokens: int, keys: frozenset[int], inputs: frozenset[int]
    ) -> dict[tuple[int, str], tuple[int, ...]]:
        """What will come, in order: layer and kind, shape. Anything but what was asked for breaks the link."""
        facts, arena = self._engine.facts, self._engine.runner.store.arena
        wanted = {
            (layer, kind): (tokens, *tensor.shape[1:])
            for layer in range(facts.layers)
            for kind, tensor in arena.tensors(layer).items()
            if layer in (inputs if kind == "inputs" else keys)
        }
        try:
            given = {(int(layer), str(kind)): tuple(map(int, shape)) for layer, kind, shape in answer["tensors"]}
            sound = (
                len(given) == len(answer["tensors"])
                and answer["tokens"] == tokens
                and answer["dtype"] == str(facts.dtype)
            )
            sound &= isinstance(answer["start"], int) and 0 <= answer["start"] < facts.max_positions
        except (KeyError, TypeError, ValueError, OverflowError):
            given, sound = {}, False
        some = {what: shape for what, shape in wanted.items() if what[1] != "inputs"}
        if not sound or not some.items() <= given.items() <= wanted.items() or list(given) != sorted(given, key=_order):
            self.broken = "it sends other shapes than were asked for"
            raise Broken(self.broken)
        return given

    def _receiver(self, expected: Mapping[tuple[int, str], tuple[int, ...]], slots: Tensor) -> Callable[[int], None]:
        arena, size = self._engine.runner.store.arena, self._engine.facts.dtype.itemsize
        self._left = [torch.Size(shape).numel() * size for shape in expected.values()]

        def copy_layer(layer: int) -> None:
            try:
                for (at, kind), shape in expected.items():
                    if at == layer:
                        raw = self._wire.receive(self._left[0])
                        self._left.pop(0)
                        target = arena.tensors(layer)[kind]
                        target[slots] = raw.view(target.dtype).view(shape).to(target.device)
            except Broken as problem:
                self.broken = str(problem)
                raise

        return copy_layer


def _name(plain: Message) -> str:
    """The name of a context whose call is not submitted yet."""
    lengths = [parent.length for parent in plain.parents]
    placed, start = resolve_offsets(lengths, plain._call.offsets, plain._call.new_offset)
    places = zip(plain.parents, placed, strict=True)
    fixed = None if plain._runner.adapter.facts.movable else start
    return name_of(plain._call.prompt, [(content_name(whole(p)), p, at - start) for p, at in places], fixed)


def _order(what: tuple[int, str]) -> tuple[int, int]:
    return what[0], ("keys", "values", "inputs").index(what[1])
