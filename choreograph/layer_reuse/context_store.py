"""Contexts by content: what every model encoded of them, layer by layer (DroidSpeak, section 4.5).

A context is a message with all that it sees. Its name is a hash of tokens and places alone, so that sender and receiver
agree on it without knowing each other; what a model encoded of it is found by name, model and layer.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..engine.cross_model import LayerPattern
from ..engine.engine import Engine
from ..engine.kv_export import resident
from ..engine.message import Message, MessageSlice, unwrap_slice
from ..errors import InvalidRequestError
from ..kv_cache.entry import KVEntry
from ..kv_cache.pool import LayerKeyValues
from ..utils import close_after

if TYPE_CHECKING:
    from torch import Tensor


def context_hash(message: Message) -> str:
    """Names a context: its tokens, what it sees, and where that stands relative to it; where it stands itself, for
    models whose encodings cannot be moved. No model is part of it."""
    names: dict[int, str] = {}
    fixed = not message._core.hf_model.model_info.supports_shift
    waiting = [message.imported_from or message]
    while waiting:
        made = waiting[-1]
        parents = [unwrap_slice(p).imported_from or unwrap_slice(p) for p in made.parents]
        missing = [parent for parent in parents if parent.id not in names]
        if missing:
            waiting += missing
            continue
        places = zip(parents, made.parents, made.offsets, strict=True)
        seen = [(names[parent.id], given, at - made.position) for parent, given, at in places]
        names[waiting.pop().id] = context_hash_of(made.tokens, seen, made.position if fixed else None)
    return names[(message.imported_from or message).id]


def context_hash_of(
    tokens: Sequence[int], parents: Iterable[tuple[str, Message | MessageSlice, int]], start: int | None = None
) -> str:
    """The same of parts. seen: of each parent its name, itself, and where it stands relative to the first token. start:
    where that one stands, if it matters."""
    digest = hashlib.sha256(b"context" if start is None else b"context" + struct.pack("<q", start))
    for name, parent, at in parents:
        cut = (parent.start, parent.stop) if isinstance(parent, MessageSlice) else (0, parent.length)
        digest.update(name.encode() + struct.pack("<3q", *cut, at))
    digest.update(struct.pack(f"<{len(tokens)}q", *tokens))
    return digest.hexdigest()


class ContextStore:
    """Contexts of one client of an engine, kept until they are forgotten, wherever the cache keeps them."""

    def __init__(self, engine: Engine, *, client_id: str = "default") -> None:
        self._engine = engine
        self._session = engine.session(client_id=client_id)
        self._messages: dict[tuple[str, str], Message] = {}

    def __enter__(self) -> "ContextStore":
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, *_: object) -> None:
        close_after(self.close, exc)

    def close(self) -> None:
        """Forgets everything."""
        self._session.close()
        self._messages.clear()

    def store_kv(self, context: Message) -> str:
        """Keeps what its model encoded of a context; returns the context's name. Waits until it is encoded. Raises
        InvalidRequestError for one that was not computed whole, with all that it sees, by the model that it
        is filed under."""
        self._check_fully_computed(context)
        name = context_hash(context)
        if (name, context.model) not in self._messages:
            self._messages[name, context.model] = self._session.import_message(context)
        return name

    def store_hidden(self, context: Message) -> tuple[int, ...]:
        """Keeps it likewise, and tells for which layers there is what came into them: those that `Engine.enable_layer_reuse` named
        before the context was encoded. Raises InvalidRequestError where there are none."""
        self._check_fully_computed(context)
        layers = tuple(sorted(context._request.entry.cached_hidden_layers))
        if not layers:
            raise InvalidRequestError(
                f"message {context.id}: no inputs of layers were kept; call engine.enable_layer_reuse(...) before it is encoded"
            )
        self.store_kv(context)
        return layers

    def _check_fully_computed(self, context: Message) -> None:
        """Encoded, and by one model alone: under its name nothing else may be found."""
        if context._request.mode != "choreographed":
            raise InvalidRequestError(
                f"message {context.id} was computed in {context._request.mode} mode, where encodings belong to whole "
                "prompts: store one of a choreographed session"
            )
        if context.computed_layers is not None:
            raise InvalidRequestError(
                f"message {context.id} was computed in some layers only: store what it was made from"
            )
        family, own = self._engine.core.model_set, context.wait_encoded()._request.entry
        waiting, seen = [own], {own.id}
        while waiting:
            made = waiting.pop()
            if made.computed_layers is not None or family.fingerprint(made.model) != family.fingerprint(context.model):
                raise InvalidRequestError(
                    f"message {context.id} sees what {context.model!r} did not compute, or in some layers only: "
                    "store one that was made with kv_reuse='recompute'"
                )
            new = {kv_slice.entry.id: kv_slice.entry for kv_slice in made.context if kv_slice.entry.id not in seen}
            waiting += new.values()
            seen |= new.keys()

    def models(self, name: str) -> tuple[str, ...]:
        """Who has encoded a context."""
        return tuple(model for known, model in self._messages if known == name)

    def context(self, name: str, model: str) -> Message:
        """The context as a model encoded it, as a message of the store's own session. Raises
        InvalidRequestError if unknown."""
        try:
            return self._messages[name, model]
        except KeyError:
            known = self.models(name)
            raise InvalidRequestError(
                f"context {name[:12]}: {model!r} has not encoded it; {known or 'nobody'} has"
            ) from None

    def fetch_kv(self, name: str, model: str, layer: int) -> LayerKeyValues:
        """Keys, rotated to where the context was encoded, and values of one layer: (T, G, D) each, in host memory."""
        message = self.context(name, model)
        with self._engine.core.lock, resident(self._engine.core, message._request) as entry:
            self._check_layer(layer)
            if layer in entry.missing_layers:
                raise InvalidRequestError(f"context {name[:12]} came without layer {layer}")
            return self._engine.core.cache_manager.pool.export_layer(layer, entry.slots)

    def fetch_hidden(self, name: str, model: str, layer: int) -> "Tensor":
        """What came into one layer, (T, E), in host memory. Raises InvalidRequestError where it was not kept."""
        message = self.context(name, model)
        with self._engine.core.lock, resident(self._engine.core, message._request) as entry:
            self._check_layer(layer)
            if layer not in entry.cached_hidden_layers:
                raise InvalidRequestError(
                    f"context {name[:12]}: kept are inputs of layers {sorted(entry.cached_hidden_layers)}"
                )
            return self._engine.core.cache_manager.pool.hidden[layer][entry.slots].cpu()

    def partial_prefill(self, pattern: LayerPattern, name: str, *, model: str, sender: str) -> Message:
        """The context for another model, which computes the pattern's layers of what the sender encoded."""
        return self._session.partial_prefill(self.context(name, sender), pattern, model=model)

    def remove(self, name: str) -> None:
        """Releases what all models encoded of a context."""
        for model in self.models(name):
            self._messages.pop((name, model)).release()

    def num_bytes(self) -> dict[str, int]:
        """Of everything that is kept, by model: what its keys, values and inputs take. What a receiver takes over from
        a sender counts with the sender."""
        pool, result = self._engine.core.cache_manager.pool, dict[str, int]()
        seen: dict[int, tuple[str, KVEntry]] = {}
        for message in self._session.messages:
            if message._request.entry is not None:
                seen.setdefault(message._request.entry.id, (message.model, message._request.entry))
        for model, entry in seen.values():
            layers = range(len(pool.keys)) if entry.computed_layers is None else entry.computed_layers
            for layer in layers:
                for kind, tensor in pool.tensors(layer).items():
                    if kind != "inputs" or layer in entry.cached_hidden_layers:
                        size = tensor[0].numel() * tensor.element_size() * len(entry.tokens)
                        result[model] = result.get(model, 0) + size
        return result

    def _check_layer(self, layer: int) -> None:
        layers = self._engine.model_info.layers
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < layers:
            raise InvalidRequestError(f"layer={layer!r}: the model has layers 0 to {layers - 1}")
