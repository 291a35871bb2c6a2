"""Store of KV entries by content hash, model and layer (DroidSpeak §4.5)."""

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..api.engine import Engine
from ..api.message import Message
from ..attention.int8_rows import to_float
from ..errors import InvalidRequestError
from ..kv_cache.entry import KVEntry
from ..kv_cache.pool import LayerKeyValues
from ..layer_pattern import LayerPattern
from ..messages.handle import MessageSlice, unwrap_slice
from ..messages.kv_export import resident

if TYPE_CHECKING:
    from torch import Tensor


def context_hash(message: Message) -> str:
    """Return a model-independent hash of a message and its context.

    Covers the tokens, the hashes of the parents and their relative positions; also the position of
    the message for models with learned positions, whose keys cannot be rotated.
    """
    includes_position = not message._core.hf_model.model_info.supports_shift
    hashes: dict[int, str] = {}  # by message id
    stack = [message.imported_from or message]
    while stack:
        current = stack[-1]
        parents = [unwrap_slice(parent).imported_from or unwrap_slice(parent) for parent in current.parents]
        missing = [parent for parent in parents if parent.id not in hashes]
        if missing:
            stack += missing
            continue
        position = current.position if includes_position else -1
        digest = hashlib.sha256(b"context" + struct.pack("<2q", position, len(parents)))  # the tokens are last
        for parent, visible, offset in zip(parents, current.parents, current.offsets, strict=True):
            start, stop = (visible.start, visible.stop) if isinstance(visible, MessageSlice) else (0, visible.length)
            digest.update(hashes[parent.id].encode() + struct.pack("<3q", start, stop, offset - current.position))
        digest.update(struct.pack(f"<{current.length}q", *current.tokens))
        hashes[stack.pop().id] = digest.hexdigest()
    return hashes[(message.imported_from or message).id]


class ContextStore:
    """KV cache entries of contexts, retained until removed.

    Methods have the paper's names, with `hidden` for its `e` (the E cache: input hidden states of a
    layer).

    Args:
        engine: the engine whose messages are stored; evicts and offloads them like all others.
        client_id: cache namespace, as in `Engine.session`.
    """

    def __init__(self, engine: Engine, *, client_id: str = "default") -> None:
        self._engine = engine
        self._session = engine.session(client_id=client_id)
        self._messages: dict[tuple[str, str], Message] = {}  # by context hash and model

    def __enter__(self) -> "ContextStore":
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, *_: object) -> None:
        self._session.__exit__(exc_type, exc)
        self._messages.clear()

    def close(self) -> None:
        """Remove all contexts."""
        self.__exit__(None, None)

    def store_kv(self, context: Message) -> str:
        """Store a context's keys and values once computed; return its hash.

        Raises:
            InvalidRequestError: if the context, or a message that it attends to, was not computed in all
                layers by the context's model.
        """
        self._check_fully_computed(context)
        name = context_hash(context)
        if (name, context.model) not in self._messages:
            self._messages[name, context.model] = self._session.import_message(context)
        return name

    def store_hidden(self, context: Message) -> tuple[int, ...]:
        """Store a context; return the layers whose input hidden states are cached.

        Stores keys and values like `store_kv`. The layers are those that `Engine.enable_layer_reuse`
        named before the context was computed.

        Raises:
            InvalidRequestError: as in `store_kv`, or if no input is cached.
        """
        self._check_fully_computed(context)
        layers = tuple(sorted(context._request.entry.layers.hidden))
        if not layers:
            raise InvalidRequestError(
                f"message {context.id} has no cached layer inputs: call engine.enable_layer_reuse(...) before it is "
                "computed"
            )
        self.store_kv(context)
        return layers

    def _check_fully_computed(self, context: Message) -> None:
        if context._request.mode != "choreographed":
            raise InvalidRequestError(
                f"message {context.id} was computed in {context._request.mode} mode, where KV entries belong to whole "
                "prompts: store a message of a choreographed session"
            )
        if context.computed_layers is not None:
            raise InvalidRequestError(
                f"message {context.id} was computed in some layers only: store the message that it is a variant of"
            )
        model_set = self._engine.core.model_set
        expected = model_set.fingerprint(context.model)
        queue, visited = [context.wait_encoded()._request.entry], set[int]()
        while queue:
            entry = queue.pop()
            if entry.id in visited:
                continue
            visited.add(entry.id)
            if entry.is_partial or model_set.fingerprint(entry.model) != expected:
                raise InvalidRequestError(
                    f"message {context.id} attends to KV that {context.model!r} did not compute in all layers: "
                    "store a message computed with kv_reuse='recompute'"
                )
            queue += entry.read_entries

    def models(self, name: str) -> tuple[str, ...]:
        """Return the models that have computed a context."""
        return tuple(model for stored, model in self._messages if stored == name)

    def context(self, name: str, model: str) -> Message:
        """Return the stored message of a context computed by `model`.

        Raises:
            InvalidRequestError: if no such context is stored.
        """
        try:
            return self._messages[name, model]
        except KeyError:
            models = self.models(name) or "no model"
            raise InvalidRequestError(
                f"context {name[:12]} is not computed by {model!r}, but by {models}: store it first"
            ) from None

    def fetch_kv(self, name: str, model: str, layer: int) -> LayerKeyValues:
        """Copy one layer's keys and values to host memory.

        Returns a (T, G, D) tensor each; the keys keep the rotation of their computed position.
        """
        with self._resident(name, model, layer) as entry:
            if layer in entry.layers.missing:
                raise InvalidRequestError(f"context {name[:12]} came without layer {layer}: ask for another one")
            keys, values = self._engine.core.cache_manager.pool.export_layer(layer, entry.slots)
            return to_float(keys), to_float(values)

    def fetch_hidden(self, name: str, model: str, layer: int) -> "Tensor":
        """Copy one layer's input hidden states, (T, E), to host memory.

        Raises:
            InvalidRequestError: if they are not cached.
        """
        with self._resident(name, model, layer) as entry:
            if layer not in entry.layers.hidden:
                raise InvalidRequestError(
                    f"context {name[:12]} has cached inputs of layers {sorted(entry.layers.hidden)}, not {layer}"
                )
            return self._engine.core.cache_manager.pool.hidden[layer][entry.slots].cpu()

    @contextmanager
    def _resident(self, name: str, model: str, layer: int) -> Iterator[KVEntry]:
        """Yield a context's entry, resident on the device inside the `with` block."""
        message, num_layers = self.context(name, model), self._engine.model_info.layers
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < num_layers:
            raise InvalidRequestError(f"layer={layer!r}: the model has layers 0 to {num_layers - 1}")
        with self._engine.core.lock, resident(self._engine.core, message._request) as entry:
            yield entry

    def partial_prefill(self, pattern: LayerPattern, name: str, *, model: str, sender: str) -> Message:
        """Prefill the sender's context with `model`, recomputing only the pattern's layers."""
        return self._session.partial_prefill(self.context(name, sender), pattern, model=model)

    def remove(self, name: str) -> None:
        """Release the stored messages of a context, for all models."""
        for model in self.models(name):
            self._messages.pop((name, model)).release()

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes stored per model: keys, values and layer inputs."""
        pool, result = self._engine.core.cache_manager.pool, dict[str, int]()
        entries: dict[int, tuple[str, KVEntry]] = {}  # by entry id: messages may share entries
        for message in self._session.messages:
            if message._request.entry is not None:
                entries.setdefault(message._request.entry.id, (message.model, message._request.entry))
        for model, entry in entries.values():
            for layer in range(len(pool.keys)) if entry.layers.computed is None else entry.layers.computed:
                for kind, tensor in pool.tensors(layer).items():
                    if kind != "inputs" or layer in entry.layers.hidden:
                        size = tensor[0].numel() * tensor.element_size() * len(entry.tokens)
                        result[model] = result.get(model, 0) + size
        return result
