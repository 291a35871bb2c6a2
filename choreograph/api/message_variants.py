"""Variants of messages by model (DroidSpeak §4.2), and imported messages."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import InvalidRequestError, MessageReleasedError, NotAMessageError, WrongSessionError
from ..features.cross_model import LayerPattern, RemoteContext
from ..features.guard import UNGUARDED
from ..kv_cache.entry import KVEntry
from ..kv_cache.pool import KVPool
from ..kv_cache.tiers import TransferOps
from ..request.request import Request, RequestState
from .kv_export import KVSnapshot, attach_entry, import_kv
from .message import Message, MessageSlice, Parent, VariantKind, unwrap_slice
from .validation import check_choreographed, check_parents

if TYPE_CHECKING:
    from .session import Session

ReencodeFn = Callable[[Message, tuple[Parent, ...]], Message]


class MessageVariants:
    """Variants of one session's messages, by model and layers."""

    def __init__(self, session: "Session") -> None:
        self._session, self._core = session, session._core

    def import_message(self, message: Message) -> Message:
        """Return a message of this session with another session's KV or text."""
        session = self._session
        if not isinstance(message, Message):
            raise NotAMessageError(f"{message!r} is not a message")
        original = message._request
        namespace = session._namespace(original.model)
        if message._core is not self._core or original.namespace.without_labels() != namespace:
            raise WrongSessionError(f"message {message.id} belongs to another engine or client: make it here")
        if original.released:
            raise MessageReleasedError(f"message {message.id} was released: keep it until its last use")
        if session.mode != "choreographed" or original.mode != "choreographed":
            return session.prefill(message.tokens, labels=original.text_labels or None)
        message.result()
        copy = session._build_request(message.tokens, (), None, message.position, model=original.model)
        copy.role, copy._request.origin = message.role, (original, 0)
        copy.imported_from, copy._request.position = message.imported_from or message, message.position
        if original.computed_layers is not None:  # can be recomputed as the original was
            copy._request.computed_layers, copy._request.source = original.computed_layers, original.source
            copy._request.parents, copy._request.parent_slices = original.parents, original.parent_slices
        session._guard.copy_labels(original, copy._request)
        attach_entry(self._core, copy._request, original.entry)
        session._register([copy])
        return copy

    def import_kv(self, message: Message, snapshot: KVSnapshot, *, check: bool) -> bool:
        """Complete a prefill from a snapshot; return False without capacity for it."""
        if self._session._guard.is_active:
            self._session._guard.apply([message])
        for parent in self.resolve_parents(message):
            unwrap_slice(parent).wait_encoded()
        is_imported = import_kv(self._core, message._request, snapshot, check=check)
        if is_imported:
            self._session._register([message])
        return is_imported

    def import_encoded(
        self, tokens: list[int], snapshot: KVSnapshot, load: Callable[[KVPool, KVEntry], TransferOps] | None = None
    ) -> Message | None:
        """Return a message with KV that another engine computed.

        Its context may be unknown here. Returns None without capacity for it. If it is evicted, it is computed
        again on its own.

        Args:
            load: as in `import_kv`.
        """
        message = self._session._build_prefill(tokens)
        if self._session._guard.is_active:
            self._session._guard.apply([message])
        # a prefill of equal tokens must not find it
        request = message._request
        request.namespace = replace(request.namespace, origin=snapshot.content_hash)
        if not import_kv(self._core, request, snapshot, check=False, any_context=True, load=load):
            return None
        self._session._register([message])
        return message

    def resolve_parents(self, message: Message) -> tuple[Parent, ...]:
        """Replace parents of other models by their variants for the message's model.

        Returns the parents to attend to; `message.parents` is unchanged. With kv_reuse="reuse" no
        parent is replaced.
        """
        model, kv_reuse = message.model, message.kv_reuse
        if kv_reuse == "reuse" or message._request.mode != "choreographed":
            return message.parents
        if kv_reuse == "partial":
            self._check_pairs(message, model)

        whole = LayerPattern.from_triplet(0, 0, self._core.hf_model.model_info.layers)

        def reencode(parent: Message, parents: tuple[Parent, ...]) -> Message:
            pattern: LayerPattern | None = whole
            if kv_reuse == "partial":
                pattern = self._core.cross_model_reuse.fixed_pattern(model, parent.model, parent._request)
            return self._reencode(parent, parents, model, pattern)

        resolved = tuple(p if p.model == model else _variant_for(model, kv_reuse, p, reencode) for p in message.parents)
        message._request.parents = tuple(unwrap_slice(parent)._request for parent in resolved)
        return resolved

    def _check_pairs(self, message: Message, model: str) -> None:
        """Check that layer reuse is enabled for all ancestors, before submitting any."""
        queue, checked = [unwrap_slice(p) for p in message.parents], set[int]()
        while queue:
            parent = queue.pop()
            if parent.id in checked or _find_variant(parent, model, "partial") is not None:
                continue
            checked.add(parent.id)
            self._core.cross_model_reuse.check_pair(model, parent.model)
            queue += [unwrap_slice(p) for p in (parent.imported_from or parent).parents]

    def with_layers(self, message: Message, model: str, pattern: LayerPattern) -> Message:
        """Return a variant that recomputes these layers, also of the context."""
        if isinstance(message, MessageSlice):
            raise InvalidRequestError(
                f"message {message.id} is a slice: give the complete message, and slice the result"
            )
        check_parents([message], self._core, self._session.id)
        check_choreographed(self._session.mode)
        num_layers = self._core.hf_model.model_info.layers
        if message.model == model:
            raise InvalidRequestError(f"message {message.id} was computed by {model!r} itself")
        pattern.check(num_layers)

        def reencode(parent: Message, parents: tuple[Parent, ...]) -> Message:
            return self._reencode(parent, parents, model, pattern)

        return unwrap_slice(_variant_for(model, pattern, message, reencode))

    def prefill_layers(
        self,
        message: Message,
        parents: Sequence[Parent],
        offsets: Sequence[int | None] | None,
        new_offset: int | None,
        *,
        priority: int = 0,
    ) -> Message:
        """Prefill another model's message in a context, in some layers.

        These are of the pair's pattern. The other layers are reused as they are: they saw the message's own context.
        """
        source = (message.imported_from or message)._request
        pattern = self._core.cross_model_reuse.fixed_pattern(self._session.model, message.model, source)
        tokens = list(source.tokens) if source.tokens_final else []
        variant = self._session._build_request(
            tokens, tuple(parents), offsets, new_offset, priority=priority, guard=UNGUARDED
        )
        variant.role, variant._request.source, variant._request.keeps_positions = message.role, source, False
        variant._request.text_labels |= source.text_labels
        self._session._guard.is_active |= bool(source.labels)
        self._set_pattern(variant._request, message.model, pattern)
        return self._session._submit([variant])[0]

    def restrict_layers(
        self, message: Message, variant: Message, pattern: LayerPattern, below: Message | None = None
    ) -> Message:
        """Return a variant that requests use in the pattern's layers only.

        In the other layers they attend to `below`, an earlier result of this method for other
        layers, or to the message itself. Computes only the variant: it evaluates a pattern without
        computing the message again.
        """
        computed_layers = variant.wait_encoded()._request.computed_layers
        if variant._request.source is not message._request or (
            computed_layers is not None and not pattern.layers <= computed_layers
        ):
            raise InvalidRequestError(f"message {variant.id} is not a variant of {message.id} with layers {pattern}")
        if not pattern.layers:
            return below or message
        restricted = self._session._build_request([], variant.parents, None, None, model=variant.model)
        restricted._request.source, restricted._request.position = (below or message)._request, variant.position
        if below is not None and below is not message:
            restricted.variants[variant.model, "below"] = below  # released with it
        restricted._request.computed_layers = pattern.layers
        self._session._guard.copy_labels(message._request, restricted._request)
        attach_entry(self._core, restricted._request, variant._request.entry)
        self._session._register([restricted])
        return restricted

    def submit_remote(
        self,
        message: Message,
        sender: str,
        make_remote: Callable[[Message], RemoteContext],
        pattern: LayerPattern | None,
    ) -> Message:
        """Submit a prefill that reuses KV of a model in another process.

        Args:
            make_remote: called with the handle of the sender's message, which this one releases.
            pattern: layers to recompute; None to select them when the prefill is admitted.
        """
        request = message._request
        context = self._session._build_request(
            list(request.prompt), message.parents, request.offsets, request.new_offset, model=sender
        )
        context._request.state = RequestState.DONE  # it is never queued: `fetch` attaches an entry
        context._request.remote = make_remote(context)
        request.source = context._request
        self._set_pattern(request, sender, pattern)
        self._session._submit([message])
        message.variants[sender, "sent"] = context
        return message

    def _set_pattern(self, request: Request, sender: str, pattern: LayerPattern | None) -> None:
        if pattern is None:
            request.selects_from = sender
        elif len(pattern.layers) < self._core.hf_model.model_info.layers:
            request.computed_layers = pattern.layers

    def _reencode(
        self, message: Message, parents: tuple[Parent, ...], model: str, pattern: LayerPattern | None
    ) -> Message:
        """Submit a prefill of the message by another model.

        A pattern of None is selected when the prefill is admitted.
        """
        if pattern is not None and not pattern.layers:
            return message
        variant = self._session._build_request([], parents, None, None, model=model)
        variant._request.source = (message.imported_from or message)._request
        variant._request.text_labels = message._request.text_labels
        variant.kv_reuse = "reuse"  # its parents are resolved already
        self._set_pattern(variant._request, message.model, pattern)
        return self._session._submit([variant])[0]


def _variant_for(model: str, kind: VariantKind, parent: Parent, reencode: ReencodeFn) -> Parent:
    """Return the parent, or its variant, for a model.

    Missing variants of the message and its ancestors are created with `reencode`, the oldest first.
    The model's own messages are returned unchanged.
    """
    stack = [unwrap_slice(parent)]
    while stack:
        message = stack[-1]
        parents = (message.imported_from or message).parents
        missing = [unwrap_slice(p) for p in parents if _find_variant(unwrap_slice(p), model, kind) is None]
        if _find_variant(message, model, kind) is not None:
            stack.pop()
        elif missing:
            stack += missing
        else:
            resolved = tuple(_variant_slice(p, model, kind) for p in parents)
            message.variants[model, kind] = reencode(message, resolved)
    return _variant_slice(parent, model, kind)


def _find_variant(message: Message, model: str, kind: VariantKind) -> Message | None:
    """Return an unreleased variant for the model, or None.

    A variant with all layers recomputed is preferred to a partial one.
    """
    kinds: tuple[VariantKind, ...] = ("recompute", kind) if kind == "partial" else (kind,)
    candidates = [message] if message.model == model else []
    candidates += [message.variants[model, key] for key in kinds if (model, key) in message.variants]
    return next((candidate for candidate in candidates if not candidate._request.released), None)


def _variant_slice(parent: Parent, model: str, kind: VariantKind) -> Parent:
    variant = _find_variant(unwrap_slice(parent), model, kind)
    assert variant is not None
    return MessageSlice(variant, parent.start, parent.stop) if isinstance(parent, MessageSlice) else variant
