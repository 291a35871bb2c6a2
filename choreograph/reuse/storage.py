"""Contexts by content: what every model encoded of them, layer by layer (DroidSpeak, section 4.5).

A context is a message with all that it sees. Its name is a hash of tokens and places alone, so that sender and receiver
agree on it without knowing each other; what a model encoded of it is found by name, model and layer.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..core import Engine
from ..engine.copies import on_device
from ..errors import CallError
from ..kv.arena import Layer
from ..kv.encoding import Encoding
from ..message import Message, Part, whole
from ..pattern import Pattern
from ..spite import close_behind

if TYPE_CHECKING:
    from torch import Tensor


def content_name(message: Message) -> str:
    """Names a context: its tokens, what it sees, and where that stands relative to it; where it stands itself, for
    models whose encodings cannot be moved. No model is part of it."""
    names: dict[int, str] = {}
    fixed = not message._runner.adapter.facts.movable
    waiting = [message.origin or message]
    while waiting:
        made = waiting[-1]
        parents = [whole(p).origin or whole(p) for p in made.parents]
        missing = [parent for parent in parents if parent.id not in names]
        if missing:
            waiting += missing
            continue
        places = zip(parents, made.parents, made.offsets, strict=True)
        seen = [(names[parent.id], given, at - made.start) for parent, given, at in places]
        names[waiting.pop().id] = name_of(made.tokens, seen, made.start if fixed else None)
    return names[(message.origin or message).id]


def name_of(tokens: Sequence[int], seen: Iterable[tuple[str, Message | Part, int]], start: int | None = None) -> str:
    """The same of parts. seen: of each parent its name, itself, and where it stands relative to the first token. start:
    where that one stands, if it matters."""
    digest = hashlib.sha256(b"context" if start is None else b"context" + struct.pack("<q", start))
    for name, parent, at in seen:
        cut = (parent.first, parent.last) if isinstance(parent, Part) else (0, parent.length)
        digest.update(name.encode() + struct.pack("<3q", *cut, at))
    digest.update(struct.pack(f"<{len(tokens)}q", *tokens))
    return digest.hexdigest()


class ContextStore:
    """Contexts of one client of an engine, kept until they are forgotten, wherever the cache keeps them."""

    def __init__(self, engine: Engine, *, client_id: str = "default") -> None:
        self._engine = engine
        self._session = engine.session(client_id=client_id)
        self._kept: dict[tuple[str, str], Message] = {}

    def __enter__(self) -> "ContextStore":
        return self

    def __exit__(self, kind: object, problem: BaseException | None, *_: object) -> None:
        close_behind(self.close, problem)

    def close(self) -> None:
        """Forgets everything."""
        self._session.close()
        self._kept.clear()

    def store_kv(self, context: Message) -> str:
        """Keeps what its model encoded of a context; returns the context's name. Waits until it is encoded. Raises
        CallError for one that was not computed whole, with all that it sees, by the model that it is filed under."""
        self._check_own(context)
        name = content_name(context)
        if (name, context.model) not in self._kept:
            self._kept[name, context.model] = self._session.borrow(context)
        return name

    def store_e(self, context: Message) -> tuple[int, ...]:
        """Keeps it likewise, and tells for which layers there is what came into them: those that `Engine.share` named
        before the context was encoded. Raises CallError where there are none."""
        self._check_own(context)
        layers = tuple(sorted(context._call.work.inputs))
        if not layers:
            raise CallError(
                f"message {context.id}: no inputs of layers were kept; call engine.share(...) before it is encoded"
            )
        self.store_kv(context)
        return layers

    def _check_own(self, context: Message) -> None:
        """Encoded, and by one model alone: under its name nothing else may be found."""
        if context._call.mode != "choreographed":
            raise CallError(
                f"message {context.id} was computed in {context._call.mode} mode, where encodings belong to whole "
                "prompts: store one of a choreographed session"
            )
        if context.layers is not None:
            raise CallError(f"message {context.id} was computed in some layers only: store what it was made from")
        family, own = self._engine.runner.family, context.encode()._call.work
        waiting, seen = [own], {own.id}
        while waiting:
            made = waiting.pop()
            if made.layers is not None or family.fingerprint(made.model) != family.fingerprint(context.model):
                raise CallError(
                    f"message {context.id} sees what {context.model!r} did not compute, or in some layers only: "
                    "store one that was made with share='recompute'"
                )
            new = {sight.encoding.id: sight.encoding for sight in made.context if sight.encoding.id not in seen}
            waiting += new.values()
            seen |= new.keys()

    def models(self, name: str) -> tuple[str, ...]:
        """Who has encoded a context."""
        return tuple(model for known, model in self._kept if known == name)

    def context(self, name: str, model: str) -> Message:
        """The context as a model encoded it, as a message of the store's own session. Raises CallError if unknown."""
        try:
            return self._kept[name, model]
        except KeyError:
            known = self.models(name)
            raise CallError(f"context {name[:12]}: {model!r} has not encoded it; {known or 'nobody'} has") from None

    def fetch_kv(self, name: str, model: str, layer: int) -> Layer:
        """Keys, rotated to where the context was encoded, and values of one layer: (T, G, D) each, in host memory."""
        message = self.context(name, model)
        with self._engine.runner.lock, on_device(self._engine.runner, message._call) as encoding:
            self._check_layer(layer)
            if layer in encoding.absent:
                raise CallError(f"context {name[:12]} came without layer {layer}")
            return self._engine.runner.store.arena.read_layer(layer, encoding.slots)

    def fetch_e(self, name: str, model: str, layer: int) -> "Tensor":
        """What came into one layer, (T, E), in host memory. Raises CallError where it was not kept."""
        message = self.context(name, model)
        with self._engine.runner.lock, on_device(self._engine.runner, message._call) as encoding:
            self._check_layer(layer)
            if layer not in encoding.inputs:
                raise CallError(f"context {name[:12]}: kept are inputs of layers {sorted(encoding.inputs)}")
            return self._engine.runner.store.arena.inputs[layer][encoding.slots].cpu()

    def partial_prefill(self, pattern: Pattern, name: str, *, model: str, sender: str) -> Message:
        """The context for another model, which computes the pattern's layers of what the sender encoded."""
        return self._session.partial_prefill(self.context(name, sender), pattern, model=model)

    def forget(self, name: str) -> None:
        """Releases what all models encoded of a context."""
        for model in self.models(name):
            self._kept.pop((name, model)).release()

    def bytes(self) -> dict[str, int]:
        """Of everything that is kept, by model: what its keys, values and inputs take. What a receiver takes over from
        a sender counts with the sender."""
        arena, found = self._engine.runner.store.arena, dict[str, int]()
        seen: dict[int, tuple[str, Encoding]] = {}
        for message in self._session.messages:
            if message._call.encoding is not None:
                seen.setdefault(message._call.work.id, (message.model, message._call.work))
        for model, encoding in seen.values():
            layers = range(len(arena.keys)) if encoding.layers is None else encoding.layers
            for layer in layers:
                for kind, tensor in arena.tensors(layer).items():
                    if kind != "inputs" or layer in encoding.inputs:
                        size = tensor[0].numel() * tensor.element_size() * len(encoding.tokens)
                        found[model] = found.get(model, 0) + size
        return found

    def _check_layer(self, layer: int) -> None:
        layers = self._engine.facts.layers
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < layers:
            raise CallError(f"layer={layer!r}: the model has layers 0 to {layers - 1}")
