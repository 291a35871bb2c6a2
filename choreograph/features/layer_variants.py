"""Messages of which a model computes some layers and reuses the others (DroidSpeak §4.2)."""

from collections.abc import Callable, Sequence
from typing import Any

from ..context.feature import RequestDraft
from ..errors import InvalidRequestError
from ..layer_pattern import LayerPattern
from ..messages.handle import MessageHandle, MessageSlice, Parent, unwrap_slice
from ..request.request import Reencoding, RequestState
from .guard import RequestLabels, copy_labels, labels_of
from .other_models import OtherModels, RemoteContext, RemoteSource


def with_layers(session: Any, message: MessageHandle, model: str, pattern: LayerPattern) -> MessageHandle:
    """Return a variant that recomputes these layers, also of the context."""
    if isinstance(message, MessageSlice):
        raise InvalidRequestError(f"message {message.id} is a slice: give the complete message, and slice the result")
    session.check_parents([message])
    if session.mode != "choreographed":
        raise InvalidRequestError(f"mode={session.mode!r} has no partial prefill: use mode='choreographed'")
    if message.model == model:
        raise InvalidRequestError(f"message {message.id} was computed by {model!r} itself: give another model=")
    pattern.check(session.core.hf_model.model_info.layers)
    return unwrap_slice(_feature(session).rule(session, model, pattern).ensure(message))


def prefill_layers(
    session: Any,
    message: MessageHandle,
    parents: Sequence[Parent],
    offsets: Sequence[int | None] | None,
    new_offset: int | None,
    *,
    priority: int = 0,
) -> MessageHandle:
    """Prefill another model's message in a context, in some layers.

    These are of the pair's pattern. The other layers are reused as they are: they saw the message's own context.
    """
    feature = _feature(session)
    pattern = feature.fixed_pattern(session.model, message.model, (message.imported_from or message)._request)
    draft: RequestDraft = session.draft_copy(
        message,
        tuple(parents),
        offsets,
        new_offset,
        model=session.model,
        priority=priority,
        keeps_positions=False,
        is_call=True,
    )
    assert draft.request.reencoding is not None
    own, source = labels_of(draft.request), labels_of(draft.request.reencoding.source)
    draft.request.extend(RequestLabels(own.text | source.text, own.effective))
    feature.set_pattern(draft.request, message.model, pattern)
    (variant,) = session.submit([draft])
    assert isinstance(variant, MessageHandle)
    return variant


def restrict_layers(
    session: Any,
    message: MessageHandle,
    variant: MessageHandle,
    pattern: LayerPattern,
    below: MessageHandle | None = None,
) -> MessageHandle:
    """Return a variant that requests use in the pattern's layers only.

    In the other layers they attend to `below`, an earlier result of this function for other
    layers, or to the message itself. Computes only the variant: it evaluates a pattern without
    computing the message again.
    """
    copy = variant.wait_encoded()._request.reencoding
    if (
        copy is None
        or copy.source is not message._request
        or not (copy.layers is None or pattern.layers <= copy.layers)
    ):
        raise InvalidRequestError(
            f"message {variant.id} is no variant of {message.id} with layers {pattern}: use what partial_prefill returned"
        )
    if not pattern.layers:
        return below or message
    draft: RequestDraft = session.bare_draft([], variant.parents, model=variant.model)
    request, restricted = draft.request, draft.message
    request.reencoding, request.position = (
        Reencoding((below or message)._request, layers=pattern.layers),
        variant.position,
    )
    if below is not None and below is not message:
        restricted.variants["below"] = below  # released with it
    copy_labels(message._request, request)
    session.attach(draft, variant._request.entry)
    assert isinstance(restricted, MessageHandle)
    return restricted


def submit_remote(
    session: Any,
    draft: RequestDraft,
    sender: str,
    make_remote: Callable[[Any], RemoteContext],
    pattern: LayerPattern | None,
) -> MessageHandle:
    """Submit a prefill that reuses KV of a model in another process.

    Args:
        make_remote: called with the handle of the sender's message, which this one releases.
        pattern: layers to recompute; None to select them when the prefill is admitted.
    """
    request, message = draft.request, draft.message
    session.core.features.submit(draft)  # first: the sender is asked for what the reader may see
    context: RequestDraft = session.bare_draft(
        list(request.prompt), message.parents, request.offsets, request.new_offset, model=sender
    )
    copy_labels(request, context.request)
    context.request.state = RequestState.DONE  # it is never queued: `fetch` attaches an entry
    context.request.extend(RemoteSource(make_remote(context.message)))
    request.reencoding = Reencoding(context.request, keeps_positions=False)
    _feature(session).set_pattern(request, sender, pattern)
    session.queue([draft])
    message.variants["sent"] = context.message
    assert isinstance(message, MessageHandle)
    return message


def _feature(session: Any) -> OtherModels:
    feature: OtherModels = session.core.features.get(OtherModels)
    return feature
